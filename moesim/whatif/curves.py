"""Owns curves: speed over one figure of the machine or one switch of the scenario, and the knees of the curve.

A range is ``PATH=FROM..TO`` with a unit. The path is a knob (``ssd.bandwidth``, ``channels.ssd.bandwidth``, ``gpu.peak``) or any path of a scenario
that takes whole numbers (``prefetch.distance=0..4``). The grid is logarithmic where TO is at least four times FROM, else linear. A knee is
where the elasticity between neighbours crosses 0.5, or where another lane takes over the largest share of the critical path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moesim import config
from moesim.bottleneck import lane_shares
from moesim.errors import InputError
from moesim.metrics import critical_shares
from moesim.scenario import Scenario
from moesim.simulate import Case, simulate
from moesim.sweep.paths import check_path
from moesim.sweep.space import lay
from moesim.units import parse
from moesim.whatif.figures import Knob, find_knob, turned
from moesim.whatif.replay import Replay, speed_of
from moesim.whatif.upgrades import changed_case

LOG_FROM = 4.0  # ratio of the ends from which the grid is logarithmic
HALF = 0.5
FLAT = 0.01  # relative change of speed over a whole curve, below which it has no knee
_RANGE = re.compile(r"\s*([+-]?[0-9][0-9_]*\.?[0-9]*)\s*(\S*?)\s*\.\.\s*([+-]?[0-9][0-9_]*\.?[0-9]*)\s*(\S*)\s*")


@dataclass(frozen=True, slots=True)
class Point:
    """One value of the curve: tokens/s (nan where it does not fit or cannot be) and the lane with most of the critical path."""

    value: float
    speed: float
    lane: str


@dataclass(frozen=True, slots=True)
class Knee:
    """Where the curve bends: at which value, and why."""

    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Speed over one path. ``unit`` is a dimension of units.py, "share", or "" for a plain number; ``now`` is the case's own value, where it has one."""

    path: str
    unit: str
    log: bool
    now: float | None
    points: tuple[Point, ...]
    knees: tuple[Knee, ...]


def curve(replay: Replay, text: str, points: int, progress: Callable[[int, int], None] | None = None) -> Curve:
    """Compute a curve.

    Parameters
    ----------
    replay : Replay
    text : str
        ``PATH=FROM..TO`` with a unit.
    points : int
        Of the grid; whole numbers that coincide count once.

    Raises
    ------
    InputError
        If the path is neither a knob nor one of a scenario, or the range is wrong.
    """
    path, sign, span = text.partition("=")
    path = path.strip()
    if not sign or not path:
        raise InputError("--vary", expected="PATH=FROM..TO, as in ssd.bandwidth=1..14GB/s", got=f'"{text}"')
    knob = _knob(replay.case, path)
    low, high = _ends(span, text, knob)
    if knob is None:
        _check_values(replay.case, path, (int(low), int(high)))
    log = low > 0 and high / low >= LOG_FROM
    grid = np.geomspace(low, high, points) if log else np.linspace(low, high, points)
    values = list(dict.fromkeys(round(x) for x in grid)) if knob is None else grid.tolist()
    found = []
    for i, value in enumerate(values):
        found.append(_point(replay.case, knob, path, value))
        if progress is not None:
            progress(i + 1, len(values))
    knees = [k if knob is not None else Knee(math.ceil(k.value), k.why) for k in _knees(found)]
    name, unit = (path, "") if knob is None else (knob.name, knob.unit)
    return Curve(name, unit, log, None if knob is None else knob.value, tuple(found), tuple(knees))


def _knob(case: Case, path: str) -> Knob | None:
    try:
        return find_knob(case, path)
    except InputError:
        if path.split(".")[0] not in Scenario.model_fields:
            raise
        check_path(path, f"--vary {path}")
        return None


def _check_values(case: Case, path: str, values: tuple[int, ...]) -> None:
    """Refuse a path that takes no whole numbers, and ends that the scenario refuses."""
    where = f"--vary {path}"
    for value in values:
        try:
            config.build(Scenario, lay(case.document, [(path, value, where)]))
        except InputError as error:
            fix = error.fix or "vary a figure of the machine (ssd.bandwidth) or a path that takes whole numbers (prefetch.distance=0..4)"
            raise InputError(error.what, expected=error.expected, got=error.got or str(value), fix=fix, where=where) from None


def _ends(span: str, text: str, knob: Knob | None) -> tuple[float, float]:
    match, what = _RANGE.fullmatch(span), f"--vary {text.partition('=')[0].strip()}"
    if match is None:
        raise InputError(what, expected="FROM..TO, as in 1..14GB/s", got=f'"{text}"')
    first, unit, last, last_unit = match.groups()
    dimension = "" if knob is None or knob.unit in ("share", "factor") else knob.unit
    if not dimension and (unit or last_unit):
        raise InputError(what, expected="plain numbers", got=f'"{text}"', fix="drop the unit")
    if dimension:
        ends = [float(parse(f"{number} {u or last_unit}", dimension)) for number, u in ((first, unit), (last, last_unit))]
    else:
        ends = [float(first), float(last)]
    if not 0 <= ends[0] < ends[1] or knob is not None and ends[0] == 0:
        least = "of at least 0" if knob is None else "above 0"
        raise InputError(what, expected=f"FROM {least} and below TO", got=f'"{text}"')
    if knob is not None and ends[1] > knob.value * knob.most * (1 + 1e-9):
        raise InputError(what, expected="a share of at most 1", got=f"{ends[1]:g}")
    if knob is None and any(end % 1 for end in ends):
        raise InputError(what, expected="whole numbers of a scenario's path", got=f'"{text}"')
    return ends[0], ends[1]


def _point(case: Case, knob: Knob | None, path: str, value: float) -> Point:
    try:
        it = turned(case, knob, value / knob.value) if knob is not None else changed_case(case, ((path, int(value)),))[0]
        result = simulate(it, keep=False)
    except InputError:
        return Point(value, math.nan, "")
    if result.meter is None or result.oom is not None:
        return Point(value, math.nan, "out of memory")
    return Point(value, speed_of(result), next(iter(lane_shares(critical_shares(result.meter)))))


def _knees(points: list[Point]) -> list[Knee]:
    """Knees in order of the value; none where the curve is flat."""
    speeds = [p.speed for p in points if math.isfinite(p.speed)]
    if len(speeds) == len(points) and max(speeds) < (1 + FLAT) * min(speeds):
        return []
    out = [
        Knee(math.sqrt(a.value * b.value) if a.value > 0 else b.value, f"{a.lane or 'nothing'} gives way to {b.lane or 'nothing'}")
        for a, b in zip(points, points[1:], strict=False)
        if a.lane != b.lane
    ]
    slopes = [
        (math.sqrt(a.value * b.value), math.log(b.speed / a.speed) / math.log(b.value / a.value))
        for a, b in zip(points, points[1:], strict=False)
        if a.value > 0 and a.speed > 0 and b.speed > 0
    ]
    for (x, before), (y, after) in zip(slopes, slopes[1:], strict=False):
        if (abs(before) - HALF) * (abs(after) - HALF) < 0:
            part = (abs(before) - HALF) / (abs(before) - abs(after))
            direction = "falls below" if abs(after) < HALF else "rises above"
            out.append(Knee(x * (y / x) ** part, f"elasticity {direction} {HALF:g}"))
    return sorted(out, key=lambda knee: knee.value)
