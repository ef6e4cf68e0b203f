"""The compiled engine gives the timeline of the reference, bit for bit, causes and servers included; re-timing equals single runs."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timeline_program import PER_PS, Pieces, Program, assert_same, program, simulate

from moesim import simulate as runs
from moesim.cost import CostModel, Costs
from moesim.engines import fast
from moesim.engines.des import DesEngine
from moesim.engines.fast import FastEngine
from moesim.engines.retime import retime
from moesim.errors import InputError, MoesimError
from moesim.schedule import Lane, Schedule

HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large]
few = settings(max_examples=300, deadline=None, suppress_health_check=HEALTH)
nightly = settings(max_examples=3000, deadline=None, suppress_health_check=HEALTH)
CHANNELS = ("ram", "vram", "pcie")


@st.composite
def programs(draw: st.DrawFn, calm: bool = False) -> Program:
    """Schedules of up to sixty tasks whose events coincide often; ``calm`` ones only have tasks and lanes that suit the linear pass."""
    disciplines = ["fifo"] if calm else draw(st.sampled_from([["fifo"], ["priority"], ["fifo", "priority"]]))
    lanes = [Lane(f"lane{i}", draw(st.integers(1, 3)), draw(st.sampled_from(disciplines))) for i in range(draw(st.integers(1, 4)))]
    scale = draw(st.sampled_from([100.0, 40.0])) if calm else draw(st.sampled_from([1.0, 3.0, 0.3]))
    capacity = {name: draw(st.sampled_from([1.0, 0.7, 2.0])) * scale * PER_PS for name in CHANNELS}
    p = Program(lanes, **capacity)
    free = draw(st.booleans())  # no task of no duration
    n_steps = draw(st.integers(1, 6))
    for step in range(n_steps):
        first = p.n_tasks
        for _ in range(draw(st.integers(1, 10))):
            earlier = st.lists(st.integers(max(0, p.n_tasks - 12), p.n_tasks - 1), max_size=3) if p.n_tasks else st.just([])
            flows = draw(st.booleans())
            lane = draw(st.integers(0, len(lanes) - 1))
            if calm:  # each lane may also have the third channel to itself
                shares = {"ram": 1.0, "vram": 2.0} if draw(st.booleans()) else {"ram": 0.3}
                cap = draw(st.sampled_from([0.5, 1.0, 3.0])) * PER_PS
                if lane == 0 and lanes[0].width == 1:
                    shares["pcie"] = draw(st.sampled_from([1.0, 50.0, 3.0]))
            else:
                shares = draw(st.dictionaries(st.sampled_from(CHANNELS), st.sampled_from([1.0, 1.0, 2.0, 0.5, 0.3]), max_size=3))
                cap = draw(st.sampled_from([math.inf, 0.1 * PER_PS, 0.4 * PER_PS, 0.7 * PER_PS]))
            p.task(
                lanes[lane].name,
                draw(st.sampled_from([1, 1, 5, 10, 20] if free or calm else [0, 0, 1, 5, 10, 20])),
                draw(st.sampled_from([1, 7, 20, 100, 333])) if flows else 0,
                draw(earlier),
                slot=draw(earlier),
                on=shares if flows else "",
                cap=cap,
                use=(draw(st.integers(step, n_steps)), draw(st.integers(-1, 2))),
                prefetch=draw(st.booleans()),
            )
        change = draw(st.sampled_from(["", "", *CHANNELS]))
        changed = {change: draw(st.sampled_from([0.5, 0.9, 1.5])) * capacity[change]} if change else {}
        p.end_step(draw(st.integers(first, p.n_tasks - 1)), **changed)
    return p


def jittered(pieces: Pieces, seed: int) -> Pieces:
    """Slow every task by a factor of its own, as CostModel does."""
    rng = np.random.default_rng(seed)
    out = []
    for fragment, costs in pieces:
        factor = np.exp(np.abs(rng.normal(0.0, 0.2, len(costs.cap))))
        latency = np.ceil(costs.latency_ps * factor).astype(np.int64)
        out.append((fragment, replace(costs, latency_ps=latency, cap=costs.cap / factor)))
    return tuple(out)


def cuts_of(p: Program, data: st.DataObject) -> list[int]:
    """Cut at least wherever the capacities change."""
    changes = {s for s, (a, b) in enumerate(pairwise(p.steps)) if a.capacity != b.capacity}
    return sorted(changes | data.draw(st.sets(st.integers(0, len(p.steps) - 1))))


def check(p: Program, data: st.DataObject) -> None:
    pieces = p.pieces(cuts_of(p, data))
    if data.draw(st.booleans()):
        pieces = jittered(pieces, data.draw(st.integers(0, 2**32)))
    reference, state = DesEngine(p.lanes), FastEngine(p.lanes)
    for fragment, costs in pieces:
        assert_same(state.advance(fragment, costs), reference.advance(fragment, costs))
        assert state.now_ps == reference.now_ps
        pause = data.draw(st.sampled_from([None, None, 0, 1, 7, 40, 400]))
        if pause is not None:
            until = reference.now_ps + pause
            assert_same(state.wait(until), reference.wait(until))
            assert state.now_ps == reference.now_ps == until
    assert_same(state.finish(), reference.finish())
    assert state.now_ps == reference.now_ps


@few
@given(p=programs(), data=st.data())
def test_equals_the_reference_bit_for_bit(p: Program, data: st.DataObject) -> None:
    check(p, data)


@few
@given(p=programs(calm=True), data=st.data())
def test_the_linear_pass_equals_the_reference_bit_for_bit(p: Program, data: st.DataObject) -> None:
    check(p, data)


@pytest.mark.nightly
@nightly
@given(calm=st.booleans(), data=st.data())
def test_equals_the_reference_on_thousands(calm: bool, data: st.DataObject) -> None:
    check(data.draw(programs(calm)), data)


def test_the_two_paths_take_turns_within_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that crosses two borders: alone, then in contention, then alone again, each time on the path that suits."""
    p = program("gpu", "h2d", ram=PER_PS)
    p.task("gpu", 100, 20, on="ram", cap=0.2 * PER_PS)
    p.task("h2d", 10, 500, on="ram", cap=0.7 * PER_PS, use=(2, 0), prefetch=True)
    p.end_step(gate=0)
    p.task("gpu", 0, 30, on="ram")
    p.end_step()
    p.task("gpu", 10, 20, after=[1], on="ram", cap=0.2 * PER_PS)
    paths: list[str] = []
    for name in ("run_linear", "run_events"):
        kernel = getattr(fast, name)

        def note(*arguments: Any, kernel: Any = kernel, name: str = name) -> Any:
            result = kernel(*arguments)
            paths.append(name if result[0] == 0 else "declined")
            return result

        monkeypatch.setattr(fast, name, note)
    got = simulate(FastEngine, p.lanes, p.pieces())
    assert paths == ["run_linear", "declined", "run_events", "run_linear", "run_linear"]
    assert_same(got, simulate(DesEngine, p.lanes, p.pieces()))


def test_a_flow_that_never_ends_is_named_and_lanes_too() -> None:
    p = program("a", "b priority", ram=0.0)
    p.task("a", 5)
    p.task("b", 3, 10, on="ram")
    with pytest.raises(MoesimError, match="task 1 on lane b never ends"):
        simulate(FastEngine, p.lanes, p.pieces())
    p = program("a", ram=1.0)
    p.task("a", 3, 1e9, on="ram")
    with pytest.raises(MoesimError, match="task 0 on lane a takes more than"):
        simulate(FastEngine, p.lanes, p.pieces())


def test_what_is_under_way_keeps_its_channels() -> None:
    p = program("a", "b", ram=PER_PS)
    p.task("a", 5)
    p.task("b", 0, 50, on="ram")
    p.end_step(gate=0)
    p.task("a", 5)
    (first, costs), (second, later) = p.pieces()
    state = FastEngine(p.lanes)
    state.advance(first, costs)
    with pytest.raises(MoesimError, match="costs have 2 channels, those of earlier fragments 1"):
        state.advance(second, replace(later, channels=("ram", "x"), capacity=np.ones(2), shares=np.ones((1, 2))))


def test_read_only_columns_are_fine() -> None:
    p = program("a", ram=PER_PS)
    p.task("a", 5, 10, on="ram")
    ((fragment, costs),) = p.pieces()
    for column in (fragment.lane, costs.latency_ps, costs.capacity, costs.shares):
        column.flags.writeable = False
    assert simulate(FastEngine, p.lanes, ((fragment, costs),)).end_ps.tolist() == [15]


def test_simulate_loads_numba_only_when_asked() -> None:
    code = "import sys, moesim.simulate; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("lanes", ["fifo", "priority"])
@pytest.mark.parametrize(
    ("scenario", "changes"),
    [
        ("gpt-oss-20b-laptop", ("workload.output_tokens=12", "workload.prompt_tokens=8")),
        ("qwen3-30b-desktop", ("workload.output_tokens=4",)),
    ],
)
def test_scenarios_agree(scenario: str, changes: tuple[str, ...], lanes: str, shared: Path) -> None:
    if scenario == "gpt-oss-20b-laptop":
        changes = (*changes, f"trace.source={shared / 'traces' / 'gptoss20b_mmlu_validation.npz'}")
    changes = (*changes, f"lanes={lanes}", "timing.jitter=0.1")
    reference, *others = (runs.simulate(runs.load_case(scenario, (*changes, f"engine={engine}"))) for engine in ("des", "fast", "auto"))
    assert reference.schedule.n_tasks > 500
    for other in others:
        assert_same(other.timeline, reference.timeline)
        mine, its = other.as_dict(), reference.as_dict()
        assert mine.pop("provenance") | {"engine": ""} == its.pop("provenance") | {"engine": ""}
        assert mine == its


def schedule_of(p: Program, pieces: Pieces) -> Schedule:
    return Schedule(p.lanes, fragments=[fragment for fragment, _ in pieces])


@settings(few, max_examples=60)
@given(p=st.booleans().flatmap(lambda calm: programs(calm)), data=st.data())
def test_retime_equals_single_runs(p: Program, data: st.DataObject) -> None:
    pieces = p.pieces(cuts_of(p, data))
    variants: list[list[Costs]] = []
    for v in range(data.draw(st.integers(1, 5))):
        costs = [c for _, c in (jittered(pieces, v) if data.draw(st.booleans()) else pieces)]
        faster = data.draw(st.sampled_from([1.0, 1.3, 50.0]))
        variants.append([replace(c, capacity=c.capacity * faster) for c in costs])
    schedule = schedule_of(p, pieces)
    got = retime(schedule, variants)
    whole = retime(schedule, variants, timelines=True)
    assert whole.timelines is not None and got.timelines is None
    np.testing.assert_array_equal(got.step_end_ps, whole.step_end_ps)
    last = np.concatenate([f.steps[:, 2] for f, _ in pieces])
    for v, costs in enumerate(variants):
        single = simulate(DesEngine, p.lanes, tuple(zip(schedule.fragments, costs, strict=True)))
        assert_same(whole.timelines[v], single)
        np.testing.assert_array_equal(got.step_end_ps[v], single.end_ps[last])


def test_retime_a_scenario_for_many_machines() -> None:
    case = runs.load_case("qwen3-30b-desktop", ("workload.output_tokens=3", "engine=fast"))
    planner = case.planner()
    fragments = list(planner.fragments())
    schedule = Schedule(planner.lanes, fragments=fragments)
    variants = []
    for v in range(70):  # over two blocks; at a twentieth of its bandwidth the VRAM is contended
        prices = CostModel(case.hardware.scaled("pcie_h2d", 0.5 + v / 140).scaled("vram", 1.0 if v % 4 else 0.05))
        variants.append([prices.costs(f) for f in fragments])
    got = retime(schedule, variants).step_end_ps
    assert len({tuple(row) for row in got.tolist()}) > 40
    for v in range(0, 70, 3):
        single = simulate(FastEngine, planner.lanes, tuple(zip(fragments, variants[v], strict=True)))
        np.testing.assert_array_equal(got[v], single.end_ps[np.concatenate([f.steps[:, 2] for f in fragments])])


def test_retime_refuses_what_it_may_not_retime() -> None:
    p = program("a")
    p.task("a", 1)
    ((fragment, costs),) = p.pieces()
    with pytest.raises(InputError, match="expected the trace alone, got costs, trace; plan a schedule for each variant"):
        retime(Schedule(p.lanes, depends_on=frozenset({"trace", "costs"}), fragments=[fragment]), [[costs]])
    with pytest.raises(InputError, match="costs of variant 1: expected 1, one per fragment, got 0"):
        retime(Schedule(p.lanes, fragments=[fragment]), [[costs], []])
    with pytest.raises(InputError, match="costs of variant 0: expected 1 tasks"):
        retime(Schedule(p.lanes, fragments=[fragment]), [[replace(costs, price=np.zeros(2, np.int32))]])
    with pytest.raises(InputError, match="one that begins at task 0"):
        retime(Schedule(p.lanes, fragments=[replace(fragment, first_task=3)]), [[costs]])
    assert retime(Schedule(p.lanes), [[], []]).step_end_ps.shape == (2, 0)
