"""The metrics as plainly as they can be computed: all tasks of a run at once. What ``moesim.metrics`` sums up in pieces must equal this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.cost import Costs
from moesim.metrics import percentiles
from moesim.schedule import COMPUTE_KINDS, Dep, Fragment, Kind, Lane, Outcome
from moesim.sharing import ceil_ps
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE, Timeline

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
PS = 1e-12


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
    alone: Ints  # ps with every channel to itself
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

    @cached_property
    def free_of_loads(self) -> Ints:
        """When each task could have started but for loads, (N,): its latest constraint that is no load. The lane is one of them."""
        ends = np.where(self.is_load[self.dep_task], 0, self.end[self.dep_task])
        free = np.zeros(len(self.kind), np.int64)
        gates = dict(zip(self.steps[1:, 0].tolist(), self.end[self.steps[:-1, 2]].tolist(), strict=True))
        begin = np.array([gates.get(step, 0) for step in self.step.tolist()], np.int64)  # the end of the step before
        some = np.diff(self.dep_start) > 0
        if len(ends):
            free[some] = np.maximum.reduceat(ends, self.dep_start[:-1][some])
        for number, lane in enumerate(self.lanes):
            mine = np.flatnonzero(self.lane == number)
            if len(mine) > 1 and lane.width == 1 and lane.discipline == "fifo":
                order = mine[np.argsort(self.start[mine], kind="stable")]
                free[order[1:]] = np.maximum(free[order[1:]], self.end[order[:-1]])
        return np.maximum(free, begin)


def alone_ps(costs: Costs) -> Ints:
    """How long each task would take with every channel to itself."""
    limit = [min((k / s for k, s in zip(costs.capacity, row, strict=True) if s > 0), default=np.inf) for row in costs.shares]
    out = []
    for p in costs.price:
        flow = ceil_ps(float(costs.volume[p] / min(costs.cap[p], limit[p]))) if costs.volume[p] > 0 else 0
        out.append(int(costs.latency_ps[p]) + flow)
    return np.array(out, np.int64)


def join(lanes: tuple[Lane, ...], parts: Sequence[tuple[Fragment, Costs]], timeline: Timeline) -> Tasks:
    """Join fragments, their costs and the timeline of the whole run."""
    fragments = [f for f, _ in parts]
    starts, offset = [np.zeros(1, np.int64)], 0
    for f in fragments:
        starts.append(f.dep_start[1:] + offset)
        offset += int(f.dep_start[-1])

    def column(name: str) -> Any:
        return np.concatenate([getattr(f, name) for f in fragments])

    amounts = [c.shares[c.price] * c.volume[c.price][:, None] for _, c in parts]
    return Tasks(
        lanes, parts[0][1].channels, column("kind"), column("lane"), column("step"), column("layer"), column("expert"), column("prefetch"),
        np.concatenate(starts), column("dep_task"), column("dep_type"), timeline.start_ps, timeline.end_ps, timeline.server, timeline.cause,
        timeline.cause_type, np.concatenate([alone_ps(c) for _, c in parts]), np.concatenate(amounts), column("access"), column("steps"),
        column("memory"),
    )  # fmt: skip


def union(start: Ints, end: Ints) -> Ints:
    """Return the union of intervals as disjoint, ascending rows (start, end), (M, 2)."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return np.zeros((0, 2), np.int64)
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    return np.stack([start[first], reach[np.append(np.nonzero(first)[0][1:] - 1, len(reach) - 1)]], axis=1)


def length(intervals: Ints) -> int:
    """Total length of disjoint intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def overlap(a: Ints, b: Ints) -> int:
    """Length of the intersection of two unions."""
    if not len(a) or not len(b):
        return 0
    both = np.concatenate([a, b])
    return length(a) + length(b) - length(union(both[:, 0], both[:, 1]))


def latency(tasks: Tasks) -> dict[str, Any]:
    """ttft, tpot, itl, e2el (ms) and the rates of a lockstep run. One sequence has one TPOT; its spread is ITL's."""
    steps = tasks.steps
    ends = tasks.end[steps[:, 2]]
    emits = steps[:, 5] > 0
    at = ends[emits] * PS
    sequences = int(steps[emits, 5].max()) if emits.any() else 0
    prefill = steps[:, 3] == 0
    gaps = np.diff(at) * 1e3
    n_out = len(at)
    span = float(at[-1] - at[0]) if n_out > 1 else 0.0
    prefill_s = float(ends[prefill].max() * PS) if prefill.any() else 0.0
    one = np.ones(max(sequences, 1))
    return {
        "ttft_ms": percentiles(one * at[0] * 1e3) if n_out else None,
        "tpot_ms": percentiles(one * (span / (n_out - 1) * 1e3)) if n_out > 1 else None,
        "itl_ms": percentiles(gaps),
        "e2el_ms": percentiles(one * at[-1] * 1e3) if n_out else None,
        "decode_tok_s": (n_out - 1) / span if span > 0 else None,
        "prefill_tok_s": float(steps[prefill, 4].sum() / prefill_s) if prefill_s > 0 else None,
        "output_throughput_tok_s": n_out * sequences / float(at[-1]) if n_out and at[-1] > 0 else None,
        "output_tokens": n_out * sequences,
    }


def transfers_overlap(tasks: Tasks, hidden_inside_compute: bool) -> tuple[float | None, float]:
    """Return overlap coverage (None where there is nothing to cover) and exposed I/O in seconds."""
    compute = union(tasks.start[tasks.is_compute], tasks.end[tasks.is_compute])
    weights = union(tasks.start[tasks.is_load], tasks.end[tasks.is_load])
    total = length(weights)
    if total == 0 or hidden_inside_compute:
        return None, 0.0
    covered = overlap(weights, compute)
    return covered / total, (total - covered) * PS


def io_wait_s(tasks: Tasks) -> float:
    """Sum over compute tasks of start minus when it could have started but for loads."""
    waits = np.maximum(tasks.start - tasks.free_of_loads, 0)[tasks.is_compute]
    return float(waits.sum() * PS)


def accesses(tasks: Tasks) -> dict[str, int]:
    """Cache hits, prefetch hits, late prefetches (waited for) and misses."""
    outcome, ffn, load = tasks.access[:, 3], tasks.access[:, 4], tasks.access[:, 5]
    prefetched = (outcome == Outcome.PREFETCH) & (load >= 0)
    late = np.zeros(len(outcome), bool)
    late[prefetched] = tasks.end[load[prefetched]] > tasks.free_of_loads[ffn[prefetched]]
    return {
        "cache": int((outcome == Outcome.CACHE).sum()),
        "prefetch": int(((outcome == Outcome.PREFETCH) & ~late).sum()),
        "late": int(late.sum()),
        "miss": int((outcome == Outcome.MISS).sum()),
    }


def useful_loads(tasks: Tasks) -> Mask:
    """Loads that some access, or some load that an access needed, has used; (N,)."""
    useful = tasks.is_load & ~tasks.prefetch
    first_use = tasks.access[(tasks.access[:, 3] == Outcome.PREFETCH) & (tasks.access[:, 5] >= 0), 5]
    useful[first_use] = True
    starts, deps, types = tasks.dep_start, tasks.dep_task, tasks.dep_type
    for task in np.nonzero(tasks.is_load)[0][::-1]:
        if useful[task]:
            for d in range(starts[task], starts[task + 1]):
                if types[d] == Dep.DATA and tasks.kind[deps[d]] == Kind.LOAD:
                    useful[deps[d]] = True
    return useful


def transfers(tasks: Tasks) -> dict[str, dict[str, float]]:
    """Per channel that loads and copies draw on: bytes by purpose, and the time in which any of them was under way."""
    moving = tasks.is_load | (tasks.kind == Kind.COPY)
    useful = useful_loads(tasks)
    early = tasks.is_load & tasks.prefetch
    out = {}
    for c, channel in enumerate(tasks.channels):
        mine = moving & (tasks.amounts[:, c] > 0)
        if mine.any():
            size = tasks.amounts[:, c]
            out[channel] = {
                "bytes": int(size[mine].sum()),
                "demand_bytes": int(size[mine & tasks.is_load & ~early].sum()),
                "prefetch_useful_bytes": int(size[mine & early & useful].sum()),
                "prefetch_wasted_bytes": int(size[mine & early & ~useful].sum()),
                "busy_s": length(union(tasks.start[mine], tasks.end[mine])) * PS,
            }
    return out


def lane_use(tasks: Tasks) -> dict[str, dict[str, float]]:
    """Busy seconds (summed over servers) and utilisation of each lane."""
    whole = tasks.makespan_ps
    out = {}
    for number, lane in enumerate(tasks.lanes):
        mine = tasks.lane == number
        busy = int((tasks.end[mine] - tasks.start[mine]).sum())
        out[lane.name] = {"busy_s": busy * PS, "utilisation": busy / (whole * lane.width) if whole else 0.0}
    return out


def critical_path(tasks: Tasks) -> list[int]:
    """Return the tasks of the critical path, last first: from the end of the run back along what bound each start."""
    if not len(tasks.steps):
        return []
    path = []
    task = int(tasks.steps[-1, 2])
    while task != NO_CAUSE:
        path.append(task)
        cause, why = int(tasks.cause[task]), int(tasks.cause_type[task])
        while why == CAUSE_HEAD_OF_LINE and cause != NO_CAUSE:  # started at the same instant: what bound that one bound this one
            cause, why = int(tasks.cause[cause]), int(tasks.cause_type[cause])
        task = cause
    return path


def critical_shares(tasks: Tasks) -> list[dict[str, Any]]:
    """Shares of the critical path by lane and kind; they sum to 1. ``contention`` is the part that sharing channels cost."""
    path = np.array(critical_path(tasks), np.int64)
    if not len(path):
        return []
    spent = tasks.end[path] - tasks.start[path]
    extra = np.maximum(spent - tasks.alone[path], 0)
    total = int(spent.sum()) or 1
    rows: dict[tuple[int, int], list[int]] = {}
    for task, own, more in zip(path.tolist(), spent.tolist(), extra.tolist(), strict=True):
        row = rows.setdefault((int(tasks.lane[task]), len(Kind) if tasks.prefetch[task] else int(tasks.kind[task])), [0, 0])
        row[0] += own
        row[1] += more
    names = [kind.name.lower() for kind in Kind] + ["prefetch"]
    found = [
        {"lane": tasks.lanes[k[0]].name, "kind": names[k[1]], "share": v[0] / total, "contention": v[1] / total}
        for k, v in sorted(rows.items())
    ]
    return sorted(found, key=lambda row: (-row["share"], row["lane"], row["kind"]))


@dataclass(frozen=True, slots=True)
class Watermark:
    """Bytes in use over time, by tier and line: rows of (time ps, tier, line, bytes after)."""

    tiers: tuple[str, ...]
    lines: tuple[str, ...]
    events: Ints  # (M, 4): time, tier, line, delta; sorted by time, then task
    initial: dict[tuple[int, int], int]

    def peak_bytes(self, tier: int) -> int:
        """The most that a tier held."""
        level = sum(size for (t, _), size in self.initial.items() if t == tier)
        mine = self.events[self.events[:, 1] == tier]
        return level + max(int(np.cumsum(mine[:, 3]).max(initial=0)), 0)

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


def summary(tasks: Tasks, hidden_inside_compute: bool = False) -> dict[str, Any]:
    """All scalar metrics of a run, in the shape of ``run -o json``'s ``metrics``."""
    found = latency(tasks)
    coverage, exposed = transfers_overlap(tasks, hidden_inside_compute)
    counts = accesses(tasks)
    total = sum(counts.values())
    tokens = max(found.pop("output_tokens"), 1)
    return {
        **found,
        "overlap_coverage": coverage,
        "io_wait_ms_per_token": io_wait_s(tasks) * 1e3 / tokens,
        "exposed_io_ms_per_token": exposed * 1e3 / tokens,
        "expert_hit_rate": (total - counts["miss"]) / total if total else None,
        "cache_hit_rate": counts["cache"] / total if total else None,
        "accesses": counts,
        "makespan_s": tasks.makespan_ps * PS,
    }
