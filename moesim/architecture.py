"""Owns the YAML-facing pieces of a model description: attention kinds, experts, dense FFN, lookup tables, declared totals.

Architecture facts only: no tensors, no bytes, no I/O; those are added by ``model_tensors`` and ``model.ModelSpec``.
Names follow the published configs (``n_kv_heads``, ``kv_lora_rank``), because that is where users look the values up.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from moesim.config import Spec
from moesim.errors import InputError
from moesim.precision import MAX_LAYERS, CachedSpec, LayerSet, as_tuple, refuse, resolve_layers

MAX_DIM = 2**40  # no dimension or parameter count of a layer comes near; keeps products exact and messages readable
Dim = Annotated[int, Field(ge=1, le=MAX_DIM)]
Count = Annotated[int, Field(ge=0, le=MAX_DIM)]


class FullAttention(Spec):
    """Softmax attention with grouped K/V heads over the whole context, or over the last ``window`` tokens (kind sliding).

    ``gated`` doubles the query projection (an output gate, Qwen3-Next); ``k_eq_v`` leaves out the value projection, but not the V
    cache (Gemma 4); ``qk_norm`` is a norm weight per head (Qwen3) or over all heads (OLMoE); ``sinks`` one logit per head (gpt-oss).
    """

    kind: Literal["full", "sliding"]
    n_heads: Dim
    n_kv_heads: Dim
    head_dim: Dim
    v_head_dim: Dim | None = None
    window: Dim | None = None
    bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    gated: bool = False
    k_eq_v: bool = False
    sinks: bool = False

    @model_validator(mode="after")
    def _check(self) -> FullAttention:
        if (self.kind == "sliding") != (self.window is not None):
            refuse("window, and only for kind sliding", f"kind {self.kind}, window {self.window}", "set both or neither")
        if self.n_heads % self.n_kv_heads:
            refuse("n_heads divisible by n_kv_heads", f"{self.n_heads} and {self.n_kv_heads}")
        return self

    @property
    def v_dim(self) -> int:
        """Width of one value head."""
        return self.v_head_dim or self.head_dim


class MlaAttention(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): a cache of ``kv_lora_rank + qk_rope_head_dim`` per token."""

    kind: Literal["mla"]
    n_heads: Dim
    q_lora_rank: Dim | None = None
    kv_lora_rank: Dim
    qk_nope_head_dim: Dim
    qk_rope_head_dim: Dim
    v_head_dim: Dim


class LinearAttention(Spec):
    """Attention with a recurrent state whose size does not depend on the context.

    Either the heads of a gated DeltaNet (Qwen3-Next), or for any other kind (Mamba, short convolution) the parameter and state counts.
    """

    kind: Literal["linear"]
    n_key_heads: Dim | None = None
    n_value_heads: Dim | None = None
    key_head_dim: Dim | None = None
    value_head_dim: Dim | None = None
    conv_kernel: Dim | None = None
    params: Dim | None = None
    state_elements: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> LinearAttention:
        heads = (self.n_key_heads, self.n_value_heads, self.key_head_dim, self.value_head_dim, self.conv_kernel)
        totals = (self.params, self.state_elements)
        if not (all(heads) and totals == (None, None) or not any(heads) and None not in totals):
            expected = "n_key_heads, n_value_heads, key_head_dim, value_head_dim, conv_kernel; or else params, state_elements"
            refuse(expected, f"heads {heads}, totals {totals}", "give one of the two groups, complete")
        return self

    @property
    def key_dim(self) -> int:
        """Width of all key heads (DeltaNet form)."""
        return (self.n_key_heads or 0) * (self.key_head_dim or 0)

    @property
    def value_dim(self) -> int:
        """Width of all value heads (DeltaNet form)."""
        return (self.n_value_heads or 0) * (self.value_head_dim or 0)

    @property
    def recurrent_elements(self) -> int:
        """Elements of the state that every token updates; the convolution's past inputs not counted (declared totals are not split)."""
        if self.state_elements is not None:
            return self.state_elements
        return self.value_dim * (self.key_head_dim or 0)

    @property
    def all_state_elements(self) -> int:
        """Elements kept per sequence: one key_head_dim x value_head_dim matrix per value head, and the convolution's past inputs."""
        if self.state_elements is not None:
            return self.state_elements
        return self.recurrent_elements + (2 * self.key_dim + self.value_dim) * ((self.conv_kernel or 1) - 1)


class NoAttention(Spec):
    """A layer that is an FFN alone (hybrid stacks that alternate mixers and MoE blocks)."""

    kind: Literal["none"]


Attention = Annotated[FullAttention | MlaAttention | LinearAttention | NoAttention, Field(discriminator="kind")]


class AttentionOverride(Spec):
    """Another kind of attention for some layers; later entries win."""

    layers: LayerSet
    attention: Attention


class Experts(Spec):
    """Routed experts, and the shared expert beside them.

    ``intermediate_size`` is the width of one expert; ``gated`` experts have three matrices (gate, up, down), others two (up, down).
    ``shared_intermediate_size`` is the width of all shared experts together, by default n_shared times the expert's. ``layers``
    are the layers that have experts. ``shared_gate`` is a router row that scales the shared expert (Qwen).
    """

    n_experts: Annotated[int, Field(ge=1, le=100_000)]
    top_k: Annotated[int, Field(ge=1, le=100_000)]
    intermediate_size: Dim | None = None
    n_shared: Count = 0
    shared_intermediate_size: Dim | None = None
    shared_gate: bool = False
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    layers: LayerSet = "all"

    @model_validator(mode="after")
    def _check(self) -> Experts:
        if self.top_k > self.n_experts:
            refuse(f"top_k at most n_experts, {self.n_experts}", f"{self.top_k}")
        if self.shared_intermediate_size is not None and not self.n_shared:
            refuse("n_shared of 1 or more with shared_intermediate_size", "n_shared 0", "set n_shared")
        return self

    @property
    def shared_size(self) -> int:
        """Width of all shared experts together."""
        return self.shared_intermediate_size or self.n_shared * (self.intermediate_size or 0)


class DenseFfn(Spec):
    """A dense FFN. ``layers`` are by default those without experts; 0 as the size says that these layers have no FFN at all."""

    intermediate_size: Count
    gated: bool = True
    layers: LayerSet | None = None


class LookupTable(Spec):
    """A table of which each token reads only some rows (per-layer embeddings, n-gram memories): claim T5 of the field notes."""

    name: str
    rows: Dim
    cols: Dim
    rows_read_per_token: Count | None = None
    bytes_read_per_token: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> LookupTable:
        if (self.rows_read_per_token is None) == (self.bytes_read_per_token is None):
            refuse("one of rows_read_per_token and bytes_read_per_token", "both or neither")
        return self


class Vision(Spec):
    """A vision tower, of which only the size matters here."""

    params: Dim


class Declared(Spec):
    """Totals, for a model whose architecture is not public.

    ``shared_params`` are all but the experts and count as part attention; ``expert_params`` are one expert's, summed over all layers.
    """

    shared_params: Dim
    expert_params: Dim


class Published(Spec):
    """What the makers (or a loader that counted) state, in 1e9 parameters, and where."""

    total_params_b: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]
    active_params_b: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)] | None = None
    source: str


_Overrides = Annotated[tuple[AttentionOverride, ...], BeforeValidator(as_tuple)]
_LookupTables = Annotated[tuple[LookupTable, ...], BeforeValidator(as_tuple)]


class ModelFacts(CachedSpec):
    """Architecture of one model: what ``ModelSpec`` reads from YAML, a config.json or a GGUF header.

    ``attention`` holds for all layers that no entry of ``attention_overrides`` names. Layers without experts need ``dense_ffn``.
    With ``declared`` totals, only n_layers, hidden_size, attention (for the K/V cache), n_experts, top_k and experts.layers are read.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    n_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    hidden_size: Dim
    vocab_size: Dim = 1
    tied_embeddings: bool = False
    max_context: Dim | None = None
    attention: Attention
    attention_overrides: _Overrides = ()
    experts: Experts
    dense_ffn: DenseFfn | None = None
    lookup_tables: _LookupTables = ()
    vision: Vision | None = None
    declared: Declared | None = None
    published: Published | None = None
    source: str = ""

    @model_validator(mode="after")
    def _check_layers(self) -> ModelFacts:
        wanted: list[tuple[str, str | tuple[int, ...]]] = [("experts.layers", self.experts.layers)]
        wanted += [(f"attention_overrides.{i}.layers", o.layers) for i, o in enumerate(self.attention_overrides)]
        if self.dense_ffn is not None and self.dense_ffn.layers is not None:
            wanted.append(("dense_ffn.layers", self.dense_ffn.layers))
        for field, layers in wanted:
            try:
                resolve_layers(layers, self.n_layers)
            except InputError as error:
                refuse(f"{field}: {error.expected}", error.got, error.fix)
        if not self.moe_layers:
            refuse("experts.layers: at least one layer", "none")
        if self.declared is None:
            if self.experts.intermediate_size is None:
                refuse("experts.intermediate_size", "none", "give it, or declared totals")
            if "vocab_size" not in self.model_fields_set:
                refuse("vocab_size", "none", "add it")
            bare = next((layer for layer in range(self.n_layers) if not self.is_moe(layer)), None)
            if bare is not None and self.dense_ffn is None:
                got = f"none, and layer {bare} has no experts"
                refuse("dense_ffn, for the layers without experts", got, "add dense_ffn (intermediate_size 0: no FFN there)")
        return self

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return resolve_layers(self.experts.layers, self.n_layers)

    @cached_property
    def moe_set(self) -> frozenset[int]:
        """The same as a set."""
        return frozenset(self.moe_layers)

    @property
    def n_experts(self) -> int:
        """Routed experts per MoE layer."""
        return self.experts.n_experts

    @property
    def top_k(self) -> int:
        """Routed experts that each token uses in each MoE layer."""
        return self.experts.top_k

    def is_moe(self, layer: int) -> bool:
        """True if the layer has routed experts."""
        return layer in self.moe_set

    def attention_at(self, layer: int) -> Attention:
        """Return the attention of one layer.

        Raises
        ------
        InputError
            If the model has no such layer.
        """
        if not 0 <= layer < self.n_layers:
            raise InputError("layer", expected=f"0 to {self.n_layers - 1} of {self.name}", got=str(layer))
        return self.attention_by_layer[layer]

    @cached_property
    def attention_by_layer(self) -> tuple[Attention, ...]:
        """The attention of every layer."""
        out: list[Attention] = [self.attention] * self.n_layers
        for override in self.attention_overrides:
            for layer in resolve_layers(override.layers, self.n_layers):
                out[layer] = override.attention
        return tuple(out)

    @cached_property
    def dense_layers(self) -> frozenset[int]:
        """Layers with a dense FFN."""
        if self.dense_ffn is None or not self.dense_ffn.intermediate_size:
            return frozenset()
        if self.dense_ffn.layers is not None:
            return frozenset(resolve_layers(self.dense_ffn.layers, self.n_layers))
        return frozenset(range(self.n_layers)) - self.moe_set

    def dense_size(self, layer: int) -> int:
        """Width of the dense FFN of a layer, 0 if it has none."""
        return self.dense_ffn.intermediate_size if self.dense_ffn is not None and layer in self.dense_layers else 0


def group_attention(by_layer: list[Attention]) -> dict[str, Any]:
    """Return the fields ``attention`` and ``attention_overrides`` for a list of one attention per layer: the commonest is the default."""
    layers: dict[Attention, list[int]] = {}
    for i, attention in enumerate(by_layer):
        layers.setdefault(attention, []).append(i)
    default = max(layers, key=lambda a: len(layers[a]))
    others = tuple(AttentionOverride(layers=tuple(found), attention=a) for a, found in layers.items() if a != default)
    return {"attention": default, "attention_overrides": others}
