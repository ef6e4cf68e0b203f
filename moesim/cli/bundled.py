"""Owns what ``moesim models``, ``hardware`` and ``scenarios`` print: the bundled names, each with one line."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping

from moesim.cli.options import ListFormat, say


def show_list(lines: Mapping[str, str], output: ListFormat) -> None:
    """Print names with one line each, as aligned text or as a JSON list of name and description."""
    if output is ListFormat.json:
        say(json.dumps([{"name": name, "description": line} for name, line in lines.items()], indent=2))
        return
    width = max(map(len, lines), default=0)
    for name, line in lines.items():
        say(f"{name:<{width}}  {textwrap.shorten(line, 98 - width, placeholder=' ...')}")
