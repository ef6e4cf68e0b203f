"""Energy adds up: joules from the timeline by hand, watts at one instant, batteries; and figures that are null where watts are not stated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planner_cases import case, machine, model, trace
from timeline_program import program

from moesim.energy import PowerMeter, summary
from moesim.hardware import HardwareProfile
from moesim.report import energy as energy_text
from moesim.schedule import Kind
from moesim.simulate import Result, simulate
from moesim.timeline import Timeline

WATTS = {"gpu": (1.0, 8.0), "npu": (0.5, 6.0), "cpu": (0.25, 10.0)}


def powered(base: str | None = "3 W", battery: str | None = "20 Wh", without: str = "") -> dict[str, Any]:
    on = machine(None, npu=True)
    for name, (idle, active) in WATTS.items():
        if name != without:
            on["devices"][name] |= {"idle_power": f"{idle} W", "active_power": {"value": f"{active} W", "basis": "spec", "source": "test"}}
    return on | ({"base_power": base} if base else {}) | ({"battery": battery} if battery else {})


def run(on: dict[str, Any], **settings: Any) -> Result:
    """Two sequences in two micro-batches: GPU and NPU work at once."""
    ids = [[layer % 4 for layer in range(3)]] * 8
    it = case(trace(ids, seq=[0] * 4 + [1] * 4, prompt=2), of=model(3), on=on, pools={"unified": {"hold": 2, "policy": "lru"}},
              placement={"experts": "npu"}, workload={"batch": 2, "prompt_tokens": 2, "output_tokens": 2},
              pipeline={"micro_batches": 2}, **settings)  # fmt: skip
    return simulate(it)


def intervals(result: Result, device: str) -> list[tuple[int, int]]:
    lane = [lane.name for lane in result.tasks.lanes].index(device)
    mine = result.tasks.lane == lane
    return list(zip(result.tasks.start[mine].tolist(), result.tasks.end[mine].tolist(), strict=True))


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_joules_from_the_timeline_by_hand(engine: str) -> None:
    result = run(powered(), engine=engine)
    found = result.as_dict()["energy"]
    whole = result.tasks.makespan_ps * 1e-12
    busy = {name: sum(end - start for start, end in intervals(result, name)) * 1e-12 for name in ("gpu", "npu")} | {"cpu": 0.0}
    assert busy["gpu"] > 0 and busy["npu"] > 0
    joules = 3.0 * whole + sum(idle * whole + (active - idle) * busy[name] for name, (idle, active) in WATTS.items())
    assert found["joules"] == pytest.approx(joules, rel=1e-12)
    assert found["joules_per_token"] == pytest.approx(joules / 4, rel=1e-12)  # two sequences of two tokens
    assert found["joules_per_request"] == pytest.approx(joules / 2, rel=1e-12)
    assert found["average_w"] == pytest.approx(joules / whole, rel=1e-12)
    assert found["battery_hours"] == pytest.approx(20 * whole / joules, rel=1e-12)
    assert found["basis"] == "assumed" and found["reason"] is None and not found["devices_only"]
    parts = sum(it["idle_j"] + it["busy_j"] for it in found["by_device"].values())
    assert found["joules"] == pytest.approx(parts + 3.0 * whole, rel=1e-12)
    lanes = result.as_dict()["lanes"]
    assert result.power is not None
    assert all(result.power.busy_s(name) == pytest.approx(lanes[name]["busy_s"], rel=1e-12) for name in ("gpu", "npu"))


def test_peak_is_what_devices_that_work_at_once_draw() -> None:
    result = run(powered())
    floor = 3.0 + sum(idle for idle, _ in WATTS.values())
    edges = sorted({t for name in ("gpu", "npu") for pair in intervals(result, name) for t in pair})
    at = [(a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)]
    most = max(
        sum(WATTS[name][1] - WATTS[name][0] for name in ("gpu", "npu") if any(a < t < b for a, b in intervals(result, name))) for t in at
    )
    assert most == 7.0 + 5.5  # both
    assert result.as_dict()["energy"]["peak_w"] == floor + most


def test_busy_time_by_hand() -> None:
    """GPU 0 to 50 and 70 to 80, NPU 20 to 60 ps: 20 + 10 ps the GPU alone, 30 both, 10 the NPU alone."""
    p = program("gpu", "npu", "ssd")
    p.task("gpu", 50, kind=Kind.ATTENTION)
    p.task("npu", 40, kind=Kind.FFN)
    p.task("gpu", 10, kind=Kind.COMBINE)
    p.task("ssd", 500)
    ((fragment, _),) = p.pieces(())
    ended = Timeline.from_rows([(0, 0, 50, 0, -1, 0), (1, 20, 60, 0, -1, 0), (2, 70, 80, 0, -1, 0), (3, 0, 500, 0, -1, 0)])
    meter = PowerMeter(HardwareProfile.model_validate(powered()), p.lanes)
    meter.add(fragment, ended, 80, {})
    assert [round(meter.busy_s(name) * 1e12) for name in ("gpu", "npu")] == [60, 40]
    assert meter.peak_w() == 3.0 + 1.75 + 12.5
    found = summary(meter, 500e-12, 1, 1)
    assert found["joules"] == pytest.approx((4.75 * 500 + 7.0 * 60 + 5.5 * 40) * 1e-12, rel=1e-12)


def test_nothing_is_invented_where_watts_are_not_stated() -> None:
    found = run(powered(without="npu")).as_dict()["energy"]
    assert found["reason"] == "devices.npu.idle_power and devices.npu.active_power not stated in bench"
    assert all(found[key] is None for key in ("joules", "joules_per_token", "joules_per_request", "average_w", "peak_w", "battery_hours"))
    assert energy_text(found).startswith("not known: devices.npu")
    idle = run(powered(without="cpu")).as_dict()["energy"]
    assert idle["joules"] > 0 and set(idle["by_device"]) == {"gpu", "npu"}  # the CPU does no work


def test_without_base_power_only_devices_are_counted() -> None:
    whole, devices = (run(powered(base)).as_dict() for base in ("3 W", None))
    assert devices["energy"]["devices_only"] and devices["energy"]["battery_hours"] > whole["energy"]["battery_hours"]
    assert whole["energy"]["average_w"] - devices["energy"]["average_w"] == pytest.approx(3.0, rel=1e-9)
    assert run(powered(battery=None)).as_dict()["energy"]["battery_hours"] is None


def test_a_scaled_clock_scales_what_being_busy_adds() -> None:
    p = program("gpu")
    p.task("gpu", 100, kind=Kind.ATTENTION)
    p.end_step()
    p.task("gpu", 200, kind=Kind.ATTENTION)
    (first, _), (second, _) = p.pieces()
    meter = PowerMeter(HardwareProfile.model_validate(powered()), p.lanes)
    meter.add(first, Timeline.from_rows([(0, 0, 100, 0, -1, 0)]), 100, {"gpu": 1.0})
    meter.add(second, Timeline.from_rows([(1, 100, 300, 0, -1, 0)]), 300, {"gpu": 0.5})
    assert meter.busy_s("gpu") == pytest.approx(300e-12) and meter.switched_s("gpu") == pytest.approx(200e-12)
    assert summary(meter, 300e-12, 1, 1)["by_device"]["gpu"]["busy_j"] == pytest.approx(7.0 * 200e-12, rel=1e-12)


@pytest.mark.parametrize("site", ["fetch", "in-place", "hybrid"])
def test_busy_time_is_that_of_the_lanes(site: str) -> None:
    """Of GPU and CPU over several fragments, with loads under way between them."""
    ids = [[[t % 4, (t + 1) % 4]] * 2 for t in range(40)]
    result = simulate(case(trace(ids, prompt=3), of=model(2, top_k=2), placement={"site": site}, pools={"vram": {"hold": 2}, "ram": {"hold": "all"}},
                           prefetch={"predictor": "previous"}, workload={"prompt_tokens": 3, "output_tokens": 36}))  # fmt: skip
    assert result.power is not None and len(result.schedule.fragments) > 1
    for name in result.power.names:
        assert result.power.busy_s(name) == pytest.approx(result.as_dict()["lanes"][name]["busy_s"], rel=1e-12, abs=1e-15)


def test_both_engines_give_the_same_bytes() -> None:
    des, fast = (run(powered(), engine=engine).as_dict() for engine in ("des", "fast"))
    assert {**des, "provenance": None} == {**fast, "provenance": None}
    assert np.isfinite(des["energy"]["joules"])
