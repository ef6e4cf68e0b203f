"""Owns ``moesim run``: one scenario from its name to the answer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moesim import perfetto, report
from moesim.cli.options import Assignments, Format, Machine, Output, ScenarioName, check_target, note, say, write, writing
from moesim.errors import EXIT_DOES_NOT_FIT
from moesim.simulate import Result, load_case, simulate

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog="Example: moesim run quickstart --set prefetch.distance=2 -o json > result.json")
def run(
    scenario: ScenarioName,
    output: Output = Format.text,
    assignments: Assignments = None,
    hardware: Machine = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the timeline; ui.perfetto.dev opens it.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw lanes and memory over time.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same as --set seed=N.", show_default=False)] = None,
    derate: Annotated[
        float | None, typer.Option(metavar="F", help="The same as --set derate=F: all rates times F.", show_default=False)
    ] = None,
) -> None:
    """Simulate a scenario: does it fit, how fast is it, where does the time go."""
    if timeline is not None:
        check_target(timeline, "--timeline", ".json")
    if plot is not None:
        check_target(plot, "--plot", ".png")
    extra = [f"{name}={value!r}" for name, value in (("seed", seed), ("derate", derate)) if value is not None]
    extra += [f"hardware={json.dumps(hardware)}"] if hardware is not None else []
    case = load_case(scenario, (*(assignments or ()), *extra))
    began = time.perf_counter()
    with progress() as tick:
        result = simulate(case, tick, keep=timeline is not None or plot is not None)
    wall_s = time.perf_counter() - began
    if timeline is not None:
        write(timeline, json.dumps(perfetto.export(result), separators=(",", ":")), "--timeline")
    if plot is not None:
        _plot(result, plot)
    if output is Format.text:
        say(report.run_text(result, wall_s))
    else:
        say({Format.json: report.run_json, Format.md: report.run_markdown, Format.csv: report.run_csv}[output](result))
        note(report.speed(result, wall_s))
    if result.oom is not None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


@contextmanager
def progress() -> Iterator[Callable[[int, int], None] | None]:
    """Yield what takes (steps done, steps in all); a bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plot(result: Result, path: Path) -> None:
    if result.meter is None:
        note("nothing to plot: memory ran out before the first step")
        return
    from moesim import plots  # matplotlib takes longer to import than most runs take

    with writing(path, "--plot"):
        plots.plot_run(result, path)
