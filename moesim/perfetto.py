"""Owns the export of a timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens. It measures nothing itself.

Format: "Trace Event Format" (Google, 2016). One process per run; one thread per lane server, so that slices on a track never
overlap; one thread of steps; counters for memory per tier and line, loads in flight, bytes/s through each channel and the share of
expert accesses that hit in each step; a flow from each load to the FFN that uses it. Times are microseconds; a picosecond is kept
as a decimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moesim.cost import CostModel
from moesim.metrics import PS
from moesim.schedule import Kind, Outcome, Schedule
from moesim.simulate import Case, Result, load_meter, provenance
from moesim.tasks import Tasks, Watermark, join, watermark
from moesim.timeline import Timeline

US_PER_PS = 1e-6
STEPS_TID = 1
Event = dict[str, Any]


def export(result: Result) -> dict[str, Any]:
    """Return the whole document for ``json.dump``. A run that never started has no events but its name."""
    name = f"moesim: {result.case.model.name} on {result.case.hardware.name} ({result.case.engine})"
    events: list[Event] = [_meta(1, 0, "process_name", name)]
    if result.meter is not None:
        events += run_events(result.every.tasks, result.every.memory, pid=1)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": provenance(result.case)}


def export_pair(case: Case, schedule: Schedule, timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return several timelines of one schedule, such as simulated and measured, as one document: a process each, with equal tracks.

    Parameters
    ----------
    case : Case
    schedule : Schedule
        What all timelines are of.
    timelines : mapping of str to Timeline
        By what to call them, such as ``{"simulated": ..., "measured": ...}``.
    """
    prices = CostModel(case.hardware)
    parts = [(fragment, prices.costs(fragment)) for fragment in schedule.fragments]
    planner = case.planner()
    events: list[Event] = []
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        meter = load_meter(case, planner, keep=True)
        for fragment, costs in parts:
            meter.add(fragment, costs, timeline.rows(fragment.first_task, fragment.n_tasks))
        meter.finish(Timeline.concat([]))
        tasks = join(parts, timeline, meter)
        events += [_meta(pid, 0, "process_name", f"{name}: {case.model.name} on {case.hardware.name}")]
        events += run_events(tasks, watermark(tasks, schedule.tiers, schedule.lines, planner.initial_memory()), pid)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": provenance(case)}


def run_events(tasks: Tasks, memory: Watermark | None, pid: int = 1) -> list[Event]:
    """Return the events of one run under one process number: names, steps, slices, flows, counters."""
    tids: dict[tuple[int, int], int] = {}
    events = [_meta(pid, STEPS_TID, "thread_name", "steps"), _sort(pid, STEPS_TID)]
    for number, lane in enumerate(tasks.lanes):
        for server in range(lane.width):
            tid = tids[number, server] = STEPS_TID + 1 + len(tids)
            events += [_meta(pid, tid, "thread_name", lane.name if lane.width == 1 else f"{lane.name} #{server}"), _sort(pid, tid)]
    tid_of = [tids[key] for key in zip(tasks.lane.tolist(), tasks.server.tolist(), strict=True)]
    events += _steps(tasks, pid)
    events += _slices(tasks, pid, tid_of)
    events += _flows(tasks, pid, tid_of)
    events += _in_flight(tasks, pid)
    events += _bandwidth(tasks, pid)
    events += _hit_rate(tasks, pid)
    if memory is not None:
        events += _memory(memory, pid)
    return events


def slice_name(kind: int, layer: int, expert: int, prefetch: bool) -> str:
    """Return a short name such as ``prefetch L3 E17``."""
    name = "prefetch" if prefetch else Kind(kind).name.lower()
    return name + (f" L{layer}" if layer >= 0 else "") + (f" E{expert}" if expert >= 0 else "")


def _us(ps: int) -> float:
    return ps * US_PER_PS


def _meta(pid: int, tid: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _sort(pid: int, tid: int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _steps(tasks: Tasks, pid: int) -> list[Event]:
    """Steps follow each other without a gap: each begins where the one before ended (docs/decisions/002-step-gates.md)."""
    out, before, counts = [], 0, {0: 0, 1: 0}
    for step, _, last, phase, tokens, emits in tasks.steps.tolist():
        end = int(tasks.end[last])
        counts[phase] += 1
        name = f"prefill chunk {counts[0]}" if phase == 0 else f"decode token {counts[1]}"
        args = {"step": step, "tokens": tokens, "sequences": emits}
        out.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": STEPS_TID,
                "name": name,
                "cat": "step",
                "ts": _us(before),
                "dur": _us(end - before),
                "args": args,
            }
        )
        before = end
    return out


def _slices(tasks: Tasks, pid: int, tid_of: list[int]) -> list[Event]:
    amount = tasks.amounts.max(axis=1, initial=0.0).astype(np.int64).tolist()
    rows = zip(
        tid_of, tasks.kind.tolist(), tasks.layer.tolist(), tasks.expert.tolist(), tasks.prefetch.tolist(), tasks.step.tolist(),
        tasks.start.tolist(), tasks.end.tolist(), amount, strict=True,
    )  # fmt: skip
    out = []
    for tid, kind, layer, expert, prefetch, step, start, end, size in rows:
        args = {"step": step, "layer": layer, "expert": expert, "bytes": size, "prefetch": prefetch}
        name, cat = slice_name(kind, layer, expert, prefetch), "prefetch" if prefetch else Kind(kind).name.lower()
        out.append({"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": cat, "ts": _us(start), "dur": _us(end - start), "args": args})
    return out


def _flows(tasks: Tasks, pid: int, tid_of: list[int]) -> list[Event]:
    """One arrow from each load to the FFN that used what it brought."""
    out = []
    pairs = {(load, ffn) for ffn, load in tasks.access[:, 4:6].tolist() if load >= 0}
    for number, (load, ffn) in enumerate(sorted(pairs), start=1):
        both = {"pid": pid, "cat": "use", "name": "use", "id": f"{pid}.{number}"}
        out.append({**both, "ph": "s", "tid": tid_of[load], "ts": _us(int(tasks.start[load]))})
        out.append({**both, "ph": "f", "bp": "e", "tid": tid_of[ffn], "ts": _us(int(tasks.start[ffn]))})
    return out


def _in_flight(tasks: Tasks, pid: int) -> list[Event]:
    loads = np.nonzero(tasks.is_load)[0]
    times = np.concatenate([tasks.start[loads], tasks.end[loads]])
    change = np.concatenate([np.ones(len(loads), np.int64), -np.ones(len(loads), np.int64)])
    at, first = np.unique(times, return_index=False, return_inverse=True)
    level = np.cumsum(np.bincount(first, weights=change, minlength=len(at))).astype(np.int64) if len(at) else np.zeros(0, np.int64)
    zero = {"ph": "C", "pid": pid, "tid": 0, "name": "loads in flight"}
    return [{**zero, "ts": _us(t), "args": {"loads": n}} for t, n in zip(at.tolist(), level.tolist(), strict=True)]


def _bandwidth(tasks: Tasks, pid: int) -> list[Event]:
    """Counters of bytes/s, one per channel that anything draws on; a task's bytes are spread evenly over its time."""
    out: list[Event] = []
    lasting = tasks.end > tasks.start
    for c, channel in enumerate(tasks.channels):
        mine = np.flatnonzero(lasting & (tasks.amounts[:, c] > 0))
        if not len(mine):
            continue
        start, end = tasks.start[mine], tasks.end[mine]
        rate = tasks.amounts[mine, c] / ((end - start) * PS)
        at, where = np.unique(np.concatenate([start, end]), return_inverse=True)
        change = np.bincount(where, weights=np.concatenate([rate, -rate]), minlength=len(at))
        under_way = np.cumsum(np.bincount(where, weights=np.repeat([1.0, -1.0], len(mine)), minlength=len(at)))
        level = np.where(under_way > 0.5, np.cumsum(change), 0.0)  # rounding leaves nothing where nothing is under way
        counter = {"ph": "C", "pid": pid, "tid": 0, "name": f"bandwidth {channel}"}
        out += [
            {**counter, "ts": _us(t), "args": {"bytes_per_s": round(max(x, 0.0))}} for t, x in zip(at.tolist(), level.tolist(), strict=True)
        ]
    return out


def _hit_rate(tasks: Tasks, pid: int) -> list[Event]:
    """The share of each step's expert accesses that were no misses, from where the step begins; steps without any say nothing."""
    out: list[Event] = []
    step, missed = tasks.access[:, 0], tasks.access[:, 3] == Outcome.MISS
    before = 0
    for number, last in tasks.steps[:, [0, 2]].tolist():
        mine = step == number
        if mine.any():
            share = round(1.0 - float(missed[mine].mean()), 6)
            out.append({"ph": "C", "pid": pid, "tid": 0, "name": "expert hit rate", "ts": _us(before), "args": {"share": share}})
        before = int(tasks.end[last])
    return out


def _memory(memory: Watermark, pid: int) -> list[Event]:
    """Counters of bytes: one per tier, one series per line of the ledger that the tier ever holds."""
    out: list[Event] = []
    for t, tier in enumerate(memory.tiers):
        held = sorted({line for (where, line) in memory.initial if where == t} | set(memory.events[memory.events[:, 1] == t, 2].tolist()))
        level = {line: memory.initial.get((t, line), 0) for line in held}
        counter = {"ph": "C", "pid": pid, "tid": 0, "name": f"memory {tier}"}
        out.append({**counter, "ts": 0.0, "args": {memory.lines[line]: size for line, size in level.items()}})
        mine = memory.events[memory.events[:, 1] == t]
        for i, (time, _, line, delta) in enumerate(mine.tolist()):
            level[line] += delta
            if i + 1 == len(mine) or mine[i + 1, 0] != time:  # several changes of one instant are one sample
                out.append({**counter, "ts": _us(time), "args": {memory.lines[x]: size for x, size in level.items()}})
    return out
