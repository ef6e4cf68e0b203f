"""Owns where every load and every expert FFN of a schedule finds its expert: slots of a tier as bytes, and what lies in them when.

The schedule numbers slots through a tier: pools in order of layer, transient slots, layer-set buffers. What a copy between tiers reads
follows from walking the loads in logical order. It must not know torch, threads or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from moesim.errors import InputError, MoesimError
from moesim.layout import Layout
from moesim.planner import Planner
from moesim.schedule import Fragment, Kind, Lane

SLOT_ALIGN = 4096  # of direct reads

Place = tuple[str, int]  # tier, slot
Key = tuple[int, int]  # layer, expert


@dataclass(frozen=True, slots=True)
class TierSlots:
    """Slots of one tier: byte offset and size of each, by its number."""

    tier: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.offsets[-1] + self.sizes[-1] if self.offsets else 0


def tier_slots(layout: Layout, slot_bytes: Callable[[int], int]) -> dict[str, TierSlots]:
    """Return the slots of every tier that holds routed experts.

    Parameters
    ----------
    layout : Layout
    slot_bytes : callable
        Bytes that an expert of a layer takes in a slot.
    """
    prefetch = layout.scenario.prefetch
    out = {}
    for tier, plan in layout.pools.items():
        largest = max(slot_bytes(layer) for layer in plan.layers)
        if plan.spec.scope == "layer":
            sizes = [slot_bytes(layer) for layer, count in zip(plan.layers, plan.counts, strict=True) for _ in range(count)]
        else:
            sizes = [largest] * sum(plan.counts)
        sizes += [largest] * plan.transient_slots
        if prefetch.on and prefetch.into == "buffers" and tier == layout.tier_of(layout.expert_device[layout.moe_layers[0]]):
            sizes += [max(slot_bytes(layer) for layer in layout.moe_layers)] * (prefetch.buffers * layout.layer_set)
        sizes = [-(-size // SLOT_ALIGN) * SLOT_ALIGN for size in sizes]
        offsets, at = [], 0
        for size in sizes:
            offsets.append(at)
            at += size
        out[tier] = TierSlots(tier, tuple(offsets), tuple(sizes))
    return out


@dataclass(slots=True)
class Move:
    """One expert loaded into a slot, from storage (``source`` None) or from a slot of another tier."""

    task: int
    key: Key
    target: Place
    source: Place | None
    prefetch: bool
    evicts: bool


@dataclass(slots=True)
class Traffic:
    """All that a schedule does to slots, in logical order."""

    at_start: dict[Place, Key] = field(default_factory=dict)
    moves: dict[int, list[Move]] = field(default_factory=dict)  # by load task
    uses: dict[int, list[tuple[Key, Place]]] = field(default_factory=dict)  # by expert FFN task

    @property
    def evictions(self) -> int:
        """Loads into a slot that held another expert."""
        return sum(move.evicts for moves in self.moves.values() for move in moves)


def at_start(planner: Planner) -> dict[Place, Key]:
    """What a fresh planner places before the first step.

    Raises
    ------
    InputError
        If a pool has no numbered slots.
    """
    n, moe = planner.n_experts, planner.moe
    out = {}
    for tier, pool in planner.loader.pools.items():
        for key, resident in pool.residents.items():
            out[tier, _numbered(resident.slot, tier)] = (moe[key // n], key % n)
    return out


def _numbered(slot: int, tier: str) -> int:
    if slot < 0:
        fix = "set scope: layer and a policy that caches, or give the experts of all layers one size"
        raise InputError(f"placement.pools.{tier}", expected="numbered slots, to be run for real", got="experts of several sizes", fix=fix)
    return slot


def traffic(layout: Layout, lanes: tuple[Lane, ...], fragments: Iterable[Fragment], start: dict[Place, Key]) -> Traffic:
    """Walk the loads and FFNs of a schedule.

    Raises
    ------
    InputError
        For slots without numbers, and for granularity matrix.
    MoesimError
        If an expert is used or copied where it does not lie: the schedule is wrong.
    """
    if layout.scenario.granularity == "matrix":
        raise InputError("granularity", expected="expert or layer, to be run for real", got="matrix")
    found = Traffic(dict(start))
    lies = dict(start)
    where = {(tier, key): slot for (tier, slot), key in start.items()}
    target, source = _tiers(layout, lanes)
    compute_tier = [layout.tier_of(lane.name) if lane.name in layout.hardware.devices else "" for lane in lanes]
    for fragment in fragments:
        experts = set(fragment.access[:, 4].tolist())
        lane, kind = fragment.lane.tolist(), fragment.kind.tolist()
        layer, early = fragment.layer.tolist(), fragment.prefetch.tolist()
        for row, members in _members(fragment):
            task = fragment.first_task + row
            if kind[row] == Kind.LOAD:
                tier, below = target[lane[row]], source[lane[row]]
                for expert, slot in members:
                    key, place = (layer[row], expert), (tier, _numbered(slot, tier))
                    old = lies.get(place)
                    origin = (below, _place(where, below, key, task)) if below else None
                    if old is not None and where.get((tier, old)) == place[1]:
                        del where[tier, old]
                    lies[place], where[tier, key] = key, place[1]
                    found.moves.setdefault(task, []).append(Move(task, key, place, origin, early[row], old not in (None, key)))
            elif task in experts:
                tier = compute_tier[lane[row]]
                for expert, slot in members:
                    key, place = (layer[row], expert), (tier, _numbered(slot, tier))
                    found.uses.setdefault(task, []).append((key, place))
    return found


def _members(fragment: Fragment) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Rows that load or run routed experts with their (expert, slot) members."""
    expert, slot = fragment.expert.tolist(), fragment.slot.tolist()
    together: dict[int, list[tuple[int, int]]] = {}
    for task, one, where in fragment.members.tolist():
        together.setdefault(task - fragment.first_task, []).append((one, where))
    for row, kind in enumerate(fragment.kind.tolist()):
        if row in together:
            yield row, together[row]
        elif kind in (Kind.LOAD, Kind.FFN) and expert[row] >= 0:
            yield row, [(expert[row], slot[row])]


def _place(where: dict[tuple[str, Key], int], tier: str, key: Key, task: int) -> int:
    slot = where.get((tier, key))
    if slot is None:
        raise MoesimError(f"task {task} copies layer {key[0]}, expert {key[1]} from {tier}, where it does not lie")
    return slot


def _tiers(layout: Layout, lanes: tuple[Lane, ...]) -> tuple[list[str], list[str]]:
    """Tier that each lane's loads write to, and the one that they read from ("" for storage)."""
    target, source = [], []
    for lane in lanes:
        link = layout.hardware.links.get(lane.name)
        target.append(link.target if link is not None else layout.main_tier)
        source.append(link.source if link is not None else "")
    return target, source
