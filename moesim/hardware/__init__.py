"""Owns the hardware profile: how tiers, channels, devices, links and storage join to one machine, and loading it by name.

It must not know models, runtimes or schedules; what a task costs on this hardware is ``cost.py``'s business. The parts, and the
meaning of attained bandwidth and flow cap, are in ``hardware_parts.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, model_validator

from moesim import config, resources
from moesim.config import Spec
from moesim.errors import InputError, did_you_mean
from moesim.hardware.parts import (
    Basis,
    Channel,
    ChannelFacts,
    ComputeFormat,
    Device,
    Energy,
    Engines,
    FastRegion,
    Figure,
    Interference,
    Link,
    LinkPoint,
    Power,
    Price,
    Rate,
    Share,
    Storage,
    StoragePoint,
    ThreadPoint,
    Tier,
    missing,
    over_requests,
    problem,
    times,
)
from moesim.html_table import html_table
from moesim.units import show

__all__ = [
    "CORES", "Basis", "Channel", "ChannelFacts", "ComputeFormat", "Device", "Engines", "FastRegion", "Figure", "HardwareProfile", "Interference",
    "Link", "LinkPoint", "Price", "Rate", "Share", "Storage", "StoragePoint", "ThreadPoint", "Tier", "assumed_figures", "figures", "kind",
    "load_hardware",
]  # fmt: skip

V = TypeVar("V")
CORES = "cores"  # the channel of CPU time, in core-seconds per second; its capacity is devices.cpu.cores
_KEYS = {
    "tiers": (re.compile(r"(vram|ram|unified|ssd)\d*"), "vram, ram, unified or ssd, numbered from the second on (vram1)"),
    "devices": (re.compile(r"(gpu|npu|cpu)\d*"), "gpu, npu or cpu, numbered from the second on (gpu1)"),
    "links": (re.compile(r"(h2d|d2h|p2p)\d*"), "h2d, d2h or p2p, numbered from the second on (h2d1)"),
    "storage": (re.compile(r"ssd\d*"), "ssd, numbered from the second on (ssd1)"),
    "channels": (re.compile(r"(?!cores$)[a-z][a-z0-9_]*"), "a lower-case word other than cores, which is derived from the CPU"),
}


def kind(name: str) -> str:
    """Return the kind of a numbered key: ``kind("gpu1") == "gpu"``."""
    return name.rstrip("0123456789")


class HardwareProfile(Spec):
    """A machine. Figures are as stated; ``derated()`` gives the machine that a plan should count on."""

    name: str
    description: str
    price: Price | None = None
    battery: Figure[Energy] | None = None
    base_power: Figure[Power] | None = None
    derate: Annotated[float, Field(gt=0, le=1)] = 1.0
    tiers: Annotated[dict[str, Tier], Field(min_length=1)]
    channels: Annotated[dict[str, Channel], Field(min_length=1)]
    devices: Annotated[dict[str, Device], Field(min_length=1)]
    links: dict[str, Link] = {}
    storage: dict[str, Storage] = {}
    interference: Annotated[tuple[Interference, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _check(self) -> HardwareProfile:
        for part, (pattern, expected) in _KEYS.items():
            for key in getattr(self, part):
                if not pattern.fullmatch(key):
                    raise problem((part, key), expected, f'"{key}"')
        for name, tier in self.tiers.items():
            _known(("tiers", name, "channel"), "channel", tier.channel, self.channels)
        for name, device in self.devices.items():
            _known(("devices", name, "tier"), "tier", device.tier, self.tiers)
            if kind(device.tier) == "ssd":
                raise problem(("devices", name, "tier"), "a memory that the device addresses", f'"{device.tier}"', "ssd is storage")
            if kind(device.tier) == "vram" and kind(name) == "cpu":
                raise problem(("devices", name, "tier"), "ram or unified for a CPU", f'"{device.tier}"')
            if kind(name) == "cpu" and device.cores is None:
                raise missing("devices", name, "cores")
        for name, link in self.links.items():
            _known(("links", name, "source"), "tier", link.source, self.tiers)
            _known(("links", name, "target"), "tier", link.target, self.tiers)
            _known(("links", name, "channel"), "channel", link.channel, self.channels)
            if link.source == link.target:
                raise problem(("links", name, "target"), "a tier other than the source", f'"{link.target}"', "one tier needs no link")
        for name, store in self.storage.items():
            _known(("storage", name, "tier"), "tier", store.tier, self.tiers)
            if kind(store.tier) != "ssd":
                raise problem(("storage", name, "tier"), "an ssd tier", f'"{store.tier}"')
        lanes = {**self.devices, **self.links, **self.storage}
        for i, pair in enumerate(self.interference):
            _known(("interference", i, "lane"), "device, link or storage", pair.lane, lanes)
            _known(("interference", i, "beside"), "device, link or storage", pair.beside, lanes)
            if pair.lane == pair.beside:
                raise problem(("interference", i, "beside"), f"a lane other than {pair.lane}", f'"{pair.beside}"')
        self._check_shape()
        return self

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str]] = [(name, show(tier.capacity.value, "bytes")) for name, tier in self.tiers.items()]
        rows += [(f"{name} bandwidth", show(channel.bandwidth.value, "bytes_per_s")) for name, channel in self.channels.items()]
        for name, device in self.devices.items():
            rows.append((f"{name} peak", ", ".join(f"{form} {show(rate.value, 'flops_per_s')}" for form, rate in device.peak.items())))
        stated = Counter(figure.basis for _, figure in figures(self))
        rows.append(("figures", ", ".join(f"{count} {basis}" for basis, count in stated.most_common())))
        return html_table(f"{self.name}: {self.description}", rows)

    def _check_shape(self) -> None:
        """What a machine as a whole must have: one main memory, and a way to each memory of its own."""
        memories = {kind(name) for name in self.tiers}
        if {"ram", "unified"} <= memories:
            raise problem(("tiers", "unified"), "either ram or unified memory", "both", "on a unified machine the unified tier is the RAM")
        if not {"ram", "unified"} & memories:
            raise problem(("tiers",), "a ram or a unified tier", ", ".join(self.tiers))
        shared = {tier.channel for name, tier in self.tiers.items() if kind(name) == "unified"}
        if len(shared) > 1:
            got = ", ".join(sorted(shared))
            raise problem(("tiers", "unified", "channel"), "one channel that all devices of unified memory share", got)
        for name, device in self.devices.items():
            if kind(device.tier) == "vram":
                for end, flow in (("target", "into"), ("source", "out of")):
                    if not any(getattr(link, end) == device.tier for link in self.links.values()):
                        raise problem(("devices", name, "tier"), f"a link {flow} {device.tier}", "none", "add links.h2d and links.d2h")
        for name in self.tiers:
            if kind(name) == "ssd" and not any(store.tier == name for store in self.storage.values()):
                raise problem(("tiers", name), "a drive under storage for this tier", "none", f"add storage.{name} with a curve")

    @property
    def is_unified(self) -> bool:
        """Whether main memory is one tier that CPU, GPU and NPU address alike."""
        return any(kind(name) == "unified" for name in self.tiers)

    def channel_capacities(self) -> dict[str, float]:
        """Return the capacity of every channel: bytes/s, core-seconds/s for the CPU's ``cores``, and 1 for each pair of lanes that interfere."""
        out = {name: channel.bandwidth.value for name, channel in self.channels.items()}
        for name, device in self.devices.items():
            if kind(name) == "cpu" and device.cores is not None:
                out[CORES + name.removeprefix("cpu")] = float(device.cores.value)
        return out | dict.fromkeys(("|".join(pair) for pair in self.slowdowns()), 1.0)

    def slowdowns(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Return how many times longer tasks of two lanes take while both are busy, by pair in alphabetical order."""
        out: dict[tuple[str, str], tuple[float, float]] = {}
        for it in self.interference:
            pair = (min(it.lane, it.beside), max(it.lane, it.beside))
            mine = list(out.get(pair, (1.0, 1.0)))
            mine[pair.index(it.lane)] = it.slowdown.value
            out[pair] = (mine[0], mine[1])
        return out

    def stream_cap(self, device: str, threads: int | None = None) -> float:
        """Return the bytes/s that one task on a device can stream from its own memory, alone.

        ``min(channel x memory_efficiency, port)``. With ``threads``, on a device that has points over threads, those
        take the place of both: linear between points, in proportion below the first, the last one's above.
        """
        it = _get(self.devices, device, "device")
        channel = self.channels[self.tiers[it.tier].channel].bandwidth.value
        if threads is not None and it.cpu_bandwidth_threads:
            points = [(0, 0.0), *((p.threads, p.bandwidth.value) for p in it.cpu_bandwidth_threads)]
            if threads < 1:
                raise InputError("threads", expected="at least 1", got=str(threads))
            for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
                if threads <= x1:
                    return min(channel, y0 + (y1 - y0) * (threads - x0) / (x1 - x0))
            return min(channel, points[-1][1])
        cap = channel * it.memory_efficiency.value
        return min(cap, it.bandwidth.value) if it.bandwidth else cap

    def read_bandwidth(self, storage: str, request_bytes: float, depth: float, *, engine: str = "direct", fast: bool = True) -> float:
        """Return ``Storage.read_bandwidth``, never above the drive's channel."""
        store = _get(self.storage, storage, "storage")
        channel = self.channels[self.tiers[store.tier].channel].bandwidth.value
        return min(channel, store.read_bandwidth(request_bytes, depth, engine=engine, fast=fast))

    def read_flow_cap(self, storage: str, request_bytes: float, depth: float, *, engine: str = "direct", fast: bool = True) -> float:
        """Return the bytes/s at which a read flows once the latency of its operations is paid for apart.

        With r the size that reaches the drive and d the depth: ``r / (r / read_bandwidth - latency / d)``, never above the channel.
        """
        store = _get(self.storage, storage, "storage")
        attained = self.read_bandwidth(storage, request_bytes, depth, engine=engine, fast=fast)
        channel = self.channels[self.tiers[store.tier].channel].bandwidth.value
        return _net(attained, store.request_bytes(request_bytes, engine), store.latency.value / max(depth, 1), channel)

    def link_bandwidth(self, link: str, request_bytes: float, *, pinned: bool = True) -> float:
        """Return the attained bytes/s of copies of one size, one after the other, latency included.

        Without a curve, ``request / (latency + request / (channel x efficiency))``. A curve is of pinned copies; pageable ones
        attain ``pageable_efficiency / pinned_efficiency`` of it.
        """
        it = _get(self.links, link, "link")
        if request_bytes <= 0:
            raise InputError("request", expected="a size above 0 bytes", got=str(request_bytes))
        efficiency = it.pinned_efficiency.value if pinned else it.pageable_efficiency.value
        flow = self.channels[it.channel].bandwidth.value * efficiency
        if it.curve:
            curve = over_requests([(p.request, p.bandwidth.value) for p in it.curve], request_bytes)
            return min(flow, curve * efficiency / it.pinned_efficiency.value)
        return request_bytes / (it.latency.value + request_bytes / flow)

    def link_flow_cap(self, link: str, request_bytes: float, *, pinned: bool = True) -> float:
        """Return the bytes/s at which a copy flows once its latency is paid for apart."""
        it = _get(self.links, link, "link")
        efficiency = it.pinned_efficiency.value if pinned else it.pageable_efficiency.value
        flow = self.channels[it.channel].bandwidth.value * efficiency
        if not it.curve:
            return flow
        return _net(self.link_bandwidth(link, request_bytes, pinned=pinned), request_bytes, it.latency.value, flow)

    def scaled(self, channel: str, factor: float) -> HardwareProfile:
        """Return the machine with one channel faster or slower, and with it what was measured through it: curves, and kernel times of its devices."""
        if not factor > 0:
            raise InputError("factor", expected="above 0", got=str(factor))
        it = _get(self.channels, channel, "channel")
        channels = {**self.channels, channel: it.model_copy(update={"bandwidth": times(it.bandwidth, factor)})}
        devices, links, storage = dict(self.devices), dict(self.links), dict(self.storage)
        for name, device in devices.items():
            if self.tiers[device.tier].channel == channel:
                slower = tuple(p.model_copy(update={"time": times(p.time, 1 / factor)}) for p in device.kernels)
                devices[name] = device.model_copy(
                    update={"cpu_bandwidth_threads": _curve(device.cpu_bandwidth_threads, factor), "kernels": slower}
                )
        for name, link in links.items():
            if link.channel == channel:
                links[name] = link.model_copy(update={"curve": _curve(link.curve, factor)})
        for name, store in storage.items():
            if self.tiers[store.tier].channel == channel:
                ways = {way: getattr(store.engines, way) for way in ("buffered", "mmap")}
                ways = {way: it.model_copy(update={"curve": _curve(it.curve, factor)}) for way, it in ways.items()}
                storage[name] = store.model_copy(
                    update={"curve": _curve(store.curve, factor), "engines": store.engines.model_copy(update=ways)}
                )
        return self.model_copy(update={"channels": channels, "devices": devices, "links": links, "storage": storage})

    def clocked(self, clocks: Mapping[str, float]) -> HardwareProfile:
        """Return the machine with devices at a share of their full clock: arithmetic and measured task times change, memory does not."""
        devices = dict(self.devices)
        for name, clock in clocks.items():
            if clock != 1:
                device = devices[name]
                dequant = device.dequant_bytes_per_s
                devices[name] = device.model_copy(update={
                    "peak": {f: times(peak, clock) for f, peak in device.peak.items()},
                    "dequant_bytes_per_s": None if dequant is None else times(dequant, clock),
                    "kernels": tuple(p.model_copy(update={"time": times(p.time, 1 / clock)}) for p in device.kernels),
                })  # fmt: skip
        return self.model_copy(update={"devices": devices})

    def derated(self, factor: float | None = None) -> HardwareProfile:
        """Return the machine with all bandwidths and peaks times ``factor`` (claim B1), latencies and sizes as they are.

        Without a factor the profile's own ``derate`` is applied; the result's is 1, so that it is not applied twice.
        """
        factor = self.derate if factor is None else factor
        if not 0 < factor <= 1:
            raise InputError("derate", expected="above 0 and at most 1", got=str(factor))
        out = self
        if factor != 1:
            for channel in self.channels:
                out = out.scaled(channel, factor)
            devices = {}
            for name, device in out.devices.items():
                update: dict[str, Any] = {"peak": {f: times(peak, factor) for f, peak in device.peak.items()}}
                for field in ("bandwidth", "dequant_bytes_per_s"):
                    figure = getattr(device, field)
                    update[field] = None if figure is None else times(figure, factor)
                devices[name] = device.model_copy(update=update)
            out = out.model_copy(update={"devices": devices})
        return out.model_copy(update={"derate": 1.0})


def _get(table: Mapping[str, V], name: str, what: str) -> V:
    if name not in table:
        raise InputError(what, expected="one that the hardware has", got=f'"{name}"', fix=did_you_mean(name, table))
    return table[name]


def _known(loc: tuple[str | int, ...], what: str, name: str, table: Mapping[str, Any]) -> None:
    if name not in table:
        raise problem(loc, f"a {what} of this profile", f'"{name}"', did_you_mean(name, table))


def _curve(points: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    return tuple(p.model_copy(update={"bandwidth": times(p.bandwidth, factor)}) for p in points)


def _net(attained: float, request_bytes: float, latency_s: float, ceiling: float) -> float:
    """Rate of the bytes alone, given the rate with latency; where the latency explains all the time, the ceiling."""
    left = request_bytes / attained - latency_s
    return ceiling if left <= request_bytes / ceiling else request_bytes / left


def figures(spec: BaseModel, prefix: str = "") -> Iterator[tuple[str, Figure[Any]]]:
    """Yield every figure of a spec with its dotted name, such as ``storage.ssd.curve.3.bandwidth`` (as ``--set`` takes it)."""
    for name in type(spec).model_fields:
        yield from _walk(getattr(spec, name), f"{prefix}{name}")


def _walk(value: Any, name: str) -> Iterator[tuple[str, Figure[Any]]]:
    if isinstance(value, Figure):
        yield name, value
    elif isinstance(value, BaseModel):
        yield from figures(value, name + ".")
    elif isinstance(value, (dict, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(item, f"{name}.{key}")


def assumed_figures(profile: HardwareProfile) -> list[str]:
    """Return the dotted names of all figures that are assumed, defaults included: they go into a result's provenance."""
    return [name for name, figure in figures(profile) if figure.basis == "assumed"]


def load_hardware(name_or_path: str, base: Path | None = None, where: str = "") -> HardwareProfile:
    """Load a bundled profile by name, or a YAML file (relative to ``base`` too).

    Raises
    ------
    InputError
        With ``file:line``, field, what was expected and what was got; ``where`` is the place that named the profile.
    """
    path = resources.find("hardware_profiles", name_or_path, base=base, where=where)
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _read(path: Path, _changed_ns: int) -> HardwareProfile:
    """Read a profile; again only when its file has changed, as sweeps ask for the same one thousands of times."""
    return config.build(HardwareProfile, config.read_yaml(path))
