"""Compiled planning of mixed steps gives the fragments of the reference, array for array; a mixed step in lockstep is a plain one."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planner_cases import Drawn, case, trace
from planner_draws import draw_shape, one_of

from moesim.errors import InputError
from moesim.planner.fast_mixed import CompiledMixedPlanner
from moesim.planner.mixed import MixedPlanner
from moesim.schedule import Fragment
from moesim.simulate import Case
from moesim.workload import DECODE, PREFILL, MixedStep

few = settings(max_examples=120, deadline=None, suppress_health_check=[*HealthCheck])
nightly = settings(max_examples=3000, deadline=None, suppress_health_check=[*HealthCheck])


@st.composite
def served(draw: st.DrawFn) -> tuple[Drawn, list[list[MixedStep]]]:
    """A random scenario of the kind that the kernels cover, and fragments of random steps."""
    shape = draw_shape(draw, 40)
    try:
        it = case(
            trace(shape.ids, seq=[t // 10 for t in range(40)], prompt=5, n_experts=shape.n_experts), **shape.parts,
            granularity=draw(one_of(["layer", "layer", "expert"])), lanes=draw(one_of(["fifo", "priority"])),
            memory={"kv": draw(one_of(["maximum", "live", "paged"])), "arena": draw(one_of(["grown", "maximum"]))},
            workload={"batch": 4, "prompt_tokens": 4, "output_tokens": 1, "prefill_chunk": 4}, pipeline={"hidden_states": draw(one_of(["shared", "staged"]))},
            trace={"sequences": "repeat"},
        )  # fmt: skip
        it.routing.steps  # noqa: B018  loads the trace while its file is there
    except InputError:
        assume(False)
        raise
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    fragments: list[list[MixedStep]] = []
    index = 0
    for n_steps in draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)):
        fragments.append([])
        for _ in range(n_steps):
            new = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
            context = tuple(int(x) for x in rng.integers(0, 9, len(new)))
            rows = rng.integers(0, it.routing.used.n_rows, sum(new))
            kv = dict.fromkeys(it.layout.kv_tiers, int(rng.integers(0, 100)))
            phase = DECODE if max(new) == 1 else PREFILL
            fragments[-1].append(MixedStep(index, phase, rows, new, context, int(rng.integers(0, len(new) + 1)), kv))
            index += 1
    return Drawn(it), fragments


def assert_equal(mine: Fragment, its: Fragment) -> None:
    for column in fields(Fragment):
        a, b = getattr(mine, column.name), getattr(its, column.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and a.flags.c_contiguous, column.name
            np.testing.assert_array_equal(a, b, err_msg=column.name)
        else:
            assert a == b, column.name


def check(it: Case, fragments: list[list[MixedStep]]) -> None:
    reference, fast = it.planner(MixedPlanner), it.planner(CompiledMixedPlanner)
    assert isinstance(reference, MixedPlanner) and isinstance(fast, CompiledMixedPlanner)
    assert fast.uncovered == ""
    assert (fast.lanes, fast.tiers, fast.lines) == (reference.lanes, reference.tiers, reference.lines)
    assert fast.initial_memory() == reference.initial_memory()
    for steps in fragments:
        assert_equal(fast.plan(steps), reference.plan(steps))


@few
@given(drawn=served())
def test_equals_the_reference(drawn: tuple[Drawn, list[list[MixedStep]]]) -> None:
    check(drawn[0].case, drawn[1])


@pytest.mark.nightly
@nightly
@given(drawn=served())
def test_equals_the_reference_on_thousands(drawn: tuple[Drawn, list[list[MixedStep]]]) -> None:
    check(drawn[0].case, drawn[1])


@pytest.mark.parametrize("granularity", ["expert", "layer", "matrix"])
def test_a_mixed_step_in_lockstep_is_a_plain_step(granularity: str) -> None:
    """Two sequences with prompts of 3 in chunks of 2, then answers: the planner of formed steps emits what the planner of lockstep emits."""
    ids = np.random.default_rng(1).integers(0, 4, (20, 2, 1))
    it = case(
        trace(ids, seq=[0] * 10 + [1] * 10, prompt=4), pools={"vram": {"hold": 2, "policy": "lru"}, "ram": {"hold": "all"}}, granularity=granularity,
        memory={"kv": "live"}, workload={"batch": 2, "prompt_tokens": 3, "output_tokens": 4, "prefill_chunk": 2},
    )  # fmt: skip
    plain = list(it.planner().fragments(100))
    steps, planner = [], it.planner(MixedPlanner)
    assert isinstance(planner, MixedPlanner)
    for step in it.routing.steps:
        sequences, new = step.rows.shape
        kv = {"vram": it.layout.kv_bytes("vram", step.context + new)}
        steps.append(MixedStep(step.index, step.phase, step.rows.ravel(), (new,) * sequences, (step.context,) * sequences, step.emits, kv))
    assert_equal(planner.plan(steps), plain[0])
