"""Owns the weights and tokens that a real run computes with, the routed experts left out: those lie in the expert store.

Two sources: random weights of any model's shape, and the bundled small model's own weights, for which the text behind its routing trace is
known too, so that real tokens flow through and the loss can be told. Matrices are multiplied in the plan's formats; vectors (norms,
biases) and the embedding table are bf16 whatever the plan says. It must not know schedules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.model_tensors import TensorSpec
from moesim.precision import PrecisionPlan
from moesim.quant.packing import pack, packed_layout, random_packed, view
from moesim.trace import RoutingTrace

_PLAIN = {"fp32": torch.float32, "fp16": torch.float16}  # float formats that torch multiplies but the expert store does not hold


class Matrix(Protocol):
    """A weight matrix (N, K) that multiplies activations."""

    def matmul(self, x: Tensor) -> Tensor:
        """(T, K) bf16 -> (T, N) bf16."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix and its low-rank correction, both in bf16 arithmetic."""

    base: Matrix
    a: Tensor  # (r, K)
    b: Tensor  # (N, r)

    def matmul(self, x: Tensor) -> Tensor:
        down = torch.nn.functional.linear(x, self.a)
        return self.base.matmul(x) + torch.nn.functional.linear(down, self.b)


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A matrix in fp32 or fp16; the result is rounded to bf16."""

    weight: Tensor  # (N, K)

    def matmul(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.to(self.weight.dtype), self.weight).to(torch.bfloat16)


class Weights(Protocol):
    """Where weights come from."""

    @property
    def router_shift(self) -> float:
        """Share of the token before in what the router sees."""
        ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def norm_eps(self) -> float: ...

    def tensor(self, spec: TensorSpec) -> Tensor | None:
        """Return a weight tensor (rows, cols) float32, or its packed bytes in the plan's format, or None: to be drawn at random."""
        ...

    def expert(self, layer: int, expert: int, matrix: str) -> Tensor:
        """Return one matrix of a routed expert, (N, K) float32 or packed bytes; what an expert store is built from."""
        ...

    def adapter(self, layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor] | None:
        """Return the low-rank adapter of one matrix of a routed expert, A (r, K) and B (N, r) in bf16, or None."""
        ...

    def text(self, trace: RoutingTrace) -> NDArray[np.int64] | None:
        """Return the token behind each row of a trace and the one after it, (T, 2), -1 where none is known; None without a text."""
        ...


@dataclass(frozen=True)
class RandomWeights:
    """Random weights: matrices drawn so that activations keep their scale, norms of 1, biases of 0."""

    router_shift: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def tensor(self, spec: TensorSpec) -> Tensor | None:
        return None

    def expert(self, layer: int, expert: int, matrix: str) -> Tensor:
        raise InputError("expert weights", expected="a model with weights", got="random weights", fix="build the store without weights")

    def adapter(self, layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor] | None:
        return None

    def text(self, trace: RoutingTrace) -> NDArray[np.int64] | None:
        return None


_TINYMOE = {"attention_norm": "norm1", "ffn_norm": "norm2", "router": "router", "q": "attn.q", "k": "attn.k", "v": "attn.v", "o": "attn.o"}
_TINYMOE_OUTSIDE = {"embed": "embed", "head": "head", "final_norm": "norm"}  # of all layers


def tinymoe_name(spec: TensorSpec) -> str:
    """Return the name of the bundled small model's module that holds a tensor (experts apart)."""
    return _TINYMOE_OUTSIDE[spec.matrix] if spec.layer < 0 else f"layers.{spec.layer}.{_TINYMOE[spec.matrix]}"


def need_files(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder of the bundled small model that lacks a file; wheels do not bring its weights."""
    for name in names:
        if not (folder / name).is_file():
            raise InputError("tinymoe", expected=f"{name} in {folder}", got="no such file", fix="use a checkout of the project")


class TinyMoeWeights:
    """The bundled small model: weights, and the text that its trace was recorded on.

    Parameters
    ----------
    folder : Path
        Holds ``weights.safetensors``, ``config.json``, ``tinymoe.npz`` and ``heldout.npz``.

    Raises
    ------
    InputError
        If one of them is missing.
    """

    def __init__(self, folder: Path) -> None:
        need_files(folder, ("weights.safetensors", "config.json", "tinymoe.npz", "heldout.npz"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.router_shift = float(config["router_shift"])
        self.rope_theta, self.norm_eps = float(config["rope_theta"]), float(config["norm_eps"])
        self._folder = folder
        self._tensors = _read_weights(folder / "weights.safetensors")

    def tensor(self, spec: TensorSpec) -> Tensor | None:
        return self._tensors[f"{tinymoe_name(spec)}.weight"].float().reshape(spec.rows, spec.cols)

    def expert(self, layer: int, expert: int, matrix: str) -> Tensor:
        return self._tensors[f"layers.{layer}.experts.{expert}.{matrix}.weight"].float()

    def adapter(self, layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor] | None:
        return None

    def text(self, trace: RoutingTrace) -> NDArray[np.int64] | None:
        with np.load(self._folder / "tinymoe.npz", allow_pickle=False) as file:
            recorded = json.loads(str(file["meta"]))["sequences"]
        with np.load(self._folder / "heldout.npz", allow_pickle=False) as file:
            tokens, offsets = file["tokens"].astype(np.int64), file["offsets"]
        if trace.meta.get("model") != "tinymoe" or int(trace.seq_id.max(initial=0)) >= len(recorded):
            return None
        documents = np.array([s["document_index"] for s in recorded], np.int64)[trace.seq_id]
        at = offsets[documents] + np.array([s["offset"] for s in recorded], np.int64)[trace.seq_id] + trace.position
        ends = at + 1 >= offsets[documents + 1]
        return np.stack([tokens[at], np.where(ends, -1, tokens[np.minimum(at + 1, len(tokens) - 1)])], axis=1)


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file of float16: the length of a JSON header in 8 bytes, the header, the data."""
    data = np.fromfile(path, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] != "F16":
                raise InputError("weights", expected="float16", got=f"{entry['dtype']} ({name})", where=str(path))
            first, last = entry["data_offsets"]
            out[name] = torch.from_numpy(data[start + first : start + last].copy().view(np.float16).reshape(entry["shape"]))
    return out


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights of one model under a plan, ready to multiply."""

    model: ModelSpec
    weights: Weights
    matrix: Callable[[int, str, str], Matrix]  # (layer, part, matrix)
    vector: Callable[[int, str], Tensor]  # (layer, matrix) -> bf16 (rows x cols,)
    embedding: Tensor  # (V, D) bf16


def load_weights(model: ModelSpec, plan: PrecisionPlan, weights: Weights, seed: int = 0) -> Loaded:
    """Make every tensor outside the routed experts ready to multiply.

    Raises
    ------
    InputError
        If a part's format has no real kernel, or the model's tensors are not known.
    """
    if model.declared is not None:
        fix = "name a model whose architecture is known"
        raise InputError("model", expected="real tensors", got=f"{model.name}, of declared totals", fix=fix)
    rng = np.random.default_rng([seed, 1])
    matrices: dict[tuple[int, str, str], Matrix] = {}
    vectors: dict[tuple[int, str], Tensor] = {}
    embedding = torch.zeros(0)
    for spec in model.all_tensors:
        given = weights.tensor(spec) if spec.part != "routed_experts" else None
        if given is not None and given.dtype == torch.uint8 and spec.part in ("norms", "embeddings"):  # these are held in bf16
            given = view(given, packed_layout(plan.format(spec.part, spec.layer, spec.matrix), spec.rows, spec.cols)).dequantise()
        if spec.part == "norms":
            drawn = torch.zeros(spec.rows, spec.cols) if spec.matrix.endswith("_bias") else torch.ones(spec.rows, spec.cols)
            vectors[spec.layer, spec.matrix] = (drawn if given is None else given).reshape(-1).to(torch.bfloat16)
        elif spec.part == "embeddings":
            embedding = _drawn(rng, spec).to(torch.bfloat16) if given is None else given.to(torch.bfloat16)
            if model.tied_embeddings:
                tied = TensorSpec("head", "embeddings", -1, "head", spec.rows, spec.cols)
                matrices[-1, "head", "head"] = _matrix(tied, plan, embedding.float(), rng)
        elif spec.part not in ("routed_experts", "vision", "lookup"):
            matrices[spec.layer, spec.part, spec.matrix] = _matrix(spec, plan, given, rng)
    return Loaded(model, weights, lambda *key: matrices[key], lambda *key: vectors[key], embedding)


def _drawn(rng: np.random.Generator, spec: TensorSpec) -> Tensor:
    return torch.from_numpy(rng.standard_normal((spec.rows, spec.cols), np.float32))


def _matrix(spec: TensorSpec, plan: PrecisionPlan, given: Tensor | None, rng: np.random.Generator) -> Matrix:
    format = plan.format(spec.part, spec.layer, spec.matrix)
    plain = _PLAIN.get(format.name)
    if plain is not None and (given is None or given.dtype != torch.uint8):
        return PlainMatrix((_drawn(rng, spec) / spec.cols**0.5 if given is None else given).to(plain))
    try:
        layout = packed_layout(format, spec.rows, spec.cols)
    except InputError as error:
        raise error.under(f"precision.{spec.part}") from None
    if given is None:
        given = torch.from_numpy(random_packed(rng, layout))
    elif given.dtype != torch.uint8:
        given = pack(given, format)
    found = view(given, layout)
    return PlainMatrix(found.dequantise().to(plain)) if plain is not None else found
