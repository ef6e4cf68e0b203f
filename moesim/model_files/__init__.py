"""Owns how a model is named on the outside: a bundled name, a spec YAML, a Hugging Face config.json, or a GGUF file; told apart by content.

It must not know the formats themselves: ``hf_config`` and ``gguf_model`` do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from moesim.config import build, parse_yaml, read_text
from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.model_files.gguf_header import is_gguf
from moesim.model_files.gguf_model import model_from_gguf
from moesim.model_files.hf_config import model_from_config
from moesim.precision import PrecisionPlan
from moesim.resources import find

# Only the spec's own top-level keys tell a JSON spec from a config.json; no config.json nests its experts like this.
_SPEC_KEYS = ("experts", "attention")


def load_model(name_or_path: str | Path, base: Path | None = None, where: str = "") -> ModelSpec:
    """Return the model of a bundled name, spec YAML, config.json or GGUF file; see ``load_model_with_plan``."""
    return load_model_with_plan(name_or_path, base, where)[0]


def load_model_with_plan(name_or_path: str | Path, base: Path | None = None, where: str = "") -> tuple[ModelSpec, PrecisionPlan | None]:
    """Return a model, and the precision that its file states.

    Parameters
    ----------
    name_or_path : str or Path
        A bundled name such as ``"mixtral-8x7b"``, a file, or a folder that has a config.json (or else one GGUF file).
    base : Path, optional
        Folder that relative paths are also tried in (the scenario's).
    where : str
        Where the name was written, for messages.

    Returns
    -------
    tuple of ModelSpec and PrecisionPlan or None
        The plan is exact for a GGUF file, as stated (dtype, known quantisation) for a config.json, None for a spec YAML.

    Raises
    ------
    InputError
        If there is no such model, or the file is broken; with file, and key, line or byte offset.
    """
    path = _locate(str(name_or_path), base, where)
    if is_gguf(path):
        return model_from_gguf(path)
    text = read_text(path)
    if text.lstrip().startswith("{") and path.suffix.lower() not in (".yaml", ".yml"):
        data = parse_json(text, str(path))
        if not all(isinstance(data.get(key), dict) for key in _SPEC_KEYS):
            return model_from_config(data, str(path))
    return build(ModelSpec, parse_yaml(text, str(path))), None


def _locate(name: str, base: Path | None, where: str) -> Path:
    candidates: list[Path] = [Path(name)] + ([base / name] if base else [])
    for folder in candidates:
        if folder.is_dir():
            if (folder / "config.json").is_file():
                return folder / "config.json"
            found = sorted(folder.glob("*.gguf"))
            if len(found) == 1 or (found and "-00001-of-" in found[0].name):
                return found[0]
            got = f"{len(found)} GGUF files and no config.json"
            raise InputError(
                "model", expected="a folder with a config.json or one GGUF file", got=got, fix="name the file", where=where or name
            )
    return find("models", name, base=base, where=where)


def parse_json(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object strictly: no NaN or infinity, no key twice.

    Raises
    ------
    InputError
        With the line of a syntax error.
    """

    def constant(value: str) -> NoReturn:
        raise InputError("JSON", expected="finite numbers", got=value, fix="NaN and Infinity are not JSON", where=where)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) < len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InputError(twice, expected="each key once", got="it twice", fix="remove one", where=where)
        return out

    try:
        data = json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise InputError("JSON", expected="valid syntax", got=error.msg, where=f"{where}:{error.lineno}") from None
    except RecursionError:
        raise InputError("JSON", expected="moderate nesting", got="too deep a nesting", where=where) from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError("JSON", expected="numbers of moderate length", got=str(error)[:80], where=where) from None
    if not isinstance(data, dict):
        raise InputError("JSON", expected="an object", got=type(data).__name__, where=where)
    return data
