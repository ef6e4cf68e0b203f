# mypy: ignore-errors
"""Owns the linear pass: exact where every lane is fifo, no channel can be contended and every task takes time.

On a fifo lane a start follows from what stands before it: when the task is ready, when the one before has started, when a server is
free. A flow that meets no contention runs at min(cap, capacity / share) of the channels it has to itself. So one pass in id
order gives every start and end. It is refused (CONTENDED, nothing changed) unless for every channel, over everything in the window,

    sum over lanes of width * max(rate * share) < capacity,  or all its flows come from one lane of width 1.

Tasks or flows of no duration are refused as well: their instants have several rounds, which times alone do not tell apart.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from moesim.engines import fast_state as fs
from moesim.schedule import Dep
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE

MARGIN = 1 - 1e-9  # sums of rates round; below it max-min gives every flow its cap, to the bit
BY_LANE = int(Dep.LANE)


@njit(error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def flow_ps(fixed, flow, most, own_limit):
    """Return the duration of a task that meets no contention, -1 where the linear pass must not handle it."""
    rate = most if most <= own_limit else own_limit
    if flow > 0.0:
        if not (rate > 0.0 and flow / rate < fs.LONGEST_S):
            return -1
        delay = fs.ceil_ps(flow / rate)
        return fixed + delay if delay > 0 else -1
    return fixed if fixed > 0 else -1


@njit(cache=True, error_model="numpy", nogil=True, _nrt=False, no_cfunc_wrapper=True)
def durations(
    stamp, lanes, c_int, c_float, c_shares, lane, price, latency, volume, cap, shares, capacity, duration, limit, c_limit, seen, user, peak,
):  # fmt: skip
    """Fill ``duration`` (P,) of the tasks of each price, and the rate that channels of one's own allow (``limit`` (P,) and ``c_limit`` per
    carried task, both infinite at first); False where a channel may be contended or a task takes no time.

    ``seen`` (P,) and ``user`` (C,) are scratch of -1: a task of each price; the lane of each channel, -2 where there are several. ``peak``
    (lanes, C) is scratch of 0.
    """
    n_lanes, n_prices, n_channels, n_carried = len(lanes), len(shares), len(capacity), len(c_int)
    for f in range(len(price)):
        p = price[f]
        if seen[p] < 0:
            seen[p] = f
        elif lane[f] != lane[seen[p]] and volume[p] > 0.0:
            return False
    for p in range(n_prices):
        if seen[p] >= 0 and volume[p] > 0.0:
            q = np.int64(lane[seen[p]])
            for c in range(n_channels):
                if shares[p, c] > 0.0 and user[c] != q:
                    user[c] = q if user[c] == -1 else -2
    for r in range(n_carried):
        if c_float[r, fs.VOLUME] > 0.0:
            for c in range(n_channels):
                if c_shares[r, c] > 0.0 and user[c] != c_int[r, fs.LANE]:
                    user[c] = c_int[r, fs.LANE] if user[c] == -1 else -2
    for p in range(n_prices):
        if seen[p] >= 0:
            if volume[p] > 0.0:
                q = np.int64(lane[seen[p]])
                for c in range(n_channels):
                    if shares[p, c] > 0.0 and user[c] >= 0 and lanes[user[c], fs.WIDTH] == 1:
                        limit[p] = min(limit[p], capacity[c] / shares[p, c])
                for c in range(n_channels):
                    if shares[p, c] > 0.0:
                        peak[q, c] = max(peak[q, c], min(cap[p], limit[p]) * shares[p, c])
            duration[p] = flow_ps(latency[p], volume[p], cap[p], limit[p])
            if duration[p] < 0:
                return False
    for r in range(n_carried):
        if c_float[r, fs.VOLUME] > 0.0:
            for c in range(n_channels):
                if c_shares[r, c] > 0.0 and user[c] >= 0 and lanes[user[c], fs.WIDTH] == 1:
                    c_limit[r] = min(c_limit[r], capacity[c] / c_shares[r, c])
            for c in range(n_channels):
                if c_shares[r, c] > 0.0:
                    x = min(c_float[r, fs.CAP], c_limit[r]) * c_shares[r, c]
                    peak[c_int[r, fs.LANE], c] = max(peak[c_int[r, fs.LANE], c], x)
    for c in range(n_channels):
        if user[c] == -1 or (user[c] >= 0 and lanes[user[c], fs.WIDTH] == 1):
            continue
        total = 0.0
        for q in range(n_lanes):
            total += lanes[q, fs.WIDTH] * peak[q, c]
        if not total < capacity[c] * MARGIN:
            return False
    return True


@njit(cache=True, error_model="numpy", nogil=True, _nrt=False, no_cfunc_wrapper=True)
def sweep(
    stamp, now, first, oldest, lanes, c_int, c_float, c_deps, recent, c_ids, lane, price, dep_start, dep_task, dep_type, duration, c_limit,
    start, end, server, cause, why, slot_since, slot_rate, slot_volume, slot_end, slot_task,
):  # fmt: skip
    """Fill the columns of the window in id order; False where a task is met that the linear pass must not handle.

    ``lanes`` is a copy: FREED_AT stands for the latest grant, TOUCHED_AT for the instant that IDLE_BEFORE and FREED_BY speak of.
    """
    n_carried = len(c_int)
    rows = len(start)
    r = 0
    while r < rows:
        f = r - n_carried
        q = c_int[r, fs.LANE] if f < 0 else np.int64(lane[f])
        on = lanes[q]
        offset, width = on[fs.OFFSET], on[fs.WIDTH]
        if f < 0 and c_int[r, fs.START] >= 0:  # under way
            flow, most = c_float[r, fs.VOLUME], c_float[r, fs.CAP]
            rate = most if most <= c_limit[r] else c_limit[r]
            start[r], server[r], cause[r], why[r] = c_int[r, fs.START], c_int[r, fs.SERVER], c_int[r, fs.CAUSE], c_int[r, fs.WHY]
            s = offset + c_int[r, fs.SERVER]
            slot_since[s], slot_rate[s], slot_volume[s] = c_int[r, fs.SINCE], c_float[r, fs.RATE], flow
            if c_int[r, fs.PHASE] == fs.IN_LATENCY and flow == 0.0:
                end[r] = c_int[r, fs.EVENT]
            elif c_int[r, fs.PHASE] == fs.IN_FLOW and c_float[r, fs.RATE] == rate:
                end[r] = c_int[r, fs.EVENT]
            else:
                slot_rate[s] = rate
                if c_int[r, fs.PHASE] == fs.IN_LATENCY:
                    slot_since[s] = c_int[r, fs.EVENT]
                else:  # its share changes at this instant
                    flow = flow - c_float[r, fs.RATE] * ((now - c_int[r, fs.SINCE]) / 1e12)
                    slot_since[s] = now
                    if flow < 0.0:
                        flow = 0.0
                slot_volume[s] = flow
                if not (rate > 0.0 and flow / rate < fs.LONGEST_S):
                    return False
                delay = fs.ceil_ps(flow / rate)
                if delay == 0:
                    return False
                end[r] = slot_since[s] + delay
            if end[r] <= now:
                return False
            slot_end[s], slot_task[s] = end[r], c_int[r, fs.ID]
            r += 1
            continue
        # of dependencies the latest end binds, at equal ends the largest id; without branches, as it cannot be foreseen which
        ended_at, bound, which = np.int64(fs.ENDED_BEFORE), np.int64(NO_CAUSE), np.int64(-1)
        if f < 0:
            spent, ready = flow_ps(c_int[r, fs.LATENCY], c_float[r, fs.VOLUME], c_float[r, fs.CAP], c_limit[r]), c_int[r, fs.ADDED]
            if spent < 0:
                return False
            ended_at, bound = c_int[r, fs.BOUND_END], c_int[r, fs.BOUND]
            for d in range(c_int[r, fs.DEP_FROM], c_int[r, fs.DEP_TO]):
                task = c_deps[d, 0]
                e = end[fs.row_of(task, first, oldest, rows, c_ids, recent)]
                better = (e > ended_at) | ((e == ended_at) & (task > bound))
                ended_at, bound, which = e if better else ended_at, task if better else bound, d if better else which
            bound_why = c_int[r, fs.BOUND_WHY] if which < 0 else c_deps[which, 1]
        else:
            spent, ready = duration[price[f]], now
            for d in range(dep_start[f], dep_start[f + 1]):
                task = dep_task[d]
                e = end[fs.row_of(task, first, oldest, rows, c_ids, recent)]
                better = (e > ended_at) | ((e == ended_at) & (task > bound))
                ended_at, bound, which = e if better else ended_at, task if better else bound, d if better else which
            bound_why = np.int64(fs.DATA if which < 0 else dep_type[which])
        own = c_int[r, fs.ID] if f < 0 else first + f
        ready = max(ready, ended_at)
        s = offset
        at = max(ready, slot_end[s])
        if width == 1 and at > now:  # after the first instant there is but one grant to a server at any
            if ready < at:
                bound, bound_why = slot_task[s], np.int64(BY_LANE)
            start[r], cause[r], why[r], end[r] = at, bound, bound_why, at + spent
            slot_end[s], slot_task[s] = at + spent, own
            r += 1
            continue
        for i in range(offset + 1, offset + width):
            if slot_end[i] < slot_end[s]:
                s = i
        at = max(ready, on[fs.FREED_AT], slot_end[s])
        if at != on[fs.TOUCHED_AT]:
            on[fs.TOUCHED_AT], on[fs.IDLE_BEFORE], on[fs.FREED_BY] = at, 0, NO_CAUSE
            for i in range(offset, offset + width):
                if slot_end[i] < at:
                    on[fs.IDLE_BEFORE] += 1
                elif slot_end[i] == at and slot_task[i] > on[fs.FREED_BY]:
                    on[fs.FREED_BY] = slot_task[i]
        s = offset
        while slot_end[s] > at:
            s += 1
        if ready < at and on[fs.IDLE_BEFORE] == 0:
            bound, bound_why = on[fs.FREED_BY], np.int64(BY_LANE)
        elif ready < at:
            bound, bound_why = on[fs.LAST], np.int64(CAUSE_HEAD_OF_LINE)
        start[r], server[r], cause[r], why[r], end[r] = at, s - offset, bound, bound_why, at + spent
        on[fs.FREED_AT], on[fs.LAST], slot_end[s], slot_task[s] = at, own, at + spent, own
        r += 1
    return True


@njit(cache=True, _nrt=False, no_cfunc_wrapper=True)
def settle(
    until, now, first, lanes, c_int, c_float, lane, price, latency, volume, cap, limit, c_limit,
    start, end, server, slot_phase, slot_event, slot_since, slot_rate, slot_volume, marked, missing,
):  # fmt: skip
    """Turn the finished columns into how things stand at ``until``: the gate has ended, nothing has been granted since.

    ``marked`` are the rows that had not ended before; ``missing`` (lanes,) is scratch.
    """
    n_carried, n_lanes, rows = len(c_int), len(lanes), len(start)
    for q in range(n_lanes):
        missing[q] = True
        lanes[q, fs.IDLE_BEFORE] = lanes[q, fs.IDLE_BEFORE] if until == now else lanes[q, fs.WIDTH]
    left = n_lanes  # lanes of which the task granted last has not been met: ``missing``, all of them at first
    r = rows
    while r > 0 and left > 0:
        r -= 1
        if start[r] < until:
            q = c_int[r, fs.LANE] if r < n_carried else np.int64(lane[r - n_carried])
            if missing[q]:
                missing[q], lanes[q, fs.LAST] = False, (c_int[r, fs.ID] if r < n_carried else first + r - n_carried)
                left -= 1
    for m in range(len(marked)):
        r = np.int64(marked[m])
        f = r - n_carried
        q = c_int[r, fs.LANE] if f < 0 else np.int64(lane[f])
        if start[r] < until:
            lanes[q, fs.IDLE_BEFORE] -= 1
            if end[r] == until:
                lanes[q, fs.TOUCHED_AT] = lanes[q, fs.FREED_AT] = until
                lanes[q, fs.FREED_BY] = c_int[r, fs.ID] if f < 0 else first + f
        if end[r] > until:
            if start[r] < until:
                s = lanes[q, fs.OFFSET] + server[r]
                if f >= 0 or c_int[r, fs.START] < 0:
                    fixed = c_int[r, fs.LATENCY] if f < 0 else latency[price[f]]
                    slot_since[s] = start[r] + fixed
                    slot_volume[s] = c_float[r, fs.VOLUME] if f < 0 else volume[price[f]]
                    most, own_limit = (c_float[r, fs.CAP], c_limit[r]) if f < 0 else (cap[price[f]], limit[price[f]])
                    slot_rate[s] = most if most <= own_limit else own_limit
                elif c_int[r, fs.PHASE] == fs.IN_LATENCY:
                    slot_since[s] = c_int[r, fs.EVENT]
                slot_phase[s], slot_event[s] = fs.IN_FLOW, end[r]
                if slot_volume[s] == 0.0 or slot_since[s] > until:
                    slot_phase[s], slot_rate[s] = fs.IN_LATENCY, 0.0
                    if slot_volume[s] > 0.0:
                        slot_event[s] = slot_since[s]
                elif slot_since[s] == until:  # it has begun to flow, but no rate has been given out at this instant
                    slot_rate[s], slot_event[s] = 0.0, fs.NEVER
            else:
                start[r] = -1
            end[r] = fs.NOT_ENDED


def run_linear(
    now, gate, first, lanes, c_int, c_float, c_shares, c_deps, recent,
    lane, use_step, use_layer, prefetch, price, dep_start, dep_task, dep_type, latency, volume, cap, shares, capacity,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the window up to the end of row ``gate`` (-1: to the end of all); return (status, task, now, what ended, next state)."""
    state = c_int, c_float, c_shares, c_deps, recent
    refused = fs.CONTENDED, -1, now, None, state
    n_prices, rows = len(shares), len(c_int) + len(lane)
    duration = np.empty(n_prices, np.int64)
    limit, c_limit = np.full(n_prices, math.inf), np.full(len(c_int), math.inf)
    scratch = np.full(n_prices, -1, np.int64), np.full(len(capacity), -1, np.int64), np.zeros((len(lanes), len(capacity)))
    costs = latency, volume, cap
    if not durations(fs.STAMP, lanes, c_int, c_float, c_shares, lane, price, *costs, shares, capacity, duration, limit, c_limit, *scratch):
        return refused
    c_ids = np.ascontiguousarray(c_int[:, fs.ID])
    oldest = fs.oldest_of(first, c_ids, recent)
    columns, slots = fs.columns(rows, now, empty=True), fs.slots(lanes)
    start, end, server, _, _ = columns
    _, _, slot_since, slot_rate, slot_volume = slots
    own_lanes = lanes.copy()
    own_lanes[:, fs.FREED_AT] = now
    ends = np.full(len(slot_since), now - 1, np.int64), np.full(len(slot_since), NO_CAUSE, np.int64)
    if not sweep(
        fs.STAMP, now, first, oldest, own_lanes, c_int, c_float, c_deps, recent, c_ids, lane, price, dep_start, dep_task, dep_type, duration, c_limit, *columns,
        slot_since, slot_rate, slot_volume, *ends,
    ):  # fmt: skip
        return refused
    until = int(end[gate]) if gate >= 0 else max(now, int(end[:rows].max(initial=now)))
    marked = fs.unended(end, until)
    settle(
        until, now, first, lanes, c_int, c_float, lane, price, *costs, limit, c_limit, start, end, server, *slots, marked,
        np.empty(len(lanes), np.bool_),
    )  # fmt: skip
    fragment = lane, use_step, use_layer, prefetch, price, dep_start, dep_task, dep_type, *costs, shares
    ended, state = fs.divide(until, now, first, oldest, lanes, state, c_ids, fragment, columns, slots, marked)
    return fs.OK, -1, until, ended, state
