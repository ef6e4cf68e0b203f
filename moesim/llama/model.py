"""Owns which model and which precision a llama.cpp command line means: a GGUF file that is there, or a bundled model in the format that
the file's name states (``quants.py``) or the user does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from moesim import resources
from moesim.backtest.run import KV_FORMATS
from moesim.errors import InputError, did_you_mean
from moesim.llama.options import LlamaCommand
from moesim.llama.quants import known_names, precision_of, quant_of
from moesim.model import ModelSpec
from moesim.model_files import load_model_with_plan
from moesim.precision import plan_from

GPU_TYPES = {"fp16": "f16", "fp32": "f32", "bf16": "bf16", "Q6_K": "q6_0"}


@dataclass(frozen=True)
class Meant:
    """A model by the name that a scenario gives it, the scenario's precision, and what had to be guessed."""

    name: str
    model: ModelSpec
    precision: Any
    notes: tuple[str, ...] = ()


def meant_model(command: LlamaCommand, name: str = "", precision: Any = None) -> Meant:
    """Return the model and precision of a command line.

    Parameters
    ----------
    command : LlamaCommand
    name : str
        A bundled model or a file that stands for the line's; empty: the line's own file, or the bundled model that its name begins with.
    precision : str or Mapping
        As in a scenario, in place of what the file or its name says; None: that.

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
    if precision is not None:
        return Meant(chosen, model, _stated(precision, kv), tuple(notes))
    if own is not None and Path(chosen).suffix == ".gguf":
        return Meant(chosen, model, {"default": "file", **kv} if kv else "file", tuple(notes))
    quant = quant_of(command.model)
    found = precision_of(model, quant, KV_FORMATS[command.cache_k])
    if found is None:
        fix = f"known in names: {', '.join(known_names())}, each also with UD- and _XL; or state it with --precision; or let -m name a file that is here"
        raise InputError("quantisation", expected="a file name that states one", got=f'"{PurePosixPath(command.model).name}"', fix=fix)
    data, remark = found
    overrides = [*data.pop("overrides", []), *kv.pop("overrides", [])]
    return Meant(chosen, model, data | kv | ({"overrides": overrides} if overrides else {}), (*notes, *([remark] if remark else [])))


def _stated(precision: Any, kv: dict[str, Any]) -> Any:
    """A precision as the user states it, with the line's K/V formats where it names none."""
    plan = plan_from(precision, "--precision")
    if not kv or plan.kv is not None:
        return precision
    data = plan.model_dump(mode="json", exclude_none=True)
    return data | kv | {"overrides": [*data["overrides"], *kv.get("overrides", [])]}


def cache_type(name: str) -> str:
    """Return what llama.cpp calls a format of the K/V cache."""
    return GPU_TYPES.get(name, name.lower())


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
