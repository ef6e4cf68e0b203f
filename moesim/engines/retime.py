"""Owns re-timing: one schedule that depends on the trace alone, timed for many variants of the hardware at once.

Where every lane is fifo, variants that no channel can hold up are computed side by side in one pass (retime_kernel.py);
every other variant is a run of FastEngine. Either way the result is that of a run of its own, bit for bit. Threads share the
variants; compiled code runs outside the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.cost import Costs
from moesim.engines import fast_state as fs
from moesim.engines.fast import FastEngine, lane_table
from moesim.engines.retime_kernel import durations, note_users, sweep_variants
from moesim.errors import InputError
from moesim.schedule import Fragment, Ints, Schedule
from moesim.timeline import Timeline, plain

BLOCK = 32  # variants side by side: four AVX-512 registers of int64
BLOCK_BYTES = 256 * 2**20  # most memory for the ends of one block

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Retimed:
    """What re-timing gave: the end of every step (V, S), and whole timelines where asked for."""

    step_end_ps: Ints
    timelines: tuple[Timeline, ...] | None

    def __repr__(self) -> str:
        return f"Retimed({self.step_end_ps.shape[0]} variants of {self.step_end_ps.shape[1]} steps)"


def retime(schedule: Schedule, variants: Sequence[Sequence[Costs]], timelines: bool = False, workers: int | None = None) -> Retimed:
    """Time a schedule under several sets of costs.

    Parameters
    ----------
    schedule : Schedule
        Its ``depends_on`` must be the trace alone.
    variants : sequence of sequences of Costs
        Per variant the costs of each fragment.
    timelines : bool
        Return the whole timeline of each variant; each is a run of its own then.
    workers : int, optional
        Threads; the number of processors if not given.

    Raises
    ------
    InputError
        If the schedule was planned from costs or times, so that other costs would have given another schedule; or if the costs
        of a variant do not match the fragments.
    """
    if schedule.depends_on != {"trace"}:
        raise InputError(
            "depends_on of the schedule", expected="the trace alone", got=", ".join(sorted(schedule.depends_on)),
            fix="plan a schedule for each variant, as costs or times took part in its decisions",
        )  # fmt: skip
    expected = 0
    for fragment in schedule.fragments:
        if fragment.first_task != expected:
            raise InputError(
                "fragments of the schedule",
                expected=f"one that begins at task {expected}",
                got=repr(fragment),
                fix="keep every fragment of the run",
            )
        expected += fragment.n_tasks
    for v, costs in enumerate(variants):
        for fragment, cost in zip(schedule.fragments, costs, strict=False):
            if len(cost.price) != fragment.n_tasks:
                raise InputError(f"costs of variant {v}", expected=f"{fragment.n_tasks} tasks for {fragment!r}", got=str(len(cost.price)))
        if len(costs) != len(schedule.fragments):
            raise InputError(f"costs of variant {v}", expected=f"{len(schedule.fragments)}, one per fragment", got=str(len(costs)))
    n_steps = sum(len(f.steps) for f in schedule.fragments)
    step_end = np.full((len(variants), n_steps), -1, np.int64)
    lines: list[Timeline | None] = [None] * len(variants)
    if not schedule.fragments:
        return Retimed(step_end, tuple(Timeline.concat([]) for _ in variants) if timelines else None)
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        rest = list(range(len(variants)))
        if not timelines and all(lane.discipline == "fifo" for lane in schedule.lanes):
            size = max(1, min(BLOCK, BLOCK_BYTES // (8 * schedule.n_tasks)))
            blocks = [rest[i : i + size] for i in range(0, len(rest), size)]
            done = pool.map(_side_by_side, repeat(schedule), [[variants[v] for v in block] for block in blocks])
            rest = []
            for block, (calm, found) in zip(blocks, done, strict=True):
                step_end[block] = found
                rest += [v for v, fine in zip(block, calm, strict=True) if not fine]
        alone = pool.map(_alone, repeat(schedule), [variants[v] for v in rest], repeat(timelines))
        for v, (found, line) in zip(rest, alone, strict=True):
            step_end[v], lines[v] = found, line
    return Retimed(step_end, tuple(line for line in lines if line is not None) if timelines else None)


def _alone(schedule: Schedule, costs: Sequence[Costs], keep: bool) -> tuple[Ints, Timeline | None]:
    """Return the step ends of one variant, run by itself."""
    engine = FastEngine(schedule.lanes)
    parts: list[Timeline] = []
    found: list[Ints] = []
    for fragment, cost in zip(schedule.fragments, costs, strict=True):
        part = engine.advance(fragment, cost)
        found.append(part.end_ps[np.searchsorted(part.task, fragment.steps[:, 2])])
        if keep:
            parts.append(part)
    return np.concatenate(found), Timeline.concat([*parts, engine.finish()]) if keep else None


def _side_by_side(schedule: Schedule, variants: Sequence[Sequence[Costs]]) -> tuple[list[bool], Ints]:
    """Return which variants of a block are calm throughout, and the step ends; those of the others mean nothing."""
    lanes, n_variants = lane_table(schedule.lanes), len(variants)
    works = [_lanes_of(fragment, fragment.work, len(fragment.works)) for fragment in schedule.fragments]
    tables = [[_table(f, cost, on) for f, cost, on in zip(schedule.fragments, costs, works, strict=True)] for costs in variants]
    calm, users, peaks = [], [], []
    for costs, table in zip(variants, tables, strict=True):
        capacity = costs[0].capacity
        calm.append(all(len(c.capacity) == len(capacity) and bool(np.all(c.capacity == capacity)) for c in costs))
        user = np.full(len(capacity), -1, np.int64)
        for _, on, (_, volume, _, shares, _) in table:
            if calm[-1]:
                note_users(user, on, volume, shares)
        users.append(user)
        peaks.append(np.zeros((len(lanes), len(capacity))))
    end = np.empty((schedule.n_tasks, n_variants), np.int64)
    granted = np.zeros((len(lanes), n_variants), np.int64)
    slot_end, scratch = np.zeros((int(lanes[:, fs.WIDTH].sum()), n_variants), np.int64), np.empty(n_variants, np.int64)
    for i, fragment in enumerate(schedule.fragments):
        price = tables[0][i][0]
        same = all(table[i][0] is price for table in tables)
        if not same:  # a duration for each task
            price = np.arange(fragment.n_tasks, dtype=np.int32)
        duration = np.zeros((n_variants, len(tables[0][i][1]) if same else fragment.n_tasks), np.int64)
        for v, table in enumerate(tables):
            own, on, (latency, volume, cap, shares, capacity) = table[i]
            each = np.zeros(len(on), np.int64)
            if calm[v]:
                calm[v] = durations(users[v], peaks[v], lanes, on, latency, volume, cap, shares, capacity, each)
            duration[v] = each if same else each[own]
        if not any(calm):
            return calm, np.zeros((n_variants, 1), np.int64)
        sweep_variants(
            fragment.first_task, lanes, plain(fragment.lane, np.int8), plain(price, np.int32), plain(fragment.dep_start, np.int64),
            plain(fragment.dep_task, np.int64), np.ascontiguousarray(duration.T), end, granted, slot_end, scratch,
        )  # fmt: skip
    last = np.concatenate([fragment.steps[:, 2] for fragment in schedule.fragments])
    return calm, end[last].T


def _lanes_of(fragment: Fragment, price: Array, n: int) -> Array | None:
    """Return the lane of the tasks of each price, -1 where there are none; None where those of one are on several lanes."""
    on = np.full(n, -1, np.int64)
    on[price] = fragment.lane
    return on if np.array_equal(on[price], fragment.lane) else None


def _table(fragment: Fragment, costs: Costs, on_work: Array | None) -> tuple[Array, Array, Any]:
    """Return the price of each task, the lane of each price, and (latency, volume, cap, shares, capacity), by price but for the last.

    Prices that are met on several lanes are told apart, task by task.
    """
    price = costs.price
    on = on_work if price is fragment.work else _lanes_of(fragment, price, len(costs.cap))
    columns: tuple[Any, ...] = costs.latency_ps, costs.volume, costs.cap, costs.shares
    if on is None:
        on, columns = fragment.lane.astype(np.int64), tuple(column[price] for column in columns)
        price = np.arange(fragment.n_tasks, dtype=np.int32)
    latency, volume, cap, shares = columns
    flows = plain(volume, np.float64), plain(cap, np.float64), plain(shares, np.float64), plain(costs.capacity, np.float64)
    return price, on, (plain(latency, np.int64), *flows)
