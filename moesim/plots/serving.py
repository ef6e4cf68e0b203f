"""Owns the pictures of serving: the saturation curve, and batch, queue and cache over time. Functions take ``ax=None`` and return Axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.errors import InputError
from moesim.plots import axes_of
from moesim.report.serving import headline
from moesim.serving.curve import AS_STATED, RATE, USERS, Saturation

SIZE_INCHES = (11.0, 4.6)
DPI = 130
_AXIS = {RATE: "offered rate (requests/s)", USERS: "users", AS_STATED: "offered"}
_THROUGHPUT, _GOOD, _LATENCY, _KV = "#16324f", "#2e7d32", "#c2410c", "#7c3aed"


def plot_serving(curve: Saturation, path: str | Path) -> None:
    """Draw a curve per kind, latency beside it, and how the knee's point (or the last one) went over time, into one PNG.

    Raises
    ------
    InputError
        If no point has figures.
    OSError
        If the file cannot be written.
    """
    kinds = [kind for kind in curve.kinds if any(data["metrics"] for _, data in curve.curve(kind))]
    if not kinds:
        raise InputError("plot", expected="points with figures", got="none")
    page = Figure(figsize=(SIZE_INCHES[0], SIZE_INCHES[1] * len(kinds)), dpi=DPI, layout="constrained")
    for row, kind in zip(page.subplots(len(kinds), 3, squeeze=False), kinds, strict=True):
        throughput(curve, kind, row[0])
        latency(curve, kind, row[1])
        points = [(offered, data) for offered, data in curve.curve(kind) if data["metrics"]]
        knee = curve.knee(kind)
        offered, data = next((point for point in points if point[0] == knee), points[-1])
        over_time(data, f"at {offered:g}" + (", the knee" if knee is not None else ""), row[2])
    page.suptitle(headline(curve), fontsize=11, ha="left", x=0.01)
    page.savefig(path, format="png")


def _axes(ax: Axes | None) -> Axes:
    return axes_of(ax, SIZE_INCHES[0] / 3, SIZE_INCHES[1])


def throughput(curve: Saturation, kind: str, ax: Axes | None = None) -> Axes:
    """Draw requests served, and served well, per second over what is offered; a dashed line where all would be served at once."""
    ax = _axes(ax)
    points = [(offered, data) for offered, data in curve.curve(kind) if data["metrics"]]
    x = [offered for offered, _ in points]
    ax.plot(x, [data["metrics"]["request_throughput_s"] for _, data in points], "o-", color=_THROUGHPUT, label="served")
    for name, style in zip(points[0][1]["levels"], ("s:", "^:", "d:", "v:", "x:"), strict=False):
        ax.plot(x, [data["levels"][name]["goodput_s"] for _, data in points], style, color=_GOOD, alpha=0.8, label=f"within {name}")
    if kind == RATE:
        ax.plot(x, x, "--", color="#9fb3c8", linewidth=1, label="offered")
    _knee(curve, kind, ax)
    ax.set(xlabel=_AXIS[kind], ylabel="requests/s", ylim=(0, None))
    ax.legend(fontsize=7, frameon=False)
    return ax


def latency(curve: Saturation, kind: str, ax: Axes | None = None) -> Axes:
    """Draw TTFT and TPOT, median and 99th percentile, over what is offered."""
    ax = _axes(ax)
    points = [(offered, data["metrics"]) for offered, data in curve.curve(kind) if data["metrics"]]
    x = [offered for offered, _ in points]
    for name, colour in (("ttft_ms", _LATENCY), ("tpot_ms", _THROUGHPUT)):
        for key, style in (("median", "o-"), ("p99", "o--")):
            values = [metrics[name][key] if metrics[name] else float("nan") for _, metrics in points]
            ax.plot(x, values, style, color=colour, markersize=4, label=f"{name[:4].upper()} {key}")
    _knee(curve, kind, ax)
    ax.set(xlabel=_AXIS[kind], ylabel="latency (ms)", yscale="log")
    ax.legend(fontsize=7, frameon=False)
    return ax


def over_time(data: dict[str, Any], title: str = "", ax: Axes | None = None) -> Axes:
    """Draw running and waiting sequences, and the share of the KV cache in use, over time."""
    ax = _axes(ax)
    rows = data["over_time"]
    time_s = [row["time_s"] for row in rows]
    ax.step(time_s, [row["running"] for row in rows], where="pre", color=_THROUGHPUT, label="running")
    ax.step(time_s, [row["waiting"] for row in rows], where="pre", color=_LATENCY, linewidth=1, label="waiting")
    ax.set(xlabel="time (s)", ylabel="sequences", title=title, ylim=(0, None))
    share = ax.twinx()
    share.step(time_s, [100 * row["kv_share"] for row in rows], where="pre", color=_KV, linewidth=1, label="KV cache")
    share.set(ylabel="KV cache in use (%)", ylim=(0, 105))
    lines = [*ax.get_lines(), *share.get_lines()]
    ax.legend(lines, [str(line.get_label()) for line in lines], fontsize=7, frameon=False)
    return ax


def _knee(curve: Saturation, kind: str, ax: Axes) -> None:
    knee = curve.knee(kind)
    if knee is not None:
        ax.axvline(knee, color="#9fb3c8", linewidth=1)
        ax.annotate("knee", (knee, 1), xycoords=("data", "axes fraction"), xytext=(3, -10), textcoords="offset points", fontsize=7)
