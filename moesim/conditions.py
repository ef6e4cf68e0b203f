"""Owns what changes while a run goes on: what others take of a channel, and the clocks of devices that have become warm.

Both change at step borders only (timing rule 9), so a run that knows either is planned and timed a step at a time. What others take comes off
the channel's capacity; a run's own tasks keep the rates that they could reach alone. A clock scales arithmetic, not memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.cost import CostModel
from moesim.energy import PowerMeter
from moesim.errors import InputError, did_you_mean
from moesim.hardware import HardwareProfile
from moesim.scenario import Background


def check_background(background: Sequence[Background], hardware: HardwareProfile) -> None:
    """Refuse a load on a channel that the machine does not have."""
    for i, load in enumerate(background):
        if load.channel not in hardware.channels:
            fix = did_you_mean(load.channel, hardware.channels)
            raise InputError(f"timing.background.{i}.channel", expected=f"a channel of {hardware.name}", got=f'"{load.channel}"', fix=fix)


class Conditions:
    """Prices of a run's tasks as they are when a step begins.

    Parameters
    ----------
    hardware : HardwareProfile
        Already derated.
    background : sequence of Background
    power : PowerMeter
        Of the run; it tells how warm devices are.
    jitter, rng
        See ``CostModel``.

    Attributes
    ----------
    clocks : dict
        By device that throttles, its present share of the full clock.
    """

    def __init__(
        self, hardware: HardwareProfile, background: Sequence[Background], power: PowerMeter, jitter: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        self.hardware, self.background, self.power = hardware, background, power
        self._jitter = jitter, rng
        self.clocks = {name: 1.0 for name, device in hardware.devices.items() if device.thermal is not None}
        self._models: dict[tuple[tuple[float, ...], tuple[tuple[str, float], ...]], CostModel] = {}

    def prices(self, now_s: float) -> CostModel:
        """Return the prices of a step that begins now."""
        for name in self.clocks:
            self.clocks[name] = self._clock(name)
        taken = {load.channel: load.share for load in sorted(self.background, key=lambda load: load.from_s) if load.from_s <= now_s}
        key = tuple(self.clocks.values()), tuple(sorted(taken.items()))
        if key not in self._models:
            self._models[key] = CostModel(self.hardware.clocked(self.clocks), *self._jitter, taken=taken)
        return self._models[key]

    def _clock(self, name: str) -> float:
        thermal = self.hardware.devices[name].thermal
        steps = thermal.steps if thermal is not None else ()
        return min((step.clock.value for step in steps if self.power.recent_w[name] > step.above.value), default=1.0)
