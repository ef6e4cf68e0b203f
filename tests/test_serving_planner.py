"""Compiled planning of mixed steps gives the fragments of the reference, array for array; a mixed step in lockstep is a plain one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planner_cases import Drawn, case, machine, model, real_model, trace

from moesim.errors import InputError
from moesim.planner.fast_mixed import CompiledMixedPlanner
from moesim.planner.mixed import MixedPlanner
from moesim.schedule import Fragment
from moesim.simulate import Case
from moesim.workload import DECODE, PREFILL, MixedStep

few = settings(max_examples=120, deadline=None, suppress_health_check=[*HealthCheck])
nightly = settings(max_examples=3000, deadline=None, suppress_health_check=[*HealthCheck])
one_of = st.sampled_from


@st.composite
def served(draw: st.DrawFn) -> tuple[Drawn, list[list[MixedStep]]]:
    """A random scenario of the kind that the kernels cover, and fragments of random steps."""
    n_layers, n_experts = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    top_k = draw(st.integers(1, min(3, n_experts)))
    moe = sorted(draw(st.sets(st.integers(0, n_layers - 1), min_size=1)))
    layers = ",".join(map(str, moe)) if draw(st.booleans()) else "all"
    experts = {"n_experts": n_experts, "top_k": top_k, "layers": layers, "n_shared": draw(one_of([0, 0, 1]))}
    window = {"kind": "sliding", "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "window": 4}
    sliding = [{"layers": "0", "attention": window}] if draw(st.booleans()) else []
    declared = draw(one_of([True, False]))
    of = model(n_layers, n_experts, top_k, attention_overrides=sliding) if declared else real_model(
        n_layers, experts=experts, dense_ffn={"intermediate_size": 8}, attention_overrides=sliding
    )  # fmt: skip
    n_moe = n_layers if declared or layers == "all" else len(moe)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    liked = rng.random((n_moe, n_experts)) + draw(one_of([0.0, 0.5]))
    ids = np.array([[rng.choice(n_experts, top_k, replace=False, p=p / p.sum()) for p in liked] for _ in range(40)], np.int16)
    ids[rng.random(ids.shape[:2]) < draw(one_of([0.0, 0.0, 0.2]))] = -1
    vram = draw(one_of([None, 4_000, 20_000, 100_000]))
    on = machine(vram, draw(one_of([9_000, 100_000])), vram is None or draw(st.booleans()), fast=draw(st.booleans()))
    policy = draw(one_of(["lru", "lfu", "static"]))
    top = {
        "hold": draw(one_of(["fit", "50 %", *range(n_experts + 1)])), "policy": policy, "warm": draw(st.booleans()),
        "transient_slots": draw(one_of([0, 1, 3, 6])) if policy == "static" else 0,
    }  # fmt: skip
    pools = {"unified": top} if vram is None else {"vram": top, "ram": {"hold": "all"}}
    precision: dict[str, Any] = {"default": "raw-int8", "kv": "raw-int8"}
    if policy != "static" and draw(st.booleans()):
        precision["overrides"] = [{"part": "routed_experts", "layers": "0", "format": "raw-int4"}]
    placement: dict[str, Any] = {}
    if draw(one_of([False, False, True])):
        placement["layers"] = [{"layers": "0", "part": part, "device": "cpu"} for part in ("attention", "routed_experts")]
    try:
        it = case(
            trace(ids, seq=[t // 10 for t in range(40)], prompt=5, n_experts=n_experts), on=on, of=of, precision=precision, placement=placement, pools=pools,
            granularity=draw(one_of(["layer", "layer", "expert"])), lanes=draw(one_of(["fifo", "priority"])),
            memory={"kv": draw(one_of(["maximum", "live", "paged"])), "arena": draw(one_of(["grown", "maximum"]))},
            workload={"batch": 4, "prompt_tokens": 4, "output_tokens": 1, "prefill_chunk": 4}, pipeline={"hidden_states": draw(one_of(["shared", "staged"]))},
            trace={"sequences": "repeat"},
        )  # fmt: skip
        it.routing.steps  # noqa: B018  loads the trace while its file is there
    except InputError:
        assume(False)
        raise
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
