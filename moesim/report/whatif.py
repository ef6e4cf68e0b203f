"""Owns what ``moesim whatif`` says: text, Markdown, JSON, CSV. Pure: an answer in, a string out."""

from __future__ import annotations

import math

from moesim.text_table import columns, markdown_table, number, percent, to_csv, to_json, wrap
from moesim.units import show
from moesim.whatif import Ceiling, WhatIf
from moesim.whatif.curves import Curve
from moesim.whatif.figures import RANGES
from moesim.whatif.uncertainty import INTERVAL, SAME
from moesim.whatif.upgrades import Outcome

TOP = 10
UNIT = "tok/s"
_GROUPS = {"buy": "to buy", "switch": "to switch", "bound": "out of reach, shows what is left"}
Table = tuple[str, list[str], list[list[str]]]


def whatif_json(answer: WhatIf) -> str:
    """Return the answer as JSON, the stable contract of ``whatif -o json``."""
    return to_json(answer.as_dict())


def whatif_csv(answer: WhatIf) -> str:
    """Return the answer as flat rows of metric, value, unit."""
    return to_csv(answer.as_dict())


def whatif_text(answer: WhatIf) -> str:
    """Return the answer on a screen or two."""
    lines = [*wrap(headline(answer)), *(line for text in _words(answer) for line in wrap(text))]
    for title, head, rows in _tables(answer, TOP):
        lines += ["", *wrap(title), *columns([head, *rows], range(1, 3 if head[0] == "change" else 4), "  ")]
    return "\n".join([*lines, "", *(line for text in _notes(answer) for line in wrap(text))]) + "\n"


def whatif_markdown(answer: WhatIf) -> str:
    """Return the answer as Markdown, every figure and every command in it."""
    lines = [f"# {headline(answer)}", ""]
    lines += [line for text in _words(answer) for line in (text, "")]
    for title, head, rows in _tables(answer, 10**6):
        lines += [f"## {title}", "", *markdown_table(head, rows), ""]
    commands = [f"- {c['name']}: `{c['command']}`" for c in answer.as_dict()["changes"] if c["command"]]
    lines += ["## Commands", "", *commands, "", *_notes(answer)]
    return "\n".join(lines) + "\n"


def headline(answer: WhatIf) -> str:
    """Return the speed and its interval in one line."""
    what = f"{answer.result.case.model.name} on {answer.result.case.hardware.name}"
    if not math.isfinite(answer.speed):
        return f"{what}: does not fit; the changes below show what would make it run"
    kind = "" if answer.metric == "decode_tok_s" else " of prefill"
    spread = answer.interval
    between = f", {percent(INTERVAL, 0)} interval {spread.low:.3g} to {spread.high:.3g}" if spread else ""
    return f"{what}: {number(answer.speed, 'tokens/s')}{kind}{between}"


def _words(answer: WhatIf) -> list[str]:
    if answer.found is None:
        return []
    out = [f"{answer.found.finding} {answer.found.advice}"]
    first = next((c for c in answer.ceilings if c.lane == answer.found.lane), None)
    if first is not None:
        out.append(
            f"With the {first.lane} infinitely fast, and all else as it is, the run would reach {ceiling_text(first)}."
            if math.isfinite(first.speed)
            else f"The {first.lane} alone limits the run: nothing else that is modelled would, were it infinitely fast."
        )
    if answer.interval and answer.interval.shares:
        name, share = max(answer.interval.shares.items(), key=lambda item: item[1])
        knob = next(e.knob for e in answer.effects if e.knob.name == name)
        if math.isfinite(share):
            out.append(f"Measure {name} first: it is {knob.basis}, and {percent(share, 0)} of the variance comes from its range.")
    return out


def ceiling_text(ceiling: Ceiling) -> str:
    """Return a ceiling in words."""
    return number(ceiling.speed, UNIT) if math.isfinite(ceiling.speed) else "beyond what else is modelled"


def _tables(answer: WhatIf, most: int) -> list[Table]:
    out: list[Table] = []
    moving = [e for e in answer.effects if not abs(e.elasticity) <= SAME or e.swing > SAME * answer.speed]
    if moving:
        shares = answer.interval.shares if answer.interval else {}
        rows = [
            [
                e.knob.name,
                "-" if math.isnan(e.elasticity) else f"{e.elasticity:+.3f}",
                f"{e.at_low:.3g} to {e.at_high:.3g}",
                percent(shares.get(e.knob.name), 0) if e.knob.name in shares else "-",
                f"{size(e.knob.value, e.knob.unit)} {e.knob.basis}, {e.knob.low - 1:+.0%} to {e.knob.high - 1:+.0%}".replace("%", " %"),
            ]
            for e in moving[:most]
        ]
        title = f"what the speed depends on: {len(moving)} of {len(answer.effects)} figures move it"
        out.append((title, ["figure", "elasticity", f"{UNIT} over its range", "variance", "value, basis, range"], rows))
    if answer.ceilings:
        rows = [[c.lane, percent(c.share), ceiling_text(c)] for c in answer.ceilings]
        out.append(("if one lane were infinitely fast", ["lane", "of the critical path", "ceiling"], rows))
    for group, title in _GROUPS.items():
        mine = [o for o in answer.outcomes if o.change.group == group]
        if mine:
            head = ["change", UNIT, "gain", ""]
            out.append((f"{title}; each a whole simulation, {number(answer.speed, UNIT)} before", head, [_row(answer, o) for o in mine]))
    out += [(_curve_title(c), ["value", UNIT, "lane"], _curve_rows(c)) for c in answer.curves]
    return out


def _row(answer: WhatIf, outcome: Outcome) -> list[str]:
    gain = answer.gain(outcome)
    if not math.isfinite(outcome.speed):
        return [outcome.change.name, "-", "-", outcome.problem]
    return [outcome.change.name, f"{outcome.speed:.3g}", f"{gain:+.3g}" if abs(gain) > SAME * outcome.speed else "0", outcome.change.remark]


def _curve_title(c: Curve) -> str:
    knees = "; ".join(f"knee at {size(k.value, c.unit)}: {k.why}" for k in c.knees) or "no knee"
    now = "" if c.now is None else f", now {size(c.now, c.unit)}"
    return f"speed over {c.path}{now}: {knees}"


def _curve_rows(c: Curve) -> list[list[str]]:
    return [[size(p.value, c.unit), "-" if math.isnan(p.speed) else f"{p.speed:.3g}", p.lane or "cannot be"] for p in c.points]


def size(value: float, unit: str) -> str:
    """Print a value of a knob, or of a path that takes whole numbers."""
    if not unit:
        return f"{value:.0f}"
    return show(value, unit) if unit in ("bytes", "bytes_per_s", "flops_per_s", "s") else f"{value:.3g}"


def _notes(answer: WhatIf) -> list[str]:
    notes = []
    if answer.interval:
        ranges = ", ".join(f"{basis} {width:.0%}".replace("%", " %") for basis, width in RANGES.items())
        notes.append(
            f"interval: {answer.interval.draws} draws, every figure uniform in its range and independent; where a profile states no low and high, "
            f"plus or minus by basis: {ranges}. It holds what the figures leave open, not what the model of the machine leaves out."
        )
    notes.append("commands for every change: -o md or -o json")
    return notes
