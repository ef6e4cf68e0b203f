"""JSON Schemas for editors: all bundled files are valid, a wrong key, unit or name is not, and fields say what they mean."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from moesim import resources
from moesim.cli.main import run
from moesim.config import field_comments, read_yaml
from moesim.schema import KINDS, schema
from moesim.sweep.spec import SweepSpec

FOLDERS = {
    "scenario": "scenarios", "hardware": "hardware_profiles", "model": "models", "sweep": "scenarios/sweeps", "needs": "scenarios/needs",
}  # fmt: skip
FILES = [(kind, path) for kind, folder in FOLDERS.items() for path in resources.names(folder).values()]
FILES += [("prices", resources.folder("hardware_profiles") / "parts" / "prices.yaml")]
EXAMPLES: dict[str, Any] = {kind: read_yaml(path).data for kind, path in FILES} | {
    "precision": {"default": "bf16", "overrides": [{"part": "routed_experts", "format": "int4-g32", "layers": [0, 1]}]}
}


def errors(kind: str, data: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema(kind)).iter_errors(data)]


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_schemas_and_the_command_prints_them(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", kind]) == 0
    data = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(data)
    assert data == schema(kind) and data["$schema"].endswith("2020-12/schema")


@pytest.mark.parametrize(("kind", "path"), FILES, ids=lambda x: x.stem if isinstance(x, Path) else x)
def test_bundled_files_are_valid(kind: str, path: Path) -> None:
    assert errors(kind, read_yaml(path).data) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_key_is_not(kind: str) -> None:
    assert errors(kind, EXAMPLES[kind]) == []
    assert errors(kind, EXAMPLES[kind] | {"no_such_key": 1})


WRONG = {
    "key below": ("scenario", ("prefetch", "distanse"), 2),
    "policy": ("scenario", ("placement", "pools", "unified", "policy"), "lruu"),
    "bare number": ("hardware", ("tiers", "ram", "capacity", "value"), 64),
    "unit of another dimension": ("hardware", ("tiers", "ram", "capacity", "value"), "64 GB/s"),
    "unknown unit": ("hardware", ("tiers", "ram", "capacity"), "64 GIB"),
    "attention": ("model", ("attention", "kind"), "fulll"),
    "axis": ("sweep", ("axes", "engine"), "fast"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_not(name: str) -> None:
    kind, path, value = WRONG[name]
    data = copy.deepcopy({**EXAMPLES, "scenario": quickstart(), "hardware": desktop()}[kind])
    here = data
    for part in path[:-1]:
        here = here.setdefault(part, {})
    here[path[-1]] = value
    assert errors(kind, data)


def quickstart() -> Any:
    return read_yaml(resources.names("scenarios")["quickstart"]).data


def desktop() -> Any:
    return read_yaml(resources.names("hardware_profiles")["desktop-24gb"]).data


@pytest.mark.parametrize("size", ["64 GiB", "64GB", "1_000 MB", "1.5e3 MiB", {"value": "64 GiB", "basis": "measured", "source": "free"}])
def test_quantities_carry_units(size: Any) -> None:
    data = desktop()
    data["tiers"]["ram"]["capacity"] = size
    assert errors("hardware", data) == []


def test_fields_say_what_they_mean() -> None:
    assert schema("scenario")["$defs"]["Io"]["properties"]["depth"] == {
        "default": 8, "maximum": 2**40, "minimum": 1, "type": "integer"
    }  # fmt: skip
    assert "fixed allowance" in schema("scenario")["$defs"]["MemoryPlan"]["properties"]["kv_bytes"]["description"]
    assert (
        "in-place: the CPU computes them" in schema("scenario")["$defs"]["Placement"]["properties"]["site"]["description"]
    )  # above its field
    assert schema("sweep")["properties"]["set"]["description"] == field_comments(SweepSpec)["settings"]


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "scenaro"]) == 2
    assert 'did you mean "scenario"' in capsys.readouterr().err
