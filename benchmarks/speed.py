"""How fast the simulator is: planning, pricing and simulating apart, by shape, engine and lanes; how it scales; what it needs.

    python -m benchmarks.speed [--quick] [-o json]

Every row runs in a process of its own, on one core, and counts its CPU seconds; peak memory is that process's. Decode of one sequence,
routing drawn from a Zipf law, VRAM over RAM that holds all, a quarter of the experts of each layer in VRAM under LRU, prefetch of
the next layer by co-occurrence. Lanes ``fifo``: fifo lanes, and no channel that more tasks want than it can serve; ``shared``: priority
lanes, and a VRAM that compute alone can saturate, so that copies and compute share it max-min fairly. ``tokens_per_s`` counts
planning, pricing and simulating; predicting and measuring have columns of their own. A first small run loads the compiled code.

``replay`` rows count hits alone (``moesim.policies.kernels``): no tasks, no time. Peers that replay caches expert by expert state about
2,000 tokens/s at 48 layers x 128 experts, top-8; simulators of whole steps reach about a million tokens/s and see no experts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moesim import resources
from moesim.cost import CostModel
from moesim.scenario import Scenario
from moesim.simulate import Case, load_engine, load_meter, make_case

SHAPES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b")
MAIN = "qwen3-30b-a3b"
TOKENS = {"des": 16, "fast": 2_000}
SCALES = (1_000, 2_000, 4_000, 8_000)
SLOPE = (1_000, 4_000, 16_000, 64_000)
EXPERTS = (32, 64, 128, 256)
REPEATS = 5
POLICY, PREDICTOR, TIERS = "lru 25 %", "cooccurrence", ["vram", "ram"]
Row = dict[str, Any]


def bench_case(shape: str, engine: str, lanes: str, tokens: int, experts: int = 0) -> Case:
    """A case of a bundled model, with another number of experts if one is given, on a machine that holds any of them."""
    model = shape
    if experts:
        spec = yaml.safe_load(resources.find("models", shape).read_text(encoding="utf-8"))
        spec.pop("published", None)
        spec["experts"]["n_experts"] = experts
        path = Path(tempfile.mkdtemp()) / "model.yaml"
        path.write_text(yaml.safe_dump(spec), encoding="utf-8")
        model = str(path)
    changes: dict[str, Any] = {"tiers": {tier: {"capacity": {"value": "4 TiB"}} for tier in TIERS}}
    if lanes == "shared":
        changes["devices"] = {"gpu": {"memory_efficiency": {"value": 1.0}}}
    scenario = {
        "name": "speed", "model": model, "precision": "bf16", "hardware": "desktop-24gb", "hardware_set": changes,
        "trace": {"generate": "zipf"}, "workload": {"output_tokens": tokens},
        "placement": {"pools": {"vram": {"hold": "25 %", "policy": "lru"}, "ram": {"hold": "all"}}},
        "prefetch": {"predictor": PREDICTOR, "distance": 1}, "lanes": "priority" if lanes == "shared" else "fifo", "engine": engine,
    }  # fmt: skip
    return make_case(Scenario.model_validate(scenario))


def run_row(shape: str, engine: str, lanes: str, tokens: int, experts: int = 0) -> Row:
    """Time one run, stage by stage."""
    if engine == "fast":
        _stages(bench_case(shape, engine, lanes, 8, experts))
    case = bench_case(shape, engine, lanes, tokens, experts)
    spent = _stages(case)
    seconds = sum(spent[f"{stage}_s"] for stage in ("plan", "cost", "simulate"))
    return {
        "shape": shape, "layers": case.model.n_layers, "experts": case.model.n_experts, "top_k": case.model.top_k, "engine": engine,
        "policy": POLICY, "predictor": PREDICTOR, "tiers": TIERS, "lanes": lanes, "tokens": tokens, **spent,
        "tokens_per_s": tokens / seconds, "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "cores": 1,
    }  # fmt: skip


def _stages(case: Case) -> Row:
    clock = time.process_time
    _ = case.routing
    at = clock()
    planner = case.planner()
    spent = {"predict_s": clock() - at, "plan_s": 0.0, "cost_s": 0.0, "simulate_s": 0.0, "measure_s": 0.0}
    prices, engine, meter = CostModel(case.hardware), load_engine(case.engine)(planner.lanes), load_meter(case, planner)
    at = clock()
    for fragment in planner.fragments():
        planned = clock()
        costs = prices.costs(fragment)
        priced = clock()
        ended = engine.advance(fragment, costs)
        timed = clock()
        meter.add(fragment, costs, ended)
        spent["plan_s"] += planned - at
        spent["cost_s"] += priced - planned
        spent["simulate_s"] += timed - priced
        at = clock()
        spent["measure_s"] += at - timed
    ended = engine.finish()
    meter.finish(ended)
    spent["measure_s"] += clock() - at
    return spent | {"tasks": meter.n_tasks}


def run_replay(tokens: int) -> Row:
    """Time the replay of hits alone, over the same routing."""
    from moesim.policies.kernels import lru_replay

    case = bench_case(MAIN, "fast", "fifo", tokens)
    ids = np.sort(case.routing.used.expert_ids[:tokens], axis=2)
    cells = [np.ascontiguousarray(ids[:, layer]) for layer in range(ids.shape[1])]
    fresh = np.zeros(tokens, np.bool_)
    lru_replay(cells[0][:4], fresh[:4], case.model.n_experts, case.model.n_experts // 4)
    at = time.process_time()
    hits = sum(int(lru_replay(c, fresh, case.model.n_experts, case.model.n_experts // 4).sum()) for c in cells)
    return {
        "shape": MAIN, "engine": "replay", "policy": POLICY, "predictor": "none", "tiers": TIERS[:1], "lanes": "none", "tokens": tokens,
        "tokens_per_s": tokens / (time.process_time() - at), "hit_rate": hits / ids.size, "cores": 1,
    }  # fmt: skip


def run_first(tokens: int) -> Row:
    """CPU seconds of a first run, which compiles, and of the same run again."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    began = usage.ru_utime + usage.ru_stime
    for lanes in ("fifo", "shared"):
        _stages(bench_case(MAIN, "fast", lanes, tokens))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": usage.ru_utime + usage.ru_stime - began}


def fresh(kind: str, *arguments: Any, cache: str = "") -> Row:
    """Run one row in a fresh process with one thread; return what it printed."""
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if cache:
        environment["NUMBA_CACHE_DIR"] = cache
    command = [sys.executable, "-m", "benchmarks.speed", "--row", json.dumps([kind, *arguments])]
    print(f"{kind} {' '.join(map(str, arguments))}", file=sys.stderr, flush=True)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: Row = json.loads(done.stdout)
    return found


def measure(quick: bool) -> dict[str, Any]:
    """All rows; ``quick`` leaves out the long ones."""
    share = 8 if quick else 1
    out: dict[str, Any] = {"runs": [], "scaling": [], "experts": []}
    for shape in (MAIN,) if quick else SHAPES:
        for lanes in ("fifo", "shared"):
            for engine, tokens in TOKENS.items():
                out["runs"].append(fresh("run", shape, engine, lanes, max(tokens // share, 4)))
    out["scaling"] = [fresh("run", MAIN, "fast", "fifo", tokens // share) for tokens in SCALES]
    out["experts"] = [fresh("run", MAIN, "fast", "fifo", TOKENS["fast"] // share, experts) for experts in EXPERTS]
    out["replay"] = fresh("replay", TOKENS["fast"])
    with tempfile.TemporaryDirectory() as cache:
        out["first_use"] = {name: fresh("first", 16, cache=cache)["cpu_s"] for name in ("first_cpu_s", "again_cpu_s")}
    if not quick:
        medians = {}
        for tokens in SLOPE:
            seconds = [_seconds(fresh("run", MAIN, "fast", "fifo", tokens)) for _ in range(REPEATS)]
            medians[str(tokens)] = {"median_s": float(np.median(seconds)), "least_s": min(seconds), "most_s": max(seconds)}
        logs = np.log([[int(tokens), found["median_s"]] for tokens, found in medians.items()])
        out["slope"] = {"exponent": float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]), "runs": medians}
    return out


def _seconds(row: Row) -> float:
    return float(row["plan_s"] + row["cost_s"] + row["simulate_s"])


def table(rows: list[Row]) -> str:
    """Rows as text: microseconds a token and stage."""
    lines = [
        f"{'shape':<15}{'L x E, K':>14} {'engine':<7}{'lanes':<7}{'tokens':>7}{'tasks/tok':>10}"
        f"{'plan':>9}{'cost':>8}{'sim':>9}{'measure':>9}{'predict':>9}{'tokens/s':>10}{'peak':>9}"
    ]
    for row in rows:
        each = [f"{row[f'{stage}_s'] / row['tokens'] * 1e6:,.0f}" for stage in ("plan", "cost", "simulate", "measure", "predict")]
        lines.append(
            f"{row['shape']:<15}{row['layers']} x {row['experts']}, {row['top_k']:<2}".ljust(29) + f" {row['engine']:<7}{row['lanes']:<7}"
            f"{row['tokens']:>7,}{row['tasks'] / row['tokens']:>10,.0f}{each[0]:>9}{each[1]:>8}{each[2]:>9}{each[3]:>9}{each[4]:>9}"
            f"{row['tokens_per_s']:>10,.0f}{row['peak_rss_bytes'] / 1e6:>6,.0f} MB"
        )
    return "\n".join(lines)


def text(found: dict[str, Any]) -> str:
    """The whole answer; stages are microseconds a token."""
    parts = ["Stages in CPU microseconds a token, one core", table(found["runs"])]
    ratios = []
    for fast in (row for row in found["runs"] if row["engine"] == "fast"):
        des = next(r for r in found["runs"] if (r["shape"], r["lanes"], r["engine"]) == (fast["shape"], fast["lanes"], "des"))
        ratios.append(f"{fast['shape']} {fast['lanes']} {fast['tokens_per_s'] / des['tokens_per_s']:,.0f}")
    parts.append("fast over des: " + "; ".join(ratios))
    parts += ["\nBy tokens", table(found["scaling"]), "\nBy experts", table(found["experts"])]
    if "slope" in found:
        runs = "; ".join(f"{n}: {r['median_s']:.3g} s ({r['least_s']:.3g} to {r['most_s']:.3g})" for n, r in found["slope"]["runs"].items())
        parts.append(f"\nCPU seconds grow as tokens to the power {found['slope']['exponent']:.3f}: {runs}")
    replay, first = found["replay"], found["first_use"]
    parts.append(f"\nReplay of hits alone: {replay['tokens_per_s']:,.0f} tokens/s (hit rate {replay['hit_rate']:.3f})")
    parts.append(f"First use, compiling: {first['first_cpu_s']:.1f} s of CPU; again: {first['again_cpu_s']:.1f} s")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, an eighth of the tokens, no slope")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        kind, *arguments = json.loads(args.row)
        print(json.dumps({"run": run_row, "replay": run_replay, "first": run_first}[kind](*arguments)))
        return
    found = measure(args.quick)
    print(json.dumps(found, indent=1) if args.output == "json" else text(found))


if __name__ == "__main__":
    main()
