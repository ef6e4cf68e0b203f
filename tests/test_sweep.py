"""Sweeps that run: results of runs of their own, a store that survives, the best point, the front, effects, the command."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweep_cases import write_sweep

from moesim.cli.main import run
from moesim.errors import InputError
from moesim.report import sweep as report_sweep
from moesim.scenario import load_scenario
from moesim.simulate import load_case, make_case, simulate
from moesim.sweep import Sweep, plan_sweep, sweep
from moesim.sweep.pareto import front
from moesim.sweep.record import record
from moesim.sweep.space import assemble, code_identity
from moesim.sweep.store import Row, Store

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def small(folder: Path) -> Sweep:
    """81 points in 9 plans, computed in this process."""
    return sweep(plan_sweep(write_sweep(folder)), workers=1)


def alone(found: Sweep, i: int) -> dict[str, Any]:
    """The record of one point, run by itself from its scenario."""
    space = found.plan.space
    document = assemble(space.base, space.settings(found.points[i]), space.folder)
    from moesim import config
    from moesim.scenario import Scenario

    case = make_case(config.build(Scenario, document), document, space.folder)
    out: dict[str, Any] = json.loads(json.dumps(record(simulate(case))))
    return out


def test_every_point_is_a_run_of_its_own_to_the_bit(small: Sweep) -> None:
    assert (small.n_points, small.n_failed) == (81, 0)
    for i in range(0, small.n_points, 5):
        assert small.rows[i].record == alone(small, i), small.point(i)


def test_points_with_one_plan_are_planned_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moesim import simulate as module

    planned = []
    original = module.Case.planner
    monkeypatch.setattr(module.Case, "planner", lambda case: planned.append(1) or original(case))
    assert sweep(plan_sweep(write_sweep(folder)), workers=1).n_points == 81
    assert len(planned) == 9


def test_a_scaled_channel_is_the_machine_scaled(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, "axes:\n  hardware_scale.ssd: [2]\n  derate: [0.5]\n")
    space = plan_sweep(path).space
    (point,) = space.points()
    document = assemble(space.base, space.settings(point), space.folder)
    from moesim import config
    from moesim.hardware import load_hardware
    from moesim.scenario import Scenario

    case = make_case(config.build(Scenario, document), document, space.folder)
    want = load_hardware("laptop-8gb").scaled("ssd", 2.0).derated(0.5)
    assert case.hardware.model_dump(mode="json") == want.model_dump(mode="json")


def test_best_is_what_brute_force_finds(small: Sweep, folder: Path) -> None:
    """Every point through ``load_case`` with assignments, as one would type them, without any of the sweep's own code."""
    speeds = []
    for point in small.points:
        values = small.plan.space.values(point)
        case = load_case(folder / "scenario.yaml", ("engine=fast", *(f"{path}={v}" for path, v in values.items())))
        speeds.append((simulate(case).as_dict()["metrics"]["decode_tok_s"], point.index))
    best = max(speeds, key=lambda x: (x[0], -x[1]))
    assert small.best is not None and small.points[small.best].index == best[1]
    assert small.rows[small.best].record["metrics"]["decode_tok_s"] == best[0]  # type: ignore[index]


@pytest.mark.nightly
def test_best_of_500_points_is_what_brute_force_finds(tmp_path: Path) -> None:
    axes = """\
axes:
  placement.pools.vram.hold: [2, 3, 4, 5, 6]
  placement.pools.vram.policy: [lru, lfu]
  prefetch.distance: [0, 1]
  io.request: [64 KiB, 128 KiB, 256 KiB, 512 KiB, 1 MiB]
  hardware_set.links.h2d.latency: [2 us, 5 us, 10 us, 20 us, 40 us]
"""
    found = sweep(plan_sweep(write_sweep(tmp_path, axes)))
    speeds = []
    for point in found.points:
        sets = tuple(f"{path}={v}" for path, v in found.plan.space.values(point).items())
        speeds.append(
            simulate(load_case(tmp_path / "scenario.yaml", ("engine=fast", *sets)), keep=False).as_dict()["metrics"]["decode_tok_s"]
        )
    assert len(speeds) == 500 and found.best is not None
    assert found.points[found.best].index == int(np.argmax(speeds))


def test_front_keeps_what_nothing_is_better_than() -> None:
    gains = np.array([[1.0, 5], [2, 4], [2, 3], [0, 9], [2, 4], [1, 4]])
    assert front(gains) == [0, 1, 3, 4]
    rng = np.random.default_rng(0)
    table = rng.integers(0, 6, (200, 3)).astype(float)
    slow = [i for i, a in enumerate(table) if not any((b >= a).all() and (b > a).any() for b in table)]
    assert front(table) == slow
    assert front(np.zeros((0, 2))) == []


def test_effects_are_means_over_the_other_axes(small: Sweep) -> None:
    key = "metrics.decode_tok_s"
    effects = {e["axis"]: e for e in small.effects(key)}
    speeds = np.array([row.record["metrics"]["decode_tok_s"] for row in small.rows])  # type: ignore[index]
    held = np.array([small.plan.space.values(p)["placement.pools.vram.hold"] for p in small.points])
    means = [speeds[held == h].mean() for h in (2, 4, 6)]
    found = effects["placement.pools.vram.hold"]
    assert list(found["means"].values()) == pytest.approx(means)
    assert found["range"] == pytest.approx(max(means) - min(means))
    assert found["share"] == pytest.approx(np.var(means) / speeds.var())
    assert set(effects["prefetch.distance"]["means"]) == {"1", "2"}


def test_constraints_choose_who_may_be_best(folder: Path) -> None:
    free = sweep(plan_sweep(write_sweep(folder)), workers=1)
    assert free.best is not None
    top = free.rows[free.best].record["facts"]["memory_peak_bytes"]  # type: ignore[index]
    bound = sweep(plan_sweep(write_sweep(folder, more=f"constraints: {{max: {{memory: {top - 1}}}}}\n")), workers=1)
    assert bound.best is not None and 0 < len(bound.feasible) < len(free.feasible)
    assert bound.rows[bound.best].record["facts"]["memory_peak_bytes"] < top  # type: ignore[index]


def test_a_limit_on_quality_takes_what_is_known(tmp_path: Path) -> None:
    limit = "constraints: {max: {quality_loss: 2}}\n"
    known = "axes:\n  precision: [bf16, int8, Q8_0]\n"
    found = sweep(plan_sweep(write_sweep(tmp_path, known, limit)), workers=1)
    assert found.feasible == (0,) and found.unknown == {"quality.loss_percent": 2}
    assert "quality_loss is not known for 2 points" in report_sweep.sweep_text(found)
    with pytest.raises(InputError, match="measured or published") as caught:
        plan_sweep(write_sweep(tmp_path, "axes:\n  precision: [int8, Q8_0]\n", limit))
    assert "sweep.yaml:" in str(caught.value) and "moesim quality" in str(caught.value)


FAILING = """\
axes:
  prefetch.distance: [1, 99]
  hardware_set.tiers.vram.capacity.value: [515 MiB, 8 GiB]
"""


def test_a_failing_point_and_memory_that_runs_out_are_results(tmp_path: Path) -> None:
    found = sweep(plan_sweep(write_sweep(tmp_path, FAILING)), workers=1)
    assert [row.status for row in found.rows] == ["oom", "fine", "failed", "failed"]
    assert "prefetch.distance" in found.rows[2].error and found.rows[2].record is None
    assert found.rows[0].record is not None and found.rows[0].record["oom"]["tier"] == "vram"
    data = found.as_dict()
    assert (data["n_points"], data["n_failed"], data["n_out_of_memory"]) == (4, 2, 1)
    assert found.best == 1
    assert "failed (2)" in report_sweep.sweep_text(found)


def test_constraints_are_to_be_relaxed_only_where_there_are_some(tmp_path: Path) -> None:
    axes = "axes:\n  prefetch.distance: [99]\n"
    for limits, said in (("", False), ("constraints: {min: {speed: 1}}\n", True)):
        found = sweep(plan_sweep(write_sweep(tmp_path, axes, limits)), workers=1)
        assert ("relax" in report_sweep.sweep_text(found)) == said


def test_a_store_is_read_back_and_nothing_is_computed_twice(tmp_path: Path) -> None:
    plan = plan_sweep(write_sweep(tmp_path))
    counts: list[dict[str, int]] = []
    with Store(tmp_path / "s.sqlite", code_identity()) as store:
        first = sweep(plan, store, workers=1, counted=lambda c: counts.append(dict(c)))
        text = store.export()
    with Store(tmp_path / "s.sqlite", code_identity()) as store:
        second = sweep(plan, store, workers=1, counted=lambda c: counts.append(dict(c)))
        assert store.export() == text
    assert counts == [{"computed": 81, "found": 0}, {"computed": 0, "found": 81}]
    assert first.as_dict() == second.as_dict()


def test_processes_give_what_one_process_gives(tmp_path: Path, small: Sweep) -> None:
    assert sweep(plan_sweep(write_sweep(tmp_path)), workers=2).rows == small.rows


def test_a_store_refuses_what_it_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_text("no database, but long enough to be looked at as one" * 40, encoding="utf-8")
    with pytest.raises(InputError, match="a file that sweeps can be kept in"):
        Store(path, "c")
    with pytest.raises(InputError, match="a file that sweeps can be kept in"):
        Store(tmp_path / "absent" / "x.sqlite", "c")


def test_a_key_that_is_there_keeps_its_row() -> None:
    with Store(None, "c") as store:
        store.add([Row("k", "fine", "{}", {"a": 1})])
        store.add([Row("k", "failed", "{}", None, "x"), Row("j", "oom", "{}", {"a": 0.1})])
        assert [row.key for row in store.rows({"k", "j"})] == ["j", "k"]
        assert next(store.rows({"k"})).record == {"a": 1}
        assert store.others() == 0


def kill_and_resume(folder: Path, kills: int, jobs: int, seed: int) -> int:
    """Run a sweep that is killed at random times until it ends; return how often it was killed before its end."""
    path, store = write_sweep(folder), folder / "killed.sqlite"
    command = [sys.executable, "-m", "moesim", "sweep", str(path), "--store", str(store), "--jobs", str(jobs), "-o", "json"]
    rng = random.Random(seed)
    killed = 0
    for _ in range(kills):
        before = rows_in(store)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait = rng.random() * 0.4
        while process.poll() is None and rows_in(store) == before:
            time.sleep(0.02)
        time.sleep(wait)
        if process.poll() is None:
            killed += 1
        process.send_signal(signal.SIGKILL) if process.poll() is None else None
        process.wait()
        if rows_in(store) == 81:
            break
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    return killed


def rows_in(store: Path) -> int:
    if not store.exists():
        return 0
    import sqlite3

    try:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
            return int(db.execute("SELECT COUNT(*) FROM points").fetchone()[0])
    except sqlite3.Error:
        return 0


def same_as_uninterrupted(folder: Path) -> bool:
    with Store(folder / "whole.sqlite", code_identity()) as store:
        sweep(plan_sweep(folder / "sweep.yaml"), store, workers=1)
        whole = store.export()
    with Store(folder / "killed.sqlite", code_identity()) as store:
        return store.export() == whole


def test_a_killed_sweep_resumes_to_the_same_store(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=1, jobs=1, seed=0)
    assert same_as_uninterrupted(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_a_sweep_killed_again_and_again_resumes_to_the_same_store(tmp_path: Path, seed: int) -> None:
    kill_and_resume(tmp_path, kills=4, jobs=2, seed=seed)
    assert same_as_uninterrupted(tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, store = write_sweep(tmp_path), tmp_path / "s.sqlite"
    argv = ["sweep", str(path), "--store", str(store), "--jobs", "1"]
    assert run([*argv, "--plot", str(tmp_path / "p.png")]) == 0
    out, err = capsys.readouterr()
    assert "81 points" in out and "best: highest speed" in out and "points/s" in err
    assert max(map(len, out.splitlines())) <= 100
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert run([*argv, "-o", "json"]) == 0
    first, err = capsys.readouterr()
    data = json.loads(first)
    assert {"n_points", "n_failed", "best", "pareto", "sensitivity", "provenance"} <= set(data)
    assert "81 found" in err
    assert run([*argv, "-o", "json"]) == 0
    assert capsys.readouterr().out == first
    assert run([*argv, "-o", "csv"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 82 and rows[0].startswith("point,status,placement.pools.vram.hold")
    assert run([*argv, "-o", "md"]) == 0
    assert capsys.readouterr().out.startswith("# small over scenario.yaml: 81 points")


def test_a_sweep_that_nothing_meets_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(tmp_path, more="constraints: {min: {speed: 1000000}}\n")
    assert run(["sweep", str(path), "--store", str(tmp_path / "s.sqlite"), "--jobs", "1"]) == 3
    assert "no point meets the constraints" in capsys.readouterr().out


def test_the_command_to_look_closer_gives_the_point(tmp_path: Path) -> None:
    axes = """\
axes:
  precision: [fp16, {default: fp16, routed_experts: int4-g128}]
  derate: [0.5, 1.0]
  hardware_scale.ssd: [0.5, 2]
  hardware_set.links.h2d.latency: [5 us]
"""
    found = sweep(plan_sweep(write_sweep(tmp_path, axes)), workers=1)
    for i, row in enumerate(found.rows):
        words = shlex.split(found.command(i))
        assert words[:3] == ["moesim", "run", "scenario.yaml"]
        sets = tuple(word for word in words[3:] if word != "--set")
        assert row.record == json.loads(json.dumps(record(simulate(load_case(tmp_path / "scenario.yaml", sets)))))
        assert row.record["provenance"]["set"] == [it for it in sets if not it.startswith("engine=")] and found.point(i)[
            "command"
        ] == found.command(i)
    assert found.best is not None and load_scenario(tmp_path / "scenario.yaml", sets)[0].hardware_scale == {"ssd": 2}


def test_the_frame_has_a_row_a_point(small: Sweep) -> None:
    frame = small.frame()
    assert len(frame) == 81
    assert list(frame.columns[:3]) == ["point", "status", "placement.pools.vram.hold"]
    assert frame["metrics.decode_tok_s"].max() == small.as_dict()["best"]["goals"]["metrics.decode_tok_s"]


def test_plots_take_axes(small: Sweep) -> None:
    import matplotlib.pyplot as plt

    from moesim.plots import sweep as plots_sweep

    _, ax = plt.subplots()
    assert plots_sweep.pareto_front(small, ax) is ax and ax.get_ylabel() == "speed (tok/s)"
    other = plots_sweep.axis_effects(small)
    assert len(other.patches) == 5
    plt.close("all")
