"""Owns ModelSpec: parameters, bytes, K/V cache, recurrent state and floating-point work of a model, layer by layer.

No I/O, no hardware, no trace. Bytes need a ``PrecisionPlan``. Equations:

    K/V per token and layer = (K elements + V elements) in the plan's kv format; K = n_kv_heads x head_dim (never hidden / n_heads)
    tokens kept             = context, or min(window, context) in a sliding-window layer; none where attention is linear
    MLA, compressed         = kv_lora_rank + qk_rope_head_dim elements per token (arXiv:2405.04434, section 2.1.3)
    work of a matrix        = 2 FLOP per parameter and token
    work of attention       = 2 FLOP x n_heads x (K width + V width) per pair of query and visible token
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from moesim.architecture import FullAttention, LinearAttention, MlaAttention, ModelFacts
from moesim.errors import InputError, did_you_mean
from moesim.html_table import html_table
from moesim.model_tensors import TensorSpec, synthesise
from moesim.precision import PARTS, PrecisionPlan, refuse

# One multiply for the decay, then a multiply-add each for the read-out of the old value, the rank-1 update and the output
# (gated delta rule, arXiv:2412.06464); an upper bound for state-space layers, which skip the read-out.
LINEAR_FLOPS_PER_STATE_ELEMENT = 7


def _table_rows(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        try:
            return tuple(row if isinstance(row, TensorSpec) else TensorSpec(**row) for row in value)
        except TypeError as error:
            refuse("rows of name, part, layer, matrix, rows, cols, count", str(error)[:80])
    return value


class ModelSpec(ModelFacts):
    """A model: its architecture, and everything that follows from it.

    ``tensor_table`` replaces the synthesised tensors where a file lists the real ones (GGUF); the architecture then serves the K/V cache
    and the work of attention only.
    """

    tensor_table: Annotated[tuple[TensorSpec, ...], BeforeValidator(_table_rows)] = ()

    @model_validator(mode="after")
    def _check_table(self) -> ModelSpec:
        for t in self.tensor_table:
            if t.part not in PARTS or not -1 <= t.layer < self.n_layers or t.rows < 1 or t.cols < 1 or t.count < 1:
                refuse("tensor_table rows with a known part, an existing layer and positive sizes", repr(t)[:200])
            if t.part == "routed_experts" and (t.layer not in self.moe_set or t.count != self.n_experts):
                refuse(f"expert tensors of {self.n_experts} experts in layers with experts", repr(t)[:200])
        return self

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return all weight tensors, in storage order."""
        return self.all_tensors

    @cached_property
    def all_tensors(self) -> tuple[TensorSpec, ...]:
        """The same, as the cached value."""
        return self.tensor_table or tuple(synthesise(self))

    @cached_property
    def tensors_by_place(self) -> dict[tuple[int, str], tuple[TensorSpec, ...]]:
        """Tensors by (layer, part)."""
        out: dict[tuple[int, str], list[TensorSpec]] = defaultdict(list)
        for t in self.all_tensors:
            out[t.layer, t.part].append(t)
        return {place: tuple(found) for place, found in out.items()}

    def _at(self, layer: int, part: str) -> tuple[TensorSpec, ...]:
        if part not in PARTS:
            raise InputError("part", expected="a part of a model", got=f'"{part}"', fix=did_you_mean(part, PARTS))
        if not -1 <= layer < self.n_layers:
            raise InputError("layer", expected=f"0 to {self.n_layers - 1}, or -1 for what belongs to none", got=str(layer))
        return self.tensors_by_place.get((layer, part), ())

    # ---- parameters

    @cached_property
    def params_total(self) -> int:
        """All parameters."""
        return sum(t.params for t in self.all_tensors)

    @cached_property
    def params_active(self) -> int:
        """Parameters that one token reads: top_k experts per MoE layer, one row of the embeddings, the head; no vision tower.

        A declared model's shared part is counted whole, because its embeddings are not known apart.
        """
        active = self.hidden_size + self.head_params if self.declared is None else 0
        for t in self.all_tensors:
            if t.part == "routed_experts":
                active += t.params * self.top_k // t.count
            elif t.part == "lookup":
                active += t.cols * next((x.rows_read_per_token or 0 for x in self.lookup_tables if x.name == t.matrix), 0)
            elif t.part not in ("embeddings", "head", "vision"):
                active += t.params
        return active

    @property
    def head_params(self) -> int:
        """Parameters of the matrix that makes the logits, the embeddings' if they are tied; 0 for a declared model."""
        return self.vocab_size * self.hidden_size if self.declared is None else 0

    def layer_params(self, layer: int, part: str) -> int:
        """Parameters of one part in one layer (-1: outside the layers), all experts together."""
        return sum(t.params for t in self._at(layer, part))

    def expert_params(self, layer: int) -> int:
        """Parameters of one routed expert in one layer, its biases included; 0 in a layer without experts."""
        return sum(t.params // t.count for t in self._at(layer, "routed_experts"))

    # ---- weights in bytes

    def part_bytes(self, plan: PrecisionPlan, part: str, layer: int | None = None) -> int:
        """Bytes of one part under a plan: in one layer (-1: outside the layers), or everywhere with None.

        Tied embeddings count once, as embeddings.
        """
        layers = range(-1, self.n_layers) if layer is None else (layer,)
        return sum(t.bytes(plan) for i in layers for t in self._at(i, part))

    def weight_bytes(self, plan: PrecisionPlan) -> int:
        """Bytes of all weights under a plan."""
        return sum(t.bytes(plan) for t in self.all_tensors)

    def head_bytes(self, plan: PrecisionPlan) -> int:
        """Bytes that the logits read per step: the head, or the embeddings if they are tied."""
        return self.part_bytes(plan, "head", -1) or (self.part_bytes(plan, "embeddings", -1) if self.tied_embeddings else 0)

    def expert_matrix_bytes(self, plan: PrecisionPlan, layer: int) -> dict[str, int]:
        """Bytes of each matrix (gate, up, down) of one routed expert, its bias included; empty in a layer without experts."""
        out: dict[str, int] = {}
        for t in self._at(layer, "routed_experts"):
            matrix = t.matrix.removesuffix("_bias")
            out[matrix] = out.get(matrix, 0) + t.bytes_each(plan)
        return out

    def expert_bytes(self, plan: PrecisionPlan, layer: int) -> int:
        """Bytes of one routed expert in one layer, all its matrices; 0 in a layer without experts."""
        return sum(self.expert_matrix_bytes(plan, layer).values())

    def adapter_bytes(self, plan: PrecisionPlan, layer: int | None = None) -> int:
        """Bytes of the low-rank adapters of one layer's experts, or of all layers' with None; 0 without adapters."""
        if plan.adapters is None:
            return 0
        if layer is None:
            return sum(self.adapter_bytes(plan, i) for i in self.moe_layers)
        return 2 * self.adapter_params(plan, layer) * min(plan.adapters.experts or self.n_experts, self.n_experts)

    def adapter_params(self, plan: PrecisionPlan, layer: int) -> int:
        """Parameters of the adapters of one expert of a layer; 0 without adapters."""
        shapes = [t for t in self._at(layer, "routed_experts") if not t.matrix.endswith("_bias")]
        return sum(plan.adapters.params(t.rows, t.cols) for t in shapes) if plan.adapters is not None else 0

    def lookup_bytes_per_token(self, plan: PrecisionPlan) -> int:
        """Bytes that one token reads from the lookup tables."""
        total = 0
        for table in self.lookup_tables:
            if table.bytes_read_per_token is not None:
                total += table.bytes_read_per_token
            else:
                total += (table.rows_read_per_token or 0) * plan.format("lookup", -1, table.name).bytes_for(1, table.cols)
        return total

    # ---- K/V cache and recurrent state

    def kv_bytes_per_token(self, plan: PrecisionPlan, layer: int, mla_compressed: bool = True) -> int:
        """Bytes of K and V that one layer keeps per token of context and sequence.

        Parameters
        ----------
        plan : PrecisionPlan
            Its part kv, matrices k and v, gives the format.
        layer : int
            Layer number.
        mla_compressed : bool
            With MLA, keep the latent and the rotary key (as a K entry); False: keep whole heads, as some engines do.
        """
        a = self.attention_at(layer)
        k_format, v_format = plan.format("kv", layer, "k"), plan.format("kv", layer, "v")
        if isinstance(a, FullAttention):
            return k_format.bytes_for(1, a.n_kv_heads * a.head_dim) + v_format.bytes_for(1, a.n_kv_heads * a.v_dim)
        if isinstance(a, MlaAttention):
            if mla_compressed:
                return k_format.bytes_for(1, a.kv_lora_rank + a.qk_rope_head_dim)
            k_width = a.n_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
            return k_format.bytes_for(1, k_width) + v_format.bytes_for(1, a.n_heads * a.v_head_dim)
        return 0

    def kv_tokens(self, layer: int, context: int) -> int:
        """Tokens whose K and V one layer keeps for a context: min(window, context) where it slides, 0 where attention is linear."""
        a = self.attention_at(layer)
        if isinstance(a, FullAttention) and a.window is not None:
            return min(a.window, context)
        return context if isinstance(a, (FullAttention, MlaAttention)) else 0

    def kv_bytes(self, plan: PrecisionPlan, context: int, mla_compressed: bool = True) -> int:
        """Bytes of the K/V cache of one sequence, all layers; recurrent state is not in it (``state_bytes``)."""
        return sum(self.kv_tokens(i, context) * self.kv_bytes_per_token(plan, i, mla_compressed) for i in range(self.n_layers))

    def state_bytes(self, plan: PrecisionPlan, layer: int | None = None) -> int:
        """Bytes of the recurrent state per sequence of linear attention, in one layer or (None) in all; no matter what the context is."""
        if layer is None:
            return sum(self.state_bytes(plan, i) for i in range(self.n_layers))
        a = self.attention_at(layer)
        return plan.format("kv", layer, "state").bytes_for(1, a.all_state_elements) if isinstance(a, LinearAttention) else 0

    # ---- work in FLOP

    def attention_flops(self, layer: int, n_tokens: int, context: int, mla_compressed: bool = True) -> float:
        """Work of scores and weighted values (not the projections) for the last ``n_tokens`` of one sequence.

        Parameters
        ----------
        layer : int
            Layer number.
        n_tokens : int
            New tokens of this step (1 in decode).
        context : int
            Tokens visible to the last of them, itself included; each earlier one sees one less (causal).
        mla_compressed : bool
            With MLA and one new token, count the absorbed form, which works on the latent directly (arXiv:2405.04434, appendix); with
            more tokens the plain form, whose up-projection of the new tokens is in ``linear_flops``.

        Returns
        -------
        float
            FLOP; constant per token for linear attention.
        """
        if not 0 <= n_tokens <= context:
            raise InputError("context", expected=f"at least the {n_tokens} new tokens, which are part of it", got=str(context))
        pair, window, token = self.score_flops(layer, mla_compressed and n_tokens == 1)
        return pair * visible_pairs(n_tokens, context, window) + token * n_tokens

    def score_flops(self, layer: int, absorbed: bool) -> tuple[float, int | None, float]:
        """Work of scores and weighted values: FLOP of a pair of query and visible token, the window (None: all before), FLOP of a token that
        looks at none (linear attention).

        Parameters
        ----------
        layer : int
            Layer number.
        absorbed : bool
            With MLA, work on the latent directly.
        """
        a = self.attention_at(layer)
        if isinstance(a, LinearAttention):
            conv = 2 * (a.conv_kernel or 0) * (2 * a.key_dim + a.value_dim)
            return 0.0, None, float(LINEAR_FLOPS_PER_STATE_ELEMENT * a.recurrent_elements + conv)
        if isinstance(a, FullAttention):
            return 2.0 * a.n_heads * (a.head_dim + a.v_dim), a.window, 0.0
        if isinstance(a, MlaAttention):
            width = 2 * a.kv_lora_rank + a.qk_rope_head_dim if absorbed else a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim
            return 2.0 * a.n_heads * width, None, 0.0
        return 0.0, None, 0.0

    def linear_flops(self, layer: int, part: str, n_tokens: int) -> float:
        """Work of the matrices of one part in one layer (-1: outside the layers), 2 FLOP per parameter and token.

        Routed experts count top_k per token; embeddings, lookup tables and the vision tower are not multiplied; a tied head counts as head.
        """
        if part == "routed_experts":
            return 2.0 * n_tokens * self.top_k * self.expert_params(layer)
        params = self.layer_params(layer, part)
        if part == "head" and layer == -1:
            params = self.head_params
        return 0.0 if part in ("embeddings", "lookup", "vision", "kv") else 2.0 * n_tokens * params

    def expert_flops(self, layer: int, n_tokens: int) -> float:
        """Work of one routed expert on ``n_tokens`` tokens."""
        return 2.0 * n_tokens * self.expert_params(layer)

    def __repr__(self) -> str:
        some = len(self.moe_layers) < self.n_layers
        layers = f"{self.n_layers} layers" + (f" ({len(self.moe_layers)} MoE)" if some else "")
        size = f"{self.params_total / 1e9:.3g} B parameters, {self.params_active / 1e9:.3g} B active"
        return f"<ModelSpec {self.name}: {size}, {layers}, {self.n_experts} experts top-{self.top_k}>"

    def _repr_html_(self) -> str:
        rows = [
            ("parameters", f"{self.params_total / 1e9:.4g} B, {self.params_active / 1e9:.3g} B of them active"),
            ("layers", f"{self.n_layers}, of them {len(self.moe_layers)} with experts"),
            ("experts", f"{self.n_experts}, top-{self.top_k}, {self.expert_params(self.moe_layers[0]) / 1e6:.3g} M parameters each"),
            ("hidden size", f"{self.hidden_size:,}"),
            ("context", "not stated" if self.max_context is None else f"{self.max_context:,} tokens"),
        ]
        return html_table(self.name, rows)

    __str__ = __repr__


def visible_pairs(n_tokens: int, context: int, window: int | None) -> int:
    """Pairs of query and visible token for the last ``n_tokens`` of a context, causal, at most ``window`` per query.

    The sum of min(s, window) for s from context - n_tokens + 1 to context.
    """
    first = context - n_tokens + 1
    if window is None or window >= context:
        return n_tokens * (first + context) // 2
    below = max(0, window - first + 1)  # queries that see less than a full window, or exactly it
    return below * (first + window) // 2 + (n_tokens - below) * window if below else n_tokens * window
