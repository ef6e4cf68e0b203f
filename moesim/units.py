"""Owns quantities with units: the closed table of units, parsing and printing. Nothing else knows 1e9 or 2**30.

In memory all quantities are SI base units: bytes (int), seconds, bytes/s, FLOP, FLOP/s, watts, joules. ``64 GB`` is
64e9 bytes, ``64 GiB`` is 64 * 2**30 bytes, and ``64 Gb`` is 64e9 bits, 8e9 bytes. Decimal prefixes after IEC 80000-13 and
the SI brochure, binary ones after IEC 80000-13; ``b`` is the bit and ``B`` the byte, always.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from moesim.errors import InputError

_DECIMAL = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}
_SMALL = {"m": -3, "u": -6, "µ": -6, "n": -9, "p": -12}

# dimension -> {unit symbol: factor to the base unit}; the first symbol is the one that is printed.
_UNITS: dict[str, dict[str, Decimal]] = {
    "bytes": {"B": Decimal(1), "bit": Decimal("0.125"), "b": Decimal("0.125")},
    "bytes_per_s": {"B/s": Decimal(1), "bit/s": Decimal("0.125"), "b/s": Decimal("0.125"), "bps": Decimal("0.125")},
    "s": {"s": Decimal(1), "min": Decimal(60), "h": Decimal(3600)},
    "hz": {"Hz": Decimal(1)},
    "flops": {"FLOP": Decimal(1)},
    "flops_per_s": {"FLOP/s": Decimal(1), "OP/s": Decimal(1)},
    "w": {"W": Decimal(1)},
    "j": {"J": Decimal(1), "Wh": Decimal(3600)},
}
_NAMES = {
    "bytes": "a size such as 64 GB or 64 GiB",
    "bytes_per_s": "a bandwidth such as 3.5 GB/s",
    "s": "a time such as 80 us",
    "hz": "a rate such as 100 Hz",
    "flops": "an amount of work such as 2 GFLOP",
    "flops_per_s": "a compute rate such as 142 TFLOP/s",
    "w": "a power such as 65 W",
    "j": "an energy such as 50 Wh",
}
_NO_BINARY = {"s", "hz", "flops", "flops_per_s", "w", "j"}
_NO_DECIMAL = {"min", "h"}


def _symbols(dimension: str) -> dict[str, Decimal]:
    """All prefixed spellings of one dimension with their exact factor."""
    out: dict[str, Decimal] = {}
    for unit, factor in _UNITS[dimension].items():
        if unit in _NO_DECIMAL:
            out[unit] = factor
            continue
        for prefix, power in _DECIMAL.items():
            out[prefix + unit] = factor * Decimal(10) ** power
        if dimension in ("s", "w", "j"):
            for prefix, power in _SMALL.items():
                out[prefix + unit] = factor * Decimal(10) ** power
        if dimension not in _NO_BINARY:
            for prefix, power in _BINARY.items():
                out[prefix + unit] = factor * Decimal(2) ** power
    return out


_TABLE = {dimension: _symbols(dimension) for dimension in _UNITS}
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*$")


def parse(text: object, dimension: str) -> Decimal:
    """Parse a quantity with its unit, exactly.

    Parameters
    ----------
    text : object
        Text such as ``"3.5 GB/s"``; anything else is refused.
    dimension : str
        One of bytes, bytes_per_s, s, hz, flops, flops_per_s, w, j.

    Returns
    -------
    Decimal
        The value in the base unit of the dimension.

    Raises
    ------
    InputError
        If it is a bare number, has an unknown unit, one of another dimension, or is negative or not finite.
    """
    want = _NAMES[dimension]
    if isinstance(text, bool) or not isinstance(text, str):
        got = f"the bare number {text}" if isinstance(text, (int, float)) and not isinstance(text, bool) else repr(text)
        raise InputError("quantity", expected=want, got=got, fix="write the unit")
    match = _NUMBER.match(text)
    if not match:
        raise InputError("quantity", expected=want, got=f'"{text[:80]}"', fix="write a number and a unit")
    number, unit = match.groups()
    try:
        value = Decimal(number.replace("_", ""))
    except InvalidOperation:
        raise InputError("quantity", expected=want, got=f'"{text[:80]}"') from None
    if not unit:
        raise InputError("quantity", expected=want, got=f"the bare number {number}", fix="write the unit")
    factor = _TABLE[dimension].get(unit)
    if factor is None:
        other = next((d for d, table in _TABLE.items() if unit in table), None)
        got = f'"{text[:80]}"' + (f", which is not {want.split(' such')[0]}" if other else f' with the unknown unit "{unit[:20]}"')
        raise InputError("quantity", expected=want, got=got, fix="units: " + ", ".join(_UNITS[dimension]) + " with k M G T or Ki Mi Gi Ti")
    if value < 0:
        raise InputError("quantity", expected=f"{want}, not negative", got=f'"{text[:80]}"')
    if abs(value.adjusted()) > 40:
        raise InputError("quantity", expected=want, got=f'"{text[:80]}"', fix="the exponent is out of range")
    return value * factor


def parse_bytes(text: object) -> int:
    """Parse a size to whole bytes; a fraction of a byte is refused."""
    value = parse(text, "bytes")
    if value != value.to_integral_value():
        raise InputError("quantity", expected="a whole number of bytes", got=f'"{text}"')
    return int(value)


def show(value: float, dimension: str, digits: int = 3) -> str:
    """Print a value of base units with a decimal prefix: ``show(13.6e9, "bytes") == "13.6 GB"``."""
    unit = next(iter(_UNITS[dimension]))
    size = abs(value)
    prefixes = [(10.0**power, prefix) for prefix, power in _DECIMAL.items() if prefix != "K"]
    if dimension in ("s", "w", "j"):
        prefixes = [(10.0**power, prefix) for prefix, power in _SMALL.items() if prefix != "µ"] + [(1.0, "")]
    prefixes.sort()
    scale, prefix = next(((s, p) for s, p in reversed(prefixes) if size >= s * 0.9999995), (1.0, ""))
    text = f"{value / scale:.{digits}g}" if size < 1000 * scale else f"{value / scale:.0f}"
    return f"{text} {prefix}{unit}"


def _field(dimension: str, whole: bool = False) -> tuple[BeforeValidator, WithJsonSchema]:
    def convert(value: Any) -> Any:
        try:
            return parse_bytes(value) if whole else float(parse(value, dimension))
        except InputError as error:
            raise PydanticCustomError("quantity", "{message}", {"message": "|".join((error.expected, error.got, error.fix))}) from None

    units = "|".join(sorted(map(re.escape, _TABLE[dimension])))
    schema = WithJsonSchema(
        {"type": "string", "pattern": rf"^\s*\+?[\d_.]+([eE][+-]?\d+)?\s*({units})\s*$", "description": _NAMES[dimension]}
    )
    return BeforeValidator(convert), schema


_bytes, _rate, _time = _field("bytes", whole=True), _field("bytes_per_s"), _field("s")
_flops, _watts, _joules = _field("flops_per_s"), _field("w"), _field("j")
Bytes = Annotated[int, _bytes[0], _bytes[1]]
BytesPerS = Annotated[float, _rate[0], _rate[1]]
Seconds = Annotated[float, _time[0], _time[1]]
FlopsPerS = Annotated[float, _flops[0], _flops[1]]
Watts = Annotated[float, _watts[0], _watts[1]]
Joules = Annotated[float, _joules[0], _joules[1]]
