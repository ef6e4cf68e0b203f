"""Owns the pictures of a what-if: the tornado of ranges, and curves with their knees. Functions take ``ax=None`` and return Axes."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.errors import InputError
from moesim.plots import axes_of
from moesim.report.whatif import headline
from moesim.units import show
from moesim.whatif import WhatIf
from moesim.whatif.curves import Curve
from moesim.whatif.uncertainty import SAME

WIDTH_INCHES, HEIGHT_INCHES = 6.0, 4.6
DPI = 130
BARS = 10
_DARK, _LIGHT, _KNEE = "#16324f", "#9fb3c8", "#c2410c"
_SCALES = {"bytes": (1e9, "GB"), "bytes_per_s": (1e9, "GB/s"), "flops_per_s": (1e12, "TFLOP/s"), "s": (1e-6, "us")}


def plot_whatif(answer: WhatIf, path: str | Path) -> None:
    """Draw the tornado and every curve into one PNG.

    Raises
    ------
    InputError
        If nothing ran.
    OSError
        If the file cannot be written.
    """
    n = 1 + len(answer.curves)
    page = Figure(figsize=(WIDTH_INCHES * n, HEIGHT_INCHES), dpi=DPI, layout="constrained")
    axes = page.subplots(1, n, squeeze=False)[0]
    tornado(answer, axes[0])
    for c, ax in zip(answer.curves, axes[1:], strict=True):
        plot_curve(c, ax)
    page.suptitle(headline(answer), fontsize=10, ha="left", x=0.01)
    page.savefig(path, format="png")


def tornado(answer: WhatIf, ax: Axes | None = None) -> Axes:
    """Draw how far each figure's range moves the speed, the widest on top."""
    ax = axes_of(ax, WIDTH_INCHES, HEIGHT_INCHES)
    moving = sorted((e for e in answer.effects if e.swing > SAME * answer.speed), key=lambda e: e.swing)[-BARS:]
    if not moving:
        raise InputError("plot", expected="a figure whose range moves the speed", got="none")
    for y, e in enumerate(moving):
        for end, factor, colour in ((e.at_low, e.knob.low, _LIGHT), (e.at_high, e.knob.high, _DARK)):
            ax.barh(y, end - answer.speed, left=answer.speed, height=0.55, color=colour)
            side = "left" if end >= answer.speed else "right"
            ax.annotate(
                f"{factor - 1:+.0%}",
                (end, y),
                xytext=(3 if side == "left" else -3, 0),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=7,
            )
    ax.axvline(answer.speed, color=_DARK, linewidth=0.8)
    if answer.interval:
        ax.axvspan(answer.interval.low, answer.interval.high, color=_LIGHT, alpha=0.2, linewidth=0, zorder=0)
    ax.set_yticks(range(len(moving)), [f"{e.knob.name} ({e.knob.basis})" for e in moving], fontsize=7)
    ax.set_xlabel("tokens/s; shaded: 80 % interval")
    ax.use_sticky_edges = False
    ax.margins(x=0.15)
    ax.spines[["top", "right"]].set_visible(False)
    least, most = sorted((moving[-1].at_low, moving[-1].at_high))
    ax.set_title(f"{moving[-1].knob.name} matters most: {least:.3g} to {most:.3g} tokens/s", fontsize=9.5, loc="right")
    return ax


def plot_curve(c: Curve, ax: Axes | None = None) -> Axes:
    """Draw speed over one path, and mark its knees."""
    ax = axes_of(ax, WIDTH_INCHES, HEIGHT_INCHES)
    scale, unit = _SCALES.get(c.unit, (1.0, ""))
    points = [p for p in c.points if math.isfinite(p.speed)]
    ax.plot([p.value / scale for p in points], [p.speed for p in points], marker="o", markersize=3.5, color=_DARK, linewidth=1.2)
    for knee in c.knees:
        ax.axvline(knee.value / scale, color=_KNEE, linestyle="--", linewidth=0.9)
        ax.annotate(
            knee.why,
            (knee.value / scale, 0.02),
            xycoords=("data", "axes fraction"),
            rotation=90,
            fontsize=7,
            color=_KNEE,
            ha="right",
            va="bottom",
        )
    if c.now is not None and points and points[0].value <= c.now <= points[-1].value:
        ax.axvline(c.now / scale, color=_LIGHT, linewidth=1.0)
        ax.annotate(
            f"now {show(c.now, c.unit)}" if unit else f"now {c.now:.3g}",
            (c.now / scale, 0.98),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            ha="left",
            va="top",
        )
    if c.log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    if points:
        least, most = min(p.speed for p in points), max(p.speed for p in points)
        bend = f"; from {c.knees[0].value / scale:.3g} {unit}".rstrip() + f" on {c.knees[0].why}" if c.knees else ""
        ax.set_title(f"{least:.3g} to {most:.3g} tokens/s over this range{bend}", fontsize=9.5, loc="left")
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"{c.path} ({unit})" if unit else c.path)
    ax.set_ylabel("tokens/s")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
