"""Owns the quantising of a whole model under a plan: packed bytes of every tensor, the weights they stand for, adapters; a file of it.

The stored bytes are those that the ledger counts: ``quantise`` refuses to return anything else. Activation-aware scaling changes weights and
norms before they are rounded, never a format; adapters correct what rounding did to the experts that are routed to most.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moesim.architecture import FullAttention
from moesim.errors import InputError, MoesimError
from moesim.model import ModelSpec
from moesim.precision import Format, PrecisionPlan, plan_from
from moesim.quality.calibration import Calibration
from moesim.quality.subject import Site, Subject, weights_in
from moesim.quant.clip import clipped_ranges
from moesim.quant.lowrank import correction
from moesim.quant.packing import pack, packed_layout, view
from moesim.quant.scaling import best_scale

Pair = tuple[Tensor, Tensor]
"""A (r, K) and B (N, r) of one matrix's adapter."""


@dataclass(frozen=True)
class Quantised:
    """A model under a plan.

    Parameters
    ----------
    plan : PrecisionPlan
    packed : dict of str to (n,) uint8 Tensor
        The bytes of each tensor, by ``Site.key``.
    adapters : dict of str to (Tensor, Tensor)
        A and B in bf16, by ``Site.key``.
    """

    plan: PrecisionPlan
    packed: Mapping[str, Tensor]
    adapters: Mapping[str, Pair]

    @property
    def stored_bytes(self) -> int:
        """Bytes of everything that is stored."""
        return sum(t.numel() for t in self.packed.values()) + sum(2 * (a.numel() + b.numel()) for a, b in self.adapters.values())

    def weight(self, site: Site, adapted: bool = True) -> Tensor:
        """Return what a tensor's bytes stand for, (rows, cols) float32, its adapter added."""
        format = self.plan.format(site.part, site.layer, site.matrix)
        found = view(self.packed[site.key], packed_layout(format, site.rows, site.cols)).dequantise()
        if adapted and site.key in self.adapters:
            a, b = self.adapters[site.key]
            found = found + b.float() @ a.float()
        return found

    def save(self, path: Path) -> None:
        """Write a safetensors file: the bytes of each tensor under its key, adapters under ``key.a`` and ``key.b``, the plan in the header."""
        from safetensors.torch import save_file

        tensors = dict(self.packed)
        for key, (a, b) in self.adapters.items():
            tensors[f"{key}.a"], tensors[f"{key}.b"] = a.contiguous(), b.contiguous()
        plan = json.dumps(self.plan.model_dump(mode="json", exclude_none=True))
        try:
            save_file(tensors, path, metadata={"format": "moesim quantised 1", "plan": plan})
        except OSError as error:
            raise InputError("--save", expected="a writable file", got=error.strerror or str(error), where=str(path)) from None

    @classmethod
    def load(cls, path: Path) -> Quantised:
        """Read what ``save`` wrote."""
        from safetensors import safe_open

        try:
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                plan = plan_from(json.loads(file.metadata()["plan"]), str(path))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                "quantised model", expected="a file that moesim quality --save wrote", got=str(error)[:120], where=str(path)
            ) from None
        packed = {key: t for key, t in tensors.items() if t.dtype == torch.uint8}
        keys = [key.removesuffix(".a") for key in tensors if key.endswith(".a") and key not in packed]
        return cls(plan, packed, {key: (tensors[f"{key}.a"], tensors[f"{key}.b"]) for key in keys})


def stated_bytes(spec: ModelSpec, plan: PrecisionPlan) -> int:
    """Bytes that the ledger counts for a model's weights and adapters under a plan."""
    return spec.weight_bytes(plan) + spec.adapter_bytes(plan)


def quantise(subject: Subject, plan: PrecisionPlan, calibration: Calibration, sites: tuple[Site, ...] | None = None) -> Quantised:
    """Quantise a model's own weights; the model is not changed.

    Parameters
    ----------
    subject : Subject
    plan : PrecisionPlan
        Formats must be of ``packing``'s.
    calibration : Calibration
        Used where the plan's rounding is activation-aware, and by adapters.
    sites : tuple of Site, optional
        Only these (then nothing is scaled across matrices, and bytes are not compared); by default all.

    Raises
    ------
    InputError
        If a format cannot hold a tensor, as ``packed_layout``.
    """
    plan.check_layers(subject.spec.n_layers)
    whole = sites is None
    chosen = subject.sites if sites is None else sites
    views = weights_in(subject)
    weights = {site.key: views[site.key].clone() for site in chosen}
    squares = {site.key: calibration.mean_square(site) for site in chosen}
    if plan.rounding == "aware" and whole:
        for fold in folds(subject):
            _scale(fold, plan, weights, squares, calibration)
    packed: dict[str, Tensor] = {}
    for site in chosen:
        format = _format(plan, site)
        ranges = None
        if format.kind == "int" and plan.rounding != "nearest":
            ranges = clipped_ranges(weights[site.key], format, squares[site.key] if plan.rounding == "aware" else None)
        try:
            packed[site.key] = pack(weights[site.key], format, ranges)
        except InputError as error:
            raise error.under(f"precision.{site.part}") from None
    bare = Quantised(plan, packed, {})
    adapters = _adapters(subject, bare, weights, squares, calibration) if plan.adapters is not None and whole else {}
    out = Quantised(plan, packed, adapters)
    if whole and out.stored_bytes != stated_bytes(subject.spec, plan):
        raise MoesimError(f"{out.stored_bytes:,} bytes are stored, the ledger counts {stated_bytes(subject.spec, plan):,}")
    return out


def _format(plan: PrecisionPlan, site: Site) -> Format:
    return plan.format(site.part, site.layer, site.matrix)


def _adapters(
    subject: Subject, bare: Quantised, weights: Mapping[str, Tensor], squares: Mapping[str, Tensor], calibration: Calibration
) -> dict[str, Pair]:
    """Corrections of the experts that are routed to most."""
    wanted, spec = bare.plan.adapters, subject.spec
    if wanted is None:
        return {}
    n = min(wanted.experts or spec.n_experts, spec.n_experts)
    hot = {layer: set(calibration.most_routed(i, n)) for i, layer in enumerate(spec.moe_layers)}
    out = {}
    for site in subject.sites:
        if site.part == "routed_experts" and site.expert in hot[site.layer]:
            a, b = correction(weights[site.key] - bare.weight(site), squares[site.key], wanted.rank)
            out[site.key] = a.to(torch.bfloat16), b.to(torch.bfloat16)
    return out


# ---- scales that are folded


@dataclass(frozen=True, slots=True)
class Fold:
    """Matrices that share an input, and what makes it: a norm whose weights, or a matrix whose rows, take 1 / s.

    ``made_by`` (K,) is the channel of the maker that each channel of the input comes from.
    """

    maker: Site
    users: tuple[Site, ...]
    made_by: Tensor


def folds(subject: Subject) -> Iterator[Fold]:
    """Yield where factors can be folded without computing anything in addition."""
    spec = subject.spec
    at: dict[tuple[int, str, str, int], Site] = {(s.layer, s.part, s.matrix, s.expert): s for s in subject.sites}

    def users(layer: int, *names: tuple[str, str]) -> tuple[Site, ...]:
        return tuple(s for s in subject.sites if s.layer == layer and (s.part, s.matrix) in names)

    ffns = ("routed_experts", "shared_expert", "dense_ffn")
    for layer in range(spec.n_layers):
        norm = at.get((layer, "norms", "attention_norm", -1))
        attention = spec.attention_at(layer)
        if norm is not None and isinstance(attention, FullAttention):
            yield Fold(norm, users(layer, *(("attention", name) for name in "qkv")), torch.arange(norm.cols))
            v, o = at.get((layer, "attention", "v", -1)), at.get((layer, "attention", "o", -1))
            if v is not None and o is not None and not attention.bias:
                group = attention.n_heads // attention.n_kv_heads  # consecutive query heads that share a value head
                yield Fold(v, (o,), torch.arange(v.rows).reshape(-1, attention.v_dim).repeat_interleave(group, 0).reshape(-1))
        norm = at.get((layer, "norms", "ffn_norm", -1))
        if norm is not None:
            inner = [(part, name) for part in ffns for name in ("gate", "up")]
            yield Fold(norm, users(layer, *inner, ("router", "router"), ("router", "shared_gate")), torch.arange(norm.cols))
        for (where, part, matrix, expert), down in at.items():
            up = at.get((layer, part, "up", expert))
            if where == layer and part in ffns and matrix == "down" and up is not None:
                yield Fold(up, (down,), torch.arange(up.rows))
    norm, head = at.get((-1, "norms", "final_norm", -1)), at.get((-1, "head", "head", -1))
    if norm is not None and head is not None:
        yield Fold(norm, (head,), torch.arange(norm.cols))


def _scale(fold: Fold, plan: PrecisionPlan, weights: dict[str, Tensor], squares: dict[str, Tensor], calibration: Calibration) -> None:
    """Find a fold's factors and apply them, in place."""
    rows = {s.key: calibration.rows.get(s.source, 0) for s in fold.users}
    heard = sum(rows.values())
    if not heard:
        return
    mean: Tensor = sum((squares[s.key] * rows[s.key] for s in fold.users), torch.zeros(fold.users[0].cols)) / heard
    scale = best_scale([(weights[s.key], _format(plan, s), squares[s.key] * rows[s.key]) for s in fold.users], mean, fold.made_by)
    at = scale[fold.made_by]
    for site in fold.users:
        weights[site.key] = weights[site.key] * at
        squares[site.key] = squares[site.key] / at.square()
    made = weights[fold.maker.key]
    weights[fold.maker.key] = made / scale if fold.maker.part == "norms" else made / scale[:, None]


def restore(subject: Subject, weights: Mapping[str, Tensor]) -> None:
    """Put weights (by ``Site.key``) into the model."""
    for key, own in weights_in(subject).items():
        if key in weights:
            own.copy_(weights[key])


def originals(subject: Subject) -> dict[str, Tensor]:
    """Return copies of all of a model's weights, by ``Site.key``."""
    return {key: own.clone() for key, own in weights_in(subject).items()}
