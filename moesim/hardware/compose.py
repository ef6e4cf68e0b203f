"""Owns the machine that parts make: the parts of a composition (``hardware_grammar.py``) to a hardware profile.

Peak of memory = channels x 8 bytes x MT/s; of a CPU see ``hardware_catalogue.py``. What is left out: no slot given, a card gets its own
generation and lanes or what the host has left for it, whichever is less (four lanes stay with a drive); no drive, no storage; all
else is in the catalogue's assumptions. The profile goes through the same validation as one from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from moesim import config
from moesim.config import Document
from moesim.errors import InputError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.catalogue import Cores, Cpu, Drive, Gpu, Pcie, Unit, assumptions, cpu_peaks, size_text
from moesim.hardware.grammar import Parts, host_port, is_composition, lanes_of, read_parts
from moesim.hardware.parts import ChannelFacts
from moesim.units import show

_DRIVE_LANES = 4


def find_hardware(text: str, base: Path | None = None, where: str = "") -> HardwareProfile:
    """Return a machine by what a scenario calls it: a bundled profile, a file, or a composition of parts.

    Raises
    ------
    InputError
        If there is no such profile or part, or the parts make no machine; ``where`` is the place that named it.
    """
    if not is_composition(text):
        return load_hardware(text, base, where)
    try:
        return compose(text)
    except InputError as error:
        raise error.at(where) from None


def compose(text: str) -> HardwareProfile:
    """Return the machine that a composition describes; see ``hardware_grammar.py``.

    Raises
    ------
    InputError
        If a part is unknown, missing, named twice, or cannot be in this machine.
    """
    chosen = read_parts(text)
    return config.build(HardwareProfile, Document(_profile(chosen), "composition"))


def _figure(value: Any, basis: str, source: str) -> dict[str, Any]:
    return {"value": value, "basis": basis, "source": source}


def _plain(spec: BaseModel | None, **changes: Any) -> Any:
    return None if spec is None else {**spec.model_dump(mode="json"), **changes}


def _used(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}


def _profile(chosen: Parts) -> dict[str, Any]:
    data: dict[str, Any] = {"name": chosen.text(), "tiers": {}, "channels": {}, "devices": {}, "links": {}, "storage": {}}
    words: list[str] = []
    for count, gpu in chosen.gpus.values():
        words.append(
            f"{f'{count} x ' if count > 1 else ''}{gpu.chip} ({size_text(gpu.vram.value, ' ')} at {show(gpu.bandwidth.value, 'bytes_per_s')})"
        )
    _add_cards(data, chosen)
    words.append(_add_soc(data, chosen) if chosen.socs else _add_host(data, chosen))
    for name, (drive, size) in chosen.drives.items():
        _add_drive(data, name, drive, size, host_port(chosen)[1])
        words.append(drive.chip)
    data["description"] = ", ".join(words)
    return data


def _add_host(data: dict[str, Any], chosen: Parts) -> str:
    name, cpu = next(iter(chosen.cpus.items()))
    ram, kind = chosen.ram[0], assumptions().platforms[cpu.platform]
    facts = ChannelFacts(memory_channels=ram.channels, mt_s=ram.mt_s)
    rated = next(rate for gen, rate in cpu.memory.items() if gen == f"ddr{ram.gen}")
    note = f"; {name} is rated for {rated}" if ram.mt_s > rated else ""
    data["tiers"]["ram"] = {
        "capacity": _figure(f"{ram.bytes} B", "spec", f"composition: {ram.text}"), "reserved": _plain(kind.reserved), "channel": "ram",
    }  # fmt: skip
    data["channels"]["ram"] = {
        "bandwidth": _figure(f"{facts.peak_bytes_per_s!r} B/s", "spec", f"{ram.channels} channels x 8 bytes x {ram.mt_s} MT/s{note}"),
        "facts": _used(facts.model_dump()),
    }
    cores = sum(c.count for c in cpu.cores) * cpu.sockets
    power = show(cpu.tdp.value * cpu.sockets, "w", digits=12)
    data["devices"]["cpu"] = {
        "chip": cpu.chip, "platform": cpu.platform, "tier": "ram", "peak": _cpu_peaks(cpu.cores, cpu.simd, cpu.sockets),
        "compute_efficiency": _plain(kind.compute_efficiency), "memory_efficiency": _plain(kind.memory_efficiency),
        "launch": _plain(kind.launch), "cores": _figure(cores, cpu.basis, cpu.source), "idle_power": _plain(_below(kind.idle_power, cpu)),
        "active_power": _plain(cpu.tdp, value=power),
    }  # fmt: skip
    data["base_power"] = _plain(kind.base_power)
    return f"{cpu.chip}, {size_text(ram.bytes, ' ')} DDR{ram.gen}-{ram.mt_s} in {ram.channels} channels ({show(facts.peak_bytes_per_s, 'bytes_per_s')})"


def _below(idle: Any, cpu: Cpu) -> Any:
    """Idle power of a class, at most a third of what this CPU draws at all."""
    most = cpu.tdp.value * cpu.sockets / 3
    return idle if idle.value <= most else idle.model_copy(update={"value": most, "source": "a third of the TDP"})


def _cpu_peaks(cores: Iterable[Cores], simd: str, sockets: int = 1) -> dict[str, Any]:
    clusters = tuple(cores)
    words = " + ".join(f"{c.count} cores x {c.flops_per_cycle} FLOP per cycle x {c.clock_mhz} MHz" for c in clusters)
    whole = f"{f'{sockets} sockets x ' if sockets > 1 else ''}{words}"
    peaks = cpu_peaks(clusters, simd, sockets)
    fp32 = peaks["fp32"]
    return {
        name: _figure(f"{peak!r} FLOP/s", "assumed", whole if name == "fp32" else f"{peak / fp32:g} times FP32 by {simd}")
        for name, peak in peaks.items()
    }


def _add_soc(data: dict[str, Any], chosen: Parts) -> str:
    name, (soc, size) = next(iter(chosen.socs.items()))
    given = assumptions()
    kind, host = given.socs[soc.kind], given.platforms["soc"]
    facts = ChannelFacts(bus_bits=soc.bus_bits, mt_s=soc.mt_s)
    data["tiers"]["unified"] = {
        "capacity": _figure(f"{size} B", soc.basis, soc.source),
        "reserved": _plain(kind.reserved, value=f"{round(size * kind.reserved.value)} B"),
        "channel": "unified",
    }
    data["channels"]["unified"] = {"bandwidth": _plain(soc.bandwidth), "facts": _used(facts.model_dump())}
    share = given.unit_power_share
    power = _plain(share, value=show(soc.tdp.value * share.value, "w", digits=12))
    for key, unit in (("gpu", soc.gpu), ("npu", soc.npu)):
        if unit is not None:
            number = sum(count for count, _ in chosen.gpus.values()) if key == "gpu" else 0  # cards beside the SoC come first
            data["devices"][f"{key}{number or ''}"] = _unit(unit, "unified", power, unit.bandwidth)
    data["devices"]["cpu"] = {
        "chip": f"CPU of {soc.chip}", "platform": "soc", "tier": "unified", "peak": _cpu_peaks(soc.cpu.cores, soc.cpu.simd),
        "compute_efficiency": _plain(host.compute_efficiency), "memory_efficiency": _plain(host.memory_efficiency),
        "bandwidth": _plain(soc.cpu.bandwidth), "launch": _plain(host.launch),
        "cores": _figure(sum(c.count for c in soc.cpu.cores), soc.basis, soc.source), "idle_power": _plain(host.idle_power),
        "active_power": power,
    }  # fmt: skip
    data["base_power"] = _plain(kind.base_power)
    return f"{soc.chip}, {size_text(size, ' ')} unified memory ({show(soc.bandwidth.value, 'bytes_per_s')})"


def _unit(unit: Unit | Gpu, tier: str, power: Any, port: Any = None) -> dict[str, Any]:
    kind = assumptions().units[unit.kind]
    power = power if kind.active_power is None else _plain(kind.active_power)
    return {
        "chip": unit.chip, "tier": tier, "peak": {name: _plain(peak) for name, peak in unit.peak.items()},
        "compute_efficiency": _plain(kind.compute_efficiency), "memory_efficiency": _plain(kind.memory_efficiency),
        "bandwidth": _plain(port), "launch": _plain(kind.launch), "batch_bucket": _plain(kind.batch_bucket),
        "formats": list(unit.peak) if unit.kind == "npu" else None, "idle_power": _plain(kind.idle_power), "active_power": power,
    }  # fmt: skip


def _add_cards(data: dict[str, Any], chosen: Parts) -> None:
    cards = [gpu for count, gpu in chosen.gpus.values() for _ in range(count)]
    for i, gpu in enumerate(cards):
        _add_card(data, chosen, gpu, str(i or ""), len(cards))
    pairs = [(i, j) for i in range(len(cards)) for j in range(len(cards)) if i != j]
    for k, (i, j) in enumerate(pairs):  # card to card over the host's PCIe, as fast as the slower port; NVLink is not in the catalogue
        ends = f"pcie_d2h{i or ''}", f"pcie_h2d{j or ''}"
        slower = min(ends, key=lambda name: ChannelFacts.model_validate(data["channels"][name]["facts"]).peak_bytes_per_s)
        data["links"][f"p2p{k or ''}"] = _link(f"vram{i or ''}", f"vram{j or ''}", slower)


def _add_card(data: dict[str, Any], chosen: Parts, gpu: Gpu, n: str, cards: int) -> None:
    host, port = host_port(chosen)
    if port is None:
        return
    slot = chosen.slots[0] if chosen.slots else Pcie(gen=port.gen, lanes=lanes_of((port.lanes - _DRIVE_LANES) // cards))
    facts = ChannelFacts.model_validate({"pcie_gen": min(slot.gen, gpu.pcie.gen), "pcie_lanes": min(slot.lanes, gpu.pcie.lanes)})
    said = "composition" if chosen.slots else f"the least of the card's port and of what {host} has left for each of {cards}"
    source = f"PCIe {facts.pcie_gen}.0 x{facts.pcie_lanes} ({said}), one direction after coding (PCI-SIG)"
    rate = _figure(f"{facts.peak_bytes_per_s!r} B/s", "spec" if chosen.slots else "assumed", source)
    vram, main = f"vram{n}", "unified" if chosen.socs else "ram"
    data["tiers"][vram] = {"capacity": _plain(gpu.vram), "reserved": _plain(assumptions().units[gpu.kind].reserved), "channel": vram}
    memory = {"bus_bits": gpu.bus_bits, "mt_s": gpu.mt_s} if gpu.mt_s else None
    data["channels"][vram] = _used({"bandwidth": _plain(gpu.bandwidth), "facts": memory})
    data["devices"][f"gpu{n}"] = _unit(gpu, vram, _plain(gpu.tdp))
    for way, source_tier, target in (("h2d", main, vram), ("d2h", vram, main)):
        data["channels"][f"pcie_{way}{n}"] = {"bandwidth": rate, "facts": _used(facts.model_dump())}
        data["links"][f"{way}{n}"] = _link(source_tier, target, f"pcie_{way}{n}")


def _link(source: str, target: str, channel: str) -> dict[str, Any]:
    return {"source": source, "target": target, "channel": channel, **assumptions().pcie.model_dump(mode="json")}


def _add_drive(data: dict[str, Any], name: str, drive: Drive, size: int, port: Pcie | None) -> None:
    bandwidth = _plain(drive.bandwidth)
    if drive.pcie_gen and port is not None and port.gen < drive.pcie_gen:
        most = ChannelFacts.model_validate({"pcie_gen": port.gen, "pcie_lanes": _DRIVE_LANES}).peak_bytes_per_s
        if most < drive.bandwidth.value:
            bandwidth = _figure(f"{most!r} B/s", "spec", f"the host's PCIe {port.gen}.0 x4, less than the drive's rate")
    stated = size != drive.capacity.value
    capacity = _figure(f"{size} B", "spec", f"composition: {name}:{size_text(size)}") if stated else _plain(drive.capacity)
    data["tiers"]["ssd"] = {"capacity": capacity, "channel": "ssd"}
    data["channels"]["ssd"] = {"bandwidth": bandwidth}
    data["storage"]["ssd"] = _used({
        "tier": "ssd", "latency": _plain(drive.latency), "curve": [_plain(point) for point in drive.curve], "fast_region": _plain(drive.fast_region),
    })  # fmt: skip
