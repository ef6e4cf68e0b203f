"""Owns the memory ledger: lines of bytes per tier, what is left, and whether a plan fits.

It takes counts and sizes; who lies where is decided in ``layout.py``. Out of memory is a result here, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moesim.html_table import html_table
from moesim.units import show


@dataclass(frozen=True, slots=True)
class Line:
    """One use of memory."""

    name: str
    tier: str
    pool: str  # weights | experts | kv | buffers | workspace | runtime
    bytes: int
    basis: str = "spec"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a tier has, and what the system keeps of it."""

    total_bytes: int
    reserved_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Where and when memory ran out. ``step`` -1: before the first step."""

    tier: str
    step: int
    needed_bytes: int
    usable_bytes: int
    asked_by: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The plan of a run at its worst: every line, by tier."""

    lines: tuple[Line, ...]
    capacities: Mapping[str, Capacity]

    def planned_bytes(self, tier: str) -> int:
        """Bytes that the lines of a tier add to."""
        return sum(line.bytes for line in self.lines if line.tier == tier)

    def left_bytes(self, tier: str) -> int:
        """What a tier has left; negative where the plan does not fit."""
        return self.capacities[tier].usable_bytes - self.planned_bytes(tier)

    @property
    def fits(self) -> bool:
        return all(self.left_bytes(tier) >= 0 for tier in self.capacities)

    def first_over(self) -> tuple[str, Line] | None:
        """Return the first tier that does not fit, and the line that broke it: the one whose bytes pass the capacity."""
        for tier, capacity in self.capacities.items():
            total = 0
            for line in (x for x in self.lines if x.tier == tier):
                total += line.bytes
                if total > capacity.usable_bytes:
                    return tier, line
        return None

    def tiers(self) -> dict[str, dict[str, Any]]:
        """Return the ledger as plain data, the shape of ``budget -o json``."""
        return {
            tier: {
                "capacity_bytes": capacity.total_bytes,
                "reserved_bytes": capacity.reserved_bytes,
                "planned_bytes": self.planned_bytes(tier),
                "left_bytes": self.left_bytes(tier),
                "lines": [asdict(line) for line in self.lines if line.tier == tier],
            }
            for tier, capacity in self.capacities.items()
        }

    def __repr__(self) -> str:
        return f"Ledger({', '.join(f'{t}: {self.planned_bytes(t)} of {c.usable_bytes} bytes' for t, c in self.capacities.items())})"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, ...]] = [(x.tier, x.name, show(x.bytes, "bytes"), x.basis, x.note) for x in self.lines if x.bytes]
        rows += [(tier, "left", show(self.left_bytes(tier), "bytes"), "", "") for tier in self.capacities]
        return html_table("memory plan: " + ("fits" if self.fits else "does not fit"), rows, ("tier", "line", "size", "basis", "note"))


def blocks(tokens: int, block_tokens: int) -> int:
    """Return tokens rounded up to whole blocks of a paged cache."""
    return -(-tokens // block_tokens) * block_tokens


def largest(fits: Callable[[int], bool], limit: int = 1 << 24) -> int:
    """Return the largest n in 0..limit for which ``fits(n)``, by bisection; -1 if not even 0 fits. ``fits`` must be monotone."""
    if not fits(0):
        return -1
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, limit)


def spread(total_bytes: int, sizes: Sequence[int], most: Sequence[int]) -> list[int]:
    """Spread a budget over layers in whole experts: as evenly as whole experts allow, the first layers taking what is left.

    Parameters
    ----------
    total_bytes : int
        The budget.
    sizes : (L,) int
        Bytes of one expert of each layer.
    most : (L,) int
        Experts of each layer at most.

    Returns
    -------
    list of int
        Experts per layer.
    """
    counts = [0] * len(sizes)
    left = total_bytes
    whole_round = True
    while whole_round and any(count < limit for count, limit in zip(counts, most, strict=True)):
        for i, size in enumerate(sizes):
            if counts[i] < most[i]:
                if size <= left:
                    counts[i] += 1
                    left -= size
                else:
                    whole_round = False
    return counts
