"""Owns the picture of a backtest: predicted against measured speed, with the 80 % intervals. It scores nothing."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from moesim.backtest import Backtest

MARKS = {
    "cpu_only": ("#c2410c", "o"),
    "gpu_cpu_experts": ("#16324f", "s"),
    "full_gpu": ("#2f8f6b", "^"),
    "ssd": ("#7c5cad", "D"),
    "gpu_cpu_layers": ("#666666", "v"),
}


def plot_backtest(run: Backtest, mode: str, ax: Axes | None = None) -> Axes:
    """Draw predicted over measured tokens/s of one mode on logarithmic axes; the band is 20 % either way."""
    ax = ax or plt.subplots(figsize=(6, 6))[1]
    rows = [p for p in run.scored if p.case.mode == mode]
    for placement in sorted({p.case.placement for p in rows}):
        here = [p for p in rows if p.case.placement == placement]
        colour, mark = MARKS.get(placement, ("#000000", "x"))
        measured, predicted = np.array([p.measured for p in here]), np.array([p.predicted for p in here])
        ratio = np.array([p.ratio for p in here])
        ax.vlines(measured, predicted / ratio, predicted * ratio, color=colour, alpha=0.15, linewidth=1)
        ax.plot(measured, predicted, mark, color=colour, markersize=4, alpha=0.8, label=f"{placement} ({len(here)})")
    if rows:
        ends = np.array([min(p.measured for p in rows) / 1.5, max(p.measured for p in rows) * 1.5])
        ax.plot(ends, ends, color="black", linewidth=1)
        ax.fill_between(ends, ends / 1.2, ends * 1.2, color="black", alpha=0.08, linewidth=0)
        ax.legend(loc="upper left", fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="measured, tokens/s", ylabel="predicted, tokens/s")
    error = f": off by {np.median([abs(p.predicted / p.measured - 1) for p in rows]):.1%} in the median of {len(rows)} runs" if rows else ""
    ax.set_title(f"{mode}, {'warm' if run.warm else 'cold'}{error}", fontsize=9.5, loc="left")
    return ax


def save_backtest(run: Backtest, path: Path) -> None:
    """Write a picture of decode and, beside it, prefill."""
    shown = [mode for mode in ("decode", "batched decode", "prefill") if any(p.case.mode == mode for p in run.scored)] or ["decode"]
    figure, axes = plt.subplots(1, len(shown), figsize=(6 * len(shown), 6), squeeze=False)
    for mode, ax in zip(shown, axes[0], strict=True):
        plot_backtest(run, mode, ax)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
