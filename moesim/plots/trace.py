"""Owns the pictures of a routing trace: who is used, how soon again, what a cache of each size hits, what the next layer's guess is worth.

It draws figures of ``trace_stats`` and the policies' pools and has no statistics of its own but two curves over all capacities: LRU by
stack distance in one pass (``trace_stats.lru_hits``), and the static set in closed form (the sum of the largest counts). Functions take
``ax=None`` and return Axes; lines differ in dash, marker and lightness, so that a grey print reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.plots import axes_of
from moesim.policies.cache import ExpertPool, future_uses, make_policy
from moesim.text_table import percent
from moesim.trace import RoutingTrace
from moesim.trace_stats import PREDICTORS_SCORED, first_sequences, lru_hits, prediction_statistics, reuse, top_half_share

SIZE_INCHES = (12.0, 8.6)
DPI = 130
CACHE_ROWS = 4000  # as trace_stats.analyse: Belady's replay is the slow part
BELADY_SIZES = 9  # capacities that Belady is replayed at
PLOT_LAGS = (1, 2, 4, 8, 16, 32, 64)
PLOT_DISTANCES = (1, 2, 3, 4, 6, 8)
HOT = 4.0  # times the even share from which the heat map is black
# colour, dash, marker
_LINES = {
    "belady": ("#9a9a9a", (0, (1, 1.2)), "^"),
    "static": ("#c2410c", (0, (5, 2)), "s"),
    "lru": ("#16324f", "-", "o"),
    "cooccurrence": ("#16324f", "-", "o"),
    "popularity": ("#c2410c", (0, (5, 2)), "s"),
    "previous": ("#9a9a9a", (0, (1, 1.2)), "^"),
}
_NAMES = {
    "belady": "Belady (knows the future)",
    "static": "static (preloaded with the most used of these rows)",
    "lru": "LRU",
    "cooccurrence": "co-occurrence with the earlier layer's experts",
    "popularity": "popularity alone",
    "previous": "the previous token's experts",
}


def plot_trace(trace: RoutingTrace, path: str | Path, cache_rows: int = CACHE_ROWS) -> None:
    """Draw the four panels into one PNG.

    Parameters
    ----------
    trace : RoutingTrace
    path : path
    cache_rows : int
        Caches and predictors are judged on the first whole sequences that reach so many rows; popularity and reuse on all rows.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots(2, 2)
    popularity_map(trace, axes[0, 0])
    reuse_by_lag(trace, axes[0, 1])
    hit_rate_by_capacity(trace, axes[1, 0], cache_rows)
    predictability(trace, axes[1, 1], cache_rows)
    name = trace.meta.get("model", "routing trace")
    n_sequences = len(trace.sequences)
    shape = f"{trace.n_layers} MoE layers, top {trace.top_k} of {trace.n_experts} experts"
    title = f"{name}: {trace.n_rows:,} tokens in {n_sequences:,} sequence{'' if n_sequences == 1 else 's'}, {shape}"
    figure.suptitle(title, fontsize=12, fontweight="bold", ha="left", x=0.01)
    figure.savefig(path, format="png")


def popularity_map(trace: RoutingTrace, ax: Axes | None = None) -> Axes:
    """Draw how often each expert of each layer was chosen, in multiples of the even share, the most used of each layer first."""
    ax = _axes(ax)
    counts = trace.counts()
    total = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts * trace.n_experts, total, out=np.zeros(counts.shape), where=total > 0)
    shown = ax.imshow(-np.sort(-share, axis=1), cmap="Greys", vmin=0, vmax=HOT, aspect="auto", interpolation="nearest")
    bar = ax.figure.colorbar(shown, ax=ax, extend="max" if share.max() > HOT else "neither", pad=0.01)
    bar.set_label("uses, in multiples of the even share", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    halves = [top_half_share(row) for row in counts]
    known = [(value, layer) for layer, value in enumerate(halves) if value is not None]
    mean = float(np.mean([value for value, _ in known])) if known else None
    title = f"The busier half of a layer's experts takes {percent(mean, 0)}"
    if len(known) > 1:
        (low, even), (high, uneven) = min(known), max(known)
        title += f"\n({percent(low, 0)} in layer {even}, {percent(high, 0)} in layer {uneven}; an even router: 50 %)"
    _title(ax, title)
    ax.set_xlabel("experts, the layer's most used first (rank)")
    ax.set_ylabel("MoE layer (number)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return ax


def reuse_by_lag(trace: RoutingTrace, ax: Axes | None = None) -> Axes:
    """Draw which share of a token's experts an earlier token used, by how much earlier, against what popularity alone gives."""
    ax = _axes(ax)
    table = reuse_curve(trace)
    lags = table["lag_tokens"].to_numpy()
    chance = by_popularity(trace)
    ax.fill_between(lags, table["lowest_layer"], table["highest_layer"], color="#dddddd", linewidth=0, label="range over the layers")
    ax.plot(lags, table["reuse"], color="#16324f", marker="o", markersize=4, label="measured, all layers")
    if chance is not None:
        ax.axhline(chance, color="#c2410c", linestyle=(0, (5, 2)), label="independent draws of the same popularity")
    even = trace.top_k / trace.n_experts
    ax.axhline(even, color="#777777", linestyle=(0, (1, 1.5)), label="an even router (top-k / experts)")
    first = table["reuse"].dropna()
    if len(first) and chance is not None:
        last = int(lags[first.index[-1]])
        near = f"{percent(float(first.iloc[0]), 0)} of a token's experts served the token before"
        _title(
            ax,
            f"{near}\n({percent(float(first.iloc[-1]), 0)} at {last} tokens; popularity alone {percent(chance, 0)}, even {percent(even, 0)})",
        )
    else:
        _title(ax, "No two tokens of one sequence: reuse cannot be seen")
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(PLOT_LAGS), [str(lag) for lag in PLOT_LAGS])
    ax.set_xlim(PLOT_LAGS[0] * 0.85, PLOT_LAGS[-1] * 1.18)  # not from the data: there may be none
    ax.set_xlabel("lag (tokens)")
    ax.set_ylabel("share of experts reused (%)")
    return _shares(ax, "upper right")


def hit_rate_by_capacity(trace: RoutingTrace, ax: Axes | None = None, cache_rows: int = CACHE_ROWS) -> Axes:
    """Draw the hit rate of per-layer caches over their size: LRU and static at every size, Belady at a few."""
    ax = _axes(ax)
    table = hit_rates(trace, cache_rows)
    share = 100 * table["capacity_slots"] / trace.n_experts
    ax.plot([0, 100], [0, 1], color="#cccccc", linewidth=0.8, label="size alone (an even router without reuse)")
    for name in ("belady", "static", "lru"):
        _line(ax, share, table[name], name, every=max(len(table) // 10, 1))
    half = table.iloc[int((table["capacity_slots"] - trace.n_experts // 2).abs().argmin())]
    best = "LRU" if half["lru"] >= half["static"] else "a static set"
    worst = "a static set" if best == "LRU" else "LRU"
    high, low = max(half["lru"], half["static"]), min(half["lru"], half["static"])
    text = f"With {int(half['capacity_slots'])} of {trace.n_experts} experts per layer {best} hits {percent(high, 0)}, {worst} {percent(low, 0)}"
    _title(ax, f"{text}\n(with perfect eviction {percent(half['belady'], 0)}, cold start included; the static set starts warm)")
    ax.set_xlim(0, 100)
    ax.set_xlabel("experts per layer in the cache (% of the layer's)")
    ax.set_ylabel(f"hit rate, first {first_sequences(trace, cache_rows).n_rows:,} tokens (%)")
    return _shares(ax, "lower right")


def predictability(trace: RoutingTrace, ax: Axes | None = None, rows: int = CACHE_ROWS) -> Axes:
    """Draw which share of a layer's experts each predictor names, by how many layers ahead it speaks."""
    ax = _axes(ax)
    table = recall_by_distance(trace, rows)
    for name in ("previous", "popularity", "cooccurrence"):
        _line(ax, table["distance_layers"], table[name], name)
    ax.axhline(trace.top_k / trace.n_experts, color="#cccccc", linewidth=0.8, label="blind guess (top-k / experts)")
    first = table.dropna()
    if len(first):
        one = first.iloc[0]
        ahead = f"{int(one['distance_layers'])} layer{'s' if one['distance_layers'] > 1 else ''} ahead"
        gain = one["cooccurrence"] - one["popularity"]
        where = f"{abs(100 * gain):.0f} points {'more' if gain >= 0 else 'less'} than popularity alone"
        _title(ax, f"{ahead.capitalize()} a layer's choice names {percent(one['cooccurrence'], 0)}\nof the experts, {where}")
    else:
        _title(ax, "Too few layers or tokens to judge predictors")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("distance (layers ahead)")
    ax.set_ylabel("recall, second half of the rows (%)")
    return _shares(ax, "upper right")


def reuse_curve(trace: RoutingTrace) -> pd.DataFrame:
    """Return ``lag_tokens``, ``reuse``, ``lowest_layer`` and ``highest_layer``; NaN where no pair of rows is so far apart."""
    rows = []
    for lag in PLOT_LAGS:
        found = reuse(trace, lag)
        known = [value for value in found["per_layer"] if value is not None]
        rows.append((lag, _number(found["micro"]), min(known, default=np.nan), max(known, default=np.nan)))
    return pd.DataFrame(rows, columns=["lag_tokens", "reuse", "lowest_layer", "highest_layer"])


def by_popularity(trace: RoutingTrace) -> float | None:
    """Expected reuse, were the rows independent: sum over experts of P(used)^2 / K, weighted by the rows of each layer."""
    counts = trace.counts().astype(np.float64)
    rows = trace.present.sum(axis=0)
    if not rows.sum():
        return None
    used = counts[rows > 0] / rows[rows > 0, None]
    return float(((used**2).sum(axis=1) * rows[rows > 0]).sum() / (trace.top_k * rows.sum()))


def hit_rates(trace: RoutingTrace, cache_rows: int = CACHE_ROWS) -> pd.DataFrame:
    """Return the hit rates of per-layer caches of every size from K to E.

    Returns
    -------
    DataFrame
        ``capacity_slots`` per layer, ``lru``, ``static`` (the most used experts of the same rows), ``belady`` (NaN but at a few sizes).

    Raises
    ------
    InputError
        If the trace holds no routing.
    """
    part = first_sequences(trace, cache_rows)
    total = int(part.present.sum()) * part.top_k
    if not total:
        raise InputError("trace", expected="rows that chose experts", got="none in the rows that caches are judged on")
    sizes = list(range(part.top_k, part.n_experts + 1))
    lru = lru_hits(part, sizes)
    best = np.cumsum(-np.sort(-part.counts(), axis=1), axis=1).sum(axis=0)  # (E,) hits of a static set of 1..E experts
    half = max(part.n_experts // 2, part.top_k)
    few = {*np.unique(np.linspace(sizes[0], sizes[-1], min(BELADY_SIZES, len(sizes))).round().astype(int)).tolist(), half}
    belady = {size: hits / total for size, hits in _belady_hits(part, sorted(few)).items()}
    rows = [(size, sum(lru[size]) / total, best[size - 1] / total, belady.get(size, np.nan)) for size in sizes]
    return pd.DataFrame(rows, columns=["capacity_slots", "lru", "static", "belady"])


def recall_by_distance(trace: RoutingTrace, rows: int = CACHE_ROWS) -> pd.DataFrame:
    """Return ``distance_layers`` and the recall of each predictor, trained on the first half of the rows taken; NaN where none is judged."""
    part = first_sequences(trace, rows)
    enough = part.n_rows > 2
    out = []
    for distance in (d for d in PLOT_DISTANCES if d < part.n_layers and enough):
        found = prediction_statistics(part, distance)
        out.append((distance, *(_number(found[name]["recall"]) for name in PREDICTORS_SCORED)))
    return pd.DataFrame(out, columns=["distance_layers", *PREDICTORS_SCORED], dtype=float)


def _belady_hits(trace: RoutingTrace, sizes: list[int]) -> dict[int, int]:
    hits = dict.fromkeys(sizes, 0)
    for layer in range(trace.n_layers):
        rows = np.flatnonzero(trace.present[:, layer])
        sets: list[tuple[int, list[int]]] = list(zip(rows.tolist(), trace.expert_ids[rows, layer].tolist(), strict=True))
        future = future_uses(sets)
        for size in sizes:
            access = ExpertPool(size, _one, make_policy("belady", future), "belady").access
            hits[size] += sum([len(access(experts, row).hits) for row, experts in sets])
    return hits


def _one(key: int) -> int:
    """Every expert takes one slot."""
    return 1


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def _axes(ax: Axes | None) -> Axes:
    return axes_of(ax, SIZE_INCHES[0] / 2, SIZE_INCHES[1] / 2)


def _line(ax: Axes, x: Any, y: Any, name: str, every: int = 1) -> None:
    colour, dash, marker = _LINES[name]
    known: NDArray[np.bool_] = np.isfinite(np.asarray(y, dtype=float))
    every = every if known.all() else 1  # a curve known at a few sizes shows all of them
    ax.plot(
        np.asarray(x)[known],
        np.asarray(y)[known],
        color=colour,
        linestyle=dash,
        marker=marker,
        markersize=4,
        markevery=every,
        label=_NAMES[name],
    )


def _title(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=9.5, loc="left")


def _shares(ax: Axes, place: Literal["upper right", "lower right"]) -> Axes:
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    ax.grid(color="#eeeeee")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=7.5, loc=place, framealpha=0.9)
    return ax
