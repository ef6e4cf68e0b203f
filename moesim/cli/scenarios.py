"""Owns ``moesim scenarios``."""

from __future__ import annotations

import typer

from moesim import resources
from moesim.cli.bundled import show_list
from moesim.cli.options import ListFormat, ListOutput
from moesim.scenario import load_scenario

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog="Example: moesim scenarios -o json")
def scenarios(output: ListOutput = ListFormat.text) -> None:
    """List the bundled scenarios."""
    paths = resources.names("scenarios") | resources.names("scenarios/serving")
    show_list({name: load_scenario(path)[0].description for name, path in paths.items()}, output)
