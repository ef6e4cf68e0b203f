"""Quality that a plan states, and what dequantisation and adapters cost: bytes in the ledger, time in the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.cost import CostModel
from moesim.errors import InputError
from moesim.hardware.compose import find_hardware
from moesim.model_files import load_model
from moesim.planner.works import Works
from moesim.precision import FORMATS, plan_from
from moesim.report import loss_of_quality
from moesim.scenario import Scenario
from moesim.schedule import Work
from moesim.simulate import Case, make_case, quality_of, simulate
from moesim.stated_quality import published

MEASURED: dict[str, Any] = {"basis": "measured", "model": "tinymoe", "benchmark": "bits per byte", "loss_percent": 2.5, "source": "a test"}


def case(precision: Any, **more: Any) -> Case:
    data = {
        "model": "tinymoe", "precision": precision, "hardware": "laptop-8gb", "trace": {"source": "tinymoe"}, "workload": {"output_tokens": 4},
        "placement": {"attention": "cpu", "experts": "cpu", "pools": {"ram": {"hold": "all"}}},
    }  # fmt: skip
    return make_case(Scenario.model_validate(data | more))


def known(of: Case) -> dict[str, Any]:
    return quality_of(of.model, of.plan)


# ---- what is stated


def test_a_measured_quality_holds_for_the_plan_that_was_measured() -> None:
    plan = plan_from({"default": "int3-g64", "rounding": "clip"})
    stated = {"default": "int3-g64", "rounding": "clip", "quality": MEASURED | {"plan_hash": plan.hash}}
    assert known(case(stated))["loss_percent"] == 2.5
    changed = stated | {"attention": "int8"}
    assert known(case(changed))["basis"] == "unknown"
    other = stated | {"quality": MEASURED | {"plan_hash": plan.hash, "model": "mixtral-8x7b"}}
    assert known(case(other))["basis"] == "unknown"


def test_nothing_is_lost_at_16_bits_and_nothing_is_guessed_below() -> None:
    assert known(case("bf16"))["basis"] == "reference"
    unknown = known(case("int8"))
    assert unknown["basis"] == "unknown" and unknown["loss_percent"] is None
    assert "unknown" in loss_of_quality(unknown)


def test_published_rows_are_of_bundled_models_and_formats() -> None:
    rows = published()
    assert rows and len({(row.model, row.format) for row in rows}) == len(rows)
    for row in rows:
        assert row.format in FORMATS and row.source and load_model(row.model).name == row.model
    found = plan_from("Q4_K").known_quality("mixtral-8x7b")
    assert found is not None and found.basis == "published" and found.loss_percent == 1.74
    assert plan_from({"default": "Q4_K", "attention": "Q6_K"}).known_quality("mixtral-8x7b") is None
    assert plan_from("Q4_K").known_quality("tinymoe") is None


def test_results_and_limits_of_sweeps_carry_it() -> None:
    from moesim.sweep.record import record, resolve_key, value

    result = simulate(case("fp16"))
    assert value(record(result), resolve_key("quality_loss")) == 0.0
    assert result.as_dict()["quality"]["basis"] == "reference"


def test_a_plan_may_be_a_file_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("default: int8\nattention: fp16\n")
    scenario = Scenario.model_validate(
        {"model": "tinymoe", "precision": "plan.yaml", "hardware": "laptop-8gb", "trace": {"generate": "uniform"}}
    )
    assert make_case(scenario, base=tmp_path).plan == plan_from({"default": "int8", "attention": "fp16"})
    (tmp_path / "plan.yaml").write_text("default: int5\n")
    with pytest.raises(InputError, match=r"plan\.yaml:1.*int5"):
        make_case(scenario, base=tmp_path)


# ---- adapters and dequantisation


def test_adapters_are_a_line_of_the_ledger_and_nothing_that_is_loaded() -> None:
    plain, adapted = case("int8"), case({"default": "int8", "adapters": {"rank": 4, "experts": 3}})
    # 8 layers x 3 experts x 3 matrices x rank 4 x (128 + 128) values of 2 bytes
    assert adapted.model.adapter_bytes(adapted.plan) == 8 * 3 * 3 * 4 * 256 * 2
    lines = {line.name: line.bytes for line in adapted.layout.ledger.lines}
    assert lines["weights: adapters"] == 8 * 3 * 3 * 4 * 256 * 2
    assert lines["routed experts"] == {line.name: line.bytes for line in plain.layout.ledger.lines}["routed experts"]
    every = case({"default": "int8", "adapters": {"rank": 4}})
    assert every.model.adapter_bytes(every.plan) == 8 * 16 * 3 * 4 * 256 * 2


@pytest.mark.parametrize("granularity", ["expert", "matrix", "layer"])
def test_adapters_take_time(granularity: str) -> None:
    plain, adapted = (case(p, granularity=granularity) for p in ("int8", {"default": "int8", "adapters": {"rank": 4}}))
    prices = CostModel(plain.hardware)
    found = []
    for it in (plain, adapted):
        works = Works(it.layout)
        found.append([works.experts("cpu", 0, [2, 1])] if granularity == "layer" else works.expert_pieces("cpu", 0, 3))
    for one, other in zip(*found, strict=True):
        slow, fast = prices.price(other), prices.price(one)
        assert other.adapter_bytes > 0 == one.adapter_bytes and other.flops > one.flops
        assert slow.latency_s > fast.latency_s and slow.volume - fast.volume == other.adapter_bytes
    total = 2 * 3 * 4 * 256  # bytes of one expert's adapters, and FLOP a token
    assert sum(w.adapter_bytes for w in found[1]) == total * (2 if granularity == "layer" else 1)


def test_only_weights_that_are_dequantised_wait_for_it() -> None:
    hardware = find_hardware("laptop-8gb", None)
    device = hardware.devices["cpu"].model_copy(
        update={"dequant_bytes_per_s": hardware.devices["cpu"].launch.model_copy(update={"value": 1e6})}
    )
    slow = CostModel(hardware.model_copy(update={"devices": dict(hardware.devices) | {"cpu": device}}))
    usual = CostModel(hardware)
    for name in ("int4-g64", "Q4_K", "nf4"):
        work = Work("cpu", 1.0, FORMATS[name].compute, 1000, weights=name)
        assert slow.price(work).cap == pytest.approx(1e6)
    for name in ("fp16", "int8", "mxfp4", ""):
        work = Work("cpu", 1.0, "fp32", 1000, weights=name)
        assert slow.price(work).cap == usual.price(work).cap > 1e7
