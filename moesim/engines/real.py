"""Owns one real run: the simulator's own schedule executed on real experts, and what was counted while it ran.

The timeline is of the simulator's type, so that the same metrics read both. Hits, evictions and bytes are counted from the real side: from
slot tags that loads set when they have run, and from what the reads returned. ``RealRun.differences`` compares them with the schedule.
It needs torch, which is optional.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesim.engines.real_program import Program
from moesim.engines.real_workers import SWITCH_INTERVAL_S, Record, WorkerFailed, run_lanes
from moesim.errors import MoesimError
from moesim.schedule import Dep, Kind, Outcome, Schedule
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE, Timeline

Ints = NDArray[np.int64]
PS_PER_NS = 1000


class TaskFailed(MoesimError):
    """A task of a real run raised; the error itself is the cause.

    Parameters
    ----------
    schedule : Schedule
    failed : WorkerFailed
        Which task it was.
    """

    def __init__(self, schedule: Schedule, failed: WorkerFailed) -> None:
        self.task, self.lane = failed.task, failed.lane
        self.step = self.layer = self.expert = -1
        kind = "no task"
        for f in schedule.fragments:
            row = failed.task - f.first_task
            if failed.task >= 0 and 0 <= row < f.n_tasks:
                self.step, self.layer, self.expert = int(f.step[row]), int(f.layer[row]), int(f.expert[row])
                kind = Kind(f.kind[row]).name.lower()
        cause = failed.__cause__
        self.exit_code = cause.exit_code if isinstance(cause, MoesimError) else MoesimError.exit_code
        where = f"{kind} task {self.task} on lane {self.lane} (step {self.step}, layer {self.layer}, expert {self.expert})"
        super().__init__(f"{where} failed: {type(cause).__name__}: {cause}")


@dataclass(frozen=True)
class RealRun:
    """What one real run gave.

    Parameters
    ----------
    timeline : Timeline
        Measured times; causes after the rules of the reference engine.
    outcomes : (A,) int64
        How each access of the schedule was really served (``Outcome``).
    evictions : int
        Loads into a slot that held another expert.
    lane_bytes : dict
        Bytes moved by lane.
    inversions : dict
        By lane: tasks that started before one of a smaller id.
    violations : int
        Dependencies that had not ended when their task started.
    router_agreement : float or None
        Share of the forced experts that the router itself had chosen.
    loss : float or None
        Mean cross entropy (nats) of the text's next token, where real tokens flow.
    tokens_out : (N,) int64
        The likeliest token of each sequence that gets one, step by step.
    arena_bytes : dict
        Bytes in use by tier: slots and KV cache.
    """

    schedule: Schedule
    timeline: Timeline
    outcomes: Ints
    evictions: int
    expected_evictions: int
    lane_bytes: Mapping[str, int]
    inversions: Mapping[str, int]
    violations: int
    router_agreement: float | None
    loss: float | None
    tokens_out: Ints
    arena_bytes: Mapping[str, int]

    @cached_property
    def accesses(self) -> dict[str, int]:
        """Accesses that were really served from the cache, by a prefetch, and not at all."""
        return {o.name.lower(): int((self.outcomes == o).sum()) for o in Outcome}

    def differences(self) -> list[str]:
        """Name what was not as the schedule says; nothing if all is well."""
        planned = np.concatenate([f.access for f in self.schedule.fragments])
        wrong = np.flatnonzero(planned[:, 3] != self.outcomes)
        out = []
        for row in wrong[:3].tolist():
            step, layer, expert, outcome, *_ = planned[row].tolist()
            meant, found = Outcome(outcome).name.lower(), Outcome(int(self.outcomes[row])).name.lower()
            out.append(f"step {step}, layer {layer}, expert {expert}: planned {meant}, found {found} ({len(wrong)} accesses differ)")
        if self.evictions != self.expected_evictions:
            out.append(f"evictions: planned {self.expected_evictions}, found {self.evictions}")
        for lane, size in planned_bytes(self.schedule).items():
            if size != self.lane_bytes.get(lane, 0):
                out.append(f"bytes on lane {lane}: planned {size}, found {self.lane_bytes.get(lane, 0)}")
        narrow = {lane.name for lane in self.schedule.lanes if lane.width == 1}
        out += [f"lane {lane}: {n} tasks started out of order" for lane, n in self.inversions.items() if n and lane in narrow]
        if self.violations:
            out.append(f"{self.violations} dependencies violated")
        return out

    def __repr__(self) -> str:
        return f"RealRun({len(self.timeline)} tasks in {self.timeline.makespan_ps / 1e12:.3f} s, {len(self.differences())} differences)"


def run(program: Program, switch_interval_s: float = SWITCH_INTERVAL_S) -> RealRun:
    """Run a prepared program once, from its initial state.

    Raises
    ------
    TaskFailed
        If a task raised: a wrong expert in a slot, a failed or short read. All threads have ended.
    KeyboardInterrupt
        As it came, after all threads have ended.
    """
    threads = torch.get_num_threads()
    program.reset()
    try:
        record = run_lanes(program.lanes, program.n_tasks, switch_interval_s)
    except WorkerFailed as failed:
        raise TaskFailed(program.schedule, failed) from failed.__cause__
    finally:
        torch.set_num_threads(threads)
    return _result(program, record)


def _result(program: Program, record: Record) -> RealRun:
    schedule = program.schedule
    timeline = measured_timeline(schedule, record)
    lane = np.concatenate([f.lane for f in schedule.fragments])
    moved = np.array([n or 0 for n in record.moved_bytes], np.int64)
    lanes = schedule.lanes
    access = np.concatenate([f.access for f in schedule.fragments])
    outcomes = np.array([program.expert_tasks[a[4], a[2]].outcome for a in access.tolist()], np.int64)
    forced, own = program.inputs.forced, program.inputs.own.numpy()
    present = forced >= 0
    agreement = float((forced[..., None] == own[:, :, None, :]).any(3)[present].mean()) if present.any() else None
    return RealRun(
        schedule, timeline, outcomes, sum(load.evicted for loads in program.load_tasks.values() for load in loads),
        program.traffic.evictions, {x.name: int(moved[lane == i].sum()) for i, x in enumerate(lanes)},
        {x.name: int((np.diff(timeline.start_ps[lane == i]) < 0).sum()) for i, x in enumerate(lanes)},
        violations(schedule, timeline), agreement, _loss(program), program.inputs.tokens_out.numpy().copy(),
        {tier: arena.used_bytes for tier, arena in program.arenas.items()},
    )  # fmt: skip


def _loss(program: Program) -> float | None:
    logits, targets = program.inputs.logits, torch.from_numpy(program.inputs.targets)
    known = targets >= 0
    if logits is None or not known.any():
        return None
    return float(torch.nn.functional.cross_entropy(logits[known], targets[known]))


def planned_bytes(schedule: Schedule) -> dict[str, int]:
    """Return the bytes that loads and copies of a schedule move, by lane."""
    out = dict.fromkeys((lane.name for lane in schedule.lanes), 0)
    for f in schedule.fragments:
        sizes = np.array([w.transfer_bytes or w.state_bytes // 2 for w in f.works], np.int64)[f.work]
        moving = np.isin(f.kind, (Kind.LOAD, Kind.COPY))
        for i, lane in enumerate(schedule.lanes):
            out[lane.name] += int(sizes[moving & (f.lane == i)].sum())
    return out


def _dependencies(schedule: Schedule) -> tuple[Ints, Ints, NDArray[np.int8]]:
    """(task, what it waits for, why) of all dependencies."""
    task = [np.repeat(np.arange(f.n_tasks) + f.first_task, np.diff(f.dep_start)) for f in schedule.fragments]
    before = [f.dep_task for f in schedule.fragments]
    return np.concatenate(task), np.concatenate(before), np.concatenate([f.dep_type for f in schedule.fragments])


def violations(schedule: Schedule, timeline: Timeline) -> int:
    """Count the dependencies that had not ended when their task started."""
    task, before, _ = _dependencies(schedule)
    return int((timeline.start_ps[task] < timeline.end_ps[before]).sum())


def measured_timeline(schedule: Schedule, record: Record) -> Timeline:
    """Make a timeline of measured times, with the cause of each start.

    The rules of the reference engine, for times that are never equal: what ended or started last of the latest dependency, the end that
    freed a server, and the start of the task before in the queue.
    """
    n = schedule.n_tasks
    start, end = np.array(record.start_ns, np.int64) * PS_PER_NS, np.array(record.end_ns, np.int64) * PS_PER_NS
    cause, why = np.full(n, NO_CAUSE, np.int64), np.full(n, int(Dep.DATA), np.int8)
    ready = np.zeros(n, np.int64)
    for task, before, kind in zip(*(column.tolist() for column in _dependencies(schedule)), strict=True):
        if cause[task] == NO_CAUSE or (end[before], before) > (ready[task], cause[task]):
            ready[task], cause[task], why[task] = end[before], before, kind
    lane_of = np.concatenate([f.lane for f in schedule.fragments])
    for number, lane in enumerate(schedule.lanes):
        busy: list[tuple[Any, int]] = []  # the last ends of as many tasks as the lane has servers, the earliest first
        before = NO_CAUSE
        for task in np.flatnonzero(lane_of == number).tolist():
            freed, by = busy[0] if len(busy) == lane.width else (0, NO_CAUSE)
            if by != NO_CAUSE and freed > ready[task] and freed >= start[before]:
                cause[task], why[task] = by, Dep.LANE
            elif before != NO_CAUSE and lane.width > 1 and start[before] > max(ready[task], freed):
                cause[task], why[task] = before, CAUSE_HEAD_OF_LINE
            heapq.heappush(busy, (end[task], task))
            if len(busy) > lane.width:
                heapq.heappop(busy)
            before = task
    return Timeline(np.arange(n, dtype=np.int64), start, end, np.array(record.server, np.int16), cause, why)
