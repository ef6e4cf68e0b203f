"""Owns the pictures of ``moesim quality``: quality against bytes, sensitivity by layer, loss by position. Functions take ``ax=None``, return Axes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.plots import axes_of
from moesim.sweep.pareto import front

SIZE_INCHES = (13.0, 4.8)
DPI = 130
_DARK, _LIGHT, _FRONT = "#16324f", "#9fb3c8", "#c2410c"
Data = Mapping[str, Any]


def plot_quality(data: Data, path: str | Path) -> None:
    """Draw all three into one PNG."""
    page = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = page.subplots(1, 3)
    pareto(data, axes[0])
    sensitivity(data, axes[1])
    positions(data, axes[2])
    page.suptitle(f"{data['provenance']['model']}: what precision costs on held-out text", fontsize=11, ha="left", x=0.01)
    page.savefig(path, format="png")


def _axes(ax: Axes | None) -> Axes:
    return axes_of(ax, SIZE_INCHES[0] / 3, SIZE_INCHES[1])


def pareto(data: Data, ax: Axes | None = None) -> Axes:
    """Draw the loss of every plan, with its interval, over its bytes; what nothing is better than is joined."""
    ax = _axes(ax)
    size = np.array([p["stored_bytes"] / 1e6 for p in data["plans"]])
    loss = np.array([[p["loss_percent"][key] for key in ("value", "low", "high")] for p in data["plans"]]).reshape(-1, 3)
    bars = np.abs(loss[:, 1:] - loss[:, :1]).T
    best = front(np.stack([-size, -loss[:, 0]], axis=1))
    ax.errorbar(size, loss[:, 0], bars, fmt="o", ms=4, lw=1, color=_LIGHT)
    line = sorted(best, key=lambda i: size[i])
    ax.plot(size[line], loss[line, 0], "o-", ms=5, lw=1, color=_FRONT, label="nothing is smaller and better")
    for i in line:
        ax.annotate(data["plans"][i]["name"], (size[i], loss[i, 0]), textcoords="offset points", xytext=(4, 5), fontsize=7, color=_DARK)
    ax.set_yscale("symlog", linthresh=1)
    ax.set_xlabel("stored weights (MB)")
    ax.set_ylabel(f"loss of {data['provenance']['unit']} (%)")
    ax.legend(fontsize=7, frameon=False)
    ax.grid(alpha=0.2)
    return ax


def sensitivity(data: Data, ax: Axes | None = None) -> Axes:
    """Draw the loss of each layer and part that is quantised alone."""
    ax = _axes(ax)
    found = data["sensitivity"]
    units = found["units"] if found else []
    value = np.array([u["degraded"]["value"] for u in units])
    low, high = (np.array([u["degraded"][key] for u in units]) for key in ("low", "high"))
    colours = [_DARK if u["unit"].startswith("layer") else _LIGHT for u in units]
    place = np.arange(len(units))[::-1]
    ax.barh(place, value, xerr=np.abs(np.stack([value - low, high - value])), color=colours, error_kw={"lw": 0.8})
    ax.set_yticks(place, [u["unit"].replace("_", " ") for u in units], fontsize=7)
    ax.set_xlabel(f"loss with this alone in {found['plan']} (%)" if found else "")
    ax.grid(alpha=0.2, axis="x")
    return ax


def positions(data: Data, ax: Axes | None = None) -> Axes:
    """Draw the loss of bits per token by position in the window."""
    ax = _axes(ax)
    ends, rows = data["position"]["ends"], data["position"]["bits_per_token"]
    base = np.array(rows["unquantised"])
    names = [name for name in rows if name != "unquantised"]
    names = sorted(names, key=lambda name: -rows[name][-1])[:: max(len(names) // 6, 1)]
    for i, name in enumerate(names):
        ax.plot(
            ends,
            100 * (np.array(rows[name]) / base - 1),
            "o-",
            ms=3,
            lw=1,
            color=plt.get_cmap("viridis")(i / max(len(names), 1)),
            label=name,
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("symlog", linthresh=1)
    ax.set_xlabel("position in the window, up to (tokens)")
    ax.set_ylabel("loss of bits per token (%)")
    ax.legend(fontsize=7, frameon=False)
    ax.grid(alpha=0.2)
    return ax
