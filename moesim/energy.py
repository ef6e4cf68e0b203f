"""Owns what devices draw while a run goes on: watts from busy time, joules, and how warm a device is. It decides nothing.

A device draws its idle power always, and while it is busy ``(active - idle) x clock`` more (switching power is in proportion to the clock,
Rabaey, Digital Integrated Circuits, 2nd edition, section 5.5). Busy time is counted in whole picoseconds by which devices are busy together,
so that the sums do not depend on how a run is cut. ``recent_w`` is that power seen through a first-order thermal lag: in watts, the
temperature above ambient over the thermal resistance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from moesim.hardware import HardwareProfile
from moesim.hardware.parts import Basis, Device
from moesim.metrics import PS
from moesim.schedule import Fragment, Ints, Lane
from moesim.timeline import Timeline

_BASES: tuple[Basis, ...] = ("assumed", "reported", "measured", "spec")  # the least sure first


class PowerMeter:
    """Busy time of a run's devices, filled by ``add``.

    Parameters
    ----------
    hardware : HardwareProfile
    lanes : tuple of Lane

    Attributes
    ----------
    recent_w : dict
        By device with both powers stated, what it has drawn of late; its idle power at the start.
    """

    def __init__(self, hardware: HardwareProfile, lanes: tuple[Lane, ...]) -> None:
        self.hardware = hardware
        self._lane = {i: lane.name for i, lane in enumerate(lanes) if lane.name in hardware.devices}
        self.names = tuple(self._lane.values())
        self._together: Counter[tuple[int, tuple[float, ...]]] = Counter()  # ps by set of busy devices (a bit each) and clocks
        self._until_ps = 0
        self.recent_w = {name: _watts(device)[0] for name, device in hardware.devices.items() if not _lacks(device)}

    def add(self, fragment: Fragment, ended: Timeline, now_ps: int, clocks: Mapping[str, float]) -> None:
        """Take the tasks that ended while an engine advanced through a fragment, under the clocks that held meanwhile (1 where none is named).

        All tasks of devices end with their step, so none of an earlier fragment is among them.
        """
        mine = ended.task >= fragment.first_task
        on = fragment.lane[ended.task[mine] - fragment.first_task]
        start, end = ended.start_ps[mine], ended.end_ps[mine]
        clock = tuple(clocks.get(name, 1.0) for name in self.names)
        times, masks = _busy([(start[on == lane], end[on == lane]) for lane in self._lane])
        length, busy_ps = np.diff(times), Counter[str]()
        for mask in np.unique(masks).tolist():
            passed_ps = int(length[masks[:-1] == mask].sum())
            self._together[mask, clock] += passed_ps
            for bit, name in enumerate(self.names):
                busy_ps[name] += passed_ps * (mask >> bit & 1)
        self._warm(busy_ps, now_ps, clocks)

    def _warm(self, busy_ps: Mapping[str, int], now_ps: int, clocks: Mapping[str, float]) -> None:
        passed_ps = now_ps - self._until_ps
        if passed_ps <= 0:
            return
        for name, recent in self.recent_w.items():
            thermal = self.hardware.devices[name].thermal
            if thermal is not None:
                idle, more = _watts(self.hardware.devices[name])
                mean = idle + more * clocks.get(name, 1.0) * (busy_ps[name] / passed_ps)
                self.recent_w[name] = mean + (recent - mean) * math.exp(-passed_ps * PS / thermal.time_constant.value)
        self._until_ps = now_ps

    def busy_s(self, device: str) -> float:
        """Return how long a device was busy, seconds."""
        return sum(ps for (mask, _), ps in self._together.items() if mask >> self.names.index(device) & 1) * PS

    def switched_s(self, device: str) -> float:
        """Return busy seconds, each times the clock at which it was busy."""
        bit = self.names.index(device)
        by_clock = Counter[float]()
        for (mask, clocks), ps in self._together.items():
            if mask >> bit & 1:
                by_clock[clocks[bit]] += ps
        return sum(clock * (ps * PS) for clock, ps in sorted(by_clock.items()))

    def peak_w(self) -> float:
        """Return the most that base, idle devices and busy ones draw at one instant."""
        floor = sum(_watts(device)[0] for device in self.hardware.devices.values() if not _lacks(device))
        base = self.hardware.base_power.value if self.hardware.base_power is not None else 0.0
        more = [_watts(self.hardware.devices[name])[1] for name in self.names]
        sums = [
            sum(m * clock for bit, (m, clock) in enumerate(zip(more, clocks, strict=True)) if mask >> bit & 1)
            for mask, clocks in sorted(self._together)
        ]
        return base + floor + max(sums, default=0.0)


def _watts(device: Device) -> tuple[float, float]:
    """Idle power, and what being busy adds."""
    idle = device.idle_power.value if device.idle_power is not None else 0.0
    return idle, (device.active_power.value if device.active_power is not None else idle) - idle


def _lacks(device: Device) -> list[str]:
    return [field for field in ("idle_power", "active_power") if getattr(device, field) is None]


def _busy(lanes: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Return the instants at which the set of busy devices changes, (N,), and the set from each on, a bit a lane, (N,)."""
    at = np.concatenate([times for pair in lanes for times in pair])
    change = np.concatenate([np.full(len(start), sign << bit) for bit, (start, _) in enumerate(lanes) for sign in (1, -1)])
    order = np.argsort(at, kind="stable")
    at, busy = at[order], np.cumsum(change[order])
    last = np.append(at[1:] != at[:-1], True)[: len(at)]  # of the changes at one instant
    return at[last], busy[last]


def summary(power: PowerMeter, makespan_s: float, tokens: int, requests: int) -> dict[str, Any]:
    """Return energy and power of a run: the ``energy`` of ``run -o json``.

    Every figure is null, and ``reason`` says why, where a device that worked does not state what it draws. ``devices only`` tells a profile
    that states no ``base_power`` (mainboard, memory, drive, display): then nothing else is counted.
    """
    hardware = power.hardware
    lacking = [f"devices.{name}.{field}" for name in power.names if power.busy_s(name) > 0 for field in _lacks(hardware.devices[name])]
    keys = ("joules", "joules_per_token", "joules_per_request", "average_w", "peak_w", "battery_hours", "basis", "by_device")
    if lacking:
        reason = f"{' and '.join(lacking)} not stated in {hardware.name}"
        return {**dict.fromkeys(keys), "devices_only": hardware.base_power is None, "reason": reason}
    by_device, bases = {}, []
    for name, device in hardware.devices.items():
        if _lacks(device):
            continue
        idle, more = _watts(device)
        switched = power.switched_s(name) if name in power.names else 0.0
        by_device[name] = {"idle_j": idle * makespan_s, "busy_j": more * switched}
        bases += [figure.basis for figure in (device.idle_power, device.active_power) if figure is not None]
    base = hardware.base_power
    total = sum(it["idle_j"] + it["busy_j"] for it in by_device.values()) + (base.value * makespan_s if base is not None else 0.0)
    bases += [base.basis] if base is not None else []
    mean = total / makespan_s if makespan_s > 0 else 0.0
    found = (
        total, total / tokens if tokens else None, total / requests if requests else None, mean, power.peak_w(),
        hardware.battery.value / mean / 3600 if hardware.battery is not None and mean > 0 else None, min(bases, key=_BASES.index), by_device,
    )  # fmt: skip
    return {**dict(zip(keys, found, strict=True)), "devices_only": base is None, "reason": None}
