"""Owns what ``moesim validate`` says: text for a terminal, JSON, a page with every figure as Markdown or HTML. Pure: data in, a string out.

All cases are shown, the worst first, with what made them so by kind of task.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moesim.text_table import columns, markdown_table, number, percent, to_json, wrap
from moesim.units import show
from moesim.validate.verdict import case_limit, overlap_off, within

Data = Mapping[str, Any]
TOP_KINDS = 3  # of a case's kinds of task that are named


def validate_json(data: Data) -> str:
    """Return the whole validation as JSON: ``scenarios``, ``oom``, ``summary``, ``provenance``."""
    return to_json(data)


def signed(share: float | None) -> str:
    """Print a relative error with its sign."""
    return "-" if share is None else f"{100 * share:+.1f} %"


def worst_first(data: Data) -> list[Data]:
    """Return the cases: those that failed, then by the absolute error of the mean latency."""
    return sorted(data["scenarios"], key=lambda row: (not row["failed"], -abs(row["latency_ms"]["error"]) if not row["failed"] else 0.0))


def verdict(data: Data) -> str:
    """Return the outcome in one sentence."""
    summary = data["summary"]
    if not summary["met"]:
        unmet = [name for name, it in summary["criteria"].items() if it["met"] is False]
        return f"outside tolerance: {', '.join(unmet)}"
    return "within tolerance"


def validate_text(data: Data) -> str:
    """Return the answer for a terminal: verdict, criteria, every case."""
    made, summary = data["provenance"], data["summary"]
    head = f"{made['suite']}: {summary['cases']} cases, {verdict(data)}"
    lines = [*wrap(head), *wrap(setting(data)), ""]
    lines += columns([["asked for", "found", "limit", ""], *criteria_rows(data)], (1, 2))
    lines += wrap(spread(data))
    lines += ["", *columns([CASE_HEAD, *(case_row(row) for row in worst_first(data))], range(1, len(CASE_HEAD) - 1))]
    for row in worst_first(data):
        if row["failed"] or row["differences"] or not within(row):
            lines += wrap(why(row), f"{row['name']}: ", most=4)
    if data["oom"]:
        lines += ["", *columns([row[:-1] for row in (OOM_HEAD, *oom_rows(data))], range(1, 4))]
        lines += [text for it in data["oom"] for text in wrap(it["message"], f"{it['dimension']}: ")]
    return "\n".join(lines) + "\n"


def setting(data: Data) -> str:
    """Return where, when and how it was measured."""
    made = data["provenance"]
    machine = made["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, {show(machine['memory_bytes'], 'bytes')}, {machine['system']}"
    versions = f"Python {machine['python']}, torch {machine['torch']}, moesim {made['version']}"
    runs = f"{made['repeats']} runs of each case after one that warmed up, in turn"
    return f"{made['date']}, {where}; {versions}; {runs}; profile {made['profile']}"


def spread(data: Data) -> str:
    """Say how far predictions were off on average, beside simpler models and the noise of the runs."""
    summary = data["summary"]
    others = ", ".join(f"{name} {percent(value)}" for name, value in summary["baselines"].items())
    return f"mean error {percent(summary['mean_error'])} (simpler models: {others or '-'}); runs of one case spread {percent(summary['mean_noise'])}"


CASE_HEAD = ["case", "predicted", "measured", "error", "noise", "p95", "rank", "overlap", "cost", ""]


def case_row(row: Data) -> list[str]:
    """One case in a line."""
    if row["failed"]:
        return [row["name"], *["-"] * (len(CASE_HEAD) - 2), "failed"]
    times, rank = row["latency_ms"], row["rank_correlation"]
    equal = row["hits_equal"] and row["bytes_equal"] and not row["differences"]
    return [
        row["name"], number(times["predicted"], "ms"), number(times["measured"], "ms"), signed(times["error"]), percent(times["noise"]),
        signed(row["p95_ms"]["error"]), "-" if rank is None else f"{rank:.2f}", _overlap(row), signed(row["errors"]["cost"]),
        "not as planned" if not equal else "" if within(row) else "off",
    ]  # fmt: skip


def _overlap(row: Data) -> str:
    """Overlap coverage, predicted for measured."""
    said, took = (row["overlap_coverage"][which] for which in ("predicted", "measured"))
    return "-" if said is None or took is None else f"{100 * said:.0f} for {100 * took:.0f} %"


def why(row: Data) -> str:
    """Say in words what makes a case's error."""
    if row["failed"]:
        return row["failed"] if isinstance(row["failed"], str) else "it failed"
    if row["differences"]:
        return "; ".join(row["differences"][:3])
    times = row["latency_ms"]
    off = times["predicted"] - times["measured"]
    kinds = [
        f"{it['lane']} {it['kind']} {signed(it['error'])} ({it['predicted_us']:.0f} for {it['measured_us']:.0f} us, {it['explains_ms']:+.2f} ms)"
        for it in row["kinds"][:TOP_KINDS]
    ]
    return f"{off:+.2f} ms a token, of which by kind of task: {', '.join(kinds)}"


def criteria_rows(data: Data) -> list[list[str]]:
    """What is asked for, what it came to, the limit, and whether it is met."""
    return [
        [it["text"], percent(it["value"]), percent(it["limit"]), {True: "met", False: "not met", None: "not judged"}[it["met"]]]
        for it in data["summary"]["criteria"].values()
    ]


OOM_HEAD = ["largest that fits", "predicted", "measured", "limit", "how it ended"]


def oom_rows(data: Data) -> list[list[str]]:
    """The out-of-memory points."""
    return [
        [it["dimension"], f"{it['predicted']:,}", f"{it['measured']:,}", show(it["limit_bytes"], "bytes"), it["message"]]
        for it in data["oom"]
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a page: a heading, a paragraph, a list, or a table (``head`` with rows of cells)."""

    kind: Literal["heading", "text", "list", "table"]
    text: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def page(data: Data) -> list[Block]:
    """Return the page of a validation: every figure of every case."""
    summary = data["summary"]
    rows = worst_first(data)
    ran = [row for row in rows if not row["failed"]]
    return [
        Block("text", f"{setting(data)}."),
        Block("text", f"**{data['provenance']['suite']}: {summary['cases']} cases, {verdict(data)}.**"),
        Block("table", head=("asked for", "found", "limit", "verdict"), rows=criteria_rows(data)),
        Block("text", _METHOD),
        Block("heading", "Cases, the worst first"),
        Block("table", head=CASE_HEAD, rows=[case_row(row) for row in rows]),
        Block("heading", "Why"),
        Block("list", rows=[[f"**{row['name']}**{_limit(row)}: {why(row)}."] for row in rows]),
        Block("heading", "Simpler models on the same costs and hits"),
        _table(ran, _BASELINES),
        Block("text", f"{spread(data)}."),
        Block("heading", "Tokens, waiting, lanes"),
        _table(ran, _TOKENS),
        Block("heading", "Errors apart"),
        _table(ran, _ERRORS),
        Block("heading", "Durations by kind of task"),
        Block("table", head=_KINDS, rows=[kind_row(row["name"], it) for row in ran for it in row["kinds"]]),
        *_oom(data),
    ]


def validate_markdown(data: Data) -> str:
    """Return the page as Markdown."""
    lines = ["# Validation", "", "Written by `moesim validate`: predicted against measured, every figure of the runs named here."]
    for block in page(data):
        lines.append("")
        if block.kind == "table":
            lines += markdown_table(block.head, block.rows)
        elif block.kind == "list":
            lines += [f"- {text}" for (text,) in block.rows]
        else:
            lines.append(f"## {block.text}" if block.kind == "heading" else block.text)
    return "\n".join(lines) + "\n"


def validate_html(data: Data, pictures: Mapping[str, bytes]) -> str:
    """Return the page as one self-contained HTML file, with PNG pictures by title."""
    out = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>moesim validation</title>",
        f"<style>{_STYLE}</style><h1>Validation</h1>",
    ]
    for block in page(data):
        if block.kind == "table":
            head = "".join(f"<th>{_inline(text)}" for text in block.head)
            rows = "".join("<tr>" + "".join(f"<td>{_inline(cell)}" for cell in row) for row in block.rows)
            out.append(f"<div><table><tr>{head}{rows}</table></div>")
        elif block.kind == "list":
            out.append("<ul>" + "".join(f"<li>{_inline(text)}" for (text,) in block.rows) + "</ul>")
        else:
            tag = "h2" if block.kind == "heading" else "p"
            out.append(f"<{tag}>{_inline(block.text)}</{tag}>")
    if pictures:
        out.append("<h2>Pictures</h2>")
    for title, png in pictures.items():
        source = base64.b64encode(png).decode("ascii")
        out.append(
            f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{source}"><figcaption>{_inline(title)}</figcaption></figure>'
        )
    return "\n".join(out) + "</html>\n"


def _inline(text: str) -> str:
    """Escape text; **bold** and `code` become elements."""
    found = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", found)


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em;color:#222}div{overflow-x:auto}"
    "table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}td,th{padding:2px 9px;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}figcaption{color:#555}"
)
_METHOD = (
    "Latency of a token is the time since the token before; the mean counts the first one from the start of the run. Measured figures are "
    "medians over the runs; noise is their relative standard deviation. Dispatch counts as part of a task on both sides. `cost` is the part "
    "of the error that goes when every task lasts as long as it did in the median run; `schedule` is what is left then (nothing, where the run "
    "kept to the order and dependencies of the schedule), `means` what is left when each lasts as long as its like did on average, `dispatch` "
    "the share of the latency that passed between a task's being allowed to start and its starting. A kind of task explains what the latency "
    "changes by when that kind alone lasts as long as predicted."
)


def _limit(row: Data) -> str:
    if row["failed"]:
        return ""
    return f" ({signed(row['latency_ms']['error'])}, limit {percent(case_limit(row['latency_ms']['noise']), 0)})"


_BASELINES: list[tuple[str, Callable[[Data], str]]] = [
    ("measured", lambda r: number(r["latency_ms"]["measured"], "ms")),
    ("moesim", lambda r: signed(r["latency_ms"]["error"])),
    ("active bytes", lambda r: signed(r["baselines"]["active bytes"])),
    ("sum", lambda r: signed(r["baselines"]["sum"])),
    ("overlap", lambda r: signed(r["baselines"]["overlap"])),
]
_TOKENS: list[tuple[str, Callable[[Data], str]]] = [
    ("tokens", lambda r: str(r["tokens"])),
    ("hits", lambda r: percent(r["hit_rate"])),
    ("median said", lambda r: number(r["median_ms"]["predicted"], "ms")),
    ("median", lambda r: number(r["median_ms"]["measured"], "ms")),
    ("p95 said", lambda r: number(r["p95_ms"]["predicted"], "ms")),
    ("p95", lambda r: number(r["p95_ms"]["measured"], "ms")),
    ("waiting said", lambda r: number(r["io_wait_ms_per_token"]["predicted"], "ms")),
    ("waiting", lambda r: number(r["io_wait_ms_per_token"]["measured"], "ms")),
    ("router agrees", lambda r: percent(r["router_agreement"])),
    ("loss", lambda r: "-" if r["loss"] is None else f"{r['loss']:.3f}"),
    ("lanes busy, said for measured", lambda r: _lanes(r)),
]
_ERRORS: list[tuple[str, Callable[[Data], str]]] = [
    ("error", lambda r: signed(r["latency_ms"]["error"])),
    ("cost", lambda r: signed(r["errors"]["cost"])),
    ("schedule", lambda r: signed(r["errors"]["schedule"])),
    ("means", lambda r: signed(r["errors"]["means"])),
    ("dispatch", lambda r: percent(r["errors"]["dispatch"])),
    ("overlap off by", lambda r: "-" if overlap_off(r) is None else f"{overlap_off(r):.3f}"),
    ("out of order", lambda r: str(sum(r["inversions"].values()))),
    ("violated", lambda r: str(r["violations"])),
]


def _table(rows: Sequence[Data], spec: Sequence[tuple[str, Callable[[Data], str]]]) -> Block:
    head = ("case", *(name for name, _ in spec))
    return Block("table", head=head, rows=[[row["name"], *(cell(row) for _, cell in spec)] for row in rows])


def _lanes(row: Data) -> str:
    used = {lane: it for lane, it in row["lanes"].items() if it["measured"]}
    return ", ".join(f"{lane} {percent(it['predicted'], 0)} for {percent(it['measured'], 0)}" for lane, it in used.items())


_KINDS = ("case", "kind", "tasks", "said", "measured", "error", "explains, a token")


def kind_row(name: str, it: Data) -> list[str]:
    """One kind of task of a case."""
    return [
        name, f"{it['lane']} {it['kind']}", f"{it['n']:,}", f"{it['predicted_us']:,.0f} us", f"{it['measured_us']:,.0f} us", signed(it["error"]),
        f"{it['explains_ms']:+.3f} ms",
    ]  # fmt: skip


def _oom(data: Data) -> list[Block]:
    if not data["oom"]:
        return []
    runtime = show(data["oom"][0]["runtime_bytes"], "bytes")
    left = "were left as they were" if all(it["untouched"] for it in data["oom"]) else "were NOT left as they were"
    text = (
        "Under a limit on the private writable memory (RLIMIT_DATA) of a child process, found by bisection; the runtime (interpreter, torch, "
        f"threads, compiled code, and a reserve until everything is loaded) holds {runtime} of it. Files and other processes {left}."
    )
    return [Block("heading", "Out of memory"), Block("text", text), Block("table", head=OOM_HEAD, rows=oom_rows(data))]
