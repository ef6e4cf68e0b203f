"""Owns what the tasks of a real run compute: attention with its KV cache, router, FFNs, combine, head. bf16 activations, no autograd.

Each layer object holds weights, each ``Batch`` the activations of one micro-batch. Nothing here knows schedules, slots or threads; the
order in which the methods may be called is the schedule's. Letters: B sequences, N new tokens of each, T = B N, D hidden, H query heads
on G key-value heads, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moesim.architecture import FullAttention
from moesim.engines.real_weights import Loaded, Matrix
from moesim.errors import InputError
from moesim.model import ModelSpec

BF16 = torch.bfloat16


class Batch:
    """Activations of one micro-batch: ``sequences`` x ``new_tokens``."""

    __slots__ = ("h", "mix", "new_tokens", "out", "rows", "sequences", "shared", "x", "xs")

    def __init__(self, sequences: int, new_tokens: int, hidden: int, top_k: int) -> None:
        tokens = sequences * new_tokens
        self.sequences, self.new_tokens = sequences, new_tokens
        self.x = torch.zeros(tokens, hidden, dtype=BF16)  # the residual stream
        self.xs = self.x.view(sequences, new_tokens, hidden)
        self.h = self.x.clone()  # normalised input of the experts
        self.mix = torch.zeros(tokens, 1, top_k, dtype=BF16)  # weights of the forced experts
        self.out = torch.zeros(tokens, top_k, hidden, dtype=BF16)  # the experts' results
        self.rows = self.out.view(tokens * top_k, hidden)
        self.shared: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one step's keys and values go in a layer's cache, and what its queries see."""

    k_new: Tensor  # (B, G, N, head_dim) views of the cache
    v_new: Tensor
    k_seen: Tensor  # (B, G, S, head_dim)
    v_seen: Tensor
    mask: Tensor | None  # (N, S) additive; None: every query sees all (N = 1), or plainly causal
    cos: Tensor  # (N, 1, head_dim) float32
    sin: Tensor


def check_model(model: ModelSpec) -> None:
    """Refuse what real runs do not compute.

    Raises
    ------
    InputError
        For latent or linear attention, gated queries, sinks, shared key and value, biases of experts, lookup tables.
    """
    for layer, a in enumerate(model.attention_by_layer):
        if not isinstance(a, FullAttention) and a.kind != "none":
            raise InputError(f"attention of layer {layer}", expected="full or sliding, to be run for real", got=a.kind)
        if isinstance(a, FullAttention) and (a.gated or a.k_eq_v or a.sinks or a.head_dim % 2):
            got = "gated" if a.gated else "k_eq_v" if a.k_eq_v else "sinks" if a.sinks else f"head_dim {a.head_dim}"
            raise InputError(f"attention of layer {layer}", expected="plain heads of even size, to be run for real", got=got)
    if model.experts.bias:
        raise InputError("experts.bias", expected="none, to be run for real", got="biases")
    if model.lookup_tables:
        raise InputError("lookup_tables", expected="none, to be run for real", got=f"{len(model.lookup_tables)}")


class RealAttention:
    """One layer's attention and KV cache; a layer without attention only embeds, if it is the first.

    Parameters
    ----------
    loaded : Loaded
    layer, batch, context : int
        The cache holds ``batch`` sequences of ``context`` tokens.
    allocate : callable
        Gives that many bytes of memory as uint8.
    """

    def __init__(self, loaded: Loaded, layer: int, batch: int, context: int, allocate: Callable[[int], Tensor]) -> None:
        a = loaded.model.attention_at(layer)
        self.embed, self.spec = loaded.embedding if layer == 0 else None, a
        if not isinstance(a, FullAttention):
            return
        self.heads, self.groups, self.head_dim, self.v_dim = a.n_heads, a.n_kv_heads, a.head_dim, a.v_dim
        self.norm, self.eps = loaded.vector(layer, "attention_norm"), loaded.weights.norm_eps
        self.q, self.k, self.v, self.o = (loaded.matrix(layer, "attention", name) for name in "qkvo")
        self.bias = tuple(loaded.vector(layer, f"{name}_bias") for name in "qkv") if a.bias else None
        self.o_bias = loaded.vector(layer, "o_bias") if a.o_bias else None
        self.qk_norm = (loaded.vector(layer, "q_norm"), loaded.vector(layer, "k_norm")) if a.qk_norm != "none" else None
        rows = batch * a.n_kv_heads * context
        shape = (batch, a.n_kv_heads, context)
        self.keys = allocate(2 * rows * a.head_dim).view(BF16).view(*shape, a.head_dim)
        self.values = allocate(2 * rows * a.v_dim).view(BF16).view(*shape, a.v_dim)

    def fill_cache(self, tokens: int, generator: torch.Generator) -> None:
        """Fill the first tokens of the cache with random keys and values."""
        if isinstance(self.spec, FullAttention):
            for cache in (self.keys, self.values):
                cache[:, :, :tokens].normal_(generator=generator)

    def place(self, first: int, sequences: int, past: int, new: int, tables: tuple[Tensor, Tensor], masks: Masks) -> Place:
        """Prepare one step of a micro-batch that begins at sequence ``first`` after ``past`` tokens."""
        window = self.spec.window if isinstance(self.spec, FullAttention) else None
        seen = slice(max(past + 1 - window, 0) if window else 0, past + new)
        mine = slice(first, first + sequences)
        k, v, at = self.keys[mine], self.values[mine], slice(past, past + new)
        cos, sin = (t[at, None, :] for t in tables)
        return Place(k[:, :, at], v[:, :, at], k[:, :, seen], v[:, :, seen], masks(past, new, window), cos, sin)

    def run(self, batch: Batch, tokens: Tensor | None, place: Place | None) -> None:
        """Embed the tokens (T,) in the first layer; then norm, attention, residual."""
        if self.embed is not None and tokens is not None:
            torch.index_select(self.embed, 0, tokens, out=batch.x)
        if place is None:
            return
        b, n, heads = batch.sequences, batch.new_tokens, self.heads
        h = F.rms_norm(batch.x, (batch.x.shape[1],), self.norm, self.eps)
        q, k, v = self.q.matmul(h), self.k.matmul(h), self.v.matmul(h)
        if self.bias is not None:
            q, k, v = (t + bias for t, bias in zip((q, k, v), self.bias, strict=True))
        if self.qk_norm is not None:
            q, k = (F.rms_norm(t.view(len(t), -1, len(w)), w.shape, w, self.eps) for t, w in zip((q, k), self.qk_norm, strict=True))
        qk = torch.cat((q.view(b, n, heads, -1), k.view(b, n, self.groups, -1)), 2)
        one, two = qk.chunk(2, 3)
        qk = (qk * place.cos + torch.cat((-two, one), 3) * place.sin).to(BF16)
        place.k_new.copy_(qk[:, :, heads:].transpose(1, 2))
        place.v_new.copy_(v.view(b, n, self.groups, -1).transpose(1, 2))
        if n == 1:  # the query heads of a group as its queries: grouped attention without repeating keys
            q = qk[:, :, :heads].reshape(b, self.groups, -1, self.head_dim)
            mixed = F.scaled_dot_product_attention(q, place.k_seen, place.v_seen).reshape(b, -1)
        else:
            q = qk[:, :, :heads].transpose(1, 2)
            causal = place.mask is None
            mixed = F.scaled_dot_product_attention(q, place.k_seen, place.v_seen, place.mask, is_causal=causal, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(b * n, -1)
        done = self.o.matmul(mixed)
        batch.x.add_(done if self.o_bias is None else done + self.o_bias)


class Masks:
    """Additive causal masks, one of a kind."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int | None], Tensor] = {}

    def __call__(self, past: int, new: int, window: int | None) -> Tensor | None:
        """Mask of ``new`` queries after ``past`` tokens, (N, S); None where a single query sees all, or plain causality says it."""
        if new == 1 or past == 0 and (window is None or new <= window):
            return None
        key = (past, new, window)
        if key not in self._made:
            start = max(past + 1 - window, 0) if window else 0
            query = torch.arange(past, past + new)[:, None]
            token = torch.arange(start, past + new)[None, :]
            hidden = (token > query) | (token <= query - window if window else False)
            self._made[key] = torch.zeros(hidden.shape, dtype=BF16).masked_fill_(hidden, float("-inf"))
        return self._made[key]


class RealRouter:
    """One layer's router. The experts are forced; its own choice is noted beside."""

    def __init__(self, loaded: Loaded, layer: int, batch: int) -> None:
        self.norm, self.eps = loaded.vector(layer, "ffn_norm"), loaded.weights.norm_eps
        self.router = loaded.matrix(layer, "router", "router")
        self.bias = loaded.vector(layer, "router_bias") if loaded.model.experts.router_bias else None
        self.shift, self.top_k = loaded.weights.router_shift, loaded.model.top_k
        self.before = torch.zeros(batch, loaded.model.hidden_size, dtype=BF16)  # last token of each sequence

    def run(self, batch: Batch, before: Tensor, first: bool, ids: Tensor, absent: Tensor | None, own: Tensor) -> None:
        """Norm, logits, weights of the forced ``ids`` (T, K); ``own`` (T, K) receives the router's choice."""
        h = batch.h = F.rms_norm(batch.x, (batch.x.shape[1],), self.norm, self.eps)
        if self.shift:
            h = self._shifted(batch, h, before, first)
        logits = self.router.matmul(h).float()
        if self.bias is not None:
            logits = logits + self.bias
        own.copy_(logits.topk(self.top_k, 1).indices)
        chosen = logits.gather(1, ids)
        if absent is None:
            batch.mix.copy_(chosen.softmax(1).unsqueeze(1))
        else:
            batch.mix.copy_(chosen.masked_fill(absent, float("-inf")).softmax(1).nan_to_num_(0.0).unsqueeze(1))

    def _shifted(self, batch: Batch, h: Tensor, before: Tensor, first: bool) -> Tensor:
        """What a shifted router sees: a part of the token before, (T, D)."""
        now = h.view(batch.xs.shape)
        last = now[:, 0] if first else before
        seen = torch.lerp(now, torch.cat((last[:, None], now[:, :-1]), 1), self.shift)
        before.copy_(now[:, -1])
        return seen.view(h.shape)


class RealFfn:
    """A dense FFN or shared expert, outside the expert store."""

    def __init__(self, loaded: Loaded, layer: int, part: str) -> None:
        model = loaded.model
        gated = model.experts.gated if part == "shared_expert" else model.dense_ffn is not None and model.dense_ffn.gated
        self.gate = loaded.matrix(layer, part, "gate") if gated else None
        self.up, self.down = loaded.matrix(layer, part, "up"), loaded.matrix(layer, part, "down")
        self.norm, self.eps = loaded.vector(layer, "ffn_norm"), loaded.weights.norm_eps
        scaled = part == "shared_expert" and model.experts.shared_gate
        self.scale = loaded.matrix(layer, "router", "shared_gate") if scaled else None

    def _result(self, batch: Batch) -> Tensor:
        h = F.rms_norm(batch.x, (batch.x.shape[1],), self.norm, self.eps)
        done = ffn(self.gate, self.up, self.down, h)
        return done if self.scale is None else done * self.scale.matmul(h).sigmoid()

    def run_dense(self, batch: Batch) -> None:
        """A layer without routed experts: residual included."""
        batch.x.add_(self._result(batch))

    def run_shared(self, batch: Batch) -> None:
        """The shared expert: ``combine`` adds it."""
        batch.shared = self._result(batch)


def ffn(gate: Matrix | None, up: Matrix, down: Matrix, x: Tensor) -> Tensor:
    """down(silu(gate x) * up x), or down(silu(up x)) without a gate; (T, D) -> (T, D)."""
    inner = F.silu(up.matmul(x)) if gate is None else F.silu(gate.matmul(x)).mul_(up.matmul(x))
    return down.matmul(inner)


def combine(batch: Batch) -> None:
    """Weighted sum of the experts' results, the shared expert's, and the residual."""
    batch.x.add_(torch.bmm(batch.mix, batch.out).squeeze(1))
    if batch.shared is not None:
        batch.x.add_(batch.shared)


class RealHead:
    """Final norm, logits and the likeliest token of each sequence."""

    def __init__(self, loaded: Loaded) -> None:
        self.norm, self.eps = loaded.vector(-1, "final_norm"), loaded.weights.norm_eps
        self.head = loaded.matrix(-1, "head", "head")

    def run(self, batches: list[Batch], chosen: Tensor, logits: Tensor | None) -> None:
        """Write the likeliest tokens (B,) to ``chosen`` and, where wanted, the logits (B, V) float32."""
        last = torch.cat([b.xs[:, -1] for b in batches]) if len(batches) > 1 else batches[0].xs[:, -1].contiguous()
        found = self.head.matmul(F.rms_norm(last, (last.shape[1],), self.norm, self.eps))
        torch.argmax(found, 1, out=chosen)
        if logits is not None:
            logits.copy_(found)


def rope_tables(n: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, two float32 (n, head_dim); dimension i is paired with i + head_dim / 2."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(n, dtype=torch.float32)[:, None] * inverse[None, :]
    angles = torch.cat((angles, angles), 1)
    return angles.cos(), angles.sin()


class Network:
    """All layers of a model, with a KV cache for ``batch`` sequences of ``context`` tokens.

    Parameters
    ----------
    loaded : Loaded
    batch, context : int
    allocate : callable
        Gives a layer's KV cache its memory: (layer, bytes) -> uint8 tensor.

    Raises
    ------
    InputError
        As ``check_model``.
    """

    def __init__(self, loaded: Loaded, batch: int, context: int, allocate: Callable[[int, int], Tensor]) -> None:
        model = loaded.model
        check_model(model)
        self.loaded, self.model = loaded, model
        layers = range(model.n_layers)
        self.attention = [RealAttention(loaded, i, batch, context, partial(allocate, i)) for i in layers]
        self.router = {i: RealRouter(loaded, i, batch) for i in model.moe_layers}
        self.dense = {i: RealFfn(loaded, i, "dense_ffn") for i in layers if model.layer_params(i, "dense_ffn")}
        self.shared = {i: RealFfn(loaded, i, "shared_expert") for i in layers if model.layer_params(i, "shared_expert")}
        self.head = RealHead(loaded)
        self.masks = Masks()
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def place(self, layer: int, first: int, sequences: int, past: int, new: int) -> Place | None:
        """Prepare the attention of one layer for one step of a micro-batch, see ``RealAttention.place``."""
        attention = self.attention[layer]
        a = attention.spec
        return (
            attention.place(first, sequences, past, new, self._rope(a.head_dim, past + new), self.masks)
            if isinstance(a, FullAttention)
            else None
        )

    def _rope(self, head_dim: int, n: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of at least ``n`` positions: of those that a run reaches, not of all that the cache has room for."""
        found = self._tables.get(head_dim)
        if found is None or len(found[0]) < n:
            found = self._tables[head_dim] = rope_tables(1 << (n - 1).bit_length(), head_dim, self.loaded.weights.rope_theta)
        return found
