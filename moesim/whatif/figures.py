"""Owns the knobs of a machine: each figure that sets what work costs or what fits, turned by a factor, and how far it may be off.

A knob moves what stands for one physical thing: a channel with what was measured through it (``HardwareProfile.scaled``), all peaks of a
device. Its range is that of the least certain figure it moves: ``low`` to ``high`` where the profile states them, else by basis, ``RANGES``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from moesim.errors import InputError, did_you_mean
from moesim.hardware import Figure, HardwareProfile, StoragePoint, kind
from moesim.hardware.parts import times
from moesim.layout import Layout
from moesim.scenario import Scenario
from moesim.simulate import Case

# Half-widths by basis, a convention and no measurement: a data sheet is kept within 5 %, other people's figures repeat within 10 %, what was
# assumed may be off by 30 %, and a calibration without stated spread repeats within 3 %.
RANGES = {"spec": 0.05, "reported": 0.10, "assumed": 0.30, "measured": 0.03}
_DEVICE = {"compute_efficiency": "share", "memory_efficiency": "share", "bandwidth": "bytes_per_s", "launch": "s", "handoff": "s",
           "dequant_bytes_per_s": "bytes_per_s"}  # fmt: skip
_LINK = {"latency": "s", "handoff": "s", "pinned_efficiency": "share", "pageable_efficiency": "share"}
_STORAGE = {"latency": "s", "task_overhead": "s", "handoff": "s", "engines.buffered.efficiency": "share", "engines.mmap.efficiency": "share",
            "fast_region.rest_factor": "share"}  # fmt: skip
_MEMORY = ("runtime", "workspace")


@dataclass(frozen=True, slots=True)
class Knob:
    """Something of a machine, or of a scenario's memory, that can be turned.

    Parameters
    ----------
    name : str
        Dotted, as ``--set hardware_set.NAME`` takes it where it is one figure.
    value : float
        Base units; of several figures the largest.
    unit : str
        bytes, bytes_per_s, flops_per_s, s, share or factor.
    basis : str
        Of the least certain figure that it moves.
    low, high : float
        The range as factors of the value.
    most : float
        The largest factor that makes sense: shares end at 1.
    replans : bool
        Whether the schedule may change with it.
    """

    name: str
    value: float
    unit: str
    basis: str
    low: float
    high: float
    most: float = float("inf")
    replans: bool = False


def figure_range(figure: Figure[Any]) -> tuple[float, float]:
    """Return the range of a figure as factors of its value: as stated, else by basis."""
    width = RANGES[figure.basis]
    low = 1 - width if figure.low is None else figure.low / figure.value
    high = 1 + width if figure.high is None else figure.high / figure.value
    return float(low), float(high)


def knobs(case: Case) -> tuple[Knob, ...]:
    """Return every knob of a case: those that price work first, then those that decide what fits."""
    return (*_priced(case), *_sizes(case))


def _priced(case: Case) -> Iterator[Knob]:
    hw = case.hardware
    for name, channel in hw.channels.items():
        yield _knob(f"channels.{name}.bandwidth", "bytes_per_s", [channel.bandwidth, *_through(case, name)], channel.bandwidth.value)
    for name, device in hw.devices.items():
        yield _knob(f"devices.{name}.peak", "flops_per_s", list(device.peak.values()))
        yield from _fields(f"devices.{name}", device, _DEVICE)
    for name, link in hw.links.items():
        yield from _fields(f"links.{name}", link, _LINK)
    for name, disk in hw.storage.items():
        yield from _fields(f"storage.{name}", disk, _STORAGE)
    for i, pair in enumerate(hw.interference):
        if pair.slowdown.value > 1:
            yield _knob(f"interference.{i}.slowdown", "factor", [pair.slowdown])


def _sizes(case: Case) -> Iterator[Knob]:
    for name, tier in case.hardware.tiers.items():
        if kind(name) == "ssd":
            continue
        size = _knob(f"tiers.{name}.capacity", "bytes", [tier.capacity], replans=True)
        yield replace(size, low=1.0, high=1.0)  # what was bought is known
        if tier.reserved.value:
            yield _knob(f"tiers.{name}.reserved", "bytes", [tier.reserved], replans=True)
    for name in _MEMORY:
        if stated := getattr(case.scenario.memory, name):
            width = RANGES["assumed"]
            yield Knob(f"memory.{name}", float(stated), "bytes", "assumed", 1 - width, 1 + width, replans=True)


def _fields(name: str, spec: Any, table: dict[str, str]) -> Iterator[Knob]:
    for field, unit in table.items():
        figure = _get(spec, field)
        if figure is not None and figure.value:
            yield _knob(f"{name}.{field}", unit, [figure])


def _get(spec: Any, field: str) -> Figure[Any] | None:
    for part in field.split("."):
        spec = getattr(spec, part) if spec is not None else None
    return spec if isinstance(spec, Figure) else None


def _knob(name: str, unit: str, figures: list[Figure[Any]], value: float | None = None, replans: bool = False) -> Knob:
    least = max(figures, key=lambda f: figure_range(f)[1] - figure_range(f)[0])
    low, high = figure_range(least)
    size = max(float(f.value) for f in figures) if value is None else float(value)
    most = 1 / size if unit == "share" else float("inf")
    return Knob(name, size, unit, least.basis, low, min(high, most), most, replans)


def _through(case: Case, channel: str) -> list[Figure[Any]]:
    """Figures measured through a channel, as far as this run's reads are near them."""
    hw, io = case.hardware, case.scenario.io
    out: list[Figure[Any]] = []
    for device in hw.devices.values():
        if hw.tiers[device.tier].channel == channel:
            out += [p.bandwidth for p in device.cpu_bandwidth_threads] + [p.time for p in device.kernels]
    for link in hw.links.values():
        if link.channel == channel:
            out += [p.bandwidth for p in link.curve]
    for disk in hw.storage.values():
        if hw.tiers[disk.tier].channel == channel:
            out += [p.bandwidth for p in near(disk.curve, min(io.request, max(case.layout.expert_bytes, default=io.request)), io.depth)]
    return out


def near(curve: Iterable[StoragePoint], request: int, depth: int) -> list[StoragePoint]:
    """Return the points of a curve between which a request size and depth lie."""
    points = list(curve)
    sizes, depths = _around(sorted({p.request for p in points}), request), _around(sorted({p.depth for p in points}), depth)
    return [p for p in points if p.request in sizes and p.depth in depths]


def _around(values: list[int], x: int) -> set[int]:
    below, above = [v for v in values if v <= x], [v for v in values if v >= x]
    return {below[-1] if below else values[0], above[0] if above else values[-1]}


def find_knob(case: Case, name: str) -> Knob:
    """Return a knob by its name, or by the short form ``ssd.bandwidth``, ``gpu.peak``, ``ram.capacity``.

    Raises
    ------
    InputError
        If there is none.
    """
    every = {knob.name: knob for knob in knobs(case)}
    short = {known.split(".", 1)[1]: knob for known, knob in reversed(every.items())}
    plain = name.removeprefix("hardware_set.")
    if plain in every:
        return every[plain]
    if plain in short:
        return short[plain]
    raise InputError(
        "--vary",
        expected="a figure of the machine or a path of the scenario",
        got=f'"{name}"',
        fix=did_you_mean(plain, every if plain.count(".") > 1 else short),
    )


def turn(hardware: HardwareProfile, knob: Knob, factor: float) -> HardwareProfile:
    """Return the machine with one knob times a factor; shares may pass 1 in it."""
    part, item, field = knob.name.split(".", 2)
    if part == "channels":
        return hardware.scaled(item, factor)
    if part == "interference":
        pairs = list(hardware.interference)
        pair = pairs[int(item)]
        slower = pair.slowdown.model_copy(update={"value": 1 + (pair.slowdown.value - 1) * factor})
        pairs[int(item)] = pair.model_copy(update={"slowdown": slower})
        return hardware.model_copy(update={"interference": tuple(pairs)})
    table = getattr(hardware, part)
    return hardware.model_copy(update={part: {**table, item: _turned(table[item], field.split("."), factor)}})


def _turned(spec: Any, path: list[str], factor: float) -> Any:
    here = getattr(spec, path[0])
    if len(path) > 1:
        new: Any = _turned(here, path[1:], factor)
    elif isinstance(here, dict):
        new = {name: times(figure, factor) for name, figure in here.items()}
    elif isinstance(here.value, int):
        new = here.model_copy(update={"value": round(here.value * factor)})
    else:
        new = times(here, factor)
    return spec.model_copy(update={path[0]: new})


def on(case: Case, hardware: HardwareProfile, scenario: Scenario | None = None) -> Case:
    """Return the case on another machine, laid out anew; routing is shared."""
    scenario = scenario or case.scenario
    layout = Layout(scenario, case.model, case.plan, hardware)
    out = Case(scenario, case.model, case.plan, hardware, layout, case.document, case.base)
    if "routing" in case.__dict__:
        out.__dict__["routing"] = case.routing
    return out


def turned(case: Case, knob: Knob, factor: float) -> Case:
    """Return the case with one knob turned, laid out anew."""
    if knob.name.startswith("memory."):
        field = knob.name.removeprefix("memory.")
        memory = case.scenario.memory.model_copy(update={field: round(knob.value * factor)})
        return on(case, case.hardware, case.scenario.model_copy(update={"memory": memory}))
    return on(case, turn(case.hardware, knob, factor))
