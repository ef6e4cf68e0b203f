"""GPU attention and NPU or CPU experts over bounded queues: closed forms of the two-stage pipeline, what its queues hold, staged states."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from planner_cases import case, machine, model, trace

from moesim.schedule import Kind
from moesim.simulate import Result, simulate

LAYERS = 3
NPU_LAUNCH = {"npu": "50 us", "gpu": "20 us", "gpu, results at once": "1 us"}  # which stage is the slower one
PAIRS = list(product((1, 2, 3, 4), (1, 2, 3)))  # micro-batches, queue depth
engines = pytest.mark.parametrize("engine", ["des", "fast"])


def two_stages(npu_launch: str) -> dict[str, Any]:
    """One DRAM of which each device draws at most 0.3: they never slow each other."""
    on = machine(None, npu=True)
    on["devices"]["gpu"] |= {"memory_efficiency": 0.3, "launch": "10 us"}
    on["devices"]["npu"] |= {"memory_efficiency": 0.3, "launch": npu_launch}
    return on


def run(on: dict[str, Any], m: int, q: int, batch: int | None = None, tokens: int = 1, **settings: Any) -> Result:
    """``m`` micro-batches of as many sequences; every layer uses one expert."""
    batch = batch or m
    ids = [[layer % 4 for layer in range(LAYERS)]] * (tokens * batch)
    pipeline = {"micro_batches": m, "queue_depth": q, **settings.pop("pipeline", {})}
    main = "unified" if "unified" in on["tiers"] else "ram"
    it = case(trace(ids, seq=[b for b in range(batch) for _ in range(tokens)]), of=model(LAYERS), on=on, pools={main: {"hold": "all"}},
              placement={"experts": "npu" if main == "unified" else "cpu"}, workload={"batch": batch, "output_tokens": tokens}, pipeline=pipeline, **settings)  # fmt: skip
    return simulate(it)


def each(result: Result, kind: Kind) -> int:
    """How long a task of a kind takes, which is the same for all."""
    (found,) = set((result.tasks.end - result.tasks.start)[result.tasks.kind == kind].tolist())
    return int(found)


def closed_form(a: int, e: int, c: int, n: int, m: int, q: int) -> int:
    """End of the last of ``n`` items that take ``a`` and at last ``c`` on the GPU, ``e`` on the NPU between.

    The GPU begins p = min(q, m - 1) items before it ends one. p = 0: one after the other. A slower NPU (e >= a + c) never waits but for the
    first front. A slower GPU (e <= a) never waits but for the last result, beside which p ends are left.
    """
    p = min(q, m - 1)
    if p == 0:
        return n * (a + e + c)
    if e >= a + c:
        return a + n * e + c
    assert e <= a
    return n * a + (n - p) * c + max(p * c, e)


@engines
@pytest.mark.parametrize("slow", NPU_LAUNCH)
def test_closed_form_of_two_stages(engine: str, slow: str) -> None:
    seen = set()
    for m, q in PAIRS:
        result = run(two_stages(NPU_LAUNCH[slow]), m, q, engine=engine)
        a = each(result, Kind.ATTENTION) + each(result, Kind.ROUTER)
        e, c = each(result, Kind.FFN), each(result, Kind.COMBINE)
        assert (e >= a + c) == (slow == "npu")
        expected = closed_form(a, e, c, LAYERS * m, m, q)
        assert result.tasks.end[result.tasks.kind == Kind.COMBINE].max() == expected, (m, q)
        seen.add((m, q))
    assert len(seen) == 12


@engines
def test_synchronisation_counts_at_each_end_of_a_queue(engine: str) -> None:
    """A put and a get on the GPU, a get and a put on the NPU."""
    h = 3_000_000
    for m, q in PAIRS:
        result = run(two_stages("50 us"), m, q, engine=engine, pipeline={"handoff_s": "3 us"})
        a = each(result, Kind.ATTENTION) + each(result, Kind.ROUTER) + h
        e, c = each(result, Kind.FFN) + 2 * h, each(result, Kind.COMBINE) + h
        assert result.tasks.end[result.tasks.kind == Kind.COMBINE].max() == closed_form(a, e, c, LAYERS * m, m, q), (m, q)


def test_both_devices_work_at_once_with_two_micro_batches() -> None:
    def together(result: Result) -> int:
        lanes = [lane.name for lane in result.tasks.lanes]
        spans = [
            [(int(s), int(e)) for s, e, lane in zip(result.tasks.start, result.tasks.end, result.tasks.lane, strict=True) if lane == lanes.index(name)]
            for name in ("gpu", "npu")
        ]  # fmt: skip
        return sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0) for a in spans[0] for b in spans[1])

    alone, two = (run(two_stages("50 us"), m, 1, batch=2) for m in (1, 2))
    assert together(alone) == 0
    gpu = LAYERS * 2 * (each(two, Kind.ATTENTION) + each(two, Kind.ROUTER) + each(two, Kind.COMBINE))
    first_and_last = each(two, Kind.ATTENTION) + each(two, Kind.ROUTER) + each(two, Kind.COMBINE)
    assert together(two) == gpu - first_and_last


# ---- what queues hold


@engines
@pytest.mark.parametrize("states", ["shared", "staged"])
def test_queues_never_hold_more_than_depth_times_item(engine: str, states: str) -> None:
    """Tasks wait in the CPU's RAM, results in VRAM, each in a queue of its own; the watermark against the ledger's lines."""
    item = 1 * 16 * 2  # one sequence, 16 hidden values in 16 bit
    reached = set()
    for m, q in PAIRS:
        on = machine()
        on["devices"]["cpu"]["launch"] = "100 us"  # the CPU is slow: tasks pile up
        result = run(on, m, q, engine=engine, tokens=2, pipeline={"hidden_states": states})
        lines = {line.tier: line.bytes for line in result.case.layout.ledger.lines if line.name == "hand-over queues"}
        assert lines == {"vram": q * item, "ram": q * item}
        line = result.memory.lines.index("hand-over queues")
        for tier, planned in lines.items():
            _, held = result.memory.series(result.memory.tiers.index(tier), line)
            assert held.min() == held[0] == held[-1] == 0 and held.max() <= planned, (m, q, tier)
            reached.add((tier, q, int(held.max()) // item))
    assert {("ram", 1, 1), ("ram", 2, 2), ("ram", 3, 3)} <= reached


def test_a_full_queue_holds_the_gpu_up() -> None:
    """Four fronts of 110 us against experts of 300: with depth 1 the GPU begins no item before the one before it was taken."""
    deep, shallow = (run(two_stages("100 us"), 4, q) for q in (3, 1))
    starts = [np.sort(r.tasks.start[(r.tasks.kind == Kind.ATTENTION) & (r.tasks.layer == 0)]) for r in (deep, shallow)]
    gets = np.sort(shallow.tasks.end[(shallow.tasks.kind == Kind.GET) & (shallow.tasks.layer == 0)])
    assert starts[0][3] < starts[1][3]
    puts = np.sort(shallow.tasks.end[(shallow.tasks.kind == Kind.PUT) & (shallow.tasks.layer == 0)])
    assert len(puts) == len(gets) == 8


# ---- staged states


@engines
def test_staged_states_cost_their_copies(engine: str) -> None:
    """One micro-batch: each layer copies its states on the GPU (to hand over) and on the NPU (back), in one DRAM."""
    shared, staged = (run(two_stages("20 us"), 1, 1, engine=engine, pipeline={"hidden_states": states}) for states in ("shared", "staged"))
    lanes = [lane.name for lane in staged.tasks.lanes]
    copies = [int(staged.tasks.lane[t]) for t in np.flatnonzero(staged.tasks.kind == Kind.COPY)]
    assert [lanes[lane] for lane in copies] == ["gpu", "npu"] * LAYERS
    took = int((staged.tasks.end - staged.tasks.start)[staged.tasks.kind == Kind.COPY].sum())
    assert staged.tasks.makespan_ps - shared.tasks.makespan_ps == took > 0
