"""Owns which machines a sizing looks at: a bounded set of sensible ones from the catalogue, and the upgrades of a given one.

The rule: desktops of one CPU with 32 to 128 GiB and a card of none to 32 GB or two of 24 GB; a workstation and a server with much memory and
a card of none to 96 GB or two; SoCs in the sizes that are sold. One drive class each, large enough for the weights. Parts are current ones
of their class that the catalogue knows; ``consider`` in the needs replaces them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moesim.errors import InputError
from moesim.hardware.catalogue import GIB, Gpu, Pcie, part
from moesim.hardware.grammar import Parts, Ram, read_parts

RULE = (
    "ryzen-9600x with 32 or 64 GiB and ryzen-9900x with 32, 64 or 128 GiB, alone or with an rtx-5060-ti-16gb, rtx-3090, rtx-5090 or two rtx-3090; threadripper-pro-9965wx with 256 or 512 "
    "GiB and epyc-9354 with 384 or 768 GiB, alone or with an rtx-3090, rtx-5090, one or two rtx-pro-6000-blackwell; ryzen-ai-max-395, gb10, m4-pro, "
    "m4-max and m3-ultra"
)
_DESKTOP_CARDS = ("", "rtx-5060-ti-16gb", "rtx-3090", "rtx-5090", "2 x rtx-3090")
_BIG_CARDS = ("", "rtx-3090", "rtx-5090", "rtx-pro-6000-blackwell", "2 x rtx-pro-6000-blackwell")
_HOSTS = (
    ("ryzen-9600x + ddr5-5600x2:{}GiB", (32, 64), _DESKTOP_CARDS[:3]),
    ("ryzen-9900x + ddr5-5600x2:{}GiB", (32, 64, 128), _DESKTOP_CARDS),
    ("threadripper-pro-9965wx + ddr5-6400x8:{}GiB", (256, 512), _BIG_CARDS),
    ("epyc-9354 + ddr5-4800x12:{}GiB", (384, 768), _BIG_CARDS),
)
_SOCS = (
    ("ryzen-ai-max-395", (64, 128), "nvme-gen4"), ("gb10", (128,), "nvme-gen4"), ("m4-pro", (48, 64), "apple-ssd"), ("m4-max", (64, 128), "apple-ssd-pro"),
    ("m3-ultra", (96, 256, 512), "apple-ssd-pro"),
)  # fmt: skip
_CARD_STEPS = ("rtx-5060-ti-16gb", "rtx-3090", "rtx-5090", "rtx-pro-6000-blackwell")
_DRIVE_STEPS = {
    "sata": "nvme-gen4",
    "nvme-gen3": "nvme-gen4",
    "nvme-gen3-qlc": "nvme-gen4",
    "nvme-gen4-dramless": "nvme-gen4",
    "nvme-gen4": "nvme-gen5",
}
TB = 10**12


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A step from one machine to a better one."""

    label: str
    machine: str


def candidates(weight_bytes: int) -> list[str]:
    """Return the usual machines, with a drive that holds so many bytes."""
    size = "" if weight_bytes < 0.8 * TB else f":{-(-weight_bytes * 5 // (4 * TB))}TB"
    out = []
    for host, sizes, cards in _HOSTS:
        for gib in sizes:
            out += [" + ".join(filter(None, (card, host.format(gib), f"nvme-gen4{size}"))) for card in cards]
    out += [f"{soc}:{gib}GiB + {drive}{size}" for soc, sizes, drive in _SOCS for gib in sizes]
    return [text for text in map(canonical, out) if text]


def canonical(text: str) -> str:
    """Return a composition in its one order, or "" where its parts make no machine."""
    try:
        return read_parts(text).text()
    except (InputError, KeyError):
        return ""


def upgrades(text: str) -> list[Upgrade]:
    """Return single steps that improve a machine: memory, card, a second card, drive."""
    found = [*_memory(read_parts(text)), *_cards(read_parts(text)), *_drives(read_parts(text))]
    steps = [Upgrade(label, canonical(changed.text())) for label, changed in found]
    return [step for step in steps if step.machine and step.machine != canonical(text)]


def _memory(parts: Parts) -> list[tuple[str, Parts]]:
    out = []
    for name, (soc, size) in parts.socs.items():
        more = next((x for x in soc.memory if x > size), None)
        if more is not None:
            out.append((f"+{(more - size) // GIB} GiB (the {name} with {more // GIB})", replace(parts, socs={name: (soc, more)})))
    for ram in parts.ram:
        for times in (2, 4):
            bytes_ = ram.bytes * times
            new = Ram(f"ddr{ram.gen}-{ram.mt_s}x{ram.channels}:{bytes_ // GIB}GiB", ram.gen, ram.mt_s, ram.channels, bytes_)
            out.append((f"+{(bytes_ - ram.bytes) // GIB} GiB RAM", replace(parts, ram=[new])))
    return out


def _cards(parts: Parts) -> list[tuple[str, Parts]]:
    if parts.socs:
        return []
    out: list[tuple[str, Parts]] = []
    best = max((gpu.vram.value for _, gpu in parts.gpus.values()), default=0)
    slots: list[Pcie] = []  # a slot that was stated for one card need not suit another
    for name in _CARD_STEPS:
        card = part(name)
        if isinstance(card, Gpu) and card.vram.value > best:
            out.append((f"{name} as the card", replace(parts, gpus={name: (1, card)}, slots=slots)))
    if len(parts.gpus) == 1:
        name, (count, card) = next(iter(parts.gpus.items()))
        out.append((f"one more {name}", replace(parts, gpus={name: (count + 1, card)}, slots=slots)))
    return out


def _drives(parts: Parts) -> list[tuple[str, Parts]]:
    out = []
    for name, (_, size) in parts.drives.items():
        if name in _DRIVE_STEPS:
            text = replace(parts, drives={}).text() + f" + {_DRIVE_STEPS[name]}:{size // 10**9}GB"
            out.append((f"{_DRIVE_STEPS[name]} instead of {name}", read_parts(text)) if canonical(text) else ("", parts))
    return [(label, changed) for label, changed in out if label]
