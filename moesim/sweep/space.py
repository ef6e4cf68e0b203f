"""Owns the points of a sweep: which there are, what scenario each one is, and the key that it is stored under.

The key is a hash of the resolved scenario, of every file that it names, and of this program's own code and data, so that a record
is found again only where computing it again would give the same. Points with the same ``plan_key`` differ in nothing but figures
that price tasks (``priced_apart``), so one schedule serves them all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast

from moesim import config, resources
from moesim.config import Document, assignment
from moesim.errors import InputError, did_you_mean
from moesim.hardware import HardwareProfile
from moesim.model_files import load_model_with_plan
from moesim.precision import plan_from
from moesim.scenario import Scenario
from moesim.simulate import machine_of, quality_of, stated_plan
from moesim.sweep.paths import put
from moesim.sweep.spec import Axis, Option, SweepSpec, axes_of

MOST_REMEMBERED = 4096  # machines, and what was made of them
MOST_POINTS = 100_000  # computed without being asked for more: a night of small runs
MOST_TRIED = 256  # points with one option that are tried before a sweep runs
HEAD_BYTES = 16 * 2**20  # of a large file that goes into its identity, beside its size
_made: dict[Any, Any] = {}
Placed = tuple[str, Any, str]  # dotted path, value, file:line
# What only prices tasks, by part of the profile. Everything else may change what is planned: a new figure counts as such.
_PRICES: dict[str, frozenset[str]] = {
    "channels": frozenset({"bandwidth", "facts"}),
    "devices": frozenset(
        {
            "chip", "compute_efficiency", "memory_efficiency", "bandwidth", "launch", "kernels_per_task", "batch_bucket", "cores",
            "dequant_bytes_per_s", "cpu_bandwidth_threads", "kernels", "idle_power", "active_power",
        }
    ),
    "links": frozenset({"latency", "pinned_efficiency", "pageable_efficiency", "curve"}),
    "storage": frozenset({"latency", "task_overhead", "curve", "engines"}),
}  # fmt: skip
_NOT_PLANNED = frozenset({"name", "description", "price", "battery", "base_power", "derate", "interference"})
_ABOUT_THE_MACHINE = {
    "name",
    "description",
    "hardware",
    "hardware_set",
    "hardware_scale",
    "derate",
    "timing",
}  # of a scenario, beside the profile itself
_MAKES_KNOWN = {"model", "precision", "hardware", "hardware_set", "hardware_scale", "derate"}  # what decides which figures a point has


@dataclass(frozen=True, slots=True)
class Point:
    """One point: its number in the order of the axes, and the option of each axis (-1 where the axis does not apply)."""

    index: int
    choice: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A point as a scenario: its key, what it shares a schedule with, the files it names; or why there is no such scenario."""

    key: str
    plan_key: str
    files: tuple[tuple[str, str], ...]  # name, identity
    error: str = ""


class Space:
    """All points of a sweep.

    Parameters
    ----------
    spec : SweepSpec
    document : Document
        Where the values of the spec stood.
    folder : Path
        What relative names refer to.

    Raises
    ------
    InputError
        At the line of the sweep file, if an axis, a condition or the base is wrong.
    """

    def __init__(self, spec: SweepSpec, document: Document, folder: Path) -> None:
        self.spec, self.document = spec, document
        self.axes: tuple[Axis, ...] = axes_of(spec, document)
        path = resources.find("scenarios", spec.base, base=folder, where=document.where(("base",)))
        fixed = tuple((p, v, document.where(("set", p))) for p, v in spec.settings.items())
        self.base, self.folder = assemble(_named(config.read_yaml(path), path), fixed, path.parent), path.parent

    @property
    def most_points(self) -> int:
        """The product of all axes; conditions can only make it less."""
        return math.prod(len(axis.options) for axis in self.axes)

    def points(self, limit: int | None = None) -> Iterator[Point]:
        """Yield every point, the last axis fastest; an axis whose condition does not hold takes no part.

        Raises
        ------
        InputError
            If there are more than ``limit``.
        """
        for index, choice in enumerate(self._choices(())):
            if limit is not None and index >= limit:
                raise InputError(
                    "axes", expected=f"at most {limit:,} points", got=f"up to {self.most_points:,}", where=self.document.where(("axes",)),
                    fix="use --search tpe --trials N, name fewer values, or raise --limit-points",
                )  # fmt: skip
            yield Point(index, choice)

    def _choices(self, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(self.axes):
            yield chosen
        elif self.applies(chosen):
            for i in range(len(self.axes[len(chosen)].options)):
                yield from self._choices((*chosen, i))
        else:
            yield from self._choices((*chosen, -1))

    def applies(self, chosen: tuple[int, ...]) -> bool:
        """Whether the axis after those chosen takes part."""
        labels = {a.name: a.options[i].label for a, i in zip(self.axes, chosen, strict=False) if i >= 0}
        return all(labels.get(name) in wanted for name, wanted in self.axes[len(chosen)].when)

    def values(self, point: Point) -> dict[str, Any]:
        """Return the value of every axis that applies, as the file states it."""
        return {axis.name: axis.options[i].value for axis, i in zip(self.axes, point.choice, strict=True) if i >= 0}

    def settings(self, point: Point) -> tuple[Placed, ...]:
        """Return what a point sets over the base."""
        options: list[Option] = [axis.options[i] for axis, i in zip(self.axes, point.choice, strict=True) if i >= 0]
        return tuple((path, value, option.where) for option in options for path, value in option.settings)

    def assignments(self, point: Point) -> tuple[str, ...]:
        """Return what ``moesim run BASE --set`` must set to run a point."""
        return (*self.base.assignments, *(assignment(path, value) for path, value, _ in self.settings(point)))

    def resolve(self, point: Point) -> Resolved:
        """Return the keys of a point."""
        return resolve(self.base, self.settings(point), self.folder)

    def known(self, part: str) -> bool:
        """Whether some point has figures of a part of a record: quality, price or energy."""
        seen = set()
        for point in islice(self.points(), MOST_POINTS):
            settings = self.settings(point)
            key = json.dumps([(path, value) for path, value, _ in settings if path.partition(".")[0] in _MAKES_KNOWN], default=str)
            if key in seen:
                continue
            seen.add(key)
            try:
                if self._has(part, assemble(self.base, settings, self.folder)):
                    return True
            except InputError:  # the point's own failure
                continue
        return False

    def _has(self, part: str, document: Document) -> bool:
        if part != "quality":
            its_machine = machine(document, self.folder)
            drawn = (device.idle_power and device.active_power for device in its_machine.devices.values())
            return its_machine.price is not None if part == "price" else any(drawn)
        scenario = config.build(Scenario, document)
        model, own = load_model_with_plan(scenario.model, self.folder)
        return bool(quality_of(model, stated_plan(scenario.precision, own, "", self.folder))["basis"] != "unknown")

    def check(self, limit: int | None = None) -> None:
        """Refuse what can be known to be wrong before anything runs: every option is tried, with the first points that have it.

        Raises
        ------
        InputError
            At the line of an option that is wrong with all others, or that is another of its axis once more.
        """
        never = {(a, i) for a, axis in enumerate(self.axes) for i in range(len(axis.options))}
        left = dict.fromkeys(never, MOST_TRIED)
        for n, point in enumerate(self.points(limit)):
            has = set(enumerate(point.choice))
            never -= has
            if left.keys() & has:
                settled = self._check_point(point, sorted(left.keys() & has))
                left = {it: times - (it in has) for it, times in left.items() if it not in settled and (times > 1 or it not in has)}
            if not left or n >= MOST_POINTS:
                break
        for a, _ in sorted(never):
            axis = self.axes[a]
            raise InputError(f"axes.{axis.name}.when", expected="a condition that some point meets", got="none", where=axis.where)
        for a in range(len(self.axes)):
            self._check_twice(a)

    def _check_point(self, point: Point, fresh: list[tuple[int, int]]) -> set[tuple[int, int]]:
        """Refuse a point whose fresh options are wrong with all others, and return those that need no other try.

        What is wrong with the combination alone is the point's own failure.
        """
        error = self._wrong(point)
        if error is None:
            return set(fresh)
        concerned = [(a, i) for a, i in fresh if self._at(error, a, i) is not None]
        for a, i in concerned:
            if self._wrong_with_all(a, i):
                raise cast(InputError, self._at(error, a, i))
        if not point.index and (own := _wrong(self.base, (), self.folder)) is not None and str(own) == str(error):
            raise own
        return set(concerned)

    def _wrong(self, point: Point) -> InputError | None:
        return _wrong(self.base, self.settings(point), self.folder)

    def _at(self, error: InputError, a: int, i: int) -> InputError | None:
        """The error at the line of an option, where it is about what the option sets."""
        option = self.axes[a].options[i]
        if any(_concerns(error, path, option.where) for path, _ in option.settings):
            return InputError(error.what, expected=error.expected, got=error.got, fix=error.fix, where=option.where)
        return None

    def _wrong_with_all(self, a: int, i: int) -> bool:
        """Whether points with an option are wrong in what it sets, whatever stands beside it: the first ones, and each other option once."""
        seen: set[tuple[int, int]] = set()
        tried = 0
        for point in islice(self.points(), MOST_POINTS):
            has = set(enumerate(point.choice))
            if (a, i) not in has or tried >= MOST_TRIED and has <= seen:
                continue
            seen |= has
            tried += 1
            error = self._wrong(point)
            if error is None or self._at(error, a, i) is None:
                return False
        return True

    def _check_twice(self, a: int) -> None:
        """Refuse an option that makes of the base what another one makes of it, unless a condition tells the two apart."""
        axis = self.axes[a]
        found: dict[Any, Option] = {}
        for option in axis.options:
            try:
                made = self._made([(path, value, option.where) for path, value in option.settings])
            except InputError:  # right only beside others
                continue
            asked = [option.label in wanted for other in self.axes for name, wanted in other.when if name == axis.name]
            same = found.setdefault((made, *asked), option)
            if same is not option:
                got = f"{same.label} and {option.label}, which are the same"
                raise InputError(f"axes.{axis.name}", expected="each value once", got=got, fix="remove one", where=option.where)

    def _made(self, settings: Iterable[Placed]) -> str:
        """What settings make of the base, however they are written."""
        document = assemble(self.base, tuple(settings), self.folder)
        data = config.build(Scenario, document).model_dump(mode="json")
        data |= {"hardware_set": None, "hardware_scale": None}
        return _hash([data, machine(document, self.folder).model_dump(mode="json")])


def _wrong(base: Document, settings: tuple[Placed, ...], folder: Path) -> InputError | None:
    """What is wrong with a scenario that settings make of a base, as far as its parts show."""
    try:
        document = assemble(base, settings, folder)
        scenario = config.build(Scenario, document)
        its_machine = machine(document, folder)
        _check_precision(scenario, folder)
        where = document.where(("model",))
        _remembered(("model", str(folder), scenario.model), lambda: load_model_with_plan(scenario.model, folder, where)[0].name)
        for tier in scenario.placement.pools:
            if tier not in its_machine.tiers:
                fix, where = did_you_mean(tier, its_machine.tiers), document.where(("placement", "pools", tier))
                raise InputError(f"placement.pools.{tier}", expected=f"a tier of {its_machine.name}", got=f'"{tier}"', fix=fix, where=where)
    except InputError as error:
        return error
    return None


def _check_precision(scenario: Scenario, base: Path) -> None:
    if scenario.precision != "file":
        try:
            plan_from(scenario.precision, base=base)
        except InputError as error:
            raise error.under("precision") from None


def _concerns(error: InputError, path: str, where: str) -> bool:
    """Whether an error is about what a path sets: the path, what lies below it, or what it lies below and states whole."""
    if error.where == where:
        return True
    if error.what.startswith("placement.pools.") and path.startswith(f"{error.what}."):
        return True
    names = {path, path.removeprefix("hardware_set.")}
    return any(
        f"{error.what}.".startswith(f"{name}.") or error.what == name.rpartition(".")[0] and name.endswith(".value") for name in names
    )


def assemble(base: Document, settings: tuple[Placed, ...], folder: Path) -> Document:
    """Return a scenario's document with settings laid over it, in order, and noted among its assignments.

    Raises
    ------
    InputError
        If a setting leads nowhere, or to a part that the machine does not have.
    """
    out = lay(base, settings)
    for path, _, where in settings:
        if path.startswith("hardware_set."):
            _check_part(out, path, where, folder)
    return out


def lay(base: Document, settings: Iterable[Placed]) -> Document:
    """Return a document with settings laid over it; what they lead to may be new.

    Raises
    ------
    InputError
        If a setting leads into a list beyond its end.
    """
    data, lines, texts = base.data, dict(base.lines), list(base.assignments)
    for path, value, where in settings:
        data = put(data, path, value, where)
        parts: tuple[str | int, ...] = tuple(int(p) if p.isdecimal() else p for p in path.split("."))
        lines = {at: line for at, line in lines.items() if at[: len(parts)] != parts} | {parts: where}
        texts.append(assignment(path, value))
    return Document(data, base.source, lines, tuple(texts))


def _named(document: Document, path: Path) -> Document:
    """The document of a scenario with its name stated, as ``load_scenario`` gives it."""
    if isinstance(document.data, dict) and not document.data.get("name"):
        return replace(document, data=document.data | {"name": path.stem})
    return document


def _check_part(document: Document, path: str, where: str, folder: Path) -> None:
    """Refuse a figure of a part that the machine does not have: it would join the machine, and change nothing."""
    parts = path.split(".")
    if len(parts) < 3 or not isinstance(document.data, dict):
        return
    plain = replace(document, data=document.data | {"hardware_set": {}, "hardware_scale": {}, "derate": 1.0})
    known = getattr(machine(plain, folder), parts[1], None)
    if isinstance(known, dict) and parts[2] not in known:
        got = f'"{parts[2]}"'
        raise InputError(path, expected=f"one of the machine's {parts[1]}", got=got, fix=did_you_mean(parts[2], known), where=where)


def machine(document: Document, folder: Path) -> HardwareProfile:
    """Return the machine of a scenario, as ``simulate`` resolves it; each is made once."""

    def make() -> HardwareProfile:
        return machine_of(config.build(Scenario, document), folder, lambda field: document.where(tuple(field.split("."))))

    return cast(HardwareProfile, _remembered(_machine_key(document, folder), make))


def _machine_key(document: Document, folder: Path) -> tuple[str, str]:
    """What a machine is made from."""
    names = ["hardware", "hardware_set", "hardware_scale", "derate"]
    if document.data.get("runtime"):  # what an engine attains goes with where it computes what
        names += ["runtime", "placement", "workload", "serving"]
    chosen = {name: document.data.get(name) for name in names}
    return str(folder), json.dumps(chosen, sort_keys=True, default=str)


def _remembered(key: Any, make: Callable[[], Any]) -> Any:
    """Return what was made under a key; it is made once."""
    if key not in _made:
        if len(_made) >= MOST_REMEMBERED:
            _made.clear()
        _made[key] = make()
    return _made[key]


def resolve(base: Document, settings: tuple[Placed, ...], folder: Path) -> Resolved:
    """Return the keys of a scenario that settings make of a base."""
    try:
        document = assemble(base, settings, folder)
        scenario = config.build(Scenario, document)
        its_machine = machine(document, folder)
    except InputError as error:
        return Resolved(_hash([base.data, [(path, value) for path, value, _ in settings], code_identity()]), "", (), str(error))
    data = scenario.model_dump(mode="json")
    files = sorted({name: found for name in _texts(data) if (found := file_identity(name, str(folder)))}.items())
    planned = {name: value for name, value in data.items() if name not in _ABOUT_THE_MACHINE}
    used = [pair for pair in files if pair[0] != data["hardware"]]
    return Resolved(
        _hash([data, files, code_identity()]),
        _hash([planned, used, _remembered((*_machine_key(document, folder), "apart"), lambda: priced_apart(its_machine))]),
        tuple(files),
    )


def priced_apart(machine: HardwareProfile) -> dict[str, Any]:
    """Return the machine without the figures that only price tasks: what a layout and a planner can see of it."""
    data = {name: value for name, value in machine.model_dump(mode="json").items() if name not in _NOT_PLANNED}
    for part, prices in _PRICES.items():
        data[part] = {name: {k: v for k, v in item.items() if k not in prices} for name, item in data[part].items()}
    for device in data["devices"].values():
        device["peak"] = sorted(device["peak"])
    for disk in data["storage"].values():
        if disk["fast_region"]:
            disk["fast_region"] = {k: v for k, v in disk["fast_region"].items() if k != "rest_factor"}
    return data


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()[:32]


def _texts(data: Any) -> Iterator[str]:
    """Every text in nested data: any of them may name a file."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, (dict, list)):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _texts(item)


@lru_cache(maxsize=4096)
def file_identity(name: str, folder: str) -> str:
    """Identity of the file that a text names, or "" where it names none. Bundled data is part of the code's identity."""
    for path in (Path(name), Path(folder) / name):
        try:
            if path.is_file() and name:
                return file_hash(path)
            if path.is_dir() and name:
                inside = [p for p in sorted(path.iterdir()) if p.suffix in (".json", ".gguf") and p.is_file()]
                return _hash([[p.name, file_hash(p)] for p in inside]) if inside else ""
        except (OSError, ValueError):
            continue
    return ""


def file_hash(path: Path) -> str:
    """Return a hash of a file's size and content; of a large one, of its first 16 MiB."""
    with path.open("rb") as file:
        return hashlib.sha256(str(path.stat().st_size).encode() + file.read(HEAD_BYTES)).hexdigest()[:32]


@cache
def code_identity() -> str:
    """Return a hash of this program: its modules and its bundled data."""
    package = Path(__file__).resolve().parents[1]
    found = {f"{path.relative_to(package)}": path for path in package.rglob("*") if path.suffix in (".py", ".yaml", ".json")}
    for kind in ("hardware_profiles", "traces", "runtimes"):
        folder = resources.folder(kind)
        if folder.is_dir():
            found |= {f"{kind}/{path.relative_to(folder)}": path for path in folder.rglob("*") if path.suffix in (".yaml", ".npz")}
    return _hash([[name, file_hash(path)] for name, path in sorted(found.items())])[:16]
