"""Owns a serving run: requests come, steps are formed, planned, priced and simulated, one fragment after another.

A fragment has several steps as long as no arrival could change them (as many wait as there are places), else one: then the engine's
clock says who has come. Nothing runs: the clock moves on to the next arrival. Because steps are gated, how a run is cut into
fragments changes nothing.

What was decided is recorded (steps, waits): it is the whole schedule, and with the batcher's state it is all that a stopped run saves.
A resumed run plans and simulates the recorded steps again, which gives caches and clock back exactly, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from importlib import import_module
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from moesim.conditions import Conditions
from moesim.cost import Costs
from moesim.energy import PowerMeter
from moesim.errors import InputError
from moesim.metrics import PS
from moesim.planner.mixed import MOST_STEPS, MixedPlanner
from moesim.schedule import Fragment, Schedule, Source
from moesim.serving.batcher import Batcher, Formed
from moesim.serving.joined import joined
from moesim.serving.kv import kv_plan
from moesim.serving.requests import Requests
from moesim.serving.rows import Rows, RowSource
from moesim.simulate import Case, load_engine, load_meter, provenance
from moesim.timeline import Timeline
from moesim.workload import DECODE, PREFILL, MixedStep

STATE_VERSION = 1


@dataclass
class Record:
    """What was decided, step by step; when each step began and ended; how long nothing ran."""

    formed: list[Formed] = field(default_factory=list)
    begin_ps: list[int] = field(default_factory=list)
    end_ps: list[int] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)  # (steps before it, until ps)


class ServingRun:
    """One run of one set of requests, to be advanced step by step.

    Parameters
    ----------
    case : Case
        Of a scenario with ``serving``, laid out (``load_serving``).
    requests : Requests
    debug : bool
        Check the batcher's invariants after every step.
    keep : bool
        Keep the fragments (``schedule``).
    state : dict, optional
        What ``state`` returned of a run of the same scenario: go on from there.

    Attributes
    ----------
    record : Record
    meter : Meter
        Sums over all tasks so far.
    arrival_ps : (R,) int64
        When each request came; -1: not yet.
    refused : list of int
        Requests that the KV cache can never hold.

    Raises
    ------
    InputError
        If the scenario cannot be served, or the state is of another one.
    """

    def __init__(
        self, case: Case, requests: Requests, *, debug: bool = False, keep: bool = False, state: dict[str, Any] | None = None
    ) -> None:  # fmt: skip
        spec = case.scenario.serving
        if spec is None:
            raise InputError("serving", expected="a scenario with requests", got="none", fix="add a section serving")
        self.case, self.requests, self.spec = case, requests, spec
        kind: type[MixedPlanner] = MixedPlanner
        if case.engine == "fast":
            kind = import_module("moesim.planner.fast_mixed").CompiledMixedPlanner
        self.planner = cast(MixedPlanner, case.planner(kind))
        self.kv = kv_plan(case.layout, spec.most_sequences)
        self._swap = _swap_tiers(case)
        swap_blocks = spec.swap // max(sum(self.kv.block_bytes[tier] for tier in self._swap), 1) if spec.swap else 0
        self.batcher = Batcher(spec, self.kv, swap_blocks, debug)
        self.rows = RowSource(case.routing.used, case.scenario.trace, requests, spec.prefix_tokens)
        jitter = case.scenario.timing.jitter
        rng = np.random.default_rng([case.scenario.content_seed, 1]) if jitter else None
        self.power = PowerMeter(case.hardware, self.planner.lanes)
        self._conditions = Conditions(case.hardware, case.scenario.timing.background, self.power, jitter, rng)
        self._most = 1 if "time" in case.layout.depends_on else MOST_STEPS  # steps of a fragment
        self.engine = load_engine(case.engine)(self.planner.lanes)
        self.meter = load_meter(case, self.planner)
        self.record = Record()
        self.arrival_ps = np.full(len(requests), -1, np.int64)
        self.refused: list[int] = []
        self.now_ps = 0
        self._next = 0  # request that has not come yet
        self._live: dict[int, Rows] = {}
        self._pending: list[tuple[Fragment, Costs, Timeline]] = []
        self._since: list[Timeline] = []  # what ended while nothing ran
        self.finished = False
        self._keep = keep
        self._fragments: list[Fragment] = []
        if requests.users:
            for _ in range(min(requests.users, len(requests))):
                self._come(0)
        if state is not None:
            self._restore(state)

    # ---- a run

    @property
    def n_steps(self) -> int:
        return len(self.record.formed)

    @property
    def depends_on(self) -> frozenset[Source]:
        """What the schedule follows from: times too, where requests come by the clock."""
        return self.case.layout.depends_on | (frozenset[Source]() if self.requests.users else frozenset[Source]({"time"}))

    @property
    def schedule(self) -> Schedule:
        """The fragments of a run that kept them; waits between them are ``record.waits``."""
        if not self._keep:
            raise InputError("schedule of a serving run", expected="a run that kept it", got="sums alone", fix="pass keep=True")
        planner = self.planner
        return Schedule(planner.lanes, planner.tiers, planner.lines, self.depends_on, list(self._fragments))

    def run(self, until_step: int | None = None, progress: Callable[[int, int], None] | None = None) -> bool:
        """Go on until all requests have ended, or a number of steps has been done in all; return whether there is nothing left to do."""
        while self.planner.out_of_memory is None and (until_step is None or self.n_steps < until_step):
            if not self._arrivals():
                break
            most = self._most if until_step is None else min(self._most, until_step - self.n_steps)
            self._fragment(self._form(most))
            if progress is not None:
                progress(self.batcher.ended + self.batcher.refused, len(self.requests))
        done = self.planner.out_of_memory is not None or self.batcher.idle and self._next == len(self.requests)
        if done:
            self._finish()
        return done

    def _arrivals(self) -> bool:
        """Let those come whose time has come; where nothing runs, wait for the next one. False if nobody is left."""
        times = self.requests.arrival_ps
        while True:
            while times is not None and self._next < len(times) and times[self._next] <= self.now_ps:
                self._come(int(times[self._next]))
            if not self.batcher.idle:
                return True
            if times is None or self._next == len(times):
                return False
            self._wait(int(times[self._next]))

    def _come(self, at_ps: int) -> None:
        """Let the next request come; in a closed loop whoever is refused sends another one."""
        requests = self.requests
        while self._next < len(requests):
            r = self._next
            self._next += 1
            self.arrival_ps[r] = at_ps
            if self.batcher.arrive(r, int(requests.prompt[r]), int(requests.output[r]), int(requests.group[r])):
                return
            self.refused.append(r)
            if not requests.users:
                return

    def _wait(self, until_ps: int) -> None:
        self._flush()
        self.record.waits.append((self.n_steps, until_ps))
        self._since.append(self.engine.wait(until_ps))
        self.now_ps = until_ps

    def _form(self, most: int) -> list[Formed]:
        """Form steps up to a number, or as far as no arrival could change the next one."""
        out: list[Formed] = []
        by_clock = self.requests.arrival_ps is not None and self._next < len(self.requests)
        while len(out) < most and not self.batcher.idle and not (out and by_clock and self.batcher.open):
            out.append(self.batcher.form())
            if self.requests.users:
                for _ in out[-1].ends:
                    self._come(_with_end_of(self.n_steps + len(out) - 1))
        return out

    def _fragment(self, formed: Sequence[Formed]) -> None:
        """Plan, price and simulate some steps."""
        base = self.n_steps
        fragment = self.planner.plan([self._step(base + i, one) for i, one in enumerate(formed)])
        costs = self._conditions.prices(self.now_ps * PS).costs(fragment)
        times = self.engine.advance(fragment, costs)
        gates = fragment.steps[:, 2]
        ends = times.end_ps[np.searchsorted(times.task, gates)].tolist()
        if self._since:
            times = Timeline.concat([*self._since, times])
            self._since = []
        if self._keep:
            self._fragments.append(fragment)
        record = self.record
        record.formed += formed
        record.begin_ps += [self.now_ps, *ends[:-1]]
        record.end_ps += ends
        self.now_ps = ends[-1]
        if self.requests.users:  # those who came with the end of a step
            for r in range(self._next - 1, -1, -1):
                if self.arrival_ps[r] >= -1:
                    break
                self.arrival_ps[r] = record.end_ps[_with_end_of(int(self.arrival_ps[r]))]
        for one in formed:
            for r in one.ends:
                del self._live[r]
        self._pending.append((fragment, costs, times))
        if sum(len(f.steps) for f, _, _ in self._pending) >= self._most:
            self._flush()

    def _step(self, index: int, formed: Formed) -> MixedStep:
        rows: list[NDArray[np.int64]] = []
        for r, start, tokens in formed.parts:
            mine = self._live.get(r)
            if mine is None:
                mine = self._live[r] = self.rows.rows(r)
            rows.append(mine[start : start + tokens])
        copied = ((formed.swapped_out, False), (formed.swapped_in, True))
        swaps = tuple(
            (*((self.case.layout.main_tier, tier) if back else (tier, self.case.layout.main_tier)), blocks * self.kv.block_bytes[tier], blocks)
            for blocks, back in copied if blocks for tier in self._swap
        )  # fmt: skip
        return MixedStep(
            index, DECODE if formed.decodes else PREFILL, np.concatenate(rows), tuple(p[2] for p in formed.parts),
            tuple(p[1] for p in formed.parts), len(formed.emits), self.kv.bytes(formed.kv_blocks, formed.running), swaps,
        )  # fmt: skip

    def _flush(self) -> None:
        """Let the meter take what has been simulated; steps that follow each other at once are one fragment to it."""
        if self._pending:
            first = int(self._pending[0][0].steps[0, 0])
            fragment, costs, times = joined(self._pending)
            self.meter.add(fragment, costs, times, self.record.begin_ps[first])
            self.power.add(fragment, times, self.now_ps, self._conditions.clocks)
            self._pending = []

    def _finish(self) -> None:
        if self.finished:
            return
        self.finished = True
        self._flush()
        self.meter.finish(Timeline.concat([*self._since, self.engine.finish()]))
        self._since = []

    # ---- state

    def state(self) -> dict[str, Any]:
        """Return what a run needs to go on from here: plain data, fit for JSON."""
        return {
            "version": STATE_VERSION, "scenario": provenance(self.case)["scenario_hash"], "formed": [list(astuple(one)) for one in self.record.formed],
            "waits": [list(wait) for wait in self.record.waits],
            "next": self._next, "arrival_ps": self.arrival_ps.tolist(), "refused": self.refused, "batcher": self.batcher.state(),
        }  # fmt: skip

    def _restore(self, state: dict[str, Any]) -> None:
        mine = provenance(self.case)["scenario_hash"]
        if state.get("version") != STATE_VERSION or state.get("scenario") != mine:
            raise InputError("state", expected=f"one of version {STATE_VERSION} and scenario {mine}", got=f"version {state.get('version')}, scenario {state.get('scenario')}")  # fmt: skip
        formed = [Formed([(*part,) for part in parts], *rest) for parts, *rest in state["formed"]]
        waits = [(int(step), int(until)) for step, until in state["waits"]]
        self._next = state["next"]
        self.arrival_ps = np.array(state["arrival_ps"], np.int64)
        self.refused = list(state["refused"])
        for at, until in [*waits, (len(formed), None)]:
            while self.n_steps < at:
                self._fragment(formed[self.n_steps : min(at, self.n_steps + self._most)])
            if until is not None:
                self._wait(until)
        self.batcher.restore(state["batcher"])


def _with_end_of(step: int) -> int:
    """Stands for the end of a step, whose time is not known yet, in place of an arrival time; and the other way round."""
    return -2 - step


def _swap_tiers(case: Case) -> tuple[str, ...]:
    """Tiers whose KV cache can be copied to main memory."""
    spec, layout = case.scenario.serving, case.layout
    if spec is None or not spec.swap:
        return ()
    tiers = tuple(tier for tier in layout.kv_tiers if tier != layout.main_tier)
    if not tiers:
        raise InputError("serving.preemption", expected="recompute where the KV cache lies in main memory", got="swap")
    return tiers
