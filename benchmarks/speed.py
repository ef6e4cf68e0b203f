"""How fast the simulator is: planning, pricing and simulating apart, by shape, engine and lanes; how it scales; what it needs.

    python -m benchmarks.speed [--quick] [--profile] [-o json]

Every row runs in a process of its own, on one core, and counts its CPU seconds; peak memory is that process's. Decode of one sequence,
routing drawn from a Zipf law, VRAM over RAM that holds all, a quarter of the experts of each layer in VRAM under LRU, prefetch of
the next layer by co-occurrence. Lanes ``fifo``: fifo lanes, and no channel that more tasks want than it can serve; ``shared``: priority
lanes, and a VRAM that compute alone can saturate, so that copies and compute share it max-min fairly. ``tokens_per_s`` counts
planning, pricing and simulating; predicting and measuring have columns of their own. A first small run loads the compiled code. Rows of
``fast`` are the median of five runs, with the slowest and the fastest beside it, up to 8,000 tokens.

- ``engines``: both engines on one schedule, their CPU time for it (the median of several runs of ``fast``), and whether they agree.
- ``retime``: wall time of 256 hardware variants of one schedule on two cores (the median of three), over the CPU time of one run (the median
  of six); single runs are compared.
- ``slope``: of the logarithm of CPU seconds over that of tokens, each the median of five runs in one process.
- ``profile``: a sampled profile of one run of a given trace by wall clock (``--profile``: that alone, and where it is): how often the
  interpreter itself is at work, NumPy, compiled code, or anything else. It needs py-spy, and leave to watch a process.
- ``replay``: hits alone (``moesim.policies.kernels``): no tasks, no time. Peers that replay caches expert by expert state about 2,000 tokens/s
  at 48 layers x 128 experts, top-8; simulators of whole steps reach about a million tokens/s and see no experts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from moesim import resources
from moesim.cost import CostModel, Costs
from moesim.engines.retime import retime
from moesim.host import collector
from moesim.scenario import Scenario
from moesim.schedule import Schedule
from moesim.simulate import Case, load_engine, load_meter, make_case, simulate
from moesim.timeline import Timeline

SHAPES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b")
MAIN = "qwen3-30b-a3b"
TOKENS = {"des": 16, "fast": 2_000}
SCALES = (1_000, 2_000, 4_000, 8_000)
SLOPE = (1_000, 4_000, 16_000, 64_000)
EXPERTS = (32, 64, 128, 256)
REPEATS = 5
RETIMINGS = 3
LONG = 100_000
PROFILED = 64_000
VARIANTS = 256
SETTLE_S = 3.0  # until py-spy watches
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
    """Time a run, stage by stage: of five runs the one that takes the median, but where one takes seconds."""
    if engine == "fast":
        _stages(bench_case(shape, engine, lanes, 8, experts))
    case = bench_case(shape, engine, lanes, tokens, experts)
    runs = sorted((_stages(case) for _ in range(REPEATS if engine == "fast" and tokens <= max(SCALES) else 1)), key=_seconds)
    spent = runs[len(runs) // 2]
    return {
        "shape": shape, "layers": case.model.n_layers, "experts": case.model.n_experts, "top_k": case.model.top_k, "engine": engine,
        "policy": POLICY, "predictor": PREDICTOR, "tiers": TIERS, "lanes": lanes, "tokens": tokens, **spent,
        "tokens_per_s": tokens / _seconds(spent), "least_tokens_per_s": tokens / _seconds(runs[-1]), "most_tokens_per_s": tokens / _seconds(runs[0]),
        "runs": len(runs), "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "cores": 1,
    }  # fmt: skip


def _stages(case: Case) -> Row:
    """What ``simulate`` does, with a clock at every border."""
    with collector.paused():
        return _clocked(case)


def _clocked(case: Case) -> Row:
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


def run_slope(tokens: int, repeats: int) -> Row:
    """CPU seconds of planning, pricing and simulating, several times over."""
    _stages(bench_case(MAIN, "fast", "fifo", 8))
    case = bench_case(MAIN, "fast", "fifo", tokens)
    seconds = [_seconds(_stages(case)) for _ in range(repeats)]
    return {"median_s": median(seconds), "least_s": min(seconds), "most_s": max(seconds)}


def _planned(lanes: str, tokens: int) -> tuple[Case, Schedule]:
    case = bench_case(MAIN, "fast", lanes, tokens)
    planner = case.planner()
    return case, Schedule(planner.lanes, fragments=list(planner.fragments()))


def _timed(engine: str, schedule: Schedule, costs: list[Costs]) -> tuple[float, Timeline]:
    """CPU seconds that an engine takes for a schedule, and the timeline."""
    state = load_engine(engine)(schedule.lanes)
    at = time.process_time()
    parts = [state.advance(fragment, cost) for fragment, cost in zip(schedule.fragments, costs, strict=True)]
    parts.append(state.finish())
    return time.process_time() - at, Timeline.concat(parts)


def run_engines(lanes: str, tokens: int) -> Row:
    """Both engines on the same schedule."""
    case, schedule = _planned(lanes, tokens)
    costs = [CostModel(case.hardware).costs(fragment) for fragment in schedule.fragments]
    _timed("fast", schedule, costs)
    fast = [_timed("fast", schedule, costs) for _ in range(REPEATS)]
    des_s, timeline = _timed("des", schedule, costs)
    fast_s = median(seconds for seconds, _ in fast)
    equal = all(np.array_equal(getattr(fast[0][1], f.name), getattr(timeline, f.name)) for f in fields(Timeline))
    return {
        "lanes": lanes, "tokens": tokens, "tasks": schedule.n_tasks, "des_s": des_s, "fast_s": fast_s, "ratio": des_s / fast_s, "equal": equal,
    }  # fmt: skip


def run_retime(lanes: str, tokens: int) -> Row:
    """Many variants of one schedule at once, each a little slower than the one before."""
    case, schedule = _planned(lanes, tokens)
    variants = []
    for v in range(VARIANTS):
        prices = CostModel(case.hardware.scaled("pcie_h2d", 1 - v / (2 * VARIANTS)))
        variants.append([prices.costs(fragment) for fragment in schedule.fragments])
    single_s = median(_timed("fast", schedule, variants[0])[0] for _ in range(REPEATS + 1))
    retime(schedule, variants[:2], workers=2)
    runs = []
    for _ in range(RETIMINGS):
        at, cpu = time.perf_counter(), time.process_time()
        found = retime(schedule, variants, workers=2).step_end_ps
        runs.append((time.perf_counter() - at, time.process_time() - cpu))
    wall_s, cpu_s = median(runs)
    last = np.concatenate([fragment.steps[:, 2] for fragment in schedule.fragments])
    equal = all(np.array_equal(found[v], _timed("fast", schedule, variants[v])[1].end_ps[last]) for v in range(0, VARIANTS, 17))
    return {
        "lanes": lanes, "tokens": tokens, "variants": VARIANTS, "cores": 2, "wall_s": wall_s, "cpu_s": cpu_s, "single_s": single_s, "ratio": wall_s / single_s,
        "equal": equal,
    }  # fmt: skip


def run_profile(tokens: int) -> Row:
    """Where a run spends its time by wall clock, as py-spy finds it: shares by what runs at the moment, and the Python functions with most."""
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is None:
        return {"tokens": tokens, "shares": None, "most": {}}
    case = bench_case(MAIN, "fast", "fifo", tokens)
    simulate(case, keep=False)  # loads all compiled code that a run of this length meets; the trace is drawn, and is given from here on
    with tempfile.NamedTemporaryFile() as file:
        command = [found, "record", "--native", "--rate", "100", "--format", "raw", "--output", file.name, "--duration", "600", "--pid"]
        watcher = subprocess.Popen([*command, str(os.getpid())], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(SETTLE_S)
        at = time.perf_counter()
        simulate(case, keep=False)
        wall_s = time.perf_counter() - at
        watcher.send_signal(signal.SIGINT)
        watcher.wait()
        lines = [line.rsplit(" ", 1) for line in Path(file.name).read_text(encoding="utf-8").splitlines()]
    shares = {"interpreted": 0, "numpy": 0, "compiled": 0, "other": 0}
    most: dict[str, int] = {}
    for stack, count in lines:
        running = stack.split(";")[-1]
        python = re.fullmatch(r"(.*) \((.*\.py):\d+\)", running)
        if "run_profile" not in stack or "nanosleep" in running:
            continue
        kind = (
            "interpreted"
            if python or "libpython" in running
            else "numpy"
            if "numpy" in running
            else "compiled"
            if "(?)" in running
            else "other"
        )
        shares[kind] += int(count)
        if python:
            name = f"{'/'.join(Path(python[2]).parts[-2:])} {python[1]}"
            most[name] = most.get(name, 0) + int(count)
    total = sum(shares.values())
    first = sorted(most.items(), key=lambda item: -item[1])[:15]
    return {
        "tokens": tokens, "wall_s": wall_s, "samples": total, "shares": {kind: n / total for kind, n in shares.items()},
        "most": {name: n / total for name, n in first},
    }  # fmt: skip


def run_start(command: list[str]) -> Row:
    """Wall and CPU seconds of a command."""
    at = time.perf_counter()
    subprocess.run([sys.executable, "-m", "moesim", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall_s": time.perf_counter() - at, "cpu_s": usage.ru_utime + usage.ru_stime}


def run_first(tokens: int) -> Row:
    """Wall and CPU seconds of a first run, which compiles."""
    wall, cpu = time.perf_counter(), time.process_time()
    for lanes in ("fifo", "shared"):
        _stages(bench_case(MAIN, "fast", lanes, tokens))
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


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
        out["first_use"] = {name: fresh("first", 16, cache=cache) for name in ("first", "again")}
    out["start_up"] = fresh("start", ["run", "quickstart", "--set", "workload.output_tokens=2"])
    out["engines"] = [fresh("engines", lanes, 128 // share) for lanes in ("fifo", "shared")]
    out["profile"] = fresh("profile", PROFILED // share)
    if not quick:
        out["retime"] = [fresh("retime", lanes, 512) for lanes in ("fifo", "shared")]
        runs = {str(tokens): fresh("slope", tokens, REPEATS) for tokens in SLOPE}
        logs = np.log([[int(tokens), found["median_s"]] for tokens, found in runs.items()])
        out["slope"] = {"exponent": float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]), "runs": runs}
        out["long"] = fresh("run", MAIN, "fast", "fifo", LONG)
    return out


def _seconds(row: Row) -> float:
    return float(row["plan_s"] + row["cost_s"] + row["simulate_s"])


def table(rows: list[Row]) -> str:
    """Rows as text: microseconds a token and stage."""
    lines = [
        f"{'shape':<15}{'L x E, K':>14} {'engine':<7}{'lanes':<7}{'tokens':>7}{'tasks/tok':>10}"
        f"{'plan':>9}{'cost':>8}{'sim':>9}{'measure':>9}{'predict':>9}{'tokens/s':>10}{'least to most':>18}{'peak':>9}"
    ]
    for row in rows:
        each = [f"{row[f'{stage}_s'] / row['tokens'] * 1e6:,.0f}" for stage in ("plan", "cost", "simulate", "measure", "predict")]
        spread = f"{row['least_tokens_per_s']:,.0f} to {row['most_tokens_per_s']:,.0f}" if row["runs"] > 1 else ""
        lines.append(
            f"{row['shape']:<15}{row['layers']} x {row['experts']}, {row['top_k']:<2}".ljust(29) + f" {row['engine']:<7}{row['lanes']:<7}"
            f"{row['tokens']:>7,}{row['tasks'] / row['tokens']:>10,.0f}{each[0]:>9}{each[1]:>8}{each[2]:>9}{each[3]:>9}{each[4]:>9}"
            f"{row['tokens_per_s']:>10,.0f}{spread:>18}{row['peak_rss_bytes'] / 1e6:>6,.0f} MB"
        )
    return "\n".join(lines)


def text(found: dict[str, Any]) -> str:
    """The whole answer; stages are microseconds a token."""
    parts = ["Stages in CPU microseconds a token, one core", table(found["runs"])]
    for row in found["engines"]:
        parts.append(
            f"Engine alone, {row['lanes']} lanes, one schedule of {row['tasks']:,} tasks: des {row['des_s']:.3g} s, fast {row['fast_s']:.3g} s, "
            f"{row['ratio']:.0f} x; {'equal' if row['equal'] else 'NOT EQUAL'}"
        )
    parts += ["\nBy tokens", table(found["scaling"]), "\nBy experts", table(found["experts"]), ""]
    if "slope" in found:
        runs = "; ".join(f"{n}: {r['median_s']:.3g} s ({r['least_s']:.3g} to {r['most_s']:.3g})" for n, r in found["slope"]["runs"].items())
        parts.append(f"CPU seconds grow as tokens to the power {found['slope']['exponent']:.3f}: {runs}")
        long = found["long"]
        parts.append(
            f"{long['tokens']:,} tokens ({long['tasks']:,} tasks): {long['tokens_per_s']:,.0f} tokens/s, {long['peak_rss_bytes'] / 1e9:.2f} GB"
        )
        for row in found["retime"]:
            parts.append(
                f"Re-timing {row['variants']} variants of {row['tokens']} tokens on {row['cores']} cores, {row['lanes']} lanes: {row['wall_s']:.3g} s "
                f"({row['cpu_s']:.3g} s of CPU), "
                f"{row['ratio']:.0f} x one run ({row['single_s']:.3g} s); {'equal' if row['equal'] else 'NOT EQUAL'}"
            )
    replay, first, start = found["replay"], found["first_use"], found["start_up"]
    parts.append(_profile_text(found["profile"]))
    parts.append(f"Replay of hits alone: {replay['tokens_per_s']:,.0f} tokens/s (hit rate {replay['hit_rate']:.3f})")
    seconds = {name: f"{row['wall_s']:.1f} s ({row['cpu_s']:.1f} s of CPU)" for name, row in {**first, "start": start}.items()}
    parts.append(
        f"First use, compiling: {seconds['first']}; again: {seconds['again']}; moesim run quickstart, 2 tokens: {seconds['start']}"
    )
    return "\n".join(parts)


def _profile_text(row: Row) -> str:
    if row["shares"] is None:
        return "Profile: py-spy is not installed"
    shares = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in row["shares"].items())
    return f"Profile of {row['tokens']:,} tokens ({row['wall_s']:.2f} s, {row['samples']} samples): {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, an eighth of the tokens, no slope")
    parser.add_argument("--profile", action="store_true", help="only the share of interpreted Python, and where it is")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        kind, *arguments = json.loads(args.row)
        rows = {
            "run": run_row, "replay": run_replay, "first": run_first, "slope": run_slope, "engines": run_engines, "retime": run_retime,
            "profile": run_profile, "start": run_start,
        }  # fmt: skip
        print(json.dumps(rows[kind](*arguments)))
        return
    if args.profile:
        row = fresh("profile", PROFILED)
        print("\n".join([_profile_text(row), *(f"{100 * share:6.2f} %  {name}" for name, share in row["most"].items())]))
        return
    found = measure(args.quick)
    print(json.dumps(found, indent=1) if args.output == "json" else text(found))


if __name__ == "__main__":
    main()
