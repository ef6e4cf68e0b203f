"""Owns the pictures of a result: lanes over time, memory over time, both on one page, and latency by token. It measures nothing itself.

Functions take ``ax=None`` and return Axes. Kinds differ in lightness and hatch as well as in colour, so that a grey print reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from moesim import bottleneck
from moesim.errors import InputError
from moesim.metrics import PS, percentiles
from moesim.schedule import Kind
from moesim.simulate import Result
from moesim.tasks import Tasks, Watermark
from moesim.text_table import percent

SIZE_INCHES = (11.0, 7.2)
DPI = 130
BARS = 700  # tasks in view above which bars are too thin to tell apart
SMALL_LINE = 0.02  # of a tier's capacity: thinner lines of the ledger are drawn as one
MS = 1e3 * PS


@dataclass(frozen=True, slots=True)
class Style:
    """How one kind of task is drawn."""

    label: str
    colour: str
    hatch: str = ""
    edge: str = "#ffffff"  # colour of the hatch


STYLES = {
    "attention": Style("attention", "#16324f"),
    "ffn": Style("expert and dense FFN", "#4d86c4"),
    "small": Style("router, combine", "#9fb3c8", "||||"),
    "head": Style("head", "#8fd0c6", "..."),
    "demand": Style("demand load", "#c2410c", "////"),
    "used": Style("prefetch, used", "#f0b429", "\\\\\\\\"),
    "wasted": Style("prefetch, wasted", "#eeeeee", "xxxx", "#333333"),
    "copy": Style("copy, hand-over", "#7c5cad", "----"),
    "stall": Style("compute waits for loads", "#ffffff", "////", "#c9826b"),
}
_KINDS = {
    Kind.ATTENTION: "attention",
    Kind.FFN: "ffn",
    Kind.ROUTER: "small",
    Kind.COMBINE: "small",
    Kind.HEAD: "head",
    Kind.COPY: "copy",
    Kind.PUT: "copy",
    Kind.GET: "copy",
}
PARTS = (
    Style("computing", "#4d86c4"),
    Style("waiting for loads", "#f6d5c3", "////", "#c2410c"),
    Style("hand-over, neither", "#dddddd", "....", "#555555"),
)
LINE_COLOURS = ("#16324f", "#4d86c4", "#f0b429", "#8fd0c6", "#c2410c", "#9fb3c8", "#7c5cad", "#dddddd")
_HATCHES = ("", "///", "\\\\\\", "...", "xxx", "||", "--", "oo")


def plot_run(result: Result, path: str | Path) -> None:
    """Draw lanes and memory over time into one PNG of standard size.

    Raises
    ------
    InputError
        If nothing ran.
    OSError
        If the file cannot be written.
    """
    _, memory = _ran(result)
    tiers = [tier for i, tier in enumerate(memory.tiers) if result.meter is not None and result.meter.peak_bytes[i]]
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(2, max(len(tiers), 1), height_ratios=(1.25, 1))
    lanes_over_time(result, figure.add_subplot(grid[0, :]))
    for i, tier in enumerate(tiers):
        memory_watermark(result, tier, figure.add_subplot(grid[1, i]))
    figure.suptitle(finding(result), fontsize=12, fontweight="bold", ha="left", x=0.01)
    figure.savefig(path, format="png")


def axes_of(ax: Axes | None, width_inches: float, height_inches: float) -> Axes:
    """Return given axes, or new ones on a figure of their own."""
    return ax if ax is not None else plt.subplots(figsize=(width_inches, height_inches), layout="constrained")[1]


def finding(result: Result) -> str:
    """Return the title of a run's picture: what limits it, and by how much."""
    data = result.as_dict()
    found = bottleneck.find(result, data)
    if found is None:
        return result.case.scenario.name
    rate = data["metrics"]["decode_tok_s"]
    speed = f", {rate:.3g} tokens/s" if rate else ""
    return (
        f"{found.lane} limits the run: {percent(found.share, 0)} of the critical path, busy {percent(found.busy, 0)} of the time; "
        f"compute waits {found.wait_ms:.3g} ms per token for loads\n{result.case.model.name} on {result.case.hardware.name}{speed}"
    )


def lanes_over_time(result: Result, ax: Axes | None = None, steps: tuple[int, int] | None = None) -> Axes:
    """Draw what each lane does in a few steps, one row per server.

    Parameters
    ----------
    result : Result
    ax : Axes, optional
    steps : (int, int), optional
        First and last step, both included; without it a few decode steps in the middle of the run.
    """
    tasks, _ = _ran(result)
    ax = axes_of(ax, SIZE_INCHES[0], SIZE_INCHES[1] / 2)
    first, last = steps or middle_steps(tasks)
    ends = np.concatenate([[0], tasks.end[tasks.steps[:, 2]]])
    if not 0 <= first <= last < len(tasks.steps):
        raise InputError("steps", expected=f"(first, last) within 0 to {len(tasks.steps) - 1}", got=str(steps))
    begin, end = int(ends[first]), int(ends[last + 1])
    seen = (tasks.start < end) & (tasks.end > begin)
    kinds = task_styles(tasks)
    rows = [(number, server) for number, lane in enumerate(tasks.lanes) for server in range(lane.width) if (tasks.lane == number).any()]
    drawn = set()
    stalls = load_waits(tasks)
    for y, (number, server) in enumerate(rows):
        mine = seen & (tasks.lane == number) & (tasks.server == server)
        for kind, style in STYLES.items():
            if kind == "stall":
                spans = stalls[mine & (stalls[:, 1] > stalls[:, 0])]
            else:
                spans = np.stack([tasks.start, tasks.end], axis=1)[mine & (kinds == kind)]
            if len(spans):
                drawn.add(kind)
                _bars(ax, y, (np.clip(spans, begin, end) - begin) * MS, style, kind == "stall")
    _label_lanes(ax, result, rows)
    for step in range(first, last + 1):
        ax.axvline((int(ends[step]) - begin) * MS, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        middle = ((int(ends[step]) + int(ends[step + 1])) / 2 - begin) * MS
        ax.annotate(
            step_name(tasks, step),
            (middle, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    ax.set_xlim(0, (end - begin) * MS)
    ax.set_xlabel(f"time since the start of {step_name(tasks, first)} (ms)")
    handles = [
        Patch(facecolor=s.colour, hatch=s.hatch, edgecolor=s.edge, linewidth=0, label=s.label) for k, s in STYLES.items() if k in drawn
    ]
    ax.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(handles), fontsize=7.5, frameon=False, handlelength=2.2
    )
    return ax


def memory_watermark(result: Result, tier: str, ax: Axes | None = None) -> Axes:
    """Draw what a tier holds over time, line by line of the ledger, and what it can hold."""
    _, memory = _ran(result)
    if tier not in memory.tiers:
        raise InputError("tier", expected=f"one of {', '.join(memory.tiers)}", got=f'"{tier}"')
    ax = axes_of(ax, SIZE_INCHES[0] / 2, SIZE_INCHES[1] / 2)
    index = memory.tiers.index(tier)
    capacity = result.case.layout.ledger.capacities[tier]
    times, levels = _levels(memory, index)
    end = result.timeline.makespan_ps * PS
    times, levels = np.append(times, max(end, times[-1])), np.column_stack([levels, levels[:, -1]])
    names = np.array(memory.lines)
    big = levels.max(axis=1) >= SMALL_LINE * capacity.total_bytes
    order = np.flatnonzero(big)[np.argsort(-levels[big].min(axis=1), kind="stable")]  # what never moves lies at the bottom
    stack = [(str(names[i]), levels[i]) for i in order]
    looks = line_colours({line.name: line.bytes for line in result.case.layout.ledger.lines if line.tier == tier})
    small = np.flatnonzero(~big & (levels.max(axis=1) > 0))
    if len(small):
        rest = levels[small].sum(axis=0)
        stack.append((str(names[small[0]]) if len(small) == 1 else f"{len(small)} small lines", rest))
    bottom = np.zeros(len(times))
    for name, level in stack:
        top = bottom + level / 1e9
        label = f"{name}, {level.max() / 1e9:.2g} GB"
        look = looks.get(name, len(LINE_COLOURS) - 1)
        hatch, colour = _HATCHES[look], LINE_COLOURS[look]
        ax.fill_between(times, bottom, top, step="post", facecolor=colour, hatch=hatch, edgecolor="#ffffff", linewidth=0.3, label=label)
        bottom = top
    usable, total = capacity.usable_bytes / 1e9, capacity.total_bytes / 1e9
    ax.axhline(usable, color="#b00020", linewidth=1.8, label=f"usable, {usable:.3g} GB")
    if total > usable:
        ax.axhspan(
            usable, total, facecolor="#f3d6da", edgecolor="#b00020", hatch="//", linewidth=0, label=f"reserved, {total - usable:.2g} GB"
        )
    peak = float(bottom.max())
    ax.set_title(f"{tier}: peak {peak:.3g} of {usable:.3g} GB usable ({percent(peak / usable, 0)})", fontsize=9.5, loc="left")
    ax.set_xlim(0, times[-1] or 1.0)
    ax.set_ylim(0, max(total, peak) * 1.04)
    ax.set_xlabel("time (s)")
    ax.set_ylabel("memory (GB)")
    ax.legend(*(x[::-1] for x in ax.get_legend_handles_labels()), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7.5, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def token_latency(result: Result, ax: Axes | None = None) -> Axes:
    """Draw the time between tokens, what it went to, and its percentiles.

    Raises
    ------
    InputError
        If fewer than two tokens were made.
    """
    tasks, _ = _ran(result)
    parts = token_parts(tasks) * MS
    if not len(parts):
        raise InputError("plot", expected="a run of at least two output tokens", got="fewer: no time between tokens")
    ax = axes_of(ax, SIZE_INCHES[0], SIZE_INCHES[1] / 2)
    number = np.arange(len(parts) + 1) + 1.5  # edges of the columns: token 2 lies between 1.5 and 2.5
    bottom = np.zeros(len(parts))
    for column, style in zip(parts.T, PARTS, strict=True):
        if column.any():
            share = percent(column.sum() / parts.sum(), 0)
            ax.stairs(
                bottom + column, number, baseline=bottom, fill=True, facecolor=style.colour, hatch=style.hatch, edgecolor=style.edge, linewidth=0,
                label=f"{style.label}, {share}",
            )  # fmt: skip
        bottom = bottom + column
    found = percentiles(bottom)
    assert found is not None  # there is at least one
    for (name, line), colour in zip((("median", "-"), ("p95", "--"), ("p99", ":")), ("#000000", "#b00020", "#b00020"), strict=True):
        ax.axhline(found[name], color=colour, linewidth=1.4, linestyle=line, label=f"{name}, {found[name]:.3g} ms")
    ax.set_title(
        f"a token takes {found['median']:.3g} ms in the median, {found['p99']:.3g} ms at p99; "
        f"{percent(parts[:, 1].sum() / parts.sum(), 0)} of the time nothing computes because a load is missing",
        fontsize=9.5,
        loc="left",
    )
    ax.set_xlim(number[0], number[-1])
    ax.set_ylim(0, 1.05 * float(bottom.max()))
    ax.set_xlabel("output token")
    ax.set_ylabel("time since the token before (ms)")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7.5, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def token_parts(tasks: Tasks) -> NDArray[np.int64]:
    """Split the time between tokens, (tokens - 1, 3) ps: something computes; nothing does and a load is waited for; neither.

    A row sums to the time since the token before. Waiting while another device computes counts as computing.
    """
    emits = tasks.steps[tasks.steps[:, 5] > 0]
    at = tasks.end[emits[:, 2]]
    compute = np.stack([tasks.start, tasks.end], axis=1)[tasks.is_compute]
    busy = _covered(compute, at)
    either = _covered(np.concatenate([compute, load_waits(tasks)]), at)
    return np.stack([np.diff(busy), np.diff(either - busy), np.diff(at - either)], axis=1)


def _covered(spans: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of the time before each moment lies in any span."""
    if not len(spans):
        return np.zeros(len(at), np.int64)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    end = np.maximum.accumulate(spans[:, 1])
    begin = np.maximum(spans[:, 0], np.concatenate([spans[:1, 0], end[:-1]]))
    begin = np.minimum(begin, end)  # of spans inside others nothing is left
    before = np.concatenate([[0], np.cumsum(end - begin)])
    last = np.searchsorted(spans[:, 0], at, side="left")
    over = np.maximum(np.concatenate([[0], end])[last] - at, 0)
    return np.asarray(before[last] - np.where(last > 0, over, 0))


def line_colours(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the index in ``LINE_COLOURS`` of each line of a tier by its planned bytes: the largest have their own, the rest share the last."""
    last = len(LINE_COLOURS) - 1
    return {name: min(i, last) for i, name in enumerate(sorted(sizes, key=lambda name: (-sizes[name], name)))}


def middle_steps(tasks: Tasks) -> tuple[int, int]:
    """Return the first and last of a few steps that stand for the run.

    Of the middle half of the decode steps (of all steps, if none decodes) those whose lanes are busy for as long as on average;
    of equals the most central.
    """
    decode = np.flatnonzero(tasks.steps[:, 3] == 1)
    steps = decode if len(decode) else np.arange(len(tasks.steps))
    per_step = max(len(tasks.step) / len(tasks.steps), 1)
    n = min(int(np.clip(round(BARS / per_step), 1, 4)), len(steps))
    busy = np.zeros((len(tasks.lanes), len(tasks.steps)))
    np.add.at(busy, (tasks.lane, np.searchsorted(tasks.steps[:, 0], tasks.step)), (tasks.end - tasks.start).astype(np.float64))
    mine = busy[:, steps]
    windows = np.stack([mine[:, i : i + len(steps) - n + 1] for i in range(n)]).sum(axis=0)  # (lanes, windows)
    off = np.abs(windows - n * mine.mean(axis=1, keepdims=True)).sum(axis=0)
    number = np.arange(len(off))
    off[np.abs(number - (len(off) - 1) / 2) > len(off) / 4 + 1] = np.inf
    best = min(number.tolist(), key=lambda i: (float(off[i]), abs(i - len(off) / 2)))
    return int(steps[best]), int(steps[best + n - 1])


def _ran(result: Result) -> tuple[Tasks, Watermark]:
    if result.meter is None:
        raise InputError("plot", expected="a run with at least one step", got="none: memory ran out before the first")
    every = result.every
    return every.tasks, every.memory


def task_styles(tasks: Tasks) -> NDArray[Any]:
    """Return the key in ``STYLES`` of each task, (N,)."""
    out = np.full(len(tasks.kind), "demand", dtype="U9")
    for kind, name in _KINDS.items():
        out[tasks.kind == kind] = name
    early = tasks.is_load & tasks.prefetch
    out[early & tasks.useful], out[early & ~tasks.useful] = "used", "wasted"
    return out


def load_waits(tasks: Tasks) -> NDArray[np.int64]:
    """Return from when to when each compute task waited for loads alone, (N, 2) ps; equal where it did not. Summed: ``metrics.io_wait_s``."""
    free = np.where(tasks.is_compute, np.minimum(tasks.free_of_loads, tasks.start), tasks.start)
    return np.stack([free, tasks.start], axis=1)


def _bars(ax: Axes, y: int, spans: NDArray[np.float64], style: Style, stall: bool) -> None:
    height = 0.3 if stall else 0.8
    bars = [(a, b - a) for a, b in spans.tolist()]
    over = 1.0 if stall else 1.5 if style is STYLES["small"] else 2.0  # slivers never hide what lasts
    ax.broken_barh(
        bars, (y - height / 2, height), facecolor=style.colour, hatch=style.hatch, edgecolor=style.edge, linewidth=0, zorder=over
    )


def _label_lanes(ax: Axes, result: Result, rows: list[tuple[int, int]]) -> None:
    """Left: the lane and how busy it is. Right: its share of the critical path, the limiting lane's in bold."""
    data = result.as_dict()
    tasks, _ = _ran(result)
    shares = bottleneck.lane_shares(data["critical_path"])
    top = next(iter(shares), "")
    labels = []
    for y, (number, server) in enumerate(rows):
        lane = tasks.lanes[number]
        busy = f"{percent(data['lanes'][lane.name]['utilisation'], 0)} busy"
        labels.append(f"{lane.name}\n{busy}" if lane.width == 1 else f"{lane.name} #{server}" + (f"\n{busy}" if server == 0 else ""))
        if server == 0:
            text = f" {percent(shares.get(lane.name, 0.0), 0)} of the\n critical path"
            weight, colour = ("bold", "#b00020") if lane.name == top else ("normal", "#333333")
            ax.annotate(
                text,
                (1.0, y),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8.5,
                fontweight=weight,
                color=colour,
                annotation_clip=False,
            )
    ax.set_yticks(range(len(rows)), labels)
    for tick, (number, _) in zip(ax.get_yticklabels(), rows, strict=True):
        if tasks.lanes[number].name == top:
            tick.set_fontweight("bold")
            tick.set_color("#b00020")
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.spines[["top", "right"]].set_visible(False)


def step_name(tasks: Tasks, step: int) -> str:
    """Return what a step is called, such as ``decode token 7``."""
    phase = tasks.steps[step, 3]
    number = int((tasks.steps[: step + 1, 3] == phase).sum())
    return f"prefill chunk {number}" if phase == 0 else f"decode token {number}"


def _levels(memory: Watermark, tier: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return times (s) and bytes of each line after them: (M,), (lines, M)."""
    mine = memory.events[memory.events[:, 1] == tier]
    times, where = np.unique(np.concatenate([[0], mine[:, 0]]), return_inverse=True)
    change = np.zeros((len(memory.lines), len(times)))
    for (held, line), size in memory.initial.items():
        if held == tier:
            change[line, 0] += size
    np.add.at(change, (mine[:, 2], where[1:]), mine[:, 3])
    return times * PS, np.cumsum(change, axis=1)
