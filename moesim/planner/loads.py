"""Owns the movement of experts: what a layer-set finds in place, what is loaded for it through the tiers, what is prefetched.

It emits load tasks into the planner's builder and keeps the pools of all tiers in logical order. It never sees a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from moesim.errors import MoesimError
from moesim.layout import Layout, PoolPlan
from moesim.planner.residency import Deps, Passing, Resident, Rooms, TierPool, Use
from moesim.planner.works import Works
from moesim.policies.cache import ExpertPool, future_uses, hottest, make_policy
from moesim.schedule import Dep, FragmentBuilder, Kind, Outcome

Group = dict[int, tuple[Resident, Outcome]]


def _found(resident: Resident) -> tuple[Resident, Outcome]:
    return resident, Outcome.PREFETCH if resident.prefetched else Outcome.CACHE


class Loader:
    """Pools of all tiers and the loads between them.

    Parameters
    ----------
    layout : Layout
    builder : FragmentBuilder
        Receives the load tasks.
    lane : dict
        Lane numbers by name.
    works : Works
    popularity : (L, E) array
        What static placement learns from.
    future : callable
        Yields (access index, keys) of every layer-set to come, for Belady's bound.

    Attributes
    ----------
    dropped_prefetches : int
        Predictions that found no evictable room.
    """

    def __init__(
        self, layout: Layout, builder: FragmentBuilder, lane: dict[str, int], works: Works, popularity: NDArray[np.int64],
        future: Callable[[], Iterable[tuple[int, list[int]]]],
    ) -> None:  # fmt: skip
        self.layout, self.builder, self.lane, self.works = layout, builder, lane, works
        self.moe, self.n_experts = layout.moe_layers, layout.model.n_experts
        self.main, self.disk = layout.main_tier, layout.disk
        self.tier_line = {tier: i for i, tier in enumerate(layout.capacities)}
        self.expert_line = layout.line_names.index("routed experts") if layout.pools else -1
        self.grown = layout.scenario.memory.arena == "grown"
        self.step = 0
        self.dropped_prefetches = 0
        self.combined: dict[int, int] = {}  # order of a layer use -> its combine task, which frees its buffer
        self._pins: dict[Use, list[tuple[str, int]]] = {}
        self._cause: tuple[int, Collection[int], Deps] = (0, (), [])  # of an eviction: access index, keys that must stay, what it waits for
        self.pools: dict[str, TierPool] = {}
        self.passing: dict[str, Passing] = {}
        self.at_start: dict[str, int] = {}
        self._kept_above: dict[str, set[int]] = {}  # by tier: what a static pool above keeps for good, and what others own
        taken: set[int] = set()
        for tier, plan in layout.pools.items():
            self._kept_above[tier] = taken | self._foreign(tier)
            self.pools[tier] = self._pool(plan, popularity, future, taken)
            self.at_start[tier] = self.pools[tier].used_bytes
            sizes = [layout.expert_bytes[layer] for layer in plan.layers]
            self.passing[tier] = Passing(plan.transient_bytes, sizes, sum(plan.counts))
            self.pools[tier].on_leave = self._leaves(tier)
        prefetch = layout.scenario.prefetch
        self.buffers: list[Passing] = []
        self._buffer_use: dict[int, Use] = {}
        if prefetch.on and prefetch.into == "buffers":
            sizes = [layout.expert_bytes[layer] for layer in self.moe]
            above = layout.pools[layout.tier_of(layout.expert_device[self.moe[0]])]
            first = sum(above.counts) + above.transient_slots  # slots are numbered through a tier
            self.buffers = [
                Passing(layout.layer_set * max(sizes), sizes, first + i * layout.layer_set, is_buffer=True) for i in range(prefetch.buffers)
            ]
        region = layout.hardware.storage[layout.disk].fast_region if layout.disk else None
        self.fast_share = region.share.value if region is not None else 0.0
        self.fast = frozenset(range(int(self.fast_share * len(self.moe) * self.n_experts)))  # file order: the first keys

    def _foreign(self, tier: str) -> set[int]:
        """Experts that an upper tier does not hold, as devices of other tiers own them."""
        if tier == self.main:
            return set()
        n, out = self.n_experts, set[int]()
        for i, layer in enumerate(self.moe):
            devices = self.layout.owners[layer]
            for k, device in enumerate(devices):  # expert e is owned by number e mod n
                if self.layout.tier_of(device) != tier:
                    out.update(range(i * n + k, (i + 1) * n, len(devices)))
        return out

    def _pool(
        self, plan: PoolPlan, popularity: NDArray[np.int64], future: Callable[[], Iterable[tuple[int, list[int]]]], taken: set[int]
    ) -> TierPool:
        """Build the caches of one tier and place what it holds from the start; ``taken`` lies in an upper static pool for good."""
        spec, layout = plan.spec, self.layout
        sizes = {self._index(layer): layout.expert_bytes[layer] for layer in plan.layers}
        uses = future_uses(future()) if spec.policy == "belady" else None
        per_layer = spec.scope == "layer"

        def bytes_of(key: int) -> int:
            return sizes[key // self.n_experts]

        if per_layer:
            order = {index: i for i, index in enumerate(sizes)}
            budgets = [count * size for count, size in zip(plan.counts, sizes.values(), strict=True)]
            first = np.concatenate([[0], np.cumsum(plan.counts)]).tolist()
            rooms = [Rooms(b, [s], f) for b, s, f in zip(budgets, sizes.values(), first, strict=False)]
        else:
            order = dict.fromkeys(sizes, 0)
            budgets = [plan.bytes]
            rooms = [Rooms(plan.bytes, list(sizes.values()))]
        caches = [ExpertPool(b, bytes_of, make_policy(spec.policy, uses), f"placement.pools.{plan.tier}") for b in budgets]
        pool = TierPool(caches, rooms, lambda key: order[key // self.n_experts], bytes_of)
        if spec.policy == "static" or spec.warm or not self.disk and plan.tier == self.main:  # without storage RAM is the origin
            chosen = self._hottest(plan, popularity, sizes, self._kept_above[plan.tier])
            pool.preload(chosen)
            below = layout.pools[self.main].spec
            if layout.keeps(spec) or below.policy != "static" and not below.inclusive:
                taken.update(chosen)
        return pool

    def _hottest(self, plan: PoolPlan, popularity: NDArray[np.int64], sizes: dict[int, int], taken: set[int]) -> list[int]:
        """The experts a pool should hold by benefit per byte (claim T4), those left out that are ``taken`` or another's."""
        counts = popularity[list(sizes)].astype(np.float64)
        if plan.spec.scope == "global":
            order = hottest(counts, list(sizes.values()), int(sum(sizes.values())) * self.n_experts, per_layer=False)
            budget = plan.bytes
            chosen = []
            for local in order:
                index = list(sizes)[local // self.n_experts]
                key = index * self.n_experts + local % self.n_experts
                if key not in taken and sizes[index] <= budget:
                    budget -= sizes[index]
                    chosen.append(key)
            return chosen
        chosen = []
        for row, (index, count) in enumerate(zip(sizes, plan.counts, strict=True)):
            ranked = np.argsort(-counts[row], kind="stable")
            keys = [index * self.n_experts + int(e) for e in ranked]
            chosen += [key for key in keys if key not in taken][:count]
        return chosen

    def _index(self, layer: int) -> int:
        return self.moe.index(layer)

    def _size(self, key: int) -> int:
        return self.layout.expert_bytes[self.moe[key // self.n_experts]]

    # ---- layer-sets

    def layer_set(self, tier: str, keys: list[int], issue: Deps, use: Use, wanted: Collection[int]) -> Iterator[Group]:
        """Bring a layer-set to a tier, in groups that are in place together: waves, or as many strangers as have slots to pass through.

        After each group the caller emits its FFN tasks and notes them in ``Resident.uses``; then the next group may take the room.
        ``wanted`` are the keys of this layer use and of its micro-batches to come. What was prefetched into a buffer or slot is used
        there, and does not enter the pool.
        """
        pool = self.pools[tier]
        passing = self._passing(tier, use)
        now = use[0] * len(self.moe) + use[1]
        self._unpin(tier, use, lambda key: key not in wanted)  # the set is known: mispredicted experts may leave
        passing.leave(use, [key for key in passing.held.get(use, {}) if key not in wanted])
        self._cause = (now, set(keys), issue)
        ahead = passing.held.get(use, {})
        group: Group = {key: _found(ahead[key]) for key in keys if key in ahead}
        left = [key for key in keys if key not in group]
        if not left and group:
            yield group
        while left:
            wave = pool.waves(left)[0]
            left = left[len(wave) :]
            hits, admitted, strangers = pool.access(wave, now)
            group |= {key: _found(pool.residents[key]) for key in hits}
            self._load(tier, admitted, {key: pool.residents[key] for key in admitted}, issue, use)
            group |= {key: (pool.residents[key], Outcome.MISS) for key in admitted}
            while True:
                part: list[int] = []
                while strangers and passing.free_bytes >= self._size(strangers[0]):
                    part.append(strangers.pop(0))
                    passing.enter(use, part[-1], self._size(part[-1]))
                held = passing.held.get(use, {})
                self._load(tier, part, {key: held[key] for key in part}, issue, use)
                group |= {key: (held[key], Outcome.MISS) for key in part}
                if not group and not held:
                    raise MoesimError(f"step {use[0]}, layer {self.moe[use[1]]}: no room to pass {len(strangers)} experts through {tier}")
                if group:
                    yield group
                group = {}
                if not strangers:
                    break
                passing.leave(use)
            if left:
                used = set(wave)
                self._unpin(tier, use, used.__contains__)

    def in_main(self, key: int) -> bool:
        """Whether an expert lies in main memory."""
        return key in self.pools[self.main].residents

    def near(self, tier: str, use: Use) -> set[int]:
        """Keys that a layer use finds in a tier: residents, and what was prefetched for it."""
        return {*self.pools[tier].residents, *self._passing(tier, use).held.get(use, {})}

    def _unpin(self, tier: str, use: Use, leaves: Callable[[int], bool]) -> None:
        """Take back pins of a layer use (docs/decisions/003-pins.md)."""
        pins = self._pins.get(use)
        if pins:
            for where, key in pins:
                if where == tier and leaves(key):
                    self.pools[where].unpin(key)
            self._pins[use] = [(where, key) for where, key in pins if where != tier or not leaves(key)]

    def release(self, tier: str) -> None:
        """Take back all pins of prefetched experts in a tier that must shrink: they may leave unused."""
        for use in list(self._pins):
            self._unpin(tier, use, lambda _key: True)

    def end_of_use(self, use: Use) -> None:
        """A layer-set has run: what was pinned or brought for it alone may leave."""
        for tier, key in self._pins.pop(use, ()):
            self.pools[tier].unpin(key)
        for passing in (*self.passing.values(), *self.buffers):
            passing.leave(use)

    def _passing(self, tier: str, use: Use) -> Passing:
        """Where experts pass through a tier: its transient slots, or the layer-set buffer of this use."""
        if not self.buffers or tier != self.layout.tier_of(self.layout.expert_device[self.moe[use[1]]]):
            return self.passing[tier]
        order = use[0] * len(self.moe) + use[1]
        index = order % len(self.buffers)
        if self._buffer_use.get(index) != use:
            self._buffer_use[index] = use
            freed_by = self.combined.pop(order - len(self.buffers), -1)
            self.buffers[index].reopen([(freed_by, Dep.BUFFER)] if freed_by >= 0 else [])
        return self.buffers[index]

    # ---- loads

    def _load(self, tier: str, keys: Sequence[int], into: dict[int, Resident], issue: Deps, use: Use, prefetch: bool = False) -> None:
        """Emit the loads of experts of one layer into their rooms in a tier, through the main tier where that lies between."""
        if not keys:
            return
        if tier == self.main:
            self._move(self.disk, tier, keys, into, {}, issue, use, prefetch)
            return
        pool, passing = self.pools[self.main], self.passing[self.main]
        exclusive = not self.layout.pools[self.main].spec.inclusive
        now = use[0] * len(self.moe) + use[1]
        for wave in pool.waves(keys):
            hits, admitted, refused = pool.access(wave, now)
            self._move(self.disk, self.main, admitted, pool.residents, {}, issue, use, prefetch)
            ready = [*hits, *admitted]
            while ready or refused:
                part: list[int] = []
                while refused and passing.free_bytes >= self._size(refused[0]):
                    part.append(refused.pop(0))
                    passing.enter(use, part[-1], self._size(part[-1]))
                held = passing.held.get(use, {})
                self._move(self.disk, self.main, part, held, {}, issue, use, prefetch)
                if not ready and not part:
                    raise MoesimError(f"step {use[0]}, layer {self.moe[use[1]]}: no room to pass experts through {self.main}")
                below = {key: pool.residents[key] for key in ready} | {key: held[key] for key in part}
                self._move(self.layout.link(self.main, tier), tier, sorted(below), into, below, issue, use, prefetch)
                self._keep_below(tier, ready, exclusive)
                passing.leave(use, part)
                ready = []

    def _keep_below(self, tier: str, keys: Sequence[int], exclusive: bool) -> None:
        """Inclusive: who entered the upper tier keeps its place below. Exclusive: it gives it up."""
        below = self.pools[self.main]
        for key in keys:
            if key in self.pools[tier].residents and below.caches[below.cache_of(key)].policy.admits:
                if exclusive:
                    below.drop(key)
                else:
                    below.pin(key)

    def _leaves(self, tier: str) -> Callable[[int, Resident], None]:
        """What happens when an expert leaves a tier. Weights are read-only, so leaving is free, unless the tier below is exclusive."""

        def leave(key: int, resident: Resident) -> None:
            if tier == self.main:
                return
            below = self.pools[self.main]
            cache = below.caches[below.cache_of(key)]
            if not cache.policy.admits:
                return
            if self.layout.pools[self.main].spec.inclusive:
                if cache.is_pinned(key):
                    below.unpin(key)
                return
            now, protect, issue = self._cause
            room = None if key in below.residents else below.prefetch(key, now, protect)
            if room is None:
                return
            after = [(task, Dep.DATA) for task in (resident.uses or resident.loads)]
            self._move(
                self.layout.link(tier, self.main),
                self.main,
                [key],
                below.residents,
                {},
                [*issue, *after],
                (self.step, key // self.n_experts),
                False,
            )
            resident.reads = [room.loads[-1]]

        return leave

    def _move(
        self,
        lane: str,
        tier: str,
        keys: Sequence[int],
        into: dict[int, Resident],
        below: dict[int, Resident],
        issue: Deps,
        use: Use,
        prefetch: bool,
    ) -> None:
        """Emit the load tasks of one hop: one an expert, one a matrix, or one for all, as the granularity says."""
        if not keys:
            return
        layer = self.moe[use[1]]
        together = self.layout.scenario.granularity == "layer"
        for group in [list(keys)] if together else [[key] for key in keys]:
            pieces = self.works.hop(lane, layer, len(group), fast=all(key in self.fast for key in group))
            tasks: list[int] = []
            for p, work in enumerate(pieces):
                deps = list(issue)
                for key in group:
                    source = below[key].loads if key in below else []
                    deps += [(t, Dep.DATA) for t in (source[p : p + 1] if len(source) == len(pieces) else source)]
                    deps += into[key].waits if p == 0 else []
                if p:
                    deps.append((tasks[-1], Dep.DATA))
                tasks.append(self.builder.task(
                    Kind.LOAD, self.lane[lane], work, deps, step=self.step, layer=layer, expert=group[0] % self.n_experts if len(group) == 1 else -1,
                    use=(use[0], layer), prefetch=prefetch, slot=into[group[0]].slot if len(group) == 1 else -1,
                ))  # fmt: skip
            for key in group:
                resident = into[key]
                resident.loads = tasks
                if len(group) > 1:
                    self.builder.member(tasks[0], key % self.n_experts, resident.slot)
                if self.grown and self.pools[tier].residents.get(key) is resident:
                    self.builder.memory(tasks[0], False, self.tier_line[tier], self.expert_line, resident.grows_bytes)
                if key in below:
                    below[key].reads = [tasks[-1]]

    # ---- prefetch and refresh

    def prefetch(self, tier: str, keys: Sequence[int], issue: Deps, use: Use) -> None:
        """Bring experts of one layer use in ahead of it, the likeliest first; what finds no room is dropped and counted."""
        pool = self.pools[tier]
        passing = self._passing(tier, use)
        static = bool(self.buffers) or not pool.caches[0].policy.admits
        now = use[0] * len(self.moe) + use[1]
        wanted = set(keys)
        self._cause = (now, wanted, issue)
        keep = 0 if self.buffers else self.layout.model.top_k * max(passing.sizes)
        for key in keys:
            if key in pool.residents or key in passing.held.get(use, {}):
                continue
            size = self._size(key)
            if static:
                if passing.free_bytes < size + keep:
                    self.dropped_prefetches += 1
                    continue
                room = passing.enter(use, key, size)
            else:
                found = pool.prefetch(key, now, wanted, keep if self.layout.pools[tier].spec.scope == "global" else size)
                if found is None:
                    self.dropped_prefetches += 1
                    continue
                room = found
                pool.pin(key)
                self._pins.setdefault(use, []).append((tier, key))
            room.prefetched = True
            self._load(tier, [key], {key: room}, issue, use, prefetch=True)

    def refresh(self, tier: str, counts: NDArray[np.int64]) -> None:
        """Choose the residents of a static pool anew and load the newcomers (claim T4)."""
        pool, plan = self.pools[tier], self.layout.pools[tier]
        sizes = {self._index(layer): self.layout.expert_bytes[layer] for layer in plan.layers}
        wanted = self._hottest(plan, counts, sizes, self._kept_above[tier])
        self._cause = (self.step * len(self.moe), set(wanted), [])
        for index in range(len(pool.caches)):
            held = [key for key in pool.residents if pool.cache_of(key) == index]
            target = [key for key in wanted if pool.cache_of(key) == index]
            leaving = [key for key in held if key not in set(target)]
            arriving = [key for key in target if key not in set(held)]
            for old, new in zip(reversed(leaving), arriving, strict=False):
                if self._size(old) != self._size(new):
                    continue  # of unequal size: stays until a like one moves
                resident = pool.swap(old, new)
                resident.prefetched = True
                self._load(tier, [new], {new: resident}, [], (self.step, new // self.n_experts), prefetch=True)

    def remap(self, counts: NDArray[np.int64]) -> None:
        """Put the most used experts into the drive's fast region (claim P6); the rewriting itself is not timed."""
        ranked = np.argsort(-counts.ravel(), kind="stable")
        self.fast = frozenset(ranked[: len(self.fast)].tolist())
