"""Owns the plans that quality is measured of: a ladder of usual ones by name, and what else a command line may name.

The ladder's plans quantise every matrix but the routers; ``+`` names what is added to the rounding before it, one compensation after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesim import config
from moesim.errors import InputError, did_you_mean
from moesim.model import ModelSpec
from moesim.precision import FORMATS, PrecisionPlan, plan_from
from moesim.quant.packing import packed_layout

REFERENCE = "fp16"
SENSITIVITY = "int3"  # where four bits are too mild to tell units apart
RANK = 4
_KEPT: dict[str, Any] = {"norms": "bf16", "router": "fp32"}  # a few thousandths of the bytes


def four_bits(spec: ModelSpec) -> str:
    """Return the group-wise 4-bit format for a model: that of torch's kernel, where all its matrices fit it."""
    name = "int4-g64-torch"
    try:
        for t in spec.all_tensors:
            if t.part not in ("norms", "router"):
                packed_layout(FORMATS[name], t.rows, t.cols)
    except InputError:
        return "int4-g64"
    return name


def ladder(spec: ModelSpec) -> dict[str, PrecisionPlan]:
    """Return the usual plans by name."""
    int4, last = four_bits(spec), spec.n_layers - 1
    edge = min(2, max(spec.n_layers // 4, 1))
    edges = [*range(edge), *range(last - edge + 1, last + 1)]
    first = (spec.n_layers - len(edges)) // 2
    middle = list(range(first, first + len(edges)))
    adapters = {"rank": RANK, "experts": max(spec.n_experts // 2, 1)}
    shared = {"attention": "int8", "shared_expert": "int8", "dense_ffn": "int8", "embeddings": "int8", "head": "int8"}
    plans: dict[str, Any] = {REFERENCE: {"default": "fp16"}, "int8": {"default": "int8"}}
    for name, form in (("int4", int4), ("int3", "int3-g64"), ("int2", "int2-g64")):
        plans[name] = {"default": form}
        plans[f"{name}+clip"] = {"default": form, "rounding": "clip"}
        plans[f"{name}+aware"] = {"default": form, "rounding": "aware"}
        plans[f"{name}+lowrank"] = {"default": form, "rounding": "aware", "adapters": adapters}
        if name == "int4":
            plans["mixed"] = {"default": form, **shared}
            plans["attention16"] = {"default": form, "attention": "fp16"}
        if name == "int3":
            plans["int3-edges8"] = {"default": form, "overrides": _layers(spec, edges)}
            plans["int3-middle8"] = {"default": form, "overrides": _layers(spec, middle)}
    return {name: plan_from(plan if name == REFERENCE else plan | _KEPT) for name, plan in plans.items()}


def _layers(spec: ModelSpec, layers: list[int]) -> list[dict[str, Any]]:
    parts = dict.fromkeys(t.part for t in spec.all_tensors if t.layer in layers and t.part not in ("norms", "router"))
    return [{"part": part, "layers": layers, "format": "int8"} for part in parts]


def find_plan(name: str, spec: ModelSpec) -> tuple[str, PrecisionPlan]:
    """Return the plan of a name, and what to call it: a plan of the ladder, a YAML file, an inline YAML mapping, or a format."""
    known = ladder(spec)
    if name in known:
        return name, known[name]
    if name.lstrip().startswith("{"):
        return name, plan_from(config.parse_yaml(name, f"--plan {name}").data, f"--plan {name}")
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name).stem, plan_from(name)
    if name in FORMATS:
        return name, plan_from(name)
    fix = did_you_mean(name, [*known, *FORMATS]) or f"known: {', '.join(known)}"
    raise InputError("--plan", expected="a plan of the ladder, a format, a YAML file or a YAML mapping", got=f'"{name}"', fix=fix)
