"""Owns what a mapped file costs that memory cannot hold: how much of it each token reads from the drive again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MOST_ROUNDS = 200  # until two equations that hold together have settled


def reread_share(cached: float, chances: Sequence[float], around: float) -> float:
    """Return the share of a mapped file that each token reads from the drive again.

    Memory that is full gives pages up as if at random. A token walks through the file and uses piece i with chance q; a piece that is
    used and absent brings in what is absent of ``around`` pieces. With u the chance that piece i is absent when the walk comes by, it is
    read then with chance a, and from one token to the next each present piece survives with chance exp(-read / cached):

        a = 1 - (1 - q) w,    w = exp((around - 1) mean(log(1 - q u))),    u = 1 - (1 - u (1 - a)) exp(-read / cached),    read = mean(u a)

    which is ``q (1 - cached)`` for single pieces of which few are used, and a sweep, 1 - read = exp(-read / cached), for many.

    Parameters
    ----------
    cached : float
        Size of the cache over that of the file.
    chances : sequence of float
        Of a piece to be used by a token, one for each kind of piece; kinds are equally frequent and mixed evenly.
    around : float
        Pieces that a fault brings in, itself included; less than one counts as one.
    """
    if cached >= 1:
        return 0.0
    q, others = np.asarray(chances, np.float64), max(around - 1, 0.0)

    def found(read: float) -> float:
        """What is read, if what is read again between two visits of a piece were ``read``."""
        survives, a = math.exp(-read / max(cached, 1e-9)), np.ones_like(q)
        for _ in range(MOST_ROUNDS):
            u = (1 - survives) / (1 - survives * (1 - a))
            before, a = a, 1 - (1 - q) * math.exp(others * float(np.log1p(-np.minimum(q * u, 1 - 1e-12)).mean()))
            if np.abs(a - before).max() < 1e-9:
                break
        return float((u * a).mean())

    low, high = 0.0, 1.0
    for _ in range(40):
        read = (low + high) / 2
        low, high = (read, high) if found(read) > read else (low, read)
    return low
