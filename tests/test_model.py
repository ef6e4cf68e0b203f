"""Parameters, bytes, K/V cache and work of models, against published totals and hand-computed figures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.architecture import FullAttention, LinearAttention
from moesim.config import Document, build
from moesim.errors import InputError
from moesim.model import ModelSpec, visible_pairs
from moesim.model_files import load_model
from moesim.precision import PARTS, plan_from
from moesim.resources import names

BUNDLED = sorted(names("models"))


def spec(**changes: Any) -> dict[str, Any]:
    """A small model of two matrices' worth of arithmetic: hidden 8, 4 layers."""
    base: dict[str, Any] = {
        "name": "small",
        "n_layers": 4,
        "hidden_size": 8,
        "vocab_size": 10,
        "attention": {"kind": "full", "n_heads": 4, "n_kv_heads": 2, "head_dim": 4},
        "experts": {"n_experts": 6, "top_k": 2, "intermediate_size": 5},
    }
    return base | changes


def make(**changes: Any) -> ModelSpec:
    return build(ModelSpec, Document(spec(**changes), "small.yaml"))


@pytest.mark.parametrize("name", BUNDLED)
def test_total_parameters_are_within_one_percent_of_the_published(name: str) -> None:
    model = load_model(name)
    assert model.published is not None and model.published.source and model.source
    assert model.params_total / 1e9 == pytest.approx(model.published.total_params_b, rel=0.01)
    assert 0 < model.params_active < model.params_total


def test_active_parameters_of_models_that_publish_three_digits() -> None:
    assert load_model("gpt-oss-20b").params_active / 1e9 == pytest.approx(3.61, abs=0.01)
    assert load_model("gpt-oss-120b").params_active / 1e9 == pytest.approx(5.13, abs=0.01)


@pytest.mark.parametrize("name", BUNDLED)
def test_parts_and_layers_sum_to_the_whole(name: str) -> None:
    model, plan = load_model(name), plan_from({"default": "int4-g128", "attention": "int8"})
    assert sum(model.part_bytes(plan, part) for part in PARTS) == model.weight_bytes(plan)
    total = sum(model.layer_params(layer, part) for layer in range(-1, model.n_layers) for part in PARTS)
    assert total == model.params_total == sum(t.params for t in model.tensors())
    for layer in (model.moe_layers[0], model.moe_layers[-1]):
        assert model.expert_bytes(plan, layer) * model.n_experts == model.part_bytes(plan, "routed_experts", layer)
        assert model.expert_params(layer) * model.n_experts == model.layer_params(layer, "routed_experts")
    assert len({t.name for t in model.tensors()}) == len(model.tensors())


def test_claims_m1_m2_m4_of_the_reference_model() -> None:
    model = load_model("ref-23b")
    assert model.params_total == 23_200_000_000
    assert model.weight_bytes(plan_from("fp16")) == 46_400_000_000
    raw = plan_from({"default": "raw-int8", "routed_experts": "raw-int4"})
    assert model.part_bytes(raw, "routed_experts") == 9_600_000_000
    assert model.part_bytes(raw, "attention") == 4_000_000_000
    assert model.weight_bytes(raw) == 13_600_000_000
    assert all(model.expert_params(layer) == 37_500_000 and model.expert_bytes(raw, layer) == 18_750_000 for layer in range(32))
    assert model.kv_bytes(raw, 8192) == 2 * 32 * 8 * 128 * 8192 * 2 == 1_073_741_824


def test_kv_cache_uses_head_dim_not_hidden_over_heads() -> None:
    model = load_model("qwen3-30b-a3b")
    plan = plan_from({"default": "Q4_K", "kv": "q8_0"})
    assert model.kv_bytes(plan, 8192) == 48 * 2 * (4 * 128 // 32) * 34 * 8192 == 427_819_008
    split = plan_from({"default": "Q4_K", "kv": "q8_0", "overrides": [{"part": "kv", "matrix": "v", "format": "Q4_0"}]})
    assert model.kv_bytes_per_token(split, 0) == 16 * 34 + 16 * 18


@pytest.mark.parametrize(
    ("name", "kv", "context", "compressed", "mib"),
    [
        ("qwen3-235b-a22b", "Q8_0", 32768, True, 3196.0),
        ("qwen3-235b-a22b", "fp16", 32768, True, 6016.0),
        ("qwen3-30b-a3b", "fp16", 32768, True, 3072.0),
        ("deepseek-v3", "Q8_0", 98304, True, 3499.88),
        ("deepseek-v2-lite", "fp16", 512, False, 135.0),
    ],
)
def test_kv_cache_equals_what_a_loader_printed(name: str, kv: str, context: int, compressed: bool, mib: float) -> None:
    """Sizes printed by ik_llama.cpp in public logs (its discussion 357 and others), in MiB."""
    plan = plan_from({"default": "Q4_K", "kv": kv})
    assert load_model(name).kv_bytes(plan, context, compressed) / 2**20 == pytest.approx(mib, abs=0.01)


def test_sliding_layers_keep_their_window_only() -> None:
    model, plan = load_model("gpt-oss-20b"), plan_from("mxfp4")
    assert [model.kv_tokens(layer, 8192) for layer in (0, 1, 2, 23)] == [128, 8192, 128, 8192]
    per_token = 2 * 8 * 64 * 2
    assert model.kv_bytes(plan, 8192) == 12 * per_token * (128 + 8192)
    assert model.kv_bytes(plan, 100) == 24 * per_token * 100


def test_gpt_oss_experts_are_mxfp4_with_their_biases() -> None:
    model, plan = load_model("gpt-oss-20b"), plan_from({"default": "bf16", "routed_experts": "mxfp4"})
    matrix, bias = 2880 * (2880 // 32) * 17, 2880 * 2
    assert model.expert_matrix_bytes(plan, 5) == dict.fromkeys(("gate", "up", "down"), matrix + bias)
    assert model.weight_bytes(plan) / 1e9 == pytest.approx(13.76, rel=0.005)  # the checkpoint is 12.8 GiB (model card)


def test_mla_cache_is_the_latent() -> None:
    model, plan = load_model("deepseek-v3"), plan_from("fp16")
    assert model.kv_bytes_per_token(plan, 0) == (512 + 64) * 2
    assert model.kv_bytes(plan, 1000) == 61 * 576 * 2 * 1000
    assert model.kv_bytes_per_token(plan, 0, mla_compressed=False) == 128 * (192 + 128) * 2


def test_linear_layers_have_a_state_and_no_cache() -> None:
    model, plan = load_model("qwen3-next-80b-a3b"), plan_from("bf16")
    assert [isinstance(model.attention_at(i), LinearAttention) for i in range(5)] == [True, True, True, False, True]
    assert model.kv_bytes(plan, 4096) == 12 * 2 * 2 * 256 * 2 * 4096
    state = 32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3
    assert model.state_bytes(plan, 0) == 4 * state and model.state_bytes(plan, 3) == 0
    assert model.state_bytes(plan) == 36 * 4 * state
    assert model.attention_flops(0, 1, 10) == model.attention_flops(0, 1, 100_000)


def test_interleaved_and_leading_dense_layers() -> None:
    model = make(
        experts={"n_experts": 6, "top_k": 2, "intermediate_size": 5, "layers": "every 2 from 1"}, dense_ffn={"intermediate_size": 7}
    )
    assert model.moe_layers == (1, 3) and model.is_moe(1) and not model.is_moe(2)
    plan = plan_from("fp16")
    assert model.expert_bytes(plan, 0) == 0 and model.expert_matrix_bytes(plan, 0) == {} and model.expert_params(0) == 0
    assert model.layer_params(0, "dense_ffn") == 3 * 8 * 7 and model.layer_params(1, "dense_ffn") == 0
    assert load_model("deepseek-v3").moe_layers == tuple(range(3, 61))


def test_every_tensor_of_a_small_model_by_hand() -> None:
    model = make(
        attention={"kind": "full", "n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "bias": True, "qk_norm": "head", "gated": True},
        experts={"n_experts": 6, "top_k": 2, "intermediate_size": 5, "n_shared": 2, "shared_gate": True, "bias": True, "router_bias": True},
    )
    found = {(t.part, t.matrix): (t.rows, t.cols, t.count) for t in model.tensors() if t.layer in (-1, 2)}
    assert found == {
        ("embeddings", "embed"): (10, 8, 1), ("norms", "final_norm"): (1, 8, 1), ("head", "head"): (10, 8, 1),
        ("norms", "attention_norm"): (1, 8, 1), ("norms", "ffn_norm"): (1, 8, 1),
        ("attention", "q"): (32, 8, 1), ("attention", "k"): (8, 8, 1), ("attention", "v"): (8, 8, 1), ("attention", "o"): (8, 16, 1),
        ("norms", "q_bias"): (1, 32, 1), ("norms", "k_bias"): (1, 8, 1), ("norms", "v_bias"): (1, 8, 1),
        ("norms", "q_norm"): (1, 4, 1), ("norms", "k_norm"): (1, 4, 1),
        ("router", "router"): (6, 8, 1), ("norms", "router_bias"): (1, 6, 1), ("router", "shared_gate"): (1, 8, 1),
        ("routed_experts", "gate"): (5, 8, 6), ("routed_experts", "up"): (5, 8, 6), ("routed_experts", "down"): (8, 5, 6),
        ("routed_experts", "gate_bias"): (1, 5, 6), ("routed_experts", "up_bias"): (1, 5, 6), ("routed_experts", "down_bias"): (1, 8, 6),
        ("shared_expert", "gate"): (10, 8, 1), ("shared_expert", "up"): (10, 8, 1), ("shared_expert", "down"): (8, 10, 1),
    }  # fmt: skip
    assert model.expert_params(0) == 3 * 40 + 5 + 5 + 8


def test_ungated_experts_tied_head_and_layers_without_ffn() -> None:
    model = make(
        tied_embeddings=True,
        experts={"n_experts": 6, "top_k": 2, "intermediate_size": 5, "gated": False, "layers": [0]},
        dense_ffn={"intermediate_size": 0},
        attention_overrides=[{"layers": "2-3", "attention": {"kind": "none"}}],
    )
    plan = plan_from("fp16")
    assert model.expert_matrix_bytes(plan, 0) == {"up": 80, "down": 80}
    assert model.part_bytes(plan, "head") == 0 and model.head_bytes(plan) == 160 == model.part_bytes(plan, "embeddings")
    assert model.linear_flops(-1, "head", 3) == 2 * 3 * 80
    assert model.params_active == 8 + 80 + sum(t.params for t in model.tensors() if t.part not in ("embeddings", "routed_experts")) + 2 * 80
    assert model.kv_tokens(2, 100) == 0 and model.layer_params(2, "norms") == 0 and model.attention_flops(2, 1, 9) == 0.0


def test_lookup_tables_and_vision() -> None:
    tables = [
        {"name": "memory", "rows": 1000, "cols": 64, "rows_read_per_token": 3},
        {"name": "other", "rows": 10, "cols": 4, "bytes_read_per_token": 11},
    ]
    model = make(lookup_tables=tables, vision={"params": 77})
    plan = plan_from({"default": "fp16", "lookup": "Q8_0"})
    assert model.lookup_bytes_per_token(plan) == 3 * 2 * 34 + 11
    assert model.part_bytes(plan, "lookup") == 1000 * 68 + 10 * 34 and model.part_bytes(plan, "vision") == 154
    assert model.params_active == make().params_active + 3 * 64


def test_work() -> None:
    model = make()
    assert model.attention_flops(0, 1, 100) == 2 * 2 * 4 * 4 * 100
    assert model.attention_flops(0, 3, 3) == 2 * 2 * 4 * 4 * (1 + 2 + 3)
    assert model.linear_flops(0, "routed_experts", 5) == 2 * 5 * 2 * 120
    assert model.linear_flops(0, "attention", 5) == 2 * 5 * (128 + 64 + 64 + 128)
    assert model.linear_flops(-1, "embeddings", 5) == 0
    assert model.expert_flops(0, 7) == 2 * 7 * 120
    deep = load_model("deepseek-v3")
    assert deep.attention_flops(0, 1, 10) == 2 * 128 * (2 * 512 + 64) * 10
    assert deep.attention_flops(0, 1, 10, mla_compressed=False) == 2 * 128 * (192 + 128) * 10


@given(st.integers(0, 60), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 80)))
def test_visible_pairs_equal_the_plain_sum(n: int, earlier: int, window: int | None) -> None:
    context = n + earlier
    assert visible_pairs(n, context, window) == sum(min(s, window or s) for s in range(earlier + 1, context + 1))


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 7), st.integers(1, 9))
def test_declared_totals_are_spread_exactly(shared: int, expert: int, layers: int, n: int) -> None:
    fields = spec(n_layers=layers, experts={"n_experts": n, "top_k": 1}, declared={"shared_params": shared, "expert_params": expert})
    del fields["vocab_size"]
    model = build(ModelSpec, Document(fields, "d.yaml"))
    assert model.params_total == shared + n * expert
    assert sum(model.expert_params(i) for i in range(layers)) == expert
    assert model.params_active == shared + expert


def test_specs_are_values() -> None:
    one, other = load_model("mixtral-8x7b"), load_model("mixtral-8x7b")
    assert one.params_total and one == other and hash(one) == hash(other)
    wide = one.model_copy(update={"hidden_size": 8192})
    assert wide.params_total > 1.9 * one.params_total  # nothing cached is copied
    assert repr(one) == "<ModelSpec mixtral-8x7b: 46.7 B parameters, 12.7 B active, 32 layers, 8 experts top-2>"
    table = one.model_copy(update={"tensor_table": one.tensors()})
    assert build(ModelSpec, Document(table.model_dump(mode="json", exclude_none=True), "t")).params_total == one.params_total


FULL = {"kind": "full", "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
EXPERTS = {"n_experts": 6, "top_k": 2, "intermediate_size": 5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": EXPERTS | {"top_k": 7}}, "top_k at most n_experts, 6"),
        ({"experts": {"n_experts": 6, "top_k": 2}}, "experts.intermediate_size"),
        ({"experts": EXPERTS | {"layers": "1-"}}, "dense_ffn, for the layers without experts"),
        ({"experts": EXPERTS | {"layers": "4"}}, "experts.layers.*0 to 3"),
        ({"experts": EXPERTS | {"layers": []}}, "at least one layer"),
        ({"experts": EXPERTS | {"n_expert": 3}}, 'did you mean "n_experts"'),
        ({"experts": EXPERTS | {"shared_intermediate_size": 3}}, "n_shared of 1 or more"),
        ({"attention": FULL | {"n_kv_heads": 3}}, "divisible by n_kv_heads"),
        ({"attention": FULL | {"window": 5}}, "only for kind sliding"),
        ({"attention": FULL | {"kind": "sliding"}}, "only for kind sliding"),
        ({"attention": FULL | {"kind": "spiral"}}, "attention"),
        ({"attention": {"kind": "linear", "n_key_heads": 2}}, "one of the two groups"),
        ({"attention": {"kind": "mla", "n_heads": 2}}, "kv_lora_rank"),
        ({"attention_overrides": [{"layers": [9], "attention": FULL}]}, "attention_overrides.0.layers"),
        ({"n_layers": 0}, "n_layers"),
        ({"n_layers": 10**6}, "n_layers"),
        ({"n_layers": True}, "n_layers"),
        ({"hidden_size": 8.5}, "hidden_size"),
        ({"hidden_size": -8}, "hidden_size"),
        ({"published": {"total_params_b": float("nan"), "source": "x"}}, "total_params_b"),
        ({"lookup_tables": [{"name": "t", "rows": 1, "cols": 1}]}, "one of rows_read_per_token"),
        ({"tensor_table": [{"name": "x"}]}, "tensor_table"),
        (
            {"tensor_table": [dict(name="x", part="routed_experts", layer=0, matrix="up", rows=1, cols=1, count=5)]},
            "expert tensors of 6 experts",
        ),
    ],
)
def test_bad_specs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make(**changes)
    assert "small.yaml" in str(caught.value)


def test_bad_questions() -> None:
    model = make()
    with pytest.raises(InputError, match="0 to 3"):
        model.attention_at(4)
    with pytest.raises(InputError, match="layer"):
        model.layer_params(4, "attention")
    with pytest.raises(InputError, match='did you mean "attention"'):
        model.part_bytes(plan_from("fp16"), "atention")
    with pytest.raises(InputError, match="at least the 5 new tokens"):
        model.attention_flops(0, 5, 4)
    assert isinstance(model.attention_at(0), FullAttention)
