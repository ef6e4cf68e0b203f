"""Owns the statistics of a routing trace: skew, reuse, cache hit rates, predictability.

It must not know about time, hardware or bytes: caches hold experts of one unit each. Cache figures come from compiled replays that are
tested equal to the pools that the planner uses (policies/cache), so a figure here is a promise about a simulation.

top_half_share of a layer is the share of its floor(E/2) most used experts; gini = sum_i (2i - E - 1) x_i / (E sum x) over counts x
in ascending order (the usual sample formula); reuse at a lag is sum |S(t) & S(t+lag)| / sum |S(t+lag)| over row pairs of one
sequence; recall of a predictor is sum |P & S| / sum |S| over test cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.host.cores import cores
from moesim.policies.cache import hottest
from moesim.policies.kernels import BELADY, LFU, common, lru_replay, next_uses, ranked_replay, stack_depths
from moesim.policies.prefetch import make_predictor
from moesim.trace import DECODE, RoutingTrace

Cells = NDArray[np.int64]  # (R, K): the sets of one layer, or of all

LAGS = (1, 2, 4, 8, 16, 64)
FRACTIONS = (0.125, 0.25, 0.5, 0.75)
DISTANCES = (1, 2, 4)
PREDICTORS_SCORED = ("popularity", "previous", "cooccurrence")


def analyse(trace: RoutingTrace, cache_rows: int = 4000) -> dict[str, Any]:
    """Compute every statistic of a trace.

    Parameters
    ----------
    trace : RoutingTrace
        All its rows count, whatever their phase; see ``analyse_phases``.
    cache_rows : int
        Cache figures use the first whole sequences until at least so many rows are reached; ``lru_full`` uses every row.

    Returns
    -------
    dict
        ``rows``, ``n_layers``, ``n_experts``, ``top_k``, ``sequences``, ``top_half_share``, ``gini``, ``reuse``, ``cache_rows``,
        ``cache`` and ``prediction``; shares are None where nothing was to be counted.
    """
    if cache_rows < 1:
        raise InputError("cache_rows", expected="at least 1", got=str(cache_rows))
    counts = trace.counts()
    part = first_sequences(trace, cache_rows)
    distances = [d for d in DISTANCES if d < trace.n_layers]
    with ThreadPoolExecutor(cores()) as pool:  # compiled loops, and NumPy for the most part, let others run
        ahead = pool.map(partial(prediction_statistics, trace), distances)
        again = pool.map(partial(reuse, trace), LAGS)
        cache = cache_statistics(trace, part)
    return {
        "rows": trace.n_rows,
        "n_layers": trace.n_layers,
        "n_experts": trace.n_experts,
        "top_k": trace.top_k,
        "sequences": len(trace.sequences),
        "top_half_share": _per_layer([top_half_share(row) for row in counts]),
        "gini": _per_layer([gini(row) for row in counts]),
        "reuse": {str(lag): found for lag, found in zip(LAGS, again, strict=True)},
        "cache_rows": part.n_rows,
        "cache": cache,
        "prediction": {str(d): found for d, found in zip(distances, ahead, strict=True)},
    }


def analyse_phases(trace: RoutingTrace, cache_rows: int = 4000) -> dict[str, dict[str, Any]]:
    """Analyse all rows (``all``) and, where a trace has both phases, its decode rows from a cold start (``decode``)."""
    out = {"all": analyse(trace, cache_rows)}
    if 0 < int((trace.phase == DECODE).sum()) < trace.n_rows:
        out["decode"] = analyse(trace.decode_rows(), cache_rows)
    return out


def first_sequences(trace: RoutingTrace, n_rows: int) -> RoutingTrace:
    """Return the first whole sequences that reach at least ``n_rows`` rows (all of them, if none do)."""
    stop = next((stop for _, stop in trace.sequences if stop >= n_rows), trace.n_rows)
    return trace if stop == trace.n_rows else trace.slice_rows(0, stop)


def top_half_share(counts: NDArray[Any]) -> float | None:
    """Share of selections that the floor(E/2) most used experts take; (E,) counts of one layer."""
    total = counts.sum()
    return float(np.sort(counts)[::-1][: len(counts) // 2].sum() / total) if total else None


def gini(counts: NDArray[Any]) -> float | None:
    """Gini coefficient of (E,) counts of one layer: 0 = uniform; unused experts count as 0."""
    total, n_experts = counts.sum(), len(counts)
    rank = 2 * np.arange(1, n_experts + 1) - n_experts - 1
    return float((rank * np.sort(counts)).sum() / (n_experts * total)) if total else None


def reuse(trace: RoutingTrace, lag: int) -> dict[str, Any]:
    """Share of a row's experts that the row ``lag`` rows before it, in the same sequence and layer, used too.

    Returns
    -------
    dict
        ``micro`` over all layers, and ``per_layer``.
    """
    shared, total = np.zeros(trace.n_layers, np.int64), np.zeros(trace.n_layers, np.int64)
    if lag < trace.n_rows:
        same = trace.seq_id[:-lag] == trace.seq_id[lag:]
        both = trace.present[:-lag] & trace.present[lag:] & same[:, None]
        for layer in range(trace.n_layers):
            rows = np.flatnonzero(both[:, layer])
            before, after = trace.expert_ids[rows, layer], trace.expert_ids[rows + lag, layer]
            shared[layer] = common(before, after, trace.n_experts)
            total[layer] = after.size
    return {"micro": _share(shared.sum(), total.sum()), "per_layer": [_share(a, b) for a, b in zip(shared, total, strict=True)]}


def cache_statistics(trace: RoutingTrace, part: RoutingTrace) -> dict[str, Any]:
    """Hits of every policy at several sizes, over the rows of ``part``, and of LRU over all rows of ``trace``.

    Per-layer caches of floor(E * fraction) slots; ``lru_reset`` starts cold with each sequence, ``static_first_half`` is chosen on
    the first half of the rows and scored on the rest, ``lru_global`` is one cache for all layers. A size below K is None: a set
    would not fit.
    """
    sizes = {f: int(trace.n_experts * f) for f in FRACTIONS}
    fitting = sorted({size for size in sizes.values() if size >= trace.top_k})
    full = lru_hits(trace, fitting) if part is not trace and fitting else {}
    rows = [np.flatnonzero(part.present[:, layer]) for layer in range(part.n_layers)]
    cells = [_cells(part, layer) for layer in range(part.n_layers)]
    coming = [next_uses(c, trace.n_experts) for c in cells]
    new_sequence = np.r_[True, part.seq_id[1:] != part.seq_id[:-1]]
    fresh = [_first_of_each(np.cumsum(new_sequence)[r]) for r in rows]
    counts, half = part.counts(), part.n_rows // 2
    first_half = part.slice_rows(0, half).counts()
    rest = [c[r >= half] for c, r in zip(cells, rows, strict=True)]
    accesses = [c.size for c in cells]
    out: dict[str, Any] = {}
    for fraction, size in sizes.items():
        if size < trace.top_k:
            out[str(fraction)] = None
            continue

        def lru(c: Cells, emptied: NDArray[np.bool_] | None = None, slots: int = size) -> int:
            return int(lru_replay(c, np.zeros(len(c), np.bool_) if emptied is None else emptied, trace.n_experts, slots).sum())

        results = {
            "lru": [lru(c) for c in cells],
            "lru_reset": [lru(c, f) for c, f in zip(cells, fresh, strict=True)],
            "lfu": [int(ranked_replay(LFU, c, n, trace.n_experts, size)) for c, n in zip(cells, coming, strict=True)],
            "belady": [int(ranked_replay(BELADY, c, n, trace.n_experts, size)) for c, n in zip(cells, coming, strict=True)],
            "static": [_static_hits(c, row, size) for c, row in zip(cells, counts, strict=True)],
            "static_first_half": [_static_hits(c, row, size) for c, row in zip(rest, first_half, strict=True)],
        }
        entry: dict[str, Any] = {"slots_per_layer": size}
        for name, hits in results.items():
            entry[name] = _hits(hits, [c.size for c in rest] if name == "static_first_half" else accesses)
        entry["lru_full"] = _hits(full[size], trace.present.sum(axis=0) * trace.top_k) if full else dict(entry["lru"])
        slots = trace.n_layers * size
        shared, total = _global_lru_hits(part, slots), sum(accesses)
        entry["lru_global"] = {"hit_rate": _share(shared, total), "hits": shared, "accesses": total, "slots": slots}
        out[str(fraction)] = entry
    return out


def lru_hits(trace: RoutingTrace, sizes: Sequence[int]) -> dict[int, list[int]]:
    """Count the hits of per-layer LRU caches of several sizes in one pass.

    LRU has the inclusion property (Mattson et al. 1970, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2)),
    and an atomic set keeps it: after a set S a cache of C slots holds S and the C - |S| most recent others, which are the top C
    of one recency stack. So an access hits every cache with more slots than experts that are more recent; those of the same row count
    by id, the largest being the newest. Equal to an ``ExpertPool`` with ``lru``, hit for hit (tests).

    Parameters
    ----------
    trace : RoutingTrace
        All its rows.
    sizes : sequence of int
        Slots per layer, each at least K.

    Returns
    -------
    dict of int to list of int
        Hits per layer, by size.
    """
    if any(size < trace.top_k for size in sizes):
        raise InputError("cache size", expected=f"at least top_k = {trace.top_k} slots per layer", got=str(min(sizes)))
    counts = [stack_depths(_cells(trace, layer), trace.n_experts) for layer in range(trace.n_layers)]
    below = np.cumsum(np.array(counts).reshape(trace.n_layers, trace.n_experts + 1), axis=1)
    return {size: below[:, min(size, trace.n_experts) - 1].tolist() for size in sizes}


def prediction_statistics(trace: RoutingTrace, distance: int) -> dict[str, Any]:
    """Recall of the predictors at one distance, trained on the first half of the sequences (rows, if there is one).

    A test cell (t, m), m >= distance, counts where it, its source and the same layer of the previous row of its sequence are present,
    so that all predictors are judged on the same cells.

    Returns
    -------
    dict
        By predictor ``recall`` and ``per_target_layer`` (layers from ``distance`` on), and ``test_accesses``.
    """
    spans = trace.sequences
    border = spans[len(spans) // 2][0] if len(spans) > 1 else trace.n_rows // 2
    train = trace.slice_rows(0, border)
    follows = np.r_[False, trace.seq_id[1:] == trace.seq_id[:-1]]
    before = np.zeros_like(trace.present)
    before[1:] = trace.present[:-1]
    follows[:border] = False
    test = trace.present.copy()
    test &= before
    test &= follows[:, None]
    test[:, distance:] &= trace.present[:, :-distance]
    begin = max(border - 1, 0)  # only the tested rows are predicted, and the one before them is known
    scored, test = trace.slice_rows(begin, trace.n_rows), test[begin:]
    targets = range(distance, trace.n_layers)
    total = [int(test[:, m].sum()) * trace.top_k for m in targets]
    out: dict[str, Any] = {}
    for name in PREDICTORS_SCORED:
        predictor = make_predictor(name)
        predictor.fit(train)
        predicted = predictor.predict(scored, distance)
        right = [common(predicted[test[:, m], m], scored.expert_ids[test[:, m], m], trace.n_experts) for m in targets]
        shares = [_share(a, b) for a, b in zip(right, total, strict=True)]
        out[name] = {"recall": _share(sum(right), sum(total)), "per_target_layer": shares}
    out["test_accesses"] = sum(total)
    return out


def _cells(trace: RoutingTrace, layer: int) -> Cells:
    """Chosen experts of the present cells of a layer, ascending in each, (R, K)."""
    return np.sort(trace.expert_ids[trace.present[:, layer], layer].astype(np.int64), axis=1)


def _first_of_each(number: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark where a growing number changes, the first included."""
    changes: NDArray[np.bool_] = np.r_[True, number[1:] != number[:-1]][: len(number)]
    return changes


def _static_hits(cells: Cells, counts: NDArray[Any], slots: int) -> int:
    """Accesses to the experts that a static set of the hottest holds."""
    return int(np.isin(cells, hottest(counts[None, :], [1], slots, per_layer=True)).sum())


def _global_lru_hits(trace: RoutingTrace, slots: int) -> int:
    """Hits of one LRU cache over all layers; sets come row by row, layer by layer."""
    keys = np.sort(trace.expert_ids, axis=2).astype(np.int64) + np.arange(trace.n_layers)[:, None] * trace.n_experts
    cells = keys[trace.present]
    return int(lru_replay(cells, np.zeros(len(cells), np.bool_), trace.n_layers * trace.n_experts, slots).sum())


def _share(part: Any, total: Any) -> float | None:
    return float(part / total) if total else None


def _per_layer(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    return {"mean": float(np.mean(known)) if known else None, "per_layer": values}


def _hits(hits: Sequence[int], accesses: Sequence[int] | NDArray[Any]) -> dict[str, Any]:
    total = int(sum(accesses))
    return {"hit_rate": _share(sum(hits), total), "hits": int(sum(hits)), "accesses": total, "hits_per_layer": [int(h) for h in hits]}
