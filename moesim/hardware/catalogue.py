"""Owns the catalogue of parts: GPUs, SoCs, CPUs and drives as data sheets state them, and what is assumed where they say nothing.

It must not know how parts are joined to a machine (``hardware_compose.py``). A part is one entry of a YAML file under
``hardware_profiles/parts``; only the entries that are asked for are parsed. A part states ``basis`` and ``source`` once, for all of its
plain figures; a figure that differs is a mapping of its own.

The peaks of a CPU follow from its cores (vendors state none): FP32 = sum of cores x clock x FLOP per cycle, and other formats as multiples
of it by instruction set (``SIMD``; Intel and AMD optimisation manuals, Arm architecture reference: instructions per cycle x lanes x 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from moesim import config, resources
from moesim.config import Document, Spec
from moesim.hardware import ComputeFormat, FastRegion, Figure, Price, Rate, Share, StoragePoint
from moesim.hardware.parts import Basis, Count, FlopRate, Platform, Power, Size, SomeSize, Time, problem
from moesim.units import parse, parse_bytes, show

# Peaks of other formats over FP32. INT8: three instructions (multiply, widen, add) take the place of one where there is no dot product.
# AMX: 1,024 BF16 and 2,048 INT8 operations a cycle and core, against 64 FLOP of two 512-bit FMA units (Intel, optimisation manual).
SIMD: dict[str, dict[ComputeFormat, int]] = {
    "avx2": {"int8": 2},
    "avx-vnni": {"int8": 4},
    "avx512-vnni": {"int8": 4},
    "avx512-bf16": {"bf16": 2, "int8": 4},
    "amx": {"bf16": 16, "int8": 32},
    "neon-dot": {"fp16": 2, "int8": 4},
    "neon-i8mm": {"fp16": 2, "bf16": 2, "int8": 4},
}
P = TypeVar("P", bound="Part")
PcieGen = Literal[3, 4, 5, 6]


class Part(Spec):
    """What all parts have: a name to show, and the origin of their plain figures."""

    FIGURES: ClassVar[tuple[str, ...]] = ()  # fields that take the part's basis and source where they are plain; "peak" is one of many

    chip: str
    basis: Basis
    source: Annotated[str, Field(min_length=1)]
    price: Price | None = None

    @property
    def line(self) -> str:
        """What a list says of the part."""
        return self.chip

    @model_validator(mode="before")
    @classmethod
    def _origin(cls, data: Any) -> Any:
        return _inherit(data, data, cls.FIGURES) if isinstance(data, Mapping) else data


def _inherit(data: Mapping[str, Any], part: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Give plain figures of ``data`` the basis and source of the part that they belong to."""
    origin = {"basis": part.get("basis"), "source": part.get("source")}

    def figure(value: Any) -> Any:
        return {"value": value, **origin} if isinstance(value, (str, int, float)) else value

    out = dict(data)
    for field in fields:
        if field == "peak" and isinstance(out.get(field), Mapping):
            out[field] = {name: figure(value) for name, value in out[field].items()}
        elif field in out:
            out[field] = figure(out[field])
    return out


class Pcie(Spec):
    """A PCIe port: generation and lanes."""

    gen: PcieGen
    lanes: Annotated[int, Field(ge=1)]


class Cores(Spec):
    """Cores of one kind: their clock for the peak, and FLOP per cycle in FP32 (2 x lanes x FMA units)."""

    count: Count
    clock_mhz: Count
    flops_per_cycle: Count


class CpuUnit(Spec):
    """The CPU of an SoC."""

    cores: Annotated[tuple[Cores, ...], Field(strict=False, min_length=1)]
    simd: str
    bandwidth: Figure[Rate] | None = None  # port to the memory, where narrower


class Unit(Spec):
    """A GPU or NPU of an SoC. ``flops_per_clock`` is FLOP per shader and clock behind the stated FP32 rate."""

    chip: str
    kind: str = "npu"
    shaders: Count | None = None
    flops_per_clock: Count = 2
    clock_mhz: Count | None = None
    peak: Annotated[dict[ComputeFormat, Figure[FlopRate]], Field(min_length=1)]
    bandwidth: Figure[Rate] | None = None


class Gpu(Part):
    """A card or module on PCIe. Bandwidth is stated and, where the memory's rate is known, follows from bus and rate too."""

    FIGURES = ("vram", "bandwidth", "peak", "tdp")

    kind: str
    architecture: str
    year: Count
    vram: Figure[SomeSize]
    bandwidth: Figure[Rate]
    bus_bits: Count
    mt_s: Count | None = None
    shaders: Count | None = None
    flops_per_clock: Count = 2
    clock_mhz: Count | None = None
    peak: Annotated[dict[ComputeFormat, Figure[FlopRate]], Field(min_length=1)]
    tdp: Figure[Power]
    pcie: Pcie

    @property
    def line(self) -> str:
        memory = f"{size_text(self.vram.value, ' ')} at {show(self.bandwidth.value, 'bytes_per_s')}"
        return f"{self.chip} ({self.year}): {memory}, PCIe {self.pcie.gen}.0 x{self.pcie.lanes}"


class Soc(Part):
    """A chip whose CPU, GPU and NPU share one memory, of one of the sizes sold."""

    FIGURES = ("bandwidth", "tdp")

    kind: str
    year: Count
    memory: Annotated[tuple[SomeSize, ...], Field(strict=False, min_length=1)]
    bandwidth: Figure[Rate]
    bus_bits: Count
    mt_s: Count
    tdp: Figure[Power]
    pcie: Pcie | None = None  # for a card beside it
    cpu: CpuUnit
    gpu: Unit | None = None
    npu: Unit | None = None

    @property
    def line(self) -> str:
        sizes = ", ".join(size_text(size) for size in self.memory)
        return f"{self.chip} ({self.year}): {sizes} at {show(self.bandwidth.value, 'bytes_per_s')}"

    @model_validator(mode="before")
    @classmethod
    def _units(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        units = {name: data[name] for name in ("cpu", "gpu", "npu") if isinstance(data.get(name), Mapping)}
        return {**data, **{name: _inherit(unit, data, ("peak", "bandwidth")) for name, unit in units.items()}}


class Cpu(Part):
    """A CPU, or two on one board, with its memory channels and PCIe lanes (both of all sockets)."""

    FIGURES = ("tdp",)

    platform: Platform = Field(alias="class")
    year: Count
    sockets: Literal[1, 2]
    cores: Annotated[tuple[Cores, ...], Field(strict=False, min_length=1)]  # of one socket
    threads: Count  # of one socket
    simd: str
    memory: Annotated[dict[Literal["ddr3", "ddr4", "ddr5"], Count], Field(min_length=1)]  # rated MT/s
    memory_channels: Count
    pcie: Pcie
    tdp: Figure[Power]  # of one socket

    @property
    def line(self) -> str:
        cores = sum(c.count for c in self.cores) * self.sockets
        memory = " or ".join(f"{gen.upper()}-{rate}" for gen, rate in self.memory.items())
        port = f"PCIe {self.pcie.gen}.0, {self.pcie.lanes} lanes"
        return f"{self.chip} ({self.platform}, {self.year}): {cores} cores, {self.memory_channels} x {memory}, {port}"

    @model_validator(mode="after")
    def _check(self) -> Cpu:
        if (self.sockets == 2) != (self.platform == "server-dual"):
            raise problem(("class",), "server-dual for two sockets, and only then", self.platform)
        return self


class Drive(Part):
    """A class of drives."""

    FIGURES = ("bandwidth", "latency", "capacity")

    basis: Basis = "assumed"
    source: str = "class of drive"
    capacity: Figure[SomeSize]
    bandwidth: Figure[Rate]
    pcie_gen: PcieGen | None = None  # of a drive on four lanes
    latency: Figure[Time]
    curve: Annotated[tuple[StoragePoint, ...], Field(strict=False, min_length=1)]
    fast_region: FastRegion | None = None

    @property
    def line(self) -> str:
        return f"{self.chip}: {show(self.bandwidth.value, 'bytes_per_s')}"


class UnitKind(Spec):
    """What is assumed of a kind of GPU or NPU."""

    compute_efficiency: Figure[Share]
    memory_efficiency: Figure[Share]
    launch: Figure[Time]
    reserved: Figure[Size] | None = None
    batch_bucket: Figure[Count] | None = None
    idle_power: Figure[Power]
    active_power: Figure[Power] | None = None  # else the part's own


class PlatformKind(Spec):
    """What is assumed of a class of CPU platforms."""

    compute_efficiency: Figure[Share]
    memory_efficiency: Figure[Share]
    launch: Figure[Time]
    reserved: Figure[Size]
    idle_power: Figure[Power]
    base_power: Figure[Power]
    most_per_channel: SomeSize
    overclocked_memory: bool = False


class SocKind(Spec):
    """What is assumed of a kind of SoC."""

    reserved: Figure[float]  # share of the memory
    base_power: Figure[Power]


class PcieKind(Spec):
    """What is assumed of copies over PCIe."""

    latency: Figure[Time]
    pinned_efficiency: Figure[Share]
    pageable_efficiency: Figure[Share]


class Assumptions(Spec):
    """``assumptions.yaml``."""

    units: dict[str, UnitKind]
    platforms: dict[Platform, PlatformKind]
    socs: dict[str, SocKind]
    unit_power_share: Figure[Share]
    pcie: PcieKind


GIB = parse_bytes("1 GiB")
KINDS: dict[str, type[Part]] = {"gpus": Gpu, "socs": Soc, "cpus": Cpu, "ssds": Drive}


def folder() -> Path:
    """Return the folder of the catalogue's files."""
    return resources.folder("hardware_profiles") / "parts"


@cache
def assumptions() -> Assumptions:
    """Return what is assumed of kinds of parts."""
    return config.build(Assumptions, config.read_yaml(folder() / "assumptions.yaml"))


@cache
def _entries(kind: str) -> dict[str, tuple[int, str]]:
    """Cut a file into its entries, by the keys that stand at the margin: name to line and text."""
    text = config.read_text(folder() / f"{kind}.yaml")
    heads = list(re.finditer(r"^([a-z0-9][a-z0-9.-]*):[ ]*\n", text, re.M))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {h[1]: (text.count("\n", 0, h.start()), text[h.start() : end]) for h, end in zip(heads, ends, strict=True)}


def part_names(kind: str = "") -> dict[str, str]:
    """Return the names of all parts, or of one kind (gpus, socs, cpus, ssds), each with its kind."""
    return {name: k for k in KINDS if kind in ("", k) for name in _entries(k)}


@cache
def part(name: str) -> Part:
    """Return a part by its name; ``KeyError`` if there is none. Its errors name the file and line."""
    kind = part_names()[name]
    line, text = _entries(kind)[name]
    document = config.parse_yaml("\n" * line + text, str(folder() / f"{kind}.yaml"))
    where = {path[1:]: at for path, at in document.lines.items() if path}
    return config.build(KINDS[kind], Document(document.data[name], document.source, where))


def parts(kind: type[P]) -> dict[str, P]:
    """Return all parts of a kind, by name."""
    key = next(k for k, spec in KINDS.items() if spec is kind)
    return {name: found for name in part_names(key) if isinstance(found := part(name), kind)}


def cpu_peaks(cores: tuple[Cores, ...], simd: str, sockets: int = 1) -> dict[ComputeFormat, float]:
    """Return the peaks of a CPU in FLOP/s: cores x clock x FLOP per cycle, and its multiples by instruction set."""
    fp32 = float(parse(f"{sockets * sum(c.count * c.clock_mhz * c.flops_per_cycle for c in cores)} MFLOP/s", "flops_per_s"))
    return {"fp32": fp32, **{name: fp32 * times for name, times in SIMD[simd].items()}}


def size_text(size: int, gap: str = "") -> str:
    """Print a size in GiB where it is whole, as compositions write it: ``96GiB``."""
    return f"{size // GIB}{gap}GiB" if size % GIB == 0 else show(size, "bytes", digits=12).replace(" ", gap)
