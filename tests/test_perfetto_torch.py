"""The exported timeline of a measured run against torch.profiler's own export of the same run: each lane was busy for as long in both.

Every task of the real engine is marked for the profiler, which has a clock and a file of its own. A task lasts longer in our timeline than its
mark, as setting the mark is part of it; so the tolerance is a share of the lane's time and some microseconds a task.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch (pip install 'moesim[validate]')")

from test_real_engine import Bench, case  # noqa: E402

from moesim import perfetto  # noqa: E402
from moesim.engines import real  # noqa: E402

SHARE, MARK_S = 0.02, 40e-6  # what lane sums may differ by: 2 %, and setting a mark for each task


def marked(program: Any) -> None:
    """Let the profiler know of each task by its number."""
    for lane in program.lanes:
        for i, (task, operation) in enumerate(zip(lane.tasks, lane.operations, strict=True)):

            def run(task: int = task, operation: Any = operation) -> Any:
                with torch.profiler.record_function(f"task {task}"):
                    return operation()

            lane.operations[i] = run


def test_lanes_are_busy_as_long_as_the_profiler_says(tmp_path: Path) -> None:
    from torch._C._profiler import _ExperimentalConfig

    it = case(workload={"prompt_tokens": 6, "output_tokens": 64}, prefetch={"predictor": "cooccurrence"})
    bench = Bench(tmp_path)
    program = bench.program(it)
    marked(program)
    real.run(program)  # the first use of anything takes longer
    everything = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everything) as profiler:
        run = real.run(program)
    for reader in bench.readers:
        reader.close()
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())["traceEvents"]
    marks = {e["name"]: e for e in theirs if e.get("ph") == "X" and str(e.get("name")).startswith("task ")}
    assert len(marks) == len(run.timeline)

    document = perfetto.export_pair(it, run.schedule, {"measured": run.timeline})
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    ours: dict[str, float] = defaultdict(float)
    for event in document["traceEvents"]:
        if event["ph"] == "X" and names[event["tid"]] != "steps":
            ours[names[event["tid"]]] += event["dur"] * 1e-6
    assert set(ours) == {lane.name for lane in program.lanes if lane.tasks} >= {"cpu", "ssd"}
    for lane in program.lanes:
        if not lane.tasks:
            continue
        found = [marks[f"task {task}"] for task in lane.tasks]
        assert len({event["tid"] for event in found}) == 1  # one thread serves a lane of width 1
        said = sum(event["dur"] for event in found) * 1e-6
        assert said <= ours[lane.name] <= said * (1 + SHARE) + MARK_S * len(found)
