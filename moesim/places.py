"""Owns the places of computation: which device runs each part of each layer, and the ways between devices. It knows no sizes.

Experts have an *owner*: one device a layer, or several that they are dealt out to, expert e to number e mod n (expert parallelism). What
an owner does not have in its memory it fetches, or the CPU computes it; a step may *stream* layers whose experts the CPU would compute.
"""

from __future__ import annotations

from functools import cached_property

from moesim.errors import InputError, did_you_mean
from moesim.hardware import HardwareProfile, kind
from moesim.model import ModelSpec
from moesim.precision import PrecisionPlan, resolve_layers
from moesim.scenario import Scenario
from moesim.schedule import Lane, Source


class Places:
    """Devices of a scenario's parts on a machine.

    Parameters
    ----------
    scenario : Scenario
    model : ModelSpec
    plan : PrecisionPlan
    hardware : HardwareProfile
        Already derated.

    Attributes
    ----------
    attention_device, shared_device, expert_device : list of str
        By layer; where experts are split, the first of their owners.
    owners : list of tuple of str
        By layer, the devices that its experts are dealt out to.
    head_device : str
    moe_layers : tuple of int
    in_place : bool
        Whether the CPU computes some of the experts that others own.
    """

    def __init__(self, scenario: Scenario, model: ModelSpec, plan: PrecisionPlan, hardware: HardwareProfile) -> None:
        self.scenario, self.model, self.plan, self.hardware = scenario, model, plan, hardware
        placement = scenario.placement
        attention = placement.attention or ("gpu" if "gpu" in hardware.devices else "cpu")
        split = tuple(placement.split)
        experts = placement.experts or (split[0] if split else attention)
        for field, device in (("attention", attention), ("experts", experts), *((f"split.{i}", device) for i, device in enumerate(split))):
            self._device(device, f"placement.{field}")
        if split and (placement.experts or len(set(split)) < len(split)):
            raise InputError("placement.split", expected="devices, each once, in place of placement.experts", got=", ".join(split))
        n = model.n_layers
        self.attention_device = [attention] * n
        self.shared_device = [attention] * n
        self.expert_device = [experts] * n  # of split experts: the first
        self.owners = [split or (experts,)] * n  # devices that the experts of a layer are dealt out to
        tables = {"attention": self.attention_device, "shared_expert": self.shared_device, "routed_experts": self.expert_device}
        for i, rule in enumerate(placement.layers):
            self._device(rule.device, f"placement.layers.{i}.device")
            try:
                layers = resolve_layers(rule.layers, n)
            except InputError as error:
                raise error.under(f"placement.layers.{i}") from None
            for layer in layers:
                tables[rule.part][layer] = rule.device
                if rule.part == "attention":
                    self.shared_device[layer] = rule.device
                elif rule.part == "routed_experts":
                    self.owners[layer] = (rule.device,)
        self.head_device = attention
        self.moe_layers = model.moe_layers
        self.in_place = placement.site != "fetch"  # the CPU computes some of the experts that others own
        if self.in_place and "cpu" not in hardware.devices:
            raise InputError("placement.site", expected='"fetch" on a machine without a CPU device', got=f'"{placement.site}"')
        for part in ("embeddings", "lookup"):
            tier = getattr(placement, part)
            if tier and tier not in hardware.tiers:
                raise InputError(
                    f"placement.{part}", expected="a tier of the machine", got=f'"{tier}"', fix=did_you_mean(tier, hardware.tiers)
                )
        self._check_formats()

    def _device(self, name: str, field: str) -> None:
        if name not in self.hardware.devices:
            fix = did_you_mean(name, self.hardware.devices)
            raise InputError(field, expected=f"a device of {self.hardware.name}", got=f'"{name}"', fix=fix)

    def _check_formats(self) -> None:
        for part, devices in (("attention", [(device,) for device in self.attention_device]), ("routed_experts", self.owners)):
            for layer in self.moe_layers or range(self.model.n_layers):
                compute = self.plan.format(part, layer).compute
                for name in devices[layer]:
                    if self.hardware.devices[name].compute_format(compute) is None:
                        raise InputError(f"precision.{part}", expected=f"a format whose arithmetic ({compute}) the {name} of {self.hardware.name} can do",
                                         got=self.plan.format(part, layer).name, fix="choose another format or another device")  # fmt: skip

    def tier_of(self, device: str) -> str:
        """Return the tier that a device computes from."""
        return self.hardware.devices[device].tier

    @cached_property
    def main_tier(self) -> str:
        """RAM, or the unified memory."""
        return next(t for t in self.hardware.tiers if kind(t) in ("ram", "unified"))

    @cached_property
    def disk(self) -> str:
        """The storage device that holds the model file, or empty where the machine has none."""
        return next(iter(self.hardware.storage), "")

    def chain(self, device: str) -> tuple[str, ...]:
        """Return the memory tiers through which an expert reaches a device, nearest first, storage left out."""
        top = self.tier_of(device)
        return (top,) if top == self.main_tier else (top, self.main_tier)

    def owner(self, layer: int, expert: int) -> str:
        """Return the device that an expert is computed by, unless its place or the step says otherwise."""
        devices = self.owners[layer]
        return devices[expert % len(devices)] if len(devices) > 1 else devices[0]

    def streamed_to(self, layer: int) -> str:
        """Return the device that fetches the experts of a layer which the CPU would compute, where a step streams them; empty: none does."""
        if self.scenario.placement.stream_from == "never" or len(self.owners[layer]) > 1:
            return ""
        device = self.expert_device[layer]
        if self.tier_of(device) == self.main_tier:
            device = self.attention_device[layer]
        elif not self.in_place:
            return ""
        return "" if self.tier_of(device) == self.main_tier else device

    @cached_property
    def depends_on(self) -> frozenset[Source]:
        """What the schedules of this layout follow from, beside the trace: estimated costs where a place is chosen by them; time, where
        conditions change with it."""
        placement = self.scenario.placement
        chosen: set[Source] = {"costs"} if placement.site == "hybrid" or placement.stream_from == "cheaper" else set()
        changes = any(load.from_s > 0 for load in self.scenario.timing.background)
        changing: set[Source] = {"time"} if changes or any(it.thermal is not None for it in self.hardware.devices.values()) else set()
        return frozenset({"trace", *chosen, *changing})

    def _devices_on(self, layer: int) -> tuple[str, ...]:
        """Devices that compute experts of a layer."""
        streamed = self.streamed_to(layer)
        return (*self.owners[layer], *([streamed] if streamed else []))

    def _layers_on(self, tier: str) -> tuple[int, ...]:
        """MoE layers whose experts pass through a tier."""
        return tuple(layer for layer in self.moe_layers if any(tier in self.chain(device) for device in self._devices_on(layer)))

    def _owned(self, layer: int, tier: str) -> int:
        """Experts of a layer that devices of a tier own."""
        devices, n = self.owners[layer], self.model.n_experts
        return sum(len(range(k, n, len(devices))) for k, device in enumerate(devices) if self.tier_of(device) == tier)

    def route(self, source: str, target: str) -> tuple[str, ...]:
        """Return the links from one tier to another: the one between them, or by way of main memory where there is none."""
        direct = any((link.source, link.target) == (source, target) for link in self.hardware.links.values())
        if direct or self.main_tier in (source, target):
            return (self.link(source, target),)
        return self.link(source, self.main_tier), self.link(self.main_tier, target)

    def link(self, source: str, target: str) -> str:
        """Return the link between two tiers."""
        for name, link in self.hardware.links.items():
            if (link.source, link.target) == (source, target):
                return name
        raise InputError(
            f"hardware {self.hardware.name}", expected=f"a link from {source} to {target}", got=", ".join(self.hardware.links) or "no links"
        )

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes of the machine: devices that are used first, then links, then storage (whose width is the number of I/O threads)."""
        experts = (device for layer in self.moe_layers for device in (*self.owners[layer], self.streamed_to(layer)))
        used = {*self.attention_device, *self.shared_device, *experts, self.head_device, *(["cpu"] if self.in_place else [])}
        scenario, hardware = self.scenario, self.hardware
        lanes = [Lane(name) for name in hardware.devices if name in used]
        lanes += [Lane(name, discipline=scenario.lanes) for name in hardware.links]
        lanes += [Lane(name, width=scenario.io.threads, discipline=scenario.lanes) for name in hardware.storage]
        return tuple(lanes)
