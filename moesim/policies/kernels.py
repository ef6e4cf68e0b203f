# mypy: ignore-errors
"""Owns compiled replays of caches: hits of LRU, LFU and Belady over the sets of a trace, for statistics over long traces.

The readable truth is ``policies.cache.ExpertPool``; these kernels are tested equal to it, hit for hit. Every expert takes one slot,
sets are atomic, misses are admitted (the rules stand in ``policies.cache``). LRU over all capacities at once uses the inclusion
property (Mattson et al. 1970, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2)).
"""

from __future__ import annotations

import numpy as np
from numba import njit

LFU, BELADY = 0, 1
NEVER = 2**62


@njit(cache=True)
def lru_replay(cells, fresh, n_keys, slots):
    """Hits of each set under LRU.

    Parameters
    ----------
    cells : (R, K) int
        Keys of each set, ascending.
    fresh : (R,) bool
        Sets before which the cache is emptied.
    n_keys, slots : int
        Keys there are, and slots of the cache, at least K.

    Returns
    -------
    (R,) int64
    """
    newer = np.full(n_keys + 1, -1, np.int64)  # a ring through the end n_keys: newer[end] is the oldest resident
    older = np.full(n_keys + 1, -1, np.int64)
    end = n_keys
    newer[end] = older[end] = end
    size = 0
    hits = np.zeros(cells.shape[0], np.int64)
    for r in range(cells.shape[0]):
        if fresh[r]:
            while newer[end] != end:
                key = newer[end]
                newer[end] = newer[key]
                newer[key] = older[key] = -1
            older[end] = end
            size = 0
        for k in range(cells.shape[1]):
            key = cells[r, k]
            if newer[key] >= 0:  # a hit leaves the ring for now, so that no member is a victim
                hits[r] += 1
                newer[older[key]] = newer[key]
                older[newer[key]] = older[key]
                newer[key] = older[key] = -1
                size -= 1
        while size + cells.shape[1] > slots:
            key = newer[end]
            newer[end] = newer[key]
            older[newer[key]] = end
            newer[key] = older[key] = -1
            size -= 1
        for k in range(cells.shape[1]):
            key = cells[r, k]
            last = older[end]
            newer[last], older[key], newer[key], older[end] = key, last, end, key
        size += cells.shape[1]
    return hits


@njit(cache=True)
def ranked_replay(policy, cells, next_use, n_keys, slots):
    """Hits of all sets under LFU (fewest uses, then longest unused, then smallest id leaves) or Belady's rule.

    ``next_use`` (R, K) is the next set that uses each member, ``NEVER`` where there is none; see ``next_uses``.
    """
    resident = np.zeros(n_keys, np.bool_)
    member = np.zeros(n_keys, np.bool_)
    uses = np.zeros(n_keys, np.int64)
    used = np.zeros(n_keys, np.int64)
    coming = np.zeros(n_keys, np.int64)
    size = hits = 0
    for r in range(cells.shape[0]):
        missing = 0
        for k in range(cells.shape[1]):
            key = cells[r, k]
            member[key] = True
            if resident[key]:
                hits += 1
            else:
                missing += 1
        while size + missing > slots:
            worst = -1
            for key in range(n_keys):
                if resident[key] and not member[key]:
                    if worst < 0:
                        worst = key
                    elif policy == BELADY:
                        if coming[key] > coming[worst]:
                            worst = key
                    elif uses[key] < uses[worst] or (uses[key] == uses[worst] and used[key] < used[worst]):
                        worst = key
            resident[worst] = False
            size -= 1
        for k in range(cells.shape[1]):
            key = cells[r, k]
            member[key] = False
            uses[key] += 1
            used[key] = r
            coming[key] = next_use[r, k]
            resident[key] = True
        size += missing
    return hits


@njit(cache=True)
def next_uses(cells, n_keys):
    """For each member of each set the next set that uses it, (R, K) int64."""
    coming = np.full(n_keys, NEVER, np.int64)
    out = np.empty(cells.shape, np.int64)
    for r in range(cells.shape[0] - 1, -1, -1):
        for k in range(cells.shape[1]):
            out[r, k] = coming[cells[r, k]]
        for k in range(cells.shape[1]):
            coming[cells[r, k]] = r
    return out


@njit(cache=True)
def stack_depths(cells, n_experts):
    """Count accesses by LRU stack depth: how many experts were more recent, those of one row ranked by id; never used: n_experts.

    ``cells`` is (R, K), ascending in each row; returns (E + 1,) int64.
    """
    stamp = np.full(n_experts, -1, np.int64)
    counts = np.zeros(n_experts + 1, np.int64)
    for r in range(cells.shape[0]):
        for k in range(cells.shape[1]):
            own = stamp[cells[r, k]]
            if own < 0:
                counts[n_experts] += 1
                continue
            depth = 0
            for e in range(n_experts):
                if stamp[e] > own:
                    depth += 1
            counts[depth] += 1
        for k in range(cells.shape[1]):
            stamp[cells[r, k]] = r * n_experts + cells[r, k]
    return counts


@njit(cache=True)
def common(a, b, n_experts):
    """Number of members that the sets (R, K) and (R, J) share, row by row; -1 matches nothing."""
    stamp = np.full(n_experts, -1, np.int64)
    shared = 0
    for r in range(a.shape[0]):
        for k in range(a.shape[1]):
            if a[r, k] >= 0:
                stamp[a[r, k]] = r
        for j in range(b.shape[1]):
            if b[r, j] >= 0 and stamp[b[r, j]] == r:
                shared += 1
    return shared
