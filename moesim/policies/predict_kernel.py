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
    """Add to ``counts`` (I, X) int64 the rows in which i is in ``a`` (n, A) and x in ``b`` (n, B); both int64."""
    for r in range(a.shape[0]):
        for i in range(a.shape[1]):
            for x in range(b.shape[1]):
                counts[a[r, i], b[r, x]] += 1


@compiled
def best_sums(table, cells, scores, best, value):
    """Columns of the largest sums of the rows of ``table`` (rows, E) that ``cells`` (n, slots) int64 name, the first of equal ones first.

    ``scores`` (E,) is scratch; ``best`` and ``value`` (n, K) are the columns and their sums.
    """
    n_columns, top_k = table.shape[1], best.shape[1]
    for r in range(cells.shape[0]):
        for x in range(n_columns):
            scores[x] = 0.0
        slot = 0
        while slot + 4 <= cells.shape[1]:  # four rows a pass, each sum from left to right
            a, b, c, d = cells[r, slot], cells[r, slot + 1], cells[r, slot + 2], cells[r, slot + 3]
            for x in range(n_columns):
                scores[x] = scores[x] + table[a, x] + table[b, x] + table[c, x] + table[d, x]
            slot += 4
        while slot < cells.shape[1]:
            a = cells[r, slot]
            for x in range(n_columns):
                scores[x] += table[a, x]
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
                value[r, k], best[r, k] = score, x
                least = value[r, top_k - 1]
