"""Owns ``moesim schema``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moesim.cli.options import say
from moesim.schema import KINDS, schema

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command("schema", epilog="Example: moesim schema scenario > scenario.schema.json")
def show_schema(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.", autocompletion=lambda: list(KINDS), show_default=False)
    ],
) -> None:
    """Print the JSON Schema of a kind of file, for editors."""
    say(json.dumps(schema(kind), indent=2))
