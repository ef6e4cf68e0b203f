"""Owns what ``moesim sweep`` says about a sweep: text, Markdown, JSON, CSV. Pure: a sweep in, a string out."""

from __future__ import annotations

from collections import Counter
from typing import Any

from moesim.sweep import Sweep
from moesim.sweep.record import NAMES, value
from moesim.sweep.spec import label
from moesim.text_table import columns, markdown_table, number, percent, to_json, unit_of, wrap
from moesim.units import show

TOP = 8  # rows of a table on one screen
REASONS = 3  # kinds of failures that text shows
_SHORT = {key: name for name, key in NAMES.items()}


def sweep_json(sweep: Sweep) -> str:
    """Return the sweep as JSON, the stable contract of ``sweep -o json``."""
    return to_json(sweep.as_dict())


def sweep_csv(sweep: Sweep) -> str:
    """Return one row a point: its axes and every figure."""
    return str(sweep.frame().to_csv(index=False, lineterminator="\n"))


def sweep_text(sweep: Sweep) -> str:
    """Return the answer on one screen."""
    lines = [*wrap(_headline(sweep)), *wrap(_axes(sweep), most=2), ""]
    for title, head, rows in _tables(sweep, TOP):
        if title:
            lines += wrap(title)
        lines += [*columns([head, *rows], range(1, len(head)), "  "), ""]
    lines += [line for text in _notes(sweep) for line in ([text] if "\n" in text else wrap(text))]
    return "\n".join(lines) + "\n"


def sweep_markdown(sweep: Sweep) -> str:
    """Return the answer as Markdown, with the whole front."""
    lines = [f"# {_headline(sweep)}", "", _axes(sweep), ""]
    for title, head, rows in _tables(sweep, len(sweep.points)):
        lines += [f"## {title}", "", *markdown_table(head, rows), ""]
    lines += [f"```\n{text}\n```" if "\n" in text else text for text in _notes(sweep)]
    return "\n".join(lines).rstrip() + "\n"


def figure(key: str, size: float | None) -> str:
    """Print one figure of a record with its unit."""
    unit = unit_of(key.split("."))
    return show(size, "bytes") if size is not None and unit == "B" else number(size, unit).rstrip()


def name_of(key: str) -> str:
    """Return the short name of a key, where it has one."""
    return _SHORT.get(key, key)


def _headline(sweep: Sweep) -> str:
    counts = Counter(row.status for row in sweep.rows)
    parts = [f"{sweep.n_points:,} points", f"{len(sweep.feasible):,} meet the constraints"]
    parts += [f"{counts[status]:,} {text}" for status, text in (("oom", "out of memory"), ("failed", "failed")) if counts[status]]
    return f"{sweep.plan.spec.name} over {sweep.plan.spec.base}: {', '.join(parts)}"


def _axes(sweep: Sweep) -> str:
    axes = sweep.plan.space.axes
    return f"axes: {', '.join(f'{a.name} ({len(a.options)})' for a in axes)}; {sweep.searched}"


def _tables(sweep: Sweep, most: int) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (title, head, rows) of the best point, the front and the effects."""
    out: list[tuple[str, list[str], list[list[str]]]] = []
    key, sign = sweep.plan.objectives[0]
    if sweep.best is not None:
        sense = "highest" if sign > 0 else "lowest"
        best = figure(key, value(sweep.rows[sweep.best].record, key))
        out.append((f"best: {sense} {name_of(key)}, {best}", *_points(sweep, [sweep.best])))
        shown = sorted(sweep.pareto, key=lambda i: -sign * (value(sweep.rows[i].record, key) or 0.0))
        if len(sweep.goals) > 1:
            more = f"; {most} of {len(shown)} shown" if len(shown) > most else ""
            over = ", ".join(f"{name_of(k)} {'up' if s > 0 else 'down'}" for k, s in sweep.goals)
            out.append((f"front: nothing is better in all of {over}{more}", *_points(sweep, shown[:most])))
    for goal, s in sweep.plan.objectives:
        effects = sweep.effects(goal)
        rows = [[e["axis"], figure(goal, e["range"]), percent(e["share"]), _best_value(e, s)] for e in effects[:most]]
        if len(sweep.points) > 1:
            out.append((f"effect of each axis on {name_of(goal)}", ["axis", "range of means", "of variance", "best on average"], rows))
    return out


def _points(sweep: Sweep, numbers: list[int]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of points: what is wanted, then the axes; axes that all rows share stay with the first."""
    values = [sweep.plan.space.values(sweep.points[i]) for i in numbers]
    axes = [axis.name for axis in sweep.plan.space.axes if any(axis.name in v for v in values)]
    head = ["point", *(name_of(key) for key, _ in sweep.goals), *(axis.rpartition(".")[2] for axis in axes)]
    rows = []
    for i, chosen in zip(numbers, values, strict=True):
        figures = [figure(key, value(sweep.rows[i].record, key)) for key, _ in sweep.goals]
        rows.append([str(sweep.points[i].index), *figures, *(_cut(label(chosen[a])) if a in chosen else "-" for a in axes)])
    return head, rows


def _cut(text: str) -> str:
    return text if len(text) <= 24 else text[:21] + "..."


def _best_value(effect: dict[str, Any], sign: int) -> str:
    means = effect["means"]
    return _cut(max(means, key=lambda x: sign * means[x])) if means else "-"


def _notes(sweep: Sweep) -> list[str]:
    """Return what else there is to say: how to look closer, what failed and why, of what the prices are."""
    out = []
    if sweep.best is None:
        limits = sweep.plan.spec.constraints
        if limits.min or limits.max:
            out.append("no point meets the constraints: relax them, or name other values")
        elif limits.fits and any(row.status == "oom" for row in sweep.rows):
            out.append("no point fits into memory: name other values, or more memory")
    else:
        line = sweep.command(sweep.best).replace(" --set ", " \\\n  --set ")
        out.append(f"look closer:\n{line}")
    for key, n in sweep.unknown.items():
        out.append(f"{name_of(key)} is not known for {n:,} points: what is not known meets no limit and stands on no front")
    reasons = Counter(row.error for row in sweep.rows if row.status == "failed")
    for error, count in reasons.most_common(REASONS):
        out.append(f"failed ({count}): {error}")
    prices = sweep.as_dict()["provenance"]["prices"]
    if prices and any(key == NAMES["price"] for key, _ in sweep.goals):
        out.append(f"prices: {'; '.join(prices)}")
    return out
