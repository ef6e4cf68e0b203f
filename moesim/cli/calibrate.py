"""Owns ``moesim calibrate``: a hardware profile of this machine, measured, or of any machine by llama-bench results from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.calibrate.bench import calibrate_from, profile_text
from moesim.cli.options import bundled, check_target, note, say, write
from moesim.cli.progress import progress
from moesim.errors import InputError

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
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RESULTS", help="Take llama-bench results (JSON, CSV, Markdown) instead of measuring.", show_default=False
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="With --from: the machine they are of, as far as it is known.",
            autocompletion=bundled("hardware_profiles"),
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="With --from: stands for the file that they name.", autocompletion=bundled("models"), show_default=False
        ),
    ] = "",
) -> None:
    """Measure this machine as a hardware profile.

    Takes about two minutes. With --from nothing is measured: the profile of --hardware is turned until the simulation gives those results.
    """
    if output is not None:
        check_target(output, "--output", ".yaml")
    if source is not None:
        _from_bench(source, hardware, model, output)
        return
    from moesim.calibrate.calibration import NOISY, calibrate  # needs torch, an optional extra

    with progress("calibrating") as tick:
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


def _from_bench(source: Path, hardware: str | None, model: str, output: Path | None) -> None:
    if hardware is None:
        raise InputError(
            "--from", expected="--hardware beside it", got="none", fix="name the machine that was measured, or parts joined by +"
        )
    found = calibrate_from(source, hardware, model)
    text = profile_text(found)
    if output is None:
        say(text)
    else:
        write(output, text, "--output")
    for row in found.rows:
        words = f"{row.row.test} on {' and '.join(row.devices)}"
        note(f"{words}: measured {row.row.tok_s:.4g} tokens/s, before {row.before:.4g}, calibrated {row.after:.4g}")
    for remark in found.notes:
        note(f"note: {remark}")
