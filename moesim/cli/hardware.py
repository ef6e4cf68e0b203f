"""Owns ``moesim hardware``."""

from __future__ import annotations

import typer

from moesim import resources
from moesim.cli.bundled import show_list
from moesim.cli.options import ListFormat, ListOutput
from moesim.hardware import load_hardware

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog="Example: moesim hardware -o json")
def hardware(output: ListOutput = ListFormat.text) -> None:
    """List the bundled hardware profiles."""
    show_list({name: load_hardware(str(path)).description for name, path in resources.names("hardware_profiles").items()}, output)
