"""What holds for every schedule on every engine, on random schedules: causality, disciplines, conservation of bytes, lower bounds."""

from __future__ import annotations

import heapq
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timeline_program import ENGINES, PER_PS, Program, assert_same, simulate, walk_back

from moesim.schedule import Dep, Fragment, Lane
from moesim.sharing import max_min_rates
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE, Timeline

CHANNELS = {"ram": (1.0, 0.3, 2.0), "vram": (1.0, 5.0), "pcie": (0.5, 1.0, 0.7)}
engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
many = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """One to four steps of up to eight tasks on up to four lanes; small numbers, so that events coincide often."""
    lanes = [
        Lane(f"lane{i}", draw(st.integers(1, 3)), draw(st.sampled_from(["fifo", "priority"])))
        for i in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    p = Program(lanes, **{name: draw(st.sampled_from(rates)) * PER_PS for name, rates in CHANNELS.items()})
    n_steps = draw(st.integers(1, 4))
    for step in range(n_steps):
        first = p.n_tasks
        for _ in range(draw(st.integers(1, 8))):
            earlier = st.lists(st.integers(0, p.n_tasks - 1), max_size=3) if p.n_tasks else st.just([])
            flows = draw(st.booleans())
            shares = st.dictionaries(st.sampled_from(list(CHANNELS)), st.sampled_from([1.0, 1.0, 2.0, 0.5]), max_size=3)
            p.task(
                draw(st.sampled_from(lanes)).name,
                draw(st.sampled_from([0, 0, 1, 5, 10, 20])),
                draw(st.sampled_from([1, 7, 20, 100, 333])) if flows else 0,
                draw(earlier),
                slot=draw(earlier),
                on=draw(shares) if flows else "",
                cap=draw(st.sampled_from([math.inf, math.inf, 0.1 * PER_PS, 0.4 * PER_PS])),
                use=(draw(st.integers(step, n_steps)), draw(st.integers(0, 2))),
                prefetch=draw(st.booleans()),
            )
        p.end_step(gate=draw(st.integers(first, p.n_tasks - 1)))
    return p


class Run:
    """One simulated program with everything per task in plain lists."""

    def __init__(self, engine: Any, p: Program) -> None:
        pieces = p.pieces(())
        self.fragment: Fragment = pieces[0][0]
        self.costs = pieces[0][1]
        self.timeline: Timeline = simulate(engine, p.lanes, pieces)
        self.n = self.fragment.n_tasks
        self.start, self.end = self.timeline.start_ps.tolist(), self.timeline.end_ps.tolist()
        self.deps = [self.fragment.deps(row) for row in range(self.n)]
        self.ready = [max((self.end[t] for t, _ in d), default=0) for d in self.deps]
        lane = self.fragment.lane.tolist()
        self.on_lane = [[t for t in range(self.n) if lane[t] == i] for i in range(len(p.lanes))]
        use = zip(self.fragment.use_step.tolist(), self.fragment.use_layer.tolist(), self.fragment.prefetch.tolist(), strict=True)
        self.key = [(*u, t) for t, u in enumerate(use)]


@engines
@many
@given(p=programs())
def test_causality_and_servers(engine: Any, p: Program) -> None:
    run = Run(engine, p)
    assert run.timeline.task.tolist() == list(range(run.n))
    server = run.timeline.server.tolist()
    for t in range(run.n):
        assert 0 <= run.ready[t] <= run.start[t] <= run.end[t]
    for lane, tasks in zip(p.lanes, run.on_lane, strict=True):
        assert all(0 <= server[t] < lane.width for t in tasks)
        for s in range(lane.width):  # no server has two tasks at once
            mine = sorted((run.start[t], run.end[t]) for t in tasks if server[t] == s)
            assert all(a[1] <= b[0] for a, b in pairwise(mine))


@engines
@many
@given(p=programs())
def test_fifo_starts_follow_from_the_ends(engine: Any, p: Program) -> None:
    """On a fifo lane the start is known in closed form: when ready, when the one before has started, and when a server is free."""
    run = Run(engine, p)
    for lane, tasks in zip(p.lanes, run.on_lane, strict=True):
        if lane.discipline == "fifo":
            free, before = [0] * lane.width, 0
            for t in tasks:
                before = max(run.ready[t], before, heapq.heappop(free))
                assert run.start[t] == before
                heapq.heappush(free, run.end[t])


@engines
@many
@given(p=programs())
def test_priority_lanes_never_idle_nor_prefer_the_later_use(engine: Any, p: Program) -> None:
    run = Run(engine, p)
    for lane, tasks in zip(p.lanes, run.on_lane, strict=True):
        if lane.discipline != "priority":
            continue
        for t in tasks:
            if run.start[t] == run.ready[t]:
                continue
            instants = {run.ready[t], *(run.end[u] for u in tasks if run.ready[t] < run.end[u] < run.start[t])}
            for at in instants:  # it waits only while every server is busy
                assert sum(run.start[u] <= at < run.end[u] for u in tasks) == lane.width
            overtakers = [u for u in tasks if run.ready[t] < run.start[u] < run.start[t]]
            assert all(run.key[u] < run.key[t] for u in overtakers)


@engines
@many
@given(p=programs())
def test_flows_have_their_max_min_rates_at_all_times(engine: Any, p: Program) -> None:
    """Integrate the fair rates over the timeline: every flow ends within the picosecond in which its last byte passes."""
    run = Run(engine, p)
    volume, cap = (column[run.costs.price].tolist() for column in (run.costs.volume, run.costs.cap))
    shares = run.costs.shares[run.costs.price].tolist()
    capacity = run.costs.capacity.tolist()
    begin = [s + lat for s, lat in zip(run.start, run.costs.latency_ps[run.costs.price].tolist(), strict=True)]
    flows = [t for t in range(run.n) if volume[t] > 0]
    passed, last = dict.fromkeys(flows, 0.0), dict.fromkeys(flows, math.inf)
    for a, b in pairwise(sorted({x for t in flows for x in (begin[t], run.end[t])})):
        active = [t for t in flows if begin[t] <= a and b <= run.end[t]]
        rates = [0.0] * len(active)
        max_min_rates([shares[t] for t in active], [cap[t] for t in active], capacity, rates)
        for t, rate in zip(active, rates, strict=True):
            passed[t] += rate / PER_PS * (b - a)
            last[t] = rate / PER_PS
        for c, limit in enumerate(capacity):
            assert sum(shares[t][c] * r for t, r in zip(active, rates, strict=True)) <= limit * (1 + 1e-9)
    for t in flows:
        assert begin[t] <= run.end[t]
        if last[t] < math.inf:
            assert -2e-3 * last[t] <= passed[t] - volume[t] < last[t] * (1 + 1e-6)
    for c, limit in enumerate(capacity):  # conservation over the whole run
        used = [t for t in flows if shares[t][c] > 0]
        points = sorted({x for t in used for x in (begin[t], run.end[t])})
        busy = sum(b - a for a, b in pairwise(points) if any(begin[t] <= a and b <= run.end[t] for t in used))
        assert sum(shares[t][c] * volume[t] for t in used) <= limit / PER_PS * (busy + 2e-3 * len(used)) * (1 + 1e-9)


@engines
@many
@given(p=programs())
def test_lower_bounds(engine: Any, p: Program) -> None:
    run = Run(engine, p)
    alone = run.costs.alone_ps().tolist()
    latency, volume = (column[run.costs.price].tolist() for column in (run.costs.latency_ps, run.costs.volume))
    for t in range(run.n):
        assert run.end[t] - run.start[t] >= alone[t]
        if volume[t] == 0:
            assert run.end[t] - run.start[t] == latency[t]
    makespan = run.timeline.makespan_ps
    for lane, tasks in zip(p.lanes, run.on_lane, strict=True):
        assert makespan * lane.width >= sum(run.end[t] - run.start[t] for t in tasks) >= sum(alone[t] for t in tasks)


@engines
@many
@given(p=programs())
def test_critical_path_and_causes(engine: Any, p: Program) -> None:
    run = Run(engine, p)
    last = run.end.index(run.timeline.makespan_ps)
    path = walk_back(run.timeline, last)
    assert path[0][1] == 0
    assert sum(to - since for _, since, to in path) == run.timeline.makespan_ps
    lane = run.fragment.lane.tolist()
    for t, (cause, why) in enumerate(zip(run.timeline.cause.tolist(), run.timeline.cause_type.tolist(), strict=True)):
        if cause == NO_CAUSE:
            assert run.start[t] == 0 and not run.deps[t]
        elif why == CAUSE_HEAD_OF_LINE:
            assert lane[cause] == lane[t] and p.lanes[lane[t]].discipline == "fifo" and cause < t
            assert run.start[cause] == run.start[t] > run.ready[t]
        elif why == Dep.LANE:
            assert lane[cause] == lane[t] and run.end[cause] == run.start[t] > run.ready[t]
        else:  # of the dependencies that ended last the largest id
            assert run.start[t] == run.ready[t]
            assert (cause, why) == max(d for d in run.deps[t] if run.end[d[0]] == run.ready[t])


@engines
@many
@given(p=programs(), data=st.data())
def test_cutting_into_fragments_changes_nothing(engine: Any, p: Program, data: st.DataObject) -> None:
    whole = simulate(engine, p.lanes, p.pieces(()))
    assert_same(simulate(engine, p.lanes, p.pieces()), whole)
    cuts = data.draw(st.sets(st.integers(0, len(p.steps) - 1)))
    assert_same(simulate(engine, p.lanes, p.pieces(sorted(cuts))), whole)
