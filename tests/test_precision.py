"""Formats have their exact bytes; plans resolve by the most specific override; wrong names are refused with the right one."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.config import Document, Spec, build
from moesim.errors import InputError
from moesim.precision import FORMATS, PARTS, PrecisionPlan, get_format, plan_from, resolve_layers


def test_gguf_block_sizes_equal_the_reference_table() -> None:
    constants = pytest.importorskip("gguf.constants")
    checked = 0
    for kind, (block, size) in constants.GGML_QUANT_SIZES.items():
        ours = get_format(kind.name)
        assert ours.block_bytes * block == size * ours.block, kind.name  # NVFP4: GGUF stores four of our blocks as one
        checked += 1
    assert checked >= 30


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp16", 16), ("mxfp4", 4.25), ("nvfp4", 4.5), ("nf4", 4.5), ("Q8_0", 8.5), ("Q4_K", 4.5), ("Q6_K", 6.5625), ("IQ1_S", 1.5625),
        ("int4-g32", 4.75), ("int4-g128", 4.1875), ("int3-g128", 3.1875), ("int2-g64", 2.375), ("int8-g128", 8.125),
        ("raw-int4", 4), ("raw-int8", 8), ("int8", 8 + 16 / 4096), ("fp8-b128", 8 + 32 / 16384),
    ],
)  # fmt: skip
def test_true_bits_per_weight(name: str, bits: float) -> None:
    assert get_format(name).bits_per_weight == pytest.approx(bits, rel=1e-12)


def test_bytes_count_scales_and_padding() -> None:
    assert get_format("mxfp4").bytes_for(2880, 2880) == 2880 * 90 * 17
    assert get_format("int8").bytes_for(10, 100) == 10 * 100 + 10 * 2
    assert get_format("int4-g128").bytes_for(3, 129) == 3 * 2 * (64 + 2 + 1)  # the second group is padded
    assert get_format("fp8-b128").bytes_for(576, 7168) == 576 * 7168 + 5 * 56 * 4  # 4.5 tiles of rows have 5 scales each
    assert get_format("Q4_K").bytes_for(1, 1) == 144
    assert get_format("raw-int4").bytes_for(1, 3) == 2


@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 300), st.integers(1, 2000))
def test_bytes_grow_with_the_matrix_and_are_at_least_the_bits(name: str, rows: int, cols: int) -> None:
    f = FORMATS[name]
    size = f.bytes_for(rows, cols)
    assert f.bytes_for(rows + 1, cols) > size or f.tile
    assert f.bytes_for(rows, cols + 1) >= size
    assert size * 8 >= rows * cols * 8 * f.block_bytes / f.block


def test_names_in_any_case() -> None:
    assert get_format("q4_k") is get_format("Q4_K")
    assert get_format("MXFP4").name == "mxfp4"


def test_default_covers_matrices_only() -> None:
    plan = plan_from("q4_k")
    assert {part: plan.format(part).name for part in PARTS} == {
        "attention": "Q4_K", "shared_expert": "Q4_K", "routed_experts": "Q4_K", "dense_ffn": "Q4_K", "embeddings": "Q4_K", "head": "Q4_K",
        "lookup": "Q4_K", "router": "fp32", "norms": "fp32", "kv": "fp16", "vision": "fp16",
    }  # fmt: skip
    assert plan.format("routed_experts", 3, "down_bias").name == "fp32"  # vectors are not quantised
    assert plan_from("bf16").format("norms").name == "bf16"  # a 16-bit checkpoint is 16 bits throughout
    assert plan_from({"default": "fp16", "kv": "q8_0"}).format("kv", 0, "state").name == "fp32"


def test_the_most_specific_override_wins_then_the_last() -> None:
    plan = plan_from(
        {
            "default": "Q4_K",
            "overrides": [
                {"part": "routed_experts", "matrix": "down", "layers": "0-3, 30", "format": "Q6_K"},
                {"part": "routed_experts", "layers": [1, 2], "format": "Q8_0"},
                {"part": "routed_experts", "layers": "every 2 from 2", "format": "Q5_K"},
                {"part": "routed_experts", "matrix": "up_bias", "format": "fp16"},
            ],
        }
    )
    found = {(layer, m): plan.format("routed_experts", layer, m).name for layer in (0, 1, 2, 30) for m in ("up", "down")}
    assert found == {
        (0, "up"): "Q4_K", (0, "down"): "Q6_K", (1, "up"): "Q8_0", (1, "down"): "Q6_K", (2, "up"): "Q5_K", (2, "down"): "Q6_K",
        (30, "up"): "Q5_K", (30, "down"): "Q6_K",
    }  # fmt: skip
    assert plan.format("routed_experts", 0, "up_bias").name == "fp16"
    assert plan.format("attention", 1).name == "Q4_K"


def test_layer_sets() -> None:
    assert resolve_layers("0-2, 5", 8) == (0, 1, 2, 5)
    assert resolve_layers("6-", 8) == (6, 7)
    assert resolve_layers("every 3 from 2", 8) == (2, 5)
    assert resolve_layers("all", 3) == (0, 1, 2)
    assert resolve_layers((4, 1), 8) == (1, 4)
    for bad in ("8", "3-8", "9-", "every 2 from 8"):
        with pytest.raises(InputError, match="0 to 7"):
            resolve_layers(bad, 8)


def test_a_plan_inside_another_spec_may_be_a_name() -> None:
    class Holder(Spec):
        precision: PrecisionPlan

    built = build(Holder, Document({"precision": "Q6_K"}, "x.yaml"))
    assert built.precision == plan_from("q6_k")
    with pytest.raises(InputError, match='precision: .*did you mean "Q6_K"'):
        build(Holder, Document({"precision": "Q6K"}, "x.yaml"))


def test_copies_do_not_inherit_looked_up_formats() -> None:
    plan = plan_from("Q4_K")
    assert plan.format("attention").name == "Q4_K"
    changed = plan.model_copy(update={"default": "Q8_0"})
    assert changed.format("attention").name == "Q8_0"
    assert copy.deepcopy(plan) == plan and hash(plan) == hash(plan_from("Q4_K"))
    assert plan.formats_used() == ("Q4_K",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Q4K", 'did you mean "Q4_K"'),
        ("zzz", "known: fp32"),
        ({"default": "fp16", "atention": "int8"}, 'did you mean "attention"'),
        ({"attention": "int8"}, 'add "default"'),
        ({"default": "fp16", "kv": "int9"}, "kv: expected a known format"),
        ({"default": "fp16", "overrides": [{"part": "expert", "format": "int8"}]}, "overrides.0.part"),
        ({"default": "fp16", "overrides": [{"part": "kv", "format": "q80"}]}, 'did you mean "Q8_0"'),
        ({"default": "fp16", "overrides": [{"part": "kv", "format": "Q8_0", "layers": "3-1"}]}, "overrides.0.layers"),
        ({"default": "fp16", "overrides": [{"part": "kv", "format": "Q8_0", "layers": [-1]}]}, "layer numbers from 0"),
        ({"default": "fp16", "overrides": [{"part": "kv", "format": "Q8_0", "layers": [1, 1]}]}, "each layer once"),
        ({"default": "fp16", "overrides": [{"part": "kv", "format": "Q8_0", "layers": "every 0 from 1"}]}, "overrides.0.layers"),
        ({"default": 4}, "default"),
        (4, "a mapping"),
    ],
)
def test_bad_plans(value: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        plan_from(value, where="s.yaml:3")  # type: ignore[arg-type]
    assert "s.yaml:3" in str(caught.value)


def test_bad_questions() -> None:
    with pytest.raises(InputError, match='did you mean "routed_experts"'):
        plan_from("fp16").format("routed_expert")
    with pytest.raises(InputError, match="overrides.0.layers.*0 to 31"):
        plan_from({"default": "fp16", "overrides": [{"part": "kv", "format": "Q8_0", "layers": "30-40"}]}).check_layers(32)
