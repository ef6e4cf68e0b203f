"""Owns what a config.json says, or leaves to the modelling code, about single layers: which have experts, which kind of attention.

Rules after the published modelling code of each family; the key names are theirs.
"""

from __future__ import annotations

from moesim.architecture import Attention, FullAttention, LinearAttention, MlaAttention, NoAttention
from moesim.errors import InputError
from moesim.model_files.config_reader import Keys

GATED_DELTANET = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
QKV_BIAS = ("qwen2_moe", "gpt_oss", "phimoe")
NO_O_BIAS = ("qwen2_moe", "glm4_moe", "dots1")  # their attention_bias covers q, k, v only
HEAD_NORM = (*GATED_DELTANET, "qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text", "gemma4", "gemma4_text", "lfm2_moe", "dots1")
ALL_HEADS_NORM = ("olmoe", "minimax_m2")
NO_NORM_WEIGHT = ("llama4", "llama4_text")  # normalises q and k without a weight


def _every_entry(c: Keys, name: str, found: list[str] | list[int] | None, n_layers: int) -> None:
    if found is not None and len(found) < n_layers:
        raise c.fail(name, f"an entry for each of the {n_layers} layers", f"{len(found)} entries")


def moe_layers(c: Keys, n_layers: int) -> list[int]:
    """Return the layers with experts, ascending.

    Raises
    ------
    InputError
        For a rule of the wrong type, or if no layer has experts.
    """
    found = set(range(n_layers))
    listed = c.items("moe_layers", int, "layer numbers")
    if listed is None and c.text("moe_layers_enum"):
        try:
            listed = [int(x) for x in c.text("moe_layers_enum").split(",")]
        except ValueError:
            raise c.fail("moe_layers_enum", "layer numbers between commas", c.text("moe_layers_enum")[:60]) from None
    if listed is not None:
        if any(not 0 <= i < n_layers for i in listed):
            raise c.fail("moe_layers", f"layers 0 to {n_layers - 1}", str(listed)[:60])
        found &= set(listed)
    elif c.has("interleave_moe_layer_step"):
        step = c.int("interleave_moe_layer_step", default=1)
        found &= set(range(step - 1, n_layers, step))
    pattern = c.text("hybrid_override_pattern")
    if pattern:
        _every_entry(c, "hybrid_override_pattern", list(pattern), n_layers)
        found &= {i for i in range(n_layers) if pattern[i] == "E"}
    kinds = c.items("mlp_layer_types", str, "sparse or dense")
    if kinds is not None:
        _every_entry(c, "mlp_layer_types", kinds, n_layers)
        found &= {i for i in range(n_layers) if kinds[i] == "sparse"}
    first = c.int("first_k_dense_replace", "num_dense_layers", "n_dense_first_layers", "moe_layer_start_index", default=0, low=0)
    found &= set(range(first, n_layers))
    if c.has("moe_layer_freq"):
        if isinstance(c.data["moe_layer_freq"], list):
            flags = c.items("moe_layer_freq", int, "0 or 1") or []
            _every_entry(c, "moe_layer_freq", flags, n_layers)
            found &= {i for i in range(n_layers) if flags[i]}
        else:
            found &= set(range(0, n_layers, c.int("moe_layer_freq", default=1)))
    step = c.int("decoder_sparse_step", "moe_layer_interval", default=1)
    found &= set(range(step - 1, n_layers, step))
    found -= set(c.items("mlp_only_layers", int, "layer numbers") or [])
    if c.has("expert_layer_period"):
        period, offset = c.int("expert_layer_period", default=1), c.int("expert_layer_offset", default=0, low=0)
        found &= {i for i in range(n_layers) if i % period == offset}
    if not found:
        raise InputError("model", expected="a layer with experts", got="rules that leave none", fix="check the layer rules", where=c.where)
    return sorted(found)


def attention_by_layer(c: Keys, kind: str, n_layers: int, hidden: int) -> list[Attention]:
    """Return the attention of each layer.

    Parameters
    ----------
    c : Keys
        The (text) config.
    kind : str
        Its model_type.
    n_layers, hidden : int
        Layers, and the hidden size.
    """
    n_heads = c.require_int("the number of attention heads", "num_attention_heads", "n_heads", "n_head")
    if c.has("kv_lora_rank"):
        return [_mla(c, n_heads)] * n_layers
    full = _full(c, kind, n_heads, hidden)
    types = _layer_types(c, kind, n_layers)
    known: dict[str, Attention] = {"full_attention": full, "attention": full}
    out: list[Attention] = []
    for i, name in enumerate(types):
        if name not in known:
            known[name] = _other(c, name, full, hidden, i)
        out.append(known[name])
    if kind.startswith("gemma4"):
        wide = _gemma4_global(c, full)
        out = [wide if a is full else a for a in out]
    return out


def _full(c: Keys, kind: str, n_heads: int, hidden: int) -> FullAttention:
    n_kv = c.int("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num", default=n_heads)
    head_dim = c.int("head_dim", "attention_head_dim", "kv_channels")
    if head_dim is None:
        if hidden % n_heads:
            raise c.missing(f"the head size, because {n_heads} heads do not divide {hidden}", "head_dim")
        head_dim = hidden // n_heads
    if n_heads % n_kv:
        raise c.fail("num_key_value_heads", f"a divisor of the {n_heads} heads", str(n_kv))
    bias = c.bool("attention_bias", "qkv_bias", "use_qkv_bias", default=kind in QKV_BIAS)
    qk_norm = "head" if kind in HEAD_NORM or (c.bool("use_qk_norm") and kind not in NO_NORM_WEIGHT) else "none"
    return FullAttention(
        kind="full",
        n_heads=n_heads,
        n_kv_heads=n_kv,
        head_dim=head_dim,
        bias=bias,
        o_bias=bias and kind not in NO_O_BIAS,
        qk_norm="full" if kind in ALL_HEADS_NORM else "head" if qk_norm == "head" else "none",
        gated=c.bool("attn_output_gate", default=kind in GATED_DELTANET),
        sinks=kind == "gpt_oss",
    )


def _mla(c: Keys, n_heads: int) -> MlaAttention:
    return MlaAttention(
        kind="mla",
        n_heads=n_heads,
        q_lora_rank=c.int("q_lora_rank"),
        kv_lora_rank=c.require_int("the rank of the K/V latent", "kv_lora_rank"),
        qk_nope_head_dim=c.require_int("the head size without rotary part", "qk_nope_head_dim"),
        qk_rope_head_dim=c.require_int("the rotary head size", "qk_rope_head_dim"),
        v_head_dim=c.require_int("the value head size", "v_head_dim"),
    )


def _layer_types(c: Keys, kind: str, n_layers: int) -> list[str]:
    """Return the name of the attention of each layer, from a list in the config or the family's rule."""
    types = c.items("layer_types", str, "attention kinds") or c.items("layers_block_type", str, "block kinds")
    if types is not None:
        _every_entry(c, "layer_types", types, n_layers)
        return types[:n_layers]
    pattern = c.text("hybrid_override_pattern")
    if pattern:
        names = {"M": "mamba2", "*": "full_attention", "E": "none", "-": "none"}
        odd = next((block for block in pattern if block not in names), "")
        if odd:
            raise c.fail("hybrid_override_pattern", "blocks M, *, E, -", f'"{odd}"')
        return [names[block] for block in pattern[:n_layers]]
    if kind in GATED_DELTANET:
        every = c.int("full_attention_interval", default=4)
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(n_layers)]
    if c.has("attn_layer_period"):
        period, offset = c.int("attn_layer_period", default=1), c.int("attn_layer_offset", default=0, low=0)
        return ["full_attention" if i % period == offset else "mamba" for i in range(n_layers)]
    if c.has("attention_chunk_size"):
        step = c.int("no_rope_layer_interval", default=4)
        rope = c.items("no_rope_layers", int, "0 or 1") or [int((i + 1) % step != 0) for i in range(n_layers)]
        _every_entry(c, "no_rope_layers", rope, n_layers)
        return ["chunked_attention" if rope[i] else "full_attention" for i in range(n_layers)]
    layout = c.items("sliding_window_layout", int, "0 or 1")
    if layout is not None:
        _every_entry(c, "sliding_window_layout", layout, n_layers)
        return ["sliding_attention" if layout[i] else "full_attention" for i in range(n_layers)]
    window, context = c.int("sliding_window", low=0), c.int("max_position_embeddings", default=0)
    if not window or not c.bool("use_sliding_window", default=True) or window >= context > 0:
        return ["full_attention"] * n_layers
    if kind == "gpt_oss" or kind.startswith("gemma") or c.has("sliding_window_pattern"):
        period = c.int("sliding_window_pattern", default=2 if kind == "gpt_oss" else 6)
        return ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(n_layers)]
    return ["sliding_attention"] * n_layers


def _other(c: Keys, name: str, full: FullAttention, hidden: int, layer: int) -> Attention:
    if name in ("sliding_attention", "chunked_attention"):
        key = "sliding_window" if name == "sliding_attention" else "attention_chunk_size"
        return full.model_copy(update={"kind": "sliding", "window": c.require_int("the window", key)})
    if name == "linear_attention":
        return LinearAttention(
            kind="linear",
            n_key_heads=c.require_int("the key heads", "linear_num_key_heads"),
            n_value_heads=c.require_int("the value heads", "linear_num_value_heads"),
            key_head_dim=c.require_int("the key head size", "linear_key_head_dim"),
            value_head_dim=c.require_int("the value head size", "linear_value_head_dim"),
            conv_kernel=c.require_int("the convolution's length", "linear_conv_kernel_dim"),
        )
    if name == "none":
        return NoAttention(kind="none")
    if name == "conv":
        length = c.require_int("the convolution's length", "conv_L_cache")
        return LinearAttention(kind="linear", params=hidden * (4 * hidden + length), state_elements=hidden * (length - 1))
    if name == "mamba2" or (name == "mamba" and c.has("mamba_n_heads", "mamba_num_heads")):
        return _mamba2(c, hidden)
    if name == "mamba":
        return _mamba1(c, hidden)
    expected = "full_attention, sliding_attention, chunked_attention, linear_attention, mamba, conv"
    raise c.fail(f"layer_types.{layer}", expected, f'"{name}"', "this kind of layer is not known")


def _mamba2(c: Keys, hidden: int) -> LinearAttention:
    """Mamba-2 mixer (arXiv:2405.21060): projections of z, x, B, C, dt; convolution over x, B, C; three values per head; gated norm."""
    heads = c.require_int("the Mamba heads", "mamba_num_heads", "mamba_n_heads")
    inner = heads * c.require_int("the Mamba head size", "mamba_head_dim", "mamba_d_head")
    groups = c.int("n_groups", "mamba_n_groups", default=1)
    state = c.require_int("the Mamba state size", "ssm_state_size", "mamba_d_state")
    kernel = c.int("conv_kernel", "mamba_d_conv", default=4)
    conv = inner + 2 * groups * state
    params = hidden * (inner + conv + heads) + conv * (kernel + 1) + 3 * heads + inner + inner * hidden
    return LinearAttention(kind="linear", params=params, state_elements=inner * state + conv * (kernel - 1))


def _mamba1(c: Keys, hidden: int) -> LinearAttention:
    """Mamba mixer with normalised dt, B and C, as in Jamba (arXiv:2403.19887)."""
    inner = c.int("mamba_expand", default=2) * hidden
    state, kernel = c.int("mamba_d_state", default=16), c.int("mamba_d_conv", default=4)
    rank = -(-hidden // 16) if c.data.get("mamba_dt_rank") == "auto" else c.int("mamba_dt_rank", default=-(-hidden // 16))
    params = 2 * hidden * inner + inner * (kernel + 1) + inner * (rank + 2 * state) + rank * inner + inner  # in, conv, x, dt
    params += inner * state + inner + inner * hidden + rank + 2 * state  # A, D, out, norms of dt, B, C
    return LinearAttention(kind="linear", params=params, state_elements=inner * (state + kernel - 1))


def _gemma4_global(c: Keys, full: FullAttention) -> FullAttention:
    """Global layers of Gemma 4 have their own head size and K/V heads, and may use the keys as values."""
    update = {"head_dim": c.int("global_head_dim", default=full.head_dim), "k_eq_v": c.bool("attention_k_eq_v")}
    update["n_kv_heads"] = c.int("num_global_key_value_heads", default=full.n_kv_heads)
    return FullAttention.model_validate(full.model_dump() | update)
