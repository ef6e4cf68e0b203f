# mypy: ignore-errors
"""Owns the inner loop of re-timing: one pass over the tasks in id order, with many variants side by side.

On fifo lanes without contention (see fast_linear.py) a schedule is a max-plus recursion per variant v:

    start[i, v] = max(end[d, v] for its dependencies d, latest grant of its lane, earliest end on the lane's servers)
    end[i, v] = start[i, v] + duration[i, v]

so variants stand in the last axis and the processor computes several at once.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moesim.engines.fast_linear import MARGIN
from moesim.engines.fast_state import LONGEST_S, OFFSET, WIDTH, ceil_ps


@njit(cache=True, nogil=True)
def note_users(user, on, volume, shares):
    """Note in ``user`` the one lane whose flows use a channel, -1 where there is none and -2 where there are several."""
    for p in range(len(on)):
        if volume[p] > 0.0 and on[p] >= 0:
            for c in range(len(user)):
                if shares[p, c] > 0.0 and user[c] != on[p]:
                    user[c] = on[p] if user[c] == -1 else -2


@njit(cache=True, error_model="numpy", nogil=True)
def durations(user, peak, lanes, on, latency, volume, cap, shares, capacity, duration):
    """Fill ``duration`` (P,) of one variant; False if a channel may be contended, given the ``peak`` (lanes, C) of what came before."""
    for p in range(len(on)):
        if on[p] < 0:
            continue
        duration[p] = latency[p]
        if volume[p] > 0.0:
            limit = np.inf
            for c in range(len(user)):
                if shares[p, c] > 0.0 and user[c] >= 0 and lanes[user[c], WIDTH] == 1:
                    limit = min(limit, capacity[c] / shares[p, c])
            rate = cap[p] if cap[p] <= limit else limit
            if not (rate > 0.0 and volume[p] / rate < LONGEST_S):
                return False
            duration[p] += ceil_ps(volume[p] / rate)
            for c in range(len(user)):
                if shares[p, c] > 0.0:
                    peak[on[p], c] = max(peak[on[p], c], rate * shares[p, c])
    for c in range(len(user)):
        if user[c] == -1 or (user[c] >= 0 and lanes[user[c], WIDTH] == 1):
            continue
        total = 0.0
        for q in range(len(lanes)):
            total += lanes[q, WIDTH] * peak[q, c]
        if not total < capacity[c] * MARGIN:
            return False
    return True


@njit(cache=True, nogil=True)
def sweep_variants(first, lanes, lane, price, dep_start, dep_task, duration, end, granted, slot_end, now):
    """Extend ``end`` (tasks, V) by a fragment; ``duration`` is (P, V), ``granted`` (lanes, V), ``slot_end`` (servers, V)."""
    n_variants = end.shape[1]
    for f in range(len(lane)):
        q, p = np.int64(lane[f]), price[f]
        s = lanes[q, OFFSET]
        for v in range(n_variants):
            now[v] = max(granted[q, v], slot_end[s, v])
        if lanes[q, WIDTH] > 1:
            for v in range(n_variants):
                least = slot_end[s, v]
                for i in range(s + 1, s + lanes[q, WIDTH]):
                    least = min(least, slot_end[i, v])
                now[v] = max(granted[q, v], least)
        for d in range(dep_start[f], dep_start[f + 1]):
            before = dep_task[d]
            for v in range(n_variants):
                now[v] = max(now[v], end[before, v])
        own = first + f
        for v in range(n_variants):
            granted[q, v] = now[v]
            end[own, v] = now[v] + duration[p, v]
        if lanes[q, WIDTH] == 1:
            for v in range(n_variants):
                slot_end[s, v] = end[own, v]
        else:
            for v in range(n_variants):
                least = s
                for i in range(s + 1, s + lanes[q, WIDTH]):
                    if slot_end[i, v] < slot_end[least, v]:
                        least = i
                slot_end[least, v] = end[own, v]
