"""Every engine gives the hand-computed timelines exactly, however the schedule is cut, and explains every start."""

from __future__ import annotations

from typing import Any

import pytest
from timeline_cases import CASES, DATA
from timeline_program import ENGINES, PER_PS, Case, assert_same, program, simulate, walk_back

from moesim.errors import MoesimError
from moesim.schedule import FragmentBuilder, Kind, Work
from moesim.timeline import Timeline

engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def spans(timeline: Timeline) -> list[tuple[int, int]]:
    return list(zip(timeline.start_ps.tolist(), timeline.end_ps.tolist(), strict=True))


def test_there_are_enough_cases() -> None:
    assert len({c.name for c in CASES}) == len(CASES) >= 20
    assert all(sum(f.n_tasks for f, _ in c.fragments) == len(c.expected) <= 11 for c in CASES)


@engines
@cases
def test_exact_timeline(engine: Any, case: Case) -> None:
    timeline = simulate(engine, case.lanes, case.fragments)
    assert timeline.task.tolist() == list(range(len(case.expected)))
    assert spans(timeline) == list(case.expected)
    assert timeline.makespan_ps == max(end for _, end in case.expected)
    assert {t: (int(timeline.cause[t]), int(timeline.cause_type[t])) for t in case.causes} == dict(case.causes)


@engines
@pytest.mark.parametrize("case", [c for c in CASES if len(c.fragments) > 1 and c.whole], ids=lambda c: c.name)
def test_cut_at_step_borders_or_whole(engine: Any, case: Case) -> None:
    assert case.whole is not None and len(case.whole) == 1
    assert_same(simulate(engine, case.lanes, case.fragments), simulate(engine, case.lanes, case.whole))


@engines
@cases
def test_advance_returns_at_the_end_of_the_gate(engine: Any, case: Case) -> None:
    state = engine(case.lanes)
    parts = []
    for fragment, costs in case.fragments:
        parts.append(state.advance(fragment, costs))
        assert fragment.gate in parts[-1].task
        gate_end = case.expected[fragment.gate][1]
        assert state.now_ps == gate_end == parts[-1].makespan_ps
    rest = state.finish()
    assert len(rest) == 0 or int(rest.end_ps.min()) >= gate_end
    assert state.now_ps == max(end for _, end in case.expected), "finish leaves the clock at the last end"
    assert sum(len(part) for part in [*parts, rest]) == len(case.expected)


@engines
@cases
def test_causes_lead_back_to_time_zero(engine: Any, case: Case) -> None:
    timeline = simulate(engine, case.lanes, case.fragments)
    for task in range(len(timeline)):
        path = walk_back(timeline, task)
        assert path[0][1] == 0
        assert [a[2] for a in path[:-1]] == [b[1] for b in path[1:]]
        assert sum(to - since for _, since, to in path) == int(timeline.end_ps[task])


@engines
def test_alone_ps_is_what_a_task_takes_alone(engine: Any) -> None:
    p = program("a", ram=PER_PS / 3, pcie=PER_PS)
    p.task("a", 7, 100, on="ram pcie")
    ((fragment, costs),) = p.pieces()
    assert costs.alone_ps().tolist() == [307]  # 7 + 100 / (1/3)
    assert spans(simulate(engine, p.lanes, ((fragment, costs),))) == [(0, 307)]


@engines
def test_a_fragment_out_of_turn_is_refused(engine: Any) -> None:
    case = next(c for c in CASES if len(c.fragments) > 1)
    state = engine(case.lanes)
    with pytest.raises(MoesimError, match="begins at task 3, the engine expected 0"):
        state.advance(*case.fragments[1])


@engines
def test_a_flow_without_a_rate_is_refused(engine: Any) -> None:
    p = program("a", ram=0.0)
    p.task("a", 0, 100, on="ram")
    with pytest.raises(MoesimError, match="task 0"):
        simulate(engine, p.lanes, p.pieces())


@pytest.mark.parametrize("dep", [1, 2, -1])
def test_the_builder_refuses_what_could_deadlock(dep: int) -> None:
    builder = FragmentBuilder(1)
    builder.task(Kind.LOAD, 0, Work("h2d"), [])
    with pytest.raises(MoesimError, match=f"task 1 .* depends on task {dep}: ids must be a topological order"):
        builder.task(Kind.LOAD, 0, Work("h2d"), [(dep, DATA)])


def test_the_builder_refuses_a_lane_that_does_not_exist() -> None:
    with pytest.raises(MoesimError, match="lane 1 does not exist"):
        FragmentBuilder(1).task(Kind.LOAD, 1, Work("h2d"), [])


@pytest.mark.parametrize("gate", [1, -1])
def test_the_builder_refuses_a_gate_outside_its_step(gate: int) -> None:
    builder = FragmentBuilder(1)
    builder.task(Kind.LOAD, 0, Work("h2d"), [])
    with pytest.raises(MoesimError, match="step 0"):
        builder.end_step(0, 0, gate, 1, 1, 1)


def test_the_builder_merges_duplicate_dependencies_and_gates_what_reaches_back() -> None:
    p = program("a", "b")
    p.task("a", 1)
    p.task("b", 1)
    p.end_step(gate=1)
    p.task("a", 1, after=[0], slot=[0])  # only on the step before: gated
    p.task("a", 1, after=[2, 0])  # has one within its step: not gated itself
    p.task("b", 1)  # on nothing: gated
    _, (second, _costs) = p.pieces()
    assert [[t for t, _ in second.deps(row)] for row in range(3)] == [[0, 1], [2, 0], [1]]
    assert second.deps(0) == [(0, DATA), (1, DATA)]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_waiting_lets_time_pass(engine: Any) -> None:
    """A load of 100 ps crosses the border at 10; the clock waits, twice, and what comes then starts then."""
    p = program("gpu", "ssd", "ssd2")
    p.task("gpu", 10)
    p.task("ssd", 100)
    p.task("ssd", 5, after=[1])
    p.end_step(gate=0)
    p.task("gpu", 7)
    p.end_step()
    p.task("gpu", 1, after=[2])
    (one, two, three), state = p.pieces(), engine(p.lanes)
    assert state.wait(3).task.tolist() == [] and state.now_ps == 3
    assert state.advance(*one).task.tolist() == [0]
    assert state.now_ps == 13
    assert state.wait(13).task.tolist() == [] and state.wait(102).task.tolist() == []
    assert state.wait(103).end_ps.tolist() == [103]
    second = state.advance(*two)
    assert (second.task.tolist(), second.start_ps.tolist(), second.end_ps.tolist()) == ([2, 3], [103, 103], [108, 110])
    assert second.cause.tolist() == [1, 0]  # the gate let it begin, long ago
    assert state.wait(1000).task.tolist() == [] and state.now_ps == 1000
    assert state.advance(*three).start_ps.tolist() == [1000]
    assert state.finish().task.tolist() == [] and state.now_ps == 1001
    with pytest.raises(MoesimError, match="cannot wait until 1000 ps, it is 1001 ps already"):
        state.wait(1000)
