# mypy: ignore-errors
"""Owns the event loop: timing rules 3 to 6 in full, instant by instant, in the three rounds of the reference engine.

There is no heap of events: servers are few, so the next instant is the least over their events. A waiting task watches one
dependency that has not ended and moves on to the next when that one ends; on a fifo lane only the head of the queue looks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from moesim.engines import fast_state as fs
from moesim.schedule import Dep
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE

BY_LANE = int(Dep.LANE)


@njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def push(heap_key, heap_row, base, size, key, row):
    """Add to the binary heap of (key, row) that fills ``size`` places from ``base``."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        p_key, p_row = heap_key[base + parent], heap_row[base + parent]
        if p_key < key or (p_key == key and p_row < row):
            break
        heap_key[base + i], heap_row[base + i] = p_key, p_row
        i = parent
    heap_key[base + i], heap_row[base + i] = key, row


@njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def pop(heap_key, heap_row, base, size):
    """Take the least row from the heap, which has ``size`` - 1 places then."""
    least = heap_row[base]
    size -= 1
    key, row = heap_key[base + size], heap_row[base + size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        a = base + child
        if child + 1 < size and (heap_key[a + 1] < heap_key[a] or (heap_key[a + 1] == heap_key[a] and heap_row[a + 1] < heap_row[a])):
            child += 1
            a += 1
        if key < heap_key[a] or (key == heap_key[a] and row < heap_row[a]):
            break
        heap_key[base + i], heap_row[base + i] = heap_key[a], heap_row[a]
        i = child
    heap_key[base + i], heap_row[base + i] = key, row
    return least


@njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def join(flow_slot, n_flows, slot_row, s):
    """Insert slot ``s`` among the flows, which stand by ascending row, and return how many there are now."""
    i = n_flows
    while i > 0 and slot_row[flow_slot[i - 1]] > slot_row[s]:
        flow_slot[i] = flow_slot[i - 1]
        i -= 1
    flow_slot[i] = s
    return n_flows + 1


def run_events(
    now, gate, stop, first, lanes, c_int, c_float, c_shares, c_deps, recent,
    lane, use_step, use_layer, prefetch, price, dep_start, dep_task, dep_type, latency, volume, cap, shares, capacity,
) -> tuple[Any, ...]:  # fmt: skip
    """Run the window up to the end of row ``gate`` (-1: of all), or until ``stop`` if that is not NEVER, where the clock then stands;
    return (status, task, now, what ended, next state)."""
    state = c_int, c_float, c_shares, c_deps, recent
    c_ids = np.ascontiguousarray(c_int[:, fs.ID])
    oldest = fs.oldest_of(first, c_ids, recent)
    columns, slots = fs.columns(len(c_int) + len(lane), now), fs.slots(lanes)
    fragment = lane, use_step, use_layer, prefetch, price, dep_start, dep_task, dep_type, latency, volume, cap, shares
    by_lane = np.bincount(np.concatenate([c_int[:, fs.LANE], lane]), minlength=len(lanes))
    queue_at = np.concatenate([[0], np.cumsum(by_lane)])
    n_slots = len(slots[0])
    scratch = (
        np.empty((5, len(c_int) + len(lane)), np.int64), np.empty((6, len(lanes)), np.int64), np.zeros((3, n_slots), np.int64),
        np.zeros((2, n_slots)), np.zeros((n_slots, len(capacity))),
    )  # fmt: skip
    status, culprit, until = events(
        fs.STAMP, now, gate, stop, first, oldest, lanes, *state, c_ids, *fragment, capacity, *columns, *slots, queue_at, *scratch,
    )  # fmt: skip
    if stop != fs.NEVER:
        until = stop
    ended, state = fs.divide(until, now, first, oldest, lanes, state, c_ids, fragment, columns, slots, fs.unended(columns[1], until))
    return status, culprit, until, ended, state


@njit(cache=True, error_model="numpy", nogil=True, _nrt=False, no_cfunc_wrapper=True)
def events(
    stamp, now, gate, stop, first, oldest, lanes, c_int, c_float, c_shares, c_deps, recent, c_ids,
    lane, use_step, use_layer, prefetch, price, dep_start, dep_task, dep_type, latency, volume, cap, shares, capacity,
    start, end, server, cause, why, slot_phase, slot_event, slot_since, slot_rate, slot_volume, queue_at,
    by_row, by_lane, by_slot, flow_limits, flow_shares,
):  # fmt: skip
    """Fill the columns and slots of the window up to the end of row ``gate``; return (status, task, now).

    ``queue_at`` (lanes + 1,) is where the tasks of each lane begin, if rows are sorted by lane. What stands behind it is scratch.
    """
    began = now
    n_carried, n_lanes, n_channels = len(c_int), len(lanes), len(capacity)
    rows, n_slots = len(start), len(slot_event)
    behind = len(dep_task)
    ready_at, queue = by_row[0], by_row[1]
    heap_key = by_row[2]  # priority lanes use their stretch of the queue as a heap
    watchers, watchers_next = by_row[3], by_row[4]  # of priority lanes: the first task that watches a row, and the next one after it
    slot_row, slot_lane = by_slot[0], by_slot[1]
    flow_slot = by_slot[2]  # the slots of flows, by ascending row
    flow_cap, flow_rate = flow_limits[0], flow_limits[1]
    n_flows = 0
    share = False
    status, culprit = fs.OK, np.int64(-1)

    # per lane: how many of its tasks have left the queue, the dependency its head waits for, its heap
    head, tail, blocked = by_lane[0], by_lane[1], by_lane[2]
    pending = by_lane[3]  # priority lanes: the first task that may have become ready, linked by ``watchers_next``
    n_ready, n_free = by_lane[4], by_lane[5]
    by_priority = False
    for q in range(n_lanes):
        head[q] = tail[q] = queue_at[q]
        blocked[q] = pending[q] = -1
        n_ready[q] = 0
        n_free[q] = lanes[q, fs.WIDTH]
        for i in range(lanes[q, fs.OFFSET], lanes[q, fs.OFFSET] + lanes[q, fs.WIDTH]):
            slot_lane[i] = q
            slot_row[i] = -1
        by_priority = by_priority or lanes[q, fs.PRIORITY] == 1
    if by_priority:
        for r in range(rows):
            watchers[r] = watchers_next[r] = -1
    left = rows
    for r in range(rows):
        f = r - n_carried
        q = c_int[r, fs.LANE] if f < 0 else np.int64(lane[f])
        if f < 0 and c_int[r, fs.START] >= 0:
            s = lanes[q, fs.OFFSET] + c_int[r, fs.SERVER]
            start[r], server[r], cause[r], why[r] = c_int[r, fs.START], c_int[r, fs.SERVER], c_int[r, fs.CAUSE], c_int[r, fs.WHY]
            slot_row[s], slot_phase[s], slot_event[s], slot_since[s] = r, c_int[r, fs.PHASE], c_int[r, fs.EVENT], c_int[r, fs.SINCE]
            slot_rate[s], slot_volume[s] = c_float[r, fs.RATE], c_float[r, fs.VOLUME]
            n_free[q] -= 1
            if c_int[r, fs.PHASE] == fs.IN_FLOW:
                flow_slot[n_flows] = s
                n_flows += 1
                share = True  # capacities may have changed at this step border
        elif lanes[q, fs.PRIORITY] == 0:
            queue[tail[q]] = r
            tail[q] += 1
        else:
            watchers_next[r], pending[q] = pending[q], r

    while status == fs.OK:
        # grant, lane by lane
        again = False
        for q in range(n_lanes):
            urgent = lanes[q, fs.PRIORITY] == 1
            while n_free[q] > 0 or pending[q] >= 0:
                look = True
                if not urgent:
                    if head[q] == tail[q] or (blocked[q] >= 0 and end[blocked[q]] == fs.NOT_ENDED):
                        break
                    r = queue[head[q]]
                elif pending[q] >= 0:
                    r = pending[q]
                    pending[q] = watchers_next[r]
                else:
                    if n_ready[q] == 0:
                        break
                    r = pop(heap_key, queue, queue_at[q], n_ready[q])
                    n_ready[q] -= 1
                    look = False
                f = r - n_carried
                if look:  # of dependencies the latest end binds, at equal ends the largest id
                    ended_at, bound, which, watch = np.int64(fs.ENDED_BEFORE), np.int64(NO_CAUSE), np.int64(-1), np.int64(-1)
                    d, d_end, added = np.int64(0), np.int64(0), began
                    if f < 0:
                        ended_at, bound, added = c_int[r, fs.BOUND_END], c_int[r, fs.BOUND], c_int[r, fs.ADDED]
                        d, d_end = behind + c_int[r, fs.DEP_FROM], behind + c_int[r, fs.DEP_TO]
                    else:
                        d, d_end = dep_start[f], dep_start[f + 1]
                    while d < d_end:
                        task = c_deps[d - behind, 0] if f < 0 else dep_task[d]
                        row = fs.row_of(task, first, oldest, rows, c_ids, recent)
                        e = end[row]
                        if e == fs.NOT_ENDED:
                            watch = row
                            break
                        better = (e > ended_at) | ((e == ended_at) & (task > bound))
                        ended_at, bound, which = e if better else ended_at, task if better else bound, d if better else which
                        d += 1
                    if not urgent:
                        blocked[q] = watch
                        if watch >= 0:
                            break
                        head[q] += 1
                    elif watch >= 0:
                        watchers_next[r], watchers[watch] = watchers[watch], r
                        continue
                    ready_at[r], cause[r] = max(ended_at, added), bound
                    if which >= 0:
                        why[r] = c_deps[which - behind, 1] if f < 0 else dep_type[which]
                    elif f < 0:
                        why[r] = c_int[r, fs.BOUND_WHY]
                    if urgent:
                        key = c_int[r, fs.KEY] if f < 0 else fs.urgency(use_step[f], use_layer[f], prefetch[f])
                        push(heap_key, queue, queue_at[q], n_ready[q], key, r)
                        n_ready[q] += 1
                        continue
                own = c_int[r, fs.ID] if f < 0 else first + f
                if lanes[q, fs.TOUCHED_AT] != now:
                    lanes[q, fs.TOUCHED_AT], lanes[q, fs.IDLE_BEFORE] = now, n_free[q]
                if ready_at[r] < now:
                    if lanes[q, fs.IDLE_BEFORE] == 0:
                        cause[r], why[r] = lanes[q, fs.FREED_BY], BY_LANE
                    elif lanes[q, fs.LAST] >= 0:
                        cause[r], why[r] = lanes[q, fs.LAST], CAUSE_HEAD_OF_LINE
                    else:
                        status, culprit = fs.NO_REASON, own
                lanes[q, fs.LAST] = own
                s = lanes[q, fs.OFFSET]
                while slot_row[s] >= 0:
                    s += 1
                start[r], server[r], slot_row[s] = now, s - lanes[q, fs.OFFSET], r
                n_free[q] -= 1
                fixed = c_int[r, fs.LATENCY] if f < 0 else latency[price[f]]
                slot_volume[s] = c_float[r, fs.VOLUME] if f < 0 else volume[price[f]]
                slot_phase[s], slot_event[s] = fs.IN_LATENCY, now + fixed
                if fixed == 0 and slot_volume[s] > 0.0:
                    slot_phase[s], slot_event[s], slot_since[s], slot_rate[s] = fs.IN_FLOW, fs.NEVER, now, 0.0
                    n_flows = join(flow_slot, n_flows, slot_row, s)
                    share = True
                elif fixed == 0:  # it ends in the next round of this instant
                    again = True
        # share
        if share and not again and status == fs.OK:
            share = False
            for i in range(n_flows):
                r = slot_row[flow_slot[i]]
                flow_cap[i] = c_float[r, fs.CAP] if r < n_carried else cap[price[r - n_carried]]
                for c in range(n_channels):
                    flow_shares[i, c] = c_shares[r, c] if r < n_carried else shares[price[r - n_carried], c]
            fs.max_min_rates(flow_shares, flow_cap[:n_flows], capacity, flow_rate)
            for i in range(n_flows):
                s, rate = flow_slot[i], flow_rate[i]
                if not rate > 0.0:
                    r = slot_row[s]
                    status, culprit = fs.NEVER_ENDS, (c_int[r, fs.ID] if r < n_carried else first + r - n_carried)
                    break
                if rate == slot_rate[s]:
                    continue
                rest = slot_volume[s] - slot_rate[s] * ((now - slot_since[s]) / 1e12)
                if rest < 0.0:
                    rest = 0.0
                slot_volume[s], slot_rate[s], slot_since[s] = rest, rate, now
                if not rest / rate < fs.LONGEST_S:
                    r = slot_row[s]
                    status, culprit = fs.TOO_LONG, (c_int[r, fs.ID] if r < n_carried else first + r - n_carried)
                    break
                slot_event[s] = now + fs.ceil_ps(rest / rate)
        # the next instant
        if status != fs.OK or left == 0:
            break
        upcoming = fs.NEVER
        for s in range(n_slots):
            if slot_event[s] < upcoming:
                upcoming = slot_event[s]
        if upcoming == fs.NEVER:
            status = fs.DEADLOCK
            break
        if upcoming > stop:
            break
        now = upcoming
        # retire
        for s in range(n_slots):
            if slot_event[s] != now:
                continue
            r = slot_row[s]
            if slot_phase[s] == fs.IN_LATENCY and slot_volume[s] > 0.0:
                slot_phase[s], slot_event[s], slot_since[s], slot_rate[s] = fs.IN_FLOW, fs.NEVER, now, 0.0
                n_flows = join(flow_slot, n_flows, slot_row, s)
                share = True
                continue
            if slot_phase[s] == fs.IN_FLOW:
                i = 0
                while flow_slot[i] != s:
                    i += 1
                n_flows -= 1
                while i < n_flows:
                    flow_slot[i] = flow_slot[i + 1]
                    i += 1
                share = share or n_flows > 0
            q = slot_lane[s]
            own = c_int[r, fs.ID] if r < n_carried else first + r - n_carried
            if lanes[q, fs.TOUCHED_AT] != now:
                lanes[q, fs.TOUCHED_AT], lanes[q, fs.IDLE_BEFORE] = now, n_free[q]
            if lanes[q, fs.FREED_AT] != now or own > lanes[q, fs.FREED_BY]:
                lanes[q, fs.FREED_AT], lanes[q, fs.FREED_BY] = now, own
            n_free[q] += 1
            slot_row[s], slot_event[s] = -1, fs.NEVER
            end[r] = now
            left -= 1
            if by_priority:
                waiting = watchers[r]
                while waiting >= 0:
                    following = watchers_next[waiting]
                    q = c_int[waiting, fs.LANE] if waiting < n_carried else np.int64(lane[waiting - n_carried])
                    watchers_next[waiting], pending[q] = pending[q], waiting
                    waiting = following
        if gate >= 0 and end[gate] != fs.NOT_ENDED:
            break
    return status, culprit, now
