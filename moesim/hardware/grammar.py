"""Owns the grammar of compositions: text such as ``rtx-3090 + ryzen-9950x + ddr5-6000x2:96GiB + nvme-gen4`` to parts that fit together.

Parts are joined by ``+``, in any order. A part is a GPU, an SoC, a CPU or a class of drives of the catalogue; memory
``ddrG-RATExCHANNELS:CAPACITY``; or a slot ``pcieGxLANES``. ``N x GPU`` repeats a card. ``:SIZE`` chooses an SoC's memory or a
drive's capacity. A machine has either an SoC, or one CPU and its memory. What the parts become is ``hardware_compose.py``'s business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from moesim import resources
from moesim.errors import InputError, did_you_mean
from moesim.hardware.catalogue import GIB, Cpu, Drive, Gpu, Part, Pcie, Soc, assumptions, part, part_names, size_text
from moesim.units import parse_bytes

_RAM = re.compile(r"ddr(\d)-(\d{3,5})x(\d{1,2})")
_PCIE = re.compile(r"pcie-?(\d{1,2})x(\d{1,3})")
_TIMES = re.compile(r"(\d{1,3})\s*x\s*(?=[a-z])")
_RATES = {3: (800, 2933), 4: (1600, 5333), 5: (3200, 9200)}  # MT/s of modules that were sold; beyond, a generation was mistaken
_LANES = (1, 2, 4, 8, 16)
_MOST_CARDS = 8
_FORM = "a GPU, SoC, CPU or drive of the catalogue, ddrG-RATExCHANNELS:CAPACITY, or pcieGxLANES"
EVERYDAY = {  # what people call a part, to its name in the catalogue; only to suggest it
    "strix-halo": "ryzen-ai-max-395", "ai-max-395": "ryzen-ai-max-395", "framework-desktop": "ryzen-ai-max-395",
    "strix-point": "ryzen-ai-hx-370", "hawk-point": "ryzen-8845hs", "phoenix": "ryzen-7840hs", "dgx-spark": "gb10", "digits": "gb10",
    "lunar-lake": "core-ultra-7-258v", "meteor-lake": "core-ultra-7-155h", "arrow-lake": "core-ultra-9-285k", "mac-studio": "m3-ultra",
    "p40": "tesla-p40", "p100": "tesla-p100", "v100": "tesla-v100-32gb", "t4": "tesla-t4", "m40": "tesla-m40-24gb", "mi50": "mi50-32gb",
    "a100": "a100-80gb", "rtx-6000-pro": "rtx-pro-6000-blackwell", "rtx-pro-6000": "rtx-pro-6000-blackwell", "w7900": "radeon-pro-w7900",
    "r9700": "radeon-ai-pro-r9700", "b580": "arc-b580", "a770": "arc-a770-16gb", "rpi5": "raspberry-pi-5",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ram:
    """Memory modules of a machine."""

    text: str
    gen: int
    mt_s: int
    channels: int
    bytes: int


@dataclass(slots=True)
class Parts:
    """The parts of a composition, as named."""

    gpus: dict[str, tuple[int, Gpu]] = field(default_factory=dict)  # name to count and card, in the order of the machine
    socs: dict[str, tuple[Soc, int]] = field(default_factory=dict)  # and bytes of memory
    cpus: dict[str, Cpu] = field(default_factory=dict)
    ram: list[Ram] = field(default_factory=list)
    drives: dict[str, tuple[Drive, int]] = field(default_factory=dict)  # and bytes
    slots: list[Pcie] = field(default_factory=list)

    def counted(self) -> list[tuple[str, int, Part]]:
        """The catalogue's parts of the machine: name, how many, part."""
        out: list[tuple[str, int, Part]] = [(name, count, gpu) for name, (count, gpu) in self.gpus.items()]
        out += [(name, 1, soc) for name, (soc, _) in self.socs.items()]
        out += [(name, 1, cpu) for name, cpu in self.cpus.items()]
        return out + [(name, 1, drive) for name, (drive, _) in self.drives.items()]

    def text(self) -> str:
        """The composition in its one canonical order: equal machines have equal names."""
        gpus = [f"{count} x {name}" if count > 1 else name for name, (count, _) in self.gpus.items()]
        slots = [f"pcie{slot.gen}x{slot.lanes}" for slot in self.slots]
        socs = [f"{name}:{size_text(size)}" for name, (_, size) in self.socs.items()]
        drives = [f"{name}:{size_text(size)}" if size != drive.capacity.value else name for name, (drive, size) in self.drives.items()]
        return " + ".join([*gpus, *socs, *self.cpus, *(ram.text for ram in self.ram), *slots, *drives])


def is_composition(text: str) -> bool:
    """Whether text names parts and not a profile or file: it has a ``+``, or it is a part and no bundled profile, also by an everyday name."""
    if text in resources.names("hardware_profiles") or text.endswith((".yaml", ".yml")):
        return False
    name = _TIMES.sub("", text.strip().lower(), count=1).partition(":")[0].strip()
    return "+" in text or name in part_names() or name in EVERYDAY or bool(_RAM.fullmatch(name) or _PCIE.fullmatch(name))


def read_parts(text: str) -> Parts:
    """Return the parts that a composition names, checked to make a machine."""
    chosen = Parts()
    for item in text.split("+"):
        _add(chosen, item.strip())
    order = sorted(chosen.gpus, key=lambda name: (-chosen.gpus[name][1].bandwidth.value, name))
    chosen.gpus = {name: chosen.gpus[name] for name in order}
    _check(chosen)
    return chosen


def _add(chosen: Parts, item: str) -> None:
    """Add one part as named; the machine as a whole is checked later."""
    name, _, size = (word.strip() for word in item.partition(":"))
    name, count = name.lower(), 1
    if times := _TIMES.match(name):
        count, name = int(times[1]), name[times.end() :]
    found = part(name) if name in part_names() else None
    ram, slot = _RAM.fullmatch(name), _PCIE.fullmatch(name)
    if not (found or ram or slot):
        raise InputError("hardware", expected=_FORM, got=f'"{item}"', fix=_hint(name))
    if times and not isinstance(found, Gpu):
        fix = f"two sockets are parts of their own: {', '.join(_duals())}" if isinstance(found, Cpu) else ""
        raise InputError("hardware", expected="a count only before a GPU", got=f'"{item}"', fix=fix)
    if size and (slot or isinstance(found, (Gpu, Cpu))):
        raise InputError("hardware", expected=f"no size of {name}", got=f'"{item}"', fix="sizes belong to memory, SoCs and drives")
    if name in chosen.gpus | chosen.socs | chosen.cpus | chosen.drives:
        fix = f'write "2 x {name}"' if isinstance(found, Gpu) else "name it once"
        raise InputError("hardware", expected="each part once", got=f'"{name}" again', fix=fix)
    if ram:
        chosen.ram.append(_ram(item, int(ram[1]), int(ram[2]), int(ram[3]), size))
    elif slot:
        chosen.slots.append(_slot(item, int(slot[1]), int(slot[2])))
    elif isinstance(found, Gpu):
        if not 1 <= count <= _MOST_CARDS:
            raise InputError("hardware", expected=f"1 to {_MOST_CARDS} cards", got=f'"{item}"')
        chosen.gpus[name] = (count, found)
    elif isinstance(found, Soc):
        chosen.socs[name] = (found, _soc_memory(item, name, found, size))
    elif isinstance(found, Cpu):
        chosen.cpus[name] = found
    elif isinstance(found, Drive):
        chosen.drives[name] = (found, _bytes(item, size) if size else found.capacity.value)


def _ram(item: str, gen: int, rate: int, channels: int, size: str) -> Ram:
    if gen not in _RATES:
        raise InputError("hardware", expected="ddr3, ddr4 or ddr5", got=f'"{item}"')
    low, high = _RATES[gen]
    if not low <= rate <= high:
        raise InputError("hardware", expected=f"a rate of DDR{gen}, {low} to {high} MT/s", got=f'"{item}"')
    if channels < 1:
        raise InputError("hardware", expected="at least one memory channel", got=f'"{item}"')
    if not size:
        raise InputError("hardware", expected="memory with its capacity", got=f'"{item}"', fix=f'write "ddr{gen}-{rate}x{channels}:64GiB"')
    capacity = _bytes(item, size)
    if capacity == 0 or capacity % GIB:
        raise InputError("hardware", expected="a capacity of whole GiB, as modules have", got=f'"{item}"', fix="write GiB, not GB")
    return Ram(f"ddr{gen}-{rate}x{channels}:{size_text(capacity)}", gen, rate, channels, capacity)


def _slot(item: str, gen: int, lanes: int) -> Pcie:
    if gen not in (3, 4, 5, 6) or lanes not in _LANES:
        expected = f"PCIe of generation 3 to 6 with {', '.join(map(str, _LANES))} lanes"
        raise InputError("hardware", expected=expected, got=f'"{item}"')
    return Pcie.model_validate({"gen": gen, "lanes": lanes})


def _soc_memory(item: str, name: str, soc: Soc, size: str) -> int:
    sizes = ", ".join(size_text(option) for option in soc.memory)
    if not size:
        if len(soc.memory) == 1:
            return soc.memory[0]
        raise InputError(
            "hardware",
            expected=f"{name} with its memory, one of {sizes}",
            got=f'"{item}"',
            fix=f'write "{name}:{size_text(soc.memory[-1])}"',
        )
    chosen = _bytes(item, size)
    if chosen not in soc.memory:
        raise InputError("hardware", expected=f"a memory that {name} is sold with: {sizes}", got=f'"{item}"')
    return chosen


def _bytes(item: str, size: str) -> int:
    try:
        return parse_bytes(size)
    except InputError as error:
        raise InputError("hardware", expected=error.expected, got=f'"{item}"', fix=error.fix) from None


def _hint(name: str) -> str:
    """The part that is commonly called so, a near miss among the parts, else the parts of the kind that the name begins like."""
    known = part_names()
    plain = re.sub(r"[\s_]+", "-", re.sub(r"^(?:amd|nvidia|intel|apple|geforce)[\s_-]+", "", name))
    if (meant := EVERYDAY.get(plain, plain)) in known:
        return f'did you mean "{meant}"? all: moesim hardware --parts'
    alike = [other for other in known if other[:3] == name[:3]] or [other for other in known if name and name in other]
    return did_you_mean(name, alike or known) + "; all: moesim hardware --parts"


def _duals() -> list[str]:
    return [name for name in part_names("cpus") if name.endswith("-dual")]


# ---- what makes a machine


def _check(chosen: Parts) -> None:
    for what, named in (("SoC", chosen.socs), ("CPU", chosen.cpus), ("memory", [r.text for r in chosen.ram]), ("drive", chosen.drives),
                        ("slot", [f"pcie{s.gen}x{s.lanes}" for s in chosen.slots])):  # fmt: skip
        if len(named) > 1:
            raise InputError("hardware", expected=f"one {what}", got=", ".join(named), fix="name one")
    if chosen.socs:
        extra = [*chosen.cpus, *(ram.text for ram in chosen.ram)]
        if extra:
            soc = next(iter(chosen.socs))
            raise InputError("hardware", expected=f"no CPU and no memory beside {soc}, which has its own", got=", ".join(extra))
    elif not chosen.cpus:
        raise InputError("hardware", expected="a CPU or an SoC", got="none", fix=did_you_mean("", part_names("cpus")))
    elif not chosen.ram:
        name, cpu = next(iter(chosen.cpus.items()))
        gen, rate = max(cpu.memory.items())
        fix = f'add "{gen}-{rate}x{cpu.memory_channels}:CAPACITY"'
        raise InputError("hardware", expected=f"memory beside {name}", got="none", fix=fix)
    else:
        _check_memory(*next(iter(chosen.cpus.items())), chosen.ram[0])
    _check_slots(chosen)


def _check_memory(name: str, cpu: Cpu, ram: Ram) -> None:
    kind = assumptions().platforms[cpu.platform]
    rated = {gen: rate for gen, rate in cpu.memory.items() if gen == f"ddr{ram.gen}"}
    takes = " or ".join(f"{gen.upper()}-{rate}" for gen, rate in cpu.memory.items())
    if not rated:
        raise InputError("hardware", expected=f"memory that {name} takes: {takes}", got=f'"{ram.text}"')
    if ram.channels > cpu.memory_channels:
        raise InputError("hardware", expected=f"at most the {cpu.memory_channels} memory channels of {name}", got=f'"{ram.text}"')
    if ram.mt_s > max(rated.values()) and not kind.overclocked_memory:
        raise InputError("hardware", expected=f"at most the rated {takes} of {name}", got=f'"{ram.text}"')
    if ram.bytes > ram.channels * kind.most_per_channel:
        expected = f"at most {size_text(kind.most_per_channel)} per channel on a {cpu.platform} platform"
        raise InputError("hardware", expected=expected, got=f'"{ram.text}"')


def host_port(chosen: Parts) -> tuple[str, Pcie | None]:
    if chosen.socs:
        name, (soc, _) = next(iter(chosen.socs.items()))
        return name, soc.pcie
    name, cpu = next(iter(chosen.cpus.items()))
    return name, cpu.pcie


def _check_slots(chosen: Parts) -> None:
    host, port = host_port(chosen)
    cards = sum(count for count, _ in chosen.gpus.values())
    if chosen.gpus and port is None:
        raise InputError("hardware", expected=f"no card beside {host}, which has no PCIe slot", got=", ".join(chosen.gpus))
    for slot in chosen.slots:
        got = f'"pcie{slot.gen}x{slot.lanes}"'
        if not cards or port is None:
            raise InputError("hardware", expected="a card for the slot", got=got, fix="name a GPU, or leave the slot out")
        if slot.gen > port.gen:
            raise InputError("hardware", expected=f"at most PCIe {port.gen}, which {host} has", got=got)
        if slot.lanes * cards > port.lanes:
            fix = f"each of {cards} cards can have {lanes_of(port.lanes // cards)}"
            raise InputError(
                "hardware", expected=f"at most the {port.lanes} lanes of {host} for all cards", got=f"{cards} x {got}", fix=fix
            )
        if all(slot.gen > gpu.pcie.gen or slot.lanes > gpu.pcie.lanes for _, gpu in chosen.gpus.values()):
            best = max((gpu.pcie for _, gpu in chosen.gpus.values()), key=lambda pcie: (pcie.gen, pcie.lanes))
            expected = f"at most the card's own pcie{best.gen}x{best.lanes}"
            raise InputError("hardware", expected=expected, got=got)


def lanes_of(most: int) -> int:
    return max((lanes for lanes in _LANES if lanes <= most), default=1)
