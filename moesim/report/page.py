"""Owns the page of ``moesim report``: verdict, memory, timeline, latency, what-if, assumptions, provenance; HTML or Markdown.

Pure: entries in, a string out.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib.figure import Figure

from moesim import bottleneck, plots
from moesim.config import command
from moesim.errors import InputError
from moesim.report import context, facts, headline, lanes_svg, moved_rows, path_rows
from moesim.report.page_blocks import Block, write_html, write_markdown
from moesim.report.whatif import ceiling_text, size
from moesim.simulate import Result
from moesim.text_table import number, percent
from moesim.units import show
from moesim.whatif import WhatIf
from moesim.whatif.figures import Knob, knobs

TOP_FIGURES = 8  # of the elasticities
Data = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One run of a page.

    Parameters
    ----------
    name : str
        What it was asked for by.
    data : mapping
        In the shape of ``Result.as_dict``.
    result : Result, optional
        With its tasks; without it (a result read from a file) the page has no pictures and no what-if.
    answer : WhatIf, optional
    command : str
        What makes the result again; empty where that is not known.
    """

    name: str
    data: Data
    result: Result | None = None
    answer: WhatIf | None = None
    command: str = ""


def page(entries: Sequence[Entry]) -> list[Block]:
    """Return the page of one run, or of several side by side and then one by one.

    Raises
    ------
    InputError
        If there is no entry.
    """
    if not entries:
        raise InputError("report", expected="a scenario or a result", got="none")
    labels = labelled(entries)
    if len(entries) == 1:
        return [Block("title", headline(entries[0].data)), *_run(entries[0], labels[0])]
    out = [Block("title", f"{len(entries)} runs compared"), Block("strong", best(entries, labels)), *comparison(entries, labels)]
    for entry, label in zip(entries, labels, strict=True):
        out += [Block("section", label), Block("strong", headline(entry.data)), *_run(entry, label)]
    return out


def labelled(entries: Sequence[Entry]) -> list[str]:
    """Return the names of entries, numbered where two are equal."""
    names = [entry.name for entry in entries]
    return [f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def best(entries: Sequence[Entry], labels: Sequence[str]) -> str:
    """Say which run is the fastest, and by how much."""
    speeds = {
        label: rate for label, entry in zip(labels, entries, strict=True) if (rate := _speed(entry.data)) and entry.data["oom"] is None
    }
    if not speeds:
        return "None of them decodes to the end."
    ranked = sorted(speeds, key=lambda label: -speeds[label])
    text = f"{ranked[0]} is the fastest: {number(speeds[ranked[0]], 'tokens/s')}"
    if len(ranked) > 1:
        text += f", {speeds[ranked[0]] / speeds[ranked[1]]:.3g} times {ranked[1]}"
    missing = [label for label, entry in zip(labels, entries, strict=True) if entry.data["oom"] is not None]
    return f"{text}. " + (f"Out of memory: {', '.join(missing)}." if missing else "All fit.")


def _speed(data: Data) -> float | None:
    return data["metrics"]["decode_tok_s"] if data["metrics"] else None


def limiting(data: Data) -> str:
    """Name the lane with the largest share of the critical path."""
    shares = bottleneck.lane_shares(data["critical_path"] or [])
    lane = next(iter(shares), None)
    return "-" if lane is None else f"{lane}, {percent(shares[lane], 0)} of the critical path"


def _of(found: Any, *keys: str) -> float | None:
    """A figure by its keys; None where one of them leads to nothing."""
    for key in keys:
        found = None if found is None else found[key]
    return found  # type: ignore[no-any-return]


_COMPARED: tuple[tuple[str, Callable[[Data], str]], ...] = (
    ("fits", lambda d: "yes" if d["oom"] is None else f"no: {d['oom']['tier']}"),
    ("decode", lambda d: number(_of(d["metrics"], "decode_tok_s"), "tok/s")),
    ("prefill", lambda d: number(_of(d["metrics"], "prefill_tok_s"), "tok/s")),
    ("first token", lambda d: number(_of(d["metrics"], "ttft_ms", "mean"), "ms")),
    ("time between tokens, median", lambda d: number(_of(d["metrics"], "itl_ms", "median"), "ms")),
    ("time between tokens, p99", lambda d: number(_of(d["metrics"], "itl_ms", "p99"), "ms")),
    ("waits for loads, a token", lambda d: number(_of(d["metrics"], "io_wait_ms_per_token"), "ms")),
    ("experts hit", lambda d: percent(_of(d["metrics"], "expert_hit_rate"))),
    ("limited by", limiting),
    ("model", lambda d: d["provenance"]["model"]),
    ("machine", lambda d: d["provenance"]["hardware"]),
    ("trace", lambda d: d["provenance"]["trace"]),
)


def glance(entry: Entry, label: str) -> list[Block]:
    """Return what one look at a run needs, without pictures that take long to draw: what limits it, memory, lanes, where the time goes, what if.

    Parameters
    ----------
    entry : Entry
        One with its result.
    label : str
        What the lanes are of, for readers that do not see them.
    """
    out = [Block("strong", _finding(entry))] if entry.data["metrics"] is not None else []
    out += _memory(entry.data)
    if entry.result is not None and entry.data["metrics"] is not None:
        out += [Block("markup", "<h3>Lanes over time</h3>" + lanes_svg.lanes_html(entry.result, label)), *_time(entry.data)]
    return out


def comparison(entries: Sequence[Entry], labels: Sequence[str]) -> Iterator[Block]:
    """Yield the table of what several runs reach, and their speeds as bars."""
    rows = [[name, *(cell(entry.data) for entry in entries)] for name, cell in _COMPARED]
    tiers = list(dict.fromkeys(tier for entry in entries for tier in entry.data["memory"]))
    for tier in tiers:
        rows.append([f"{tier}: planned of usable", *(_planned(entry.data["memory"].get(tier)) for entry in entries)])
    yield Block("table", head=("", *labels), rows=rows)
    most = max((_speed(entry.data) or 0.0 for entry in entries), default=0.0)
    if most > 0:
        bars = "".join(
            f'<p class="speed"><span>{escape(label)}</span><i style="width:{60 * (_speed(entry.data) or 0.0) / most:.2f}%"></i>'
            f" {number(_speed(entry.data), 'tok/s')}</p>"
            for label, entry in zip(labels, entries, strict=True)
        )
        yield Block("markup", f'<div class="speeds" role="img" aria-label="decode speed of each run">{bars}</div>')


def _planned(tier: Data | None) -> str:
    return (
        "-"
        if tier is None
        else f"{show(tier['planned_bytes'], 'bytes')} of {show(tier['capacity_bytes'] - tier['reserved_bytes'], 'bytes')}"
    )


def _run(entry: Entry, label: str) -> Iterator[Block]:
    data, result = entry.data, entry.result
    yield Block("markup", _tiles(data))
    if data["metrics"] is not None:
        yield Block("text", _finding(entry))
    yield from _memory(data)
    if result is not None:
        text = context(result)
        yield Block("text", f"{text[0].upper()}{text[1:]}.")
    if data["metrics"] is not None:
        yield Block("heading", "Speed and latency")
        yield Block("table", head=("", ""), rows=facts(data))
        if result is not None:
            yield from _pictures(result, label)
        yield from _time(data)
    if entry.answer is not None:
        yield from whatif_blocks(entry.answer)
    yield from _basis(entry)
    yield from _provenance(entry)


def _time(data: Data) -> Iterator[Block]:
    yield Block("heading", "What the time goes to")
    yield Block("table", head=("lane and kind", "of the critical path", "by sharing channels"), rows=path_rows(data))
    if data["transfers"]:
        head = ("moved through", "all", "demanded", "prefetched, used", "prefetched, wasted", "busy")
        yield Block("table", head=head, rows=moved_rows(data))


def _tiles(data: Data) -> str:
    """The answers in large letters."""
    fits = ("fits", "yes" if data["oom"] is None else "no")
    pairs = [fits, ("decode", number(_speed(data), "tok/s")), ("first token", number(_of(data["metrics"], "ttft_ms", "mean"), "ms"))]
    pairs.append(("limited by", limiting(data).split(",")[0]))
    return '<div class="tiles">' + "".join(f"<p>{escape(name)}<b>{escape(text)}</b></p>" for name, text in pairs) + "</div>"


def _finding(entry: Entry) -> str:
    if entry.result is not None:
        found = bottleneck.find(entry.result, entry.data)
        return f"{found.finding} {found.advice}" if found is not None else ""
    wait = number(entry.data["metrics"]["io_wait_ms_per_token"], "ms")
    return f"What limits the run: {limiting(entry.data)}; compute waits {wait} per token for loads."


def _memory(data: Data) -> Iterator[Block]:
    yield Block("heading", "Memory")
    for name, tier in data["memory"].items():
        usable = tier["capacity_bytes"] - tier["reserved_bytes"]
        left = tier["left_bytes"]
        verdict = f"{show(left, 'bytes')} left" if left >= 0 else f"{show(-left, 'bytes')} too many"
        peak = "" if tier["peak_bytes"] is None else f", peak {show(tier['peak_bytes'], 'bytes')}"
        yield Block(
            "text", f"**{name}**: {show(tier['planned_bytes'], 'bytes')} planned of {show(usable, 'bytes')} usable{peak}; {verdict}."
        )
        lines = [line for line in tier["lines"] if line["bytes"] > 0]
        looks = plots.line_colours({line["name"]: line["bytes"] for line in lines})
        yield Block("markup", _bar(name, tier, lines, looks))
        rows = [[line["name"], show(line["bytes"], "bytes"), line["basis"]] for line in lines]
        if tier["reserved_bytes"]:
            rows.append(["kept by the system", show(tier["reserved_bytes"], "bytes"), ""])
        if rows:
            yield Block("table", head=("line", "planned", "basis"), rows=rows, keys=[f"m{looks[line['name']]}" for line in lines])


def _bar(name: str, tier: Data, lines: Sequence[Data], looks: Mapping[str, int]) -> str:
    """A tier as a bar: the ledger's lines, what is left, what the system keeps, and the limit."""
    usable = max(tier["capacity_bytes"] - tier["reserved_bytes"], 0)
    whole = max(tier["capacity_bytes"], sum(line["bytes"] for line in lines), 1)
    parts = "".join(
        f'<i class="m{looks[line["name"]]}" style="width:{100 * line["bytes"] / whole:.3f}%" title="{escape(line["name"])}, {show(line["bytes"], "bytes")}">'
        f"{escape(line['name']) if line['bytes'] > 0.12 * whole else ''}</i>"
        for line in lines
    )
    limit = f'<u style="left:{100 * min(usable / whole, 1):.3f}%"></u>'
    kept = (
        f'<s style="left:{100 * usable / whole:.3f}%;width:{100 * tier["reserved_bytes"] / whole:.3f}%"></s>'
        if tier["reserved_bytes"]
        else ""
    )
    label = f"{name}: {_planned(tier)} usable"
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{kept}{parts}{limit}</div>'


def _pictures(result: Result, label: str) -> Iterator[Block]:
    yield Block("markup", _drawn("time between tokens, and what it went to", result, plots.token_latency))
    yield Block("markup", "<h3>Lanes over time</h3>" + lanes_svg.lanes_html(result, label))
    for i, tier in enumerate(result.memory.tiers):
        if result.meter is not None and result.meter.peak_bytes[i]:
            yield Block("markup", _drawn(f"{tier} over time", result, lambda r, ax, tier=tier: plots.memory_watermark(r, tier, ax)))


def _drawn(title: str, result: Result, draw: Callable[..., Any]) -> str:
    figure, out = Figure(figsize=(9.0, 3.1), dpi=110, layout="constrained"), io.BytesIO()
    try:
        draw(result, figure.subplots())
    except InputError:
        return ""  # a run of one token has no time between tokens
    figure.savefig(out, format="png")
    png = base64.b64encode(out.getvalue()).decode("ascii")
    return f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{png}"></figure>'


def whatif_blocks(answer: WhatIf) -> Iterator[Block]:
    """Yield the tables of a what-if: ceilings, figures, changes."""
    data = answer.as_dict()
    if answer.ceilings or data["changes"]:
        yield Block("heading", "What if")
    between = data["interval"]
    if between is not None:
        yield Block(
            "text",
            f"{percent(between['level'], 0)} interval of the speed: {between['low_tok_s']:.3g} to {between['high_tok_s']:.3g} tok/s, "
            "from what the figures leave open.",
        )
    if answer.ceilings:
        rows = [[f"{c.lane} infinitely fast", ceiling_text(c)] for c in answer.ceilings]
        yield Block("table", head=("one lane without limit", "ceiling"), rows=rows)
    moving = [e for e in answer.effects if e.swing > 0][:TOP_FIGURES]
    if moving:
        rows = [[e.knob.name, f"{e.at_low:.3g} to {e.at_high:.3g}", _range(e.knob)] for e in moving]
        yield Block("table", head=("figure", "tok/s over its range", "range"), rows=rows)
    if data["changes"]:
        rows = [
            [c["name"], number(c["speed_tok_s"], "tok/s"), f"{c['gain_tok_s']:+.3g} tok/s", c["remark"]]
            if c["speed_tok_s"] == c["speed_tok_s"]
            else [c["name"], "-", "-", c["problem"]]
            for c in data["changes"]
        ]
        yield Block("table", head=("change", "speed", "gain", ""), rows=rows)


def _range(knob: Knob) -> str:
    low, high = (round(100 * (factor - 1)) for factor in (knob.low, knob.high))
    return f"\u00b1{high} %" if low == -high else f"{low:+} to {high:+} %"


def _basis(entry: Entry) -> Iterator[Block]:
    every = entry.data["provenance"]["assumed"]
    yield Block("heading", "Assumptions")
    if entry.result is not None:
        known = [knob for knob in knobs(entry.result.case) if knob.basis != "measured"]
        known.sort(key=lambda knob: ("assumed", "reported", "spec").index(knob.basis))
        rows = [[k.name, size(k.value, k.unit), k.basis, _range(k)] for k in known]
        if rows:
            yield Block("text", "Figures of the machine that set what work costs or what fits, as they were used:")
            yield Block("table", head=("figure", "value", "basis", "range"), rows=rows)
    yield Block("list", rows=[[text] for text in every], folded=f"all {len(every)} assumed figures")


def _provenance(entry: Entry) -> Iterator[Block]:
    made = entry.data["provenance"]
    yield Block("heading", "Provenance")
    rows = [[key.replace("_", " "), str(made[key])] for key in made if not isinstance(made[key], (list, dict))]
    yield Block("table", head=("", ""), rows=rows)
    if made["adaptations"]:
        yield Block("list", rows=[[text] for text in made["adaptations"]], folded="how the trace was adapted")
    if entry.command:
        yield Block("text", "This gives the result again, byte for byte:")
        yield Block("code", entry.command)
    else:
        yield Block(
            "text", f"Read from {entry.name}. This gives the result again, where the scenario of that name is a bundled one or its file:"
        )
        yield Block("code", command(made["scenario"], made["set"]) + " -o json")


def page_markdown(entries: Sequence[Entry]) -> str:
    """Return the page as Markdown, without pictures."""
    return write_markdown(page(entries))


def page_html(entries: Sequence[Entry]) -> str:
    """Return the page as one self-contained HTML file."""
    return write_html(page(entries))
