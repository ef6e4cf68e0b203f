"""Owns what ``moesim size`` says: text, Markdown, JSON, CSV. Pure: a sizing in, a string out."""

from __future__ import annotations

import math
from typing import Any

from moesim.prices import OLD_DAYS, PriceLine
from moesim.report import loss_of_quality
from moesim.sizing import Fix, Growth, Load, Option, Sizing
from moesim.sizing.run import CHUNK, Verdict
from moesim.text_table import columns, markdown_table, percent, to_csv, to_json, wrap
from moesim.units import show
from moesim.whatif.uncertainty import INTERVAL

Table = tuple[str, list[str], list[list[str]]]
LIMITS = (
    "Users decode in lockstep and a prompt's first token is that of a prompt alone: arrivals and queues are left to moesim serve-sim. An interval holds "
    "what the machine's figures leave open, not what the model of it leaves out."
)


def sizing_json(sizing: Sizing) -> str:
    """Return the sizing as JSON, the stable contract of ``size -o json``; its keys are in docs/deciding.md."""
    return to_json(as_dict(sizing))


def sizing_csv(sizing: Sizing) -> str:
    """Return the sizing as flat rows of metric, value, unit."""
    return to_csv(as_dict(sizing))


def sizing_text(sizing: Sizing) -> str:
    """Return the answer on a screen or two."""
    lines = [*wrap(headline(sizing)), *wrap(needs_text(sizing)), *(line for text in words(sizing) for line in wrap(text))]
    if sizing.best is not None and sizing.best.growth is not None:
        lines += [*wrap("Those two loads again:"), *_growth_commands(sizing.best.growth)]
    for title, head, rows in _tables(sizing):
        lines += ["", *wrap(title), *columns([head, *rows], _right(head), "  ")]
    return "\n".join([*lines, "", *wrap(_how(sizing), most=8), *wrap(LIMITS, most=6), "commands and price lines: -o md"]) + "\n"


def sizing_markdown(sizing: Sizing) -> str:
    """Return one page from need to recommendation, with the price lines and the command behind each figure."""
    lines = [f"# {headline(sizing)}", "", sizing.needs.description, "", needs_text(sizing), ""]
    lines += [line for text in words(sizing) for line in (text, "")]
    for title, head, rows in _tables(sizing):
        lines += [f"## {title}", "", *markdown_table(head, rows), ""]
    for option in (*sizing.ranked, *sizing.above):
        lines += [f"## {option.machine}", "", *_details(sizing, option), ""]
    if not (sizing.ranked or sizing.above) and sizing.misses:
        lines += [f"## {sizing.misses[0].option.machine}, the nearest miss", "", *_details(sizing, sizing.misses[0].option), ""]
    lines += ["## How this was found", "", _how(sizing), "", LIMITS]
    return "\n".join(lines) + "\n"


def headline(sizing: Sizing) -> str:
    """Return the recommendation in one line."""
    name, best = sizing.needs.name, sizing.best
    if best is None:
        near = f"; nearest is {sizing.misses[0].option.machine}" if sizing.misses else ""
        return f"{name}: no machine that was looked at meets the needs{near}"
    buy = "nothing to buy" if not best.lines else f"{_money(sizing, best.cost)}"
    if sizing.ranked:
        return f"{name}: {best.machine}, {buy}, {_got(best.worst)}"
    return f"{name}: nothing within the budget meets the needs; the cheapest that does is {best.machine}, {buy}, {_got(best.worst)}"


def needs_text(sizing: Sizing) -> str:
    """Say the needs in one sentence."""
    n = sizing.needs
    if n.batch is not None:
        ask = f"{n.batch.requests:,} requests of {n.batch.prompt_tokens:,} + {n.batch.output_tokens:,} tokens within {n.batch.within / 3600:g} h"
    else:
        assert n.level is not None
        first = f", the first token within {show(n.level.ttft, 's')} of a prompt of {n.prompt_tokens:,}" if n.level.ttft else ""
        ask = f"{n.users} user{'s' if n.users > 1 else ''} at {n.level.decode_tok_s:g} tok/s each with {n.context_tokens:,} tokens of context{first}"
    money = f"; at most {n.budget.amount:,.0f} {n.budget.currency}" if n.budget else ""
    own = f"; owned: {n.owned}" if n.owned else ""
    most = n.quality.max_loss_percent
    loss = "" if most is None else f", all that is known to lose at most {most:g} % of quality"
    return f"Needs: {', '.join(n.models)}; {ask}; experts in {', '.join(sizing.formats)}{loss}{money}{own}."


def words(sizing: Sizing) -> list[str]:
    """Say what follows for the reader, a sentence each."""
    best, out = sizing.best, []
    if best is not None:
        v = best.worst
        low, high = best.intervals[best.verdicts.index(v)]
        out.append(
            f"With {v.experts} experts and {v.switches} it decodes {v.speed:.3g} tok/s a user ({percent(INTERVAL, 0)} interval {low:.3g} to {high:.3g}), "
            f"limited by the {v.lane}."
        )
        out.append(f"Quality of {v.model} in {v.experts}: {loss_of_quality(v.quality)}.")
        if sizing.needs.batch is not None:
            out.append(
                f"In the time it could do {v.reached:.3g} times as many requests; more than that, or longer documents, and it fails on speed."
            )
        if best.growth is not None:
            out.append(f"As load grows: {growth_text(best.growth)}.")
    old = [line for line in best.lines if line.outdated(sizing.today)] if best else []
    if old:
        names = ", ".join(f"{line.what} ({line.price.date})" for line in old if line.price)
        out.append(
            f"Outdated prices, older than {OLD_DAYS} days on {sizing.today}: {names}. Correct them in a file for --prices before you buy."
        )
    return out


def growth_text(growth: Growth) -> str:
    """Say what fails first as load grows."""
    parts = []
    for load, what in ((growth.users, "users"), (growth.context, "context")):
        held = f"still works, {load.speed:.3g} tok/s each" if not load.why else f"is too much ({load.why})"
        parts.append(f"{load.times} x the {what} {held}")
    return f"{'; '.join(parts)}; switches as they are, what fits where decided anew"


def _growth_commands(growth: Growth) -> list[str]:
    return [growth.users.command, growth.context.command]


def _tables(sizing: Sizing) -> list[Table]:
    out: list[Table] = []
    head = ["machine", "price", "tok/s", "interval", "TTFT", "left", "watts", "experts, switches"]
    if sizing.needs.batch:
        head.insert(3, "requests/h")
    for title, options in (
        ("meet the needs, the cheapest first; each is faster than all cheaper ones", sizing.ranked),
        ("meet the needs above the budget", sizing.above),
    ):
        if options:
            out.append((title, head, [_row(sizing, o, i) for o in options for i in range(len(o.verdicts))]))
    if sizing.misses:
        rows = [
            [m.option.machine, _money(sizing, m.option.cost), _short(sizing, m.option.worst), _cure(sizing, m.fix)] for m in sizing.misses
        ]
        out.append(("miss the needs, the nearest first", ["machine", "price", "what it lacks", "cheapest single cure"], rows))
    if sizing.values and sizing.base is not None:
        rows = [[f.step.label, _money(sizing, f.cost), *_gain(sizing.base, f), _got(f.option.worst)] for f in sizing.values]
        out.append(
            (
                f"what upgrades of {sizing.base.machine} are worth, all with {sizing.formats[-1]} experts",
                ["upgrade", "price", "gain", "per 1,000", "then"],
                rows,
            )
        )
    return out


def _right(head: list[str]) -> range:
    return range(1, 2) if "what it lacks" in head else range(1, len(head) - 1)


def _row(sizing: Sizing, option: Option, i: int) -> list[str]:
    v, (low, high) = option.verdicts[i], option.intervals[i]
    left = ", ".join(f"{tier} {show(size, 'bytes')}" for tier, size in v.left_bytes.items())
    model = f" ({v.model})" if len(option.verdicts) > 1 else ""
    row = [option.machine + model, _money(sizing, option.cost), f"{v.speed:.3g}", f"{low:.3g} to {high:.3g}", show(v.ttft_s, "s"), left]
    row += ["-" if v.watts is None else f"{v.watts:.0f}", f"{v.experts}, {v.switches}" + (f", {v.users} at a time" if v.users > 1 else "")]
    if sizing.needs.batch:
        row.insert(3, f"{v.requests_per_h:,.0f}")
    return row


def _money(sizing: Sizing, amount: float | None) -> str:
    return "no price" if amount is None else f"{amount:,.0f} {sizing.table.currency}"


def _got(v: Verdict) -> str:
    if v.problem:
        return v.problem
    return f"{v.requests_per_h:,.0f} requests/h" if math.isfinite(v.requests_per_h) else f"{v.speed:.3g} tok/s"


def _short(sizing: Sizing, v: Verdict) -> str:
    """By how much a verdict misses."""
    n = sizing.needs
    if v.problem:
        return v.problem
    if n.batch is not None:
        return f"{v.requests_per_h:,.0f} of {n.batch.requests / n.batch.within * 3600:,.0f} requests/h"
    assert n.level is not None
    out = [f"{v.speed:.3g} of {n.level.decode_tok_s:g} tok/s"] if v.speed < n.level.decode_tok_s else []
    if n.level.ttft and v.ttft_s > n.level.ttft:
        out.append(f"first token after {show(v.ttft_s, 's')} of {show(n.level.ttft, 's')}")
    return ", ".join(out) or "nothing"


def _cure(sizing: Sizing, fix: Fix | None) -> str:
    return (
        "none in one step of those judged"
        if fix is None
        else f"{fix.step.label}: {_money(sizing, fix.cost)}, then {_got(fix.option.worst)}"
    )


def _gain(base: Option, fix: Fix) -> list[str]:
    """What an upgrade adds to the speed of a user, and per thousand of money."""
    before, after = base.worst, fix.option.worst
    batch = math.isfinite(after.requests_per_h)
    old, new = (before.requests_per_h, after.requests_per_h) if batch else (before.speed, after.speed)
    old = 0.0 if math.isnan(old) else old
    if math.isnan(new):
        return ["does not fit", "-"]
    gain, unit = new - old, "requests/h" if batch else "tok/s"
    if abs(gain) <= 1e-3 * new:
        return ["0", "-"]
    return [f"{_signed(gain)} {unit}", _signed(1000 * gain / fix.cost) if fix.cost else "-"]


def _signed(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.3g}"


def _details(sizing: Sizing, option: Option) -> list[str]:
    lines = [f"- {_line(sizing, line)}" for line in option.lines] or ["- nothing to buy: all of it is owned"]
    if option.growth is not None:
        lines += [f"- as load grows: {growth_text(option.growth)}", "", "```bash", *_growth_commands(option.growth), "```"]
    for v in option.verdicts:
        if v.settings:
            quality = f" Quality: {loss_of_quality(v.quality)}." if v.quality else ""
            lines += [
                "",
                f"{v.model}: {_got(v)}, largest context that fits beside these experts {v.most_context:,} tokens.{quality} {_traced(sizing, v)}",
                "",
            ]
            lines += ["```bash", v.command(), v.command("ttft"), v.command("interval"), "```"]
    return lines


def _traced(sizing: Sizing, v: Verdict) -> str:
    """Say how the figures follow from the three commands."""
    chunks = v.prompt / min(CHUNK, v.prompt)
    batch = sizing.needs.batch
    per_h = f"; requests/h are 3600 / (TTFT + {batch.output_tokens} / ({v.users} x tok/s))" if batch else ""
    return (
        "The first command gives tok/s, what is left, and watts (under energy); the second the TTFT "
        f"of one chunk, times {chunks:.4g} for the whole prompt; the third the interval{per_h}."
    )


def _line(sizing: Sizing, line: PriceLine) -> str:
    many = f"{line.count:g} x " if line.count != 1 else ""
    if line.price is None:
        return f"{many}{line.what}: no price known"
    old = f"; OUTDATED: {line.age_days(sizing.today):,} days old" if line.outdated(sizing.today) else ""
    return f"{many}{line.what}: {_money(sizing, line.amount)} ({line.price.date}, {line.price.basis}: {line.price.source}{old})"


def _how(sizing: Sizing) -> str:
    counts = ", ".join(f"{n} {what}" for what, n in sizing.counts.items())
    return f"Looked at: {sizing.rule}. {counts}. Prices are in {sizing.table.currency}, of parts that are not owned."


def as_dict(sizing: Sizing) -> dict[str, Any]:
    """Return a sizing as plain data."""
    return {
        "needs": sizing.needs.model_dump(mode="json"), "formats": list(sizing.formats), "today": str(sizing.today), "currency": sizing.table.currency,
        "recommended": sizing.best.machine if sizing.best else None, "within_budget": bool(sizing.ranked),
        "ranked": [_option(sizing, o) for o in sizing.ranked], "above_budget": [_option(sizing, o) for o in sizing.above],
        "misses": [{**_option(sizing, m.option), "short": _short(sizing, m.option.worst), "cheapest_fix": m.fix and _fix(sizing, m.fix)} for m in sizing.misses],
        "upgrades_of": sizing.base.machine if sizing.base else None, "upgrades": [_fix(sizing, f) for f in sizing.values],
        "counts": sizing.counts, "rule": sizing.rule, "limits": LIMITS,
    }  # fmt: skip


def _fix(sizing: Sizing, fix: Fix) -> dict[str, Any]:
    return {"upgrade": fix.step.label, "price": fix.cost, **_option(sizing, fix.option)}


def _option(sizing: Sizing, o: Option) -> dict[str, Any]:
    return {
        "machine": o.machine, "owned": o.owned, "cost": o.cost, "reached": o.reached,
        "price_lines": [
            {"what": x.what, "count": x.count, "amount": x.amount, "date": x.price and x.price.date, "basis": x.price and x.price.basis,
             "source": x.price and x.price.source, "age_days": x.age_days(sizing.today), "outdated": x.outdated(sizing.today)}
            for x in o.lines
        ],
        "verdicts": [
            {"model": v.model, "experts": v.experts, "switches": v.switches, "batch": v.users, "decode_tok_s": v.speed, "ttft_s": v.ttft_s,
             "requests_per_h": v.requests_per_h, "reached": v.reached, "left_bytes": v.left_bytes, "max_context_tokens": v.most_context, "watts": v.watts, "quality": v.quality or None,
             "lane": v.lane, "lanes": v.lanes, "problem": v.problem, "interval_tok_s": list(o.intervals[i]) if o.intervals else None,
             "command": v.command() if v.settings else None, "ttft_command": v.command("ttft") if v.settings else None,
             "interval_command": v.command("interval") if v.settings else None}
            for i, v in enumerate(o.verdicts)
        ],
        "growth": None if o.growth is None else {**_load("users", o.growth.users), **_load("context", o.growth.context),
                                                 "placement": "switches as they are, what fits where decided anew"},
    }  # fmt: skip


def _load(what: str, load: Load) -> dict[str, Any]:
    """A larger load; ``times`` is null where it still meets the needs at the most that was tried."""
    return {
        f"{what}_times": load.times if load.why else None, f"{what}_why": load.why, f"{what}_tried_times": load.times,
        f"{what}_decode_tok_s": load.speed, f"{what}_command": load.command,
    }  # fmt: skip
