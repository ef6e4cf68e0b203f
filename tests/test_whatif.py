"""What-if against closed forms: elasticities of pure runs are 1 and 0, intervals are those of the range, changes can be had again."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from planner_cases import machine, model, trace

from moesim import metrics
from moesim.cli.main import run
from moesim.config import Document, assignment, command
from moesim.errors import InputError
from moesim.hardware import Figure, Rate, load_hardware
from moesim.hardware.parts import times
from moesim.report import whatif as report_whatif
from moesim.report.whatif import whatif_json, whatif_text
from moesim.simulate import load_case, simulate
from moesim.trace import save_trace
from moesim.whatif import ceilings, whatif
from moesim.whatif.curves import Point, _knees, curve
from moesim.whatif.figures import RANGES, figure_range, find_knob, knobs, turn
from moesim.whatif.replay import Replay, speed_of
from moesim.whatif.uncertainty import effects, interval
from moesim.whatif.upgrades import attempt, changes

LAYERS, EXPERT, RATE = 4, 1000, 5e6  # bytes of an expert and layer; bytes/s that reads of such experts attain


def scenario(folder: Path, *, compute: bool, io: bool, **settings: Any) -> Path:
    """A scenario file of four layers of one expert each: with or without time for compute, with or without reads from the drive."""
    on = machine(None, launch="0 s")
    fast = "1 PB/s"
    on["channels"]["unified"] = {"bandwidth": fast}
    on["storage"]["ssd"]["curve"] = [
        {"request": "1 kB", "depth": 1, "bandwidth": "5 MB/s"},
        {"request": "10 kB", "depth": 1, "bandwidth": "5 MB/s"},
    ]
    for device in on["devices"].values():
        device["peak"] = {name: "2 MFLOP/s" if compute else "1000000 TFLOP/s" for name in device["peak"]}
    ids = [[(t + layer) % 4 for layer in range(LAYERS)] for t in range(9)]
    (folder / "model.yaml").write_text(yaml.safe_dump(model(LAYERS)))
    (folder / "machine.yaml").write_text(yaml.safe_dump(on, sort_keys=False))
    save_trace(trace(ids), folder / "trace.npz")
    data = {
        "name": "bench", "model": "model.yaml", "hardware": "machine.yaml", "precision": {"default": "raw-int8", "kv": "raw-int8"},
        "trace": {"source": "trace.npz", "train_fraction": 0.0}, "workload": {"output_tokens": 9}, "memory": {"workspace": "0 B"},
        "placement": {"pools": {"unified": {"hold": "none" if io else "all"}}}, "io": {"depth": 1}, **settings,
    }  # fmt: skip
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def elasticities(path: Path) -> dict[str, float]:
    return {e.knob.name: e.elasticity for e in effects(Replay(load_case(path)), sizes=False)}


def test_io_bound_speed_is_proportional_to_the_drive_alone(tmp_path: Path) -> None:
    path = scenario(tmp_path, compute=False, io=True)
    assert speed_of(simulate(load_case(path), keep=False)) == pytest.approx(RATE / (LAYERS * EXPERT), rel=1e-6)
    found = elasticities(path)
    assert found.pop("channels.ssd.bandwidth") == pytest.approx(1, abs=1e-6)
    assert set(found) > {"channels.unified.bandwidth", "devices.gpu.peak", "storage.ssd.latency"}
    assert all(abs(e) < 1e-6 for e in found.values())


def test_compute_bound_speed_is_proportional_to_the_peak_alone(tmp_path: Path) -> None:
    found = elasticities(scenario(tmp_path, compute=True, io=False))
    assert found.pop("devices.gpu.peak") == pytest.approx(1, abs=1e-6)
    assert found.pop("devices.gpu.compute_efficiency") == pytest.approx(1, abs=1e-6)  # a share at 1, which has room below only
    assert all(abs(e) < 1e-6 for e in found.values())


def times_of(path: Path) -> tuple[float, float]:
    """Seconds of compute and of reads per token of a run that overlaps neither."""
    replay = Replay(load_case(path))
    read = LAYERS * EXPERT / RATE
    return 1 / replay.speed - read, read


def test_mixed_elasticities_are_the_shares_of_time(tmp_path: Path) -> None:
    path = scenario(tmp_path, compute=True, io=True)
    compute, read = times_of(path)
    found = elasticities(path)
    assert found["channels.ssd.bandwidth"] == pytest.approx(read / (compute + read), abs=1e-4)
    assert found["devices.gpu.peak"] == pytest.approx(compute / (compute + read), abs=1e-4)


def test_elasticity_equals_the_finite_difference_of_whole_runs(tmp_path: Path) -> None:
    case = load_case(scenario(tmp_path, compute=True, io=True))
    replay = Replay(case)
    for effect in effects(replay, sizes=False):
        up = min(1.01, effect.knob.most)
        low, high = (replay.again(_turned(replay, effect.knob, f)) for f in (0.99, up))
        assert effect.elasticity == pytest.approx(math.log(high / low) / math.log(up / 0.99), abs=1e-12)


def _turned(replay: Replay, knob: Any, factor: float) -> Any:
    from moesim.whatif.figures import turned

    return turned(replay.case, knob, factor)


def test_retimed_speed_is_the_metric() -> None:
    case = load_case("quickstart", ("engine=fast", "workload.output_tokens=8"))
    replay = Replay(case)
    result = simulate(case, keep=False)
    assert replay.speeds([case.hardware]) == [result.as_dict()["metrics"]["decode_tok_s"]]
    prefill = load_case("quickstart", ("engine=fast", "workload.output_tokens=0"))
    assert speed_of(simulate(prefill, keep=False)) == metrics.latency(simulate(prefill, keep=False).meter)["prefill_tok_s"]  # type: ignore[arg-type]


def test_the_interval_is_that_of_the_only_range_that_matters(tmp_path: Path) -> None:
    replay = Replay(load_case(scenario(tmp_path, compute=False, io=True)))
    found = interval(replay, effects(replay, sizes=False), 1000, 0)
    width = RANGES["assumed"]
    for got, quantile in ((found.low, 0.1), (found.median, 0.5), (found.high, 0.9)):
        assert got / replay.speed == pytest.approx(1 - width + 2 * width * quantile, abs=2e-3)
    assert found.shares["channels.ssd.bandwidth"] == pytest.approx(1, abs=1e-6)
    assert found.ranks["channels.ssd.bandwidth"] == pytest.approx(1)
    assert found == interval(replay, effects(replay, sizes=False), 1000, 0)


def test_a_stated_range_takes_the_place_of_the_basis(tmp_path: Path) -> None:
    figure = Figure[Rate].model_validate({"value": "10 GB/s", "low": "9 GB/s", "high": "12 GB/s"})
    assert figure_range(figure) == (0.9, 1.2)
    assert figure_range(times(figure, 2.0)) == (0.9, 1.2)
    assert Figure[Rate].model_validate(figure.model_dump(mode="json")) == figure
    assert "low" not in Figure[Rate].model_validate("10 GB/s").model_dump(mode="json")
    path = scenario(tmp_path, compute=False, io=True)
    data = yaml.safe_load((tmp_path / "machine.yaml").read_text())
    for point in data["storage"]["ssd"]["curve"]:
        point["bandwidth"] = {"value": point["bandwidth"], "low": "4.5 MB/s", "high": "6 MB/s"}
    data["channels"]["ssd"]["bandwidth"] = {"value": "20 MB/s", "basis": "spec", "source": "test"}
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    knob = find_knob(load_case(path), "ssd.bandwidth")
    assert (knob.low, knob.high) == (0.9, 1.2)


@pytest.mark.parametrize("ends", [{"low": "11 GB/s"}, {"high": "9 GB/s"}])
def test_a_range_without_its_value_is_refused(ends: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="a range with the value"):
        Figure[Rate].model_validate({"value": "10 GB/s", **ends})


def test_every_knob_turns_its_figures_and_nothing_else() -> None:
    case = load_case("gpt-oss-20b-laptop", ("trace={generate: uniform}",))
    for knob in knobs(case):
        if knob.name.startswith("memory."):
            continue
        part, item, _ = knob.name.split(".", 2)
        after = turn(case.hardware, knob, 2.0)
        assert after != case.hardware
        for other in ("tiers", "channels", "devices", "links", "storage"):
            before, now = getattr(case.hardware, other), getattr(after, other)
            changed = {name for name in before if before[name] != now[name]}
            if other == part:
                assert changed == {item}
            elif part != "channels":
                assert not changed


def test_knees_lie_where_compute_and_reads_balance(tmp_path: Path) -> None:
    path = scenario(tmp_path, compute=True, io=True)
    compute, read = times_of(path)
    balance = 20e6 * read / compute  # the channel is 20 MB/s, and what is read through it scales with it
    replay = Replay(load_case(path))
    found = curve(replay, f"ssd.bandwidth={balance / 10e6:.6f}..{balance * 10 / 1e6:.6f}MB/s", 21)
    assert found.log and found.now == 20e6
    slope = next(k for k in found.knees if k.why == "elasticity falls below 0.5")
    assert slope.value == pytest.approx(balance, rel=0.02)
    lane = next(k for k in found.knees if k.why == "ssd gives way to gpu")
    assert lane.value == pytest.approx(balance, rel=0.15)  # a step of the grid is a fourth


def test_a_switch_varies_over_whole_numbers(tmp_path: Path) -> None:
    replay = Replay(load_case(scenario(tmp_path, compute=True, io=True)))
    found = curve(replay, "placement.pools.unified.hold=1..4", 9)
    assert [p.value for p in found.points] == [1, 2, 3, 4]
    speeds = [p.speed for p in found.points]
    assert speeds == sorted(speeds) and speeds[0] < speeds[-1]


@pytest.mark.parametrize(
    "text", ["ssd.bandwidth", "ssd.bandwidth=1..2", "ssd.bandwidth=2..1 GB/s", "ssd.bandwith=1..2GB/s", "prefetch.distance=0..4GB", "=1..2"]
)
def test_bad_ranges_are_refused(tmp_path: Path, text: str) -> None:
    replay = Replay(load_case(scenario(tmp_path, compute=False, io=True)))
    with pytest.raises(InputError):
        curve(replay, text, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ssd.engines.mmap.efficiency=0.5..1.9", "a share of at most 1"),
        ("prefetch.predictor=1..3", "takes whole numbers"),
        ("ssd.bandwith=1..2GB/s", 'did you mean "ssd.bandwidth"'),
        ("prefetch.distance=-1..3", "FROM of at least 0"),
    ],
)
def test_what_is_wrong_with_a_range_is_said_with_its_path(tmp_path: Path, text: str, words: str) -> None:
    replay = Replay(load_case(scenario(tmp_path, compute=False, io=True)))
    with pytest.raises(InputError) as caught:
        curve(replay, text, 3)
    said = str(caught.value)
    assert words in said and "--vary" in said and text.partition("=")[0] in said


def test_a_flat_curve_has_no_knee_and_whole_numbers_stay_whole(tmp_path: Path) -> None:
    points = [Point(x, 1 + 1e-4 * x, lane) for x, lane in ((1.0, "a"), (2.0, "b"), (3.0, "a"))]
    assert not _knees(points) and _knees([replace(p, speed=p.value) for p in points])
    assert report_whatif.size(3000, "") == "3000"


def test_every_change_can_be_had_again_by_its_settings(tmp_path: Path) -> None:
    path = scenario(tmp_path, compute=True, io=True)
    case = load_case(path, ("engine=fast",))
    tried = [attempt(case, change) for change in changes(case)]
    worked = [o for o in tried if math.isfinite(o.speed)]
    assert len(worked) >= 5
    for outcome in worked:
        again = simulate(load_case(path, ("engine=fast", *outcome.assignments)), keep=False)
        assert speed_of(again) == outcome.speed, outcome.change.name
    assert all(o.problem for o in tried if not math.isfinite(o.speed))


def test_a_scale_is_a_setting_like_any_other(tmp_path: Path) -> None:
    path = scenario(tmp_path, compute=False, io=True)
    case = load_case(path, ("hardware_scale.ssd=2",))
    assert case.hardware == load_case(path).hardware.scaled("ssd", 2)
    assert simulate(case).as_dict()["provenance"]["set"] == ["hardware_scale.ssd=2"]
    double = next(c for c in changes(case) if c.name == "2 x ssd speed")
    assert double.settings == (("hardware_scale.ssd", 4.0),)  # of what it is
    with pytest.raises(InputError, match='hardware_scale.sdd.*did you mean "ssd"'):
        load_case(path, ("hardware_scale.sdd=2",))
    with pytest.raises(InputError, match="a factor above 0"):
        load_case(path, ("hardware_scale.ssd=0",))


def test_sites_are_switches_where_both_can_compute() -> None:
    settings = ("trace={generate: uniform}", "workload={output_tokens: 4}", "engine=fast", "prefetch={predictor: none}")
    case = load_case("gpt-oss-20b-laptop", settings)
    tried = {c.settings[0][1]: attempt(case, c).speed for c in changes(case) if c.settings and c.settings[0][0] == "placement.site"}
    assert set(tried) == {"in-place", "hybrid"} and all(map(math.isfinite, tried.values()))
    assert not any(c.settings and c.settings[0][0] == "placement.site" for c in changes(load_case("quickstart")))


def test_a_drive_twice_as_fast_doubles_an_io_bound_run(tmp_path: Path) -> None:
    case = load_case(scenario(tmp_path, compute=False, io=True), ("engine=fast",))
    double = next(c for c in changes(case) if c.name == "2 x ssd speed")
    assert attempt(case, double).speed == pytest.approx(2 * speed_of(simulate(case, keep=False)), rel=1e-6)


def test_the_ceiling_is_what_the_other_lanes_leave(tmp_path: Path) -> None:
    path = scenario(tmp_path, compute=True, io=True)
    compute, read = times_of(path)
    replay = Replay(load_case(path))
    found = {c.lane: c.speed for c in ceilings(replay, replay.result.as_dict())}
    assert found["ssd"] == pytest.approx(1 / compute, rel=1e-4)
    assert found["gpu"] == pytest.approx(1 / read, rel=1e-4)


def test_a_lane_that_alone_limits_has_no_ceiling(tmp_path: Path) -> None:
    path = scenario(tmp_path, compute=False, io=True)
    answer = whatif(load_case(path), str(path), draws=0, quick=True)
    assert [(c.lane, math.isnan(c.speed)) for c in answer.ceilings if c.share > 0.999] == [("ssd", True)]
    assert "nothing else that is modelled" in whatif_text(answer) and "beyond what else is modelled" in whatif_text(answer)
    assert json.loads(whatif_json(answer))["ceilings"][0]["speed_tok_s"] is None


def test_a_second_gpu_is_tried_where_the_program_can_place_layers_on_it() -> None:
    settings = ("trace={generate: uniform}", "workload={output_tokens: 4}", "engine=fast", "prefetch={predictor: none}")
    case = load_case("gpt-oss-20b-laptop", settings)
    second = next(c for c in changes(case) if c.name.startswith("a second GPU"))
    outcome = attempt(case, second)
    assert outcome.speed > speed_of(simulate(case, keep=False))  # twice the room for experts
    unified = load_case("quickstart")
    assert "not modelled" in next(c for c in changes(unified) if c.name.startswith("a second GPU")).why_not


def test_a_run_that_does_not_fit_still_shows_what_would_help(tmp_path: Path) -> None:
    path = scenario(tmp_path, compute=True, io=False)
    data = yaml.safe_load((tmp_path / "machine.yaml").read_text())
    data["tiers"]["unified"]["capacity"] = "9000 B"
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    answer = whatif(load_case(path), str(path), draws=0)
    assert answer.result.oom is not None and not answer.effects
    assert any(math.isfinite(o.speed) and o.change.group == "buy" for o in answer.outcomes)


def test_assignments_read_back() -> None:
    for value in (
        1.0,
        1e-7,
        0.6,
        "no",
        "paged",
        "4 kB",
        {"a.b": [1, True, None, "x y", "1.5", "a: b", "\u00e9 \U0001f600"]},
        12,
        ["5 us, or"],
    ):
        document = Document({"x": {"y": 0}}, "s").set([assignment("x.y", value)])
        assert document.data == {"x": {"y": value}} and document.assignments == (assignment("x.y", value),)


def test_commands_survive_the_shell() -> None:
    text = command("my file.yaml", ('hardware="a + b"', "precision={default: int8}"))
    assert shlex.split(text) == ["moesim", "run", "my file.yaml", "--set", 'hardware="a + b"', "--set", "precision={default: int8}"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = scenario(tmp_path, compute=True, io=True), tmp_path / "w.png"
    arguments = ["whatif", str(path), "--draws", "8", "--vary", "ssd.bandwidth=1..64MB/s", "--points", "4"]
    assert run([*arguments, "-o", "json", "--plot", str(picture)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) >= {"speed_tok_s", "bottleneck", "ceilings", "elasticities", "interval", "changes", "curves", "provenance"}
    assert data["interval"]["low_tok_s"] <= data["interval"]["median_tok_s"] <= data["interval"]["high_tok_s"]
    assert picture.stat().st_size > 1000
    for way in ("text", "md", "csv"):
        assert run([*arguments, "-o", way]) == 0
        assert "channels.ssd.bandwidth" in capsys.readouterr().out
    assert run(["whatif", str(path), "--quick", "--draws", "8"]) == 0
    assert "to buy" not in capsys.readouterr().out
    assert run(["whatif", str(path), "--vary", "nothing=1..2"]) == 2


def test_profiles_round_trip_with_the_new_fields() -> None:
    before = load_hardware("desktop-24gb")
    assert type(before).model_validate(before.model_dump(mode="json")) == before
    assert np.isfinite(before.channel_capacities()["ram"])
