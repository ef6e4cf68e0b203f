"""Owns what a study answers as plain data: the table of plans, the three reports beside it, and the verdicts; the shape of ``moesim quality -o json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import yaml

from moesim import __version__
from moesim.precision import PrecisionPlan
from moesim.quality.claims import Claim, order_claims, show
from moesim.quality.dequant import Dequant
from moesim.quality.evaluate import Evaluation, buckets
from moesim.quality.interval import Figure
from moesim.quality.search import Found, Unit
from moesim.quality.sensitivity import Sensitivity
from moesim.quality.study import Measured, Study, hit_rates
from moesim.stated_quality import StatedQuality

BITS_PER_BYTE, BITS_PER_TOKEN = "bits per byte", "bits per token"


def answer(
    study: Study, plans: Sequence[Measured], units: Sensitivity | None = None, dequant: Sequence[Dequant] = (), claims: Sequence[Claim] = ()
) -> dict[str, Any]:
    """Return everything that was measured."""
    base, trace = study.reference
    reference = {"name": "unquantised", **_general(study, base, base), "hit_rates": hit_rates(trace)}
    return {
        "provenance": _provenance(study),
        "reference": reference,
        "plans": [_plan(study, it, reference["hit_rates"]) for it in plans],
        "position": _positions(study, plans),
        "sensitivity": None if units is None else _units(units),
        "dequantisation": [asdict(it) for it in dequant],
        "claims": [asdict(it) for it in claims],
    }


def _provenance(study: Study) -> dict[str, Any]:
    def text(it: Any) -> dict[str, Any]:
        return {"documents": len(it.documents), "tokens": it.n_tokens, "hash": it.hash}

    return {
        "version": __version__, "model": study.subject.spec.name, "model_hash": study.identity, "seed": study.seed, "unit": _unit(study),
        "window_tokens": study.subject.window, "held_out": text(study.held_out), "calibration": text(study.calibration),
        "choosing": text(study.choosing),
    }  # fmt: skip


def _unit(study: Study) -> str:
    return BITS_PER_BYTE if study.held_out.has_bytes else BITS_PER_TOKEN


def figure(it: Figure) -> dict[str, float]:
    return {"value": it.value, "low": it.low, "high": it.high}


def _general(study: Study, it: Evaluation, base: Evaluation) -> dict[str, Any]:
    bits = {name: float(found[0]) for name, found in study.bootstrap.bits(it).items() if name != "mean"}
    return {
        "bits": figure(study.bootstrap.figure(it)), "bits_by_domain": bits, "loss_percent": figure(study.bootstrap.change(it, base)),
        "accuracy": float(it.right.sum() / it.tokens.sum()),
    }  # fmt: skip


def _plan(study: Study, it: Measured, unquantised: dict[str, float]) -> dict[str, Any]:
    base, _ = study.reference
    params = study.subject.spec.params_total
    return {
        "name": it.name,
        "plan": stated(study, it).model_dump(mode="json", exclude_none=True),
        "stored_bytes": it.stored_bytes,
        "ledger_bytes": it.ledger_bytes,
        "bits_per_weight": 8 * it.stored_bytes / params,
        **_general(study, it.evaluation, base),
        "router_agreement": it.router_agreement,
        "hit_rates": it.hit_rates,
        "hit_rate_moves": {share: it.hit_rates[share] - unquantised[share] for share in it.hit_rates},
        "real": it.real,
    }


def _positions(study: Study, plans: Sequence[Measured]) -> dict[str, Any]:
    """Bits per token by bucket of positions in the window."""
    base, _ = study.reference

    def bits(it: Evaluation) -> list[float]:
        return [float(x) for x in it.loss.sum(0) / it.tokens.sum(0) / np.log(2)]

    rows = {"unquantised": bits(base)} | {it.name: bits(it.evaluation) for it in plans}
    return {"ends": buckets(study.subject.window), "bits_per_token": rows}


def _units(units: Sensitivity) -> dict[str, Any]:
    rows = [{"unit": u.unit, "restored": figure(u.restored), "degraded": figure(u.degraded)} for u in units.units]
    return {"plan": units.plan, "loss_percent": figure(units.loss), "units": rows}


def stated(study: Study, it: Measured) -> PrecisionPlan:
    """Return a measured plan with its quality stated, as scenarios take it."""
    base, _ = study.reference
    loss = study.bootstrap.change(it.evaluation, base)
    quality = StatedQuality(
        basis="measured",
        model=study.subject.spec.name,
        benchmark=f"{_unit(study)}, {len(study.held_out.documents)} held-out documents ({study.held_out.hash})",
        loss_percent=round(loss.value, 4),
        low_percent=round(loss.low, 4),
        high_percent=round(loss.high, 4),
        plan_hash=it.plan.hash,
        source=f"moesim quality {study.subject.spec.name}, version {__version__}",
    )
    return it.plan.model_copy(update={"quality": quality})


def plan_yaml(plan: PrecisionPlan) -> str:
    """Return a plan as the YAML that scenarios take."""
    data = plan.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return str(yaml.safe_dump({"default": plan.default} | data, sort_keys=False, width=140))


def search_answer(study: Study, found: Found) -> dict[str, Any]:
    """Return what a search found, and how the other orders compare on held-out text."""
    base, _ = study.reference
    best = found.measured["search"]
    rows, gaps = [], {}
    for name, it in found.measured.items():
        gap = study.bootstrap.difference(it.evaluation, best.evaluation, base) if name != "search" else None
        if gap is not None:
            gaps[name] = gap
        loss = figure(study.bootstrap.change(it.evaluation, base))
        rows.append({"name": name, "plan": it.plan.model_dump(mode="json", exclude_none=True), "stored_bytes": it.stored_bytes,
                     "loss_percent": loss, "more": figure(gap) if gap else None, "choosing_percent": found.choosing_percent[name]})  # fmt: skip
    alone = sum(found.costs.loss[unit][level] for unit, level in _levels(best.plan, found).items())
    goal = {"bytes": f"at most {found.value:,.0f} bytes", "loss": f"at most {found.value:g} % lost on choosing text",
            "speed": f"at least {found.value:g} tok/s in {found.scenario}"}[found.goal]  # fmt: skip
    summary = (
        f"{study.subject.spec.name}, {goal}: {best.stored_bytes:,} bytes lose {show(study.bootstrap.change(best.evaluation, base))} of "
        f"{_unit(study)} on held-out text. Units alone add up to {alone:.4f} nats a token on choosing text. Nothing was chosen by held-out text."
    )
    return {
        "provenance": _provenance(study), "goal": found.goal, "value": found.value, "summary": summary, "plans": rows,
        "claims": [asdict(claim) for claim in order_claims(gaps)], "yaml": plan_yaml(stated(study, best)),
    }  # fmt: skip


def _levels(plan: PrecisionPlan, found: Found) -> dict[Unit, str]:
    return {unit: plan.format(unit[1], unit[0]).name for unit in found.costs.units}
