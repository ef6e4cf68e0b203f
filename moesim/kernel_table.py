"""Owns the lookup of measured task times: linear in bytes and in rows between the points of a profile.

Source of the times: ``moesim calibrate``, which runs the tasks through the real engine. Between two points the time of a
kernel that streams its weights is a fixed cost plus bytes over rate, hence linear; beyond the largest point it goes on in
proportion to the bytes, below the smallest it falls in proportion, but not under half of it (the fixed cost).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from moesim.hardware.parts import KernelPoint

Curve = list[tuple[int, float]]


class KernelTable:
    """Measured times of one device, by part and weight format.

    Parameters
    ----------
    points : sequence of KernelPoint
        At most one per (part, weights, tokens, bytes); of several the last holds.
    """

    def __init__(self, points: Sequence[KernelPoint]) -> None:
        grid: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
        for p in points:
            grid.setdefault((p.part, p.weights), {}).setdefault(p.tokens, {})[p.bytes] = p.time.value
        self._curves: dict[tuple[str, str], list[tuple[int, Curve]]] = {
            key: [(tokens, sorted(by_bytes.items())) for tokens, by_bytes in sorted(rows.items())] for key, rows in grid.items()
        }

    def time_s(self, part: str, weights: str, tokens: int, n_bytes: int) -> float | None:
        """Return the time of a task in seconds, or None where nothing of the kind was measured."""
        rows = self._curves.get((part, weights))
        if rows is None or n_bytes <= 0:
            return None
        floor = 0.0 if part == "kv" else 0.5  # a cache costs in proportion to its bytes
        return _between([(count, _between(curve, n_bytes, floor)) for count, curve in rows], max(tokens, 1), floor=1.0)


def _between(curve: Curve, x: int, floor: float) -> float:
    """Linear between points; in proportion outside, below the first not under ``floor`` of its value."""
    at = [value for value, _ in curve]
    i = bisect_left(at, x)
    if i == 0:
        return curve[0][1] * max(x / at[0], floor)
    if i == len(curve):
        return curve[-1][1] * x / at[-1]
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
