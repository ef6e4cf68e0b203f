"""Make the bundled routing profiles: one fitted to traces, the others of published figures and counts.

    python -m benchmarks.bundle_profiles [--only NAME] [FOLDER]

gpt-oss-20b is fitted to all its public traces. Of the other models no trace is at hand that is long enough, so their profiles hold popularity
curves by rank (from counts, never the counts themselves) and four aims: reuse at lag 1, 8 and 64 and next-layer recall. An aim that nobody
published is ``assumed``: it takes the same part of the way from independent rows to perfect repetition as gpt-oss-20b takes.
Signal, mix and repeat are then moved until a drawn trace meets the aims; the figures written say what it met.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.generator_quality import SHARED, SUITES, progress
from moesim.generate import popularity_from_counts_csv
from moesim.generate.bundled import find_like
from moesim.generate.facts import Facts, expand
from moesim.generate.fit import fit
from moesim.generate.like import generate
from moesim.generate.routing_profile import Figure, save_like
from moesim.trace import RoutingTrace, load_trace
from moesim.trace_stats import prediction_statistics, reuse, top_half_share

FOLDER = Path(__file__).resolve().parents[1] / "moesim" / "generate" / "profiles"
ANALOGY = "assumed: as far above independent rows as gpt-oss-20b's traces are"
INTERP = "github:MarmikChaudhari/moe-interp counts, 7 corpora (shared/traces/PUBLISHED.md)"
MOE_TRACE = "gajsanders/moe-trace, findings 006 and 007 (shared/traces/PUBLISHED.md)"
MIXTRAL = (
    "Mixtral paper, table 5: either choice shared with the next token 46.5/62.3/52.9 %, random 46 %; here the mean, as a share of slots"
)
BIGMOE = "Qwen3-30B-A3B trace of BigMoeOnEdge (128 decode rows, top 6 of 8): ratio to its lag 1"


def pooled() -> RoutingTrace:
    """All gpt-oss-20b traces as one."""
    traces = [load_trace(SHARED / f"gptoss20b_{suite}.npz") for suite in SUITES]
    first = np.cumsum([0, *[len(trace.sequences) for trace in traces]])
    numbers = [np.repeat(np.arange(len(t.sequences)), [b - a for a, b in t.sequences]) + at for t, at in zip(traces, first, strict=False)]
    join = [np.concatenate([getattr(trace, name) for trace in traces]) for name in ("expert_ids", "position", "phase")]
    return RoutingTrace(
        join[0], None, np.concatenate(numbers).astype(np.int32), join[1], join[2], {"model": "gpt-oss-20b", "n_experts": 32}
    )


def curve_of_half(n_experts: int, share: float) -> list[list[float]]:
    """One exponential curve whose first half of the ranks takes ``share``."""
    rate = 2 * np.log(share / (1 - share)) / n_experts
    curve = np.exp(-rate * np.arange(n_experts))
    return [(curve / curve.sum()).tolist()]


def by_rank(counts: NDArray[Any]) -> list[list[float]]:
    """(L, E) counts as falling shares."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.sort(shares, axis=1)[:, ::-1].tolist()


def csv_counts(name: str, model: str, datasets: list[str]) -> NDArray[Any]:
    return np.sum([popularity_from_counts_csv(SHARED / name, model, dataset) for dataset in datasets], axis=0)


def cases() -> dict[str, dict[str, Any]]:
    """Shape, curves, published aims and sources of each model."""
    more = "expert_counts_mixtral_gemma.csv"
    mmlu = ["college_computer_science", "college_medicine", "high_school_biology", "high_school_mathematics", "high_school_us_history"]
    mixtral = csv_counts(more, "mistralai/Mixtral-8x7B-v0.1", [f"mmlu_{name}" for name in (*mmlu, "international_law", "machine_learning")])
    olmoe = csv_counts("expert_counts.csv", "allenai/OLMoE-1B-7B-0924", ["arxiv", "book", "c4", "github", "wikipedia"])
    qwen3 = csv_counts("expert_counts.csv", "Qwen/Qwen3-30B-A3B", ["decode tokens of the mbolt profile (75773)"])
    gemma = csv_counts(more, "google/gemma-4-26B-A4B-it (Q6_K)", ["representative_conversation"])
    small = np.array(by_rank(pooled().counts())).mean(axis=0)
    wide = np.exp(np.interp((np.arange(128) + 0.5) / 128, (np.arange(32) + 0.5) / 32, np.log(np.maximum(small, 1e-6))))
    slots = float(np.mean([0.465, 0.623, 0.529])) / 0.464 * 0.25
    return {
        "gpt-oss-120b": {
            "shape": (36, 4),
            "curves": [(wide / wide.sum()).tolist()],
            "curve_source": ("assumed", "mean curve of gpt-oss-20b's traces, stretched from 32 ranks to 128"),
        },
        "qwen3-30b-a3b": {
            "shape": (48, 8),
            "curves": by_rank(qwen3),
            "curve_source": ("measured", "github:doramirdor/mbolt@e7e9dbf770b6 counts, 75,773 decode tokens"),
            "aims": {
                1: (0.427, "published", MOE_TRACE),
                8: (0.427 * 0.267 / 0.380, "assumed", BIGMOE),
                64: (0.427 * 0.243 / 0.380, "assumed", BIGMOE),
            },
        },
        "mixtral-8x7b": {
            "shape": (32, 2),
            "curves": by_rank(mixtral),
            "curve_source": ("measured", "github:efeslab/fiddler@5e5ed673f3a1 counts, base model, 7 MMLU subjects"),
            "aims": {1: (slots, "published", MIXTRAL)},
        },
        "olmoe": {
            "shape": (16, 8),
            "curves": by_rank(olmoe),
            "curve_source": (
                "measured",
                "github:allenai/OLMoE@357454f4f647 counts of layers 0, 7 and 15, 5 corpora; other layers take the curve of one of these",
            ),
        },
        "qwen1.5-moe": {
            "shape": (24, 4),
            "curves": curve_of_half(60, 0.605),
            "curve_source": ("published", f"top-half share .55 to .66, here .605; {INTERP}; exponential form assumed"),
        },
        "deepseek-moe-16b": {
            "shape": (27, 6),
            "curves": curve_of_half(64, 0.66),
            "curve_source": ("published", f"top-half share .57 to .75, here .66; {INTERP}; exponential form assumed"),
        },
        "gemma-4-26b-a4b": {
            "shape": (30, 8),
            "curves": by_rank(gemma),
            "curve_source": ("measured", "github:crankysmh47/Expertflow@b6b5f45b72d7 counts, representative_conversation"),
        },
    }


def independent(curves: list[list[float]], k: int) -> tuple[float, float]:
    """Reuse of independent rows, and recall of the K most popular."""
    chance = np.minimum(k * np.array(curves), 1.0)
    return float((chance**2).sum(axis=1).mean() / k), float(chance[:, :k].sum(axis=1).mean() / k)


def make(name: str, case: dict[str, Any], like: dict[str, float]) -> Facts:
    """Facts whose drawn trace meets the aims; ``like`` holds gpt-oss-20b's way from independence to repetition."""
    (n_layers, k), curves = case["shape"], [[round(x, 5) for x in curve] for curve in case["curves"]]
    base, top = independent(curves, k)
    aims = {lag: (base + like[f"reuse {lag}"] * (1 - base), "assumed", ANALOGY) for lag in (1, 8, 64)} | case.get("aims", {})
    if (
        "aims" in case and 8 not in case["aims"]
    ):  # a published lag 1 bounds the others: keep gpt-oss-20b's ratio of what is above independence
        for lag in (8, 64):
            value = base + max(0.0, aims[1][0] - base) * like[f"reuse {lag}"] / like["reuse 1"]
            aims[lag] = (value, "assumed", "assumed: above independent rows by the same part of lag 1 as in gpt-oss-20b's traces")
    recall = top + like["recall"] * (1 - top)
    basis, where = case["curve_source"]
    facts = Facts(
        name,
        "published figures and counts, see figures",
        n_layers,
        k,
        6,
        1,
        tuple(map(tuple, curves)),
        3.0,
        0.1,
        (0.3, 0.05, 0.1, 0.05, 0.5),
    )
    n_sequences, length = (60, 130) if len(curves[0]) * n_layers < 2000 else (30, 100)
    rounds = 14
    for done in range(rounds):
        progress(name, done + 1, rounds)
        trace = generate(expand(facts), n_sequences * length, np.random.default_rng(done), n_sequences=n_sequences)
        found = {lag: float(reuse(trace, lag)["micro"]) for lag in (1, 8, 64)}
        met = float(prediction_statistics(trace, 1)["cooccurrence"]["recall"])
        if done == rounds - 1:
            break
        off = {lag: aims[lag][0] - found[lag] for lag in found}
        mix = np.array(facts.mix)
        mix[0] = np.clip(mix[0] + off[64], 0.02, 0.9)
        mix[2] = np.clip(mix[2] + off[8] - off[64], 0.0, 0.4)
        mix[3] = np.clip(mix[3] + 0.5 * (off[1] - off[8]), 0.0, 0.4)
        mix[4] = 0.0
        mix[4] = max(0.0, 1 - mix.sum())
        repeat = float(np.clip(facts.repeat + 0.7 * (off[1] - off[8]), 0, 0.6))
        signal = float(np.clip(facts.signal * np.exp(1.2 * (recall - met)), 0.3, 8))
        mix = np.round(mix / mix.sum(), 4)
        mix[4 if mix[4] > 0.01 else 0] += 1 - mix.sum()
        facts = replace(facts, signal=round(signal, 3), repeat=round(repeat, 3), mix=tuple(float(round(x, 4)) for x in mix))
    drawn = float(np.mean([top_half_share(row) for row in trace.counts()]))
    half = float(np.mean([sum(curve[: len(curve) // 2]) for curve in curves]))
    figures = [Figure("top-half share", round(half, 4), basis, f"{where}; a drawn trace has {drawn:.3f}")]
    for lag, (value, kind, source) in aims.items():
        figures.append(Figure(f"reuse at lag {lag}", round(value, 4), kind, f"{source}; a drawn trace has {found[lag]:.3f}"))
    figures.append(Figure("co-occurrence recall, distance 1", round(recall, 4), "assumed", f"{ANALOGY}; a drawn trace has {met:.3f}"))
    for what, number in (("signal", facts.signal), ("repeat", facts.repeat), *((f"mix {i}", x) for i, x in enumerate(facts.mix))):
        figures.append(Figure(what, number, "assumed", "set so that a drawn trace meets the figures above"))
    notes = ("which experts are hot, and which go together, is invented", "prefill is assumed to be like decode")
    return replace(facts, figures=tuple(figures), notes=notes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the bundled routing profiles.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.only in ("", "gpt-oss-20b"):
        source = "github:AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting@72b368f6, 5 suites, Apache-2.0"
        save_like(fit(pooled(), np.random.default_rng(0), source=source, progress=progress), options.folder / "gpt-oss-20b.json")
    trace = pooled()
    base, top = independent(by_rank(trace.counts()), 4)
    figure = {f.name: f.value for f in find_like(str(options.folder / "gpt-oss-20b.json")).figures}
    like = {f"reuse {lag}": (figure[f"reuse at lag {lag}"] - base) / (1 - base) for lag in (1, 8, 64)}
    like["recall"] = (figure["co-occurrence recall, distance 1"] - top) / (1 - top)
    print(like, file=sys.stderr)
    for name, case in cases().items():
        if options.only in ("", name):
            facts = make(name, case, like)
            (options.folder / f"{name}.json").write_text(json.dumps(facts.as_dict(), separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
