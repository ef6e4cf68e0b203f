"""Owns the compiled planner: the reference planner's fragments, array for array, at compiled speed where the common case is met.

It turns a run into the tables of ``planner_kernel.py`` and the kernel's columns into fragments; all that is decided before the first
step (pools, what they hold, memory) is the reference planner's. Works are built once a fragment and kind, not once a task.

The first use after installation compiles for some seconds and caches the machine code on disk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.hardware import kind
from moesim.layout import Layout
from moesim.planner import Planner
from moesim.planner import kernel as pk
from moesim.schedule import Fragment, Ints, Work
from moesim.trace import RoutingTrace
from moesim.workload import Step, Steps

STEPS_PER_FRAGMENT, ROWS_PER_FRAGMENT = 64, 4096  # a fragment ends where one of both is reached
_POLICIES = {"static": pk.STATIC, "lru": pk.LRU, "lfu": pk.LFU}
TYPES = (  # kind, step, layer, expert, lane, step and layer of use, prefetch, slot, work; whether a load grew the arena
    np.int8, np.int32, np.int16, np.int16, np.int8, np.int32, np.int16, np.bool_, np.int32, np.int32, np.bool_,
)  # fmt: skip
_SOURCES = {"none": pk.NONE, "router": pk.ROUTER, "previous": pk.PREVIOUS, "both": pk.BOTH}


def uncovered(planner: Planner, granularities: tuple[str, ...] = ("expert",)) -> str:
    """Return why the kernel does not cover a planner that has not begun yet; empty where it does."""
    layout, scenario = planner.layout, planner.scenario
    if planner.micro_batches > 1:
        return "micro-batches"
    if scenario.granularity not in granularities:
        return f"granularity {scenario.granularity}"
    if layout.in_place:
        return "experts computed in place"
    if scenario.placement.stream_from != "never":
        return "streamed layers"
    if any(len(devices) > 1 for devices in layout.owners):
        return "experts split among devices"
    devices = [*layout.attention_device, layout.head_device]
    if any(not _share_memory(layout, a, b) and len(_hops(layout, a, b)) > 1 for a, b in pairwise(devices)):
        return "hidden states that pass through main memory"
    if planner.loader.buffers:
        return "prefetch into buffers"
    if scenario.memory.kv_from_experts:
        return "a KV cache that grows into the expert pool"
    if kind(scenario.placement.lookup) == "ssd" and layout.model.lookup_tables:
        return "lookup tables on storage"
    if scenario.io.fast_map == "refreshed" or any(plan.spec.refresh_tokens for plan in layout.pools.values()):
        return "a refreshed placement"
    for layer in layout.moe_layers:
        if layout.expert_device[layer] != layout.attention_device[layer]:
            return "attention and experts on different devices"
        if not _share_memory(layout, layout.attention_device[layer], layout.shared_device[layer]):
            return "a shared expert that hidden states are copied to"
    return _uncovered_pools(planner)


def _uncovered_pools(planner: Planner) -> str:
    layout, main = planner.layout, planner.layout.main_tier
    tops = {layer: layout.tier_of(layout.expert_device[layer]) for layer in layout.moe_layers}
    for tier in dict.fromkeys(tops.values()):
        plan = layout.pools[tier]
        if plan.spec.policy not in _POLICIES:
            return f"policy {plan.spec.policy}"
        if plan.spec.scope != "layer":
            return "a pool of all layers"
        if plan.transient_slots and len({layout.expert_bytes[layer] for layer in plan.layers}) > 1:
            return "transient slots for experts of several sizes"
    above = [(layer, tier) for layer, tier in tops.items() if tier != main]
    if not above:
        return ""
    below = layout.pools[main].spec
    if below.policy != "static" and not below.inclusive:
        return "an exclusive RAM cache"
    held = planner.loader.pools[main].residents
    for layer, tier in above:
        index = planner.moe_index[layer]
        kept = planner.loader.pools[tier].residents if layout.keeps(layout.pools[tier].spec) else {}
        keys = range(index * planner.n_experts, (index + 1) * planner.n_experts)
        if not all(key in held or key in kept for key in keys):
            return "experts that pass through RAM"
    return ""


def _share_memory(layout: Layout, source: str, target: str) -> bool:
    """Whether hidden states need no copy from one device to another."""
    shared = layout.scenario.pipeline.hidden_states == "shared"
    return source == target or shared and layout.tier_of(source) == layout.tier_of(target)


def _hops(layout: Layout, source: str, target: str) -> tuple[str, ...]:
    """The lanes that copy hidden states from one device to another."""
    tiers = layout.tier_of(source), layout.tier_of(target)
    return (source,) if tiers[0] == tiers[1] else layout.route(*tiers)


def merged(found: Iterable[Work], work: NDArray[Any]) -> tuple[tuple[Work, ...], NDArray[Any]]:
    """Return the distinct ones of works, whose codes may differ though they are equal, and the column of tasks that counts in them."""
    rows: dict[Work, int] = {}
    merged = [rows.setdefault(it, len(rows)) for it in found]
    return tuple(rows), np.array(merged, np.int32)[work] if len(rows) < len(merged) else work


class CompiledPlanner(Planner):
    """A planner whose ``fragments`` are compiled where ``uncovered`` is empty, and the reference's elsewhere; see ``Planner``.

    Attributes
    ----------
    uncovered : str
        Why the reference plans this run; empty where the kernel does.
    """

    def __init__(
        self, layout: Layout, trace: RoutingTrace, steps: Steps, popularity: NDArray[np.int64],
        predicted: NDArray[np.int16] | None = None, prediction_source: str = "none",
    ) -> None:  # fmt: skip
        super().__init__(layout, trace, steps, popularity, predicted, prediction_source)
        self.uncovered = uncovered(self)
        self._run = np.zeros(pk.RUN_FIELDS, np.int64)
        self._run[pk.GATE] = -1

    @property
    def dropped_prefetches(self) -> int:
        return self.loader.dropped_prefetches + int(self._run[pk.DROPPED])

    def fragments(self, steps_per_fragment: int = STEPS_PER_FRAGMENT) -> Iterator[Fragment]:
        """Plan the run; yield a fragment every few steps. Ends early where memory runs out."""
        if self.uncovered:
            yield from super().fragments(steps_per_fragment)
            return
        if self.out_of_memory is not None:
            return
        self._tables(steps_per_fragment)
        coming = iter(self.steps)
        upcoming = next(coming, None)
        while upcoming is not None:
            steps: list[Step] = []
            changes: list[tuple[int, int, int, int]] = []
            rows = 0
            while upcoming is not None and len(steps) < steps_per_fragment and rows < ROWS_PER_FRAGMENT:
                self._grow_kv(upcoming)
                if self.out_of_memory is not None:
                    break
                for tier, line, delta in self._changes:
                    if delta:
                        changes.append((len(steps), self.tiers.index(tier), self.lines.index(line), delta))
                steps.append(upcoming)
                rows += upcoming.rows.size
                upcoming = next(coming, None)
            if steps:
                yield self._plan(steps, upcoming, changes)
            if self.out_of_memory is not None:
                return

    # ---- tables of the run

    def _tables(self, most_steps: int) -> None:
        """Set down layers, pools and what they hold, as the kernel reads them."""
        layout, works, n_layers = self.layout, self.works, self.layout.model.n_layers
        layers = self._layers = np.full((n_layers, pk.HELD + self.n_experts), -1, np.int64)
        attention = [(layout.model.attention_at(x), *(works.attention(x, 1, 1, context) for context in (1, 2))) for x in range(n_layers)]
        self._attention, kinds = _alike(attention)  # alike in kind, weights and bytes per token of context: the same work in every step
        layers[:, pk.ATTENTION_KIND] = kinds
        experts, kinds = _alike([works.expert_pieces(layout.expert_device[layer], layer, 1)[0] for layer in self.moe])
        self._ffn = [self.moe[i] for i in experts]
        # work codes: experts by kind and tokens, attention by step of the fragment and kind, then what recurs in every step
        layers[list(self.moe), pk.FFN_CODE] = np.array(kinds, np.int64) * (layout.most_tokens + 1)
        self._first_attention = len(self._ffn) * (layout.most_tokens + 1)
        self._first_constant = self._first_attention + most_steps * len(self._attention)
        self._constant: dict[Work, int] = {}
        self._variants: dict[int, int] = {}  # by tokens of a step: its place in ``_codes``
        self._codes = np.zeros((0, n_layers, 5), np.int64)
        self._heads: dict[tuple[int, int], tuple[int, int]] = {}  # by tokens that a step emits, and its sequences
        layers[: len(self.moe), pk.LAYER] = self.moe
        for layer, device in enumerate(layout.attention_device):
            layers[layer, pk.LANE] = self.lane[device]
            layers[layer, pk.COPY_LANE] = self._copy_lane(layout.attention_device[max(layer - 1, 0)], device)
            if layer not in self.moe_index:
                continue
            layers[layer, pk.MOE] = self.moe_index[layer]
            if works.shared_expert(layer, 1) is not None:
                layers[layer, pk.SHARED_LANE] = self.lane[layout.shared_device[layer]]
            tier = layout.tier_of(device)
            hop = layout.disk if tier == layout.main_tier else layout.link(layout.main_tier, tier)
            if hop:
                layers[layer, pk.LOAD_LANE] = self.lane[hop]
                layers[layer, pk.LOAD_CODE], layers[layer, pk.FAST_CODE] = (
                    self._code(works.hop(hop, layer, 1, x)[0]) for x in (False, True)
                )
        run = self._run
        run[pk.DISTANCE] = self.scenario.prefetch.distance if self.predicted is not None else 0
        run[pk.SOURCE], run[pk.FAST_KEYS] = _SOURCES[self.prediction_source], len(self.loader.fast)
        run[pk.ATTENTION_CODE], run[pk.ATTENTION_KINDS] = self._first_attention, len(self._attention)
        run[pk.HEAD_LANE] = self.lane[layout.head_device]
        run[pk.HEAD_COPY_LANE] = self._copy_lane(layout.attention_device[-1], layout.head_device)
        run[pk.KEEP], run[pk.N_MOE] = layout.model.top_k, len(self.moe)
        nothing = np.full((1, 1, 1), -1, np.int16)
        self._ids, self._ahead = _fixed(self.trace.expert_ids), _fixed(nothing if self.predicted is None else self.predicted)
        self._start()

    def _copy_lane(self, source: str, target: str) -> int:
        """The lane that copies hidden states from one device to another, -1 where none needs to."""
        return -1 if _share_memory(self.layout, source, target) else self.lane[_hops(self.layout, source, target)[0]]

    def _start(self) -> None:
        """Set down the pools of the experts' own tiers as they are before the first step."""
        layout, layers, end = self.layout, self._layers, self.n_experts
        experts = self._experts_of = np.zeros((len(self.moe), end + 1), pk.EXPERT)
        for field in ("slot", "loaded_by", "used_by", "touched"):
            experts[field] = -1
        self._set = np.zeros(end + 1, pk.PLACE)
        slots = max((plan.transient_slots for plan in layout.pools.values()), default=0)
        rings = self._rings = np.zeros((len(self.tiers), pk.FREED + 2 * max(slots, 1)), np.int64)
        for tier, plan in layout.pools.items():
            ring = rings[self.tiers.index(tier)]
            ring[pk.FREE] = ring[pk.FRESH_SLOTS] = plan.transient_slots
            ring[pk.FRESH_SLOT] = sum(plan.counts)
        for i, layer in enumerate(self.moe):
            tier = layout.tier_of(layout.expert_device[layer])
            pool, size = self.loader.pools[tier], layout.expert_bytes[layer]
            index = pool.cache_of(i * end)
            cache, rooms = pool.caches[index], pool.rooms[index]
            row = layers[layer]
            row[pk.POLICY], row[pk.RING] = _POLICIES[layout.pools[tier].spec.policy], self.tiers.index(tier)
            row[pk.CAPACITY], row[pk.SIZE] = cache.capacity_bytes // size, cache.used_bytes // size
            row[pk.UNTOUCHED], row[pk.NEXT_SLOT] = rooms.untouched // size, rooms.next_slot
            row[pk.PINS] = row[pk.N_HELD] = 0
            inside = [key - i * end for key in cache.resident]  # in the order in which they entered
            experts["slot"][i, inside] = [pool.residents[key].slot for key in cache.resident]
            ring_of = [end, *inside]
            experts["newer"][i, ring_of], experts["older"][i, ring_of] = [*inside, end], [ring_of[-1], *ring_of[:-1]]

    # ---- works

    def _code(self, work: Work) -> int:
        return self._first_constant + self._constant.setdefault(work, len(self._constant))

    def _variant(self, tokens: int) -> int:
        """The place of a step's size in ``_codes``."""
        if tokens not in self._variants:
            self._variants[tokens] = len(self._variants)
            table = np.zeros((1, *self._codes.shape[1:]), np.int64)
            for layer, row in enumerate(self._layers):
                works: dict[Any, Work | None] = {}
                if row[pk.COPY_LANE] >= 0:
                    works[pk.COPY_CODE] = self.works.copy(self.lanes[row[pk.COPY_LANE]].name, tokens)
                if layer in self.moe_index:
                    works[pk.ROUTER_CODE] = self.works.router(layer, tokens)
                    works[pk.SHARED_CODE] = self.works.shared_expert(layer, tokens)
                    works[pk.COMBINE_CODE] = self.works.combine(layer, tokens)
                else:
                    works[pk.DENSE_CODE] = self.works.dense_ffn(layer, tokens)
                for field, work in works.items():
                    if work is not None:
                        table[0, layer, field] = self._code(work)
            self._codes = np.concatenate([self._codes, table])
        return self._variants[tokens]

    def _works_of(self, codes: Sequence[int], steps: Sequence[Step]) -> list[Work]:
        """The works of codes of one fragment."""
        constant, works = list(self._constant), []
        for code in codes:
            if code >= self._first_constant:
                work = constant[code - self._first_constant]
            elif code >= self._first_attention:
                place, which = divmod(code - self._first_attention, len(self._attention))
                step = steps[place]
                sequences, new = step.rows.shape
                work = self.works.attention(self._attention[which], sequences, new, step.context + new)
            else:
                which, tokens = divmod(code, self.layout.most_tokens + 1)
                layer = self._ffn[which]
                work = self.works.expert_pieces(self.layout.expert_device[layer], layer, tokens)[0]
            works.append(work)
        return works

    # ---- a fragment

    def _steps_table(self, steps: Sequence[Step]) -> Ints:
        """Steps as the kernel reads them."""
        table: list[tuple[int, ...]] = []
        first_row = 0
        for step in steps:
            sequences, new = step.rows.shape
            tokens = sequences * new
            table.append((step.index, tokens, first_row, new, self._variant(tokens), *self._ends(step.emits, sequences), -1, -1))
            first_row += tokens
        return np.array(table, np.int64)

    def _ends(self, emits: int, sequences: int) -> tuple[int, int]:
        """Work codes of the head of a step and of the copy before it (-1: none)."""
        key = emits, sequences
        if key not in self._heads:
            lane = self._run[pk.HEAD_COPY_LANE]
            copied = self._code(self.works.copy(self.lanes[lane].name, sequences)) if lane >= 0 else -1
            self._heads[key] = self._code(self.works.head(emits)), copied
        return self._heads[key]

    def _room_for(self, table: Ints, n: int) -> tuple[int, int]:
        """The most tasks and the most accesses that ``n`` steps can have."""
        used = np.minimum(table[:, pk.TOKENS] * self.layout.model.top_k, self.n_experts) * len(self.moe)
        ahead = np.maximum(used[:n], np.append(used, 0)[1 : n + 1]) if self._run[pk.DISTANCE] else 0
        return int((5 * len(self._layers) + 2 + 2 * used[:n] + ahead).sum()), int(used[:n].sum())

    def _plan(self, steps: Sequence[Step], upcoming: Step | None, changes: Sequence[tuple[int, int, int, int]]) -> Fragment:
        """Run the kernel over some steps and take its columns."""
        seen = [*steps, upcoming] if upcoming is not None else steps
        table = self._steps_table(seen)
        most, most_used = self._room_for(table, len(steps))
        taken: list[Any] = [np.empty(most, dtype) for dtype in TYPES]
        deps: list[Any] = [np.empty(most + 1, np.int64), np.empty(3 * most, np.int64), np.empty(3 * most, np.int8)]
        access = np.empty((most_used, 6), np.int64)
        run = self._run
        first = run[pk.BASE] = run[pk.TASK]
        works = np.full((2, self._first_constant + len(self._constant)), -1, np.int64)
        run[[pk.N_DEPS, pk.N_WORKS, pk.N_ACCESS]] = 0
        pk.plan_steps(
            len(steps), run, table, np.concatenate([step.rows.ravel() for step in seen]), self._ids, self._ahead, self._codes, self._layers,
            self._experts_of, self._rings, self._set, works, access, *taken, *deps,
        )  # fmt: skip
        n, n_deps, n_access = int(run[pk.TASK] - first), int(run[pk.N_DEPS]), int(run[pk.N_ACCESS])
        for column, length in zip((*taken, *deps, access), (*[n] * len(taken), n + 1, n_deps, n_deps, n_access), strict=True):
            column.resize((length, *column.shape[1:]), refcheck=False)  # gives back what was too much
        *columns, work, grew = taken
        distinct, work = merged(self._works_of(works[pk.CODE_OF_ROW, : run[pk.N_WORKS]].tolist(), steps), work)
        table = table[: len(steps)]
        ends = np.empty((len(steps), 6), np.int64)
        ends[:, :3] = table[:, [pk.INDEX, pk.FIRST_TASK, pk.LAST_TASK]]
        ends[:, 3:] = [(step.phase, step.rows.size, step.emits) for step in steps]
        memory = self._memory(table, changes, grew, columns[2], int(first))
        return Fragment(int(first), *[*columns, work, distinct, *deps, memory, access, ends])

    def _memory(
        self, table: Ints, changes: Sequence[tuple[int, int, int, int]], grew: NDArray[Any], layers: NDArray[np.int16], first: int
    ) -> Ints:
        """Memory that a KV cache takes when its step's first task starts, and loads that find untouched room in a grown arena.

        ``grew`` (N,) counts experts that do, by task.
        """
        kv = [(int(table[place, pk.FIRST_TASK]), 0, tier, line, delta) for place, tier, line, delta in changes]
        out = np.array(kv, np.int64).reshape(-1, 5)
        grown: Ints = np.flatnonzero(grew if self.loader.grown else [])
        if len(grown):
            grown = np.repeat(grown, grew[grown].astype(np.intp))
            layer = layers[grown]
            rows = np.zeros((len(grown), 5), np.int64)
            rows[:, 0], rows[:, 2], rows[:, 3] = grown + first, self._layers[layer, pk.RING], self.loader.expert_line
            rows[:, 4] = np.array(self.layout.expert_bytes)[layer]
            out = np.concatenate([out, rows])
            out = out[np.argsort(out[:, 0], kind="stable")]
        return out


def _fixed(ids: NDArray[np.int16]) -> NDArray[np.int16]:
    """The same, in the one layout that the kernel is compiled for."""
    view = np.ascontiguousarray(ids, np.int16).view()
    view.flags.writeable = False
    return view


def _alike(values: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The first place of each distinct value, and for every value its number among the distinct ones."""
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(value, len(numbers)) for value in values]
    return [kinds.index(number) for number in range(len(numbers))], kinds
