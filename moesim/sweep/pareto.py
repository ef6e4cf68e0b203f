"""Owns dominance: which of several points nothing else is better than in every way. It knows numbers, not what they mean."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def front(gains: Floats) -> list[int]:
    """Return the rows that no other row dominates, in order.

    A row dominates another if it is at least as good in every column and better in one; equal rows stand beside each other.

    Parameters
    ----------
    gains : (N, M) array
        More is better in every column.
    """
    if not len(gains):
        return []
    kinds, which = np.unique(gains, axis=0, return_inverse=True)
    order = np.lexsort(tuple(-column for column in kinds.T[::-1]))  # nothing later can dominate something earlier
    kept = np.empty((0, kinds.shape[1]))
    rows = []
    for row in order.tolist():
        if not np.all(kept >= kinds[row], axis=1).any():
            kept = np.vstack([kept, kinds[row]])
            rows.append(row)
    return np.flatnonzero(np.isin(which.ravel(), rows)).tolist()
