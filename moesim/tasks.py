"""Owns what is kept of every task of a run, for plots and export: columns with their times, and memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.cost import Costs
from moesim.metrics import PS
from moesim.metrics.stream import Meter
from moesim.schedule import COMPUTE_KINDS, Fragment, Ints, Kind, Lane
from moesim.timeline import Timeline

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Tasks:
    """Task columns of a whole run with their times, by task id."""

    lanes: tuple[Lane, ...]
    channels: tuple[str, ...]
    kind: NDArray[np.int8]
    lane: NDArray[np.int8]
    step: NDArray[np.int32]
    layer: NDArray[np.int16]
    expert: NDArray[np.int16]
    prefetch: Mask
    dep_start: Ints
    dep_task: Ints
    dep_type: NDArray[np.int8]
    start: Ints
    end: Ints
    server: NDArray[np.int16]
    cause: Ints
    cause_type: NDArray[np.int8]
    free_of_loads: Ints  # when each compute task could have started but for loads
    useful: Mask  # loads that an access, or a load that an access needed, has used
    amounts: NDArray[np.float64]  # (N, C) channel units
    access: Ints
    steps: Ints
    memory: Ints

    @property
    def makespan_ps(self) -> int:
        return int(self.end.max()) if len(self.end) else 0

    @property
    def is_compute(self) -> Mask:
        return np.isin(self.kind, COMPUTE_KINDS)

    @property
    def is_load(self) -> Mask:
        return np.asarray(self.kind == Kind.LOAD)


def join(parts: Sequence[tuple[Fragment, Costs]], timeline: Timeline, meter: Meter) -> Tasks:
    """Join fragments, their costs, the timeline of the whole run and what a meter kept of it."""
    fragments = [f for f, _ in parts]
    starts, offset = [np.zeros(1, np.int64)], 0
    for f in fragments:
        starts.append(f.dep_start[1:] + offset)
        offset += int(f.dep_start[-1])

    def column(name: str) -> Any:
        return np.concatenate([getattr(f, name) for f in fragments])

    kind, prefetch = column("kind"), column("prefetch")
    useful = (kind == Kind.LOAD) & ~prefetch
    useful[np.concatenate(meter.used)] = True
    amounts = [(c.shares * c.volume[:, None])[c.price] for _, c in parts]
    return Tasks(
        meter.lanes, meter.channels, kind, column("lane"), column("step"), column("layer"), column("expert"), prefetch,
        np.concatenate(starts), column("dep_task"), column("dep_type"), timeline.start_ps, timeline.end_ps, timeline.server, timeline.cause,
        timeline.cause_type, np.concatenate(meter.free), useful, np.concatenate(amounts), column("access"), column("steps"), column("memory"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Watermark:
    """Bytes in use over time, by tier and line: rows of (time ps, tier, line, bytes after)."""

    tiers: tuple[str, ...]
    lines: tuple[str, ...]
    events: Ints  # (M, 4): time, tier, line, delta; sorted by time, then task
    initial: dict[tuple[int, int], int]

    def series(self, tier: int, line: int) -> tuple[NDArray[np.float64], Ints]:
        """Return times (s) and bytes after each change of one line of a tier."""
        mine = self.events[(self.events[:, 1] == tier) & (self.events[:, 2] == line)]
        start = self.initial.get((tier, line), 0)
        return np.concatenate([[0.0], mine[:, 0] * PS]), np.concatenate([[start], start + np.cumsum(mine[:, 3])])


def watermark(tasks: Tasks, tiers: tuple[str, ...], lines: tuple[str, ...], initial: Sequence[tuple[int, int, int]]) -> Watermark:
    """Place the memory events of a schedule in time."""
    task, at_end, tier, line, delta = tasks.memory.T if len(tasks.memory) else np.zeros((5, 0), np.int64)
    time = np.where(at_end == 1, tasks.end[task], tasks.start[task]) if len(task) else task
    order = np.lexsort((delta, task, time))  # at one instant in task order, which is causal
    start: dict[tuple[int, int], int] = {}
    for t, name, size in initial:
        start[t, name] = start.get((t, name), 0) + size
    return Watermark(tiers, lines, np.stack([time, tier, line, delta], axis=1)[order], start)
