"""Owns ``moesim serve-sim``: requests that arrive, at one rate or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Assignments, Format, Machine, Output, check_target, note, say, writing
from moesim.cli.run import progress
from moesim.errors import EXIT_DOES_NOT_FIT, InputError
from moesim.report import serving as report_serving
from moesim.serving import load_serving
from moesim.serving.curve import Saturation, saturation

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
PRINTERS = {
    Format.text: report_serving.serving_text,
    Format.json: report_serving.serving_json,
    Format.md: report_serving.serving_markdown,
    Format.csv: report_serving.serving_csv,
}


@app.command("serve-sim", epilog="Example: moesim serve-sim chat-offloaded --rates 0.5,1,2,4 --plot curve.png")
def run(
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO", help="A bundled name (moesim scenarios) or a YAML file with a section serving.", show_default=False
        ),
    ],
    output: Output = Format.text,
    assignments: Assignments = None,
    hardware: Machine = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,R,...", help="Mean rates of arrivals, requests/s; a curve over them.", show_default=False)
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Numbers of users in a closed loop; a curve over them.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of the arrivals; the same as --set seed=N.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the curve, and batch and cache over time.", show_default=False)
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Check the invariants of batches and cache blocks after every step.")] = False,
) -> None:
    """Simulate serving: requests arrive and wait, batches form; how many does the machine bear."""
    if plot is not None:
        check_target(plot, "--plot", ".png")
    extra = [f"seed={seed}"] if seed is not None else []
    extra += [f"hardware={json.dumps(hardware)}"] if hardware is not None else []
    wanted = _numbers(rates, "--rates", float), [int(n) for n in _numbers(concurrency, "--concurrency", int)]
    case, _ = load_serving(scenario, (*(assignments or ()), *extra))
    with progress() as tick:
        curve = saturation(case, *wanted, debug=debug, progress=tick)
    if plot is not None:
        _plot(curve, plot)
    say(PRINTERS[output](curve))
    if curve.oom is not None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _numbers(text: str | None, option: str, kind: type[float] | type[int]) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        raise InputError(option, expected="numbers with commas between them, such as 1,2,4", got=f'"{text}"') from None


def _plot(curve: Saturation, path: Path) -> None:
    if all(data["metrics"] is None for _, _, data in curve.points):
        note("nothing to plot: no request was served")
        return
    from moesim.plots import serving as plots_serving  # matplotlib takes a while to import

    with writing(path, "--plot"):
        plots_serving.plot_serving(curve, path)
