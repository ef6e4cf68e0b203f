"""Models by name, config.json and spec YAML: the same facts by every way, and each kind of bad file refused with its place.

The configs hold the size keys of the published files; keys that say nothing about sizes are left out.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moesim.architecture import FullAttention, LinearAttention, MlaAttention
from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.model_files import load_model, load_model_with_plan
from moesim.resources import names

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "use_sliding_window": False, "max_position_embeddings": 8192,
    "vocab_size": 151936,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4"}, "torch_dtype": "bfloat16", "vocab_size": 201088,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "num_nextn_predict_layers": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "torch_dtype": "bfloat16", "topk_method": "noaux_tc", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
OLMOE: dict[str, Any] = {
    "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "vocab_size": 50304, "max_position_embeddings": 4096,
}  # fmt: skip
GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "use_qk_norm": False, "vocab_size": 151552,
    "max_position_embeddings": 131072,
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "full_attention_interval": 4, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
    "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "intermediate_size": 5120, "max_position_embeddings": 262144,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text", "attention_k_eq_v": True, "enable_moe_block": True, "global_head_dim": 512, "head_dim": 256,
        "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
        "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8, "sliding_window": 1024, "top_k_experts": 8,
        "vocab_size": 262144, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "max_position_embeddings": 262144,
    },
}  # fmt: skip
MAVERICK: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 2,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8,
        "num_experts_per_tok": 1, "num_local_experts": 128, "num_hidden_layers": 48, "vocab_size": 202048, "use_qk_norm": False,
    },
    "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34, "intermediate_size": 5632},
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2,
    "hidden_size": 4096, "intermediate_size": 14336, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
    "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "vocab_size": 65536,
}  # fmt: skip
PHI: dict[str, Any] = {
    "model_type": "phimoe", "attention_bias": True, "hidden_size": 4096, "intermediate_size": 6400, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_experts_per_tok": 2, "num_local_experts": 16, "num_hidden_layers": 32, "vocab_size": 32064,
    "sliding_window": 131072, "max_position_embeddings": 131072,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "model_type": "granitemoe", "hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 24, "num_key_value_heads": 8,
    "num_experts_per_tok": 8, "num_local_experts": 40, "num_hidden_layers": 32, "vocab_size": 49155, "tie_word_embeddings": True,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "hidden_size": 2688,
    "num_hidden_layers": 52, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
    "vocab_size": 131072, "mlp_hidden_act": "relu2",
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "intermediate_size": 7168, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 65536, "conv_L_cache": 3,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
}  # fmt: skip


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder / "config.json"


@pytest.mark.parametrize(
    ("bundled", "config"),
    [
        ("qwen3-30b-a3b", QWEN3), ("mixtral-8x7b", MIXTRAL), ("qwen1.5-moe-a2.7b", QWEN2), ("gpt-oss-20b", GPT_OSS),
        ("deepseek-v3", DEEPSEEK), ("deepseek-v2-lite", V2_LITE), ("olmoe-1b-7b", OLMOE), ("glm-4.5-air", GLM),
        ("qwen3-next-80b-a3b", QWEN3_NEXT), ("gemma-4-26b-a4b", GEMMA4),
    ],
)  # fmt: skip
def test_a_config_gives_the_bundled_model(bundled: str, config: dict[str, Any], tmp_path: Path) -> None:
    ours, read = load_model(bundled), load_model(write(tmp_path / bundled, config))
    assert read.name == bundled
    assert [read.attention_at(i) for i in range(read.n_layers)] == [ours.attention_at(i) for i in range(ours.n_layers)]
    assert read.tensors() == ours.tensors()
    assert read.max_context in (ours.max_context, None)


@pytest.mark.parametrize(
    ("config", "total_b", "active_b"),
    [
        (MAVERICK, 400.7, 17), (JAMBA, 51.6, 12), (PHI, 41.9, 6.6), (GRANITE, 3.3, 0.88), (NEMOTRON, 31.6, 3.2), (LFM2, 8.34, 1.5),
    ],
)  # fmt: skip
def test_published_totals_of_other_families(config: dict[str, Any], total_b: float, active_b: float, tmp_path: Path) -> None:
    """Totals of the model cards, in 1e9; active ones are rounded in public and count embeddings differently."""
    model = load_model(write(tmp_path / "m", config))
    assert model.params_total / 1e9 == pytest.approx(total_b, rel=0.01)
    assert model.params_active / 1e9 == pytest.approx(active_b, rel=0.06)


def test_interleaving_rules(tmp_path: Path) -> None:
    def layers(config: dict[str, Any]) -> tuple[int, ...]:
        return load_model(write(tmp_path / "m", config)).moe_layers

    assert layers(MAVERICK) == tuple(range(1, 48, 2))
    assert layers(JAMBA) == tuple(range(1, 32, 2))
    assert layers(QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}) == tuple(range(3, 48, 2))
    assert layers(DEEPSEEK | {"moe_layer_freq": 2}) == tuple(range(4, 61, 2))
    assert layers(DEEPSEEK | {"moe_layer_freq": [0] * 5 + [1] * 56, "first_k_dense_replace": 0}) == tuple(range(5, 61))
    assert layers(LFM2) == tuple(range(2, 24))
    text = {**MAVERICK["text_config"], "moe_layers": [0, 5]}
    assert layers(MAVERICK | {"text_config": text}) == (0, 5)


def test_attention_rules(tmp_path: Path) -> None:
    def kinds(config: dict[str, Any], layer: int) -> tuple[object, ...]:
        a = load_model(write(tmp_path / "m", config)).attention_at(layer)
        return a.kind, getattr(a, "window", None)

    assert [kinds(MAVERICK, i) for i in (0, 3)] == [("sliding", 8192), ("full", None)]
    assert [kinds(JAMBA, i) for i in (0, 4)] == [("linear", None), ("full", None)]
    assert [kinds(NEMOTRON, i) for i in (0, 1, 5)] == [("linear", None), ("none", None), ("full", None)]
    assert kinds(QWEN2, 0) == kinds(PHI, 0) == ("full", None)  # a window that is off, or as long as the context, is none
    assert kinds(MIXTRAL | {"sliding_window": 4096}, 7) == ("sliding", 4096)
    bare = {k: v for k, v in GPT_OSS.items() if k != "layer_types"}
    assert [kinds(bare, i) for i in (0, 1)] == [("sliding", 128), ("full", None)]
    assert isinstance(load_model("deepseek-v3").attention_at(0), MlaAttention)


def test_stored_precision(tmp_path: Path) -> None:
    def plan(config: dict[str, Any]) -> tuple[str, ...] | None:
        found = load_model_with_plan(write(tmp_path / "m", config))[1]
        return found and tuple(found.format(part).name for part in ("routed_experts", "attention", "head", "norms"))

    assert plan(QWEN3) == ("bf16",) * 4
    assert plan(GPT_OSS) == ("mxfp4", "bf16", "bf16", "bf16")
    assert plan(DEEPSEEK) == ("fp8-b128", "fp8-b128", "bf16", "bf16")
    assert plan(QWEN3 | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}) == (
        "int4-g64",
        "int4-g64",
        "bf16",
        "bf16",
    )
    assert plan(QWEN3 | {"quantization_config": {"quant_method": "new"}}) is None
    assert plan(MIXTRAL) is None
    model, stored = load_model_with_plan(write(tmp_path / "m", DEEPSEEK))
    assert stored is not None
    assert model.weight_bytes(stored) / 1e9 == pytest.approx(673, rel=0.01)  # FP8 weights, 16-bit embeddings and head


def test_spec_yaml_and_json_and_relative_paths(tmp_path: Path) -> None:
    bundled = names("models")["tinymoe"]
    (tmp_path / "copy.yaml").write_text(bundled.read_text())
    assert load_model("copy.yaml", base=tmp_path) == load_model("tinymoe") == load_model(bundled)
    assert load_model_with_plan("tinymoe")[1] is None
    spec = load_model("qwen3-next-80b-a3b")
    (tmp_path / "spec.json").write_text(json.dumps(spec.model_dump(mode="json", exclude_none=True)))
    assert load_model(tmp_path / "spec.json").tensors() == spec.tensors()
    assert load_model(write(tmp_path / "snapshot", MIXTRAL).parent).name == "snapshot"
    assert isinstance(load_model(str(tmp_path / "snapshot" / "config.json")), ModelSpec)


def test_the_configs_of_our_own_tiny_models_are_read(tmp_path: Path) -> None:
    config = {
        "architecture": "TinyMoeForCausalLM", "vocab_size": 1024, "context": 256, "n_layers": 8, "d_model": 128, "n_heads": 4,
        "n_kv_heads": 2, "head_dim": 32, "n_experts": 16, "top_k": 2, "expert_width": 128,
    }  # fmt: skip
    assert load_model(write(tmp_path / "tinymoe", config)).tensors() == load_model("tinymoe").tensors()


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys}


DENSE = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DENSE, "no expert count.*dense model.*keys seen: hidden_size"),
        (QWEN3 | {"num_experts": 0}, "no expert count"),
        (GEMMA4 | {"text_config": GEMMA4["text_config"] | {"enable_moe_block": False}}, "no expert count"),
        (QWEN3 | {"num_experts": "128"}, 'num_experts: expected a whole number.*got "128"'),
        (QWEN3 | {"num_experts": -1}, "num_experts: .*got -1"),
        (QWEN3 | {"num_experts": True}, "num_experts: .*got True"),
        (QWEN3 | {"num_experts": 128.0}, "num_experts: .*got 128.0"),
        (QWEN3 | {"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most the 128 experts"),
        (without(QWEN3, "num_experts_per_tok"), "num_experts_per_tok: expected the number of experts per token"),
        (without(QWEN3, "num_hidden_layers"), "num_hidden_layers"),
        (without(QWEN3, "vocab_size"), "vocab_size"),
        (without(QWEN3, "hidden_size"), "hidden_size"),
        (without(QWEN3, "num_attention_heads"), "num_attention_heads"),
        (without(QWEN3, "head_dim") | {"hidden_size": 2047}, "head_dim.*32 heads do not divide 2047"),
        (without(DEEPSEEK, "moe_intermediate_size"), "moe_intermediate_size: expected the width of one expert"),
        (without(DEEPSEEK, "intermediate_size"), "width of the dense layers"),
        (without(DEEPSEEK, "v_head_dim"), "v_head_dim"),
        (QWEN3 | {"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of the 32 heads"),
        (QWEN3 | {"num_hidden_layers": 10**9}, "at most 10000 layers"),
        (QWEN3 | {"hidden_size": 10**30}, "hidden_size"),
        (QWEN3 | {"layer_types": ["full_attention"]}, "an entry for each of the 48 layers"),
        (QWEN3 | {"layer_types": ["spiral_attention"] * 48}, "layer_types.0.*spiral_attention"),
        (QWEN3 | {"layer_types": "full"}, "layer_types: expected a list"),
        (QWEN3 | {"layer_types": ["linear_attention"] * 48}, "linear_num_key_heads"),
        (QWEN3 | {"mlp_only_layers": list(range(48))}, "a layer with experts"),
        (QWEN3 | {"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        (QWEN3 | {"text_config": 5, "num_experts": None}, "text_config: expected a mapping"),
        (NEMOTRON | {"moe_latent_size": 1024}, "not modelled"),
        (NEMOTRON | {"hybrid_override_pattern": "MEX" * 20}, "blocks M"),
        (MAVERICK | {"text_config": MAVERICK["text_config"] | {"moe_layers": [99]}}, "text_config.moe_layers.*0 to 47"),
        (json.dumps(QWEN3)[:-10], "JSON: expected valid syntax"),
        (json.dumps(QWEN3 | {"rope_theta": float("nan")}), "finite numbers"),
        ('{"num_experts": 1, "num_experts": 2}', "num_experts: expected each key once"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "JSON"),
        ('{"num_experts": ' + "9" * 5000 + "}", "JSON"),
        ("", "a mapping"),
        ("[1]", "a mapping"),
    ],
)
def test_bad_configs_name_the_file_and_the_key(config: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad", config)
    with pytest.raises(InputError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def test_bad_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match='s.yaml:4.*did you mean "mixtral-8x7b"'):
        load_model("mixtral-8x7", where="s.yaml:4")
    with pytest.raises(InputError, match="a config.json or one GGUF"):
        load_model(tmp_path)
    (tmp_path / "m.yaml").write_text("name: x\nn_layers: many\n")
    with pytest.raises(InputError, match="m.yaml:2: n_layers"):
        load_model(tmp_path / "m.yaml")
    (tmp_path / "b.bin").write_bytes(bytes(range(128, 256)))
    with pytest.raises(InputError, match="UTF-8"):
        load_model(tmp_path / "b.bin")
    if os.geteuid() != 0:
        (tmp_path / "m.yaml").chmod(0)
        with pytest.raises(InputError, match="readable"):
            load_model(tmp_path / "m.yaml")
    assert isinstance(load_model("qwen3-next-80b-a3b").attention_at(0), LinearAttention)
    assert isinstance(load_model("gemma-4-26b-a4b").attention_at(5), FullAttention)
