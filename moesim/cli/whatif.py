"""Owns ``moesim whatif``: what one scenario's speed depends on, and what changes would buy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Assignments, Format, Machine, Output, ScenarioName, check_target, note, say, writing
from moesim.cli.run import progress
from moesim.errors import EXIT_DOES_NOT_FIT
from moesim.report import whatif as report_whatif
from moesim.simulate import load_case
from moesim.whatif import DRAWS, POINTS, WhatIf, whatif

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
PRINTERS = {
    Format.text: report_whatif.whatif_text,
    Format.json: report_whatif.whatif_json,
    Format.md: report_whatif.whatif_markdown,
    Format.csv: report_whatif.whatif_csv,
}


@app.command("whatif", epilog="Example: moesim whatif quickstart --vary ssd.bandwidth=1..14GB/s --plot tornado.png")
def run(
    scenario: ScenarioName,
    output: Output = Format.text,
    assignments: Assignments = None,
    hardware: Machine = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=FROM..TO", help="A curve over a figure of the machine or a switch; may be repeated.", show_default=False
        ),
    ] = None,
    draws: Annotated[int, typer.Option(metavar="N", min=0, max=100_000, help="Draws of the interval; 0: none.")] = DRAWS,
    points: Annotated[int, typer.Option(metavar="N", min=2, max=1000, help="Points of each curve.")] = POINTS,
    quick: Annotated[bool, typer.Option("--quick", help="Only what one schedule answers: no changes, no sizes of memory.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the tornado and the curves.", show_default=False)] = None,
) -> None:
    """Show what a scenario's speed depends on, and what each change would buy."""
    if plot is not None:
        check_target(plot, "--plot", ".png")
    chosen = (*(assignments or ()), *([f"hardware={json.dumps(hardware)}"] if hardware is not None else []))
    with progress() as tick:
        answer = whatif(load_case(scenario, chosen), scenario, chosen, tuple(vary or ()), draws, points, quick, tick)
    if plot is not None:
        _plot(answer, plot)
    say(PRINTERS[output](answer))
    if answer.data["oom"] is not None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _plot(answer: WhatIf, path: Path) -> None:
    if not answer.effects:
        note("nothing to plot: memory ran out before the first step")
        return
    from moesim.plots import whatif as plots_whatif  # matplotlib takes a while to import

    with writing(path, "--plot"):
        plots_whatif.plot_whatif(answer, path)
