"""How long reading a million token-layer rows takes, in every text format that `moesim trace import` knows.

    python -m benchmarks.trace_reading [--rows 1000000] [-o json]

A random trace of 48 layers, 128 experts, top-8 is written by the test writers and read back with the format recognised by content; the
figures are wall and CPU seconds of reading alone. What is read must equal what was written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from moesim.trace import RoutingTrace
from moesim.trace_files import import_trace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import trace_writers as writers  # noqa: E402

TEXT = ("bigmoeonedge", "llama_long", "llama_pairs", "llama_rows", "llama_steps", "eval_callback", "vllm_jsonl", "stratamoe", "policylang")
LAYERS, EXPERTS, TOP_K = 48, 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="token-layer rows")
    parser.add_argument("--only", choices=TEXT, help="one format")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    decode = max(options.rows // LAYERS - 64, 64)
    trace = writers.make(layers=LAYERS, experts=EXPERTS, k=TOP_K, sequences=1, prompt=64, decode=decode, weights=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in [options.only] if options.only else TEXT:
            path = Path(folder) / name
            # a dump of llama-eval-callback is whole only where it was told to print whole tensors
            how = writers.eval_callback(trace, path, limit=64) if name == "eval_callback" else getattr(writers, name)(trace, path)
            wall, cpu = time.perf_counter(), time.process_time()
            found = import_trace(path, "auto", how)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            same = isinstance(found, RoutingTrace) and np.array_equal(
                np.sort(found.expert_ids, 2)[-decode:], np.sort(trace.expert_ids, 2)[-decode:]
            )
            row = {
                "format": name,
                "rows": trace.n_rows * LAYERS,
                "file_bytes": path.stat().st_size,
                "wall_s": wall,
                "cpu_s": cpu,
                "equal": same,
            }
            rows.append(row)
            path.unlink()
            if options.output == "text":
                print(
                    f"{name:14s} {row['rows']:>9,} rows {row['file_bytes'] / 1e6:8.0f} MB  {wall:6.1f} s wall {cpu:6.1f} s CPU  equal: {same}",
                    flush=True,
                )
    if options.output == "json":
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
