"""Owns what a result depends on: its elasticity to every knob, how far each knob's range moves it, and the interval of all together.

Elasticity is a central difference of logarithms, ln(S+/S-) / ln(f+/f-) with f = 1 +- 1 %: 1 where speed is in proportion, 0 where it does
not care. The interval is of a Latin hypercube (McKay, Beckman and Conover, Technometrics 21 (1979)): every knob uniform over its range,
independent. A knob's share of the variance is its squared standardised regression coefficient of ln S on ln f, over the sum of all (Saltelli
et al., Global Sensitivity Analysis, 2008, section 1.2.5); the rank correlation beside it needs no linearity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.whatif.figures import Knob, knobs, turn, turned
from moesim.whatif.replay import Replay

STEP = 0.01
INTERVAL = 0.80
SAME = 1e-9  # a relative change of speed below this is rounding to picoseconds
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Effect:
    """What one knob does to speed.

    Parameters
    ----------
    knob : Knob
    elasticity : float
        Relative change of speed per relative change of the knob; nan where a neighbour does not fit.
    step : float
        Half the relative distance that it was taken over.
    at_low, at_high : float
        tokens/s at the ends of the knob's range.
    """

    knob: Knob
    elasticity: float
    step: float
    at_low: float
    at_high: float

    @property
    def swing(self) -> float:
        """tokens/s between the ends of the range."""
        return abs(self.at_high - self.at_low)


@dataclass(frozen=True, slots=True)
class Interval:
    """Speed under all ranges at once. ``shares`` and ``ranks`` are by knob; ``explained`` is what the regression explains of the variance."""

    low: float
    median: float
    high: float
    draws: int
    shares: dict[str, float]
    ranks: dict[str, float]
    explained: float


def effects(replay: Replay, sizes: bool = True) -> tuple[Effect, ...]:
    """Return the effect of every knob of a case, the largest elasticity first; without ``sizes`` only of those that price work."""
    base, every = replay.case, knobs(replay.case)
    priced = [knob for knob in every if not knob.replans]
    factors = [(1 - STEP, min(1 + STEP, knob.most), knob.low, knob.high) for knob in priced]
    machines = [turn(base.hardware, knob, f) for knob, four in zip(priced, factors, strict=True) for f in four]
    speeds = np.array(replay.speeds(machines)).reshape(-1, 4)
    out = []
    for knob, (down, up, _, _), found in zip(priced, factors, speeds.tolist(), strict=True):
        out.append(Effect(knob, _slope(found[1], found[0], up / down), STEP, found[2], found[3]))
    out += [_planned_anew(replay, knob) for knob in every if knob.replans and sizes]
    return tuple(sorted(out, key=lambda e: (-abs(e.elasticity) if math.isfinite(e.elasticity) else 1.0, -e.swing, e.knob.name)))


def _planned_anew(replay: Replay, knob: Knob) -> Effect:
    """Sizes act in whole experts: the step is at least one expert of every layer, and 1 %."""
    layout = replay.case.layout
    step = STEP
    if knob.name.startswith("tiers.") and layout.expert_bytes:
        step = max(STEP, sum(layout.expert_bytes[x] for x in layout.moe_layers) / knob.value)
    step = min(step, 0.25)
    down, up = (_speed_turned(replay, knob, f) for f in (1 - step, 1 + step))
    ends = [replay.speed if f == 1 else _speed_turned(replay, knob, f) for f in (knob.low, knob.high)]
    return Effect(knob, _slope(up, down, (1 + step) / (1 - step)), step, ends[0], ends[1])


def _speed_turned(replay: Replay, knob: Knob, factor: float) -> float:
    try:
        return replay.again(turned(replay.case, knob, factor))
    except InputError:
        return math.nan


def _slope(above: float, below: float, ratio: float) -> float:
    return math.log(above / below) / math.log(ratio) if above > 0 and below > 0 and ratio != 1 else math.nan


def interval(replay: Replay, found: Sequence[Effect], draws: int, seed: int) -> Interval:
    """Draw every knob from its range at once and return the 80 % interval of speed.

    Knobs that change the plan take part as factors of their own, interpolated between the three points that were run.

    Parameters
    ----------
    replay : Replay
    found : sequence of Effect
        Of ``effects``; those that do not move speed are left out.
    draws : int
        At least 2.
    seed : int
    """
    if draws < 2:
        raise InputError("--draws", expected="at least 2", got=str(draws))
    moving = [e for e in found if e.swing > SAME * replay.speed and e.knob.high > e.knob.low]
    factors = _hypercube([e.knob for e in moving], draws, np.random.default_rng([seed, 2]))
    machines = []
    for row in factors.tolist():
        machine = replay.case.hardware
        for effect, factor in zip(moving, row, strict=True):
            machine = machine if effect.knob.replans else turn(machine, effect.knob, factor)
        machines.append(machine)
    speeds = np.array(replay.speeds(machines))
    for i, effect in enumerate(moving):
        if effect.knob.replans:
            points = [effect.knob.low, 1.0, effect.knob.high]
            heights = [effect.at_low / replay.speed, 1.0, effect.at_high / replay.speed]
            if all(map(math.isfinite, heights)):
                speeds *= np.interp(factors[:, i], points, heights)
    low, median, high = np.percentile(speeds, [50 - 50 * INTERVAL, 50, 50 + 50 * INTERVAL])
    shares, explained = _shares(np.log(factors), np.log(speeds))
    names = [e.knob.name for e in moving]
    ranks = [_rank_correlation(factors[:, i], speeds) for i in range(len(moving))]
    return Interval(
        float(low),
        float(median),
        float(high),
        draws,
        dict(zip(names, shares, strict=True)),
        dict(zip(names, ranks, strict=True)),
        explained,
    )


def _hypercube(of: Sequence[Knob], draws: int, rng: np.random.Generator) -> Floats:
    """(draws, knobs) factors, each column with one draw in every one of ``draws`` equal parts of its range."""
    columns = [k.low + (rng.permutation(draws) + rng.random(draws)) / draws * (k.high - k.low) for k in of]
    return np.stack(columns, axis=1) if columns else np.zeros((draws, 0))


def _shares(x: Floats, y: Floats) -> tuple[list[float], float]:
    """Squared standardised regression coefficients of y on the columns of x over their sum, and R squared; nan with too few rows."""
    if not x.shape[1] or y.std() == 0:
        return [0.0] * x.shape[1], 0.0
    if len(y) < x.shape[1] + 2:
        return [math.nan] * x.shape[1], math.nan
    spread = x.std(axis=0)
    z, w = (x - x.mean(axis=0)) / spread, (y - y.mean()) / y.std()
    slopes, *_ = np.linalg.lstsq(z, w, rcond=None)
    return (slopes**2 / (slopes**2).sum()).tolist(), float(1 - ((w - z @ slopes) ** 2).sum() / (w**2).sum())


def _rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's rank correlation; draws hold no ties but for equal speeds, which share a rank's order."""
    a, b = x.argsort().argsort().astype(np.float64), y.argsort(kind="stable").argsort().astype(np.float64)
    return float(np.corrcoef(a, b)[0, 1]) if y.std() > 0 else 0.0
