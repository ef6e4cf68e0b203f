"""Writes small GGUF files with the gguf package, for tests: the header only, as a reader of headers needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quant_shape_to_byte_shape

Q = gguf.GGMLQuantizationType
Tensors = dict[str, tuple[tuple[int, ...], gguf.GGMLQuantizationType]]


def write(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Tensors) -> int:
    """Write a header; tensors are name to (shape, rows first; type). Keys get the architecture's prefix, unless they start with a dot.

    Returns
    -------
    int
        Bytes of all tensors, as the gguf package counts them.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        name = key[1:] if key.startswith(".") else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_array(name, value)
    total = 0
    for name, (shape, kind) in tensors.items():
        stored = quant_shape_to_byte_shape(shape, kind)
        size = int(np.prod(stored))
        total += size
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return total


def qwen3moe(n_layers: int = 6, hidden: int = 256, n_experts: int = 8, width: int = 256) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of a small qwen3moe model, with the mixture of types that a Q4_K_M file has."""
    metadata: dict[str, Any] = {
        "block_count": n_layers, "context_length": 4096, "embedding_length": hidden, "feed_forward_length": 512,
        "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64,
        "expert_count": n_experts, "expert_used_count": 2, "expert_feed_forward_length": width,
        ".tokenizer.ggml.tokens": [f"t{i}" for i in range(20_000)], ".tokenizer.ggml.scores": [0.5] * 20_000,
        ".general.name": "Small Qwen",
    }  # fmt: skip
    tensors: Tensors = {"token_embd.weight": ((512, hidden), Q.Q4_K), "output.weight": ((512, hidden), Q.Q6_K)}
    tensors["output_norm.weight"] = ((hidden,), Q.F32)
    for i in range(n_layers):
        more = Q.Q6_K if i < 2 or i == 5 else Q.Q4_K
        block: Tensors = {
            "attn_norm": ((hidden,), Q.F32), "ffn_norm": ((hidden,), Q.F32), "attn_q_norm": ((64,), Q.F32), "attn_k_norm": ((64,), Q.F32),
            "attn_q": ((512, hidden), Q.Q4_K), "attn_k": ((128, hidden), Q.Q4_K), "attn_v": ((128, hidden), more),
            "attn_output": ((hidden, 512), Q.Q4_K), "ffn_gate_inp": ((n_experts, hidden), Q.F32),
            "ffn_gate_exps": ((n_experts, width, hidden), Q.Q4_K), "ffn_up_exps": ((n_experts, width, hidden), Q.Q4_K),
            "ffn_down_exps": ((n_experts, hidden, width), more),
        }  # fmt: skip
        tensors |= {f"blk.{i}.{name}.weight": value for name, value in block.items()}
    return metadata, tensors


def deepseek2(n_layers: int = 4, split_kv_b: bool = True, mtp: bool = False) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of a small deepseek2 model: one dense layer, a shared expert, MLA; with mtp, one layer more of prediction."""
    hidden, heads, nope, rope, value, latent, rank = 256, 4, 32, 16, 32, 64, 128
    metadata: dict[str, Any] = {
        "block_count": n_layers + mtp, "embedding_length": hidden, "feed_forward_length": 512, "attention.head_count": heads,
        "attention.head_count_kv": 1 if split_kv_b else heads, "attention.q_lora_rank": rank, "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope if split_kv_b else nope + rope, "attention.value_length": latent if split_kv_b else value,
        "rope.dimension_count": rope, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "expert_shared_count": 1, "leading_dense_block_count": 1,
    }  # fmt: skip
    if split_kv_b:
        metadata |= {"attention.key_length_mla": nope + rope, "attention.value_length_mla": value}
    if mtp:
        metadata["nextn_predict_layers"] = 1
    tensors: Tensors = {"token_embd.weight": ((512, hidden), Q.Q4_K), "output_norm.weight": ((hidden,), Q.F32)}
    for i in range(n_layers + mtp):
        block: Tensors = {
            "attn_norm": ((hidden,), Q.F32), "ffn_norm": ((hidden,), Q.F32), "attn_q_a": ((rank, hidden), Q.Q8_0),
            "attn_q_a_norm": ((rank,), Q.F32), "attn_q_b": ((heads * (nope + rope), rank), Q.Q8_0),
            "attn_kv_a_mqa": ((latent + rope, hidden), Q.Q8_0), "attn_kv_a_norm": ((latent,), Q.F32),
            "attn_output": ((hidden, heads * value), Q.Q5_0),
        }  # fmt: skip
        if split_kv_b:
            block |= {"attn_k_b": ((heads, latent, nope), Q.Q8_0), "attn_v_b": ((heads, value, latent), Q.Q8_0)}
        else:
            block["attn_kv_b"] = ((heads * (nope + value), latent), Q.Q8_0)
        if i == 0:
            block |= {"ffn_gate": ((512, hidden), Q.Q4_K), "ffn_up": ((512, hidden), Q.Q4_K), "ffn_down": ((hidden, 512), Q.Q6_K)}
        else:
            block |= {
                "ffn_gate_inp": ((8, hidden), Q.F32), "ffn_gate_exps": ((8, 256, hidden), Q.IQ2_XXS),
                "ffn_up_exps": ((8, 256, hidden), Q.IQ2_XXS), "ffn_down_exps": ((8, hidden, 256), Q.Q2_K),
                "ffn_gate_shexp": ((256, hidden), Q.Q5_K), "ffn_up_shexp": ((256, hidden), Q.Q5_K),
                "ffn_down_shexp": ((hidden, 256), Q.Q6_K),
            }  # fmt: skip
            tensors[f"blk.{i}.exp_probs_b.bias"] = ((8,), Q.F32)
        tensors |= {f"blk.{i}.{name}.weight": value for name, value in block.items()}
    return metadata, tensors
