"""Owns ``moesim calibrate``: a hardware profile of this machine, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moesim.cli.options import check_target, note, say, write

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(
    "calibrate", epilog="Example: moesim calibrate -o this-machine.yaml && moesim validate scenarios/validation --profile this-machine.yaml"
)
def command(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the profile here instead of to stdout.", show_default=False)
    ] = None,
    stores: Annotated[
        Path | None,
        typer.Option(help="Keep the expert files here, on the drive to be measured; default: a temporary folder.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=50, help="Runs of each probe, after one that warms up.")] = 3,
) -> None:
    """Measure this machine: kernels, memory, reads, copies, hand-overs, interference.

    Takes about two minutes.
    """
    from moesim.calibrate import NOISY, calibrate  # needs torch, an optional extra

    if output is not None:
        check_target(output, "--output", ".yaml")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(stderr=True), auto_refresh=False
    ) as bar:  # a refreshing thread would take part in what is measured
        task = bar.add_task("calibrating", total=None)

        def tick(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        found = calibrate(stores, tick, repeats)
    if output is None:
        say(found.text)
    else:
        write(output, found.text, "--output")
    note(f"{len(found.spreads)} figures with a median spread of {found.spread:.1%}")
    if found.spread > NOISY:
        note(f"warning: the machine is noisy (a steady one spreads under {NOISY:.0%}): stop other work and calibrate again")
    for name in found.noisy[:5]:
        note(f"note: {name} spreads {found.spreads[name]:.0%}")
