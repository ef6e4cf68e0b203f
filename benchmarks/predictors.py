"""Recall and precision of every predictor by distance, on real routing traces.

    python -m benchmarks.predictors [--rows 5000] [--threshold 0 0.5] [-o json] [TRACE.npz ...]

Trained on the first half of the sequences; tested on the first ``--rows`` rows of the others (both printed). A test cell (t, m),
m >= distance, counts where it, its source and the same layer of the previous row of its sequence are present, as in
``moesim.trace_stats``. Recall = sum |P & S| / sum |S|; precision = sum |P & S| / sum |P|, the share of prefetched bytes that is used;
P has K experts at threshold 0, and fewer above it. ``gate-lookahead`` is a stated recall, not a measurement: its rows show that the
statement is kept, and for the second, what the lower published recall means.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cache_policies import default_traces
from moesim.policies.predictors import GATE_RECALL, previous_rows, source_cells
from moesim.policies.prefetch import make_predictor
from moesim.trace import RoutingTrace, load_trace
from moesim.trace_stats import DISTANCES

SCORED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("popularity", {}),
    ("previous", {}),
    ("cooccurrence", {}),
    ("two-step", {}),
    ("linear", {}),
    ("gate-lookahead", {}),
    ("gate-lookahead", {"recall": GATE_RECALL["qwen3.6-35b-a3b"]}),
)


def score(train: RoutingTrace, test: RoutingTrace, thresholds: list[float]) -> list[dict[str, Any]]:
    """One record a predictor, distance and threshold."""
    out: list[dict[str, Any]] = []
    before = previous_rows(test, test.expert_ids)[:, :, 0] >= 0
    for name, options in SCORED:
        for threshold in thresholds:
            predictor = make_predictor(name, threshold=threshold, **options)
            predictor.fit(train)
            for distance in (d for d in DISTANCES if d < test.n_layers):
                cells = test.present & before & (source_cells(test, distance)[:, :, 0] >= 0)
                cells[:, :distance] = False
                predicted, actual = predictor.predict(test, distance)[cells], test.expert_ids[cells]
                right = int((predicted[:, :, None] == actual[:, None, :]).sum())
                asked = int((predicted >= 0).sum())
                label = name + "".join(f" {value}" for value in options.values())
                record = {"predictor": label, "distance": distance, "threshold": threshold, "recall": right / actual.size}
                out.append(record | {"precision": right / asked if asked else None, "predicted_per_cell": asked / len(actual)})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--threshold", nargs="+", type=float, default=[0.0, 0.5])
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for path in args.traces or default_traces():
        begin = time.perf_counter()
        train, test = load_trace(path).split(0.5)
        test = test.slice_rows(0, min(args.rows, test.n_rows))
        records = score(train, test, args.threshold)
        results.append({"trace": path.stem, "train_rows": train.n_rows, "test_rows": test.n_rows, "scores": records})
        if args.output == "text":
            _print(f"{path.stem}: trained on {train.n_rows} rows, tested on {test.n_rows}", records)
            print(f"({time.perf_counter() - begin:.0f} s)\n", flush=True)
    if args.output == "json":
        json.dump(results, sys.stdout, indent=1)
        print()


def _print(title: str, records: list[dict[str, Any]]) -> None:
    distances = sorted({record["distance"] for record in records})
    print(title)
    print(f"{'predictor':<22}{'threshold':>9}" + "".join(f"{f'd = {d}: recall precision':>26}" for d in distances))
    for label, threshold in dict.fromkeys((record["predictor"], record["threshold"]) for record in records):
        line = f"{label:<22}{threshold:>9.2f}"
        for record in records:
            if (record["predictor"], record["threshold"]) == (label, threshold):
                precision = "-" if record["precision"] is None else f"{record['precision']:.4f}"
                line += f"{record['recall']:>17.4f}{precision:>9}"
        print(line)


if __name__ == "__main__":
    main()
