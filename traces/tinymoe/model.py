"""The tiny MoE language model: architecture, loading and saving. This file owns nothing else.

A decoder-only transformer small enough to train on one CPU thread in minutes, with the parts that matter to an
inference simulator shaped like those of large models: pre-norm blocks, grouped-query attention with rotary positions,
and a mixture of SwiGLU experts of which each token uses `top_k`. Every expert is a separate set of plain named
tensors (`layers.{l}.experts.{e}.gate.weight` ...), because experts are the unit that a simulator moves and caches.

The router shift. The router does not look at x_t alone but at

    r_t = (1 - shift) * x_t + shift * x_(t-1)          shift = 0.2, and r_0 = x_0

where x is the normalised input of the MoE block. This is causal (only the past is used). Why: the residual stream of a
large model changes slowly from one token to the next, so its router tends to choose again the experts it has just
used, and that reuse is what an expert cache lives on. A model of 7 M parameters trained for minutes has no such
inertia; the little shift gives its router some, and brings the reuse of experts between neighbouring tokens to the
level measured on real large models. The price: a decoder that works token by token must keep x_(t-1) of every layer,
as it keeps keys and values.

Shapes: B = batch, S = tokens, D = d_model, E = experts, K = experts per token, H / G = query / key-value heads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ARCHITECTURE = "TinyMoeForCausalLM"


@dataclass(frozen=True)
class TinyMoeConfig:
    """Everything that determines the architecture; written to and read from config.json."""

    vocab_size: int = 1024
    context: int = 256
    n_layers: int = 8
    d_model: int = 128
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    n_experts: int = 16
    top_k: int = 2
    expert_width: int = 128
    router_shift: float = 0.2
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @classmethod
    def from_dict(cls, values: dict) -> TinyMoeConfig:
        """Pick the known fields out of a parsed config.json (other keys describe, they do not configure)."""
        if values.get("architecture", ARCHITECTURE) != ARCHITECTURE:
            raise ValueError(f"not a {ARCHITECTURE} config: {values['architecture']!r}")
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})


class Routing(NamedTuple):
    """What the router of one layer decided, for every token of a batch."""

    logits: Tensor  # (B, S, E) float, before the softmax
    expert_ids: Tensor  # (B, S, K) int64, best first
    weights: Tensor  # (B, S, K) float, softmax over the K chosen logits: sums to 1


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_tables(n: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, two float32 (n, head_dim)."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(n, dtype=torch.float32)[:, None] * inverse[None, :]
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to (B, heads, S, head_dim); dimension i is paired with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention: H query heads share G key-value heads, consecutive heads the same one."""

    def __init__(self, c: TinyMoeConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q = nn.Linear(c.d_model, c.n_heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=False)
        self.group = c.n_heads // c.n_kv_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, self.head_dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(b, s, -1))


class Expert(nn.Module):
    """One SwiGLU expert: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: TinyMoeConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(c.d_model, c.expert_width, bias=False)
        self.up = nn.Linear(c.d_model, c.expert_width, bias=False)
        self.down = nn.Linear(c.expert_width, c.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then the mixture of experts, both on normalised input with a residual."""

    def __init__(self, c: TinyMoeConfig) -> None:
        super().__init__()
        self.top_k, self.shift = c.top_k, c.router_shift
        self.norm1 = RMSNorm(c.d_model, c.norm_eps)
        self.attn = Attention(c)
        self.norm2 = RMSNorm(c.d_model, c.norm_eps)
        self.router = nn.Linear(c.d_model, c.n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(c) for _ in range(c.n_experts))

    def route(self, x: Tensor) -> Routing:
        """Choose the experts of every token of the normalised input x (B, S, D)."""
        previous = torch.cat((x[:, :1], x[:, :-1]), dim=1)
        logits = self.router(torch.lerp(x, previous, self.shift))
        best, ids = logits.topk(self.top_k, dim=-1)
        # a softmax over the chosen logits equals the full softmax renormalised over the chosen experts
        return Routing(logits, ids, best.softmax(dim=-1))

    def mix(self, x: Tensor, routing: Routing) -> Tensor:
        """Send the tokens to their experts and add up the weighted results, (B, S, D)."""
        flat = routing.expert_ids.reshape(-1)  # (B*S*K,): slot j belongs to token j // K
        order = flat.argsort(stable=True)
        sizes = torch.bincount(flat, minlength=len(self.experts)).tolist()
        # one gather and one scatter for all experts: per-expert indexing costs more than the small products
        rows = x.reshape(-1, x.shape[-1]).index_select(0, order // self.top_k)
        done = torch.cat([e(part) for e, part in zip(self.experts, rows.split(sizes), strict=True)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        slots = done.index_select(0, back).view(*x.shape[:2], self.top_k, -1)  # (B, S, K, D)
        return (slots * routing.weights[..., None]).sum(dim=2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing]:
        x = x + self.attn(self.norm1(x), cos, sin)
        h = self.norm2(x)
        routing = self.route(h)
        return x + self.mix(h, routing), routing


class TinyMoeForCausalLM(nn.Module):
    """Embedding, the layers, a final norm and an untied output head."""

    def __init__(self, config: TinyMoeConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = RMSNorm(c.d_model, c.norm_eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        cos, sin = rope_tables(c.context, c.head_dim, c.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if generator is not None:
            self._initialise(generator)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Normal weights from the given generator; what is added to the residual stream starts small."""
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            std = p.shape[1] ** -0.5
            if name.endswith(("attn.o.weight", "down.weight")):
                std *= (2 * self.config.n_layers) ** -0.5
            elif name.startswith(("embed", "head")):
                std = 0.02
            p.normal_(0.0, std, generator=generator)

    def forward(self, tokens: Tensor, capture: list[Routing] | None = None) -> Tensor:
        """Logits of the next token at every position.

        Parameters
        ----------
        tokens : Tensor, (B, S) int64
            Token ids, S at most `config.context`. Positions count from 0.
        capture : list of Routing, optional
            Receives one `Routing` per layer, in layer order. It carries gradients if the forward pass does.

        Returns
        -------
        Tensor, (B, S, vocab_size) float32
        """
        s = tokens.shape[1]
        if s > self.config.context:
            raise ValueError(f"{s} tokens exceed the context of {self.config.context}")
        x = self.embed(tokens)
        for block in self.layers:
            x, routing = block(x, self.cos[:s], self.sin[:s])
            if capture is not None:
                capture.append(routing)
        return self.head(self.norm(x))


def save_model(model: TinyMoeForCausalLM, folder: Path, notes: dict | None = None) -> None:
    """Write weights.safetensors (float16: NumPy reads it without help) and config.json to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().to(torch.float16).contiguous() for n, p in model.named_parameters()}
    save_file(tensors, folder / "weights.safetensors", metadata={"format": "pt", "architecture": ARCHITECTURE})
    config = {"architecture": ARCHITECTURE, **asdict(model.config), "activation": "swiglu", "norm": "rmsnorm"}
    config |= {"tied_embeddings": False, "weights_dtype": "float16", "router_weights": "softmax over the chosen top_k"}
    config |= {"parameters": sum(p.numel() for p in model.parameters()), **(notes or {})}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> TinyMoeForCausalLM:
    """Read a model written by `save_model`; the weights are widened to `dtype` for computing."""
    config = TinyMoeConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = TinyMoeForCausalLM(config)
    model.load_state_dict({n: t.to(dtype) for n, t in load_file(folder / "weights.safetensors").items()})
    return model.to(dtype).eval()
