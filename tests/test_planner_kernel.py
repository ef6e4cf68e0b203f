"""The compiled planner gives the fragments of the reference, array for array, where it says that it covers a run; else it steps aside."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planner_cases import Drawn, case, machine, model, real_model, trace
from planner_draws import draw_shape, one_of

from moesim.errors import InputError
from moesim.planner import Planner
from moesim.planner.fast import CompiledPlanner
from moesim.schedule import Fragment, Kind, Outcome
from moesim.simulate import Case, load_case

HEALTH = [*HealthCheck]
few = settings(max_examples=150, deadline=None, suppress_health_check=HEALTH)
nightly = settings(max_examples=3000, deadline=None, suppress_health_check=HEALTH)


@st.composite
def covered(draw: st.DrawFn) -> Drawn:
    """A random scenario of the kind that the kernel covers; combinations that the layout refuses are left out."""
    batch, output = draw(one_of([1, 1, 2, 3])), draw(st.integers(0, 12))
    prompt = draw(one_of([0, 0, 3, 5])) if output else 4
    rows = prompt + output + 1
    shape = draw_shape(draw, 2 * batch * rows)
    routing = trace(shape.ids, seq=[t // rows for t in range(2 * batch * rows)], prompt=prompt, n_experts=shape.n_experts)
    prefetch = {
        "predictor": draw(one_of(["none", "oracle", "popularity", "previous", "cooccurrence", "linear", "gate-lookahead"])),
        "distance": draw(st.integers(1, shape.n_moe)), "threshold": draw(one_of([0.0, 0.0, 0.3])), "recall": 0.7,
    }  # fmt: skip
    memory = {
        "kv": draw(one_of(["maximum", "live", "paged"])), "kv_block_tokens": 4, "arena": draw(one_of(["grown", "maximum"])),
        "context_tokens": draw(one_of([0, 0, 0, 4])),
    }  # fmt: skip
    try:
        it = case(
            routing, **shape.parts, trace={"train_fraction": draw(one_of([0.0, 0.5]))},
            prefetch=prefetch, memory=memory, lanes=draw(one_of(["fifo", "priority"])),
            workload={"batch": batch, "prompt_tokens": prompt, "output_tokens": output, "prefill_chunk": draw(st.integers(1, 4))},
            pipeline={"hidden_states": draw(one_of(["shared", "staged"]))},
        )  # fmt: skip
        it.routing.steps  # noqa: B018  loads the trace while its file is there
    except InputError:
        assume(False)
        raise
    return Drawn(it)


def compiled(it: Case) -> CompiledPlanner:
    given, routing = it.planner(), it.routing
    return CompiledPlanner(it.layout, routing.used, routing.steps, routing.popularity, given.predicted, given.prediction_source)


def assert_equal(mine: Fragment, its: Fragment) -> None:
    for column in fields(Fragment):
        a, b = getattr(mine, column.name), getattr(its, column.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and a.flags.c_contiguous, column.name
            np.testing.assert_array_equal(a, b, err_msg=column.name)
        else:
            assert a == b, column.name


def check(it: Case, steps_per_fragment: int, expect: str = "") -> tuple[Planner, list[Fragment]]:
    """Both planners give the same; return the reference and its fragments."""
    reference, fast = it.planner(), compiled(it)
    assert fast.uncovered == expect
    assert (fast.lanes, fast.tiers, fast.lines) == (reference.lanes, reference.tiers, reference.lines)
    assert fast.initial_memory() == reference.initial_memory()
    fragments = list(reference.fragments(steps_per_fragment))
    mine = list(fast.fragments(steps_per_fragment))
    assert len(mine) == len(fragments)
    for a, b in zip(mine, fragments, strict=True):
        assert_equal(a, b)
    assert fast.out_of_memory == reference.out_of_memory
    assert fast.dropped_prefetches == reference.dropped_prefetches
    return reference, fragments


@few
@given(drawn=covered(), size=st.integers(1, 9))
def test_equals_the_reference(drawn: Drawn, size: int) -> None:
    check(drawn.case, size)


@pytest.mark.nightly
@nightly
@given(drawn=covered(), size=st.integers(1, 9))
def test_equals_the_reference_on_thousands(drawn: Drawn, size: int) -> None:
    check(drawn.case, size)


OVER_RAM = {"vram": {"hold": 3, "policy": "lru"}, "ram": {"hold": "all"}}


def cycle(steps: int, n_layers: int = 2, n_experts: int = 6) -> Any:
    return trace(
        [[[(t + k + layer) % n_experts for k in range(2)] for layer in range(n_layers)] for t in range(steps)], n_experts=n_experts
    )


def test_drops_evictions_and_waves_are_met() -> None:
    """The features that random scenarios shall reach are in this one: it counts them."""
    it = case(cycle(40), of=model(2, 6, 2), pools=OVER_RAM | {"vram": {"hold": 2, "policy": "lru"}}, prefetch={"predictor": "oracle"})
    planner, fragments = check(it, 7)
    assert planner.dropped_prefetches > 0
    outcomes = np.concatenate([f.access[:, 3] for f in fragments])
    assert set(outcomes.tolist()) == {Outcome.CACHE, Outcome.PREFETCH, Outcome.MISS}
    small = case(cycle(20), of=model(2, 6, 2), pools=OVER_RAM | {"vram": {"hold": 1, "policy": "lfu"}})  # two waves a layer-set
    _, fragments = check(small, 20)
    kinds = fragments[0].kind[(fragments[0].step == 0) & (fragments[0].layer == 0) & (fragments[0].expert >= 0)].tolist()
    assert kinds == [Kind.LOAD, Kind.FFN, Kind.LOAD, Kind.FFN]


@pytest.mark.parametrize("distance", [1, 2])
@pytest.mark.parametrize("predictor", ["popularity", "previous", "cooccurrence", "linear", "gate-lookahead"])
def test_prefetch_across_prompt_chunks(predictor: str, distance: int) -> None:
    """Which tokens of the next chunk a prediction may speak of depends on its source."""
    ids = np.random.default_rng(3).permuted(np.tile(np.arange(9), (28, 2, 1)), axis=2)[:, :, :2]
    routing = trace(ids, seq=[t // 14 for t in range(28)], prompt=9, n_experts=9)
    workload = {"prompt_tokens": 9, "prefill_chunk": 3, "output_tokens": 4}
    pools = {"vram": {"hold": 7, "policy": "lru"}, "ram": {"hold": "all"}}
    it = case(routing, of=model(2, 9, 2), workload=workload, pools=pools, prefetch={"predictor": predictor, "distance": distance})
    _, fragments = check(it, 3)
    assert predictor == "previous" or any(f.prefetch.any() for f in fragments)  # LRU still holds what the previous token used


def test_memory_that_runs_out_in_mid_run() -> None:
    room = 200 + 6 * 1000 + 16 * 6 + 15
    it = case(cycle(12), on=machine(room), of=model(2, 6, 2), pools=OVER_RAM, memory={"kv": "live"}, prefetch={"predictor": "oracle"})
    for size in (1, 4, 6, 100):
        planner, fragments = check(it, size)
        assert planner.out_of_memory is not None and planner.out_of_memory.step == 6 == sum(len(f.steps) for f in fragments)
    planner, fragments = check(case(cycle(3), on=machine(2_000), of=model(2, 6, 2), pools=OVER_RAM), 4)
    assert planner.out_of_memory is not None and not fragments  # before the first step


@pytest.mark.parametrize(
    ("settings_", "why"),
    [
        ({"granularity": "matrix"}, "granularity matrix"),
        ({"workload": {"batch": 2, "output_tokens": 6}, "pipeline": {"micro_batches": 2}}, "micro-batches"),
        ({"placement": {"site": "in-place"}}, "experts computed in place"),
        ({"placement": {"experts": "cpu"}}, "attention and experts on different devices"),
        ({"prefetch": {"predictor": "oracle", "into": "buffers"}}, "prefetch into buffers"),
        ({"memory": {"kv": "live", "kv_from_experts": True}}, "a KV cache that grows into the expert pool"),
        ({"pools": {"vram": {"hold": 3, "policy": "belady"}, "ram": {"hold": "all"}}}, "policy belady"),
        ({"pools": {"vram": {"hold": 3, "policy": "lru", "scope": "global"}, "ram": {"hold": "all"}}}, "a pool of all layers"),
        ({"pools": {"vram": {"hold": 3, "refresh_tokens": 2}, "ram": {"hold": "all"}}}, "a refreshed placement"),
        ({"pools": {"vram": {"hold": 2, "policy": "lru"}, "ram": {"hold": 4, "policy": "lru"}}}, "experts that pass through RAM"),
        ({"pools": {"vram": {"hold": 2, "policy": "lru"}, "ram": {"hold": "all", "policy": "lru", "inclusive": False}}}, "an exclusive RAM cache"),
        ({"io": {"fast_map": "refreshed"}}, "a refreshed placement"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_left_to_the_reference(settings_: dict[str, Any], why: str) -> None:
    routing = cycle(12)
    routing = trace(routing.expert_ids, seq=[t // 6 for t in range(12)], n_experts=6)
    check(case(routing, of=real_model(2, n_experts=6, top_k=2), **({"pools": OVER_RAM} | settings_)), 4, why)


def test_other_uncovered_parts() -> None:
    tables = [{"name": "t", "rows": 100, "cols": 8, "rows_read_per_token": 2}]
    of = real_model(1, lookup_tables=tables)
    check(case(trace([[0]]), of=of, placement={"lookup": "ssd"}, pools=OVER_RAM), 4, "lookup tables on storage")
    shared = real_model(2, experts={"n_experts": 6, "top_k": 2, "n_shared": 1})
    elsewhere = {"layers": [{"layers": "0", "part": "shared_expert", "device": "cpu"}]}
    check(case(cycle(4), of=shared, placement=elsewhere, pools=OVER_RAM), 4, "a shared expert that hidden states are copied to")
    mixed = {"default": "raw-int8", "overrides": [{"part": "routed_experts", "layers": "0", "format": "raw-int4"}]}
    static = {"vram": {"hold": 2}, "ram": {"hold": "all"}}
    why = "transient slots for experts of several sizes"
    check(case(cycle(4), of=real_model(2, n_experts=6, top_k=2), precision=mixed, pools=static), 4, why)


def test_a_shared_expert_equal_to_a_routed_one_is_one_work() -> None:
    of = real_model(2, experts={"n_experts": 6, "top_k": 2, "n_shared": 1, "shared_intermediate_size": 8})
    _, fragments = check(case(cycle(4), of=of, pools=OVER_RAM), 4)
    assert len({w for w in fragments[0].works if w.kernels == 3 and w.part == "ffn"}) == 1


@pytest.mark.parametrize(
    ("scenario", "changes", "why"),
    [
        ("qwen3-30b-desktop", ("workload.output_tokens=12",), ""),
        (
            "qwen3-30b-desktop",
            ("workload.output_tokens=6", "workload.prompt_tokens=40", "workload.prefill_chunk=16", "workload.batch=2"),
            "",
        ),
        ("quickstart", ("workload.output_tokens=8",), "attention and experts on different devices"),
    ],
)
def test_scenarios_agree(scenario: str, changes: tuple[str, ...], why: str) -> None:
    _, fragments = check(load_case(scenario, changes), 5, why)
    assert sum(f.n_tasks for f in fragments) > 500


def test_a_recorded_trace_agrees(shared: Path) -> None:
    source = f"trace.source={shared / 'traces' / 'gptoss20b_mmlu_validation.npz'}"
    changes = (source, "workload.output_tokens=40", "workload.prompt_tokens=64", "placement.experts=gpu", "placement.pools.vram.policy=lfu",
               "placement.pools.vram.hold=20 %", "placement.pools.ram.hold=all", "prefetch.predictor=cooccurrence")  # fmt: skip
    check(load_case("gpt-oss-20b-laptop", changes), 16)
