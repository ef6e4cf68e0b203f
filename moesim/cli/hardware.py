"""Owns ``moesim hardware``: the bundled profiles, the parts of the catalogue, or one machine with the basis of each figure."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from typing import Annotated, Any, get_args

import typer

from moesim import resources
from moesim.cli.bundled import show_list
from moesim.cli.options import ListFormat, ListOutput, bundled, say
from moesim.errors import InputError
from moesim.hardware import HardwareProfile, figures, load_hardware
from moesim.hardware.catalogue import part, part_names
from moesim.hardware.compose import find_hardware
from moesim.hardware.grammar import is_composition, read_parts
from moesim.hardware.parts import Basis, Figure
from moesim.text_table import WIDTH, columns, wrap
from moesim.units import show

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
_QUANTITY = re.compile(r"([0-9.e+-]+) (\S+)")
_PLAIN_UNITS = {"B": "bytes", "B/s": "bytes_per_s", "FLOP/s": "flops_per_s"}


@app.command(
    epilog="Examples: moesim hardware --parts; moesim hardware 'rtx-3090 + ryzen-9950x + ddr5-6000x2:96GiB + nvme-gen4'; moesim hardware -o json"
)
def hardware(
    machine: Annotated[
        str | None,
        typer.Argument(
            metavar="MACHINE",
            help="Show this machine: a profile, a file, or parts joined by +.",
            autocompletion=bundled("hardware_profiles"),
            show_default=False,
        ),
    ] = None,
    parts: Annotated[bool, typer.Option("--parts", help="List the parts of the catalogue.")] = False,
    output: ListOutput = ListFormat.text,
) -> None:
    """List the bundled hardware profiles, the parts to compose one, or show a machine."""
    if machine is not None and parts:
        raise InputError("--parts", expected="no machine beside it", got=f'"{machine}"')
    if parts:
        show_list({name: f"{kind}: {part(name).line}" for name, kind in part_names().items()}, output)
    elif machine is None:
        show_list({name: load_hardware(str(path)).description for name, path in resources.names("hardware_profiles").items()}, output)
    elif output is ListFormat.json:
        profile = find_hardware(machine)
        say(json.dumps({"profile": profile.model_dump(mode="json"), "parts": _parts(machine)}, indent=2))
    else:
        say("\n".join(_text(find_hardware(machine), _parts(machine))))


def _parts(machine: str) -> list[dict[str, Any]]:
    """The parts of a composition with their prices; of a profile, none."""
    if not is_composition(machine):
        return []
    counted = read_parts(machine).counted()
    return [{"name": name, "count": count, "price": it.price and it.price.model_dump(mode="json")} for name, count, it in counted]


def _text(profile: HardwareProfile, parts: list[dict[str, Any]]) -> list[str]:
    rows = [(name, _short(figure), figure.basis, figure.source) for name, figure in figures(profile)]
    room = max(WIDTH - sum(max(len(row[i]) for row in rows) + 2 for i in range(3)), 20)
    table = [("figure", "value", "basis", "source"), *((*row[:3], textwrap.shorten(row[3], room, placeholder=" ...")) for row in rows)]
    lines = [*wrap(profile.name), *wrap(profile.description), "", *columns(table, [1])]
    priced = [(part, part["price"]) for part in parts if part["price"]]
    if priced:
        lines += ["", "prices as published, each on its date"]
        lines += columns(
            [(f"{p['count']} x {p['name']}", f"{it['amount']:g} {it['currency']}", it["date"], it["basis"]) for p, it in priced], [1], "  "
        )
    counts = Counter(row[2] for row in rows)
    bases = ", ".join(f"{counts[basis]} {basis}" for basis in get_args(Basis))
    return [*lines, "", *wrap(f"{len(rows)} figures: {bases}; sources in full with -o json")]


def _short(figure: Figure[Any]) -> str:
    """A figure's value to four digits, with its unit."""
    text = str(figure.model_dump(mode="json")["value"])
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return text
    dimension = _PLAIN_UNITS.get(match[2])  # what has no short form is written in base units
    return show(float(match[1]), dimension, 4) if dimension else f"{float(match[1]):.4g} {match[2]}"
