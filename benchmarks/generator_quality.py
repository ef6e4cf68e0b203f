"""How well generated routing stands for a model's: fitted on one half of the sequences of a trace, compared with the other half.

    python -m benchmarks.generator_quality [-o json] [--draws N] [--only NAME] [--split SEED] [--fit SEED] [FOLDER]

For each trace the sequences are split at random (by a seed) into halves A and B. The profile, and the exponent of Zipf, come from A
alone. As many rows and sequences as B has are then drawn, N times with different seeds, by each generator. A statistic is within
bounds where it differs from B's by at most max(0.03, 1.25 |A - B|). The figure shown is the mean of the draws; ``draws in bounds``
counts single draws. A trace of one sequence is split by rows and has no bound. What can be asked for is shown by a generator that cannot be
better than the real thing: as many sequences as B has, taken from A with replacement ("A again"), in the mean of as many draws.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from moesim.generate import from_popularity, uniform, zipf_popularity
from moesim.generate.fit import decode_part, fit, statistics
from moesim.generate.like import generate
from moesim.trace import RoutingTrace, load_trace
from moesim.trace_stats import top_half_share

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"
SUITES = ("mmlu_dev", "mmlu_validation", "mmlu_pro_validation", "sorry_bench_base", "Polyglot-or-Not_Fact-Completion")
TRACES = tuple(f"gptoss20b_{suite}.npz" for suite in SUITES) + ("qwen3_30b_a3b_bmoe.npz",)
SPLIT_SEED, FIT_SEED, DRAW_SEED, AGAIN_SEED = 0, 1, 2, 100
GENERATORS = ("like", "zipf", "uniform")


def halves(trace: RoutingTrace, seed: int = SPLIT_SEED) -> tuple[RoutingTrace, RoutingTrace]:
    """Split by whole sequences, drawn at random; one sequence is split by rows."""
    number = len(trace.sequences)
    if number == 1:
        return trace.split(0.5)
    order = np.random.default_rng(seed).permutation(number).tolist()
    return trace.select_sequences(order[: number // 2]), trace.select_sequences(order[number // 2 :])


def again(a: RoutingTrace, number: int, draws: int) -> dict[str, float]:
    """Mean statistics of sequences of A, drawn with replacement."""
    drawn = (np.random.default_rng(AGAIN_SEED + i).integers(len(a.sequences), size=number).tolist() for i in range(draws))
    found = [statistics(a.select_sequences(chosen)) for chosen in drawn]
    return {figure: float(np.mean([it[figure] for it in found])) for figure in found[0]}


def zipf_exponent(share: float, n_layers: int, n_experts: int, top_k: int, seed: int) -> float:
    """Exponent whose drawn top-half share is ``share``, by bisection on draws of 2,000 rows."""
    low, high = 0.0, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        rng = np.random.default_rng(seed)
        drawn = from_popularity(zipf_popularity(n_layers, n_experts, middle, rng), top_k, 2_000, rng).counts()
        found = float(np.mean([top_half_share(row) for row in drawn]))
        low, high = (middle, high) if found < share else (low, middle)
    return (low + high) / 2


def compare(name: str, trace: RoutingTrace, draws: int, split_seed: int = SPLIT_SEED, fit_seed: int = FIT_SEED) -> dict[str, Any]:
    """The table of one trace."""
    trace = decode_part(trace)
    a, b = halves(trace, split_seed)
    began = time.perf_counter()
    profile = fit(a, np.random.default_rng(fit_seed), source=name, progress=progress)
    fitted_s = time.perf_counter() - began
    real = {"A": statistics(a), "B": statistics(b)}
    exponent = zipf_exponent(real["A"]["top-half share"], a.n_layers, a.n_experts, a.top_k, fit_seed)
    lengths = [stop - start for start, stop in b.sequences]
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in GENERATORS}
    generated_s = 0.0
    for seed in range(DRAW_SEED, DRAW_SEED + draws):
        progress(f"{name}: draws", seed - DRAW_SEED + 1, draws)
        began = time.perf_counter()
        like = generate(profile, b.n_rows, np.random.default_rng(seed), lengths=lengths)
        generated_s += time.perf_counter() - began
        found["like"].append(statistics(like))
        if seed == DRAW_SEED:  # independent rows: one draw is as good as five
            rng = np.random.default_rng(seed)
            shape = {"n_sequences": len(lengths)}
            popularity = zipf_popularity(b.n_layers, b.n_experts, exponent, rng)
            found["zipf"].append(statistics(from_popularity(popularity, b.top_k, b.n_rows, rng, **shape)))
            found["uniform"].append(statistics(uniform(b.n_rows, b.n_layers, b.n_experts, b.top_k, rng, **shape)))
    resampled = again(a, len(b.sequences), draws) if len(lengths) > 1 else {}
    rows = []
    for figure, value in real["B"].items():
        other = real["A"].get(figure)
        if other is None:
            continue
        bound = max(0.03, 1.25 * abs(other - value)) if len(lengths) > 1 else None
        row: dict[str, Any] = {"figure": figure, "A": other, "B": value, "bound": bound}
        for kind in GENERATORS:
            values = [draw[figure] for draw in found[kind]]
            row[kind] = float(np.mean(values))
            row[f"{kind} off"] = row[kind] - value
        row["A again off"] = resampled[figure] - value if figure in resampled else None
        row["draws in bounds"] = None if bound is None else sum(abs(draw[figure] - value) <= bound for draw in found["like"])
        rows.append(row)
    return {
        "trace": name,
        "rows": [a.n_rows, b.n_rows],
        "sequences": [len(a.sequences), len(b.sequences)],
        "zipf_exponent": exponent,
        "draws": draws,
        "fit_s": fitted_s,
        "generate_s": generated_s / draws,
        "table": rows,
    }


def text(result: dict[str, Any]) -> str:
    """One trace as a table."""
    head = (
        f"{result['trace']}: A {result['rows'][0]} rows in {result['sequences'][0]} sequences, B {result['rows'][1]} in {result['sequences'][1]}; "
        f"fit {result['fit_s']:.0f} s, draw {result['generate_s']:.1f} s; Zipf exponent {result['zipf_exponent']:.2f}"
    )
    lines = [head, f"{'':33}      A      B  bound   like    off  in bounds   zipf    off  uniform    off"]
    for row in result["table"]:
        bound = "     -" if row["bound"] is None else f"{row['bound']:6.3f}"
        ok = "" if row["bound"] is None else ("yes" if abs(row["like off"]) <= row["bound"] else "NO")
        count = "" if row["bound"] is None else f" {row['draws in bounds']}/{result['draws']}"
        lines.append(
            f"{row['figure']:33} {row['A']:6.3f} {row['B']:6.3f} {bound} {row['like']:6.3f} {row['like off']:+6.3f}  {ok + count:>9} "
            f"{row['zipf']:6.3f} {row['zipf off']:+6.3f}   {row['uniform']:6.3f} {row['uniform off']:+6.3f}"
        )
    bounded = [row for row in result["table"] if row["bound"] is not None]
    if bounded:
        counts = [sum(abs(row[off]) <= row["bound"] for row in bounded) for off in ("like off", "A again off")]
        lines.append(f"in bounds of {len(bounded)}: like {counts[0]}, A again {counts[1]}")
    return "\n".join(lines)


def progress(stage: str, done: int, total: int) -> None:
    """Show where the work stands, on one line of stderr."""
    print(f"\r{stage}: {done}/{total}   ", end="" if done < total else "\n", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of generated routing, see the module's docstring.")
    parser.add_argument("folder", nargs="?", type=Path, default=SHARED, help="where the traces lie")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--only", default="", help="part of a trace's name")
    parser.add_argument("--split", type=int, default=SPLIT_SEED, help="seed of the split into halves")
    parser.add_argument("--fit", type=int, default=FIT_SEED, help="seed of the fit")
    options = parser.parse_args()
    results = []
    for name in TRACES:
        if options.only in name:
            results.append(compare(name, load_trace(options.folder / name), options.draws, options.split, options.fit))
            if options.output == "text":
                print(text(results[-1]) + "\n", flush=True)
    if options.output == "json":
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
