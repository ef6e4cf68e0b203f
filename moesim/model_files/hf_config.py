"""Owns the reading of Hugging Face config.json files of Mixture-of-Experts models into a ModelSpec, and of their stored precision.

One table of aliases for the sizes, and for each family the facts that its config leaves to the modelling code (biases, norms, gates,
which layers slide). A model without experts is refused: this is a simulator of Mixture-of-Experts models. Multi-token
prediction layers are not part of the model that decodes, and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moesim.architecture import group_attention
from moesim.config import Document, build
from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.model_files.config_reader import Keys
from moesim.model_files.hf_layers import attention_by_layer, moe_layers
from moesim.precision import FORMATS, PrecisionPlan, plan_from

N_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts", "n_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k", "top_k")
N_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
EXPERT_SIZE = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size", "expert_width")
N_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_SIZE = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")

# intermediate_size is the experts' own width in these families although some of their layers are dense
EXPERTS_USE_INTERMEDIATE_SIZE = ("llama4", "llama4_text", "jamba")
SHARED_GATE = ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
ROUTER_BIAS = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "kimi_k2",
    "dots1",
    "minimax_m2",
    "lfm2_moe",
    "nemotron_h",
    "ernie4_5_moe",
)
TIED_BY_DEFAULT = ("gemma4", "gemma4_text", "lfm2_moe")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def model_from_config(data: Mapping[str, Any], where: str) -> tuple[ModelSpec, PrecisionPlan | None]:
    """Build a model, and the precision of its weights where the config states one that is known, from a parsed config.json.

    Parameters
    ----------
    data : Mapping
        The parsed file.
    where : str
        Its path: for messages, and for the model's name.

    Raises
    ------
    InputError
        With file and key: for a model without experts, a missing key, a wrong type, or sizes that contradict each other.
    """
    top = Keys(data, where)
    c = top
    if not top.has(*N_EXPERTS):
        nested = next((name for name in TEXT_CONFIGS if top.has(name)), "")
        c = (top.below(nested) if nested else None) or top
    n_experts = c.int(*N_EXPERTS, default=0, low=0)
    if not n_experts or not c.bool("enable_moe_block", default=True):
        error = c.missing("an expert count of 1 or more", *N_EXPERTS)
        raise InputError("model", expected=error.expected, got="no expert count", fix=f"a dense model? {error.fix}", where=where)
    kind = c.text("model_type") or top.text("model_type")
    n_layers, hidden = c.require_int("the number of layers", *N_LAYERS), c.require_int("the hidden size", *HIDDEN)
    if n_layers > 10_000:
        raise c.fail(c.key(*N_LAYERS), "at most 10000 layers", str(n_layers))
    if c.has("moe_latent_size"):
        raise c.fail("moe_latent_size", "experts that read the hidden state itself", "experts in a latent space", "not modelled")
    sparse = moe_layers(c, n_layers)
    experts = _experts(c, kind, n_experts, sparse, n_layers)
    fields: dict[str, Any] = {
        "name": _name(top, where, kind),
        "n_layers": n_layers,
        "hidden_size": hidden,
        "vocab_size": c.require_int("the size of the vocabulary", "vocab_size"),
        "tied_embeddings": _tied(c, top, kind),
        "experts": experts,
        "source": f"{Path(where).name} ({kind or 'model type not stated'})",
    }
    context = c.int("max_position_embeddings", "max_sequence_length", "n_positions", "context")
    if context:
        fields["max_context"] = context
    try:
        fields.update(group_attention(attention_by_layer(c, kind, n_layers, hidden)))
    except ValidationError as error:  # products of sizes that are each possible, but not together
        raise InputError("attention", expected=error.errors()[0]["msg"], got="sizes that cannot be", where=where) from None
    dense = _dense(c, kind, n_layers, sparse)
    if dense is not None:
        fields["dense_ffn"] = dense
    vision = _vision_params(top)
    if vision:
        fields["vision"] = {"params": vision}
    return build(ModelSpec, Document(fields, where)), _plan(top, c, where)


def _experts(c: Keys, kind: str, n_experts: int, sparse: list[int], n_layers: int) -> dict[str, Any]:
    size = c.int(*EXPERT_SIZE)
    if size is None:
        own = c.key("num_local_experts") != "" or len(sparse) == n_layers or kind in EXPERTS_USE_INTERMEDIATE_SIZE
        names = EXPERT_SIZE + (("intermediate_size",) if own else ())
        size = c.require_int("the width of one expert", *names)
    top_k = c.require_int("the number of experts per token", *TOP_K)
    if top_k > n_experts:
        raise c.fail(c.key(*TOP_K), f"at most the {n_experts} experts", str(top_k))
    out: dict[str, Any] = {"n_experts": n_experts, "top_k": top_k, "intermediate_size": size}
    shared, shared_size = c.int(*N_SHARED, default=0, low=0), c.int(*SHARED_SIZE, default=0, low=0)
    if kind in ("llama4", "llama4_text"):
        shared = 1
    if shared or shared_size:
        out["n_shared"] = max(shared, 1)
        if shared_size:
            out["shared_intermediate_size"] = shared_size
        out["shared_gate"] = kind in SHARED_GATE
    out["gated"] = c.text("mlp_hidden_act", "hidden_act") != "relu2"  # squared ReLU has no gate (Nemotron-H)
    out["bias"] = kind == "gpt_oss"
    out["router_bias"] = kind in ROUTER_BIAS or c.text("topk_method") == "noaux_tc"
    if len(sparse) < n_layers:
        out["layers"] = sparse
    return out


def _dense(c: Keys, kind: str, n_layers: int, sparse: list[int]) -> dict[str, Any] | None:
    """The dense FFN of the layers without experts (beside them in Gemma 4), or None if there is none."""
    pattern = c.text("hybrid_override_pattern")
    if pattern:
        layers = [i for i, block in enumerate(pattern) if block == "-"]
        if not layers:
            return {"intermediate_size": 0}
        return {"intermediate_size": c.require_int("the width of the dense FFN", "intermediate_size"), "gated": False, "layers": layers}
    if kind.startswith("gemma4"):
        return {"intermediate_size": c.require_int("the width of the dense FFN", "intermediate_size"), "layers": "all"}
    if len(sparse) == n_layers:
        return None
    names = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", "ffn_hidden_size")
    return {"intermediate_size": c.require_int("the width of the dense layers", *names)}


def _tied(c: Keys, top: Keys, kind: str) -> bool:
    names = ("tie_word_embeddings", "tie_embedding")
    where = c if c.has(*names) else top
    return where.bool(*names, default=kind in TIED_BY_DEFAULT)


def _name(top: Keys, where: str, kind: str) -> str:
    path = Path(where)
    stem = path.parent.name if path.stem == "config" else path.stem
    return (top.text("_name_or_path").rstrip("/").rpartition("/")[2] or stem or kind or "model")[:200]


def _vision_params(top: Keys) -> int:
    """Estimate of a vision tower: attention and a plain MLP per layer; patch embedding and projector are small beside it."""
    v = top.below("vision_config")
    if v is None or not v.has("hidden_size"):
        return 0
    hidden, depth = v.require_int("its hidden size", "hidden_size"), v.int("num_hidden_layers", "depth", default=0, low=0)
    return depth * (4 * hidden**2 + 2 * hidden * v.int("intermediate_size", default=4 * hidden))


def _plan(top: Keys, c: Keys, where: str) -> PrecisionPlan | None:
    """The precision that the weights are stored in; None if the config does not state one that is known here."""
    stored = DTYPES.get((top.text("torch_dtype", "dtype") or c.text("torch_dtype", "dtype")).removeprefix("torch."))
    q = top.below("quantization_config") or c.below("quantization_config")
    if stored is None or q is None:
        return None if stored is None else plan_from(stored, where)
    method = q.text("quant_method")
    matrices = ""
    if method == "mxfp4":
        return plan_from({"default": stored, "routed_experts": "mxfp4"}, where)  # the experts alone, in gpt-oss
    if method == "fp8":
        matrices = "fp8-b128" if q.items("weight_block_size", int, "whole numbers") == [128, 128] else "fp8"
    elif method in ("gptq", "awq"):
        matrices = f"int{q.int('bits', default=4)}-g{q.int('group_size', default=128, low=-1)}"
    if matrices not in FORMATS:
        return None
    parts = ("attention", "shared_expert", "routed_experts", "dense_ffn")
    return plan_from({"default": stored} | dict.fromkeys(parts, matrices), where)
