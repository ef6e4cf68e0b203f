"""Owns what a run's sums mean: latency, overlap, waiting, accesses, transfers, lane use, critical path.

Definitions are DESIGN.md section 6, names those of vLLM's benchmark. It reads a ``Meter`` that has finished, of a run simulated or
measured, and never asks how it came about.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.metrics.kernel import CHANNELS, COMPUTE, DEMANDED, EARLY, EITHER, EXTRA, MOVED, MOVES, SPENT, TIMES, USED, WEIGHTS
from moesim.metrics.stream import Meter
from moesim.schedule import Outcome

PS = 1e-12


def percentiles(values_ms: NDArray[np.float64]) -> dict[str, float] | None:
    """Mean, median, p95 and p99, or None of nothing."""
    if not len(values_ms):
        return None
    median, p95, p99 = np.percentile(values_ms, [50, 95, 99])
    return {"mean": float(values_ms.mean()), "median": float(median), "p95": float(p95), "p99": float(p99)}


def latency(meter: Meter) -> dict[str, Any]:
    """ttft, tpot, itl, e2el (ms) and the rates of a lockstep run. One sequence has one TPOT; its spread is ITL's."""
    steps, ends = meter.steps, meter.step_end_ps
    emits = steps[:, 5] > 0
    at = ends[emits] * PS
    sequences = int(steps[emits, 5].max()) if emits.any() else 0
    prefill = steps[:, 3] == 0
    gaps = np.diff(at) * 1e3
    n_out = len(at)
    span = float(at[-1] - at[0]) if n_out > 1 else 0.0
    prefill_s = float(ends[prefill].max() * PS) if prefill.any() else 0.0
    one = np.ones(max(sequences, 1))
    return {
        "ttft_ms": percentiles(one * at[0] * 1e3) if n_out else None,
        "tpot_ms": percentiles(one * (span / (n_out - 1) * 1e3)) if n_out > 1 else None,
        "itl_ms": percentiles(gaps),
        "e2el_ms": percentiles(one * at[-1] * 1e3) if n_out else None,
        "decode_tok_s": (n_out - 1) / span if span > 0 else None,
        "prefill_tok_s": float(steps[prefill, 4].sum() / prefill_s) if prefill_s > 0 else None,
        "output_throughput_tok_s": n_out * sequences / float(at[-1]) if n_out and at[-1] > 0 else None,
        "output_tokens": n_out * sequences,
    }


def transfers_overlap(meter: Meter, hidden_inside_compute: bool) -> tuple[float | None, float]:
    """Return overlap coverage (None where there is nothing to cover) and exposed I/O in seconds."""
    compute, weights, either = (int(meter.covered_ps[track]) for track in (COMPUTE, WEIGHTS, EITHER))
    if weights == 0 or hidden_inside_compute:
        return None, 0.0
    covered = compute + weights - either
    return covered / weights, (weights - covered) * PS


def io_wait_s(meter: Meter) -> float:
    """Sum over compute tasks of start minus when it could have started but for loads."""
    return float(meter.waited_ps * PS)


def accesses(meter: Meter) -> dict[str, int]:
    """Cache hits, prefetch hits, late prefetches (waited for) and misses."""
    late = int(meter.served[len(Outcome)])
    return {
        "cache": int(meter.served[Outcome.CACHE]),
        "prefetch": int(meter.served[Outcome.PREFETCH]) - late,
        "late": late,
        "miss": int(meter.served[Outcome.MISS]),
    }


def transfers(meter: Meter) -> dict[str, dict[str, float]]:
    """Per channel that loads and copies draw on: bytes by purpose, and the time in which any of them was under way."""
    out: dict[str, dict[str, float]] = {}
    for c, channel in enumerate(meter.channels):
        size = meter.moved[:, c]
        if size[MOVES]:
            out[channel] = {
                "bytes": int(size[MOVED]),
                "demand_bytes": int(size[DEMANDED]),
                "prefetch_useful_bytes": int(size[USED]),
                "prefetch_wasted_bytes": int(size[EARLY] - size[USED]),
                "busy_s": int(meter.covered_ps[CHANNELS + c]) * PS,
            }
    return out


def lane_use(meter: Meter) -> dict[str, dict[str, float]]:
    """Busy seconds (summed over servers) and utilisation of each lane."""
    whole = meter.makespan_ps
    out = {}
    for lane, busy in zip(meter.lanes, meter.busy_ps.tolist(), strict=True):
        out[lane.name] = {"busy_s": busy * PS, "utilisation": busy / (whole * lane.width) if whole else 0.0}
    return out


def critical_shares(meter: Meter) -> list[dict[str, Any]]:
    """Shares of the critical path by lane and kind; they sum to 1. ``contention`` is the part that sharing channels cost."""
    total = int(meter.path[:, SPENT].sum()) or 1
    rows = []
    for (lane, kind), (times, spent, extra) in zip(meter.groups, meter.path[:, [TIMES, SPENT, EXTRA]].tolist(), strict=True):
        if times:
            rows.append({"lane": lane, "kind": kind, "share": spent / total, "contention": extra / total})
    return sorted(rows, key=lambda row: (-row["share"], row["lane"], row["kind"]))


def summary(meter: Meter, hidden_inside_compute: bool = False) -> dict[str, Any]:
    """All scalar metrics of a run, in the shape of ``run -o json``'s ``metrics``."""
    found = latency(meter)
    coverage, exposed = transfers_overlap(meter, hidden_inside_compute)
    counts = accesses(meter)
    total = sum(counts.values())
    tokens = max(found.pop("output_tokens"), 1)
    return {
        **found,
        "overlap_coverage": coverage,
        "io_wait_ms_per_token": io_wait_s(meter) * 1e3 / tokens,
        "exposed_io_ms_per_token": exposed * 1e3 / tokens,
        "expert_hit_rate": (total - counts["miss"]) / total if total else None,
        "cache_hit_rate": counts["cache"] / total if total else None,
        "accesses": counts,
        "makespan_s": meter.makespan_ps * PS,
    }
