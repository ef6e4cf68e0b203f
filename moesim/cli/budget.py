"""Owns ``moesim budget``: the memory plan of a scenario, before any run and without any trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Assignments, Format, Machine, Output, ScenarioName, say
from moesim.errors import DoesNotFit
from moesim.memory_log import compare
from moesim.report import against as report_against
from moesim.report import budget as report_budget
from moesim.report.budget import Budget
from moesim.simulate import load_case
from moesim.units import show

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog="Example: moesim budget quickstart --precision fp16 --precision '{default: int8, routed_experts: int4-g32}' --check")
def budget(
    scenario: ScenarioName,
    output: Output = Format.text,
    assignments: Assignments = None,
    hardware: Machine = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 3 and name the line that broke the plan, if it does not fit.")] = False,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLAN", help="A format or an inline YAML plan instead of the scenario's; repeat it to compare.", show_default=False
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG",
            help="Compare the plan with recorded memory: nvidia-smi CSV, llama.cpp log, CSV of time,bytes.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show where the memory goes, what is left, and the largest context that fits."""
    chosen = (*(assignments or ()), *([f"hardware={json.dumps(hardware)}"] if hardware is not None else []))
    if precision:
        plans = [Budget(plan, load_case(scenario, (*chosen, f"precision={plan}"))) for plan in precision]
    else:
        case = load_case(scenario, chosen)
        plans = [Budget(report_budget.plan_name(case), case)]
    if against is not None:
        _against(plans[0], against, output)
        return
    printers = {
        Format.text: report_budget.text,
        Format.json: report_budget.as_json,
        Format.md: report_budget.markdown,
        Format.csv: report_budget.as_csv,
    }
    say(printers[output](plans))
    if check:
        for plan in plans:
            _check(plan, named=len(plans) > 1)


def _against(plan: Budget, log: Path, output: Format) -> None:
    printers = {
        Format.text: report_against.text,
        Format.json: report_against.as_json,
        Format.md: report_against.markdown,
        Format.csv: report_against.as_csv,
    }
    say(printers[output](compare(plan.case.layout, log)))


def _check(plan: Budget, named: bool) -> None:
    over = plan.ledger.first_over()
    if over is None:
        return
    tier, line = over
    planned, usable = plan.ledger.planned_bytes(tier), plan.ledger.capacities[tier].usable_bytes
    raise DoesNotFit(
        f'{f"{plan.name}: " if named else ""}{tier} does not fit: the line "{line.name}" ({show(line.bytes, "bytes")}) passes the usable '
        f"{show(usable, 'bytes')}; {show(planned, 'bytes')} are planned, {show(planned - usable, 'bytes')} too many"
    )
