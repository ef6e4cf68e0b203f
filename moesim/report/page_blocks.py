"""Owns the pieces of a page and how they are written: Markdown, or HTML in one file.

A page needs no network: styles, scripts and pictures are in it. All text is escaped; only ``markup`` is written as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from moesim import plots
from moesim.report import lanes_svg
from moesim.text_table import markdown_table

SHORT = 18  # letters of a figure with its unit


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a page. ``markup`` is HTML that Markdown leaves out; ``folded`` hides a list until it is asked for; ``keys`` are the
    colours that the rows of a table explain."""

    kind: Literal["title", "section", "heading", "strong", "text", "list", "table", "code", "markup"]
    text: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    folded: str = ""
    keys: Sequence[str] = ()


def write_markdown(blocks: Sequence[Block]) -> str:
    """Return a page as Markdown, without its markup."""
    lines: list[str] = []
    for block in blocks:
        lines += [*_markdown(block), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _markdown(block: Block) -> list[str]:
    match block.kind:
        case "markup":
            return []
        case "table":
            return markdown_table(block.head, [[plain(cell) for cell in row] for row in block.rows])
        case "list":
            return [f"{block.folded}:", "", *(f"- {plain(text)}" for (text,) in block.rows)]
        case "code":
            return ["```bash", block.text, "```"]
        case "strong":
            return [f"**{plain(block.text)}**"]
        case _:
            return [{"title": "# ", "section": "## ", "heading": "### ", "text": ""}[block.kind] + plain(block.text)]


def plain(text: str) -> str:
    """Return text that Markdown reads as text: no line breaks, no tags."""
    return " ".join(text.split()).replace("<", "&lt;")


def write_html(blocks: Sequence[Block]) -> str:
    """Return a page as one HTML file; its first block is the title."""
    body = "\n".join(filter(None, map(_html, blocks)))
    return (
        '<!doctype html>\n<html lang="en" class="no-script">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(blocks[0].text)}</title>\n<style>{_STYLE}{lanes_svg.STYLE}</style></head>\n<body>\n{lanes_svg.patterns()}\n"
        f"<main>{body}</main>\n<script>{lanes_svg.SCRIPT}</script>\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block.kind:
        case "markup":
            return block.text
        case "table":
            head = "".join(f"<th>{escape(text)}</th>" for text in block.head) if any(block.head) else ""
            keys = [f'<i class="key {key}"></i>' for key in block.keys] + [""] * (len(block.rows) - len(block.keys))
            rows = "".join(
                f"<tr><td>{key}{_breakable(first)}</td>" + "".join(map(_cell, rest)) + "</tr>"
                for key, (first, *rest) in zip(keys, block.rows, strict=True)
            )
            return f'<div class="table" tabindex="0"><table>{f"<tr>{head}</tr>" if head else ""}{rows}</table></div>'
        case "list":
            items = "".join(f"<li>{escape(text)}</li>" for (text,) in block.rows)
            return f"<details><summary>{escape(block.folded)}</summary><ul>{items}</ul></details>"
        case "code":
            return f"<pre><code>{escape(block.text)}</code></pre>"
        case "strong":
            return f'<p class="strong">{escape(block.text)}</p>'
        case "text":
            strong = re.sub(r"[*][*](.+?)[*][*]", r"<b>\1</b>", escape(block.text))
            return f"<p>{strong}</p>"
        case _:
            tag = {"title": "h1", "section": "h2", "heading": "h3"}[block.kind]
            return f"<{tag}>{escape(block.text)}</{tag}>"


def _cell(text: str) -> str:
    """A short cell stays on one line."""
    return f"<td{' class=short' if len(text) <= SHORT else ''}>{escape(text)}</td>"


def _breakable(text: str) -> str:
    """Escape text; a dotted name may break after its dots."""
    return escape(text).replace(".", ".<wbr>") if "." in text and " " not in text else escape(text)


_HATCHED = ("transparent", "45deg", "135deg", "90deg", "0deg", "60deg", "120deg", "30deg")


def _fills() -> str:
    """The colours of memory lines, told apart by hatch too."""
    light = {1, 2, 3, 5, 7}
    out = []
    for i, (colour, angle) in enumerate(zip(plots.LINE_COLOURS, _HATCHED, strict=True)):
        hatch = f"repeating-linear-gradient({angle},#ffffff55 0 1.5px,transparent 1.5px 6px)," if i else ""
        out.append(f".m{i}{{background:{hatch}{colour};color:{'#111' if i in light else '#fff'}}}".replace(",#", ",#"))
    return "".join(out)


_STYLE = """
*{box-sizing:border-box}body{font:16px/1.5 system-ui,sans-serif;margin:0;color:#1c1c1c;background:#fff}
main{max-width:62em;margin:1.5em auto 4em;padding:0 1em}h1{font-size:1.5em;line-height:1.25}h2{border-top:3px solid #16324f;padding-top:.5em;margin-top:2.2em}
h3{margin:1.6em 0 .4em}.strong{font-weight:600}.small{font-size:13px;color:#555}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5em,1fr));gap:.6em}.tiles p{margin:0;padding:.5em .8em;background:#eef2f6;font-size:13px}
.tiles b{display:block;font-size:1.7em;line-height:1.3}.table{overflow-x:auto;margin:.6em 0}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}td,th{padding:.2em .8em .2em 0;text-align:left;vertical-align:top;border-bottom:1px solid #ddd}
td.short{white-space:nowrap}pre{background:#f5f5f2;padding:.7em;overflow-x:auto;white-space:pre-wrap;overflow-wrap:anywhere;font-size:14px}li{font-size:14px;overflow-wrap:anywhere}
figure{margin:1em 0;overflow-x:auto}.key{display:inline-block;width:1em;height:1em;margin-right:.5em;vertical-align:-2px}img{max-width:100%;height:auto}summary{cursor:pointer}
.bar{position:relative;display:flex;height:38px;background:#f5f5f2;border:1px solid #888}
.bar i{font:12px/38px system-ui,sans-serif;overflow:hidden;white-space:nowrap;text-align:center;position:relative;border-right:1px solid #fff}
.bar u{position:absolute;top:-5px;bottom:-5px;border-left:3px solid #b00020}
.bar s{position:absolute;top:0;bottom:0;background:repeating-linear-gradient(45deg,#b0002066 0 2px,#f3d6da 2px 7px)}
.speed{margin:.3em 0;font-size:14px}.speed span{display:block}.speed i{display:inline-block;height:1em;background:#16324f;vertical-align:-2px}
.key,.bar,.bar i,.bar s,.tiles p,.speed i,.lanes svg{-webkit-print-color-adjust:exact;print-color-adjust:exact}
@media(max-width:600px){body{font-size:15px}h1{font-size:1.25em}.tiles b{font-size:1.35em}img{max-width:none;width:640px}table{font-size:13px}.bar i{font-size:10px}}
@media print{img{max-width:100%;width:auto}body{font-size:10.5pt}main{max-width:none;margin:0;padding:0}h2,h3{break-after:avoid}figure,.bar,.lanes,tr,.tiles{break-inside:avoid}.table{overflow:visible}}
""" + _fills()
