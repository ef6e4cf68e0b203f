"""Owns the models whose quality is measured: where each weight of a ``ModelSpec`` lies in a torch model, and how to run it.

Two kinds: the bundled small model, and causal MoE models of transformers 5 from a local folder (safetensors only, no code from the folder, no
network), computed in float32. It must not know formats or texts.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesim import resources
from moesim.capture import Recorder
from moesim.capture import load_model as load_transformers
from moesim.engines.real_weights import need_files, tinymoe_name
from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.model_files import load_model
from moesim.model_tensors import TensorSpec

Heard = Callable[[str, Tensor], None]
"""Takes the name of an input and its rows (T, K)."""


@dataclass(frozen=True, slots=True)
class Site:
    """One weight tensor of the spec in the torch model: rows x cols of ``parameter`` at ``index``.

    ``source`` names what it is multiplied with, for ``Subject.listen``; empty where nothing is (embeddings, norms, biases).
    """

    key: str
    part: str
    layer: int
    matrix: str
    expert: int
    rows: int
    cols: int
    parameter: str
    index: tuple[Any, ...] = ()
    source: str = ""


class Subject(Protocol):
    """A model under test."""

    spec: ModelSpec
    folder: Path
    module: torch.nn.Module
    sites: tuple[Site, ...]
    window: int
    first_token: int | None

    def run(self, tokens: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """Logits (B, S, V) of tokens (B, S); with gradients where they are on. ``parameters`` stand in for the model's own."""
        ...

    def route(self, tokens: Tensor) -> tuple[Tensor, NDArray[np.int16]]:
        """Logits (B, S, V), and the experts that each token chose, (B, S, L, K)."""
        ...

    def listen(self, heard: Heard) -> Any:
        """Context in which ``heard`` is told every input of a run."""
        ...


def load_subject(name: str) -> Subject:
    """Return the model of a name: ``tinymoe``, or a folder of a transformers model.

    Raises
    ------
    InputError
        If there is no such model, or its weights are not where they are looked for.
    """
    return TinyMoe() if name == "tinymoe" else TransformersModel(Path(name))


def weights_in(subject: Subject) -> dict[str, Tensor]:
    """Return views (rows, cols) of a model's own weights, by ``Site.key``."""
    parameters = dict(subject.module.named_parameters())
    return {site.key: view_of(parameters[site.parameter].data, site) for site in subject.sites}


def view_of(parameter: Tensor, site: Site) -> Tensor:
    """Return a site's part of its parameter, (rows, cols)."""
    return (parameter[site.index] if site.index else parameter).view(site.rows, site.cols)


# ---- the bundled model


class TinyMoe:
    """The bundled small model; its weights lie in a checkout of the project, not in a wheel."""

    def __init__(self) -> None:
        self.folder = resources.find("traces", "tinymoe").parent
        need_files(self.folder, ("model.py", "weights.safetensors", "config.json", "heldout.npz", "calibration.npz"))
        self.spec = load_model("tinymoe")
        self.module: torch.nn.Module = _bundled_code(self.folder / "model.py").load_model(self.folder).requires_grad_(False)
        facts = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.window = int(facts["context"])
        self.first_token: int | None = int(facts["separator_token_id"])
        self.sites = tuple(site for t in self.spec.all_tensors for site in self._sites(t))

    def _sites(self, t: TensorSpec) -> Iterator[Site]:
        if t.part == "routed_experts":
            for e in range(t.count):
                name = f"layers.{t.layer}.experts.{e}"
                source = f"{name}.down" if t.matrix == "down" else f"{name}.gate"
                parameter = f"{name}.{t.matrix}.weight"
                yield Site(f"{t.name}.{e}", t.part, t.layer, t.matrix, e, t.rows, t.cols, parameter, source=source)
            return
        name = tinymoe_name(t)
        source = "" if t.part in ("norms", "embeddings") else name
        yield Site(t.name, t.part, t.layer, t.matrix, -1, t.rows, t.cols, f"{name}.weight", source=source)

    def run(self, tokens: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        found: Tensor = torch.func.functional_call(self.module, parameters or {}, (tokens,))
        return found

    def route(self, tokens: Tensor) -> tuple[Tensor, NDArray[np.int16]]:
        routing: list[Any] = []
        logits = self.module(tokens, routing)
        return logits, torch.stack([r.expert_ids for r in routing], 2).numpy().astype(np.int16)

    @contextmanager
    def listen(self, heard: Heard) -> Iterator[None]:
        modules = dict(self.module.named_modules())
        with _hooks([(modules[name], name) for name in _sources(self.sites)], heard):
            yield


def _bundled_code(path: Path) -> Any:
    """The module of the bundled model's own code, which stands beside its weights."""
    spec = importlib.util.spec_from_file_location("moesim_bundled_tinymoe", path)
    if spec is None or spec.loader is None:
        raise InputError("tinymoe", expected="Python code", got=str(path))
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


# ---- transformers


class TransformersModel:
    """A causal MoE model of transformers 5 (Mixtral, Qwen3-MoE, OLMoE and others whose modules have the same names)."""

    _NAMES = {
        "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight", "o": "self_attn.o_proj.weight",
        "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias",
        "o_bias": "self_attn.o_proj.bias", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
        "attention_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight", "router": "mlp.gate.weight",
        "shared_gate": "mlp.shared_expert_gate.weight",
    }  # fmt: skip
    _OUTSIDE = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "final_norm": "model.norm.weight"}
    _FFN = {"shared_expert": "mlp.shared_expert", "dense_ffn": "mlp"}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module: torch.nn.Module = load_transformers(folder).float().requires_grad_(False)
        self.spec = load_model(folder)
        facts = getattr(self.module.config, "text_config", None) or self.module.config
        self.window = min(int(getattr(facts, "max_position_embeddings", 2048)), 2048)
        self.first_token: int | None = getattr(facts, "bos_token_id", None)
        self._parameters = dict(self.module.named_parameters())
        self.sites = tuple(site for t in self.spec.all_tensors for site in self._sites(t))

    def _sites(self, t: TensorSpec) -> Iterator[Site]:
        if t.part == "routed_experts":
            name = f"model.layers.{t.layer}.mlp.experts"
            parameter = f"{name}.down_proj" if t.matrix == "down" else f"{name}.gate_up_proj"
            self._check(parameter, t, (t.count, t.rows * (1 if t.matrix == "down" else 2), t.cols))
            rows = {"gate": slice(0, t.rows), "up": slice(t.rows, 2 * t.rows), "down": slice(0, t.rows)}[t.matrix]
            for e in range(t.count):
                source = f"{name}.{e}.{'mid' if t.matrix == 'down' else 'in'}"
                yield Site(f"{t.name}.{e}", t.part, t.layer, t.matrix, e, t.rows, t.cols, parameter, (e, rows), source)
            return
        if t.layer < 0:
            parameter = self._OUTSIDE.get(t.matrix, t.name)
        elif t.part in self._FFN:
            parameter = f"model.layers.{t.layer}.{self._FFN[t.part]}.{t.matrix}_proj.weight"
        else:
            parameter = f"model.layers.{t.layer}.{self._NAMES.get(t.matrix, t.matrix)}"
        self._check(parameter, t, (t.rows, t.cols) if t.part not in ("norms",) else (t.rows * t.cols,))
        source = "" if t.part in ("norms", "embeddings") else parameter.removesuffix(".weight")
        yield Site(t.name, t.part, t.layer, t.matrix, -1, t.rows, t.cols, parameter, source=source)

    def _check(self, parameter: str, t: TensorSpec, shape: tuple[int, ...]) -> None:
        found = self._parameters.get(parameter)
        if found is None or tuple(found.shape) != shape:
            got = "none" if found is None else f"shape {tuple(found.shape)}"
            fix = "models with the modules of Mixtral, Qwen3-MoE and OLMoE in transformers 5 are known"
            raise InputError(f"weights of {t.name}", expected=f"{parameter} {shape}", got=got, fix=fix, where=str(self.folder))

    def run(self, tokens: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        given = {"input_ids": tokens, "use_cache": False}
        found: Tensor = torch.func.functional_call(self.module, parameters or {}, (), given).logits
        return found

    def route(self, tokens: Tensor) -> tuple[Tensor, NDArray[np.int16]]:
        with Recorder(self.module) as recorder:
            logits = self.run(tokens)
            ids, _ = recorder.take()
        return logits, ids.reshape(*tokens.shape, *ids.shape[1:])

    @contextmanager
    def listen(self, heard: Heard) -> Iterator[None]:
        modules = dict(self.module.named_modules())
        wanted = _sources(self.sites)
        blocks = sorted({site.parameter.rpartition(".")[0] for site in self.sites if site.part == "routed_experts"})
        handles = [modules[name].register_forward_pre_hook(_experts_hook(name, heard)) for name in blocks]
        try:
            with _hooks([(modules[name], name) for name in wanted if name in modules], heard):
                yield
        finally:
            for handle in handles:
                handle.remove()


def _sources(sites: tuple[Site, ...]) -> list[str]:
    return list(dict.fromkeys(site.source for site in sites if site.source))


@contextmanager
def _hooks(modules: list[tuple[torch.nn.Module, str]], heard: Heard) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        return lambda _module, args: heard(name, args[0].reshape(-1, args[0].shape[-1]))

    handles = [module.register_forward_pre_hook(hook(name)) for module, name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _experts_hook(name: str, heard: Heard) -> Callable[..., None]:
    """What each expert of a block is given, and what its last matrix is: computed here, as fused experts show neither."""

    def hook(experts: Any, args: tuple[Any, ...]) -> None:
        hidden, ids = args[0].reshape(-1, args[0].shape[-1]), args[1]
        for e in torch.unique(ids).tolist():
            rows = hidden[(ids == e).any(1)]
            gate, up = torch.nn.functional.linear(rows, experts.gate_up_proj[e]).chunk(2, -1)
            heard(f"{name}.{e}.in", rows)
            heard(f"{name}.{e}.mid", experts.act_fn(gate) * up)

    return hook
