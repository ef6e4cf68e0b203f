"""Owns the shape of printed answers: aligned columns, Markdown tables, wrapped sentences, flat CSV. It knows no metric."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

WIDTH = 100
UNITS = {
    "_bytes": "B",
    "bytes": "B",
    "_tok_s": "tok/s",
    "_ms": "ms",
    "_s": "s",
    "_ps": "ps",
    "_tokens": "tokens",
    "_ms_per_token": "ms/token",
    "joules": "J",
    "_j": "J",
    "joules_per_token": "J/token",
    "joules_per_request": "J/request",
    "_w": "W",
    "_hours": "h",
    "_percent": "%",
}


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = (), indent: str = "") -> list[str]:
    """Align rows of equal length; columns in ``right`` are set flush right."""
    flush = set(right)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    out = []
    for row in rows:
        cells = [text.rjust(w) if i in flush else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))]
        out.append((indent + "  ".join(cells)).rstrip())
    return out


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; all columns but the first are flush right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"]
    return [*lines, *("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows)]


def wrap(text: str, label: str = "", most: int = 4) -> list[str]:
    """Wrap a sentence after a label to the width of the screen; what passes ``most`` lines is cut, visibly."""
    glued = re.sub(r"(\d) (%|ms\b|[kMGT]?B\b)", "\\1\u00a0\\2", text)  # a number stays with its unit
    lines = textwrap.wrap(glued, WIDTH, initial_indent=label, subsequent_indent=" " * len(label), max_lines=most, placeholder=" ...")
    return [line.replace("\u00a0", " ") for line in lines] or [label.rstrip()]


def percent(share: float | None, digits: int = 1) -> str:
    """Print a share as a percentage, or a dash where there is none."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def number(value: float | None, unit: str) -> str:
    """Print a value to three digits with its unit, or a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def to_json(data: Any) -> str:
    """Return JSON with sorted keys and full floats, byte for byte the same for equal data; what is not finite becomes null."""
    return json.dumps(_finite(data), indent=2, sort_keys=True, allow_nan=False) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def to_csv(data: Any) -> str:
    """Return nested data as flat rows of metric, value and unit; names are dotted paths, units those that the names end in."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("metric", "value", "unit"))
    for path, value in _leaves(_finite(data), ()):
        writer.writerow(
            (".".join(path), "" if value is None else json.dumps(value) if isinstance(value, (bool, float)) else value, unit_of(path))
        )
    return out.getvalue()


def _leaves(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf with its path. An item of a list goes by its name, where it has one, else by its number."""
    if isinstance(data, dict):
        for key in sorted(data):
            yield from _leaves(data[key], (*path, key))
    elif isinstance(data, list):
        for i, item in enumerate(data):
            name = str(item.get("name", i)) if isinstance(item, dict) else str(i)
            yield from _leaves(item, (*path, name))
    else:
        yield path, data


def unit_of(path: Sequence[str]) -> str:
    """Return the unit that a part of a path states, the deepest first."""
    for part in reversed(path):
        found = [suffix for suffix in UNITS if part.endswith(suffix)]
        if found:
            return UNITS[max(found, key=len)]
    return ""
