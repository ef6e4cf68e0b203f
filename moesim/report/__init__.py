"""Owns what ``moesim run`` says about a result: one screen of text, Markdown, CSV, JSON. Pure: a result in, a string out.

JSON and CSV hold nothing but the result, so equal inputs give equal bytes; how fast the simulator itself was appears in text only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moesim import bottleneck
from moesim.bottleneck import Bottleneck
from moesim.simulate import Result
from moesim.text_table import columns, markdown_table, number, percent, to_csv, to_json, wrap
from moesim.units import show

TOP = 5  # rows of the critical path
_BESIDE_THE_POINT = ("power", "engines", "pageable")  # figures that a usual run does not use
_CURVE = re.compile(r"\.curve\..*")
NO_LIMIT = 1 << 24  # ledger.largest searches no further


def run_json(result: Result) -> str:
    """Return the result as JSON, the stable contract of ``run -o json``."""
    return to_json(result.as_dict())


def run_csv(result: Result) -> str:
    """Return the result as flat rows of metric, value, unit."""
    data = result.as_dict()
    if data["critical_path"] is not None:
        data["critical_path"] = {
            f"{r['lane']} {r['kind']}": {"share": r["share"], "contention": r["contention"]} for r in data["critical_path"]
        }
    return to_csv(data)


def run_text(result: Result, wall_s: float | None = None) -> str:
    """Return the answer on one screen: at most 40 lines of 100 columns."""
    data = result.as_dict()
    lines = [*wrap(headline(data)), *wrap(_setting(result), most=2), ""]
    lines += columns([["memory", "planned", "peak", "left", "capacity", "reserved", ""], *memory_rows(data)], range(1, 6))
    lines += wrap(context(result), "  ", most=2)
    found = None
    if data["metrics"] is not None:
        found = bottleneck.find(result, data)
        lines += ["", *(line for label, text in facts(data) for line in wrap(text, f"{label:<12}", most=2))]
        if data["transfers"]:
            lines += [
                "",
                *columns([["moved", "all", "demanded", "prefetched, used", "prefetched, wasted", "busy"], *moved_rows(data)], range(1, 6)),
            ]
        lines += ["", *columns([["critical path", "share", "by sharing"], *path_rows(data)], (1, 2))]
    if found is not None:
        lines += ["", *wrap(f"{found.finding} {found.advice}", most=4)]
    lines += wrap(assumed(data, found), "assumed     ", most=2)
    notes = "; ".join(data["provenance"]["adaptations"]) or "used as recorded"
    lines += wrap(f"{data['provenance']['trace']}: {notes}", "trace       ", most=3)
    if wall_s is not None and data["metrics"] is not None:
        lines += wrap(speed(result, wall_s), "simulator   ")
    return "\n".join(lines) + "\n"


def run_markdown(result: Result) -> str:
    """Return the answer as Markdown: the tables of the text, with every row and every assumption."""
    data = result.as_dict()
    lines = [f"# {headline(data)}", "", _setting(result), "", "## Memory", ""]
    lines += markdown_table(["tier", "planned", "peak", "left", "capacity", "reserved", "verdict"], memory_rows(data))
    lines += ["", context(result)]
    if data["metrics"] is not None:
        found = bottleneck.find(result, data)
        lines += ["", "## Speed", "", *markdown_table(["", "value"], [list(pair) for pair in facts(data)])]
        if data["transfers"]:
            head = ["channel", "moved", "demanded", "prefetched, used", "prefetched, wasted", "busy"]
            lines += ["", "## Transfers", "", *markdown_table(head, [[row[0].strip(), *row[1:]] for row in moved_rows(data)])]
        rows = [[f"{r['lane']} {r['kind']}", percent(r["share"]), percent(r["contention"])] for r in data["critical_path"]]
        lines += ["", "## Critical path", "", *markdown_table(["lane and kind", "share", "by sharing channels"], rows)]
        if found is not None:
            lines += ["", f"{found.finding} {found.advice}"]
    made = data["provenance"]
    lines += ["", "## Provenance", ""]
    lines += [f"- {key.replace('_', ' ')}: {made[key]}" for key in made if not isinstance(made[key], list)]
    lines += [f"- adaptation: {text}" for text in made["adaptations"]] + [f"- assumed: {text}" for text in made["assumed"]]
    return "\n".join(lines) + "\n"


def headline(data: Mapping[str, Any]) -> str:
    """Return the verdict of ``Result.as_dict()`` in one line."""
    what = f"{data['provenance']['model']} on {data['provenance']['hardware']}"
    oom = data["oom"]
    if oom is not None:
        when = "before the first step" if oom["step"] < 0 else f"at step {oom['step']}"
        over, usable = show(oom["needed_bytes"] - oom["usable_bytes"], "bytes"), show(oom["usable_bytes"], "bytes")
        return f"{what}: does not fit. Out of memory in {oom['tier']} {when}: {oom['asked_by']} needs {over} more than the {usable} usable"
    found = data["metrics"]
    rate = found["decode_tok_s"]
    if rate is None:
        first = f"prefill {number(found['prefill_tok_s'], 'tokens/s')}"
    else:
        first = f"{number(rate, 'tokens/s')}"
    ttft = f", first token after {show(found['ttft_ms']['mean'] * 1e-3, 's')}" if found["ttft_ms"] else ""
    return f"{what}: fits, {first}{ttft}"


def context(result: Result) -> str:
    """Return the largest context that fits, and what was planned for."""
    layout = result.case.layout
    return context_text(layout.max_context_tokens, layout.context_tokens, layout.kv_allowance_tokens)


def context_text(most: int, planned: int, allowance: int | None) -> str:
    """Say in words what ``Layout.max_context_tokens`` and ``kv_allowance_tokens`` are."""
    if most < 0:
        text = "no context fits: the rest is too large already"
    elif most >= NO_LIMIT:
        text = f"the context does not limit this plan (planned: {planned:,} tokens)"
    else:
        text = f"largest context that fits: {most:,} tokens (planned: {planned:,})"
    return text if allowance is None else f"{text}; the stated KV allowance lasts for {allowance:,} tokens"


def speed(result: Result, wall_s: float) -> str:
    """Return how fast the simulator itself was."""
    tokens = int(result.meter.steps[:, 5].sum()) if result.meter is not None else 0
    if wall_s <= 0 or not tokens:
        return f"ran {wall_s:.2f} s"
    return f"{tokens:,} tokens ({result.n_tasks:,} tasks) simulated in {wall_s:.2f} s: {tokens / wall_s:,.0f} tokens/s"


def assumed(data: Mapping[str, Any], found: Bottleneck | None) -> str:
    """Count the assumed figures and name those that bear on what limits the run."""
    every = data["provenance"]["assumed"]
    if not every:
        return "nothing: every figure is a spec, reported or measured"
    lanes = list(bottleneck.lane_shares(data["critical_path"] or []))[:2]
    if found is None:
        lanes = []
    near = [f"hardware: {part}.{lane}." for lane in lanes for part in ("storage", "links", "devices")]
    chosen = [name for start in near for name in every if name.startswith(start) and not any(word in name for word in _BESIDE_THE_POINT)]
    short = list(dict.fromkeys(_CURVE.sub(".curve", name.removeprefix("hardware: ")) for name in chosen))
    text = f"{len(every)} figures are not measured"
    return f"{text}, among them {', '.join(short[:3])} (all: -o json)" if short else f"{text} (all: -o json)"


def _setting(result: Result) -> str:
    scenario, work = result.case.scenario, result.case.scenario.workload
    tokens = f"{work.prompt_tokens:,} prompt + {work.output_tokens:,} output tokens"
    batch = f" x {work.batch}" if work.batch > 1 else ""
    return f"scenario {scenario.name}: {tokens}{batch}, seed {scenario.seed}, engine {result.case.engine}"


def memory_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Tier, planned, peak, left, capacity, reserved, verdict."""
    rows = []
    for tier, it in data["memory"].items():
        peak = "-" if it["peak_bytes"] is None else show(it["peak_bytes"], "bytes")
        fits = "fits" if it["left_bytes"] >= 0 else f"does not fit: {show(-it['left_bytes'], 'bytes')} too many"
        if data["oom"] is not None and data["oom"]["tier"] == tier:
            fits = "out of memory"
        sizes = [show(it[key], "bytes") for key in ("left_bytes", "capacity_bytes", "reserved_bytes")]
        rows.append([f"  {tier}", show(it["planned_bytes"], "bytes"), peak, *sizes, fits])
    return rows


def facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and text of each line about speed."""
    found = data["metrics"]
    speeds = [f"{name} {number(found[key], 'tok/s')}" for name, key in _SPEEDS if found[key] is not None]
    times = []
    if found["ttft_ms"]:
        times.append(f"TTFT {number(found['ttft_ms']['mean'], 'ms')}")
    if found["tpot_ms"]:
        times.append(f"TPOT mean {number(found['tpot_ms']['mean'], 'ms')}")
    if found["itl_ms"]:
        itl = found["itl_ms"]
        times.append(f"ITL median {number(itl['median'], 'ms')}, p95 {number(itl['p95'], 'ms')}, p99 {number(itl['p99'], 'ms')}")
    out = [("speed", ", ".join(speeds) or "-"), ("latency", ", ".join(times) or "-")]
    counts = found["accesses"]
    total = sum(counts.values())
    if total:
        split = {name: percent(counts[name] / total) for name in counts}
        parts = f"cache {split['cache']}, prefetch {split['prefetch']}, late prefetch {split['late']}; miss {split['miss']}"
        dropped = f", {found['dropped_prefetches']:,} prefetches dropped" if found["dropped_prefetches"] else ""
        out.append(("experts", f"{percent(found['expert_hit_rate'])} hit: {parts} ({total:,} accesses{dropped})"))
    wait = f"compute waits {number(found['io_wait_ms_per_token'], 'ms')} per token for loads"
    covered = found["overlap_coverage"]
    out.append(("overlap", (f"{percent(covered)} of loading is covered by compute; " if covered is not None else "") + wait))
    if data.get("energy"):
        out.append(("energy", energy(data["energy"])))
    out.append(("quality", loss_of_quality(data["quality"])))
    out.append(("lanes busy", ", ".join(f"{lane} {percent(it['utilisation'], 0)}" for lane, it in data["lanes"].items())))
    return out


def loss_of_quality(found: Mapping[str, Any]) -> str:
    """Return what is known of a plan's quality in one line."""
    if found["basis"] == "reference":
        return "nothing is lost: no matrix has fewer than 16 bits"
    if found["basis"] == "unknown":
        return "unknown for this model and precision; moesim quality measures it"
    between = f" ({found['low_percent']:.2f} to {found['high_percent']:.2f})" if found["low_percent"] is not None else ""
    return f"loses {found['loss_percent']:.2f} %{between}, {found['basis']}: {found['benchmark']}"


def energy(found: Mapping[str, Any]) -> str:
    """Return joules, watts and battery life in one line, or why they are not known."""
    if found["reason"] is not None:
        return f"not known: {found['reason']}"
    parts = [f"{number(found['joules_per_token'], 'J')} per token"] if found["joules_per_token"] is not None else []
    parts.append(f"{number(found['average_w'], 'W')}, at most {number(found['peak_w'], 'W')}")
    if found["battery_hours"] is not None:
        parts.append(f"a full battery lasts {number(found['battery_hours'], 'h')}")
    return f"{', '.join(parts)} ({'devices only, ' if found['devices_only'] else ''}{found['basis']})"


_SPEEDS = (("decode", "decode_tok_s"), ("prefill", "prefill_tok_s"), ("output throughput", "output_throughput_tok_s"))


def moved_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Channel, bytes in all, demanded, prefetched and used, prefetched in vain, busy."""
    keys = ("bytes", "demand_bytes", "prefetch_useful_bytes", "prefetch_wasted_bytes")
    return [[f"  {name}", *(show(it[key], "bytes") for key in keys), show(it["busy_s"], "s")] for name, it in data["transfers"].items()]


def path_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Lane and kind, share, part of it by sharing channels; the largest ones, then the rest in one row."""
    rows = data["critical_path"]
    out = [[f"  {row['lane']} {row['kind']}", percent(row["share"]), percent(row["contention"])] for row in rows[:TOP]]
    rest = rows[TOP:]
    if rest:
        sums = [percent(sum(row[key] for row in rest)) for key in ("share", "contention")]
        out.append([f"  {len(rest)} others", *sums])
    return out
