"""Owns ``moesim report``: runs and results on one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Assignments, Machine, bundled, check_target, note, write
from moesim.cli.run import progress
from moesim.config import command
from moesim.errors import EXIT_DOES_NOT_FIT, InputError
from moesim.report.result_file import read_result
from moesim.simulate import load_case, simulate
from moesim.whatif import DRAWS, whatif

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(
    "report", epilog="Example: moesim run quickstart --set seed=1 -o json > one.json && moesim report quickstart one.json -o report.html"
)
def run(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="SCENARIO|RESULT.json...",
            help="Scenarios, which are run, or what run -o json wrote.",
            autocompletion=bundled("scenarios"),
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page: FILE.html or FILE.md.")] = Path("report.html"),
    assignments: Assignments = None,
    hardware: Machine = None,
    changes: Annotated[bool, typer.Option("--changes", help="Also try each change of moesim whatif: takes a while.")] = False,
) -> None:
    """Write a page that shows one run or compares several."""
    check_target(output, "--output", ".md" if output.suffix.lower() == ".md" else ".html")
    chosen = (*(assignments or ()), *([f"hardware={json.dumps(hardware)}"] if hardware is not None else []))
    files = [name for name in what if name.lower().endswith(".json")]
    if chosen and len(files) == len(what):
        raise InputError("--set", expected="a scenario to run", got="results alone", fix="results stay as they were written")
    from moesim.report import page as report_page  # matplotlib takes longer to import than most runs take

    entries = []
    for name in what:
        if name in files:
            entries.append(report_page.Entry(name, read_result(Path(name))))
            continue
        case = load_case(name, chosen)
        with progress() as tick:
            result = simulate(case, tick)
        with progress() as tick:
            answer = whatif(case, name, chosen, draws=DRAWS, quick=not changes, progress=tick)
        line = command(name, chosen) + " -o json"
        entries.append(report_page.Entry(name, result.as_dict(), result, answer, line))
    shape = report_page.page_markdown if output.suffix.lower() == ".md" else report_page.page_html
    write(output, shape(entries), "--output")
    note(f"wrote {output}")
    if any(entry.data["oom"] is not None for entry in entries):
        raise typer.Exit(EXIT_DOES_NOT_FIT)
