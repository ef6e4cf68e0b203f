"""Owns what ``moesim budget --against`` says: the ledger beside a record, as text, Markdown, JSON, CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesim.memory_log import Compared
from moesim.text_table import columns, markdown_table, percent, to_csv, to_json
from moesim.units import show

_HEAD = ["recorded", "tier", "ledger", "planned", "seen", "planned is"]


def _rows(found: Sequence[Compared], indent: str) -> list[list[str]]:
    """A row for each recorded figure, and one for each line of the ledger that it covers, where there are several."""
    rows = []
    for item in found:
        off = "-" if item.error is None else f"{percent(abs(item.error))} {'more' if item.error >= 0 else 'less'}"
        name = item.lines[0][0] if len(item.lines) == 1 and not item.reserved_bytes else "sum" if item.lines else "-"
        planned = show(item.planned_bytes, "bytes") if item.lines else "-"
        rows.append(
            [
                item.recorded.name,
                item.recorded.tier,
                name,
                planned,
                show(item.recorded.bytes, "bytes"),
                off + (f"; {item.note}" if item.note else ""),
            ]
        )
        parts = [*item.lines, *([("reserved", item.reserved_bytes)] if item.reserved_bytes else [])]
        if len(parts) > 1:
            rows += [["", "", f"{indent}{line}", show(size, "bytes"), "", ""] for line, size in parts]
    return rows


def text(found: Sequence[Compared]) -> str:
    """Return aligned text."""
    return "\n".join(columns([_HEAD, *_rows(found, "  ")], (3, 4))) + "\n"


def markdown(found: Sequence[Compared]) -> str:
    """Return a Markdown table."""
    return "\n".join(markdown_table(_HEAD, _rows(found, ""))) + "\n"


def as_json(found: Sequence[Compared]) -> str:
    """Return JSON: a list ``compared``."""
    return to_json({"compared": [_plain(item) for item in found]})


def as_csv(found: Sequence[Compared]) -> str:
    """Return flat rows of metric, value and unit."""
    return to_csv({"compared": [_plain(item) for item in found]})


def _plain(item: Compared) -> dict[str, Any]:
    return {"name": item.recorded.name, "tier": item.recorded.tier, "recorded_bytes": item.recorded.bytes, "planned_bytes": item.planned_bytes,
            "reserved_bytes": item.reserved_bytes, "lines": [{"name": n, "bytes": b} for n, b in item.lines], "error": item.error,
            "note": item.note}  # fmt: skip
