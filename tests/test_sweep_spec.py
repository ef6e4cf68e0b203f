"""Sweep files: which points they mean, and what is refused before anything runs, with line and fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_cases import write_sweep

from moesim import resources
from moesim.cli.main import run
from moesim.errors import InputError
from moesim.sweep import plan_sweep
from moesim.sweep.paths import put
from moesim.sweep.space import priced_apart


def values(path: Path) -> list[dict[str, object]]:
    space = plan_sweep(path).space
    return [space.values(point) for point in space.points()]


def test_points_stand_in_the_order_of_the_axes(tmp_path: Path) -> None:
    axes = "axes:\n  seed: [3, 1]\n  prefetch.distance: [1, 2]\n"
    assert values(write_sweep(tmp_path, axes)) == [
        {"seed": 3, "prefetch.distance": 1}, {"seed": 3, "prefetch.distance": 2},
        {"seed": 1, "prefetch.distance": 1}, {"seed": 1, "prefetch.distance": 2},
    ]  # fmt: skip


def test_an_axis_whose_condition_does_not_hold_takes_no_part(tmp_path: Path) -> None:
    axes = """\
axes:
  prefetch.predictor: [none, oracle]
  prefetch.distance: {values: [1, 2], when: {prefetch.predictor: oracle}}
  prefetch.threshold: {values: [0.1, 0.2], when: {prefetch.distance: 2}}
"""
    assert [tuple(v.values()) for v in values(write_sweep(tmp_path, axes))] == [
        ("none",), ("oracle", 1), ("oracle", 2, 0.1), ("oracle", 2, 0.2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("workload.output_tokens: {from: 2, to: 8, steps: 4}", [2, 4, 6, 8]),
        ("derate: {from: 0.2, to: 1.0, steps: 3}", [0.2, 0.6, 1.0]),
        ("io.request: {from: 64 KiB, to: 300 KiB, factor: 2}", ["64 KiB", "128 KiB", "256 KiB"]),
        ("hardware_set.links.h2d.latency: {from: 10 us, to: 80 us, factor: 2}", ["10 us", "20 us", "40 us", "80 us"]),
        ("hardware_scale.ssd: {from: 0.5, to: 2, factor: 2}", [0.5, 1.0, 2.0]),
    ],
)
def test_ranges_are_exact(tmp_path: Path, axis: str, expected: list[object]) -> None:
    assert [next(iter(v.values())) for v in values(write_sweep(tmp_path, f"axes:\n  {axis}\n"))] == expected


def test_options_set_several_paths(tmp_path: Path) -> None:
    axes = """\
axes:
  plan:
    options:
      small: {precision: int8, workload.output_tokens: 3}
      large: {precision: {default: fp16, kv: fp16}, placement.pools.vram.hold: 2}
"""
    space = plan_sweep(write_sweep(tmp_path, axes)).space
    first, second = space.points()
    assert [(path, value) for path, value, _ in space.settings(first)] == [("precision", "int8"), ("workload.output_tokens", 3)]
    assert space.values(second) == {"plan": "large"}


@pytest.mark.parametrize(
    ("axes", "line", "words"),
    [
        ("axes:\n  prefetch.distence: [1]\n", 5, 'did you mean "distance"'),
        ("axes:\n  prefetch.distance.deep: [1]\n", 5, "ends at prefetch.distance"),
        ("axes:\n  hardware_set.channels.pci_h2d.bandwidth: [1 GB/s]\n", 5, 'did you mean "pcie_h2d"'),
        ("axes:\n  hardware_set.links.h2d.latancy: [1 us]\n", 5, 'did you mean "latency"'),
        ("axes:\n  hardware_scale.sdd: [1]\n", 5, 'did you mean "ssd"'),
        ("axes:\n  hardware_scale.ssd: [-1]\n", 5, "a factor above 0"),
        ("axes:\n  placement.pools.disk.hold: [1]\n", 5, "a tier: vram, ram, unified"),
        ("axes:\n  prefetch.distance: []\n", 5, "empty axis"),
        ("axes: {}\n", 4, "at least 1"),
        ("axes:\n  prefetch.distance: [1, 2, 1]\n", 5, "each value once"),
        ("axes:\n  prefetch.distance: [1, two]\n", 5, "integer"),
        ("axes:\n  hardware_set.links.h2d.latency: [5]\n", 5, "write the unit"),
        ("axes:\n  prefetch.predictor: [none, oracel]\n", 5, 'did you mean "oracle"'),
        ("axes:\n  precision: [fp16, int5]\n", 5, "format"),
        ("axes:\n  precision: [{default: fp16, routed_expert: int8}]\n", 5, 'did you mean "routed_experts"'),
        ("axes:\n  hardware: [laptop-8bg]\n", 5, 'did you mean "laptop-8gb"'),
        ("axes:\n  model: [tinymo, tinymoe]\n", 5, 'did you mean "tinymoe"'),
        ("axes:\n  placement.pools.vram1.hold: [1, 2]\n", 5, 'did you mean "vram"'),
        ("axes:\n  hardware_set.channels.ssd.bandwidth: [1 GB/s, 1000 MB/s]\n", 5, "which are the same"),
        ("axes:\n  w:\n    options:\n      a: {prefetch.distance: 2}\n      b: {prefetch: {predictor: cooccurrence, distance: 2}}\n", 8, "a and b, which are the same"),
        ("axes:\n  io.request: {from: 1 KiB, to: 4 KB, steps: 2}\n", 5, "same unit"),
        ("axes:\n  io.depth: {from: 1, to: 4}\n", 5, "one of steps or factor"),
        ("axes:\n  io.depth: {from: 4, to: 1, factor: 2}\n", 5, "0 < from < to"),
        ("axes:\n  io.depth: {values: [1], from: 1, to: 2, steps: 2}\n", 5, "exactly one of"),
        ("axes:\n  io.depth: {values: [1], when: {io.layout: merged}}\n", 5, "above"),
        ("axes:\n  io.layout: [merged]\n  io.depth: {values: [1], when: {io.layout: mergd}}\n", 6, 'did you mean "merged"'),
        ("axes:\n  prefetch.distance: [1]\n  prefetch: [{distance: 2}]\n", 6, "paths that axis prefetch.distance does not set"),
        ("axes:\n  io.depth: [1, 2]\n  io.dept: [1]\n", 6, 'did you mean "depth"'),
    ],
)  # fmt: skip
def test_bad_axes_are_refused_at_their_line(tmp_path: Path, axes: str, line: int, words: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_sweep(write_sweep(tmp_path, axes))
    assert words in str(caught.value)
    assert f"sweep.yaml:{line}" in str(caught.value)


@pytest.mark.parametrize(
    ("axes", "wrong"),
    [
        ("axes:\n  hardware: [ref-16gb, laptop-8gb]\n  placement.pools.vram.hold: [1, 2]\n", 2),
        ("axes:\n  placement.pools.vram.hold: [1]\n  hardware: [ref-16gb, laptop-8gb]\n", 1),
        ("axes:\n  hardware: [ref-16gb, laptop-8gb]\n  hardware_set.links.h2d.latency: [5 us, 9 us]\n", 2),
    ],
)
def test_what_some_points_can_take_is_no_fault_of_the_file(tmp_path: Path, axes: str, wrong: int) -> None:
    base = "set: {engine: fast, placement.pools: {}}\n"
    space = plan_sweep(write_sweep(tmp_path, axes, settings=base)).space
    assert sum(space._wrong(point) is not None for point in space.points()) == wrong


def test_options_that_a_condition_tells_apart_may_set_the_same(tmp_path: Path) -> None:
    axes = """\
axes:
  w: {options: {a: {prefetch.distance: 1}, b: {prefetch.distance: 1}}}
  io.depth: {values: [1, 2], when: {w: b}}
"""
    assert len(values(write_sweep(tmp_path, axes))) == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("constraints: {min: {speed: 9}, max: {metrics.decode_tok_s: 3}}\n", "limits that some result can meet"),
        ("constraints: {min: {metrics.decode_toks: 9}}\n", 'did you mean "metrics.decode_tok_s"'),
        ("constraints: {max: {memory: 3 s}}\n", "a size"),
        ("constraints: {max: {speed: 3 s}}\n", "a number"),
        ("constraints: {min: {quality: 0.9}}\n", "a number of a result"),
        ("objectives: {maximise: [metrics]}\n", "a number of a result"),
        ("objectives: {maximise: [speed], minimise: [speed]}\n", "not both"),
        ("objectives: {minimise: [price]}\n", "a machine whose profile states a price"),
        ("constraints: {max: {price: 100}}\n", "drop price here"),
        ("objectives: {maximise: [sped]}\n", 'did you mean "speed"'),
    ],
)
def test_bad_limits_and_objectives_are_refused(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_sweep(write_sweep(tmp_path, more=more))
    assert words in str(caught.value)
    assert "sweep.yaml:" in str(caught.value)


def test_too_many_points_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("io.depth", "io.threads", "prefetch.distance", "seed", "pipeline.queue_depth", "workload.cached_tokens")
    axes = "axes:\n" + "".join(f"  {name}: {{from: 1, to: 100, steps: 100}}\n" for name in names)
    path = write_sweep(tmp_path, axes)
    assert run(["sweep", str(path), "--store", str(tmp_path / "x.sqlite")]) == 2
    err = capsys.readouterr().err
    assert "1,000,000,000,000" in err and "--search" in err and "sweep.yaml:5" in err
    assert not (tmp_path / "x.sqlite").exists()


def test_put_changes_a_copy() -> None:
    data = {"a": {"b": [1, 2]}}
    assert put(data, "a.b.1", 3) == {"a": {"b": [1, 3]}}
    assert put(data, "c.d", 1) == {"a": {"b": [1, 2]}, "c": {"d": 1}}
    assert data == {"a": {"b": [1, 2]}}
    with pytest.raises(InputError, match="an index below 2"):
        put(data, "a.b.2", 3)


def test_points_that_differ_in_prices_alone_share_a_plan(tmp_path: Path) -> None:
    axes = """\
axes:
  hardware_set.tiers.vram.capacity.value: [7 GiB, 8 GiB]
  hardware_set.links.h2d.latency: [5 us, 9 us]
  hardware_set.devices.gpu.peak.fp16: [9 TFLOP/s, 20 TFLOP/s]
  derate: [0.5, 1.0]
"""
    space = plan_sweep(write_sweep(tmp_path, axes)).space
    found = [space.resolve(point) for point in space.points()]
    assert len({it.key for it in found}) == 16
    assert len({it.plan_key for it in found}) == 2


def test_what_prices_a_task_is_no_part_of_the_plan_and_all_else_is() -> None:
    from moesim.hardware import load_hardware

    seen = str(priced_apart(load_hardware("laptop-8gb")))
    assert "capacity" in seen and "'source': 'ram'" in seen
    for price in ("bandwidth", "latency", "launch", "efficiency", "FLOP"):
        assert price not in seen.replace("source", ""), price


@pytest.mark.parametrize("name", resources.names("scenarios/sweeps"))
def test_bundled_sweeps_are_sound(name: str) -> None:
    plan = plan_sweep(name)
    assert plan.spec.name == name and plan.spec.description
    assert sum(1 for _ in plan.space.points()) >= 100
