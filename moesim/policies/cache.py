"""Owns which experts stay in a pool of limited bytes: pools, and the choice of static sets; who leaves first is ``eviction``'s.

It must not know about time, tasks or engines: everything here happens in logical order, one atomic set after another, so that
hits, misses and evictions are the same in every engine. Keys are ``layer * n_experts + expert``; ``now`` is any integer that
grows from set to set (a row, or step * L + layer).

One atomic set S in a pool of C bytes, in this order (the definition that the reference figures of the traces use):

1. members of S that are resident are hits, before anything is loaded;
2. while bytes(cache \\ S) + bytes(S) > C the policy names a victim outside S that is not pinned, and it leaves;
3. all of S is resident (no bypass), and the policy notes the members in ascending key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.policies.eviction import CACHE_POLICIES, CachePolicy, make_policy

__all__ = ["CACHE_POLICIES", "Access", "CachePolicy", "ExpertPool", "future_uses", "hottest", "make_policy"]


def future_uses(sets: Iterable[tuple[int, Iterable[int]]]) -> dict[int, list[int]]:
    """Return per key the ascending access indices of its uses, from pairs of (access index, keys) in order."""
    future: dict[int, list[int]] = {}
    for now, keys in sets:
        for key in keys:
            future.setdefault(key, []).append(now)
    return future


@dataclass(slots=True)
class Access:
    """Outcome of one atomic set.

    Attributes
    ----------
    hits, misses : list of int
        Keys in ascending order; misses are to be loaded and are resident now.
    evicted : list of int
        Keys that left, in the order in which they were chosen.
    transient : list of int
        Further misses in ascending order that the pool did not admit (static set, or all other room pinned): they pass through
        transient slots and are not resident.
    """

    hits: list[int]
    misses: list[int]
    evicted: list[int]
    transient: list[int]


class ExpertPool:
    """A byte budget for experts in one tier, its residents, and the policy that orders them.

    One pool per layer is a per-layer cache; one pool for all keys is a global one.

    Parameters
    ----------
    capacity_bytes : int
        Budget.
    bytes_of : sequence of int, or callable
        Size of each key's expert.
    policy : CachePolicy
        A fresh policy; a pool owns it.
    name : str
        Shown in errors, e.g. ``"vram.experts"``.

    Attributes
    ----------
    resident : dict of int to int
        Bytes of each resident key.
    used_bytes, pinned_bytes : int
        Sums over residents, and over pinned residents.
    """

    def __init__(self, capacity_bytes: int, bytes_of: Sequence[int] | Callable[[int], int], policy: CachePolicy, name: str = "") -> None:
        if capacity_bytes < 0:
            raise InputError(f"{name or 'expert pool'}.capacity_bytes", expected="at least 0", got=str(capacity_bytes))
        self.capacity_bytes = capacity_bytes
        self.name = name or "expert pool"
        self.policy = policy
        self.resident: dict[int, int] = {}
        self.used_bytes = 0
        self.pinned_bytes = 0
        self._pins: dict[int, int] = {}
        self._bytes_of: Callable[[int], int] = bytes_of if callable(bytes_of) else bytes_of.__getitem__

    def __repr__(self) -> str:
        return (
            f"ExpertPool({self.name!r}, {len(self.resident)} experts, {self.used_bytes} of {self.capacity_bytes} bytes, "
            f"{len(self._pins)} pinned, {type(self.policy).__name__})"
        )

    def __contains__(self, key: int) -> bool:
        return key in self.resident

    def preload(self, keys: Sequence[int]) -> None:
        """Make keys resident before the first access, the most valuable first (under LRU it is the last of them to leave).

        Raises
        ------
        InputError
            If they do not fit, or one is resident already.
        """
        sizes = {key: self._bytes_of(key) for key in keys}
        if len(sizes) != len(keys) or any(key in self.resident for key in sizes):
            raise InputError(f"{self.name}: preload", expected="each expert once", got="a repeated one", fix="drop the repeated keys")
        wanted = self.used_bytes + sum(sizes.values())
        if wanted > self.capacity_bytes:
            limit, got = f"at most {self.capacity_bytes} bytes", f"{wanted} bytes in {len(self.resident) + len(keys)} experts"
            raise InputError(f"{self.name}: preload", expected=limit, got=got, fix="preload fewer experts, or enlarge the pool")
        for key in reversed(keys):
            self._enter(key, sizes[key], -1)

    def split_waves(self, keys: Sequence[int]) -> list[list[int]]:
        """Split a layer-set into waves: ascending keys, each wave at most what the pool holds beside what is pinned now.

        A pinned member of the set takes no further room. A wave has at least one key, even where pins leave no room for it
        (``access`` then reports it as transient). Under a policy that admits nothing the set is one wave: its misses queue for
        transient slots, which are not the pool's.
        """
        order = sorted(keys)
        if not self.policy.admits or not order:
            return [order] if order else []
        room = self.capacity_bytes - self.pinned_bytes
        waves: list[list[int]] = []
        left = -1
        for key in order:
            size = 0 if key in self._pins else self._bytes_of(key)
            if not waves or size > left:
                waves.append([])
                left = room
            waves[-1].append(key)
            left -= size
        return waves

    def access(self, keys: Sequence[int], now: int) -> Access:
        """Access one atomic set (one wave) at access index ``now``; see the module docstring for the rules.

        Parameters
        ----------
        keys : sequence of int
            Distinct keys, in any order.
        now : int
            Access index, growing from set to set; the waves of one layer-set may share it.

        Returns
        -------
        Access
            What hit, what is to be loaded, what left.

        Raises
        ------
        InputError
            If the set is larger than the pool (and the policy admits misses), or a key is there twice.
        """
        resident, policy = self.resident, self.policy
        order = sorted(keys)
        hits = [key for key in order if key in resident]
        misses = [key for key in order if key not in resident] if len(hits) < len(order) else []
        members = set(order)
        if len(members) != len(order):
            raise InputError(f"{self.name}: layer-set", expected="each expert once", got=f"{order}")
        if not policy.admits:
            for key in hits:
                policy.touch(key, now, True, resident[key])
            return Access(hits, [], [], misses)
        evicted: list[int] = []
        transient: list[int] = []
        if misses:
            sizes = {key: self._bytes_of(key) for key in misses}
            need = sum(sizes.values())
            total = need + sum([resident[key] for key in hits])
            if total > self.capacity_bytes:
                raise self._too_large(sizes, total)
            if self.used_bytes + need > self.capacity_bytes:
                pins = self._pins

                def allowed(key: int) -> bool:
                    return key not in members and key not in pins

                while self.used_bytes + need > self.capacity_bytes:
                    victim = policy.victim(allowed, now)
                    if victim is None:
                        misses, transient = self._admissible(sizes)
                        break
                    self._leave(victim)
                    evicted.append(victim)
            for key in misses:
                resident[key] = sizes[key]
                self.used_bytes += sizes[key]
        for key in order:
            if key in resident:
                policy.touch(key, now, True, resident[key])
        return Access(hits, misses, evicted, transient)

    def prefetch(self, key: int, now: int, protect: Collection[int] = ()) -> list[int] | None:
        """Make room for one key and let it in without counting a use; it is not pinned yet.

        Parameters
        ----------
        key : int
            Key to bring in; a resident one changes nothing.
        now : int
            Current access index.
        protect : collection of int
            Keys that must not leave for it, besides the pinned ones: those used at this moment, or predicted to be.

        Returns
        -------
        list of int or None
            Keys that left, in order; None where the prefetch is dropped: no evictable room, and nothing has changed.
        """
        if key in self.resident:
            return []
        if not self.policy.admits:
            return None
        size = self._bytes_of(key)
        if size > self.capacity_bytes:
            raise self._too_large({key: size}, size)
        chosen: dict[int, None] = {}
        room = self.capacity_bytes - self.used_bytes

        def allowed(candidate: int) -> bool:
            return candidate not in self._pins and candidate not in chosen and candidate not in protect

        while room < size:
            victim = self.policy.victim(allowed, now)
            if victim is None:
                return None
            chosen[victim] = None
            room += self.resident[victim]
        for victim in chosen:
            self._leave(victim)
        self._enter(key, size, now)
        return list(chosen)

    def pin(self, key: int) -> None:
        """Keep a resident key from leaving; pins are counted."""
        if key not in self.resident:
            raise InputError(f"{self.name}: pin", expected="a resident expert", got=f"key {key}, which is not resident")
        if key not in self._pins:
            self.pinned_bytes += self.resident[key]
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: int) -> None:
        """Take back one pin."""
        count = self._pins.get(key, 0)
        if not count:
            raise InputError(f"{self.name}: unpin", expected="a pinned expert", got=f"key {key}, which has no pin")
        if count > 1:
            self._pins[key] = count - 1
        else:
            del self._pins[key]
            self.pinned_bytes -= self.resident[key]

    def is_pinned(self, key: int) -> bool:
        """Tell whether a key has at least one pin."""
        return key in self._pins

    def evict(self, key: int) -> None:
        """Make one unpinned resident leave."""
        if key not in self.resident or key in self._pins:
            state = "pinned" if key in self._pins else "not resident"
            raise InputError(f"{self.name}: evict", expected="a resident expert without pins", got=f"key {key}, which is {state}")
        self._leave(key)

    def _enter(self, key: int, size: int, now: int) -> None:
        self.resident[key] = size
        self.used_bytes += size
        self.policy.touch(key, now, False, size)

    def _leave(self, key: int) -> None:
        self.used_bytes -= self.resident.pop(key)
        self.policy.remove(key)

    def _admissible(self, sizes: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Split misses, ascending, into those that fit into what room there is and the others."""
        room = self.capacity_bytes - self.used_bytes
        fit: list[int] = []
        rest: list[int] = []
        for key, size in sizes.items():
            (fit if size <= room else rest).append(key)
            room -= size if size <= room else 0
        return fit, rest

    def _too_large(self, sizes: Mapping[int, int], total: int) -> InputError:
        largest = max(sizes, key=lambda key: (sizes[key], -key))
        limit = f"at most {self.capacity_bytes} bytes, the pool's capacity"
        if sizes[largest] > self.capacity_bytes:
            fix = "enlarge the pool or use a smaller format"
            return InputError(f"{self.name}: expert key {largest}", expected=limit, got=f"{sizes[largest]} bytes", fix=fix)
        return InputError(f"{self.name}: layer-set", expected=limit, got=f"{total} bytes", fix="split it with split_waves")


def hottest(counts: NDArray[Any], bytes_per_expert: Sequence[int] | NDArray[Any], capacity_bytes: int, per_layer: bool) -> list[int]:
    """Choose a static set greedily by benefit per byte, which is count / bytes.

    An expert that no longer fits is passed over, and smaller ones behind it may still enter. Experts with count 0 fill what is left.

    Parameters
    ----------
    counts : (L, E) int or float
        Uses of each expert.
    bytes_per_expert : (L,) int
        Size of one expert of each layer.
    capacity_bytes : int
        Budget; of each layer where ``per_layer``, of all together otherwise.
    per_layer : bool
        Whether each layer has its own budget.

    Returns
    -------
    list of int
        Keys, the most valuable first (tie: the smaller key); layer after layer where ``per_layer``.
    """
    table = np.asarray(counts, dtype=np.float64)
    sizes = np.asarray(bytes_per_expert, dtype=np.int64)
    if table.ndim != 2 or sizes.shape != table.shape[:1]:
        raise InputError("static set", expected="counts (L, E) and bytes (L,)", got=f"{table.shape} and {sizes.shape}")
    if not np.isfinite(table).all() or (table < 0).any() or (sizes <= 0).any():
        raise InputError("static set", expected="finite counts of at least 0 and positive sizes", got="others")
    n_layers, n_experts = table.shape
    value = (table / sizes[:, None]).ravel()
    groups = np.split(np.arange(value.size), n_layers) if per_layer else [np.arange(value.size)]
    chosen: list[int] = []
    for group in groups:
        room = capacity_bytes
        for key in group[np.argsort(-value[group], kind="stable")].tolist():
            size = int(sizes[key // n_experts])
            if size <= room:
                chosen.append(key)
                room -= size
    return chosen
