"""Hit rate of every cache policy by capacity, on real routing traces, with Belady's bound beside it.

    python -m benchmarks.cache_policies [--rows 2000] [--scope layer|global] [-o json] [TRACE.npz ...]

Rows: the first whole sequences until at least ``--rows`` rows are reached (printed with each table). Accesses in token order, layer by
layer, one atomic set of K experts each; cold start; every expert takes one slot. Scope ``layer``: a cache of floor(share x E) slots per
layer; ``global``: one of L x floor(share x E) slots for all. ``static`` is the best static set of these very rows, preloaded, so it
knows the future as Belady's rule does. With equal sizes ``cost-aware`` is LRU; it is listed to show it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from moesim.policies.cache import ExpertPool, future_uses, hottest
from moesim.policies.eviction import CACHE_POLICIES, make_policy
from moesim.trace import RoutingTrace, load_trace
from moesim.trace_stats import FRACTIONS, first_sequences

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "traces"
Sets = list[tuple[int, list[int]]]


def default_traces() -> list[Path]:
    """The shared gpt-oss traces, where they are present, and tinymoe."""
    return [path for path in (*sorted(SHARED.glob("gptoss20b_*.npz")), ROOT / "traces/tinymoe/tinymoe.npz") if path.is_file()]


def hit_rate(name: str, caches: list[Sets], slots: int) -> float:
    """Share of accesses that hit, over caches of ``slots`` slots each."""
    hits = total = 0
    for sets in caches:
        pool = ExpertPool(slots, lambda _key: 1, make_policy(name, future_uses(sets) if name == "belady" else None), name)
        if not pool.policy.admits:
            counts = np.bincount([key for _, keys in sets for key in keys])
            pool.preload(hottest(counts[None, :], [1], slots, per_layer=True))
        for now, keys in sets:
            hits += len(pool.access(keys, now).hits)
            total += len(keys)
    return hits / total


def measure(trace: RoutingTrace, scope: str) -> dict[str, dict[str, float | None]]:
    """Hit rate by policy and capacity share; None where a set does not fit."""
    keys = trace.expert_ids.astype(np.int64) + np.arange(trace.n_layers)[:, None] * trace.n_experts
    per_layer = scope == "layer"
    groups = [[layer] for layer in range(trace.n_layers)] if per_layer else [list(range(trace.n_layers))]
    caches = [
        [(t * trace.n_layers + m, keys[t, m].tolist()) for t in range(trace.n_rows) for m in group if trace.present[t, m]]
        for group in groups
    ]
    out: dict[str, dict[str, float | None]] = {}
    for name in CACHE_POLICIES:
        out[name] = {}
        for fraction in FRACTIONS:
            slots = int(trace.n_experts * fraction) * (1 if per_layer else trace.n_layers)
            out[name][str(fraction)] = hit_rate(name, caches, slots) if slots >= trace.top_k else None
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--scope", choices=("layer", "global"), default="layer")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for path in args.traces or default_traces():
        begin = time.perf_counter()
        part = first_sequences(load_trace(path), args.rows)
        rates = measure(part, args.scope)
        facts = {"trace": path.stem, "rows": part.n_rows, "sequences": len(part.sequences), "scope": args.scope}
        results.append({**facts, "n_layers": part.n_layers, "n_experts": part.n_experts, "top_k": part.top_k, "hit_rate": rates})
        if args.output == "text":
            shape = f"L={part.n_layers} E={part.n_experts} K={part.top_k}"
            print(f"{path.stem}: {part.n_rows} rows, {len(part.sequences)} sequences, {shape}, scope {args.scope}: hit rate")
            print(f"{'policy':<14}" + "".join(f"{100 * fraction:>9.1f} %" for fraction in FRACTIONS))
            for name, by_share in rates.items():
                print(f"{name:<14}" + "".join(f"{'-' if rate is None else format(rate, '.4f'):>11}" for rate in by_share.values()))
            print(f"({time.perf_counter() - begin:.0f} s)\n", flush=True)
    if args.output == "json":
        json.dump(results, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
