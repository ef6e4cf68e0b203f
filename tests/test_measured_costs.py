"""Measured task times and interference between lanes, as costs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moesim import config
from moesim.config import Document
from moesim.cost import CostModel, Costs
from moesim.engines.des import DesEngine
from moesim.engines.fast import FastEngine
from moesim.errors import InputError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.parts import KernelPoint
from moesim.kernel_table import KernelTable
from moesim.schedule import Fragment, FragmentBuilder, Kind, Lane, Work

MS = 10**9  # picoseconds


def point(part: str, tokens: int, size: int, time: str, weights: str = "int8") -> KernelPoint:
    return KernelPoint.model_validate({"part": part, "weights": weights, "tokens": tokens, "bytes": f"{size} B", "time": time})


def machine(**changes: object) -> HardwareProfile:
    data = load_hardware("ref-16gb").model_dump(mode="json")
    return config.build(HardwareProfile, Document(data | changes, "test"))


def latencies(prices: CostModel, fragment: Fragment) -> NDArray[np.int64]:
    """Of each task."""
    costs = prices.costs(fragment)
    return costs.latency_ps[costs.price]


def test_table_is_exact_at_points_and_linear_between() -> None:
    table = KernelTable(
        [point("ffn", 1, 1000, "1 ms"), point("ffn", 1, 3000, "2 ms"), point("ffn", 5, 1000, "5 ms"), point("ffn", 5, 3000, "8 ms")]
    )
    assert table.time_s("ffn", "int8", 1, 1000) == 1e-3
    assert table.time_s("ffn", "int8", 1, 2000) == pytest.approx(1.5e-3)
    assert table.time_s("ffn", "int8", 3, 2000) == pytest.approx(4e-3)
    assert table.time_s("ffn", "int8", 10, 3000) == pytest.approx(16e-3)  # in proportion to the rows beyond the last
    assert table.time_s("ffn", "int8", 1, 6000) == pytest.approx(4e-3)
    assert table.time_s("ffn", "int8", 1, 10) == pytest.approx(0.5e-3)  # not below half of the smallest
    assert table.time_s("ffn", "int4-g128", 1, 1000) is None
    assert table.time_s("head", "int8", 1, 1000) is None


def run(hardware: HardwareProfile, works: list[tuple[str, Work]], engine: type) -> list[tuple[int, int]]:
    """Times of tasks that wait for nothing, each on a lane of its own."""
    builder = FragmentBuilder(len(works))
    kind = {"cpu": Kind.FFN, "gpu": Kind.FFN, "ssd": Kind.LOAD}
    tasks = [builder.task(kind[lane], i, work, []) for i, (lane, work) in enumerate(works)]
    builder.end_step(0, tasks[0], tasks[-1], 1, 1, 1)
    fragment = builder.build()
    costs: Costs = CostModel(hardware).costs(fragment)
    it = engine(tuple(Lane(lane) for lane, _ in works))
    parts = [it.advance(fragment, costs), it.finish()]
    rows = sorted((int(t), int(a), int(b)) for p in parts for t, a, b in zip(p.task, p.start_ps, p.end_ps, strict=True))
    return [(a, b) for _, a, b in rows]


FFN = Work("cpu", weight_bytes=10_000_000, tokens=1, part="ffn", weights="int8")
READ = Work("ssd", transfer_bytes=16_000_000, operations=1, request_bytes=1 << 20, depth=8, mode="direct")


@pytest.mark.parametrize("engine", [DesEngine, FastEngine])
def test_two_lanes_slow_each_other_as_stated(engine: type) -> None:
    data = load_hardware("ref-16gb").model_dump(mode="json")
    devices = data["devices"]
    devices["cpu"]["kernels"] = [{"part": "ffn", "weights": "int8", "tokens": 1, "bytes": "10 MB", "time": "4 ms"}]
    data["storage"]["ssd"]["latency"] = "0 s"
    slow = [{"lane": "cpu", "beside": "ssd", "slowdown": 1.25}, {"lane": "ssd", "beside": "cpu", "slowdown": 1.6}]
    alone = config.build(HardwareProfile, Document(data, "test"))
    both = config.build(HardwareProfile, Document(data | {"interference": slow}, "test"))
    ((_, ffn),) = run(alone, [("cpu", FFN)], engine)
    ((_, read),) = run(alone, [("ssd", READ)], engine)
    assert ffn == 4 * MS
    assert run(both, [("cpu", FFN)], engine)[0][1] == ffn  # by itself a task is as fast as without
    assert run(both, [("ssd", READ)], engine)[0][1] == pytest.approx(read, abs=2)
    together = run(both, [("cpu", FFN), ("ssd", READ)], engine)
    assert read > 1.25 * ffn  # the read is the longer one: the FFN is slowed to its end, then the read runs free
    assert together[0][1] == pytest.approx(1.25 * ffn, abs=2)
    assert together[1][1] == pytest.approx(1.25 * ffn + read - 1.25 * ffn / 1.6, abs=4)


def test_interference_names_lanes_that_exist() -> None:
    with pytest.raises(InputError, match="interference.0.beside"):
        machine(interference=[{"lane": "cpu", "beside": "ssd9", "slowdown": 1.1}])
    with pytest.raises(InputError, match="interference.0.slowdown"):
        machine(interference=[{"lane": "cpu", "beside": "ssd", "slowdown": 3.0}])


def test_measured_time_takes_the_place_of_the_roofline_and_adds_the_cache() -> None:
    data = load_hardware("ref-16gb").model_dump(mode="json")
    data["devices"]["cpu"]["kernels"] = [
        {"part": "attention", "weights": "int8", "tokens": 1, "bytes": "1 MB", "time": "1 ms"},
        {"part": "kv", "tokens": 1, "bytes": "2 MB", "time": "3 ms"},
    ]
    prices = CostModel(config.build(HardwareProfile, Document(data, "test")))
    work = Work("cpu", weight_bytes=1_000_000, state_bytes=2_000_000, tokens=1, part="attention", weights="int8", kernels=8)
    price = prices.price(work)
    assert (price.latency_s, price.volume / price.cap) == (0.0, pytest.approx(4e-3))
    other = prices.price(Work("cpu", weight_bytes=1_000_000, tokens=1, part="head", weights="int8", kernels=3))
    assert other.latency_s > 0  # no head was measured


def test_a_task_that_waits_for_another_lane_begins_later() -> None:
    data = load_hardware("ref-16gb").model_dump(mode="json")
    data["devices"]["cpu"]["handoff"], data["storage"]["ssd"]["handoff"] = "30 us", "80 us"
    builder = FragmentBuilder(2)
    ffn, read = Work("cpu", weight_bytes=1000, tokens=1), Work("ssd", transfer_bytes=4096, operations=1, request_bytes=4096, mode="direct")
    router = builder.task(Kind.ROUTER, 0, ffn, [])
    demanded = builder.task(Kind.LOAD, 1, read, [(router, 0)])
    hit = builder.task(Kind.FFN, 0, ffn, [(router, 0)])
    missed = builder.task(Kind.FFN, 0, ffn, [(router, 0), (demanded, 0)])
    ahead = builder.task(Kind.LOAD, 1, read, [(demanded, 0)], prefetch=True)
    builder.end_step(0, router, ahead, 1, 1, 1)
    first = builder.build()
    after = builder.task(Kind.LOAD, 1, read, [(missed, 0)], step=1)  # of another step: it waits for the gate with all others
    builder.end_step(1, after, after, 1, 1, 1)
    with_, without = CostModel(config.build(HardwareProfile, Document(data, "test"))), CostModel(load_hardware("ref-16gb"))
    added = latencies(with_, first) - latencies(without, first)
    assert [int(added[t]) for t in (router, demanded, hit, missed, ahead)] == [0, 80_000_000, 0, 30_000_000, 0]
    second = builder.build()
    assert latencies(with_, second).tolist() == latencies(without, second).tolist()
