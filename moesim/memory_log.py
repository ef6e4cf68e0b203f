"""Owns the reading of recorded memory, and its comparison with a ledger: what was planned, what was seen, line by line.

Three kinds of record, told apart by content:

- nvidia-smi's CSV (``nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv -l 1``), without its header where each row has one
  size and at most one whole number, the GPU's index: the highest use of each GPU, compared with what the ledger plans there and what the profile reserves, as nvidia-smi counts other programs too;
- the loader's lines of llama.cpp and its forks, ``CUDA0 model buffer size = 17604.91 MiB`` or without a kind for weights, as
  ik_llama.cpp and older llama.cpp print them: model, K/V and compute buffers per device;
- samples of a process, a CSV with a header that ends in ``bytes`` (``time,bytes``): its highest value against main memory's plan.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moesim.config import read_text
from moesim.errors import InputError
from moesim.hardware import kind
from moesim.layout import Layout

MIB = 2**20
POOLS = {"model": ("weights", "experts"), "KV": ("kv",), "RS": ("kv",), "compute": ("workspace", "buffers"), "output": ()}
# ik_llama.cpp and older llama.cpp print weights without the word "model", as llm_load_tensors: CUDA0 buffer size = ...
_BUFFER = re.compile(r"([A-Za-z]\w*)\s+(?:(model|KV|RS|compute|output) )?buffer size\s*=\s*(\d+(?:\.\d+)?) MiB")
_MIB = re.compile(r"\d+ MiB", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 2**10, "mib": MIB, "gib": 2**30}
_FIX = "known: nvidia-smi --query-gpu=index,memory.used --format=csv, a llama.cpp log with its buffer sizes, a CSV of time,bytes"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One figure of a record: what it is called there, the tier it is of, the pools of the ledger that it covers (empty: none of them)."""

    name: str
    tier: str
    pools: tuple[str, ...]
    bytes: int
    whole: bool = False  # of a device with all that runs on it


@dataclass(frozen=True, slots=True)
class Compared:
    """A recorded figure beside the ledger's lines that it covers; ``reserved_bytes`` is what the profile keeps for others."""

    recorded: Recorded
    lines: tuple[tuple[str, int], ...]
    reserved_bytes: int = 0
    note: str = ""

    @property
    def planned_bytes(self) -> int:
        return sum(size for _, size in self.lines) + self.reserved_bytes

    @property
    def error(self) -> float | None:
        """Planned over recorded, less 1; None where nothing was recorded or nothing is planned for it."""
        return self.planned_bytes / self.recorded.bytes - 1 if self.recorded.bytes and self.planned_bytes else None


def compare(layout: Layout, path: Path) -> list[Compared]:
    """Compare a ledger with a record.

    Raises
    ------
    InputError
        If the file is none of the three kinds, a line of it is broken, or it names a GPU that the machine does not have.
    """
    out = []
    for item in read_record(path, layout):
        lines = tuple((x.name, x.bytes) for x in layout.ledger.lines if x.tier == item.tier and x.pool in item.pools and x.bytes)
        reserved = layout.capacities[item.tier].reserved_bytes if item.whole else 0
        note = "every page of a mapped file is counted, also what was copied to the GPU" if "Mapped" in item.name else ""
        note = note or ("no line of the ledger" if not item.pools else "other programs are counted too" if item.whole else "")
        out.append(Compared(item, lines, reserved, note))
    return out


def read_record(path: Path, layout: Layout) -> list[Recorded]:
    """Return the figures of a record, each for a tier of a layout's machine."""
    text = read_text(path)
    head = text.partition("\n")[0].lower()
    if "memory.used" in head:
        return list(_smi(text, path, layout))
    if found := _BUFFER.findall(text):
        return _buffers(found, path, layout)
    if head.strip().endswith("bytes") and "," in head:
        return [_samples(text, path, layout)]
    if any(_MIB.fullmatch(cell.strip()) for cell in head.split(",")):
        return list(_smi(_with_header(text, path), path, layout))
    raise InputError("--against", expected="a record of memory", got="none of the known kinds", fix=_FIX, where=str(path))


def _with_header(text: str, path: Path) -> str:
    """nvidia-smi's rows without a header (csv,noheader), with the one that they had: one size each, and at most one whole number, the index."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    sizes = {tuple(i for i, cell in enumerate(row) if _MIB.fullmatch(cell)) for row in rows}
    numbers = {tuple(i for i, cell in enumerate(row) if cell.isdigit()) for row in rows}
    if len(sizes) > 1 or len(numbers) > 1 or any(len(found) != 1 for found in sizes) or any(len(found) > 1 for found in numbers):
        fix = "record with the header: nvidia-smi --query-gpu=index,memory.used --format=csv"
        raise InputError(
            "--against", expected="one size in MiB and at most one index a row", got=", ".join(rows[0])[:60], fix=fix, where=str(path)
        )
    names = {sizes.pop()[0]: "memory.used [MiB]"} | {found[0]: "index" for found in numbers if found}
    return ", ".join(names.get(i, "other") for i in range(len(rows[0]))) + "\n" + text


def _gpu_tier(number: int, layout: Layout, where: str) -> str:
    cards = [name for name in layout.hardware.devices if kind(name) == "gpu"]
    if number >= len(cards):
        raise InputError(
            "GPU",
            expected=f"one of the machine's {len(cards)}",
            got=f"number {number}",
            fix="choose the machine with --hardware",
            where=where,
        )
    return layout.tier_of(cards[number])


def _buffers(found: list[tuple[str, str, str]], path: Path, layout: Layout) -> list[Recorded]:
    """Buffers by device and kind: parts of a model or cache add up, of compute buffers that are reserved again the largest counts."""
    sizes: dict[tuple[str, str], float] = {}
    for device, kind_, mib in found:
        size, what = float(mib) * MIB, kind_ or "model"
        before = sizes.get((device, what), 0.0)
        sizes[device, what] = max(before, size) if what in ("compute", "output") else before + size
    out = []
    for (device, what), size in sizes.items():
        number = re.fullmatch(r"(?!CPU)[A-Za-z]+?(\d*)", device)
        main = device.upper().startswith("CPU") or device.lower().endswith("_host") or number is None
        tier = layout.main_tier if main else _gpu_tier(int(number[1] or 0) if number else 0, layout, str(path))
        pools = POOLS[what] if not (main and what == "compute" and tier not in layout.kv_tiers) else ()
        out.append(Recorded(f"{device} {what} buffer", tier, pools, round(size)))
    return out


def _smi(text: str, path: Path, layout: Layout) -> Iterator[Recorded]:
    rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    names = [name.strip().lower() for name in rows[0]]
    column = next(i for i, name in enumerate(names) if name.startswith("memory.used"))
    index = names.index("index") if "index" in names else None
    unit = (re.search(r"\[(\w+)\]", names[column]) or ["", "mib"])[1]
    peaks: dict[int, float] = {}
    for line, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        try:
            number, _, own = row[column].strip().partition(" ")
            card = int(row[index]) if index is not None else 0
            size = float(number) * _UNITS[(own or unit).lower()]
        except (ValueError, IndexError, KeyError):
            raise InputError("row", expected="a number, as 17604 MiB", got=", ".join(row)[:60], where=f"{path}:{line}") from None
        peaks[card] = max(peaks.get(card, 0.0), size)
    if not peaks:
        raise InputError("--against", expected="at least one sample", got="none", where=str(path))
    pools = tuple(dict.fromkeys(x.pool for x in layout.ledger.lines))
    for card, size in sorted(peaks.items()):
        yield Recorded(f"GPU {card}, highest of its samples", _gpu_tier(card, layout, str(path)), pools, round(size), whole=True)


def _samples(text: str, path: Path, layout: Layout) -> Recorded:
    peak = 0.0
    for line, row in enumerate(csv.reader(text.splitlines()), start=1):
        if line == 1 or not row:
            continue
        try:
            peak = max(peak, float(row[-1]))
        except ValueError:
            raise InputError("row", expected="a number of bytes last", got=", ".join(row)[:60], where=f"{path}:{line}") from None
    if not 0 < peak < 2**63:
        raise InputError("--against", expected="a sample above 0 bytes", got=f"{peak:g}", where=str(path))
    pools = tuple(dict.fromkeys(x.pool for x in layout.ledger.lines))
    return Recorded("process, highest of its samples", layout.main_tier, pools, round(peak))
