"""Owns the JSON Schemas of the files that people write, for editors: derived from the specs, so never behind them.

A schema cannot state what a spec checks across fields: a file that an editor accepts may still be refused, with file, line and fix.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from moesim.errors import InputError, did_you_mean
from moesim.hardware import HardwareProfile
from moesim.model import ModelSpec
from moesim.precision import PrecisionPlan
from moesim.prices import PriceTable
from moesim.scenario import Scenario
from moesim.sizing.needs import Needs
from moesim.sweep.spec import SweepSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
KINDS: dict[str, type[BaseModel]] = {
    "scenario": Scenario,
    "hardware": HardwareProfile,
    "model": ModelSpec,
    "precision": PrecisionPlan,
    "sweep": SweepSpec,
    "needs": Needs,
    "prices": PriceTable,
}


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one kind of file; quantities are text with a unit, such as ``64 GiB``.

    Raises
    ------
    InputError
        On an unknown kind.
    """
    if kind not in KINDS:
        raise InputError("schema", expected="a kind of file", got=f'"{kind}"', fix=did_you_mean(kind, KINDS))
    data = KINDS[kind].model_json_schema(by_alias=True)
    return {"$schema": DIALECT, **_tidy(data, {name: f"Figure-{i}" for i, name in enumerate(_generic(data))})}


def _generic(data: dict[str, Any]) -> list[str]:
    """Definitions of generic specs: pydantic names them after all that their parameter is annotated with."""
    return [name for name in data.get("$defs", {}) if "Figure_" in name]


def _tidy(data: Any, names: dict[str, str]) -> Any:
    """Give definitions their short names, and drop the titles that pydantic makes of fields' names: an editor shows those anyway."""
    if isinstance(data, list):
        return [_tidy(item, names) for item in data]
    if not isinstance(data, dict):
        return data
    out = {names.get(key, key): _tidy(item, names) for key, item in data.items() if key != "title" or not isinstance(item, str)}
    if isinstance(ref := out.get("$ref"), str):
        head, _, name = ref.rpartition("/")
        out["$ref"] = f"{head}/{names.get(name, name)}"
    return out
