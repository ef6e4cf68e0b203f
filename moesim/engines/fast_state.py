# mypy: ignore-errors
"""Owns what the compiled engine carries from one fragment to the next, and what both of its paths share.

A *row* is a task of the present window: first the carried tasks (not ended when the window began), then those of the
fragment, so rows ascend with ids. A carried task is one row of ``c_int``, ``c_float`` and ``c_shares``; its dependencies on
other carried tasks are rows (id, type) of ``c_deps``. What has ended of its dependencies is folded into one bound:
the latest end, and of those at that end the largest id. ``recent`` holds the ids that ended at the present instant.

A *slot* is a server: slot ``lanes[l, OFFSET] + i`` is server i of lane l.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numba import njit

from moesim import sharing
from moesim.schedule import Dep
from moesim.timeline import NO_CAUSE

ID, LANE, KEY, LATENCY, START, SERVER, CAUSE, WHY, PHASE, EVENT, SINCE, ADDED, BOUND_END, BOUND, BOUND_WHY, DEP_FROM, DEP_TO = range(17)
C_INT = 17  # columns of c_int
VOLUME, CAP, RATE = range(3)  # columns of c_float
WIDTH, PRIORITY, OFFSET, TOUCHED_AT, IDLE_BEFORE, FREED_AT, FREED_BY, LAST = range(8)  # columns of lanes
IN_LATENCY, IN_FLOW = 0, 1  # PHASE of a started task
NEVER = np.iinfo(np.int64).max  # EVENT of a flow that has no rate yet, or of an idle slot
ENDED_BEFORE, NOT_ENDED = -1, -2  # instead of an end: of dependencies that ended before the task was added, of tasks that have not
DATA = int(Dep.DATA)
OK, CONTENDED, NEVER_ENDS, DEADLOCK, NO_REASON, TOO_LONG = range(6)  # status of a kernel
LONGEST_S = 4e6  # int64 picoseconds hold 9.2e6 s


def _source_stamp() -> str:
    here = Path(__file__).parent
    sources = [Path(sharing.__file__), *(here / name for name in ("fast_state.py", "fast_linear.py", "fast_events.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


# Numba's disk cache looks at the file of the outermost function only. This unused argument of every kernel has a type that is named after
# all sources that get compiled into it, so that an edit in one of them is never answered from a stale cache.
STAMP = np.zeros(1, [(f"sources_{_source_stamp()}", np.int8)])

_INNER = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
ceil_ps = njit(**_INNER)(sharing.ceil_ps)
max_min_rates = njit(error_model="numpy", **_INNER)(sharing.max_min_rates)


@njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def find(sorted_ids, task):
    """Return where ``task`` stands among ascending ids, or -1."""
    low, high = 0, len(sorted_ids)
    while low < high:
        middle = (low + high) >> 1
        if sorted_ids[middle] < task:
            low = middle + 1
        else:
            high = middle
    if low < len(sorted_ids) and sorted_ids[low] == task:
        return low
    return -1


@njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def urgency(use_step, use_layer, prefetch):
    """Return the key of priority lanes but for the id: step and layer of use, demand before prefetch."""
    return ((np.int64(use_step) << 16) + np.int64(use_layer) + 32768) * 2 + np.int64(prefetch)


@njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)
def row_of(task, first, oldest, before, c_ids, recent):
    """Return the row of a task that another one depends on; ``oldest`` is that of the window, see ``oldest_of``.

    What has ended before the window is the row behind the last (``before``), or, if it ended at the present instant, the one after that.
    """
    row = min(task - first + len(c_ids), before) if task >= first else before
    if oldest <= task and task < first:
        row = find(c_ids, task)
        if row < 0:
            row = before + 1 if find(recent, task) >= 0 else before
    return row


def oldest_of(first, c_ids, recent):
    """Return the oldest task that a window which begins at task ``first`` knows of."""
    return min([first, *c_ids[:1].tolist(), *recent[:1].tolist()])


def columns(rows, now, empty=False):
    """Return start, end, server, cause and its type of each row, with two ends behind the last that ``row_of`` speaks of. None has
    started; or, if ``empty``, all but the servers are to be filled in."""
    start, end, cause, why = np.empty(rows, np.int64), np.empty(rows + 2, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int8)
    if not empty:
        start[:], end[:], cause[:], why[:] = -1, NOT_ENDED, NO_CAUSE, 0
    end[rows:] = ENDED_BEFORE, now
    return start, end, np.zeros(rows, np.int16), cause, why


def slots(lanes):
    """Return phase, event, since, rate and volume of each slot, idle."""
    n = lanes[-1, OFFSET] + lanes[-1, WIDTH]
    return np.zeros(n, np.int64), np.full(n, NEVER, np.int64), np.zeros(n, np.int64), np.zeros(n), np.zeros(n)


@njit(cache=True, nogil=True, _nrt=False, no_cfunc_wrapper=True)
def mark(end, until, marked):
    """Fill ``marked`` with the rows that had not ended before ``until``, ascending; return how many they are."""
    n = 0
    for r in range(len(end)):
        if end[r] >= until or end[r] == NOT_ENDED:
            marked[n] = r
            n += 1
    return n


def unended(end, until):
    """Return the rows that had not ended before ``until``, ascending; ``end`` has two more places than there are rows."""
    marked = np.empty(len(end) - 2, np.int32)
    return marked[: mark(end[:-2], until, marked)]


def divide(now, began, first, oldest, lanes, state, c_ids, fragment, columns, slots, marked):
    """Divide the window at ``now``: the columns of what has ended, and the state that the next window begins with.

    ``marked`` are the rows that had not ended before ``now``.
    """
    c_int, c_float, c_shares, c_deps, recent = state
    ends = columns[1][marked]
    alive = marked[ends == NOT_ENDED]
    task = np.arange(first - len(c_int), first + len(fragment[0]))
    task[: len(c_int)] = c_ids
    next_recent = np.concatenate([recent if began == now else recent[:0], task[marked[ends == now]]])
    n = len(alive)
    next_int, next_float, next_shares = np.zeros((n, C_INT), np.int64), np.zeros((n, 3)), np.zeros((n, c_shares.shape[1]))
    old, new = alive[alive < len(c_int)], alive[alive >= len(c_int)] - len(c_int)
    pending = (c_int[old, DEP_TO] - c_int[old, DEP_FROM]).sum() + (fragment[5][new + 1] - fragment[5][new]).sum()
    next_deps = np.empty((pending, 2), np.int64)
    n_deps = collect(
        began, first, oldest, lanes, c_int, c_float, c_shares, c_deps, c_ids, recent, *fragment, *columns, *slots, alive, task, next_int, next_float,
        next_shares, next_deps,
    )  # fmt: skip
    ended = close_up(task, *columns, int(alive[0]) if n else len(task))
    start, end, server, cause, why = columns
    return tuple(column[:ended] for column in (task, start, end, server, cause, why)), (
        next_int, next_float, next_shares, next_deps[:n_deps], next_recent,
    )  # fmt: skip


@njit(cache=True, nogil=True, _nrt=False, no_cfunc_wrapper=True)
def close_up(task, start, end, server, cause, why, n):
    """Move the rows that have ended up, to follow the first ``n`` (which all have); return how many there are."""
    for r in range(n, len(task)):
        if end[r] >= 0:
            task[n], start[n], end[n], server[n], cause[n], why[n] = task[r], start[r], end[r], server[r], cause[r], why[r]
            n += 1
    return n


@njit(cache=True, _nrt=False, no_cfunc_wrapper=True)
def collect(
    began, first, oldest, lanes, c_int, c_float, c_shares, c_deps, c_ids, recent,
    lane, use_step, use_layer, prefetch, price, dep_start, dep_task, dep_type, latency, volume, cap, shares,
    start, end, server, cause, why, slot_phase, slot_event, slot_since, slot_rate, slot_volume, alive, task,
    next_int, next_float, next_shares, next_deps,
):  # fmt: skip
    """Fill the state that the next window begins with, from the rows ``alive`` that have not ended; return its dependencies."""
    n_carried, before = len(c_int), len(start)
    d_to = 0
    for k in range(len(alive)):
        r = np.int64(alive[k])
        f = r - n_carried
        if f < 0:
            for i in range(C_INT):
                next_int[k, i] = c_int[r, i]
            for i in range(3):
                next_float[k, i] = c_float[r, i]
            for i in range(shares.shape[1]):
                next_shares[k, i] = c_shares[r, i]
        else:
            next_int[k, ID], next_int[k, LANE], next_int[k, KEY] = task[r], lane[f], urgency(use_step[f], use_layer[f], prefetch[f])
            w = price[f]
            next_int[k, LATENCY], next_int[k, ADDED] = latency[w], began
            next_int[k, BOUND_END], next_int[k, BOUND], next_int[k, BOUND_WHY] = ENDED_BEFORE, NO_CAUSE, DATA
            next_float[k, VOLUME], next_float[k, CAP] = volume[w], cap[w]
            for i in range(shares.shape[1]):
                next_shares[k, i] = shares[w, i]
        next_int[k, START] = start[r]
        if start[r] >= 0:
            s = lanes[next_int[k, LANE], OFFSET] + server[r]
            next_int[k, SERVER], next_int[k, CAUSE], next_int[k, WHY] = server[r], cause[r], why[r]
            next_int[k, PHASE], next_int[k, EVENT], next_int[k, SINCE] = slot_phase[s], slot_event[s], slot_since[s]
            next_float[k, RATE] = slot_rate[s]
            if slot_phase[s] == IN_FLOW:
                next_float[k, VOLUME] = slot_volume[s]
        at, bound, bound_why = next_int[k, BOUND_END], next_int[k, BOUND], next_int[k, BOUND_WHY]
        next_int[k, DEP_FROM] = d_to
        if start[r] < 0:
            behind = len(dep_task)
            d_from, d_end = (behind + c_int[r, DEP_FROM], behind + c_int[r, DEP_TO]) if f < 0 else (dep_start[f], dep_start[f + 1])
            for d in range(d_from, d_end):
                other = c_deps[d - behind, 0] if f < 0 else dep_task[d]
                other_why = c_deps[d - behind, 1] if f < 0 else np.int64(dep_type[d])
                e = end[row_of(other, first, oldest, before, c_ids, recent)]
                if e == NOT_ENDED:
                    next_deps[d_to, 0], next_deps[d_to, 1] = other, other_why
                    d_to += 1
                    continue
                if e > at or (e == at and other > bound):
                    at, bound, bound_why = e, other, other_why
        next_int[k, BOUND_END], next_int[k, BOUND], next_int[k, BOUND_WHY] = at, bound, bound_why
        next_int[k, DEP_TO] = d_to
    return d_to
