"""Owns the verdict on a validation: which figures are asked for, what they came to, and whether that is enough.

An error below the noise of the measurement is no error: a case may be off by 12 %, or by twice its run-to-run spread where that is more,
but by no more than 15 % on that ground. Shares of cases are asked for in the proportion of a suite of 24 (22 of them, 20 of them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MEDIAN_ERROR = 0.08
CASE_ERROR = 0.12
NOISE_ERROR = 0.15  # the most that noise can excuse
OVERLAP = 0.08
P95_ERROR = 0.20
SCHEDULE_ERROR = 0.03
OOM_ERROR = 0.02
OF_BASELINE = 0.5
ENOUGH_WITHIN, ENOUGH_P95, ENOUGH_OVERLAP = 22 / 24, 20 / 24, 5 / 6
FEW = 6  # cases below which a suite's mean error is not held against that of its baselines

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Criterion:
    """One thing that is asked of a validation; ``met`` is None where it could not be judged."""

    name: str
    value: float | None
    limit: float
    met: bool | None
    text: str

    def as_dict(self) -> dict[str, Any]:
        return {"value": self.value, "limit": self.limit, "met": self.met, "text": self.text}


def case_limit(noise: float) -> float:
    """Return by how much the mean latency of a case may be off."""
    return max(CASE_ERROR, min(2 * noise, NOISE_ERROR))


def within(row: Row) -> bool:
    """Whether a case's mean latency is predicted well enough."""
    return not row["failed"] and abs(row["latency_ms"]["error"]) <= case_limit(row["latency_ms"]["noise"])


def overlap_off(row: Row) -> float | None:
    """Return by how much the overlap coverage of a case is off, or None where it is not defined."""
    if row["failed"]:
        return None
    found = row["overlap_coverage"]
    if found["predicted"] is None or found["measured"] is None:
        return None
    return float(abs(found["predicted"] - found["measured"]))


def criteria(rows: Sequence[Row], oom: Sequence[Row] = ()) -> list[Criterion]:
    """Judge all cases of a validation; ``rows`` as ``validate_compare.compare`` returns them."""
    ran = [row for row in rows if not row["failed"]]
    equal = [row["hits_equal"] and row["bytes_equal"] and not row["differences"] for row in rows]
    out = [_share("equal", equal, 1.0, "cases with the simulated hits, evictions, bytes, order")]
    errors = [abs(row["latency_ms"]["error"]) for row in ran]
    out.append(_at_most("median_error", _median(errors), MEDIAN_ERROR, "median error of the mean latency"))
    out.append(_share("within", [within(row) for row in rows], ENOUGH_WITHIN, "cases within 12 %, or 2 x noise up to 15 %"))
    gaps = [gap <= OVERLAP for row in rows if (gap := overlap_off(row)) is not None]
    out.append(_share("overlap", gaps, ENOUGH_OVERLAP, f"cases whose overlap coverage is within {OVERLAP}"))
    tails = [not row["failed"] and abs(row["p95_ms"]["error"]) <= P95_ERROR for row in rows]
    out.append(_share("p95", tails, ENOUGH_P95, "cases whose p95 is within 20 %"))
    out.append(_beside_baselines(ran, errors))
    parts = _median([abs(row["errors"]["schedule"]) for row in ran])
    out.append(_at_most("schedule_error", parts, SCHEDULE_ERROR, "median error with measured durations"))
    if oom:
        out.append(_share("oom", [oom_met(row) for row in oom], 1.0, "out-of-memory points within 2 % or one unit"))
    return out


def oom_met(row: Row) -> bool:
    """Whether a measured out-of-memory point is as predicted, within 2 % or one unit."""
    return bool(abs(row["predicted"] - row["measured"]) <= max(1, OOM_ERROR * row["measured"]))


def mean_baselines(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean absolute error of each baseline over the cases that ran, the best first."""
    ran = [row for row in rows if not row["failed"]]
    means = {name: float(np.mean([abs(row["baselines"][name]) for row in ran])) for name in (ran[0]["baselines"] if ran else ())}
    return dict(sorted(means.items(), key=lambda pair: pair[1]))


def summary(rows: Sequence[Row], oom: Sequence[Row] = ()) -> dict[str, Any]:
    """Return the verdict in the shape of ``validate -o json``; ``met`` is False if anything that could be judged was not met."""
    found = criteria(rows, oom)
    ran = [row for row in rows if not row["failed"]]
    return {
        "cases": len(rows),
        "failed": [row["name"] for row in rows if row["failed"]],
        "outside": [row["name"] for row in rows if not within(row)],
        "median_error": _median([abs(row["latency_ms"]["error"]) for row in ran]),
        "mean_error": float(np.mean([abs(row["latency_ms"]["error"]) for row in ran])) if ran else None,
        "mean_noise": float(np.mean([row["latency_ms"]["noise"] for row in ran])) if ran else None,
        "baselines": mean_baselines(rows),
        "median_cost_error": _median([abs(row["errors"]["cost"]) for row in ran]),
        "criteria": {it.name: it.as_dict() for it in found},
        "met": all(it.met is not False for it in found),
    }


def _beside_baselines(ran: Sequence[Row], errors: Sequence[float]) -> Criterion:
    means = mean_baselines(ran)
    text = "mean error beside the best baseline's"
    if len(ran) < FEW:
        return Criterion("baselines", None, OF_BASELINE, None, f"{text} (not judged below {FEW} cases)")
    name, best = next(iter(means.items()))
    ours = float(np.mean(errors))
    ratio = ours / best if best > 0 else float("inf")
    return Criterion("baselines", ratio, OF_BASELINE, ratio <= OF_BASELINE, f"{text}, {name}")


def _at_most(name: str, value: float | None, limit: float, text: str) -> Criterion:
    return Criterion(name, value, limit, None if value is None else value <= limit, text)


def _share(name: str, met: Sequence[bool], enough: float, text: str) -> Criterion:
    if not met:
        return Criterion(name, None, enough, None, text)
    return Criterion(name, sum(met) / len(met), enough, sum(met) >= enough * len(met) - 1e-9, f"{text}: {sum(met)} of {len(met)}")


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
