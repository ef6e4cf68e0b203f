"""How fast a sweep is: points per second of a space of qwen3-30b's shape, 256 decode tokens, five axes, two of them hardware alone.

    python -m benchmarks.sweep [--points 10000] [--tokens 256] [--jobs 2] [--cluster] [--plan-axes-only] [-o json]

The whole space has 100 plans x 100 machines. ``--points`` takes the first so many in steps of a hundred (whole plans). ``--cluster`` runs
them on as many Dask workers of one thread on loopback as there are jobs, in turn with the run on processes, compares the results and prints
the overhead: the median of three pairs, and the least and most. ``--plan-axes-only`` varies nothing but what plans differ in (100 plans x 10
seeds): points that share nothing. Targets: 10,000 points in less than 600 s on two cores; less than 10 % overhead where a point takes 50 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from moesim.sweep import Plan, Sweep, plan_sweep, sweep
from moesim.sweep.run import Runner, on_cluster, on_cores

SPACE = """\
name: benchmark
base: qwen3-30b-desktop
set: {engine: fast, workload.output_tokens: %d}
axes:
  placement.pools.vram.hold: [16, 24, 32, 36, 40, 44, 48, 52, 56, 60]
  placement.pools.vram.policy: [lru, lfu]
  prefetch.distance: [0, 1, 2, 3, 4]
  hardware_scale.pcie_h2d: {from: 0.25, to: 2.5, steps: 10}
  hardware_set.devices.gpu.launch: {from: 2 us, to: 20 us, steps: 10}
"""
PAIRS = 3


def plan_of(points: int, tokens: int, spread: bool, folder: Path) -> Plan:
    """Return a plan whose grid is cut to ``points``; with ``spread`` its points share no schedule."""
    text = SPACE % tokens
    if spread:
        text = "\n".join([*(line for line in text.splitlines() if "hardware_" not in line), "  seed: {from: 1, to: 10, steps: 10}"])
    path = folder / "benchmark.yaml"
    path.write_text(text, encoding="utf-8")
    plan = plan_sweep(path)
    every = plan.space.points
    kept = list(every())[:points]
    plan.space.points = lambda limit=None: iter(kept)  # type: ignore[method-assign]
    return plan


def measure(plan: Plan, runner: Runner, jobs: int) -> tuple[Sweep, float]:
    """Run once in memory; return the sweep and the seconds it took."""
    began = time.perf_counter()
    found = sweep(plan, runner=runner, workers=jobs)
    return found, time.perf_counter() - began


def cluster_overhead(plan: Plan, jobs: int, cores: Runner) -> dict[str, Any]:
    """Run on workers of a Dask scheduler on loopback and on processes in turn, and compare."""
    import dask
    from distributed import LocalCluster

    dask.config.set({"distributed.worker.profile.enabled": False})  # as docs/sweeps.md says
    ratios, seconds, identical = [], [], True
    with LocalCluster(n_workers=jobs, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0", silence_logs=50) as cluster:
        runner = on_cluster(cluster.scheduler_address)
        measure(plan_of_first(plan, 2 * jobs), runner, jobs)  # workers have imported everything
        for _ in range(PAIRS):
            alone, alone_s = measure(plan, cores, jobs)
            found, wall_s = measure(plan, runner, jobs)
            identical = identical and [row.record for row in found.rows] == [row.record for row in alone.rows]
            ratios.append(wall_s / alone_s - 1)
            seconds.append(wall_s)
    return {
        "cluster_s": median(seconds), "overhead": median(ratios), "least": min(ratios), "most": max(ratios), "identical": identical,
    }  # fmt: skip


def plan_of_first(plan: Plan, n: int) -> Plan:
    """Return the same plan with its first points alone."""
    import copy

    space = copy.copy(plan.space)
    kept = list(plan.space.points())[:n]
    space.points = lambda limit=None: iter(kept)  # type: ignore[method-assign]
    return Plan(plan.spec, space, plan.objectives, plan.lower, plan.upper)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--plan-axes-only", action="store_true")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        plan = plan_of(args.points, args.tokens, args.plan_axes_only, Path(folder))
        runner = on_cores(args.jobs)
        measure(plan_of_first(plan, 2 * args.jobs), runner, args.jobs)  # processes are up, code is compiled
        found, wall_s = measure(plan, runner, args.jobs)
        data: dict[str, Any] = {
            "points": found.n_points,
            "failed": found.n_failed,
            "jobs": args.jobs,
            "tokens": args.tokens,
            "wall_s": wall_s,
            "points_per_s": found.n_points / wall_s,
        }
        if args.cluster:
            data |= cluster_overhead(plan, args.jobs, runner)
    print(json.dumps(data, indent=2) if args.output == "json" else "\n".join(f"{k:<14}{v}" for k, v in data.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
