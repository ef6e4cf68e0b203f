"""Owns where experts are in logical order: residents of a tier, the room they take, and what must end before room is reused.

Built on ``policies.cache``: an ``ExpertPool`` decides who stays, ``Rooms`` remember which tasks a freed room waits for (timing
rule 6: the last use of the expert that leaves, and the load that filled the slot). No clock, no cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from moesim.policies.cache import ExpertPool
from moesim.schedule import Dep

Deps = list[tuple[int, Dep]]
Use = tuple[int, int]  # (step, MoE layer index): the layer use that an expert was brought for


@dataclass(slots=True)
class Resident:
    """An expert in a tier: its slot, the tasks that loaded it (none: there from the start) and the last ones that used it."""

    slot: int
    bytes: int
    grows_bytes: int  # what its arrival added to the arena: its size less the bytes of those who left for it
    waits: Deps  # what must end before it may be loaded into its room; like those below it is replaced, never changed
    loads: Sequence[int] = ()
    uses: Sequence[int] = ()  # FFNs of the latest step that used it
    reads: Sequence[int] = ()  # the latest copy of it to another tier
    prefetched: bool = False  # brought in on a prediction and not used since

    def leaving(self) -> Deps:
        """What must end before this room may be filled again. A use has waited for the load already."""
        return [(task, Dep.SLOT) for task in ([*self.uses, *self.reads] or self.loads)]


class Rooms:
    """Free room of one pool. Untouched room is given out first, then freed room in the order it was given back.

    With experts of one size a room is a numbered slot; otherwise rooms are split and joined by bytes and have no number (-1).
    """

    def __init__(self, capacity_bytes: int, sizes: Sequence[int], first_slot: int = 0, ready: Deps | None = None) -> None:
        self.numbered = len(set(sizes)) == 1
        self.untouched = capacity_bytes
        self.next_slot = first_slot
        self.ready = ready or []  # what even untouched room waits for
        self.freed: deque[tuple[int, int, Deps]] = deque()  # slot, bytes, what it waits for

    def take(self, n_bytes: int) -> Resident:
        """Give room to an expert."""
        if self.untouched >= n_bytes:
            self.untouched -= n_bytes
            self.next_slot += 1
            return Resident(self.next_slot - 1 if self.numbered else -1, n_bytes, n_bytes, self.ready)
        if self.numbered:
            slot, _, waits = self.freed.popleft()
            return Resident(slot, n_bytes, 0, waits)
        waits = list(self.ready)
        grows, self.untouched = self.untouched, 0
        need = n_bytes - grows
        while need > 0:
            slot, size, why = self.freed.popleft()
            waits += why
            if size > need:
                self.freed.appendleft((slot, size - need, why))
            need -= size
        return Resident(-1, n_bytes, grows, waits)

    def give(self, resident: Resident) -> None:
        """Take the room of an expert back."""
        self.freed.append((resident.slot, resident.bytes, resident.leaving()))

    def shrink(self, n_bytes: int) -> tuple[int, Deps]:
        """Take free room out of the pool for good; return how much of it was touched before, and what that waits for."""
        cut = min(self.untouched, n_bytes)
        self.untouched -= cut
        left = n_bytes - cut
        waits: Deps = []
        while left > 0 and self.freed:
            slot, size, why = self.freed.pop()
            waits += why
            if size > left:
                self.freed.append((slot, size - left, why))
            left -= size
        return n_bytes - cut, waits


def _nothing(_key: int, _resident: Resident) -> None:
    pass


class TierPool:
    """The expert caches of one tier, one per layer or a single global one, with their residents and rooms.

    Parameters
    ----------
    caches, rooms : list
        One of each per cache.
    cache_of : callable
        Index of the cache of a key.
    bytes_of : callable
        Size of a key's expert.

    Attributes
    ----------
    on_leave : callable
        Called with (key, resident) before the room of one who leaves is given back.
    """

    def __init__(
        self, caches: list[ExpertPool], rooms: list[Rooms], cache_of: Callable[[int], int], bytes_of: Callable[[int], int]
    ) -> None:
        self.caches, self.rooms, self.cache_of, self.bytes_of = caches, rooms, cache_of, bytes_of
        self.residents: dict[int, Resident] = {}
        self.on_leave: Callable[[int, Resident], None] = _nothing

    @property
    def used_bytes(self) -> int:
        return sum(cache.used_bytes for cache in self.caches)

    def preload(self, keys: Sequence[int]) -> None:
        """Make experts resident before the run, the most valuable first."""
        by_cache: dict[int, list[int]] = {}
        for key in keys:
            by_cache.setdefault(self.cache_of(key), []).append(key)
        for index, group in by_cache.items():
            self.caches[index].preload(group)
            for key in group:
                self.residents[key] = self.rooms[index].take(self.bytes_of(key))

    def _enter(self, index: int, key: int) -> Resident:
        resident = self.residents[key] = self.rooms[index].take(self.bytes_of(key))
        return resident

    def _leave(self, index: int, key: int) -> None:
        resident = self.residents.pop(key)
        self.on_leave(key, resident)
        self.rooms[index].give(resident)

    def waves(self, keys: Sequence[int]) -> list[list[int]]:
        """Split keys of one layer into waves, see ``ExpertPool.split_waves``."""
        return self.caches[self.cache_of(keys[0])].split_waves(keys) if keys else []

    def access(self, keys: Sequence[int], now: int) -> tuple[list[int], list[int], list[int]]:
        """Access one wave of one layer; return hits, admitted misses (in their room now, to be loaded) and refused misses."""
        index = self.cache_of(keys[0])
        outcome = self.caches[index].access(keys, now)
        for key in outcome.evicted:
            self._leave(index, key)
        for key in outcome.misses:
            self._enter(index, key)
        return outcome.hits, outcome.misses, outcome.transient

    def prefetch(self, key: int, now: int, protect: Collection[int] = (), keep_free_bytes: int = 0) -> Resident | None:
        """Let one key in ahead of its use, or return None if there is no evictable room beside ``keep_free_bytes``."""
        index = self.cache_of(key)
        cache = self.caches[index]
        if cache.pinned_bytes + self.bytes_of(key) + keep_free_bytes > cache.capacity_bytes:
            return None
        evicted = cache.prefetch(key, now, protect)
        if evicted is None:
            return None
        for other in evicted:
            self._leave(index, other)
        return self._enter(index, key)

    def swap(self, old: int, new: int) -> Resident:
        """Exchange residents of a static pool (a refreshed placement)."""
        self.drop(old)
        index = self.cache_of(new)
        self.caches[index].preload([new])
        return self._enter(index, new)

    def drop(self, key: int) -> None:
        """Make one key leave now."""
        index = self.cache_of(key)
        self.caches[index].evict(key)
        self._leave(index, key)

    def pin(self, key: int) -> None:
        self.caches[self.cache_of(key)].pin(key)

    def unpin(self, key: int) -> None:
        self.caches[self.cache_of(key)].unpin(key)

    def resize(self, index: int, capacity_bytes: int) -> tuple[int, Deps] | None:
        """Shrink one cache: the coldest leave first, of a static one those preloaded last.

        Returns
        -------
        (int, Deps) or None
            Bytes given back that had been in use, and what must end before they are used otherwise; None where pins forbid it.
        """
        cache = self.caches[index]
        static = [key for key in self.residents if self.cache_of(key) == index] if not cache.policy.admits else []
        while cache.used_bytes > capacity_bytes:
            victim = static.pop() if static else cache.policy.victim(lambda key: not cache.is_pinned(key))
            if victim is None:
                return None
            cache.evict(victim)
            self._leave(index, victim)
        given = self.rooms[index].shrink(cache.capacity_bytes - capacity_bytes)
        cache.capacity_bytes = capacity_bytes
        return given


class Passing:
    """Experts that pass through a tier without being admitted: transient slots, or one layer-set buffer.

    Each belongs to the layer use it was brought for and leaves after it.
    """

    def __init__(self, capacity_bytes: int, sizes: Sequence[int], first_slot: int, is_buffer: bool = False) -> None:
        self.capacity_bytes, self.sizes, self.first_slot = capacity_bytes, sizes, first_slot
        self.is_buffer = is_buffer
        self.unused: Deps = []  # of a buffer: loads of experts that left unused: no FFN has waited for them
        self.held: dict[Use, dict[int, Resident]] = {}
        self.reopen([])

    def reopen(self, ready: Deps) -> None:
        """Begin anew with room that waits for ``ready`` (a layer-set buffer that is filled again), and for wrong loads under way."""
        self.rooms = Rooms(self.capacity_bytes, self.sizes, self.first_slot, [*ready, *self.unused])
        self.unused = []
        self.free_bytes = self.capacity_bytes
        self.held.clear()

    def enter(self, use: Use, key: int, n_bytes: int) -> Resident:
        """Take room for a key, for one layer use."""
        resident = self.rooms.take(n_bytes)
        self.free_bytes -= n_bytes
        self.held.setdefault(use, {})[key] = resident
        return resident

    def leave(self, use: Use, keys: Sequence[int] | None = None) -> None:
        """Give back the room of some keys of a layer use, or of all."""
        held = self.held.get(use, {})
        for key in list(held) if keys is None else keys:
            resident = held.pop(key)
            self.rooms.give(resident)
            if self.is_buffer and not resident.uses:
                self.unused += resident.leaving()
            self.free_bytes += resident.bytes
        if not held:
            self.held.pop(use, None)
