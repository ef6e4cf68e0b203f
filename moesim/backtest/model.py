"""Owns the way from a model's record in a folder of field runs to a ModelSpec. It knows no machine and no precision.

A record states dimensions and the parameters that follow from them. Where an architecture has parts that ``ModelSpec`` does not
describe (experts in a latent space, compressed attention), sizes are chosen such that the record's parameter counts hold, because bytes
and work follow from those; the record's own total is the check.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter

from moesim.architecture import Attention, group_attention
from moesim.backtest.data import Facts
from moesim.config import Document, build
from moesim.errors import InputError
from moesim.model import ModelSpec

_ATTENTION: TypeAdapter[Attention] = TypeAdapter(Attention)
QK_NORM = r"qwen3|gated_deltanet|gemma|olmoe|lfm2|glm4_moe$|minimax"  # architectures that norm queries and keys per head
TOLERANCE = 0.05  # of the parameter total: records round their counts, and norms are left out


def model_of(facts: Facts) -> ModelSpec:
    """Return the model of a record.

    Raises
    ------
    InputError
        If it is no record, a dimension is missing or cannot be read, or the model would be off from the record's own parameter total by more than 5 %.
    """
    facts.check()
    n_layers, hidden = _need(facts, "n_layers"), _need(facts, "hidden_size")
    moe = _moe_layers(facts, n_layers)
    gated = facts.get("expert_gated") is not False
    fields: dict[str, Any] = {
        "name": facts.name,
        "n_layers": n_layers,
        "hidden_size": hidden,
        "vocab_size": _need(facts, "vocab"),
        "tied_embeddings": facts.get("tied_embeddings") is True,
        "experts": _experts(facts, hidden, moe, gated),
        "source": "models.yaml of a folder of field runs",
    }
    dense = _dense(facts, n_layers, moe)
    if dense is not None:
        fields["dense_ffn"] = dense
    try:
        fields |= group_attention([_attention(facts, layer, n_layers, hidden) for layer in range(n_layers)])
        model = build(ModelSpec, Document(fields, facts.where))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise InputError(facts.name, expected="dimensions of a model", got=str(error).splitlines()[0][:100], where=facts.where) from None
    stated = facts.number("params", "params_total_b")
    if stated and abs(model.params_total / 1e9 / stated - 1) > TOLERANCE:
        got = f"{model.params_total / 1e9:.4g} from its dimensions"
        raise InputError(f"{facts.name}.params", expected=f"{stated:.4g} billion parameters in all, as stated", got=got, where=facts.where)
    return model


def _need(facts: Facts, key: str) -> int:
    value = facts.whole(key)
    if not value:
        raise InputError(f"{facts.name}.{key}", expected="a number above 0", got="none", where=facts.where)
    return value


def _moe_layers(facts: Facts, n_layers: int) -> list[int]:
    pattern = facts.text("layer_pattern")
    if pattern:
        return [i for i, block in enumerate(pattern) if block == "E"]
    first = facts.whole("first_k_dense")
    count = facts.whole("n_moe_layers", default=n_layers - first)
    return list(range(n_layers - count, n_layers)) if count < n_layers else list(range(n_layers))


def _experts(facts: Facts, hidden: int, moe: list[int], gated: bool) -> dict[str, Any]:
    matrices = 3 if gated else 2
    size = _need(facts, "expert_intermediate_size")
    each = facts.number("params", "expert_params_m")
    if each and facts.whole("expert_latent_size"):  # the width at which experts on the hidden state would have as many parameters
        size = max(1, round(each * 1e6 / (matrices * hidden)))
    out: dict[str, Any] = {"n_experts": _need(facts, "n_experts"), "top_k": _need(facts, "top_k"), "intermediate_size": size, "layers": moe}
    out["gated"] = gated
    out["bias"] = facts.get("expert_bias") is True
    shared = facts.whole("n_shared_experts")
    if shared:
        out["n_shared"] = shared
        out["shared_intermediate_size"] = facts.whole("shared_expert_intermediate", default=shared * size)
    return out


def _dense(facts: Facts, n_layers: int, moe: list[int]) -> dict[str, Any] | None:
    size = facts.whole("dense_intermediate_size")
    if facts.get("dense_parallel_with_moe") is True and size:
        return {"intermediate_size": size, "layers": "all"}
    return {"intermediate_size": size} if len(moe) < n_layers else None


def _attention(facts: Facts, layer: int, n_layers: int, hidden: int) -> Attention:
    """One layer's attention; a kind that is not described in detail has the parameters that the record counts for it."""
    pattern = facts.text("layer_pattern")
    if pattern and pattern[layer] == "E":
        return _made({"kind": "none"})
    linear = facts.get("linear_attention")
    if isinstance(linear, dict) and layer in linear.get("layers", ()):
        shape = {k: linear.get(k) for k in ("n_key_heads", "n_value_heads", "key_head_dim", "value_head_dim", "conv_kernel")}
        if not all(shape.values()):  # a mixer of another form: its parameters, and the state of a matrix per head where heads are stated
            state = facts.whole("n_heads") * (facts.whole("head_dim") or 128) ** 2
            return _made({"kind": "linear", "params": _share(facts, "linear_attention_b", len(linear["layers"])), "state_elements": state})
        return _made({"kind": "linear", **shape})
    if layer in facts.items("conv_layers"):
        return _made({"kind": "linear", "params": _share(facts, "linear_attention_b", len(facts.items("conv_layers"))),
                        "state_elements": hidden * max(facts.whole("conv_kernel", default=3) - 1, 1)})  # fmt: skip
    mamba = facts.get("mamba")
    if pattern and pattern[layer] == "M" and isinstance(mamba, dict):
        state = facts.whole("mamba", "n_heads") * facts.whole("mamba", "head_dim") * facts.whole("mamba", "state")
        return _made({"kind": "linear", "params": _share(facts, "linear_attention_b", pattern.count("M")), "state_elements": state})
    heads, kv_heads, head_dim = _need(facts, "n_heads"), facts.whole("n_kv_heads"), facts.whole("head_dim")
    if facts.whole("kv_lora_rank"):
        mla: dict[str, Any] = {k: _need(facts, k) for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
        return _made({"kind": "mla", "n_heads": heads, "q_lora_rank": facts.whole("q_lora_rank") or None, **mla})
    if facts.items("compress_ratios"):  # attention over a window and a compressed past: its parameters, and next to no growth with depth
        window = facts.whole("sliding_window", default=128)
        return _made({"kind": "linear", "params": _share(facts, "attention_b", n_layers), "state_elements": 2 * window * head_dim})
    full: dict[str, Any] = {"n_heads": heads, "n_kv_heads": kv_heads or heads, "head_dim": head_dim or hidden // heads}
    if re.match(QK_NORM, facts.text("arch")):
        full["qk_norm"] = "full" if facts.text("arch") == "olmoe" else "head"
    if layer in facts.items("global_layers"):
        full |= {"n_kv_heads": facts.whole("global_kv_heads") or full["n_kv_heads"], "head_dim": facts.whole("global_head_dim") or head_dim}
        return _made({"kind": "full", **full, "k_eq_v": facts.get("global_k_eq_v") is True})
    window = facts.whole("sliding_window")
    if window and _slides(facts, layer, n_layers):
        return _made({"kind": "sliding", "window": window, **full})
    return _made({"kind": "full", "gated": facts.get("attn_output_gate") is True, **full})


def _slides(facts: Facts, layer: int, n_layers: int) -> bool:
    if facts.items("sliding_layers"):
        return layer in facts.items("sliding_layers")
    count = facts.whole("n_full_layers")  # spread evenly, where the record counts them only
    return not (count and layer % max(n_layers // count, 1) == 0)


def _share(facts: Facts, part: str, layers: int) -> int:
    total = facts.number("params", part)
    if not total:
        raise InputError(f"{facts.name}.params.{part}", expected="a count, as this kind of attention is not computed from dimensions",
                         got="none", where=facts.where)  # fmt: skip
    return max(1, round(total * 1e9 / max(layers, 1)))


def _made(data: dict[str, Any]) -> Attention:
    return _ATTENTION.validate_python({k: v for k, v in data.items() if v is not None})
