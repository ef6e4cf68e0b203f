"""Owns the sensitivity of a model's units: one restored in a quantised model, and one degraded in the whole one, on choosing text.

A unit is a layer, or a part of all layers. Both views are needed: what one unit costs alone, and what it costs where all others are quantised too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moesim.precision import PrecisionPlan
from moesim.quality.evaluate import Evaluation
from moesim.quality.interval import Bootstrap, Figure
from moesim.quality.quantise import quantise
from moesim.quality.study import Study
from moesim.quality.subject import Site
from moesim.quality.tune import weights_of

TOKENS = 12_000  # of choosing text; each unit is two passes over it


@dataclass(frozen=True)
class UnitResult:
    """One unit.

    Parameters
    ----------
    unit : str
        ``layer 3`` or ``attention``.
    restored : Figure
        Share of the plan's loss that is gone with this unit unquantised, percent.
    degraded : Figure
        Loss with only this unit quantised, percent of the unquantised model's.
    """

    unit: str
    restored: Figure
    degraded: Figure


@dataclass(frozen=True)
class Sensitivity:
    """All units under one plan, which is rounded without scales across matrices and without adapters."""

    plan: str
    loss: Figure
    units: list[UnitResult]


def units_of(sites: tuple[Site, ...]) -> Iterator[tuple[str, list[Site]]]:
    """Yield layers and parts with their tensors; norms and routers of a layer belong to it."""
    layers = sorted({site.layer for site in sites} - {-1})
    for layer in layers:
        yield f"layer {layer}", [site for site in sites if site.layer == layer]
    for part in dict.fromkeys(site.part for site in sites if site.part != "norms"):
        yield part, [site for site in sites if site.part == part]


def sensitivity(study: Study, name: str, plan: PrecisionPlan) -> Sensitivity:
    """Measure every unit; what was measured before is taken from the study's results."""
    plain = plan.model_copy(update={"rounding": "clip" if plan.rounding != "nearest" else "nearest", "adapters": None})
    text = study.choosing.head(TOKENS)
    key = study.key("sensitivity", plain, tokens=TOKENS)
    record = study.results.get(key)
    if record is None:
        record = _measure(study, plain)
        study.results.add(key, record)
    draws = Bootstrap(text, study.seed)
    base, low = Evaluation.from_dict(record["base"]), Evaluation.from_dict(record["low"])
    units = [
        UnitResult(
            unit, draws.recovered(Evaluation.from_dict(it["restored"]), low, base), draws.change(Evaluation.from_dict(it["degraded"]), base)
        )
        for unit, it in record["units"].items()
    ]
    return Sensitivity(name, draws.change(low, base), units)


def _measure(study: Study, plan: PrecisionPlan) -> dict[str, Any]:
    text = study.choosing.head(TOKENS)
    weights = weights_of(study.subject, quantise(study.subject, plan, study.heard))
    units = list(units_of(study.subject.sites))
    base, low = study.choosing_loss({}, text), study.choosing_loss(weights, text)
    found = {}
    for i, (unit, sites) in enumerate(units):
        mine = {site.key for site in sites}
        restored = study.choosing_loss({key: w for key, w in weights.items() if key not in mine}, text)
        degraded = study.choosing_loss({key: weights[key] for key in mine}, text)
        found[unit] = {"restored": restored.as_dict(), "degraded": degraded.as_dict()}
        study.tick("sensitivity", i + 1, len(units))
    return {"base": base.as_dict(), "low": low.as_dict(), "units": found}
