"""Owns GGUF files of random weights for llama.cpp: small MoE models of two architectures, in one format each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

POOL = 1024  # rows that are different in a model


@dataclass(frozen=True)
class Shape:
    """One model. Sizes count elements."""

    name: str
    arch: str  # qwen3moe | olmoe
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_ffn: int
    vocabulary: int = 32000

    @property
    def parameters(self) -> dict[str, int]:
        """Elements of the matrices, by part."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return {
            "attention": self.layers * attention,
            "experts": self.layers * self.experts * 3 * self.hidden * self.expert_ffn,
            "router": self.layers * self.experts * self.hidden,
            "embedding": self.vocabulary * self.hidden,
            "head": self.vocabulary * self.hidden,
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("wide-qwen3moe", "qwen3moe", 12, 2048, 16, 4, 128, 32, 4, 768),
        Shape("fine-qwen3moe", "qwen3moe", 16, 1024, 16, 4, 64, 64, 8, 384),
        Shape("flat-olmoe", "olmoe", 12, 1536, 12, 12, 128, 32, 4, 768),
    )
}


def write(shape: Shape, quant: str, path: Path, seed: int = 0) -> Path:
    """Write a model whose matrices are random numbers in one format, norms and routers in F32 as the converters of llama.cpp leave them."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_context_length(65536)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.expert_ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.expert_ffn)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(shape.vocabulary)])
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocabulary)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    kind = gguf.GGMLQuantizationType[quant]

    rows: dict[tuple[int, gguf.GGMLQuantizationType], np.ndarray] = {}

    def matrix(name: str, *dims: int, like: gguf.GGMLQuantizationType = kind) -> None:
        """A tensor of rows drawn from a few that are quantised once: quantising every weight would take minutes."""
        if (dims[-1], like) not in rows:
            rows[dims[-1], like] = quantize(rng.standard_normal((POOL, dims[-1]), dtype=np.float32) / np.sqrt(dims[-1]), like)
        writer.add_tensor(name, rows[dims[-1], like][rng.integers(POOL, size=dims[:-1])], raw_dtype=like)

    def vector(name: str, n: int) -> None:
        writer.add_tensor(name, np.ones(n, np.float32))

    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrix("token_embd.weight", shape.vocabulary, d)
    for i in range(shape.layers):
        vector(f"blk.{i}.attn_norm.weight", d)
        vector(f"blk.{i}.ffn_norm.weight", d)
        matrix(f"blk.{i}.attn_q.weight", q, d)
        matrix(f"blk.{i}.attn_k.weight", kv, d)
        matrix(f"blk.{i}.attn_v.weight", kv, d)
        matrix(f"blk.{i}.attn_output.weight", d, q)
        per_head = shape.arch == "qwen3moe"
        vector(f"blk.{i}.attn_q_norm.weight", shape.head_dim if per_head else q)
        vector(f"blk.{i}.attn_k_norm.weight", shape.head_dim if per_head else kv)
        matrix(f"blk.{i}.ffn_gate_inp.weight", shape.experts, d, like=gguf.GGMLQuantizationType.F32)
        matrix(f"blk.{i}.ffn_gate_exps.weight", shape.experts, shape.expert_ffn, d)
        matrix(f"blk.{i}.ffn_up_exps.weight", shape.experts, shape.expert_ffn, d)
        matrix(f"blk.{i}.ffn_down_exps.weight", shape.experts, d, shape.expert_ffn)
    vector("output_norm.weight", d)
    matrix("output.weight", shape.vocabulary, d)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
