"""Owns planning of steps that are formed as requests come: prompt chunks of some sequences beside decode rows of others.

Everything about experts, memory and hand-over is the planner's own. What differs is the shape of a step: each sequence has its own
context, and the step after is not known yet, so nothing is prefetched across a step's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.planner import Planner
from moesim.planner.residency import Deps
from moesim.schedule import Dep, Fragment, Kind, Work
from moesim.workload import MixedStep, alike

MOST_STEPS = 32  # of a fragment


class MixedPlanner(Planner):
    """Plans steps one after another, as they are formed; see ``Planner`` for parameters and attributes.

    Raises
    ------
    InputError
        If the scenario asks for what needs to know steps that have not been formed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scenario = self.scenario
        for name, pool in scenario.placement.pools.items():
            if pool.policy == "belady":
                raise InputError(f"placement.pools.{name}.policy", expected="a policy that does not know the future", got="belady")
        if scenario.memory.kv_from_experts:
            raise InputError("memory.kv_from_experts", expected="false where requests are served", got="true", fix="state memory.kv_bytes")
        if self.predicted is not None and (self.prediction_source not in ("none", "router") or scenario.prefetch.into == "buffers"):
            expected = "a predictor that knows the layers before (oracle, popularity, cooccurrence, linear, two-step), into the cache"
            raise InputError("prefetch", expected=expected, got=f"{scenario.prefetch.predictor} into {scenario.prefetch.into}")
        self._most_micro_batches = self.micro_batches
        self._mixed: MixedStep

    def plan(self, steps: Sequence[MixedStep]) -> Fragment:
        """Plan some steps, at most ``MOST_STEPS``, as one fragment."""
        for step in steps:
            self._begin(step.index)
            self._mixed = step
            self.micro_batches = min(self._most_micro_batches, len(step.new))
            self._room = []
            self._changes = self.kv_changes(step)
            self._step(step, None)  # type: ignore[arg-type]
        return self.builder.build()

    def kv_changes(self, step: MixedStep) -> list[tuple[str, str, int]]:
        """What the KV cache takes (or gives back) when a step begins: (tier, line, bytes). A cache at its maximum holds all from the start."""
        if self.scenario.memory.kv == "maximum":
            return []
        changes = [(tier, "KV cache", size - self._kv_now[tier]) for tier, size in step.kv_bytes.items()]
        self._kv_now |= step.kv_bytes
        return changes

    def _split(self, _step: Any) -> tuple[list[int], list[int], list[NDArray[np.int16]]]:
        step = self._mixed
        bounds = np.concatenate([[0], np.cumsum(step.new)])
        parts = np.array_split(np.arange(len(step.new)), self.micro_batches)
        ids = self.trace.expert_ids[step.rows]
        self._parts = [parts_of(step, part) for part in parts]
        rows = [ids[bounds[part[0]] : bounds[part[-1] + 1]] for part in parts]
        return [len(part) for part in parts], [len(r) for r in rows], rows

    def _attention_work(self, layer: int, mb: int) -> Work:
        return self.works.attention_of(layer, self._parts[mb])

    def _lookup(self) -> Deps:
        """Beside lookup tables, the copies of sequences that are swapped out or in come before the first layer."""
        return [*super()._lookup(), *((self._copy(*swap), Dep.DATA) for swap in self._mixed.swaps)]

    def _copy(self, source: str, target: str, n_bytes: int, blocks: int) -> int:
        lane = self.layout.link(source, target)
        work = Work(lane, transfer_bytes=n_bytes, operations=blocks, mode="pinned" if self.scenario.io.pinned else "pageable")
        return self._task(Kind.COPY, lane, work, [], 0)


def parts_of(step: MixedStep, part: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """``MixedStep.parts`` of some of its sequences."""
    if len(part) == len(step.new):
        return step.parts
    new, context = ([column[i] for i in part] for column in (step.new, step.context))
    return alike(new, context)
