"""Owns which model and which precision a llama.cpp command line means: a GGUF file that is there, or a bundled model in the format that
the file's name states.

Bits per weight by name are the medians of public GGUF files of MoE models (the loader logs and file sizes behind ``moesim backtest``'s
public runs); ``field_precision`` says how a file of so many bits divides them among its parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from moesim import resources
from moesim.backtest.precision import plan_of
from moesim.backtest.run import KV_FORMATS
from moesim.errors import InputError, did_you_mean
from moesim.llama.options import LlamaCommand
from moesim.model import ModelSpec
from moesim.model_files import load_model_with_plan

BITS = {
    "UD-Q5_K_XL": 5.70, "UD-Q4_K_XL": 4.70, "UD-Q3_K_XL": 3.53, "UD-Q2_K_XL": 2.99, "UD-IQ3_XXS": 3.20, "IQ4_XS": 4.32, "IQ3_XXS": 3.20,
    "IQ2_XXS": 2.20, "Q8_0": 8.51, "Q6_K": 6.57, "Q5_K_M": 5.69, "Q4_K_M": 4.83, "Q3_K_M": 3.78, "Q4_0": 4.57,
}  # fmt: skip
PLAIN = {
    "MXFP4": {"default": "Q8_0", "routed_experts": "mxfp4"},
    "BF16": {"default": "bf16"},
    "F16": {"default": "F16"},
    "F32": {"default": "F32"},
}
_QUANT = re.compile(r"(?:UD-)?(?:IQ\d_[A-Z]+|Q\d(?:_K)?(?:_[SML0-9]+|_XL)*|MXFP4|BF16|F16|F32)(?![A-Za-z0-9])", re.IGNORECASE)
GPU_TYPES = {"fp16": "f16", "fp32": "f32", "bf16": "bf16", "Q6_K": "q6_0"}


@dataclass(frozen=True)
class Meant:
    """A model by the name that a scenario gives it, the scenario's precision, and what had to be guessed."""

    name: str
    model: ModelSpec
    precision: Any
    notes: tuple[str, ...] = ()


def meant_model(command: LlamaCommand, name: str = "") -> Meant:
    """Return the model and precision of a command line.

    Parameters
    ----------
    command : LlamaCommand
    name : str
        A bundled model or a file that stands for the line's; empty: the line's own file, or the bundled model that its name begins with.

    Raises
    ------
    InputError
        If the file is not there and no bundled model is like its name, or the name states no known quantisation.
    """
    notes: list[str] = []
    chosen = name or command.model
    if not chosen:
        raise InputError("option -m", expected="a model", got="none", fix="add -m FILE.gguf, or --model NAME")
    if not name and not Path(chosen).is_file():
        chosen = _bundled(command.model)
        notes.append(f"{command.model}: the file is not here; the bundled model {chosen} stands for it (--model NAME chooses another)")
    model, own = load_model_with_plan(chosen, Path(), "")
    kv = _kv(command)
    if own is not None and Path(chosen).suffix == ".gguf":
        return Meant(chosen, model, {"default": "file", **kv} if kv else "file", tuple(notes))
    quant = quant_of(command.model)
    if quant in PLAIN:
        return Meant(chosen, model, {**PLAIN[quant], **kv}, tuple(notes))
    if quant not in BITS:
        fix = f"known in names: {', '.join([*BITS, *PLAIN])}; or let -m name a file that is here"
        raise InputError("quantisation", expected="a file name that states one", got=f'"{PurePosixPath(command.model).name}"', fix=fix)
    plan = plan_of(model, quant, BITS[quant], KV_FORMATS[command.cache_k])
    data = plan.model_dump(mode="json", exclude_none=True)
    divided = [o | ({"layers": spans(o["layers"])} if "layers" in o else {}) for o in data.pop("overrides")]
    overrides = [*divided, *kv.pop("overrides", [])]
    notes.append(f"{quant}: {BITS[quant]:g} bits per weight, the median of public files; a file's own header would be exact")
    stated = {key: value for key, value in data.items() if key != "kv"} | kv
    return Meant(chosen, model, stated | ({"overrides": overrides} if overrides else {}), tuple(notes))


def quant_of(file: str) -> str:
    """Return the name of a file's quantisation in capitals, or ""."""
    found = _QUANT.findall(PurePosixPath(file.replace("\\", "/")).name)
    return str(found[-1]).upper() if found else ""


def cache_type(name: str) -> str:
    """Return what llama.cpp calls a format of the K/V cache."""
    return GPU_TYPES.get(name, name.lower())


def spans(layers: Sequence[int]) -> str:
    """Return layers as a scenario writes them: ``0-3, 7``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _kv(command: LlamaCommand) -> dict[str, Any]:
    """The K/V formats as entries of a plan; none where both are the default."""
    k, v = KV_FORMATS[command.cache_k], KV_FORMATS[command.cache_v]
    out: dict[str, Any] = {} if k == "fp16" else {"kv": k}
    return out if v == k else out | {"overrides": [{"part": "kv", "matrix": "v", "format": v}]}


def _bundled(file: str) -> str:
    """The bundled model whose name a file's name begins with, the longest of them."""
    plain, known = _plain(PurePosixPath(file.replace("\\", "/")).name), resources.names("models")
    fits = [name for name in known if plain.startswith(_plain(name)) or _plain(name) in plain]
    if not fits:
        fix = f"name a bundled model with --model; {did_you_mean(file.lower(), known)}"
        raise InputError("option -m", expected="a file that is here, or a name like that of a bundled model", got=f'"{file}"', fix=fix)
    return max(fits, key=len)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
