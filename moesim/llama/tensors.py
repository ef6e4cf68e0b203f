"""Owns the names that llama.cpp gives a model's tensors (src/llama-arch.cpp), for patterns that match none of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moesim.model import ModelSpec

_GLOBAL = ("token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight", "per_layer_token_embd.weight")
_ATTENTION = """
attn_norm attn_q attn_k attn_v attn_qkv attn_output attn_gate attn_q_norm attn_k_norm attn_q_a attn_q_b attn_q_a_norm attn_kv_a_mqa attn_kv_b
attn_k_b attn_v_b attn_kv_a_norm attn_sinks attn_post_norm post_attention_norm post_ffw_norm ffn_norm layer_output_scale ssm_in ssm_conv1d
ssm_x ssm_dt ssm_a ssm_d ssm_norm ssm_out ssm_ba ssm_beta_alpha ssm_alpha ssm_beta shortconv.conv shortconv.in_proj shortconv.out_proj
indexer.proj indexer.attn_k indexer.attn_q_b indexer.k_norm
""".split()
_MOE = "ffn_gate_inp exp_probs_b ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_up_exps".split()
_SHARED = "ffn_gate_inp_shexp ffn_gate_shexp ffn_up_shexp ffn_down_shexp".split()
_DENSE = "ffn_gate ffn_up ffn_down".split()


def unmatched(overrides: Iterable[tuple[str, str]], model: ModelSpec) -> list[str]:
    """Return a note for each pattern=buffer whose pattern matches no tensor that a model can have."""
    names = [*_GLOBAL]
    for i in range(model.n_layers):
        own = [*_ATTENTION, *(_MOE if model.is_moe(i) else ()), *(_SHARED if model.layer_params(i, "shared_expert") else ())]
        own += _DENSE if model.dense_size(i) else ()
        names += [f"blk.{i}.{name}.{kind}" for name in own for kind in ("weight", "bias")]
    return [
        f"-ot {pattern}={buffer}: matches no tensor of {model.name}, so nothing is moved"
        for pattern, buffer in overrides
        if not any(re.search(pattern, name) for name in names)
    ]
