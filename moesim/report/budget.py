"""Owns what ``moesim budget`` says: memory lines per tier, what is left, the largest context; several precision plans side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesim import __version__
from moesim.ledger import Ledger
from moesim.report import context_text, loss_of_quality
from moesim.simulate import Case, quality_of
from moesim.text_table import columns, markdown_table, to_csv, to_json, wrap
from moesim.units import show


@dataclass(frozen=True, slots=True)
class Budget:
    """A case under one precision plan, by the name it goes under."""

    name: str
    case: Case

    @property
    def ledger(self) -> Ledger:
        return self.case.layout.ledger

    def _repr_html_(self) -> str:
        return self.ledger._repr_html_()

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        layout = self.case.layout
        return {
            "precision": self.name,
            "tiers": self.ledger.tiers(),
            "fits": self.ledger.fits,
            "quality": quality_of(self.case.model, self.case.plan),
            "context_tokens": layout.context_tokens,
            "max_context_tokens": layout.max_context_tokens,
            "kv_allowance_tokens": layout.kv_allowance_tokens,
        }


def plan_name(case: Case) -> str:
    """Return a scenario's precision as one would write it on a command line."""
    plan = case.scenario.precision
    return plan if isinstance(plan, str) else json.dumps(plan, separators=(", ", ": ")).replace('"', "")


def as_json(plans: Sequence[Budget]) -> str:
    """Return the first plan at the top level, and all of them as ``plans``."""
    return to_json(_data(plans))


def as_csv(plans: Sequence[Budget]) -> str:
    """Return flat rows of metric, value and unit; each plan by its precision."""
    data = _data(plans)
    several = {"plans": {plan.pop("precision"): plan for plan in data.pop("plans")}} if len(plans) > 1 else data
    return to_csv(several | {"provenance": data["provenance"]} if len(plans) > 1 else {k: v for k, v in data.items() if k != "plans"})


def _data(plans: Sequence[Budget]) -> dict[str, Any]:
    case = plans[0].case
    names = {"scenario": case.scenario.name, "model": case.model.name, "hardware": case.hardware.name, "version": __version__}
    every = [plan.as_dict() for plan in plans]
    return {"provenance": names, **every[0], "plans": every}


def text(plans: Sequence[Budget]) -> str:
    """Return the plan, or several side by side, as aligned text."""
    case = plans[0].case
    lines = [f"memory plan of {case.scenario.name}: {case.model.name} on {case.hardware.name}"]
    if len(plans) == 1:
        lines += wrap(plans[0].name, "precision ", most=3)
    else:
        for i, plan in enumerate(plans, start=1):
            lines += wrap(plan.name, f"plan {i}: ", most=2)
    for tier in case.layout.capacities:
        lines += ["", *_tier_lines(plans, tier)]
    lines.append("")
    for i, plan in enumerate(plans, start=1):
        lines += wrap(_summary(plan), f"plan {i}: " if len(plans) > 1 else "")
    return "\n".join(lines) + "\n"


def markdown(plans: Sequence[Budget]) -> str:
    """Return the plans as Markdown tables, one per tier."""
    case = plans[0].case
    lines = [f"# Memory plan of {case.scenario.name}: {case.model.name} on {case.hardware.name}"]
    for tier in case.layout.capacities:
        rows = [[row[0].strip(), *row[1:]] for row in _rows(plans, tier)]
        head = [tier, *(plan.name for plan in plans), *(["note"] if len(plans) == 1 else [])]
        lines += ["", *markdown_table(head, rows)]
    lines += ["", *(f"- {plan.name}: {_summary(plan)}" for plan in plans)]
    return "\n".join(lines) + "\n"


def _summary(plan: Budget) -> str:
    return f"{verdict(plan)}; {_context(plan)}; quality: {loss_of_quality(quality_of(plan.case.model, plan.case.plan))}"


def verdict(plan: Budget) -> str:
    """Say whether a plan fits, and if not which line of which tier broke it."""
    over = plan.ledger.first_over()
    if over is None:
        return "fits"
    tier, line = over
    return f'does not fit: in {tier} the line "{line.name}" passes what is usable, {show(-plan.ledger.left_bytes(tier), "bytes")} too many'


def _context(plan: Budget) -> str:
    layout = plan.case.layout
    return context_text(layout.max_context_tokens, layout.context_tokens, layout.kv_allowance_tokens)


def _tier_lines(plans: Sequence[Budget], tier: str) -> list[str]:
    heads = ["bytes"] if len(plans) == 1 else [f"plan {i}" for i in range(1, len(plans) + 1)]
    return columns([[tier, *heads, *([""] if len(plans) == 1 else [])], *_rows(plans, tier)], range(1, len(plans) + 1))


def _rows(plans: Sequence[Budget], tier: str) -> list[list[str]]:
    """Name and size of each line of a tier, then sum, capacity and rest; with notes where there is one plan."""
    sizes = [{line.name: line for line in plan.ledger.lines if line.tier == tier} for plan in plans]
    rows = []
    for name in dict.fromkeys(name for table in sizes for name in table):
        cells = [show(table[name].bytes, "bytes") if name in table else "-" for table in sizes]
        notes = []
        if len(plans) == 1:
            line = sizes[0][name]
            notes = [", ".join(part for part in (line.note, "assumed" if line.basis == "assumed" else "") if part)]
        rows.append([f"  {name}", *cells, *notes])
    blank = [""] if len(plans) == 1 else []
    capacity = plans[0].ledger.capacities[tier]
    reserved = [f"{show(capacity.total_bytes, 'bytes')} without {show(capacity.reserved_bytes, 'bytes')} reserved"] if blank else []
    rows.append(["  = planned", *(show(plan.ledger.planned_bytes(tier), "bytes") for plan in plans), *blank])
    rows.append(["  usable", *(show(plan.ledger.capacities[tier].usable_bytes, "bytes") for plan in plans), *reserved])
    rows.append(["  left", *(_signed(plan.ledger.left_bytes(tier)) for plan in plans), *blank])
    return rows


def _signed(size: int) -> str:
    return f"-{show(-size, 'bytes')}" if size < 0 else show(size, "bytes")
