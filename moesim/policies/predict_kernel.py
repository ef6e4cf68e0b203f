# mypy: ignore-errors
"""Owns compiled loops of the learned predictors: who met whom in training, and the largest sums of table rows.

The readable truth is ``_meetings``, ``_sum_of_rows`` and ``_best`` in ``learned.py``; these loops add in the same order and give equal
results. Compiled without reference counts: all arrays come in from outside.
"""

from __future__ import annotations

import math

from numba import njit

compiled = njit(cache=True, nogil=True, _nrt=False, no_cfunc_wrapper=True)


@compiled
def meetings(a, b, counts):
    """Add to ``counts`` (I, X) int64 the rows in which i is in ``a`` (n, A) and x in ``b`` (n, B), rows that begin with -1 in either left out."""
    for r in range(a.shape[0]):
        if a[r, 0] >= 0 and b[r, 0] >= 0:
            for i in range(a.shape[1]):
                row = counts[a[r, i]]
                for x in range(b.shape[1]):
                    row[b[r, x]] += 1


@compiled
def best_sums(table, cells, order, scores, best, value):
    """The largest sums of the rows of ``table`` (rows, E) that ``cells`` (n, slots) name, the first of equal ones first.

    ``order`` (E,) names the columns, ``scores`` (E,) is scratch; ``best`` and ``value`` (n, K) are the columns' names and their sums. Rows
    that begin with -1 are left as they are.
    """
    n_columns, top_k, n_slots = table.shape[1], best.shape[1], cells.shape[1]
    for r in range(cells.shape[0]):
        if cells[r, 0] < 0:
            continue
        for x in range(n_columns):
            scores[x] = 0.0
        slot = 0
        while slot + 4 <= n_slots:  # four rows a pass, each sum from left to right
            a, b, c, d = table[cells[r, slot]], table[cells[r, slot + 1]], table[cells[r, slot + 2]], table[cells[r, slot + 3]]
            for x in range(n_columns):
                scores[x] = scores[x] + a[x] + b[x] + c[x] + d[x]
            slot += 4
        while slot < n_slots:
            a = table[cells[r, slot]]
            for x in range(n_columns):
                scores[x] += a[x]
            slot += 1
        for k in range(top_k):
            value[r, k] = -math.inf
        least = -math.inf
        for x in range(n_columns):
            score = scores[x]
            if score > least:
                k = top_k - 1
                while k > 0 and score > value[r, k - 1]:
                    value[r, k], best[r, k] = value[r, k - 1], best[r, k - 1]
                    k -= 1
                value[r, k], best[r, k] = score, order[x]
                least = value[r, top_k - 1]
