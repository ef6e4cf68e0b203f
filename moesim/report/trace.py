"""Owns what ``moesim trace info`` says about a trace: its statistics on one screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.text_table import columns, percent, wrap
from moesim.trace import DECODE, RoutingTrace

_POLICIES = ("lru", "lfu", "static", "static_first_half", "belady", "lru_global")


def text(trace: RoutingTrace, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the statistics of ``trace_stats.analyse_phases`` as aligned text."""
    decode = int((trace.phase == DECODE).sum())
    weights = "no routing weights" if trace.weights is None else "with routing weights"
    lines = [
        f"{trace.meta.get('model', 'routing trace')}: {trace.n_rows:,} tokens in {len(trace.sequences):,} sequences "
        f"({trace.n_rows - decode:,} prefill, {decode:,} decode)",
        f"{trace.n_layers} MoE layers, top {trace.top_k} of {trace.n_experts} experts, {weights}, hash {trace.hash}",
    ]
    for phase, stats in found.items():
        if len(found) > 1:
            lines += ["", f"{phase} rows ({stats['rows']:,})"]
        lines += ["", *_part(stats)]
    return "\n".join(lines) + "\n"


def _part(stats: Mapping[str, Any]) -> list[str]:
    lags, caches, guesses = stats["reuse"], stats["cache"], stats["prediction"]
    gini = stats["gini"]["mean"]
    busy, even = percent(stats["top_half_share"]["mean"]), "-" if gini is None else f"{gini:.3f}"
    lines = [f"skew        the busier half of the experts takes {busy}; Gini {even}"]
    shares = ", ".join(f"{lag}: {percent(lags[lag]['micro'], 0)}" for lag in lags)
    lines += wrap(f"of a token's experts were used some tokens before, {shares}", "reuse       ")
    rows = [[f"hit rate (first {stats['cache_rows']:,} tokens)", *(name.replace("_", " ") for name in _POLICIES)]]
    for share, entry in caches.items():
        label = f"  {100 * float(share):.4g} % of the experts"
        rows.append([label, *("-" if entry is None else percent(entry[name]["hit_rate"]) for name in _POLICIES)])
    lines += ["", *columns(rows, range(1, len(_POLICIES) + 1))]
    if guesses:
        names = [name for name in next(iter(guesses.values())) if name != "test_accesses"]
        rows = [["recall of predictors", *names]]
        rows += [
            [f"  {d} layer{'s' if d != '1' else ''} ahead", *(percent(guess[name]["recall"]) for name in names)]
            for d, guess in guesses.items()
        ]
        lines += ["", *columns(rows, range(1, len(names) + 1))]
    return lines
