"""Channels that several lanes share: unified memory, RAM, an SSD, what others take, and devices that grow warm. Hand-computed, in both engines."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from planner_cases import case, machine, trace
from test_sharing import exact_rates, random_case
from timeline_program import ENGINES, PER_PS, Program, program
from timeline_program import simulate as times

from moesim.cost import CostModel
from moesim.engines.retime import retime
from moesim.errors import InputError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.schedule import Kind, Work
from moesim.simulate import Result, simulate

both = pytest.mark.parametrize("engine", ENGINES)


def check(engine: Any, p: Program, *expected: tuple[int, int]) -> None:
    found = times(engine, p.lanes, p.pieces(()))
    assert list(zip(found.start_ps.tolist(), found.end_ps.tolist(), strict=True)) == list(expected)


# ---- unified memory: 1 byte a picosecond, drawn on by GPU, NPU, CPU and the drive's DMA


@both
def test_unified_gpu_and_npu_halve_the_dram(engine: Any) -> None:
    p = program("gpu", "npu", unified=PER_PS)
    p.task("gpu", 0, 100, on="unified", kind=Kind.ATTENTION)
    p.task("npu", 0, 60, on="unified", kind=Kind.FFN)
    check(engine, p, (0, 160), (0, 120))  # 60 bytes each by 120, the GPU's last 40 at the full rate


@both
def test_unified_four_agents_below_and_above_their_fair_share(engine: Any) -> None:
    p = program("gpu", "npu", "cpu", "ssd", unified=PER_PS)
    p.task("gpu", 0, 300, on="unified", cap=0.75 * PER_PS, kind=Kind.ATTENTION)
    p.task("npu", 0, 300, on="unified", cap=0.875 * PER_PS, kind=Kind.FFN)
    p.task("cpu", 0, 25, on="unified", cap=0.125 * PER_PS, kind=Kind.FFN)
    p.task("ssd", 0, 50, on="unified", cap=0.125 * PER_PS)
    check(
        engine, p,
        (0, 675), (0, 675),  # 3/8 each by 200: 75 bytes; 7/16 by 400: 87.5; the other 137.5 at 1/2 take 275
        (0, 200),  # 25 at its cap of 1/8
        (0, 400),  # 50 at its cap of 1/8
    )  # fmt: skip


@both
def test_unified_a_gpu_task_comes_into_a_flow_of_the_npu(engine: Any) -> None:
    p = program("gpu", "npu", unified=PER_PS)
    p.task("npu", 0, 200, on="unified", cap=0.8 * PER_PS, kind=Kind.FFN)
    p.task("gpu", 50, 100, on="unified", cap=0.75 * PER_PS, kind=Kind.ATTENTION)
    check(
        engine, p,
        (0, 325),  # 40 bytes by 50, 100 more by 250 at 1/2, the last 60 at 4/5
        (0, 250),  # launched for 50, then 100 bytes at 1/2
    )  # fmt: skip


@both
def test_experts_on_the_cpu_and_dma_share_the_ram(engine: Any) -> None:
    p = program("cpu", "h2d", ram=PER_PS, pcie=0.4 * PER_PS, vram=10 * PER_PS)
    p.task("cpu", 0, 300, on="ram", kind=Kind.FFN)
    p.task("h2d", 0, 80, on="pcie ram vram")
    check(
        engine, p,
        (0, 380),  # 3/5 beside the copy: 120 bytes by 200, the last 180 alone
        (0, 200),  # the PCIe's 2/5
    )  # fmt: skip


@both
def test_a_prefetch_and_a_demand_read_share_the_ssd(engine: Any) -> None:
    p = program("ssd*2", "gpu", ssd=PER_PS, ram=4 * PER_PS)
    p.task("gpu", 40, kind=Kind.ROUTER)
    p.task("ssd", 0, 100, on="ssd ram", prefetch=True, use=(0, 1))
    p.task("ssd", 0, 30, on="ssd ram", after=[0])
    check(
        engine, p,
        (0, 40),
        (0, 130),  # 40 bytes by 40, 30 more by 100, the last 30 alone
        (40, 100),  # 30 bytes at 1/2
    )  # fmt: skip


def test_what_draws_on_what() -> None:
    """GPU, NPU, CPU and the drive's DMA draw on one DRAM; a copy to a card draws on its PCIe direction and both memories."""
    unified = CostModel(load_hardware("ref-16gb"))
    dram = unified.channels.index("unified")
    for work in (*(Work(name, weight_bytes=1000) for name in ("gpu", "npu", "cpu")), Work("ssd", transfer_bytes=1 << 20, operations=1)):
        assert unified.price(work).shares[dram] == 1.0, work
    discrete = CostModel(load_hardware("desktop-24gb"))
    draws = dict(zip(discrete.channels, discrete.price(Work("h2d", transfer_bytes=1 << 20, operations=1)).shares, strict=True))
    assert {name for name, share in draws.items() if share} == {"ram", "vram", "pcie_h2d"}
    assert discrete.price(Work("cpu", weight_bytes=1000)).shares[discrete.channels.index("ram")] == 1.0


# ---- max-min sharing within the engines


def fluid(shares: list[list[float]], caps: list[float], capacity: list[float], begin: list[int], volume: list[float]) -> list[float]:
    """Ends of flows in picoseconds, by an independent solver between any two events, in fractions."""
    left = {f: Fraction(v) for f, v in enumerate(volume)}
    now, ends = Fraction(0), [0.0] * len(caps)
    while left:
        going = [f for f in left if begin[f] <= now]
        rates = exact_rates([shares[f] for f in going], [caps[f] for f in going], capacity) if going else []
        per_ps = [Fraction(rate) / 10**12 for rate in rates]
        events = [now + left[f] / rate for f, rate in zip(going, per_ps, strict=True)] + [
            Fraction(begin[f]) for f in left if begin[f] > now
        ]
        until = min(events)
        for f, rate in zip(going, per_ps, strict=True):
            left[f] -= rate * (until - now)
            if left[f] == 0:
                ends[f] = float(until)
                del left[f]
        now = until
    return ends


@both
@pytest.mark.parametrize("seed", range(4))
def test_flows_on_random_graphs_end_as_an_independent_solver_says(engine: Any, seed: int) -> None:
    """Up to 8 flows x 6 channels that begin one after the other; an engine rounds each end up to a picosecond."""
    rng = np.random.default_rng([11, seed])
    for _ in range(12):
        shares, caps, capacity = random_case(rng)
        begin, volume = rng.integers(0, 10**6, len(caps)).tolist(), (rng.integers(1, 10**4, len(caps)) * 1.0).tolist()
        p = program(*(f"lane{f}" for f in range(len(caps))), **{f"c{c}": size for c, size in enumerate(capacity)})
        for f, cap in enumerate(caps):
            on = {f"c{c}": share for c, share in enumerate(shares[f]) if share}
            p.task(f"lane{f}", begin[f], volume[f], on=on, cap=cap)
        found = times(engine, p.lanes, p.pieces(()))
        assert found.end_ps.tolist() == pytest.approx(fluid(shares, caps, capacity, begin, volume), abs=len(caps) + 1, rel=1e-9)


# ---- what others take


def busy_machine(**device: Any) -> dict[str, Any]:
    """Unified memory and no launches: by default all time is that of bytes."""
    on = machine(None, launch="0 s")
    on["devices"]["gpu"] |= {"peak": {"fp16": "1 PFLOP/s", "int8": "1 PFLOP/s"}} | device
    return on


def decode(on: dict[str, Any], tokens: int = 4, **settings: Any) -> Result:
    return simulate(
        case(trace([[0, 1]] * (tokens + 1)), on=on, pools={"unified": {"hold": "all"}}, workload={"output_tokens": tokens}, **settings)
    )


def ends(result: Result) -> list[int]:
    assert result.meter is not None
    return result.meter.step_end_ps.tolist()


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_a_constant_share_of_the_dram(engine: str) -> None:
    alone, beside = (
        decode(busy_machine(), engine=engine, timing={"background": load}) for load in ([], [{"channel": "unified", "share": 0.5}])
    )
    assert beside.tasks.makespan_ps == pytest.approx(2 * alone.tasks.makespan_ps, rel=1e-6)
    assert beside.schedule.depends_on == {"trace"}  # the same at any time: it may be re-timed


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_a_load_that_comes_and_goes_counts_from_the_next_step_on(engine: str) -> None:
    before = [0, *ends(decode(busy_machine()))]
    took = [b - a for a, b in zip(before, before[1:], strict=False)]
    comes, goes = before[1] / 2, before[1] + took[1] / 2
    load = [{"channel": "unified", "share": share, "from_s": f"{at * 1e-6!r} us"} for share, at in ((0.75, comes), (0.0, goes))]
    found = decode(busy_machine(), engine=engine, timing={"background": load})
    slow = [took[0], 4 * took[1], took[2], took[3]]
    assert ends(found) == pytest.approx(np.cumsum(slow).tolist(), rel=1e-6)
    assert found.schedule.depends_on == {"trace", "time"} and len(found.schedule.fragments) == 4
    with pytest.raises(InputError, match="time"):
        retime(found.schedule, [])


def test_a_load_on_no_channel_is_refused() -> None:
    with pytest.raises(InputError) as error:
        decode(busy_machine(), timing={"background": [{"channel": "unifed", "share": 0.5}]})
    assert error.value.what == "timing.background.0.channel" and "unified" in str(error.value)


# ---- warm devices


def warm_machine(time_constant: str, above: str = "3.5 W") -> dict[str, Any]:
    """A GPU of 1 W idle and 5 W busy whose arithmetic takes all the time; half of its clock above some watts."""
    slow = {"fp16": "1 MFLOP/s", "int8": "1 MFLOP/s"}
    thermal = {"time_constant": time_constant, "steps": [{"above": above, "clock": 0.5}]}
    return busy_machine(peak=slow, idle_power="1 W", active_power="5 W", thermal=thermal)


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_a_warm_gpu_halves_its_clock_at_step_borders(engine: str) -> None:
    """With a time constant of step / ln 2 the recent power is 3, 4 W after two steps; then half the clock for two step times lets it fall to
    3 + (4 - 3) / 4 = 3.25, a step takes it to 4.125, and so on: full, full, half, full, half, full, half."""
    step_s = ends(decode(warm_machine("1 s", "9 W"), 2))[0] * 1e-12
    result = decode(warm_machine(f"{step_s / math.log(2) * 1e6!r} us"), 7, engine=engine)
    found = np.diff([0, *ends(result)]) * 1e-12 / step_s
    assert found.tolist() == pytest.approx([1, 1, 2, 1, 2, 1, 2], rel=0.1)  # a growing cache
    assert result.schedule.depends_on == {"trace", "time"}
    energy = result.as_dict()["energy"]["by_device"]["gpu"]["busy_j"]
    assert energy == pytest.approx(4 * 7 * step_s, rel=0.1)  # the same work: half the power for twice the time
    assert result.power is not None and 3.0 < result.power.recent_w["gpu"] < 3.5


def test_a_lag_much_shorter_than_a_step_follows_each_step() -> None:
    """5 W after a step at full clock, 3 W after one at half: it alternates."""
    found = np.diff([0, *ends(decode(warm_machine("1 ns"), 6))])
    assert (found / found[0]).tolist() == pytest.approx([1, 2, 1, 2, 1, 2], rel=0.1)


def test_memory_does_not_slow_with_the_clock() -> None:
    on = warm_machine("1 ns")
    on["devices"]["gpu"]["peak"] = {"fp16": "1 PFLOP/s", "int8": "1 PFLOP/s"}
    found = np.diff([0, *ends(decode(on, 6))])
    assert (found / found[0]).tolist() == pytest.approx([1] * 6, rel=0.05)  # a growing cache


def test_both_engines_cut_the_same_steps() -> None:
    des, fast = (decode(warm_machine("200 us"), 6, engine=engine).as_dict() for engine in ("des", "fast"))
    assert {**des, "provenance": None} == {**fast, "provenance": None}


def test_thermal_figures_are_checked() -> None:
    on = warm_machine("1 s")
    del on["devices"]["gpu"]["idle_power"]
    with pytest.raises(ValueError, match="idle_power"):
        HardwareProfile.model_validate(on)
    on = warm_machine("1 s")
    on["devices"]["gpu"]["thermal"]["steps"].append({"above": "4 W", "clock": 0.6})
    with pytest.raises(ValueError, match="falling clock"):
        HardwareProfile.model_validate(on)
