"""Owns the pictures of a sweep: the front among all points, and what each axis does. Functions take ``ax=None`` and return Axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.errors import InputError
from moesim.plots import axes_of
from moesim.report.sweep import figure, name_of
from moesim.sweep import Sweep
from moesim.sweep.record import value
from moesim.text_table import percent, unit_of

SIZE_INCHES = (11.0, 4.6)
DPI = 130
BARS = 8
_DARK, _LIGHT, _FRONT = "#16324f", "#9fb3c8", "#c2410c"


def plot_sweep(sweep: Sweep, path: str | Path) -> None:
    """Draw the front and the effects of the axes into one PNG.

    Raises
    ------
    InputError
        If no point has figures.
    OSError
        If the file cannot be written.
    """
    page = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    left, right = page.subplots(1, 2)
    pareto_front(sweep, left)
    axis_effects(sweep, ax=right)
    page.suptitle(f"{sweep.plan.spec.name}: {sweep.n_points:,} points over {sweep.plan.spec.base}", fontsize=11, ha="left", x=0.01)
    page.savefig(path, format="png")


def pareto_front(sweep: Sweep, ax: Axes | None = None) -> Axes:
    """Draw every point by the first two goals, and which of them nothing is better than.

    With one goal, points stand in the order of the axes.
    """
    ax = axes_of(ax, SIZE_INCHES[0] / 2, SIZE_INCHES[1])
    keys = [key for key, _ in sweep.goals[:2]]
    numbers = [i for i, row in enumerate(sweep.rows) if all(value(row.record, key) is not None for key in keys)]
    if not numbers:
        raise InputError("plot", expected="points with figures", got="none")
    table = np.array([[value(sweep.rows[i].record, key) or 0.0 for key in reversed(keys)] for i in numbers])
    if len(keys) == 1:
        table = np.column_stack([[sweep.points[i].index for i in numbers], table[:, 0]])
    scales = [1.0 if len(keys) == 1 else _scale(keys[1]), _scale(keys[0])]
    table = table / scales
    feasible, best = np.isin(numbers, sweep.feasible), np.isin(numbers, sweep.pareto)
    x, y = table[:, 0], table[:, 1]
    if not feasible.all():
        ax.scatter(x[~feasible], y[~feasible], s=14, marker="x", color=_LIGHT, linewidths=0.8, label="misses the constraints")
    ax.scatter(x[feasible & ~best], y[feasible & ~best], s=14, color=_LIGHT, edgecolors="none", label="dominated")
    order = np.argsort(x[best], kind="stable")
    ax.plot(x[best][order], y[best][order], marker="D", markersize=4.5, linewidth=1.0, linestyle="--", color=_FRONT, label="front")
    ax.set_ylabel(_axis_label(keys[0]))
    ax.set_xlabel(_axis_label(keys[1]) if len(keys) > 1 else "point")
    ax.set_title(f"nothing beats {int(best.sum())} of {len(numbers)} points", fontsize=9.5, loc="left")
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def axis_effects(sweep: Sweep, key: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw the main effect of each axis: how far the mean of a figure moves over the axis's values.

    Parameters
    ----------
    sweep : Sweep
    key : str, optional
        A dotted key of the record; the first objective without it.
    ax : Axes, optional
    """
    ax = axes_of(ax, SIZE_INCHES[0] / 2, SIZE_INCHES[1])
    key = key or sweep.plan.objectives[0][0]
    effects = [e for e in sweep.effects(key) if e["means"]][:BARS][::-1]
    if not effects:
        raise InputError("plot", expected="points with figures", got="none")
    for y, effect in enumerate(effects):
        means = {text: mean / _scale(key) for text, mean in effect["means"].items()}
        low, high = min(means, key=lambda text: means[text]), max(means, key=lambda text: means[text])
        ax.barh(y, means[high] - means[low], left=means[low], height=0.45, color=_LIGHT, edgecolor=_DARK, linewidth=0.8)
        ax.plot(list(means.values()), [y] * len(means), "|", color=_DARK, markersize=9)
        ax.annotate(_short(low), (means[low], y), xytext=(-3, 0), textcoords="offset points", ha="right", va="center", fontsize=7)
        text = f"{_short(high)}  ({percent(effect['share'], 0)})"
        ax.annotate(text, (means[high], y), xytext=(3, 0), textcoords="offset points", ha="left", va="center", fontsize=7)
    ax.set_yticks(range(len(effects)), [e["axis"].replace("hardware_set.", "") for e in effects], fontsize=7.5)
    ax.set_xlabel(f"mean {_axis_label(key)}; in brackets the share of the variance")
    ax.use_sticky_edges = False
    ax.margins(x=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    widest = figure(key, effects[-1]["range"])
    ax.set_title(f"{effects[-1]['axis']} moves it most, by {widest}", fontsize=9.5, loc="left")
    return ax


def _short(text: str) -> str:
    return text if len(text) <= 14 else text[:12] + "..."


def _scale(key: str) -> float:
    return 1e9 if unit_of(key.split(".")) == "B" else 1.0


def _axis_label(key: str) -> str:
    unit = "GB" if unit_of(key.split(".")) == "B" else unit_of(key.split("."))
    return f"{name_of(key)} ({unit})" if unit else name_of(key)
