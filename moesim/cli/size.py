"""Owns ``moesim size``: from needs to the machines that meet them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Format, Output, bundled, say
from moesim.cli.run import progress
from moesim.errors import EXIT_DOES_NOT_FIT, InputError
from moesim.prices import load_prices
from moesim.report import sizing as report_sizing
from moesim.sizing import size
from moesim.sizing.needs import Needs, line_of, load_needs

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
PRINTERS = {
    Format.text: report_sizing.sizing_text,
    Format.json: report_sizing.sizing_json,
    Format.md: report_sizing.sizing_markdown,
    Format.csv: report_sizing.sizing_csv,
}


@app.command("size", epilog="Example: moesim size chat -o md > chat.md")
def run(
    needs: Annotated[
        str,
        typer.Argument(
            metavar="NEEDS",
            help="A bundled name (see scenarios/needs) or a YAML file.",
            autocompletion=bundled("scenarios/needs"),
            show_default=False,
        ),
    ],
    output: Output = Format.text,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Prices that take the place of the bundled ones.", show_default=False)
    ] = None,
    date: Annotated[
        str | None,
        typer.Option(metavar="YYYY-MM-DD", help="The day against which ages of prices are told. [default: today]", show_default=False),
    ] = None,
) -> None:
    """Find machines and upgrades that meet needs, the cheapest first."""
    try:
        today = datetime.date.fromisoformat(date) if date is not None else datetime.date.today()
    except ValueError:
        raise InputError("--date", expected="a date as YYYY-MM-DD", got=f'"{date}"') from None
    stated, folder = load_needs(needs)
    table = load_prices(prices, today)
    with progress() as tick:
        try:
            found = size(stated, folder, table, today, tick)
        except InputError as error:
            raise (error.at(line_of(needs, error.what)) if error.what.split(".")[0] in Needs.model_fields else error) from None
    say(PRINTERS[output](found))
    if not found.ranked:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
