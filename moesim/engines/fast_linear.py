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

import numpy as np
from numba import njit

from moesim.engines import fast_state as fs
from moesim.schedule import Dep
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE

MARGIN = 1 - 1e-9  # sums of rates round; below it max-min gives every flow its cap, to the bit
BY_LANE = int(Dep.LANE)


@njit(cache=True, error_model="numpy", nogil=True)
def own_limits(lanes, c_int, c_float, c_shares, lane, work, volume, cap, shares, capacity):
    """Return whether no channel can be contended, and the rate that channels of one's own allow, per work and per carried task."""
    n_lanes, n_works, n_channels, n_carried = len(lanes), len(shares), len(capacity), len(c_int)
    on = np.full(n_works, -1, np.int64)  # the lane of each work that flows
    top = np.zeros(n_works)
    limit = np.full(n_works, math.inf)
    c_limit = np.full(n_carried, math.inf)
    for f in range(len(work)):
        w = work[f]
        if volume[f] > 0.0:
            if on[w] < 0:
                on[w] = lane[f]
            elif on[w] != lane[f]:
                return False, limit, c_limit
            if cap[f] > top[w]:
                top[w] = cap[f]
    user = np.full(n_channels, -1, np.int64)  # its lane, -2 where there are several
    for w in range(n_works):
        if on[w] >= 0:
            for c in range(n_channels):
                if shares[w, c] > 0.0 and user[c] != on[w]:
                    user[c] = on[w] if user[c] == -1 else -2
    for r in range(n_carried):
        if c_float[r, fs.VOLUME] > 0.0:
            for c in range(n_channels):
                if c_shares[r, c] > 0.0 and user[c] != c_int[r, fs.LANE]:
                    user[c] = c_int[r, fs.LANE] if user[c] == -1 else -2
    peak = np.zeros((n_lanes, n_channels))
    for w in range(n_works):
        if on[w] >= 0:
            for c in range(n_channels):
                if shares[w, c] > 0.0 and user[c] >= 0 and lanes[user[c], fs.WIDTH] == 1:
                    limit[w] = min(limit[w], capacity[c] / shares[w, c])
            for c in range(n_channels):
                if shares[w, c] > 0.0:
                    peak[on[w], c] = max(peak[on[w], c], min(top[w], limit[w]) * shares[w, c])
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
            return False, limit, c_limit
    return True, limit, c_limit


@njit(cache=True, error_model="numpy", nogil=True)
def sweep(
    now, first, lanes, c_int, c_float, c_deps, lane, work, dep_start, dep_task, dep_type, latency, volume, cap, limit, c_limit, dep_row,
    start, end, server, cause, why, slot_since, slot_rate, slot_volume,
):  # fmt: skip
    """Fill the columns of the window in id order; False where a task is met that the linear pass must not handle.

    No function that takes arrays is called in here, as each call would count references, atomically.
    """
    n_carried, n_lanes, n_slots, behind = len(c_int), len(lanes), len(slot_since), len(dep_task)
    rows = len(start)
    # per lane: the latest grant, the instant that ``idle`` and ``freed`` speak of, the task granted last
    granted, instant, idle = np.full(n_lanes, now, np.int64), lanes[:, fs.TOUCHED_AT].copy(), lanes[:, fs.IDLE_BEFORE].copy()
    freed, last = lanes[:, fs.FREED_BY].copy(), lanes[:, fs.LAST].copy()
    slot_end = np.full(n_slots, now - 1, np.int64)
    slot_task = np.full(n_slots, NO_CAUSE, np.int64)
    r = 0
    while r < rows:
        f = r - n_carried
        if f < 0:
            q, flow, most, own_limit, fixed = c_int[r, fs.LANE], c_float[r, fs.VOLUME], c_float[r, fs.CAP], c_limit[r], c_int[r, fs.LATENCY]
        else:
            q, flow, most, own_limit, fixed = np.int64(lane[f]), volume[f], cap[f], limit[work[f]], latency[f]
        offset, width = lanes[q, fs.OFFSET], lanes[q, fs.WIDTH]
        rate = most if most <= own_limit else own_limit
        if f < 0 and c_int[r, fs.START] >= 0:  # under way
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
        duration = fixed
        if flow > 0.0:
            if not (rate > 0.0 and flow / rate < fs.LONGEST_S):
                return False
            delay = fs.ceil_ps(flow / rate)
            if delay == 0:
                return False
            duration += delay
        if duration == 0:
            return False
        # of dependencies the latest end binds, at equal ends the largest id; without branches, as it cannot be foreseen which
        ended_at, bound, which = np.int64(fs.ENDED_BEFORE), np.int64(NO_CAUSE), np.int64(-1)
        if f < 0:
            ended_at, bound, ready = c_int[r, fs.BOUND_END], c_int[r, fs.BOUND], c_int[r, fs.ADDED]
            for d in range(behind + c_int[r, fs.DEP_FROM], behind + c_int[r, fs.DEP_TO]):
                task, e = c_deps[d - behind, 0], end[dep_row[d]]
                better = (e > ended_at) | ((e == ended_at) & (task > bound))
                ended_at, bound, which = e if better else ended_at, task if better else bound, d if better else which
            bound_why = c_int[r, fs.BOUND_WHY] if which < 0 else c_deps[which - behind, 1]
        else:
            for d in range(dep_start[f], dep_start[f + 1]):
                task, e = dep_task[d], end[dep_row[d]]
                better = (e > ended_at) | ((e == ended_at) & (task > bound))
                ended_at, bound, which = e if better else ended_at, task if better else bound, d if better else which
            ready = now
            bound_why = np.int64(fs.DATA if which < 0 else dep_type[which])
        ready = max(ready, ended_at)
        s = offset
        for i in range(offset + 1, offset + width):
            if slot_end[i] < slot_end[s]:
                s = i
        at = max(ready, granted[q], slot_end[s])
        if at != instant[q]:
            instant[q], idle[q], freed[q] = at, 0, NO_CAUSE
            for i in range(offset, offset + width):
                if slot_end[i] < at:
                    idle[q] += 1
                elif slot_end[i] == at and slot_task[i] > freed[q]:
                    freed[q] = slot_task[i]
        s = offset
        while slot_end[s] > at:
            s += 1
        if ready == at:
            cause[r], why[r] = bound, bound_why
        elif idle[q] == 0:
            cause[r], why[r] = freed[q], BY_LANE
        else:
            cause[r], why[r] = last[q], CAUSE_HEAD_OF_LINE
        own = c_int[r, fs.ID] if f < 0 else first + f
        start[r], server[r], end[r] = at, s - offset, at + duration
        granted[q], last[q], slot_end[s], slot_task[s] = at, own, at + duration, own
        r += 1
    return True


@njit(cache=True)
def settle(
    until, now, first, lanes, c_int, c_float, lane, work, latency, volume, cap, limit, c_limit,
    start, end, server, slot_phase, slot_event, slot_since, slot_rate, slot_volume,
):  # fmt: skip
    """Turn the finished columns into how things stand at ``until``: the gate has ended, nothing has been granted since."""
    n_carried, n_lanes, rows = len(c_int), len(lanes), len(start)
    for q in range(n_lanes):
        lanes[q, fs.IDLE_BEFORE] = lanes[q, fs.IDLE_BEFORE] if until == now else lanes[q, fs.WIDTH]
    for r in range(rows):  # as things stand when the gate has ended and nothing has been granted since
        f = r - n_carried
        q = c_int[r, fs.LANE] if f < 0 else np.int64(lane[f])
        if start[r] < until:
            lanes[q, fs.LAST] = c_int[r, fs.ID] if f < 0 else first + f
            if end[r] >= until:
                lanes[q, fs.IDLE_BEFORE] -= 1
            if end[r] == until:
                lanes[q, fs.TOUCHED_AT] = lanes[q, fs.FREED_AT] = until
                lanes[q, fs.FREED_BY] = c_int[r, fs.ID] if f < 0 else first + f
        if end[r] > until:
            if start[r] < until:
                s = lanes[q, fs.OFFSET] + server[r]
                if f >= 0 or c_int[r, fs.START] < 0:
                    fixed = c_int[r, fs.LATENCY] if f < 0 else latency[f]
                    slot_since[s] = start[r] + fixed
                    slot_volume[s] = c_float[r, fs.VOLUME] if f < 0 else volume[f]
                    most, own_limit = (c_float[r, fs.CAP], c_limit[r]) if f < 0 else (cap[f], limit[work[f]])
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


@njit(cache=True, error_model="numpy", nogil=True)
def run_linear(
    stamp, now, gate, first, lanes, c_int, c_float, c_shares, c_deps, recent,
    lane, use_step, use_layer, prefetch, work, dep_start, dep_task, dep_type, latency, volume, cap, shares, capacity,
):  # fmt: skip
    """Run the window up to the end of row ``gate`` (-1: to the end of all); return (status, task, now, what ended, next state)."""
    rows, n_slots = len(c_int) + len(lane), lanes[-1, fs.OFFSET] + lanes[-1, fs.WIDTH]
    start = np.full(rows, -1, np.int64)
    server = np.zeros(rows, np.int16)
    cause = np.full(rows, NO_CAUSE, np.int64)
    why = np.zeros(rows, np.int8)
    refused = (start[:0], start[:0], start[:0], server[:0], cause[:0], why[:0]), (c_int, c_float, c_shares, c_deps, recent)
    calm, limit, c_limit = own_limits(lanes, c_int, c_float, c_shares, lane, work, volume, cap, shares, capacity)
    if not calm:
        return fs.CONTENDED, np.int64(-1), now, *refused
    end = fs.ends(rows, now)
    slot_phase, slot_event, slot_since = np.zeros(n_slots, np.int64), np.full(n_slots, fs.NEVER, np.int64), np.zeros(n_slots, np.int64)
    slot_rate, slot_volume = np.zeros(n_slots), np.zeros(n_slots)
    dep_row = fs.resolve(first, c_int, c_deps, recent, dep_start, dep_task)
    if not sweep(
        now, first, lanes, c_int, c_float, c_deps, lane, work, dep_start, dep_task, dep_type, latency, volume, cap, limit, c_limit, dep_row,
        start, end, server, cause, why, slot_since, slot_rate, slot_volume,
    ):  # fmt: skip
        return fs.CONTENDED, np.int64(-1), now, *refused
    until = now
    if gate >= 0:
        until = end[gate]
    else:
        for r in range(rows):
            until = max(until, end[r])
    settle(
        until, now, first, lanes, c_int, c_float, lane, work, latency, volume, cap, limit, c_limit,
        start, end, server, slot_phase, slot_event, slot_since, slot_rate, slot_volume,
    )  # fmt: skip
    ended, state = fs.collect(
        until, now, first, lanes, c_int, c_float, c_shares, c_deps, recent, dep_row,
        lane, use_step, use_layer, prefetch, work, dep_start, dep_task, dep_type, latency, volume, cap, shares,
        start, end, server, cause, why, slot_phase, slot_event, slot_since, slot_rate, slot_volume,
    )  # fmt: skip
    return fs.OK, np.int64(-1), until, ended, state
