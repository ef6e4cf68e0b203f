"""Owns Spearman's rank correlation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def rank_correlation(a: Floats, b: Floats) -> float | None:
    """Spearman's: the correlation of ranks, equal values sharing theirs. None where either never varies, or of fewer than three."""
    if len(a) < 3:
        return None
    x, y = (_ranks(values) - (len(a) + 1) / 2 for values in (a, b))
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size > 0 else None


def _ranks(values: Floats) -> Floats:
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count - 1) / 2)[which], np.float64)
