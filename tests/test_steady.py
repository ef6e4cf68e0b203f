"""The sum of works equals the timeline where nothing waits; parts of attention add up to the whole."""

from __future__ import annotations

import pytest

from moesim.cost import CostModel
from moesim.planner.works import Works
from moesim.scenario import Scenario
from moesim.simulate import make_case, simulate
from moesim.steady import Part, StepShape, expert_rows, merged, price, projections, scores


def case():  # type: ignore[no-untyped-def]
    return make_case(Scenario.model_validate({
        "name": "steady", "model": "olmoe-1b-7b", "precision": "fp16", "hardware": "desktop-24gb", "granularity": "layer", "engine": "fast",
        "trace": {"generate": "uniform", "train_fraction": 0.5}, "workload": {"output_tokens": 1, "cached_tokens": 1023}, "derate": 1.0,
    }))  # fmt: skip


def step_parts(works: Works, step: StepShape) -> list[Part]:
    model = works.model
    rows = expert_rows(model.n_experts, model.top_k, step.tokens)
    parts = []
    for layer in range(model.n_layers):
        parts += [Part("projections", projections(works, layer, step.tokens), 1.0), Part("attention", scores(works, layer, step), 1.0),
                  Part("router", works.router(layer, step.tokens), 1.0), Part("experts", works.experts("gpu", layer, rows), 1.0),
                  Part("combine", works.combine(layer, step.tokens), 1.0)]  # fmt: skip
    return [*parts, Part("head", works.head(1), 1.0)]


def test_sum_of_works_is_the_timeline_of_a_step() -> None:
    it = case()
    seconds = sum(price(step_parts(Works(it.layout), StepShape(1, 1, 1024)), CostModel(it.hardware)).values())
    timeline = simulate(it).timeline
    assert seconds == pytest.approx(float(timeline.end_ps.max()) * 1e-12, rel=1e-6)


def test_attention_is_the_sum_of_its_parts() -> None:
    works = Works(case().layout)
    whole = works.attention(3, 1, 1, 1024)
    a, b = projections(works, 3, 1), scores(works, 3, StepShape(1, 1, 1024))
    assert a.weight_bytes + b.weight_bytes == whole.weight_bytes
    assert a.state_bytes + b.state_bytes == whole.state_bytes
    assert a.flops + b.flops == whole.flops
    assert a.kernels + b.kernels == whole.kernels


def test_equal_works_are_priced_once_and_counted() -> None:
    it = case()
    parts = step_parts(Works(it.layout), StepShape(1, 1, 1024))
    fewer = merged(parts)
    assert len(fewer) == 6 and sum(p.times for p in fewer) == len(parts)
    one, other = (price(p, CostModel(it.hardware)) for p in (parts, fewer))
    assert one == pytest.approx(other)


def test_rows_of_experts() -> None:
    assert expert_rows(128, 8, 1) == (1,) * 8
    assert sum(expert_rows(128, 8, 32)) == 256
    assert len(expert_rows(128, 8, 32)) == 112  # 128 (1 - (1 - 1/16)^32) = 111.8
    assert len(expert_rows(128, 8, 32, 0.5)) == 63  # 64 (1 - (7/8)^32) = 63.1
    assert len(expert_rows(8, 2, 1000)) == 8
