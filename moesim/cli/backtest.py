"""Owns ``moesim backtest``: predictions against a folder of measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.backtest import backtest as run_backtest
from moesim.backtest.ablation import ablate
from moesim.backtest.data import read_field_runs
from moesim.backtest.memory import predict_memory
from moesim.cli.options import Format, Output, check_target, note, say, writing
from moesim.report import backtest as field_report

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog="Example: moesim backtest ../shared/field_runs --warm -o md > accuracy.md")
def backtest(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with runs.csv, machines.yaml, models.yaml, memory.csv.", show_default=False)
    ],
    warm: Annotated[
        bool, typer.Option("--warm/--cold", help="Let one measured row per host and engine correct the others, or use none.")
    ] = False,
    output: Output = Format.text,
    ablation: Annotated[bool, typer.Option("--ablation", help="Also predict without each mechanism: what does it contribute?")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw predicted against measured.", show_default=False)] = None,
) -> None:
    """Predict what other people measured, and say how far off."""
    if plot is not None:
        check_target(plot, "--plot", ".png")
    data = read_field_runs(folder)
    run = run_backtest(data, warm=warm)
    memory = predict_memory(data)
    if plot is not None:
        from moesim.plots import backtest as plots_field  # matplotlib takes longer to import than most answers take

        with writing(plot, "--plot"):
            plots_field.save_backtest(run, plot)
    printers = {
        Format.text: field_report.text,
        Format.json: field_report.json,
        Format.md: field_report.markdown,
        Format.csv: field_report.csv,
    }
    say(printers[output](run, memory, ablate(run) if ablation else ()))
    if output is not Format.text:
        note(f"{len(run.scored)} rows scored, {len(run.skipped)} skipped")
