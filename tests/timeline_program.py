"""What tests of engines share: the engines, a small way to write down schedules with explicit costs, and how to read a timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from moesim.cost import Costs
from moesim.engines.des import DesEngine
from moesim.engines.fast import FastEngine
from moesim.schedule import Dep, Fragment, FragmentBuilder, Kind, Lane, Work
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE, Timeline

PER_PS = 1e12  # 1 channel unit per picosecond, in units/s
ENGINES: list[Any] = [DesEngine, FastEngine]
Pieces = tuple[tuple[Fragment, Costs], ...]


@dataclass(frozen=True, slots=True)
class TaskSpec:
    lane: str
    latency: int
    volume: float
    cap: float
    shares: Mapping[str, float]
    deps: tuple[tuple[int, Dep], ...]
    kind: Kind
    layer: int
    use: tuple[int, int] | None
    prefetch: bool


@dataclass(slots=True)
class StepSpec:
    tasks: list[TaskSpec] = field(default_factory=list)
    capacity: dict[str, float] = field(default_factory=dict)
    gate: int = -1


class Program:
    """Whole steps of tasks with explicit costs, written down once and cut into fragments in any way."""

    def __init__(self, lanes: Sequence[Lane], **capacity: float) -> None:
        self.lanes = tuple(lanes)
        self.capacity = capacity
        self.steps: list[StepSpec] = []
        self.n_tasks = 0
        self._open: list[TaskSpec] = []

    def task(
        self, lane: str, latency: int = 0, volume: float = 0.0, after: Sequence[int] = (), *,
        on: Mapping[str, float] | str = "", cap: float = math.inf,
        slot: Sequence[int] = (), buffer: Sequence[int] = (), queue: Sequence[int] = (), kind: Kind = Kind.LOAD, layer: int = 0,
        use: tuple[int, int] | None = None, prefetch: bool = False,
    ) -> int:  # fmt: skip
        """Append a task: ``after``, ``slot``, ``buffer``, ``queue`` are ids it depends on, ``on`` its channels and shares."""
        typed = ((after, Dep.DATA), (slot, Dep.SLOT), (buffer, Dep.BUFFER), (queue, Dep.QUEUE))
        deps = [(i, why) for ids, why in typed for i in ids]
        shares = dict.fromkeys(on.split(), 1.0) if isinstance(on, str) else dict(on)
        self._open.append(TaskSpec(lane, latency, volume, cap, shares, tuple(deps), kind, layer, use, prefetch))
        self.n_tasks += 1
        return self.n_tasks - 1

    def end_step(self, gate: int | None = None, **next_capacity: float) -> None:
        """Close the step; ``gate`` is its last task in the schedule's sense, ``next_capacity`` holds from the next step on."""
        self.steps.append(StepSpec(self._open, dict(self.capacity), self.n_tasks - 1 if gate is None else gate))
        self.capacity.update(next_capacity)
        self._open = []

    def pieces(self, cuts: Sequence[int] | None = None) -> Pieces:
        """Return (fragment, costs) pairs, cut after the steps in ``cuts``; None cuts after every step, () not at all."""
        if self._open:
            self.end_step()
        names = [lane.name for lane in self.lanes]
        builder = FragmentBuilder(len(names))
        ends = set(range(len(self.steps)) if cuts is None else cuts) | {len(self.steps) - 1}
        pieces: list[tuple[Fragment, Costs]] = []
        tasks: list[TaskSpec] = []
        for s, step in enumerate(self.steps):
            first = builder.next_task
            for t in step.tasks:
                work = Work(f"task {builder.next_task}")  # every task has a cost of its own
                builder.task(t.kind, names.index(t.lane), work, t.deps, step=s, layer=t.layer, use=t.use, prefetch=t.prefetch)
            builder.end_step(s, first, step.gate, 1, 1, 1)
            tasks += step.tasks
            if s in ends:
                pieces.append((builder.build(), _costs(tasks, step.capacity)))
                tasks = []
        return tuple(pieces)


def _costs(tasks: Sequence[TaskSpec], capacity: Mapping[str, float]) -> Costs:
    """A price for each task; they stand the other way round, so that none is taken for the task's row."""
    tasks = tasks[::-1]
    return Costs(
        tuple(capacity),
        np.array(list(capacity.values()), np.float64),
        np.arange(len(tasks), dtype=np.int32)[::-1].copy(),
        np.array([t.latency for t in tasks], np.int64),
        np.array([t.volume for t in tasks], np.float64),
        np.array([t.cap for t in tasks], np.float64),
        np.array([[t.shares.get(c, 0.0) for c in capacity] for t in tasks], np.float64).reshape(len(tasks), len(capacity)),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """``fragments`` has one per step; ``whole`` is the same in one, None where capacities change. ``causes`` are checked where given."""

    name: str
    lanes: tuple[Lane, ...]
    fragments: Pieces
    expected: tuple[tuple[int, int], ...]
    causes: Mapping[int, tuple[int, int]]
    whole: Pieces | None


def program(*lanes: str, **capacity: float) -> Program:
    """Lanes are written ``name``, ``name*width`` or ``name*width priority``."""
    made = []
    for text in lanes:
        head, _, discipline = text.partition(" ")
        name, _, width = head.partition("*")
        made.append(Lane(name, int(width or 1), "priority" if discipline == "priority" else "fifo"))
    return Program(made, **capacity)


def simulate(engine: Any, lanes: tuple[Lane, ...], pieces: Pieces) -> Timeline:
    state = engine(lanes)
    return Timeline.concat([*(state.advance(fragment, costs) for fragment, costs in pieces), state.finish()])


def assert_same(a: Timeline, b: Timeline) -> None:
    for column in fields(Timeline):
        np.testing.assert_array_equal(getattr(a, column.name), getattr(b, column.name), err_msg=column.name)


def walk_back(timeline: Timeline, task: int) -> list[tuple[int, int, int]]:
    """Follow causes from a task to time 0; return (task, from, to), from first to last, each the stretch that it accounts for."""
    path, until = [], int(timeline.end_ps[task])
    while task != NO_CAUSE:
        start = int(timeline.start_ps[task])
        path.append((task, start, until))
        task, why = int(timeline.cause[task]), int(timeline.cause_type[task])
        if task != NO_CAUSE:  # a dependency or a freed server hands over at its end, the one before in the queue at its start
            handed_over = (timeline.start_ps if why == CAUSE_HEAD_OF_LINE else timeline.end_ps)[task]
            assert handed_over == start, f"task {path[-1][0]} starts at {start}, its cause {task} hands over at {handed_over}"
        until = start
    return path[::-1]
