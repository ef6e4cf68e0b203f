"""Owns what a sweep keeps of a result, and how keys of it are named, read and held against limits.

A record is ``Result.as_dict()`` without its long lists (the ledger's lines, the assumed figures), and ``facts`` that other parts of
the case know: whether it fits, the most that all memories held together, and what the machine cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from moesim.errors import InputError, did_you_mean
from moesim.scenario import Scenario, TraceUse, Workload
from moesim.simulate import Case, Result, make_case, simulate
from moesim.sweep.spec import Constraints, Objectives
from moesim.units import parse

# Names for what most sweeps are about. Others are dotted keys of the record.
NAMES = {
    "speed": "metrics.decode_tok_s",
    "throughput": "metrics.output_throughput_tok_s",
    "ttft": "metrics.ttft_ms.mean",
    "tpot": "metrics.tpot_ms.mean",
    "memory": "facts.memory_peak_bytes",
    "price": "facts.price",
    "energy": "energy.joules_per_token",
    "quality_loss": "quality.loss_percent",
}
_FREE = ("memory", "transfers", "lanes")  # below these stand names of the machine: tiers, channels, lanes
_UNITS = {"_bytes": ("bytes", 1.0), "_ms": ("s", 1e3), "_s": ("s", 1.0)}
Bound = tuple[str, float]


def record(result: Result) -> dict[str, Any]:
    """Return what the store keeps of a result."""
    data = result.as_dict()
    data["provenance"].pop("assumed", None)
    for tier in data["memory"].values():
        tier.pop("lines", None)
    return data | {"facts": _facts(result.case, data)}


def _facts(case: Case, data: Mapping[str, Any]) -> dict[str, Any]:
    peaks = [tier["peak_bytes"] for tier in data["memory"].values()]
    price = case.hardware.price
    return {
        "fits": data["oom"] is None,
        "memory_peak_bytes": None if None in peaks else sum(peaks),
        "price": price.amount if price is not None else None,
        "price_basis": f"{price.currency} {price.date}, {price.basis}" if price is not None else None,
    }


def value(data: Mapping[str, Any] | None, key: str) -> float | None:
    """Return the number at a dotted key of a record, or None where there is none."""
    here: Any = data
    for part in key.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    if isinstance(here, bool) or not isinstance(here, (int, float)) or not math.isfinite(here):
        return None
    return float(here)


@cache
def _shape() -> dict[str, Any]:
    """A record with every key that results have: that of the smallest run there is."""
    workload = Workload(prompt_tokens=1, output_tokens=2)
    tiny = Scenario(model="tinymoe", hardware="laptop-8gb", trace=TraceUse(generate="uniform"), workload=workload)
    return record(simulate(make_case(tiny)))


def resolve_key(name: str, where: str = "") -> str:
    """Return the dotted key of an objective or limit.

    Raises
    ------
    InputError
        If no result has it.
    """
    key = NAMES.get(name, name)
    here: Any = _shape()
    parts = key.split(".")
    for i, part in enumerate(parts):
        free = i == 1 and parts[0] in _FREE
        if isinstance(here, Mapping) and part not in here and free and here:
            part = next(iter(here))
        if not isinstance(here, Mapping) or part not in here:
            known = [".".join([*parts[:i], x]) for x in here] if isinstance(here, Mapping) else [".".join(parts[:i])]
            known += list(NAMES) if i == 0 else []
            fix = did_you_mean(".".join(parts[: i + 1]), known)
            raise InputError(name, expected="a key of a result", got=f'"{name}"', fix=fix, where=where)
        here = here[part]
    if isinstance(here, (Mapping, list, bool, str)):
        fix = did_you_mean(name, [f"{key}.{x}" for x in here]) if isinstance(here, Mapping) else "name a number"
        raise InputError(name, expected="a number of a result", got=f"{type(here).__name__} at {key}", fix=fix, where=where)
    return key


def objectives_of(spec: Objectives, where: str = "") -> tuple[tuple[str, int], ...]:
    """Return (key, +1 to maximise or -1 to minimise) of every objective, the stated order kept; speed where none is stated.

    Raises
    ------
    InputError
        If a key is unknown, or named twice.
    """
    found: list[tuple[str, int]] = []
    for names, sign in ((spec.maximise, 1), (spec.minimise, -1)):
        for name in names:
            key = resolve_key(name, where)
            if any(key == other for other, _ in found):
                raise InputError(
                    f"objectives: {name}", expected="each key once", got="it again", fix="maximise or minimise it, not both", where=where
                )
            found.append((key, sign))
    return tuple(found) or ((NAMES["speed"], 1),)


def limits_of(spec: Constraints, where: str = "") -> tuple[tuple[Bound, ...], tuple[Bound, ...]]:
    """Return the lower and the upper limits as (key, number).

    Raises
    ------
    InputError
        If a key is unknown, a quantity has the wrong unit, or a lower limit is above the upper one.
    """
    lower = {resolve_key(name, where): _number(name, x, where) for name, x in spec.min.items()}
    upper = {resolve_key(name, where): _number(name, x, where) for name, x in spec.max.items()}
    for key, low in lower.items():
        if key in upper and low > upper[key]:
            got = f"at least {low:g} and at most {upper[key]:g}"
            raise InputError(
                f"constraints: {key}", expected="limits that some result can meet", got=got, fix="swap or relax them", where=where
            )
    return tuple(lower.items()), tuple(upper.items())


def _number(name: str, stated: int | float | str, where: str) -> float:
    if not isinstance(stated, str):
        return float(stated)
    key = NAMES.get(name, name).removesuffix(".mean")
    for suffix, (dimension, times) in _UNITS.items():
        if key.endswith(suffix) and not key.endswith("_tok_s"):
            try:
                return float(parse(stated, dimension)) * times
            except InputError as error:
                raise InputError(f"constraints: {name}", expected=error.expected, got=error.got, fix=error.fix, where=where) from None
    raise InputError(f"constraints: {name}", expected="a number", got=f'"{stated}"', where=where)


def violation(data: Mapping[str, Any] | None, fits: bool, lower: tuple[Bound, ...], upper: tuple[Bound, ...]) -> float:
    """Return by how much a record misses its limits, relative to each limit and summed; 0 where it meets them, inf where it has no figure."""
    if data is None or fits and not data["facts"]["fits"]:
        return math.inf
    missed = 0.0
    for key, limit, sign in [(k, x, -1) for k, x in lower] + [(k, x, 1) for k, x in upper]:
        got = value(data, key)
        if got is None:
            return math.inf
        missed += max(sign * (got - limit), 0.0) / (abs(limit) or 1.0)
    return missed
