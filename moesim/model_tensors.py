"""Owns the list of weight tensors that an architecture implies: names, parts, shapes.

A matrix is ``rows`` output channels by ``cols`` input channels, ``count`` times (the experts of a layer). Shapes follow the published
modelling code of each family; GGUF's names differ, its shapes do not (see ``gguf_model``). It knows no precision: bytes are a plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moesim.architecture import FullAttention, LinearAttention, MlaAttention, ModelFacts
from moesim.precision import PrecisionPlan


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One weight tensor, or ``count`` equal ones (the experts of one layer).

    Parameters
    ----------
    name : str
        Unique name.
    part : str
        One of ``precision.PARTS``.
    layer : int
        Layer number, -1 where it belongs to none.
    matrix : str
        Its role: q, k, v, o, gate, up, down, router, embed, head, ...; a vector of an expert ends in ``_bias``.
    rows, cols, count : int
        Output channels, input channels, number of equal tensors.
    """

    name: str
    part: str
    layer: int
    matrix: str
    rows: int
    cols: int
    count: int = 1

    @property
    def params(self) -> int:
        """Number of parameters."""
        return self.rows * self.cols * self.count

    def bytes(self, plan: PrecisionPlan) -> int:
        """Bytes under a plan, all ``count`` tensors together."""
        return self.count * self.bytes_each(plan)

    def bytes_each(self, plan: PrecisionPlan) -> int:
        """Bytes under a plan of one of the ``count`` tensors."""
        return plan.format(self.part, self.layer, self.matrix).bytes_for(self.rows, self.cols)


def _ffn(part: str, layer: int, hidden: int, size: int, gated: bool, count: int = 1, bias: bool = False) -> Iterator[TensorSpec]:
    for matrix in ("gate", "up", "down") if gated else ("up", "down"):
        rows, cols = (hidden, size) if matrix == "down" else (size, hidden)
        yield TensorSpec(f"layers.{layer}.{part}.{matrix}", part, layer, matrix, rows, cols, count)
        if bias:
            yield TensorSpec(f"layers.{layer}.{part}.{matrix}_bias", part, layer, f"{matrix}_bias", 1, rows, count)


def _vector(layer: int, matrix: str, size: int, rows: int = 1) -> TensorSpec:
    name = f"layers.{layer}.norms.{matrix}" if layer >= 0 else f"norms.{matrix}"
    return TensorSpec(name, "norms", layer, matrix, rows, size)


def _attention(model: ModelFacts, layer: int) -> Iterator[TensorSpec]:
    a, hidden = model.attention_at(layer), model.hidden_size

    def matrix(name: str, rows: int, cols: int) -> TensorSpec:
        return TensorSpec(f"layers.{layer}.attention.{name}", "attention", layer, name, rows, cols)

    if isinstance(a, FullAttention):
        q, k, v = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim, a.n_kv_heads * a.v_dim
        rows = {"q": q * (2 if a.gated else 1), "k": k, "v": v}
        if a.k_eq_v:
            del rows["v"]
        for name, size in rows.items():
            yield matrix(name, size, hidden)
            if a.bias:
                yield _vector(layer, f"{name}_bias", size)
        yield matrix("o", hidden, a.n_heads * a.v_dim)
        if a.o_bias:
            yield _vector(layer, "o_bias", hidden)
        if a.qk_norm != "none":
            yield _vector(layer, "q_norm", a.head_dim if a.qk_norm == "head" else q)
            yield _vector(layer, "k_norm", a.head_dim if a.qk_norm == "head" else k)
        if a.sinks:
            yield _vector(layer, "sinks", a.n_heads)
    elif isinstance(a, MlaAttention):
        q = a.n_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
        if a.q_lora_rank:
            yield matrix("q_a", a.q_lora_rank, hidden)
            yield _vector(layer, "q_a_norm", a.q_lora_rank)
            yield matrix("q_b", q, a.q_lora_rank)
        else:
            yield matrix("q", q, hidden)
        yield matrix("kv_a", a.kv_lora_rank + a.qk_rope_head_dim, hidden)
        yield _vector(layer, "kv_a_norm", a.kv_lora_rank)
        yield matrix("k_b", a.n_heads * a.qk_nope_head_dim, a.kv_lora_rank)
        yield matrix("v_b", a.n_heads * a.v_head_dim, a.kv_lora_rank)
        yield matrix("o", hidden, a.n_heads * a.v_head_dim)
    elif isinstance(a, LinearAttention):
        if a.params is not None:
            yield matrix("mixer", 1, a.params)
        else:
            yield matrix("qkvz", 2 * a.key_dim + 2 * a.value_dim, hidden)
            yield matrix("ba", 2 * (a.n_value_heads or 0), hidden)
            yield matrix("out", hidden, a.value_dim)
            # convolution and decay vectors stay unquantised in every published format, so they count as vectors
            yield _vector(layer, "conv", a.conv_kernel or 1, rows=2 * a.key_dim + a.value_dim)
            yield _vector(layer, "decay", 2 * (a.n_value_heads or 0))
            yield _vector(layer, "value_norm", a.value_head_dim or 0)


def _declared(model: ModelFacts, shared: int, expert: int) -> Iterator[TensorSpec]:
    """Spread declared totals over the layers, remainders over the first ones, so that sums are exact. Shapes are unknown, so flat."""
    for layer in range(model.n_layers):
        size = shared // model.n_layers + (layer < shared % model.n_layers)
        if size:
            yield TensorSpec(f"layers.{layer}.attention.shared", "attention", layer, "shared", 1, size)
    n = len(model.moe_layers)
    for i, layer in enumerate(model.moe_layers):
        size = expert // n + (i < expert % n)
        for matrix, share in (("gate", size // 3), ("up", size // 3), ("down", size - 2 * (size // 3))):
            if share:
                name = f"layers.{layer}.routed_experts.{matrix}"
                yield TensorSpec(name, "routed_experts", layer, matrix, 1, share, model.n_experts)


def synthesise(model: ModelFacts) -> Iterator[TensorSpec]:
    """Yield the tensors of a model in storage order: embeddings, layers, final norm, head, tables, vision.

    Parameters
    ----------
    model : ModelFacts
        The architecture, or declared totals.
    """
    if model.declared is not None:
        yield from _declared(model, model.declared.shared_params, model.declared.expert_params)
    else:
        yield TensorSpec("embed", "embeddings", -1, "embed", model.vocab_size, model.hidden_size)
        for layer in range(model.n_layers):
            yield from _layer(model, layer)
        yield _vector(-1, "final_norm", model.hidden_size)
        if not model.tied_embeddings:
            yield TensorSpec("head", "head", -1, "head", model.vocab_size, model.hidden_size)
    for table in model.lookup_tables:
        yield TensorSpec(f"lookup.{table.name}", "lookup", -1, table.name, table.rows, table.cols)
    if model.vision is not None:
        yield TensorSpec("vision", "vision", -1, "vision", 1, model.vision.params)


def _layer(model: ModelFacts, layer: int) -> Iterator[TensorSpec]:
    hidden, e = model.hidden_size, model.experts
    if model.attention_at(layer).kind != "none":
        yield _vector(layer, "attention_norm", hidden)
        yield from _attention(model, layer)
    dense = model.dense_size(layer)
    if dense or model.is_moe(layer):
        yield _vector(layer, "ffn_norm", hidden)
    if dense and model.dense_ffn is not None:
        yield from _ffn("dense_ffn", layer, hidden, dense, model.dense_ffn.gated)
    if model.is_moe(layer):
        yield TensorSpec(f"layers.{layer}.router.router", "router", layer, "router", e.n_experts, hidden)
        if e.router_bias:
            yield _vector(layer, "router_bias", e.n_experts)
        yield from _ffn("routed_experts", layer, hidden, e.intermediate_size or 0, e.gated, e.n_experts, e.bias)
        if e.shared_size:
            yield from _ffn("shared_expert", layer, hidden, e.shared_size, e.gated)
            if e.shared_gate:
                yield TensorSpec(f"layers.{layer}.router.shared_gate", "router", layer, "shared_gate", 1, hidden)
