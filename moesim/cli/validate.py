"""Owns ``moesim validate``: predicted against measured, on this machine."""

from __future__ import annotations

import json
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.options import check_target, note, say, write
from moesim.cli.progress import Tick, progress
from moesim.errors import EXIT_OUT_OF_TOLERANCE, InputError
from moesim.perfetto import export_pair
from moesim.report import validate as report_validate
from moesim.resources import find
from moesim.validate.suite import entries

if TYPE_CHECKING:
    from moesim.validate.validation import Validation

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


class Page(StrEnum):
    """What is printed."""

    text = "text"
    json = "json"
    md = "md"
    html = "html"


@app.command(
    "validate",
    epilog="Example: moesim calibrate -o here.yaml && moesim validate scenarios/validation --profile here.yaml -o md > validation.md",
)
def command(
    suite: Annotated[str, typer.Argument(metavar="SCENARIO|FOLDER", help="A scenario, or a folder with a suite.yaml.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Only the cases that the suite marks as quick.")] = False,
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE.yaml", help="What moesim calibrate wrote; default: calibrate first.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Runs of each case, after one that warms up.")] = 5,
    oom: Annotated[bool, typer.Option("--oom", help="Also find where memory runs out, in processes with a limit.")] = False,
    stores: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the expert files here; default: a temporary folder.", show_default=False)
    ] = None,
    output: Annotated[Page, typer.Option("-o", "--output", help="Format of the answer on stdout.")] = Page.text,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw the suite and every case as PNG here.", show_default=False)] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write each case's simulated and measured timeline here; ui.perfetto.dev opens them.", show_default=False
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Also write the page with every figure.", show_default=False)
    ] = None,
) -> None:
    """Run schedules on real experts, compare with the simulation."""
    cases = entries(suite, quick)
    if record is not None:
        check_target(record, "--record", ".md")
    measured = None if profile is None else find("hardware_profiles", str(profile), where="--profile")
    try:
        from moesim.validate.case import Stores
        from moesim.validate.validation import validate
    except ModuleNotFoundError as error:
        raise InputError("validate", expected=f"the package {error.name}", got="none", fix="pip install 'moesim[validate]'") from None
    with tempfile.TemporaryDirectory(prefix="moesim-") as scratch, Stores(stores) as kept:
        if measured is None:
            with progress("calibrating") as tick:
                measured = _calibrated(Path(scratch), kept.folder, tick)
        with progress("validating") as tick:
            found = validate(_name(suite, quick), cases, measured, kept, repeats, oom, tick)
    pictures = _pictures(found) if plot is not None or output is Page.html else {}
    if plot is not None:
        _save({f"{name}.png": png for name, png in pictures.items()}, plot, "--plot")
    if timeline is not None:
        _save(_timelines(found), timeline, "--timeline")
    if record is not None:
        write(record, report_validate.validate_markdown(found.data), "--record")
    if output is Page.html:
        say(report_validate.validate_html(found.data, pictures))
    else:
        shapes = {
            Page.text: report_validate.validate_text,
            Page.json: report_validate.validate_json,
            Page.md: report_validate.validate_markdown,
        }
        say(shapes[output](found.data))
    if not found.met:
        raise typer.Exit(EXIT_OUT_OF_TOLERANCE)


def _calibrated(scratch: Path, folder: Path, tick: Tick) -> Path:
    """Measure this machine; return the profile's file."""
    from moesim.calibrate.calibration import NOISY, calibrate

    found = calibrate(folder, tick)
    if found.spread > NOISY:
        note(f"warning: the machine is noisy: the calibration's figures spread {found.spread:.0%} (a steady one under {NOISY:.0%})")
    path = scratch / "this-machine.yaml"
    write(path, found.text, "calibration")
    return path


def _name(suite: str, quick: bool) -> str:
    name = Path(suite).name or suite
    return f"{name} (quick)" if quick else name


def _pictures(found: Validation) -> dict[str, bytes]:
    """PNG by name: the suite, then each case that ran."""
    from moesim.plots import validate as plots_validate  # matplotlib takes a while to import

    rows = found.data["scenarios"]
    out = {"suite": plots_validate.suite_picture(rows)}
    for row, it in zip(rows, found.executed, strict=True):
        if not row["failed"]:
            out[row["name"]] = plots_validate.case_picture(it, row)
    return out


def _timelines(found: Validation) -> dict[str, bytes]:
    """Chrome trace by file name, of each case that ran: what was predicted, and the run of median latency."""
    out = {}
    for row, it in zip(found.data["scenarios"], found.executed, strict=True):
        if not row["failed"]:
            both = {"simulated": it.predicted, "measured": it.typical.timeline}
            text = json.dumps(export_pair(it.case, it.schedule, both), separators=(",", ":"))
            out[f"{row['name']}.json"] = text.encode("utf-8")
    return out


def _save(files: dict[str, bytes], folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise InputError(option, expected="a folder to write to", got=error.strerror or str(error), where=str(folder)) from None
