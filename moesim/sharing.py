"""Owns channel sharing: the max-min fair rates of flows, and the rounding of flow ends. All engines call these functions.

A flow of volume V advances at rate r (volume units per second) and consumes channel c at r * share[c]. Rates are max-min
fair: no flow can go faster without slowing one that is as slow or slower, each flow limited by its own cap (linear
max-min with bounds, the model SimGrid describes, solved by progressive filling). The volume unit is bytes on the flow's
first channel, so flows that meet on a channel share its bytes/s equally. Plain loops over plain numbers, in a fixed
order: a compiled engine compiles this very source, and both get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def ceil_ps(seconds: float) -> int:
    """Return a duration in whole picoseconds, rounded up.

    Forgiven is what binary fractions leave behind: a thousandth of a picosecond (the remainder of a flow whose rate has changed
    is a difference of larger numbers), or 2e-15 of the duration (about ten units in the last place) where that is more.
    """
    exact = seconds * 1e12
    nearest = math.floor(exact + 0.5)
    if abs(exact - nearest) <= max(1e-3, 2e-15 * exact):
        return nearest
    return math.ceil(exact)


def max_min_rates(shares: Sequence[Sequence[float]], caps: Sequence[float], capacity: Sequence[float], rates: list[float]) -> None:
    """Fill ``rates`` with the max-min fair rates.

    Parameters
    ----------
    shares : (F, C)
        Channel units consumed per volume unit, at least 0.
    caps : (F,)
        Upper bound of each rate, volume units per second; may be infinite.
    capacity : (C,)
        Channel units per second.
    rates : (F,)
        The result, overwritten.
    """
    n_flows, n_channels = len(caps), len(capacity)
    for f in range(n_flows):
        rates[f] = -1.0
    left = n_flows
    while left > 0:
        level = math.inf
        bottleneck = -1
        for c in range(n_channels):
            used = 0.0
            weight = 0.0
            for f in range(n_flows):
                if shares[f][c] > 0.0:
                    if rates[f] >= 0.0:
                        used += shares[f][c] * rates[f]
                    else:
                        weight += shares[f][c]
            if weight > 0.0:
                free = capacity[c] - used
                if free < 0.0:  # not max(): compiled and plain Python disagree on max(nan, 0)
                    free = 0.0
                fair = free / weight
                if fair < level:
                    level = fair
                    bottleneck = c
        capped = False
        for f in range(n_flows):
            if rates[f] < 0.0 and caps[f] <= level:
                rates[f] = caps[f]
                capped = True
                left -= 1
        if capped:
            continue
        for f in range(n_flows):
            if rates[f] < 0.0 and shares[f][bottleneck] > 0.0:
                rates[f] = level
                left -= 1
