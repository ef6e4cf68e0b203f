"""Owns what ``moesim serve-sim`` says: text, Markdown, JSON, CSV. Pure: a saturation curve in, a string out."""

from __future__ import annotations

import csv
import io
from typing import Any

from moesim.serving.curve import AS_STATED, RATE, USERS, Saturation
from moesim.text_table import columns, markdown_table, number, percent, to_json, wrap
from moesim.units import show

_OFFERED = {RATE: "requests/s", USERS: "users", AS_STATED: "offered"}
_WHAT = {RATE: "Offered rate", USERS: "Users in a closed loop", AS_STATED: "As the scenario states"}
_LATENCIES = "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "user_tok_s"
MOST_NOTES = 8


def serving_json(curve: Saturation) -> str:
    """Return the curve as JSON, the stable contract of ``serve-sim -o json``."""
    return to_json(curve.as_dict())


def serving_csv(curve: Saturation) -> str:
    """Return one row a point."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rows = [{"kind": kind, "offered": offered, **_flat(data)} for kind, offered, data in curve.points]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer.writerow(names)
    writer.writerows([["" if row.get(name) is None else row[name] for name in names] for row in rows])
    return out.getvalue()


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    """The figures of one point by dotted path."""
    found: dict[str, Any] = {}
    for part in ("requests", "metrics", "levels", "queue", "batch", "kv", "little", "lanes", "transfers"):
        _leaves(data[part], part, found)
    return found


def _leaves(data: Any, name: str, found: dict[str, Any]) -> None:
    if isinstance(data, dict):
        for key, value in data.items():
            _leaves(value, f"{name}.{key}", found)
    else:
        found[name] = data


def serving_text(curve: Saturation) -> str:
    """Return the answer on one screen."""
    lines = wrap(headline(curve))
    for kind in curve.kinds:
        for title, head, rows in _tables(curve, kind):
            lines += ["", title, *columns([head, *rows], range(1, len(head)), "  ")]
        lines += ["", *(line for text in _words(curve, kind) for line in wrap(text))]
    return "\n".join([*lines, "", *(line for text in _notes(curve) for line in wrap(text, most=3))]).rstrip() + "\n"


def serving_markdown(curve: Saturation) -> str:
    """Return the answer as Markdown."""
    lines = [f"# {headline(curve)}", ""]
    for kind in curve.kinds:
        for title, head, rows in _tables(curve, kind):
            lines += [f"## {title}", "", *markdown_table(head, rows), ""]
        lines += [*(f"{text}\n" for text in _words(curve, kind))]
    return "\n".join([*lines, *(f"- {text}" for text in _notes(curve))]).rstrip() + "\n"


def headline(curve: Saturation) -> str:
    """Say in one sentence what was served by what."""
    case = curve.case
    oom = curve.oom
    if oom is not None:
        need, has = show(oom["needed_bytes"], "bytes"), show(oom["usable_bytes"], "bytes")
        return f"{case.model.name} on {case.hardware.name}: does not fit, {oom['asked_by']} needs {need} of {has} in {oom['tier']}"
    best = max((data["metrics"]["output_throughput_tok_s"] for _, _, data in curve.points if data["metrics"]), default=None)
    requests = curve.points[0][2]["requests"]["offered"]
    return f"{case.model.name} on {case.hardware.name} serves {number(best, 'tokens/s')} at most, in {requests} requests a point"


def _tables(curve: Saturation, kind: str) -> list[tuple[str, list[str], list[list[str]]]]:
    ran = [(offered, data) for offered, data in curve.curve(kind) if data["metrics"] is not None]
    speed = ["output tok/s", "requests/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2EL p50", "tok/s/user"]
    state = ["queue p50", "batch", "KV mean", "peak", "gave way", "hits", "busiest lane"]
    rows, more = [], []
    for offered, data in ran:
        m = data["metrics"]
        tpot = m["tpot_ms"] or {}
        rows.append([
            f"{offered:g}", number(m["output_throughput_tok_s"], "").strip(), number(m["request_throughput_s"], "").strip(),
            _ms(m["ttft_ms"]["median"]), _ms(m["ttft_ms"]["p99"]), _ms(tpot.get("median")), _ms(tpot.get("p99")), _ms(m["e2el_ms"]["median"]),
            number((m["user_tok_s"] or {}).get("median"), "").strip(),
        ])  # fmt: skip
        lane, use = max(data["lanes"].items(), key=lambda item: (item[1]["utilisation"], item[0]))
        kv = data["kv"]
        more.append([
            f"{offered:g}", _ms(data["queue"]["delay_ms"]["median"]), f"{data['batch']['mean_sequences']:.1f}", percent(kv["mean_occupancy"], 0),
            percent(kv["peak_occupancy"], 0), str(kv["preemptions"]), percent(m["expert_hit_rate"]), f"{lane} {percent(use['utilisation'], 0)}",
        ])  # fmt: skip
    if not ran:
        return []
    names = list(ran[0][1]["levels"])
    goods = [[f"{offered:g}", *(_good(data["levels"][name]) for name in names)] for offered, data in ran]
    first = _OFFERED[kind]
    return [
        (_WHAT[kind], [first, *speed], rows),
        ("Queue, batch, memory", [first, *state], more),
        ("Goodput, requests/s (share)", [first, *names], goods),
    ]


def _good(level: dict[str, Any]) -> str:
    return f"{level['goodput_s']:.3g} ({percent(level['good_share'], 0)}){'' if level['holds'] else ' !'}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e3:,.3g} s" if value >= 1e4 else number(value, "ms")


def _words(curve: Saturation, kind: str) -> list[str]:
    """Knee and capacities in sentences."""
    knee, unit = curve.knee(kind), _OFFERED[kind]
    ran = [data["levels"] for _, data in curve.curve(kind) if data["levels"] is not None]
    out = []
    if not all(level["holds"] for levels in ran for level in levels.values()):
        out.append("! The level does not hold: the 99th percentile of TTFT or TPOT is above it.")
    if knee is not None:
        out.append(f"Knee at {knee:g} {unit}: of these points it has the most throughput / latency.")
    if len(ran) > 1:
        held = [f"{name} up to {most:g} {unit}" if most is not None else f"{name} nowhere" for name, most in curve.capacity(kind).items()]
        out.append("Levels hold: " + ", ".join(held) + ".")
    return out


def _notes(curve: Saturation) -> list[str]:
    made = curve.points[0][2]["provenance"]
    refused = sum(data["requests"]["refused"] for _, _, data in curve.points)
    out = [f"engine {made['engine']}, seed {made['seed']}; {len(made['assumed'])} figures are assumed, not measured (all: -o json)"]
    out += [f"{refused} requests were refused: longer than the KV cache holds"] if refused else []
    return [*out, *made["adaptations"]][:MOST_NOTES]
