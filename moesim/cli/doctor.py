"""Owns ``moesim doctor``: what usually goes wrong, looked for in one scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Assignments, Format, Machine, Output, ScenarioName, say
from moesim.cli.run import progress
from moesim.doctor import doctor
from moesim.errors import InputError
from moesim.report import doctor as report_doctor

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
PRINTERS = {
    Format.text: report_doctor.doctor_text,
    Format.json: report_doctor.doctor_json,
    Format.md: report_doctor.doctor_markdown,
    Format.csv: report_doctor.doctor_csv,
}


@app.command("doctor", epilog="Example: moesim doctor quickstart --set io.engine=mmap")
def run(
    scenario: ScenarioName,
    output: Output = Format.text,
    assignments: Assignments = None,
    hardware: Machine = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="A measured profile (moesim calibrate) in place of the stated machine.", show_default=False),
    ] = None,
) -> None:
    """Check a scenario for what usually goes wrong, and what each fault costs."""
    if profile is not None and not profile.is_file():
        raise InputError("--profile", expected="a profile file", got=f'"{profile}"', fix="make one with moesim calibrate")
    chosen = (*(assignments or ()), *([f"hardware={json.dumps(hardware)}"] if hardware is not None else []))
    with progress() as tick:
        found = doctor(scenario, chosen, None if profile is None else str(profile.resolve()), tick)
    say(PRINTERS[output](found))
