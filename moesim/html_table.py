"""Owns the short table that a result shows of itself in a notebook (``_repr_html_``). It knows no metric."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(title: str, rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Return a captioned table in HTML; the first cell of each row names it. Text is escaped, and nothing is fetched."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = [f"<tr><th>{escape(str(name))}</th>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>" for name, *cells in rows]
    caption = f'<caption style="text-align:left;font-weight:bold">{escape(title)}</caption>'
    return f"<table>{caption}{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{''.join(lines)}</tbody></table>"
