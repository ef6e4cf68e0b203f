"""Max-min rates against a solver that works another way, in fractions, and against what defines them; rounding of durations."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.sharing import ceil_ps, max_min_rates


def rates_of(shares: list[list[float]], caps: list[float], capacity: list[float]) -> list[float]:
    rates = [0.0] * len(caps)
    max_min_rates(shares, caps, capacity, rates)
    return rates


def exact_rates(shares: list[list[float]], caps: list[float], capacity: list[float]) -> list[Fraction | float]:
    """Raise one common water level; whoever reaches its cap or a full channel stays behind. The level comes from the breakpoints.

    Where the production solver compares fair shares of what is left, this one asks each channel up to which level it would hold
    if every free flow took min(cap, level), a piecewise linear function, and solves that exactly.
    """
    n, m = len(caps), len(capacity)
    share = [[Fraction(x) for x in row] for row in shares]
    fixed: dict[int, Fraction | float] = {f: caps[f] for f in range(n) if not any(shares[f])}
    while len(fixed) < n:
        free = [f for f in range(n) if f not in fixed]
        levels = []
        for c in range(m):
            on = [f for f in free if share[f][c]]
            if not on:
                continue
            held = Fraction(capacity[c]) - sum(share[f][c] * Fraction(r) for f, r in fixed.items() if share[f][c])
            for point in sorted({caps[f] for f in on} | {math.inf}):
                capped = [f for f in on if caps[f] < point]
                rising = [f for f in on if caps[f] >= point]
                if not rising:
                    break  # the channel never fills
                level = (held - sum(share[f][c] * Fraction(caps[f]) for f in capped)) / sum(share[f][c] for f in rising)
                if level <= point:
                    levels.append((level, c))
                    break
        if not levels:
            fixed |= {f: Fraction(caps[f]) for f in free}
            break
        level = min(levels)[0]
        full = {c for at, c in levels if at == level}
        for f in free:
            if caps[f] <= level:
                fixed[f] = Fraction(caps[f])
            elif any(share[f][c] for c in full):
                fixed[f] = level
    return [fixed[f] for f in range(n)]


def random_case(rng: np.random.Generator) -> tuple[list[list[float]], list[float], list[float]]:
    """Up to 8 flows on 6 channels; small whole numbers, so that ties are common, at the scale of real bytes/s."""
    n, m = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    shares = rng.choice([0.0, 0.0, 1.0, 1.0, 2.0, 0.5, 0.25], (n, m))
    shares[np.arange(n), rng.integers(0, m, n)] = 1.0  # everyone uses something
    caps = rng.choice([math.inf, 1.0, 2.0, 3.0, 5.0, 0.1, 7.3], n) * 1e9
    capacity = rng.choice([1.0, 2.0, 3.0, 4.0, 10.0, 12.8], m) * 1e9
    return shares.tolist(), caps.tolist(), capacity.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_an_independent_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        shares, caps, capacity = random_case(rng)
        assert rates_of(shares, caps, capacity) == pytest.approx([float(r) for r in exact_rates(shares, caps, capacity)], rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_is_max_min_by_definition(seed: int) -> None:
    """A feasible allocation is max-min fair just when every flow is at its cap or has a bottleneck: a full channel on which none is faster.

    Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2.
    """
    rng = np.random.default_rng([7, seed])
    for _ in range(100):
        shares, caps, capacity = random_case(rng)
        rates = rates_of(shares, caps, capacity)
        use = [sum(row[c] * r for row, r in zip(shares, rates, strict=True)) for c in range(len(capacity))]
        full = {c for c, u in enumerate(use) if u >= capacity[c] * (1 - 1e-12)}
        assert all(u <= limit * (1 + 1e-12) for u, limit in zip(use, capacity, strict=True))
        for f, rate in enumerate(rates):
            assert 0 < rate <= caps[f]
            top = {c: max(r for row, r in zip(shares, rates, strict=True) if row[c]) for c in full}
            assert rate == caps[f] or any(shares[f][c] and rate >= top[c] * (1 - 1e-12) for c in full)


def test_equal_flows_get_equal_bits() -> None:
    rates = rates_of([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]], [math.inf] * 3, [3e9, 5e8])
    assert rates == [1.25e9, 5e8, 1.25e9]


def test_small_cases_by_hand() -> None:
    assert rates_of([], [], [1e9]) == []
    assert rates_of([[1.0]], [math.inf], [1e9]) == [1e9]
    assert rates_of([[1.0]], [2e8], [1e9]) == [2e8]
    assert rates_of([[0.0]], [2e8], [1e9]) == [2e8]  # no channel: its cap
    assert rates_of([[]], [math.inf], []) == [math.inf]  # neither: it takes no time
    assert rates_of([[2.0], [1.0]], [math.inf] * 2, [3e9]) == [1e9, 1e9]  # equal rates, unequal draw
    assert rates_of([[1.0], [1.0]], [5e8, math.inf], [1e9]) == [5e8, 5e8]  # cap equal to the fair share
    assert rates_of([[1.0], [1.0]], [math.inf] * 2, [math.inf]) == [math.inf] * 2
    assert rates_of([[1.0], [1.0]], [math.inf] * 2, [0.0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, 0),
        (1e-12, 1),
        (1.5e-12, 2),
        (1.01e-12, 2),
        (2.0000000000001e-12, 2),  # 1e-13 ps is the noise of binary fractions
        (5e-6, 5_000_000),  # 5e-6 * 1e12 is not a whole number in binary
        (1 / 3, 333_333_333_334),
        (2 / 3, 666_666_666_667),
        (0.1 + 0.2, 300_000_000_000),  # 0.30000000000000004
        (1.0, 1_000_000_000_000),
        (10 / 3, 3_333_333_333_334),
        (86400.0, 86_400_000_000_000_000),
    ],
)
def test_ceil_ps(seconds: float, expected: int) -> None:
    assert ceil_ps(seconds) == expected


@given(st.integers(0, 2**50))
def test_whole_picoseconds_stay(ps: int) -> None:
    assert ceil_ps(ps / 1e12) == ps


@given(st.floats(0.0, 100.0))
def test_ceil_ps_is_the_ceiling_but_for_noise(seconds: float) -> None:
    exact = Fraction(seconds) * 10**12
    got = ceil_ps(seconds)
    assert -max(Fraction(1, 1000), exact / 2**48) <= got - exact < 1 + exact / 2**48


@given(st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_ceil_ps_is_monotonic(a: float, b: float) -> None:
    assert ceil_ps(min(a, b)) <= ceil_ps(max(a, b))


@given(st.integers(1, 10**12), st.integers(1, 10**6))
def test_a_remainder_of_a_flow_does_not_cost_a_picosecond(volume: int, done: int) -> None:
    """At 1 unit/ps, what is left of a flow after ``done`` ps takes volume - done ps, though the floats do not cancel exactly."""
    left = volume - 1e12 * (done / 1e12)
    if left > 0:
        assert ceil_ps(left / 1e12) == volume - done
