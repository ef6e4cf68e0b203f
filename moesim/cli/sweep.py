"""Owns ``moesim sweep``: many points of a scenario, the best of them, and what each axis does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from moesim.cli.options import Format, Output, bundled, check_target, note, say, writing
from moesim.errors import EXIT_DOES_NOT_FIT, InputError
from moesim.host.cores import cores
from moesim.report import sweep as report_sweep
from moesim.sweep import Sweep, plan_sweep, sweep
from moesim.sweep.run import on_cluster, on_cores
from moesim.sweep.space import MOST_POINTS, code_identity
from moesim.sweep.store import Store
from moesim.sweep.trials import SAMPLERS

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
PRINTERS = {
    Format.text: report_sweep.sweep_text,
    Format.json: report_sweep.sweep_json,
    Format.md: report_sweep.sweep_markdown,
    Format.csv: report_sweep.sweep_csv,
}


@app.command("sweep", epilog="Example: moesim sweep quickstart-switches --plot sweep.png")
def run(
    file: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP",
            help="A bundled sweep (see scenarios/sweeps) or a YAML file.",
            autocompletion=bundled("scenarios/sweeps"),
            show_default=False,
        ),
    ],
    output: Output = Format.text,
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where results are kept, and found again. [default: NAME.sweep.sqlite here]", show_default=False),
    ] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes. [default: all cores]", show_default=False)] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="tcp://HOST:PORT", help="Run on the workers of a Dask scheduler.", show_default=False)
    ] = None,
    search: Annotated[
        str | None, typer.Option(metavar="|".join(SAMPLERS), help="Choose points instead of computing all.", show_default=False)
    ] = None,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Points that a search computes.")] = 100,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of a search.")] = 0,
    limit_points: Annotated[int, typer.Option(metavar="N", min=1, help="The most points of a grid.")] = MOST_POINTS,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the front and what each axis does.", show_default=False)
    ] = None,
) -> None:
    """Compute many points of a scenario and find the best."""
    if plot is not None:
        check_target(plot, "--plot", ".png")
    if search is not None and search not in SAMPLERS:
        raise InputError("--search", expected=f"one of {', '.join(SAMPLERS)}", got=f'"{search}"')
    plan = plan_sweep(file, None if search else limit_points)
    workers = jobs or cores()
    runner = on_cores(workers) if cluster is None else on_cluster(cluster)
    kept = store if store is not None else Path(f"{plan.spec.name}.sweep.sqlite")
    began = time.perf_counter()
    counts: dict[str, int] = {}
    with Store(kept, code_identity()) as opened, progress() as tick:
        if others := opened.others():
            note(f"{kept}: {others} points were computed by another version and are not used")
        found = sweep(
            plan,
            opened,
            runner=runner,
            workers=workers,
            sampler=search or "",
            trials=trials,
            seed=seed,
            progress=tick,
            counted=counts.update,
        )
    note(speed(counts, time.perf_counter() - began, kept))
    if plot is not None:
        _plot(found, plot)
    say(PRINTERS[output](found))
    if found.best is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def speed(counts: Mapping[str, int], wall_s: float, store: Path) -> str:
    """Return how fast a sweep was."""
    rate = f": {counts['computed'] / wall_s:.3g} points/s" if counts["computed"] else ""
    return f"{counts['computed']:,} points computed, {counts['found']:,} found in {store}, {wall_s:.3g} s{rate}"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.3g} points/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def progress() -> Iterator[Callable[[int, int], None] | None]:
    """Yield what takes (points done, points in all); a bar with an estimate on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), _Rate()
    with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=120) as bar:
        task = bar.add_task("points", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plot(found: Sweep, path: Path) -> None:
    if not any(row.record for row in found.rows):
        note("nothing to plot: no point has figures")
        return
    from moesim.plots import sweep as plots_sweep  # matplotlib takes a while to import

    with writing(path, "--plot"):
        plots_sweep.plot_sweep(found, path)
