"""How near the real engine is to its limits: reads against fio, compute against the sum of its kernels.

    python -m benchmarks.real_engine [--repeats 5] [--stores FOLDER] [-o json]

- *reads*: a run in which every expert is read, one layer ahead, so that the drive sets the pace; bytes over the time from the first read to the
  last, against what fio reads at random from the same file with the same request size and depth. Runs and fio alternate.
- *compute*: a run with every expert in memory; its length against the sum of the operations alone.

The machine should be idle. fio must be installed (Debian package fio).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from moesim import config, resources
from moesim.engines.real import run
from moesim.expert_store import ExpertStore
from moesim.host.awake import cores_awake
from moesim.scenario import Scenario
from moesim.schedule import Kind
from moesim.simulate import make_case, simulate
from moesim.validate.case import RealCase, Stores, prepare

READS = ("placement.pools.ram={hold: none, policy: static}", "prefetch={predictor: oracle, distance: 1}", "precision.routed_experts=int8")
COMPUTE = ("placement.pools.ram={hold: all}",)
FIO_S = 4


def prepared(settings: tuple[str, ...], stores: Stores) -> tuple[RealCase, ExpertStore]:
    """A case of the validation base with some settings changed, ready to run."""
    base = resources.folder("scenarios") / "validation"
    document = config.read_yaml(base / "base.yaml").set(settings)
    case = make_case(config.build(Scenario, document), document, base)
    store = stores.get(case)
    return prepare(case, simulate(case), store), store


def read_rate(real: RealCase) -> float:
    """Bytes per second of one run, from the first read to the last."""
    ended = run(real.program)
    kind = np.concatenate([f.kind for f in ended.schedule.fragments])
    loads = kind == Kind.LOAD
    span = ended.timeline.end_ps[loads].max() - ended.timeline.start_ps[loads].min()
    return ended.lane_bytes["ssd"] / (float(span) * 1e-12)


def fio_rate(path: Path, request: int, depth: int) -> float:
    """Bytes per second that fio reads from a file."""
    command = ["fio", "--name=reads", f"--filename={path}", "--readonly", "--rw=randread", f"--bs={request}", f"--iodepth={depth}", "--direct=1",
               "--ioengine=libaio", f"--runtime={FIO_S}", "--time_based", "--output-format=json"]  # fmt: skip
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(found["jobs"][0]["read"]["bw_bytes"])


def compute_overhead(real: RealCase) -> float:
    """Length of one run over the sum of its operations, less 1."""
    ended = run(real.program)
    spent = int((ended.timeline.end_ps - ended.timeline.start_ps).sum())
    return ended.timeline.makespan_ps / spent - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stores", type=Path, default=None)
    parser.add_argument("-o", choices=("text", "json"), default="text")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed")
    rows = []
    with Stores(options.stores) as stores, cores_awake():
        for request, depth in ((1 << 20, 1), (1 << 20, 4), (128 << 10, 4)):
            real, store = prepared((*READS, f"io.request={request} B", f"io.depth={depth}"), stores)
            with real:
                run(real.program)
                pairs = [(read_rate(real), fio_rate(store.path, request, depth)) for _ in range(options.repeats)]
            ratios = [mine / theirs for mine, theirs in pairs]
            rows.append({"what": f"reads of {request >> 10} KiB at depth {depth} over fio", "median": statistics.median(ratios),
                         "low": min(ratios), "high": max(ratios), "bytes_per_s": statistics.median(m for m, _ in pairs)})  # fmt: skip
        real, _ = prepared(COMPUTE, stores)
        with real:
            run(real.program)
            over = [compute_overhead(real) for _ in range(options.repeats)]
        rows.append(
            {"what": "compute over the sum of its kernels, less 1", "median": statistics.median(over), "low": min(over), "high": max(over)}
        )
    if options.o == "json":
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        rate = f"  ({row['bytes_per_s'] / 1e9:.2f} GB/s)" if "bytes_per_s" in row else ""
        print(f"{row['what']:48s} {row['median']:6.3f}  ({row['low']:.3f} to {row['high']:.3f}){rate}")


if __name__ == "__main__":
    main()
