"""Owns the parts of a hardware profile: figures with their basis, tiers, channels, devices, links and storage.

It must not know how parts join to a machine (``hardware.py``), nor models, runtimes or schedules.

Bandwidths follow two rules. *Attained* bandwidth is what a benchmark prints, the latency of each operation included:
``time = bytes / read_bandwidth(request, depth)`` is complete. A *flow cap* is the same figure net of the operations' latency:

    operations x latency / depth  +  bytes / flow cap  =  bytes / read_bandwidth(request, depth)

so that a task that first spends latency and then flows (timing rule 5) takes as long as the benchmark said; latency is never
counted twice. Between the points of a curve the time of one request, r x d / B, is linear in the request size (fixed cost
plus bytes over rate, the usual model of a storage request) and geometric in the depth.
"""

from __future__ import annotations

import datetime
import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, PlainSerializer, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator
from pydantic_core import InitErrorDetails

from moesim import config
from moesim.config import Spec
from moesim.errors import InputError, did_you_mean
from moesim.units import Bytes, BytesPerS, FlopsPerS, Joules, Seconds, Watts, parse, show

T = TypeVar("T")
S = TypeVar("S", bound="Figure[Any] | Price")
Basis = Literal["spec", "reported", "measured", "assumed"]
Platform = Literal["desktop", "laptop", "workstation", "server-single", "server-dual", "soc"]
ComputeFormat = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4"]

# Which arithmetic stands in where a device lacks units for a format: the next wider one that it has, integers before floats.
_FALLBACK: dict[str, tuple[ComputeFormat, ...]] = {
    "fp32": ("fp32",),
    "fp16": ("fp16", "bf16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp8": ("fp8", "fp16", "bf16", "fp32"),
    "fp4": ("fp4", "fp8", "fp16", "bf16", "fp32"),
    "int8": ("int8", "fp16", "bf16", "fp32"),
    "int4": ("int4", "int8", "fp16", "bf16", "fp32"),
}
_BASE_UNIT = {"bytes": "B", "bytes_per_s": "B/s", "s": "s", "flops_per_s": "FLOP/s", "w": "W", "j": "J"}


def _written(dimension: str) -> PlainSerializer:
    """Write a quantity as text with its unit, such that reading it gives exactly the same value again."""

    def write(value: float) -> str:
        text = show(value, dimension, digits=15)
        return text if type(value)(parse(text, dimension)) == value else f"{value!r} {_BASE_UNIT[dimension]}"

    return PlainSerializer(write, return_type=str)


Size = Annotated[Bytes, _written("bytes")]
SomeSize = Annotated[Bytes, Field(gt=0), _written("bytes")]
Rate = Annotated[BytesPerS, Field(gt=0), _written("bytes_per_s")]
Time = Annotated[Seconds, _written("s")]
FlopRate = Annotated[FlopsPerS, Field(gt=0), _written("flops_per_s")]
Power = Annotated[Watts, _written("w")]
Energy = Annotated[Joules, Field(gt=0), _written("j")]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


def problem(loc: tuple[str | int, ...], expected: str, got: str, fix: str = "") -> ValidationError:
    """An error of a cross-check that keeps its field, as ``config.build`` shows it."""
    return ValidationError.from_exception_data("hardware", [InitErrorDetails(type=config.problem(expected, got, fix), loc=loc, input=got)])


def missing(*loc: str) -> ValidationError:
    """An error for a key that is wanted and not there."""
    return ValidationError.from_exception_data("hardware", [InitErrorDetails(type="missing", loc=loc, input={})])


def _sourced(spec: S) -> S:
    if spec.basis != "assumed" and not spec.source.strip():
        raise missing("source")
    return spec


class Figure(Spec, Generic[T]):
    """A number with its origin. A plain quantity (``"936 GB/s"``) is short for one that is assumed.

    ``low`` and ``high`` are the range that the truth is believed to lie in, where it is known; without them a study of uncertainty takes
    a range by basis (``knobs.py``).
    """

    value: T
    basis: Basis = "assumed"
    source: str = ""
    low: T | None = None
    high: T | None = None

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, data: Any) -> Any:
        if isinstance(data, (Figure, Mapping)):
            return data
        if isinstance(data, (str, int, float)) and not isinstance(data, bool):
            return {"value": data}
        raise problem((), "a quantity, or value with basis and source", "nothing" if data is None else repr(data)[:60])

    @classmethod
    def short_schema(cls, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        return dict(fields["value"])

    @model_validator(mode="after")
    def _has_source(self) -> Figure[T]:
        value: Any = self.value
        for name, beyond in (("low", self.low is not None and self.low > value), ("high", self.high is not None and self.high < value)):
            if beyond:
                raise problem((name,), f"a range with the value {value} in it", str(getattr(self, name)), "correct the range, or drop it")
        return _sourced(self)

    @model_serializer(mode="wrap")
    def _without_empty_range(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        return {key: item for key, item in data.items() if item is not None or key not in ("low", "high")}


def times(figure: Figure[float], factor: float) -> Figure[float]:
    """Scale a figure, and say so in its source."""
    note = f"{figure.source or figure.basis} (times {factor:g})"
    ends = {name: None if end is None else end * factor for name, end in (("low", figure.low), ("high", figure.high))}
    return figure.model_copy(update={"value": figure.value * factor, "source": note, **ends})


class Price(Spec):
    """What it cost, when, and who said so. An old price stays visible as old: the date is part of every result."""

    amount: Annotated[float, Field(gt=0)]
    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")]
    date: str
    basis: Basis = "assumed"
    source: str = ""

    @model_validator(mode="after")
    def _check(self) -> Price:
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise problem(("date",), "a date as YYYY-MM-DD", f'"{self.date}"') from None
        return _sourced(self)


class Tier(Spec):
    """A memory: its capacity, what the system keeps of it (OS, driver, desktop), and the channel that feeds it."""

    capacity: Figure[SomeSize]
    reserved: Figure[Size] = Figure[Size].model_validate({"value": "0 B", "source": "default"})
    channel: str

    @model_validator(mode="after")
    def _check(self) -> Tier:
        size, taken = self.capacity.value, self.reserved.value
        if taken > size:
            raise problem(("reserved",), f"at most the capacity, {show(size, 'bytes')}", show(taken, "bytes"))
        return self

    @property
    def usable_bytes(self) -> int:
        """Capacity less what is reserved."""
        return self.capacity.value - self.reserved.value


class ChannelFacts(Spec):
    """What a channel's peak follows from: DDR channels of 64 bit or a bus width, at MT/s; or PCIe lanes of a generation."""

    memory_channels: Count | None = None
    bus_bits: Count | None = None
    mt_s: Count | None = None
    pcie_gen: Literal[3, 4, 5, 6] | None = None
    pcie_lanes: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> ChannelFacts:
        bits = self.bus_bits or 64 * (self.memory_channels or 0)
        if not (self.mt_s and bits) and not (self.pcie_gen and self.pcie_lanes):
            raise problem((), "mt_s with memory_channels or bus_bits, or pcie_gen with pcie_lanes", "less than that")
        if self.bus_bits and self.memory_channels and self.bus_bits != 64 * self.memory_channels:
            raise problem(("bus_bits",), f"64 bit for each of {self.memory_channels} memory channels", str(self.bus_bits), "drop one")
        return self

    @property
    def peak_bytes_per_s(self) -> float:
        """Bus bytes x transfers (JEDEC), or lanes x 8 GT/s x 2^(gen - 3) x coding (PCI-SIG), in bytes of transaction packets.

        Coding is 128b/130b up to generation 5. Generation 6 sends PAM4 in FLITs of 256 bytes, 236 of which carry packets (6 are link
        packets, 8 CRC, 6 error correction).
        """
        if self.mt_s:
            return float(parse(f"{self.mt_s * (self.bus_bits or 64 * (self.memory_channels or 0))} Mbit/s", "bytes_per_s"))
        gen = self.pcie_gen or 3
        coding = 236 / 256 if gen == 6 else 128 / 130
        return float(parse(f"{8 * 2 ** (gen - 3) * (self.pcie_lanes or 0)} Gbit/s", "bytes_per_s")) * coding


class Channel(Spec):
    """A shared capacity in bytes/s that tasks on several lanes draw from."""

    bandwidth: Figure[Rate]
    facts: ChannelFacts | None = None


class ThreadPoint(Spec):
    """Memory bandwidth that a number of CPU threads attain together."""

    threads: Count
    bandwidth: Figure[Rate]


class KernelPoint(Spec):
    """Measured time of one kind of task: so many rows against weights (of ``kv``: a KV cache; of ``combine``, ``copy``: states) of so many bytes.

    ``attention`` is measured with an empty cache; ``kv`` is what a cache of ``bytes`` adds.
    """

    part: Literal["attention", "kv", "router", "ffn", "combine", "head", "copy"]
    weights: str = ""  # storage format; empty for kv, combine and copy
    tokens: Count
    bytes: SomeSize
    time: Figure[Time]


class ThermalStep(Spec):
    """The share of its full clock that a device runs at while it has drawn more than ``above`` of late."""

    above: Figure[Power]
    clock: Figure[Share]


class Thermal(Spec):
    """How a device slows down when it is warm: ``time_constant`` is that of its first-order thermal lag, see ``energy.py``."""

    time_constant: Figure[Annotated[Time, Field(gt=0)]]
    steps: Annotated[tuple[ThermalStep, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Thermal:
        for i, (a, b) in enumerate(zip(self.steps, self.steps[1:], strict=False), start=1):
            if b.above.value <= a.above.value:
                raise problem(("steps", i, "above"), f"rising power, more than {show(a.above.value, 'w')}", show(b.above.value, "w"))
            if b.clock.value >= a.clock.value:
                raise problem(("steps", i, "clock"), f"a falling clock, less than {a.clock.value:g}", f"{b.clock.value:g}")
        return self


class Device(Spec):
    """A compute unit: its memory, peak rates by compute format, attainable shares, limits and power.

    ``memory_efficiency`` is the share of its channel that one task's flow can attain; ``bandwidth`` its own port to the channel;
    ``cpu_bandwidth_threads`` replaces both by measured points where threads are counted. ``kernels`` are measured task times; where
    they know a part and format they take the place of the roofline.
    """

    chip: str = ""
    platform: Platform | None = None  # of a CPU: how much of the memory's peak runtimes attain depends on it
    tier: str
    peak: Annotated[dict[ComputeFormat, Figure[FlopRate]], Field(min_length=1)]
    compute_efficiency: Figure[Share]
    memory_efficiency: Figure[Share]
    bandwidth: Figure[Rate] | None = None
    launch: Figure[Time]
    handoff: Figure[Time] | None = None  # until a worker that waited for another lane has begun
    kernels_per_task: Figure[Count] | None = None
    formats: Annotated[tuple[ComputeFormat, ...], Field(strict=False, min_length=1)] | None = None
    batch_bucket: Figure[Count] | None = None
    address_window: Figure[SomeSize] | None = None
    cores: Figure[Count] | None = None
    dequant_bytes_per_s: Figure[Rate] | None = None
    cpu_bandwidth_threads: Annotated[tuple[ThreadPoint, ...], Field(strict=False)] = ()
    kernels: Annotated[tuple[KernelPoint, ...], Field(strict=False)] = ()
    idle_power: Figure[Power] | None = None
    active_power: Figure[Power] | None = None
    thermal: Thermal | None = None

    @model_validator(mode="after")
    def _check(self) -> Device:
        if self.thermal is not None:
            for field in ("idle_power", "active_power"):
                if getattr(self, field) is None:
                    raise missing(field)
        for i, fmt in enumerate(self.formats or ()):
            if self.compute_format(fmt) is None:
                raise problem(("formats", i), f"a format with a peak, or a wider one listed too; peaks: {', '.join(self.peak)}", f'"{fmt}"')
        last = 0
        for i, point in enumerate(self.cpu_bandwidth_threads):
            if point.threads <= last:
                raise problem(("cpu_bandwidth_threads", i, "threads"), f"rising thread counts, more than {last}", str(point.threads))
            last = point.threads
        if self.idle_power and self.active_power and self.idle_power.value > self.active_power.value:
            raise problem(("idle_power",), f"at most {show(self.active_power.value, 'w')}, the active", show(self.idle_power.value, "w"))
        return self

    def compute_format(self, wanted: str) -> ComputeFormat | None:
        """Return the format in which arithmetic of ``wanted`` really runs, or None if the device cannot do it."""
        usable = self.peak if self.formats is None else set(self.peak) & set(self.formats)
        return next((f for f in _FALLBACK.get(wanted, ()) if f in usable), None)

    def supports(self, compute_format: str) -> bool:
        """Whether the device takes work of this format: it is listed in ``formats``, or there is no list and a peak stands in."""
        return compute_format in self.formats if self.formats is not None else self.compute_format(compute_format) is not None

    def effective_flops_per_s(self, compute_format: str) -> float:
        """Return peak x efficiency for a format, or for the one that stands in for it.

        Without units of its own a format runs on: int4 -> int8 -> fp16 -> bf16 -> fp32; fp4 -> fp8 -> fp16 -> bf16 -> fp32;
        fp16 and bf16 for each other, then fp32. Never on a narrower one.

        Raises
        ------
        InputError
            If the device can do neither the format nor a wider one.
        """
        actual = self.compute_format(compute_format)
        if actual is None:
            has = ", ".join(self.formats or self.peak)
            fix = "choose another precision or device" if compute_format in _FALLBACK else did_you_mean(compute_format, _FALLBACK)
            raise InputError("compute format", expected=f"one that the device can do: {has}", got=f'"{compute_format}"', fix=fix)
        return self.peak[actual].value * self.compute_efficiency.value


class LinkPoint(Spec):
    """Attained bandwidth of pinned copies of one size."""

    request: SomeSize
    bandwidth: Figure[Rate]


class Link(Spec):
    """A copy path between two tiers. A transfer also draws on the channels of its source and its target."""

    source: str
    target: str
    channel: str
    latency: Figure[Time]
    handoff: Figure[Time] | None = None  # until a worker that waited for another lane has begun
    pinned_efficiency: Figure[Share]
    pageable_efficiency: Figure[Share]
    curve: Annotated[tuple[LinkPoint, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _check(self) -> Link:
        for i, (a, b) in enumerate(zip(self.curve, self.curve[1:], strict=False), start=1):
            if b.request <= a.request:
                raise problem(("curve", i, "request"), f"sizes in rising order, more than {a.request} B", f"{b.request} B")
            if b.bandwidth.value < a.bandwidth.value:
                raise problem(("curve", i, "bandwidth"), "no fall as requests grow", show(b.bandwidth.value, "bytes_per_s"))
        return self


class StoragePoint(Spec):
    """Attained read bandwidth at one request size and queue depth, the latency of the operations included."""

    request: SomeSize
    depth: Count
    bandwidth: Figure[Rate]


class Buffered(Spec):
    """Reads through the page cache: the share of the direct rate that is left after the extra copy, or a measured curve of their own."""

    efficiency: Figure[Share] = Figure[Share].model_validate({"value": 0.8, "source": "default: one more copy in memory"})
    curve: Annotated[tuple[StoragePoint, ...], Field(strict=False)] = ()


class Mmap(Spec):
    """Reads by page faults: each fault brings ``fault_size`` bytes, and the depth is the number of faulting threads."""

    fault_size: Figure[SomeSize] = Figure[SomeSize].model_validate({"value": "128 KiB", "source": "default: Linux read_ahead_kb = 128"})
    efficiency: Figure[Share] = Figure[Share].model_validate({"value": 0.7, "source": "default: fault and copy cost"})
    curve: Annotated[tuple[StoragePoint, ...], Field(strict=False)] = ()


class Engines(Spec):
    """How ways of reading differ from direct asynchronous reads, which the curve describes."""

    buffered: Buffered = Buffered()
    mmap: Mmap = Mmap()


class Interference(Spec):
    """How many times longer a task of one lane takes while another lane is busy, beyond what their channels explain."""

    lane: str
    beside: str
    slowdown: Figure[Annotated[float, Field(ge=1, le=2)]]


class FastRegion(Spec):
    """A region of the drive that reads at the curve's rate; the rest attains only ``rest_factor`` of it (claim P6)."""

    share: Figure[Share]
    rest_factor: Figure[Share]


class Storage(Spec):
    """A drive: read bandwidth over request size and queue depth, latency of an operation, ways of reading."""

    tier: str
    latency: Figure[Time]
    task_overhead: Figure[Time] | None = None  # of a read task, whatever its size
    handoff: Figure[Time] | None = None  # until a worker that waited for another lane has begun
    curve: Annotated[tuple[StoragePoint, ...], Field(strict=False, min_length=1)]
    engines: Engines = Engines()
    fast_region: FastRegion | None = None

    @model_validator(mode="after")
    def _check(self) -> Storage:
        self._check_curve(("curve",), self.curve)
        for name in ("buffered", "mmap"):
            if own := getattr(self.engines, name).curve:
                self._check_curve(("engines", name, "curve"), own)
        return self

    @staticmethod
    def _check_curve(loc: tuple[str, ...], curve: tuple[StoragePoint, ...]) -> None:
        keys = [(p.request, p.depth) for p in curve]
        requests, depths = sorted({r for r, _ in keys}), sorted({d for _, d in keys})
        for i, (a, b) in enumerate(zip(keys, keys[1:], strict=False), start=1):
            got = f"{b[0]} B at depth {b[1]} after {a[0]} B at depth {a[1]}"
            if b <= a:
                raise problem((*loc, i), "points in rising order of request, then depth, each once", got)
        if len(keys) != len(requests) * len(depths):
            lacking = next(f"{r} B at depth {d}" for r in requests for d in depths if (r, d) not in set(keys))
            raise problem(loc, "a full grid, each request size at each depth", f"no point for {lacking}", "add it")
        if depths[0] != 1:
            raise problem((*loc, 0, "depth"), "points at depth 1 too", f"depth {depths[0]} as the smallest")
        for i, p in enumerate(curve):
            for q in curve[:i]:
                if p.bandwidth.basis == q.bandwidth.basis == "measured":
                    continue  # what was measured may fall
                if q.request <= p.request and q.depth <= p.depth and q.bandwidth.value > p.bandwidth.value:
                    here, there = show(p.bandwidth.value, "bytes_per_s"), show(q.bandwidth.value, "bytes_per_s")
                    got = f"{here} after {there} at {q.request} B, depth {q.depth}"
                    raise problem((*loc, i, "bandwidth"), "a bandwidth that does not fall as request or depth grows", got)

    def request_bytes(self, request_bytes: float, engine: str = "direct") -> float:
        """Return the size in which a read of ``request_bytes`` reaches the drive: mmap splits it into faults."""
        return min(request_bytes, self.engines.mmap.fault_size.value) if engine == "mmap" else request_bytes

    def read_bandwidth(self, request_bytes: float, depth: float, *, engine: str = "direct", fast: bool = True) -> float:
        """Return the attained read bandwidth in bytes/s, the latency of the operations included.

        Exact at the points of the curve and monotone between them (see the module's docstring). Beyond the largest request and
        depth the last value holds; a request below the smallest takes as long as the smallest.

        Parameters
        ----------
        request_bytes, depth : float
            Bytes per request, and requests in flight (mmap: threads that fault); depths below 1 count as 1.
        engine : {"direct", "buffered", "mmap"}
            How the file is read.
        fast : bool
            Whether the bytes lie in the fast region, where the drive has one.
        """
        share = {"direct": 1.0, "buffered": self.engines.buffered.efficiency.value, "mmap": self.engines.mmap.efficiency.value}
        if engine not in share:
            raise InputError("I/O engine", expected="direct, buffered or mmap", got=f'"{engine}"')
        own = () if engine == "direct" else self.engines.buffered.curve if engine == "buffered" else self.engines.mmap.curve
        factor = (1.0 if own else share[engine]) * (1.0 if fast or self.fast_region is None else self.fast_region.rest_factor.value)
        curve = own or self.curve
        if not request_bytes > 0:
            raise InputError("request", expected="a size above 0 bytes", got=str(request_bytes))
        depths = sorted({p.depth for p in curve})
        at = {d: [(p.request, p.bandwidth.value) for p in curve if p.depth == d] for d in depths}
        wanted = min(max(depth, depths[0]), depths[-1])
        high = min(bisect_right(depths, wanted), len(depths) - 1)
        low = max(high - 1, 0)
        size = self.request_bytes(request_bytes, engine)
        below, above = over_requests(at[depths[low]], size), over_requests(at[depths[high]], size)
        if wanted in (depths[low], depths[high]):
            return (below if wanted == depths[low] else above) * factor
        weight = math.log(wanted / depths[low]) / math.log(depths[high] / depths[low])
        return float(below ** (1 - weight) * above**weight) * factor


def over_requests(points: list[tuple[int, float]], size: float) -> float:
    """Bandwidth at a request size: the time of one request is linear in its size between points (see the module)."""
    sizes = [request for request, _ in points]
    if size <= sizes[0]:
        return points[0][1] * size / sizes[0]
    i = bisect_right(sizes, size) - 1
    r0, b0 = points[i]
    if size == r0 or i == len(points) - 1:
        return b0
    r1, b1 = points[i + 1]
    t0, t1 = r0 / b0, r1 / b1
    return size / (t0 + (t1 - t0) * (size - r0) / (r1 - r0))
