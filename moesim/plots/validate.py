"""Owns the pictures of a validation: a suite's predictions against measurements, and for a case its tokens and both timelines.

Functions take ``ax=None`` and return Axes. Kinds of task are drawn as in ``plots.py``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moesim.plots import DPI, axes_of
from moesim.plots import STYLES as STYLES_OF_RUNS
from moesim.schedule import Kind
from moesim.timeline import Timeline
from moesim.validate.comparison import MS, Executed, column, tokens, with_dispatch
from moesim.validate.verdict import CASE_ERROR

SIZE_INCHES = (11.0, 7.2)
SAID, TOOK = "#16324f", "#c2410c"
STYLES = STYLES_OF_RUNS | {"early": replace(STYLES_OF_RUNS["used"], label="prefetch")}
_STYLE_OF = {
    Kind.ATTENTION: "attention", Kind.FFN: "ffn", Kind.ROUTER: "small", Kind.COMBINE: "small", Kind.HEAD: "head", Kind.LOAD: "demand",
    Kind.COPY: "copy", Kind.PUT: "copy", Kind.GET: "copy",
}  # fmt: skip


def suite_overview(rows: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Draw the predicted over the measured mean latency of every case that ran, with the simpler models in the background."""
    ax = axes_of(ax, 7, 6.5)
    ran = [row for row in rows if not row["failed"]]
    took = np.array([row["latency_ms"]["measured"] for row in ran])
    said = np.array([row["latency_ms"]["predicted"] for row in ran])
    spread = np.array([row["latency_ms"]["noise"] for row in ran]) * took
    for name, mark in (("sum", "^"), ("overlap", "v"), ("active bytes", "x")):
        ax.scatter(
            took, [row["baselines_ms"][name] for row in ran], marker=mark, s=22, color="#9fb3c8", label=f"baseline: {name}", zorder=1
        )
    ax.errorbar(took, said, xerr=spread, fmt="o", ms=5, color=SAID, label="moesim", zorder=3)
    if len(ran):
        edge = np.array([took.min() * 0.7, took.max() * 1.4])
        ax.plot(edge, edge, color="black", linewidth=0.8, zorder=2)
        ax.fill_between(
            edge, edge * (1 - CASE_ERROR), edge * (1 + CASE_ERROR), color="#8fd0c6", alpha=0.35, label=f"within {CASE_ERROR:.0%}", zorder=0
        )
        for row, x, y in zip(ran, took, said, strict=True):
            if abs(row["latency_ms"]["error"]) > CASE_ERROR:
                ax.annotate(row["name"], (x, y), fontsize=7, xytext=(4, -3), textcoords="offset points")
        error = float(np.median(np.abs(said / took - 1)))
        ax.set_title(f"{len(ran)} cases, median error of the mean latency {error:.1%}", fontsize=10.5, loc="left")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured mean latency of a token (ms)")
    ax.set_ylabel("predicted mean latency of a token (ms)")
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def token_latencies(it: Executed, ax: Axes | None = None) -> Axes:
    """Draw the time between tokens over the run: predicted, and measured as median and range of all runs."""
    ax = axes_of(ax, 11, 3.4)
    took = np.array([tokens(it.schedule, run.timeline).gaps_ms for run in it.runs])
    said = tokens(it.schedule, it.predicted).gaps_ms
    number = np.arange(1, len(said) + 1)
    ax.fill_between(number, took.min(axis=0), took.max(axis=0), color=TOOK, alpha=0.2, linewidth=0, label=f"range of {len(took)} runs")
    ax.plot(number, np.median(took, axis=0), color=TOOK, linewidth=1.2, label="measured")
    ax.plot(number, said, color=SAID, linewidth=1.2, linestyle=(0, (4, 1.5)), label="predicted")
    ours, theirs = float(np.median(said)), float(np.median(took))
    ax.set_title(
        f"a token takes {ours:.3g} ms in the median predicted, {theirs:.3g} ms measured ({ours / theirs - 1:+.1%})",
        fontsize=9.5,
        loc="left",
    )
    ax.set_xlim(1, max(len(said), 2))
    ax.set_ylim(0, 1.05 * max(float(np.percentile(took, 99)), float(said.max())))
    ax.set_xlabel("token")
    ax.set_ylabel("time since the token before (ms)")
    ax.legend(fontsize=8, frameon=False, ncols=3)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def both_timelines(it: Executed, step: int | None = None, ax: Axes | None = None) -> Axes:
    """Draw what each lane does in one step, predicted above and measured below; both begin with the step.

    Parameters
    ----------
    it : Executed
    step : int, optional
        Without it a step of typical length in the middle half of the run.
    ax : Axes, optional
    """
    ax = axes_of(ax, 11, 3.8)
    steps = np.concatenate([f.steps for f in it.schedule.fragments])
    lines = (it.predicted, with_dispatch(it.typical.timeline))
    ends = [np.concatenate([[0], line.end_ps[steps[:, 2]]]) for line in lines]
    chosen = _typical_step(ends[1]) if step is None else step
    kind, lane, early = (column(it.schedule, name) for name in ("kind", "lane", "prefetch"))
    styles = np.where(early, "early", np.array([_STYLE_OF[Kind(what)] for what in kind.tolist()]))
    used = [number for number in range(len(it.schedule.lanes)) if (lane == number).any()]
    drawn: set[str] = set()
    width = max(float(end[chosen + 1] - end[chosen]) for end in ends) * MS
    for row, number in enumerate(used):
        for half, (line, end) in enumerate(zip(lines, ends, strict=True)):
            drawn |= _bars(ax, row * 2.4 + half, line, (int(end[chosen]), int(end[chosen + 1])), lane == number, styles)
    for half, (end, colour) in enumerate(zip(ends, (SAID, TOOK), strict=True)):
        at = float(end[chosen + 1] - end[chosen]) * MS
        ax.axvline(at, color=colour, linewidth=1.2, linestyle=(0, (4, 2)) if half == 0 else "-")
    ours, theirs = (float(end[chosen + 1] - end[chosen]) * MS for end in ends)
    ax.set_title(
        f"step {chosen} takes {ours:.3g} ms predicted, {theirs:.3g} ms measured ({ours / theirs - 1:+.1%})", fontsize=9.5, loc="left"
    )
    places = [row * 2.4 + half for row in range(len(used)) for half in (0, 1)]
    ax.set_yticks(places, [f"{it.schedule.lanes[number].name} {what}" for number in used for what in ("predicted", "measured")], fontsize=8)
    ax.set_ylim(places[-1] + 0.7, -0.7)
    ax.set_xlim(0, width * 1.02)
    ax.set_xlabel(f"time since the start of step {chosen} (ms); dispatch is part of a task")
    handles = [
        Patch(facecolor=s.colour, hatch=s.hatch, edgecolor=s.edge, linewidth=0, label=s.label) for k, s in STYLES.items() if k in drawn
    ]
    ax.legend(handles=handles, fontsize=7.5, frameon=False, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.2))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _typical_step(ends: Any) -> int:
    """The step of the middle half whose length is nearest to the mean."""
    lengths = np.diff(ends)
    first, last = len(lengths) // 4, max(3 * len(lengths) // 4, len(lengths) // 4 + 1)
    return first + int(np.abs(lengths[first:last] - lengths.mean()).argmin())


def _bars(ax: Axes, y: float, line: Timeline, span: tuple[int, int], mine: Any, styles: Any) -> set[str]:
    """Draw one lane of one timeline within a span; return the styles used."""
    begin, end = span
    seen = mine & (line.start_ps < end) & (line.end_ps > begin)
    drawn = set(np.unique(styles[seen]).tolist())
    for name in drawn:
        style, rows = STYLES[name], seen & (styles == name)
        left = (np.maximum(line.start_ps[rows], begin) - begin) * MS
        right = (np.minimum(line.end_ps[rows], end) - begin) * MS
        bars = list(zip(left.tolist(), (right - left).tolist(), strict=True))
        ax.broken_barh(bars, (y - 0.4, 0.8), facecolor=style.colour, hatch=style.hatch, edgecolor=style.edge, linewidth=0)
    return drawn


def suite_picture(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the picture of a whole validation as PNG."""
    figure = Figure(figsize=(7.4, 6.8), dpi=DPI, layout="constrained")
    suite_overview(rows, figure.subplots())
    return _png(figure)


def case_picture(it: Executed, row: Mapping[str, Any]) -> bytes:
    """Return the picture of one case that ran as PNG: its tokens, and both timelines of a step."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.15))
    token_latencies(it, above)
    both_timelines(it, None, below)
    times = row["latency_ms"]
    text = f"{row['name']}: {times['predicted']:.3g} ms a token predicted, {times['measured']:.3g} ms measured ({times['error']:+.1%})"
    figure.suptitle(text, fontsize=12, fontweight="bold", ha="left", x=0.01)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
