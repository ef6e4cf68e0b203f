"""Owns the sweep file: a base scenario, axes of what to vary, constraints and objectives, as strict data. It runs nothing.

An axis is a dotted path with a list of values, a range, or a name with options that each set several paths. What its points are is
``sweep_space.py``'s business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from moesim import config, resources
from moesim.config import Document, Spec, problem
from moesim.errors import InputError, did_you_mean
from moesim.sweep.paths import Setting, check_path, overlaps

MOST_VALUES = 10_000  # of one axis
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)(?:\s+(\S+))?")


class AxisSpec(Spec):
    """One axis as the file states it: values, a range, or options; and when it applies."""

    values: list[Any] | None = None
    options: dict[str, dict[str, Any]] | None = None  # label -> settings, each a dotted path and its value
    start: int | float | str | None = Field(None, alias="from")
    to: int | float | str | None = None
    steps: Annotated[int, Field(ge=2, le=MOST_VALUES)] | None = None  # evenly spaced, both ends included
    factor: Annotated[float, Field(gt=1)] | None = None  # each value so many times the one before, up to ``to``
    when: dict[str, Any] = {}  # axis -> value or list of values at which this axis applies

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, data: Any) -> Any:
        if isinstance(data, list):
            return {"values": data}
        if not isinstance(data, (dict, AxisSpec)):
            raise problem("a list, or a mapping of values, options or from and to", "nothing" if data is None else json.dumps(data))
        return data

    @classmethod
    def short_schema(cls, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"type": "array", "minItems": 1}

    @model_validator(mode="after")
    def _check(self) -> AxisSpec:
        ways = [self.values is not None, self.options is not None, self.start is not None or self.to is not None]
        if sum(ways) != 1:
            raise problem("exactly one of values, options, or from with to", f"{sum(ways)} of them", "state the values of the axis once")
        if ways[2] and (self.start is None or self.to is None or (self.steps is None) == (self.factor is None)):
            raise problem("from and to with one of steps or factor", "less or more", "for example {from: 1 GB/s, to: 8 GB/s, factor: 2}")
        if not ways[2] and (self.steps is not None or self.factor is not None):
            raise problem("steps and factor only with from and to", "one of them", "drop it")
        if self.values == [] or self.options == {}:
            raise problem("at least one value", "an empty axis", "name values, or remove the axis")
        return self


class Constraints(Spec):
    """What a point must meet to be the best or on the front. Keys are objectives' names or dotted keys of a result."""

    fits: bool = True
    min: dict[str, int | float | str] = {}
    max: dict[str, int | float | str] = {}


class Objectives(Spec):
    """What is wanted more or less of. The first one decides which point is best."""

    maximise: list[str] = []
    minimise: list[str] = []


class SweepSpec(Spec):
    """A whole sweep, as its file states it."""

    name: str = ""
    description: str = ""
    base: str  # scenario: a bundled name, or a file beside the sweep's
    settings: dict[str, Any] = Field({}, alias="set")  # dotted path -> value, the same in all points
    axes: Annotated[dict[str, AxisSpec], Field(min_length=1)]
    constraints: Constraints = Constraints()
    objectives: Objectives = Objectives()


@dataclass(frozen=True, slots=True)
class Option:
    """One value of an axis: what it is called, and what it sets."""

    value: Any  # what the file states, or the label of an option
    settings: tuple[Setting, ...]
    where: str

    @property
    def label(self) -> str:
        return label(self.value)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis with all its values. ``when`` maps earlier axes to the labels at which this one applies."""

    name: str
    options: tuple[Option, ...]
    when: tuple[tuple[str, frozenset[str]], ...]
    where: str

    @property
    def ordered(self) -> bool:
        """Whether the values are numbers or quantities in rising or falling order."""
        sizes = [_magnitude(option.value) for option in self.options]
        known = [x for x in sizes if x is not None]
        units = {unit for _, unit in known}
        numbers = [x for x, _ in known]
        return len(known) == len(sizes) and len(units) == 1 and numbers in (sorted(numbers), sorted(numbers, reverse=True))


def label(value: Any) -> str:
    """Return a value as one would write it in a sweep file."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def load_sweep(name: str | Path) -> tuple[SweepSpec, Document, Path]:
    """Load a sweep by bundled name or path; return it, where its values stood, and the folder that relative names refer to.

    Raises
    ------
    InputError
        If there is no such sweep, or it is wrong.
    """
    path = resources.find("scenarios/sweeps", str(name))
    document = config.read_yaml(path)
    spec = config.build(SweepSpec, document)
    return spec if spec.name else spec.model_copy(update={"name": path.stem}), document, path.parent


def axes_of(spec: SweepSpec, document: Document) -> tuple[Axis, ...]:
    """Return the axes with every range expanded and every condition resolved.

    Raises
    ------
    InputError
        At the line of the sweep file: unknown paths, a value twice, conditions on what is not there, two axes that set the same.
    """
    for path in spec.settings:
        check_path(path, document.where(("set", path)))
    axes: list[Axis] = []
    for name, axis in spec.axes.items():
        where = document.where(("axes", name))
        options = _options(name, axis, document)
        seen: set[str] = set()
        for option in options:
            if option.label in seen:
                raise InputError(
                    f"axes.{name}", expected="each value once", got=f"{option.label} twice", fix="remove one", where=option.where
                )
            seen.add(option.label)
        axes.append(Axis(name, options, _conditions(name, axis, axes, document), where))
    _check_overlap(axes)
    return tuple(axes)


def _options(name: str, axis: AxisSpec, document: Document) -> tuple[Option, ...]:
    where = document.where(("axes", name))
    if axis.options is not None:
        out = []
        for key, settings in axis.options.items():
            at: tuple[str | int, ...] = ("axes", name, "options", key)
            if not settings:
                raise InputError(f"axes.{name}.options.{key}", expected="at least one path to set", got="none", where=document.where(at))
            for path in settings:
                check_path(path, document.where((*at, path)))
            out.append(Option(key, tuple(settings.items()), document.where(at)))
        return tuple(out)
    check_path(name, where)
    if axis.values is not None:
        lists = ("axes", name, "values") if ("axes", name, "values") in document.lines else ("axes", name)
        return tuple(Option(value, ((name, value),), document.where((*lists, i))) for i, value in enumerate(axis.values))
    return tuple(Option(value, ((name, value),), where) for value in _range(name, axis, where))


def _magnitude(value: Any) -> tuple[Decimal, str] | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    match = _QUANTITY.fullmatch(value.strip() if isinstance(value, str) else format(Decimal(repr(value)), "f"))
    return (Decimal(match[1]), match[2] or "") if match else None


def _range(name: str, axis: AxisSpec, where: str) -> list[Any]:
    """Expand a range, exactly (in decimals)."""
    ends = [_magnitude(axis.start), _magnitude(axis.to)]
    if ends[0] is None or ends[1] is None or ends[0][1] != ends[1][1]:
        got = f"{label(axis.start)} and {label(axis.to)}"
        raise InputError(f"axes.{name}", expected="from and to as numbers or quantities of one unit", got=got, fix="write both in the same unit", where=where)  # fmt: skip
    (first, unit), (last, _) = ends[0], ends[1]
    if axis.steps is not None:
        if first == last:
            raise InputError(f"axes.{name}", expected="from and to that differ", got=label(axis.start), where=where)
        numbers = [first + (last - first) * i / (axis.steps - 1) for i in range(axis.steps)]
    else:
        factor = Decimal(repr(axis.factor))
        if not 0 < first < last:
            raise InputError(f"axes.{name}", expected="0 < from < to beside factor", got=f"{first} to {last}", where=where)
        numbers = [first]
        while numbers[-1] * factor <= last * Decimal("1.000000001"):
            numbers.append(numbers[-1] * factor)
            if len(numbers) > MOST_VALUES:
                raise InputError(
                    f"axes.{name}.factor", expected=f"at most {MOST_VALUES} values", got="more", fix="raise factor", where=where
                )
    rounded = [Decimal(f"{x:.12g}").normalize() for x in numbers]
    if unit:
        return [f"{format(x, 'f')} {unit}" for x in rounded]
    whole = isinstance(axis.start, int) and all(x == x.to_integral_value() for x in rounded)
    return [int(x) if whole else float(x) for x in rounded]


def _conditions(name: str, axis: AxisSpec, before: list[Axis], document: Document) -> tuple[tuple[str, frozenset[str]], ...]:
    """Resolve ``when``: each axis it names stands above, and has the values."""
    out = []
    above = {a.name: a for a in before}
    for other, wanted in axis.when.items():
        where = document.where(("axes", name, "when", other))
        if other not in above:
            fix = did_you_mean(other, above) if above else "state the axis that it depends on above it"
            raise InputError(f"axes.{name}.when", expected="an axis above this one", got=f'"{other}"', fix=fix, where=where)
        labels = [label(x) for x in (wanted if isinstance(wanted, list) else [wanted])]
        known = [option.label for option in above[other].options]
        for text in labels:
            if text not in known:
                raise InputError(
                    f"axes.{name}.when.{other}", expected="a value of that axis", got=text, fix=did_you_mean(text, known), where=where
                )
        if not labels:
            raise InputError(f"axes.{name}.when.{other}", expected="at least one value", got="none", fix="remove the axis", where=where)
        out.append((other, frozenset(labels)))
    return tuple(out)


def _check_overlap(axes: list[Axis]) -> None:
    """No two axes that can apply together may set the same path, or one a part of what the other sets."""
    for i, axis in enumerate(axes):
        mine = {path for option in axis.options for path, _ in option.settings}
        for other in axes[:i]:
            theirs = {path for option in other.options for path, _ in option.settings}
            clash = next(((a, b) for a in sorted(mine) for b in sorted(theirs) if overlaps(a, b)), None)
            if clash is not None and not _exclusive(axis, other):
                got = clash[0] if clash[0] == clash[1] else f"{clash[0]} and {clash[1]}"
                fix = "merge the two axes, or let conditions (when) exclude each other"
                raise InputError(
                    f"axes.{axis.name}", expected=f"paths that axis {other.name} does not set", got=got, fix=fix, where=axis.where
                )


def _exclusive(a: Axis, b: Axis) -> bool:
    mine, theirs = dict(a.when), dict(b.when)
    return any(name in theirs and not mine[name] & theirs[name] for name in mine)
