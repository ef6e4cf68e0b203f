"""Owns the Schedule: what is to be done, as columnar data, in an order that no engine may question.

A schedule is a list of lanes and a stream of fragments. A fragment holds the tasks of one or more whole steps with typed
dependencies, the memory they take and give back, and how every expert access was served. Task ids count over the whole
run and are a topological order of all dependencies (timing rule 8). Nothing here knows a bandwidth or a clock.

Steps are gated: a task whose dependencies all lie before its step also depends on the last task of the step before, so that
nothing of a step starts before the step has begun and a fragment border never changes a result
(docs/decisions/002-step-gates.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moesim.errors import MoesimError

Discipline = Literal["fifo", "priority"]
Source = Literal["trace", "costs", "time"]


class Kind(IntEnum):
    """What a task does. PUT and GET are the two ends of a bounded queue; COPY moves hidden states."""

    ATTENTION = 0
    ROUTER = 1
    FFN = 2
    LOAD = 3
    COPY = 4
    COMBINE = 5
    HEAD = 6
    PUT = 7
    GET = 8


COMPUTE_KINDS = (Kind.ATTENTION, Kind.ROUTER, Kind.FFN, Kind.COMBINE, Kind.HEAD)


class Dep(IntEnum):
    """Why a task waits for another. LANE is never stored: the lane's discipline implies it, the timeline reports it."""

    DATA = 0
    SLOT = 1
    BUFFER = 2
    QUEUE = 3
    LANE = 4


class Outcome(IntEnum):
    """How an expert access was served, in logical order. Whether a prefetch was late is a question of time."""

    CACHE = 0
    PREFETCH = 1
    MISS = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """An executor of tasks with ``width`` servers."""

    name: str
    width: int = 1
    discipline: Discipline = "fifo"


@dataclass(slots=True)  # not frozen: every step makes some, and frozen ones take several times as long to make
class Work:
    """What a task asks of the machine, before any machine is known. Equal works share one cost; nobody may change one.

    Parameters
    ----------
    resource : str
        The device (gpu, npu, cpu), link (h2d, d2h) or storage (ssd) that does it.
    flops : float
        Floating-point operations, in ``compute`` arithmetic.
    weight_bytes, state_bytes : int
        Weights, and KV cache or activations, read from (or written to) the device's tier.
    kernels : int
        Kernel launches on a device.
    tokens : int
        Rows of the batch, for shape buckets.
    transfer_bytes : int
        Payload of a link or of storage.
    operations : int
        Copies of a link; contiguous extents of storage.
    request_bytes, depth : int
        Size of one I/O request and requests in flight, which set the cap of an I/O flow (timing rule 5).
    mode : str
        "pinned" or "pageable" for links; "direct", "buffered" or "mmap" for storage, with "+fast" in the fast region.
    overhead_s : float
        Fixed time that the scenario states, such as synchronisation at a queue.
    part, weights : str
        What is computed ("attention", "router", "ffn", "combine", "head", "copy") and the storage format of its weights: the key of
        measured kernel times.
    adapter_bytes : int
        Low-rank adapters, read beside the weights in 16 bit.
    """

    resource: str
    flops: float = 0.0
    compute: str = "fp16"
    weight_bytes: int = 0
    state_bytes: int = 0
    kernels: int = 0
    tokens: int = 0
    transfer_bytes: int = 0
    operations: int = 0
    request_bytes: int = 0
    depth: int = 1
    mode: str = ""
    overhead_s: float = 0.0
    part: str = ""
    weights: str = ""
    adapter_bytes: int = 0

    def __hash__(self) -> int:
        return hash((self.resource, self.flops, self.weight_bytes, self.state_bytes, self.transfer_bytes))  # what most works differ in


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Whole steps of a schedule. Task columns are (N,), dependencies in compressed rows, ids are of the whole run."""

    first_task: int
    kind: NDArray[np.int8]
    step: NDArray[np.int32]
    layer: NDArray[np.int16]
    expert: NDArray[np.int16]
    lane: NDArray[np.int8]
    use_step: NDArray[np.int32]  # when the result is needed: the key of priority lanes
    use_layer: NDArray[np.int16]
    prefetch: NDArray[np.bool_]
    slot: NDArray[np.int32]  # slot of a load or FFN in its pool, -1 where sizes differ or none is used
    work: NDArray[np.int32]  # row of ``works``
    works: tuple[Work, ...]
    dep_start: Ints  # (N + 1,)
    dep_task: Ints
    dep_type: NDArray[np.int8]
    memory: Ints  # (M, 5): task, at (0 start, 1 end), tier, line, bytes
    access: Ints  # (A, 6): step, layer, expert, Outcome, first FFN task, load task (-1)
    steps: Ints  # (S, 6): step, first task, last task, phase (0 prefill, 1 decode), tokens, sequences that emit a token
    members: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int64))  # (G, 3): task, expert, slot, of tasks for several experts

    @property
    def n_tasks(self) -> int:
        return len(self.kind)

    @property
    def gate(self) -> int:
        """The task whose end lets the next fragment begin."""
        return int(self.steps[-1, 2])

    def deps(self, row: int) -> list[tuple[int, Dep]]:
        """Return the dependencies of one row as (task id, type)."""
        a, b = self.dep_start[row], self.dep_start[row + 1]
        return [(int(t), Dep(int(d))) for t, d in zip(self.dep_task[a:b], self.dep_type[a:b], strict=True)]

    def __repr__(self) -> str:
        return f"Fragment(tasks {self.first_task}..{self.first_task + self.n_tasks - 1}, {len(self.steps)} steps)"


@dataclass(slots=True)
class Schedule:
    """Lanes, names and the recorded fragments of a run; what ``real`` replays and ``retime`` re-times."""

    lanes: tuple[Lane, ...]
    tiers: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    depends_on: frozenset[Source] = frozenset({"trace"})
    fragments: list[Fragment] = field(default_factory=list)

    @property
    def n_tasks(self) -> int:
        return sum(f.n_tasks for f in self.fragments)

    def __repr__(self) -> str:
        return f"Schedule({self.n_tasks} tasks in {len(self.fragments)} fragments, lanes {', '.join(x.name for x in self.lanes)})"


class FragmentBuilder:
    """Collects tasks into a Fragment; the only way to make one, so that every invariant is checked in one place."""

    def __init__(self, n_lanes: int, first_task: int = 0) -> None:
        self.n_lanes = n_lanes
        self.next_task = first_task
        self.gate = -1  # last task of the step before
        self._first_of_step = first_task
        self._begin()

    def _begin(self) -> None:
        self.first_task = self.next_task
        self._rows: list[tuple[int, int, int, int, int, int, int, bool, int, int]] = []
        self._dep_start: list[int] = [0]
        self._dep_task: list[int] = []
        self._dep_type: list[int] = []
        self._works: dict[Work, int] = {}
        self._memory: list[tuple[int, int, int, int, int]] = []
        self._access: list[tuple[int, int, int, int, int, int]] = []
        self._steps: list[tuple[int, int, int, int, int, int]] = []
        self._members: list[tuple[int, int, int]] = []

    @property
    def n_tasks(self) -> int:
        return len(self._rows)

    def task(
        self, kind: Kind, lane: int, work: Work, deps: Sequence[tuple[int, Dep]], *, step: int = 0, layer: int = -1, expert: int = -1,
        use: tuple[int, int] | None = None, prefetch: bool = False, slot: int = -1,
    ) -> int:  # fmt: skip
        """Append a task and return its id. ``deps`` are (earlier task id, type); duplicates are merged, the first type stays."""
        if not 0 <= lane < self.n_lanes:
            raise MoesimError(f"task {self.next_task}: lane {lane} does not exist, there are {self.n_lanes}")
        seen: set[int] = set()
        for task, why in deps:
            if not 0 <= task < self.next_task:
                what = f"task {self.next_task} ({kind.name}, step {step}, layer {layer})"
                raise MoesimError(f"{what} depends on task {task}: ids must be a topological order")
            if task not in seen:
                seen.add(task)
                self._dep_task.append(task)
                self._dep_type.append(why)
        if self.gate >= 0 and self.gate not in seen and (not seen or max(seen) < self._first_of_step):
            self._dep_task.append(self.gate)
            self._dep_type.append(Dep.DATA)
        self._dep_start.append(len(self._dep_task))
        use_step, use_layer = use if use is not None else (step, layer)
        row = self._works.setdefault(work, len(self._works))
        self._rows.append((kind, step, layer, expert, lane, use_step, use_layer, prefetch, slot, row))
        self.next_task += 1
        return self.next_task - 1

    def memory(self, task: int, at_end: bool, tier: int, line: int, delta_bytes: int) -> None:
        """Record that ``task`` takes (positive) or gives back (negative) bytes when it starts or ends."""
        if delta_bytes:
            self._memory.append((task, int(at_end), tier, line, delta_bytes))

    def access(self, step: int, layer: int, expert: int, outcome: Outcome, ffn: int, load: int = -1) -> None:
        """Record how one expert access was served."""
        self._access.append((step, layer, expert, outcome, ffn, load))

    def member(self, task: int, expert: int, slot: int) -> None:
        """Record one of the experts that ``task`` loads or runs together, and its slot."""
        self._members.append((task, expert, slot))

    def end_step(self, step: int, first: int, last: int, phase: int, tokens: int, emits: int) -> None:
        """Close a step: its last task is the gate of the next one."""
        if not self._first_of_step <= last < self.next_task:
            raise MoesimError(f"step {step} ends with task {last}, which is none of its tasks {self._first_of_step}..{self.next_task - 1}")
        self._steps.append((step, first, last, phase, tokens, emits))
        self.gate, self._first_of_step = last, self.next_task

    def build(self) -> Fragment:
        """Return what was collected since the last call and begin anew."""
        if not self._rows or not self._steps:
            raise MoesimError("a fragment needs at least one task and one whole step")
        columns = list(zip(*self._rows, strict=True))
        types = (np.int8, np.int32, np.int16, np.int16, np.int8, np.int32, np.int16, np.bool_, np.int32, np.int32)
        arrays: list[NDArray[Any]] = [np.array(c, t) for c, t in zip(columns, types, strict=True)]
        kind, step, layer, expert, lane, use_step, use_layer, prefetch, slot, work = arrays
        fragment = Fragment(
            self.first_task, kind, step, layer, expert, lane, use_step, use_layer, prefetch, slot, work, tuple(self._works),
            np.array(self._dep_start, np.int64), np.array(self._dep_task, np.int64), np.array(self._dep_type, np.int8),
            _table(self._memory, 5), _table(self._access, 6), _table(self._steps, 6),
            _table(self._members, 3),
        )  # fmt: skip
        self._begin()
        return fragment


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, width)
