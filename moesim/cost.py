"""Owns what work costs on a machine: fixed latency, flow volume, own rate cap and channel shares of every task.

It must not know schedules beyond their ``Work`` rows, nor any policy. Equations (DESIGN.md section 4; roofline after
Williams, Waterman and Patterson, CACM 2009):

- device:  latency = kernels * launch (at most ``kernels_per_task`` where a task is one graph);  V = bytes touched;  cap = min(memory_efficiency * channel, V / (flops / effective peak),
  dequantisation rate of weights that need it).  Without bytes the flops are part of the fixed latency.
- link:    latency = operations * latency;  V = payload;  cap = efficiency * channel; it also draws on both tiers.
  A measured task time (``kernel_table.py``) takes the place of all that: V = bytes touched, cap = V / time.
- storage: n = requests;  latency = ceil(n / depth) * latency;  V = payload;  cap = curve(request size, depth) net of that latency, so
  that a read alone attains exactly what the curve says and latency is not counted twice (timing rule 5).
- interference: two lanes a, b that slow each other by s_a, s_b share a channel of capacity 1. Their flows are counted in seconds alone
  times s, and each draws 1 / (1/s_a + 1/s_b) of the channel at full speed: alone each runs free, together the fair shares are
  1/s_a and 1/s_b of full speed, exactly. With several pairs the unit of a lane is set by the first pair that names it.
- hand-over: a task whose latest constraint, of the same step, is a task of another lane begins ``handoff`` of its own lane later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError, did_you_mean
from moesim.hardware import HardwareProfile
from moesim.kernel_table import KernelTable
from moesim.precision import FORMATS
from moesim.schedule import Fragment, Work
from moesim.sharing import ceil_ps

MOST_PRICES = 4_000  # that are kept: each step has some of its own, which never recur
DEQUANTISED = frozenset(name for name, form in FORMATS.items() if form.dequantised)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the tasks of one fragment: P prices, one for tasks that cost alike, and which of them each task has."""

    channels: tuple[str, ...]
    capacity: NDArray[np.float64]  # (C,) channel units per second
    price: NDArray[np.int32]  # (N,) the row of each task in what follows
    latency_ps: NDArray[np.int64]  # (P,)
    volume: NDArray[np.float64]  # (P,) 0: the task ends after its latency
    cap: NDArray[np.float64]  # (P,) volume units per second
    shares: NDArray[np.float64]  # (P, C) channel units per volume unit

    @property
    def limit(self) -> NDArray[np.float64]:
        """The rate that channels allow a task that has them to itself, volume units per second, (P,)."""
        with np.errstate(divide="ignore"):
            limits = np.where(self.shares > 0, self.capacity / self.shares, np.inf)
        return np.asarray(limits.min(axis=1, initial=np.inf))

    def alone_ps(self) -> NDArray[np.int64]:
        """Return how long each task would take with every channel to itself, (N,)."""
        rate = np.minimum(self.cap, self.limit)
        flow = [ceil_ps(v / r) if v > 0 else 0 for v, r in zip(self.volume.tolist(), rate.tolist(), strict=True)]
        return (self.latency_ps + np.array(flow, np.int64))[self.price]


@dataclass(slots=True)
class Price:
    """Cost of one Work: seconds, volume units, volume units/s, channel units per volume unit."""

    latency_s: float
    volume: float
    cap: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Device:
    """A device under one arithmetic; ``inf`` and 0 stand for limits that it does not have."""

    flops_per_s: float
    launch_s: float
    kernels: float  # most launches of a task
    bucket: int
    stream_cap: float
    dequant_bytes_per_s: float
    shares: tuple[float, ...]


class CostModel:
    """Prices works on one machine.

    Parameters
    ----------
    hardware : HardwareProfile
        The machine, already derated for the run (claim B1).
    jitter : float
        Relative spread of task times: each task is slowed by ``exp(|N(0, jitter)|)``, drawn from ``rng`` in task order.
    rng : numpy Generator, optional
        Required where ``jitter`` is positive.
    taken : dict
        Shares of channels that others take: flows meet what is left.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        jitter: float = 0.0,
        rng: np.random.Generator | None = None,
        taken: Mapping[str, float] | None = None,
    ) -> None:
        if jitter > 0 and rng is None:
            raise InputError("jitter", expected="a random generator beside it", got="none")
        self.hardware, self.jitter, self.rng = hardware, jitter, rng
        capacities = hardware.channel_capacities()
        self.channels = tuple(capacities)
        self._row = {name: i for i, name in enumerate(self.channels)}
        self.capacity = np.array(list(capacities.values()), np.float64)
        self._offered = self.capacity * [1.0 - (taken or {}).get(name, 0.0) for name in self.channels]
        self._prices: dict[Work, Price] = {}
        self._devices: dict[tuple[str, str], _Device] = {}
        self._tables = {name: KernelTable(device.kernels) for name, device in hardware.devices.items() if device.kernels}
        self._pairs = hardware.slowdowns()
        self._unit = _units(self._pairs)
        stated = {name: it.handoff for name, it in hardware.devices.items()} | {name: it.handoff for name, it in hardware.links.items()}
        stated |= {name: it.handoff for name, it in hardware.storage.items()}
        self._handoff = {name: figure.value for name, figure in stated.items() if figure is not None}

    def price(self, work: Work) -> Price:
        """Return the cost of one work; equal works are priced once."""
        found = self._prices.get(work)
        if found is None:
            found = self._prices[work] = self._priced(work)
        return found

    def _priced(self, work: Work) -> Price:
        hw = self.hardware
        if work.resource in hw.devices:
            found = self._device(work)
        elif work.resource in hw.links:
            found = self._link(work)
        elif work.resource in hw.storage:
            found = self._storage(work)
        else:
            known = [*hw.devices, *hw.links, *hw.storage]
            raise InputError(
                f"resource of hardware {hw.name}", expected="one it has", got=f'"{work.resource}"', fix=did_you_mean(work.resource, known)
            )
        return self._beside_others(work.resource, found) if work.resource in self._unit and found.volume > 0 else found

    def alone_s(self, work: Work) -> float:
        """Return how long one work takes with every channel to itself, seconds."""
        price = self.price(work)
        return price.latency_s + (price.volume / self._rate(price) if price.volume > 0 else 0.0)

    def _rate(self, price: Price) -> float:
        """Volume per second with every channel to itself."""
        return float(min([price.cap, *(c / s for c, s in zip(self.capacity.tolist(), price.shares, strict=True) if s > 0)]))

    def _beside_others(self, lane: str, price: Price) -> Price:
        """The same cost in the unit of a lane that interferes with others, and its draw on what it shares with them."""
        rate, unit = self._rate(price), self._unit[lane]
        shares = [s * rate / unit for s in price.shares]
        for pair, (a, b) in self._pairs.items():
            if lane in pair:
                shares[self._row["|".join(pair)]] = 1 / (1 / a + 1 / b) / unit
        return Price(price.latency_s, price.volume / rate * unit, unit, tuple(shares))

    def costs(self, fragment: Fragment) -> Costs:
        """Return the costs of a fragment's tasks."""
        if len(self._prices) > MOST_PRICES:
            self._prices.clear()
        prices = [self.price(work) for work in fragment.works]
        table = np.array([(p.latency_s, p.volume, p.cap, *p.shares) for p in prices], np.float64)
        latency_s, volume, cap = (column.copy() for column in table.T[:3])
        shares = np.ascontiguousarray(table[:, 3:])
        price, handed, late_ps = fragment.work, self._handed(fragment), np.zeros(len(prices), np.int64)
        if handed is not None:  # each a second time, for tasks that begin later
            price = price + np.int32(len(prices)) * handed
            handoffs_ps = [ceil_ps(self._handoff.get(work.resource, 0.0)) for work in fragment.works]
            late_ps = np.concatenate([late_ps, np.array(handoffs_ps, np.int64)])
            latency_s, volume, cap, shares = np.tile(latency_s, 2), np.tile(volume, 2), np.tile(cap, 2), np.tile(shares, (2, 1))
        if self.jitter > 0 and self.rng is not None:  # one for each task
            factor = np.exp(np.abs(self.rng.normal(0.0, self.jitter, len(price))))
            latency_s, volume, cap, shares, late_ps = (
                latency_s[price] * factor,
                volume[price],
                cap[price] / factor,
                shares[price],
                late_ps[price],
            )
            price = np.arange(len(price), dtype=np.int32)
        latency_ps = np.array([ceil_ps(x) for x in latency_s.tolist()], np.int64) + late_ps
        return Costs(self.channels, self._offered, price, latency_ps, volume, cap, shares)

    def _handed(self, fragment: Fragment) -> NDArray[np.bool_] | None:
        """The tasks whose latest constraint, of their own step, is a task of another lane, (N,); None where lanes hand over at once."""
        if not self._handoff or not len(fragment.dep_task):
            return None
        names = sorted({w.resource for w in fragment.works})
        lane = np.array([names.index(w.resource) for w in fragment.works])[fragment.work]
        latest = np.full(fragment.n_tasks, -1, np.int64)
        waits = np.flatnonzero(np.diff(fragment.dep_start))
        latest[waits] = np.maximum.reduceat(fragment.dep_task, fragment.dep_start[waits]) - fragment.first_task
        handed = np.flatnonzero(latest >= 0)
        before = latest[handed]
        out = np.zeros(fragment.n_tasks, np.bool_)
        out[handed[(fragment.step[before] == fragment.step[handed]) & (lane[before] != lane[handed])]] = True
        return out

    def _shares(self, *channels: str) -> tuple[float, ...]:
        shares = [0.0] * len(self.channels)
        for name in channels:
            shares[self._row[name]] += 1.0
        return tuple(shares)

    def _channel(self, tier: str) -> str:
        return self.hardware.tiers[tier].channel

    def _measured_s(self, work: Work) -> float | None:
        """Measured time of a device's task, or None."""
        table = self._tables.get(work.resource)
        if table is None or not work.part:
            return None
        time = table.time_s(work.part, work.weights, work.tokens, work.weight_bytes or work.state_bytes)
        if time is not None and work.part == "attention":
            time += table.time_s("kv", "", work.tokens, work.state_bytes) or 0.0
        return time

    def _machine(self, device: str, compute: str) -> _Device:
        """Return what the price of a device's works needs to know of it, for one arithmetic ("" for none)."""
        found = self._devices.get((device, compute))
        if found is None:
            spec = self.hardware.devices[device]
            found = self._devices[device, compute] = _Device(
                spec.effective_flops_per_s(compute) if compute else math.inf,
                spec.launch.value,
                spec.kernels_per_task.value if spec.kernels_per_task is not None else math.inf,
                spec.batch_bucket.value if spec.batch_bucket is not None else 0,
                self.hardware.stream_cap(device),
                spec.dequant_bytes_per_s.value if spec.dequant_bytes_per_s is not None else math.inf,
                self._shares(self._channel(spec.tier)),
            )
        return found

    def _device(self, work: Work) -> Price:
        device = self._machine(work.resource, work.compute if work.flops > 0 else "")
        if self._tables and (measured := self._measured_s(work)) is not None:
            measured += work.adapter_bytes / device.stream_cap  # tables know the kernels of the weights alone
            volume = float(work.weight_bytes + work.state_bytes + work.adapter_bytes)
            row = self._row[self._channel(self.hardware.devices[work.resource].tier)]
            shares = [0.0] * len(self.channels)
            shares[row] = min(1.0, self.capacity[row] * measured / volume)  # what lies in caches draws less
            return Price(work.overhead_s, volume, volume / measured, tuple(shares))
        latency = min(work.kernels, device.kernels) * device.launch_s + work.overhead_s
        flops = work.flops
        if device.bucket and work.tokens:  # static shapes: rows are padded to the bucket
            flops *= math.ceil(work.tokens / device.bucket) * device.bucket / work.tokens
        volume = float(work.weight_bytes + work.state_bytes + work.adapter_bytes)
        if volume == 0.0:
            return Price(latency + flops / device.flops_per_s, 0.0, math.inf, self._shares())
        cap = device.stream_cap
        if flops > 0:
            cap = min(cap, volume / (flops / device.flops_per_s))
        if work.weight_bytes and work.weights in DEQUANTISED:
            cap = min(cap, device.dequant_bytes_per_s * volume / work.weight_bytes)
        return Price(latency, volume, cap, device.shares)

    def _link(self, work: Work) -> Price:
        link = self.hardware.links[work.resource]
        pinned = work.mode != "pageable"
        operations = max(work.operations, 1)
        cap = self.hardware.link_flow_cap(work.resource, work.transfer_bytes / operations, pinned=pinned)
        shares = self._shares(link.channel, self._channel(link.source), self._channel(link.target))
        return Price(operations * link.latency.value, float(work.transfer_bytes), cap, shares)

    def _storage(self, work: Work) -> Price:
        disk = self.hardware.storage[work.resource]
        engine, _, region = work.mode.partition("+")
        extent = work.transfer_bytes / max(work.operations, 1)
        request = min(float(work.request_bytes), extent) if work.request_bytes else extent
        cap = self.hardware.read_flow_cap(work.resource, request, work.depth, engine=engine or "direct", fast=region == "fast")
        rounds = math.ceil(math.ceil(work.transfer_bytes / disk.request_bytes(request, engine or "direct")) / max(work.depth, 1))
        overhead = disk.task_overhead.value if disk.task_overhead is not None else 0.0
        memory = next(t for t in ("ram", "unified") if t in self.hardware.tiers)
        return Price(
            overhead + rounds * disk.latency.value,
            float(work.transfer_bytes),
            cap,
            self._shares(self._channel(disk.tier), self._channel(memory)),
        )


def _units(pairs: dict[tuple[str, str], tuple[float, float]]) -> dict[str, float]:
    """Units of lanes in which the fair shares of each pair stand as their slowdowns do."""
    units: dict[str, float] = {}
    for (a, b), (slow_a, slow_b) in pairs.items():
        if a in units:
            units.setdefault(b, units[a] * slow_b / slow_a)
        elif b in units:
            units[a] = units[b] * slow_a / slow_b
        else:
            units[a], units[b] = slow_a, slow_b
    return units
