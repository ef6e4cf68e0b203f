"""Owns which dotted paths a sweep may set: those of a scenario, and of the machine under ``hardware_set``.

It looks at the shape of the specs alone; whether a value is right is found out by building the scenario.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from moesim.errors import InputError, did_you_mean
from moesim.hardware import HardwareProfile
from moesim.hardware.parts import Figure
from moesim.scenario import TIER_NAMES, Scenario, TierName

Setting = tuple[str, Any]  # a dotted path and its value


def check_path(path: str, where: str = "") -> None:
    """Refuse a path that no scenario has.

    Raises
    ------
    InputError
        With the nearest name that exists.
    """
    parts = path.split(".")
    if parts[0] == "hardware_set" and len(parts) > 1:
        _walk(HardwareProfile, parts, 1, where)
        return
    if parts[0] not in Scenario.model_fields:
        fix = did_you_mean(parts[0], Scenario.model_fields)
        raise InputError(path, expected="a path of a scenario", got=f'"{parts[0]}"', fix=fix, where=where)
    _walk(Scenario, parts, 0, where)


def overlaps(a: str, b: str) -> bool:
    """Whether one of two paths lies in the other, or sets what the other sets."""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def put(data: Any, path: str, value: Any, where: str = "") -> Any:
    """Return nested data with the value at a dotted path changed; the data given stays as it is.

    Raises
    ------
    InputError
        If the path leads into a list beyond its end.
    """
    return _put(data, path.split("."), 0, value, where)


def _put(data: Any, parts: list[str], i: int, value: Any, where: str) -> Any:
    if i == len(parts):
        return value
    part = parts[i]
    if isinstance(data, list):
        if not part.isdecimal() or int(part) >= len(data):
            raise InputError(".".join(parts[: i + 1]), expected=f"an index below {len(data)}", got=f'"{part}"', where=where)
        return [_put(item, parts, i + 1, value, where) if n == int(part) else item for n, item in enumerate(data)]
    here = data if isinstance(data, Mapping) else {}
    return {**here, part: _put(here.get(part), parts, i + 1, value, where)}


def _walk(kind: Any, parts: list[str], i: int, where: str) -> None:
    """Follow the types of a spec down a path."""
    if i == len(parts) or kind is Any:
        return
    name, path = parts[i], ".".join(parts)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields
        if name not in fields:
            fix = did_you_mean(name, fields)
            raise InputError(path, expected=f"a field of {'.'.join(parts[:i]) or 'a scenario'}", got=f'"{name}"', fix=fix, where=where)
        _walk(fields[name].annotation, parts, i + 1, where)
        return
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        _walk(inner[0], parts, i, where)
    elif origin in (Union, types.UnionType):
        _walk_any([x for x in inner if x is not type(None)], parts, i, where)
    elif origin is dict:
        if inner[0] is TierName and not re.fullmatch(TIER_NAMES, name):
            raise InputError(path, expected="a tier: vram, ram, unified, or vram1 and so on", got=f'"{name}"', where=where)
        _walk(inner[1], parts, i + 1, where)
    elif origin in (list, tuple):
        if not name.isdecimal():
            raise InputError(path, expected=f"an index into {'.'.join(parts[:i])}", got=f'"{name}"', where=where)
        _walk(inner[0], parts, i + 1, where)
    else:
        plain = ".".join(parts[:i])
        raise InputError(path, expected=f"a path that ends at {plain}", got=f'"{name}" below it', fix=f"set {plain}", where=where)


def _walk_any(kinds: list[Any], parts: list[str], i: int, where: str) -> None:
    """A path is right if one branch of a union takes it; the last branch says what is wrong."""
    kinds = sorted(kinds, key=lambda x: isinstance(x, type) and not issubclass(x, (BaseModel, Figure)) and get_origin(x) is None)
    for kind in kinds[:-1]:
        try:
            return _walk(kind, parts, i, where)
        except InputError:
            continue
    _walk(kinds[-1], parts, i, where)
