"""Owns what ``moesim quality`` says: the table of plans, the reports beside it, the verdicts; as text, Markdown, JSON and CSV.

Pure: the plain data of ``quality/answer.py`` (or of a search) in, a string out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesim.text_table import columns, markdown_table, percent, to_csv, to_json, wrap
from moesim.units import show

Data = Mapping[str, Any]


def as_json(data: Data) -> str:
    """Return the answer as JSON."""
    return to_json(data)


def as_csv(data: Data) -> str:
    """Return the answer as flat rows of metric, value and unit."""
    return to_csv(data)


def text(data: Data) -> str:
    """Return the answer as aligned text."""
    lines = [*wrap(headline(data)), ""]
    for title, head, rows in sections(data):
        lines += [title, *columns([head, *rows], range(1, len(head)), "  "), ""]
    for claim in data.get("claims", []):
        lines += wrap(f"{claim['statement']}: {claim['verdict']}. {claim['evidence']}.", f"{claim['name']}  ", most=6)
    return "\n".join(lines).rstrip() + "\n"


def markdown(data: Data) -> str:
    """Return the answer as Markdown tables."""
    lines = [headline(data)]
    for title, head, rows in sections(data):
        lines += ["", f"### {title}", "", *markdown_table(head, rows)]
    if data.get("claims"):
        lines += ["", "### Verdicts", "", "| claim | statement | verdict | figures |", "|---|---|---|---|"]
        lines += [f"| {c['name']} | {c['statement']} | {c['verdict']} | {c['evidence']} |" for c in data["claims"]]
    return "\n".join(lines) + "\n"


def headline(data: Data) -> str:
    """Say what was measured on what."""
    made = data["provenance"]
    held, cal, choose = made["held_out"], made["calibration"], made["choosing"]
    return (
        f"{made['model']}: {made['unit']} on {held['documents']} held-out documents ({held['tokens']:,} tokens) in windows of {made['window_tokens']}; "
        f"95 % intervals over documents. Calibrated on {cal['documents']} other documents ({cal['tokens']:,} tokens), chosen by {choose['documents']} "
        f"more ({choose['tokens']:,})."
    )


def sections(data: Data) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, head and rows of each table."""
    found = [_plans(data), _domains(data), _positions(data), _routing(data)]
    if any(plan["real"] for plan in data["plans"]):
        found.append(_real(data))
    if data.get("sensitivity"):
        found.append(_units(data["sensitivity"]))
    if data.get("dequantisation"):
        found.append(_dequant(data["dequantisation"]))
    return found


def interval(it: Mapping[str, float], digits: int = 2) -> str:
    """Print a figure with its interval."""
    return f"{it['value']:.{digits}f} ({it['low']:.{digits}f} to {it['high']:.{digits}f})"


def _plans(data: Data) -> tuple[str, list[str], list[list[str]]]:
    head = ["plan", "bytes", "bits a weight", data["provenance"]["unit"], "loss, %", "next token", "same experts"]
    rows = [
        [p["name"], f"{p['stored_bytes']:,}", f"{p['bits_per_weight']:.2f}", interval(p["bits"], 3), interval(p["loss_percent"]),
         percent(p["accuracy"], 2), percent(p["router_agreement"])]
        for p in data["plans"]
    ]  # fmt: skip
    ref = data["reference"]
    return "Plans", head, [[ref["name"], "-", "-", interval(ref["bits"], 3), "-", percent(ref["accuracy"], 2), "-"], *rows]


def _domains(data: Data) -> tuple[str, list[str], list[list[str]]]:
    names = list(data["reference"]["bits_by_domain"])
    rows = [[p["name"], *(f"{p['bits_by_domain'][n]:.3f}" for n in names)] for p in [data["reference"], *data["plans"]]]
    return f"By domain, {data['provenance']['unit']}", ["plan", *names], rows


def _positions(data: Data) -> tuple[str, list[str], list[list[str]]]:
    ends = data["position"]["ends"]
    head = ["plan", *(f"to {end}" for end in ends)]
    rows = [[name, *(f"{x:.3f}" for x in row)] for name, row in data["position"]["bits_per_token"].items()]
    return "By position in the window, bits per token", head, rows


def _routing(data: Data) -> tuple[str, list[str], list[list[str]]]:
    shares = list(data["reference"]["hit_rates"])
    rows = [[data["reference"]["name"], *(percent(data["reference"]["hit_rates"][s]) for s in shares), *("-" for _ in shares)]]
    rows += [
        [p["name"], *(percent(p["hit_rates"][s]) for s in shares), *(f"{100 * p['hit_rate_moves'][s]:+.2f}" for s in shares)]
        for p in data["plans"]
    ]
    head = ["plan", *(f"LRU of {s}" for s in shares), *(f"moves, {s}" for s in shares)]
    return "Hit rates with the routing of the quantised model, and how many points they move", head, rows


def _real(data: Data) -> tuple[str, list[str], list[list[str]]]:
    head = ["plan", "stored bytes", "ledger bytes", "real engine, nats", "reference, nats", "relative", "tokens"]
    rows = [
        [p["name"], f"{p['stored_bytes']:,}", f"{p['ledger_bytes']:,}", f"{r['real_loss']:.4f}", f"{r['reference_loss']:.4f}", f"{r['relative']:.1e}", str(r["tokens"])]
        for p in data["plans"] if (r := p["real"])
    ]  # fmt: skip
    return "The same bytes in the real engine", head, rows


def _units(units: Data) -> tuple[str, list[str], list[list[str]]]:
    rows = [[u["unit"].replace("_", " "), interval(u["restored"], 1), interval(u["degraded"])] for u in units["units"]]
    title = f"Sensitivity under {units['plan']} (loss {interval(units['loss_percent'])} % on choosing text)"
    return title, ["unit", "restored alone: loss gone, %", "degraded alone: loss, %"], rows


def _dequant(measured: Sequence[Data]) -> tuple[str, list[str], list[list[str]]]:
    plain = measured[0]
    rows = []
    for it in measured:
        saved, more = plain["bytes"] - it["bytes"], it["time_s"] - plain["time_s"]
        worth = "-" if it is plain else "always" if more <= 0 else f"below {show(saved / more, 'bytes_per_s')}"
        rows.append([it["format"], f"{it['bytes']:,}", f"{1e6 * it['time_s']:,.0f}", it["how"], worth])
    return "One token times one matrix of 1024 x 1024 on this machine", ["format", "bytes", "CPU time, us", "how", "pays on a link"], rows


# ---- searches


def search_text(data: Data) -> str:
    """Return a search's answer as text; the plan itself last, as YAML."""
    lines = [*wrap(data["summary"], most=6), "", *columns([_SEARCH_HEAD, *_search_rows(data)], range(1, len(_SEARCH_HEAD)), "  "), ""]
    for claim in data["claims"]:
        lines += wrap(f"{claim['statement']}: {claim['verdict']}. {claim['evidence']}.", f"{claim['name']}  ", most=6)
    return "\n".join([*lines, "", data["yaml"].rstrip()]) + "\n"


def search_markdown(data: Data) -> str:
    """Return a search's answer as Markdown."""
    lines = [data["summary"], "", *markdown_table(_SEARCH_HEAD, _search_rows(data)), ""]
    lines += [f"- {c['name']}, {c['statement']}: **{c['verdict']}**. {c['evidence']}." for c in data["claims"]]
    return "\n".join([*lines, "", "```yaml", data["yaml"].rstrip(), "```"]) + "\n"


_SEARCH_HEAD = ["order", "bytes", "loss on held-out text, %", "more than the search, points", "loss on choosing text, %"]


def _search_rows(data: Data) -> list[list[str]]:
    return [
        [it["name"], f"{it['stored_bytes']:,}", interval(it["loss_percent"]), interval(it["more"]) if it["more"] else "-", f"{it['choosing_percent']:.2f}"]
        for it in data["plans"]
    ]  # fmt: skip
