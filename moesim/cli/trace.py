"""Owns ``moesim trace``: what a routing trace file holds."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moesim import report_trace, resources
from moesim.cli.options import ListFormat, ListOutput, note, say
from moesim.trace import load_trace
from moesim.trace_stats import analyse_phases

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
SLOW_CELLS = 200_000  # rows x layers above which the statistics take more than a few seconds


@app.callback()
def trace() -> None:
    """Look into routing traces."""


@app.command(epilog="Example: moesim trace info tinymoe -o json")
def info(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An .npz file or the name of a bundled trace.", show_default=False)],
    output: ListOutput = ListFormat.text,
) -> None:
    """Show a trace's shape, skew, reuse, cache hit rates and predictability."""
    routing = load_trace(resources.find("traces", file))
    if routing.n_rows * routing.n_layers > SLOW_CELLS:
        note(f"analysing {routing.n_rows} rows of {routing.n_layers} layers ...")
    found = analyse_phases(routing)
    say(json.dumps(found, indent=2, sort_keys=True, allow_nan=False) if output is ListFormat.json else report_trace.text(routing, found))
