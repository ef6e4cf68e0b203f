"""Owns planning: the one place where model, placement, caches, prefetch and trace meet and become a Schedule.

The planner walks steps, layers and layer-sets in logical order. What hits, what is loaded and who leaves is decided here and
is the same in every engine; only time is left open. Within a layer tasks appear as timing rule 2 says: attention, router,
demand loads, ffn, combine, prefetches. ``loads.py`` moves experts, ``works.py`` says what each task asks of the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from moesim.cost import CostModel
from moesim.hardware import kind
from moesim.layout import Layout
from moesim.ledger import OutOfMemory, spread
from moesim.planner.forecast import Forecast, Sites
from moesim.planner.handover import LINE as HANDOVER
from moesim.planner.handover import Handover
from moesim.planner.loads import Group, Loader
from moesim.planner.residency import Deps
from moesim.planner.works import Works
from moesim.schedule import Dep, Fragment, FragmentBuilder, Kind, Work
from moesim.trace import RoutingTrace
from moesim.workload import Step, Steps

STEPS_PER_FRAGMENT = 16
FAST_MAP = "fast map"  # beside the tiers among what is refreshed


class Planner:
    """Plans a run step by step; iterate ``fragments()`` once.

    Parameters
    ----------
    layout : Layout
        Where everything lies.
    trace : RoutingTrace
        Routing with as many layers as the model has MoE layers.
    steps : Steps
        Which rows each step runs.
    popularity : (L, E) array
        Selections that static placement learns from (of the training part of the trace).
    predicted : (T, L, K) int16 or None
        Experts predicted for each cell, best first, -1 where there is no prediction.
    prediction_source : str
        "none", "router", "previous" or "both": the task that yields the prediction.

    Attributes
    ----------
    out_of_memory : OutOfMemory or None
        Set when a step does not fit; planning stops before that step.
    """

    def __init__(
        self, layout: Layout, trace: RoutingTrace, steps: Steps, popularity: NDArray[np.int64],
        predicted: NDArray[np.int16] | None = None, prediction_source: str = "none",
    ) -> None:  # fmt: skip
        self.layout, self.trace, self.steps = layout, trace, steps
        self.predicted, self.prediction_source = predicted, prediction_source
        self.scenario = layout.scenario
        self.n_experts = layout.model.n_experts
        self.moe = layout.moe_layers
        self.moe_index = {layer: i for i, layer in enumerate(self.moe)}
        self.lanes = layout.lanes
        self.lane = {lane.name: i for i, lane in enumerate(self.lanes)}
        self.tiers, self.lines = tuple(layout.capacities), layout.line_names
        self.works = Works(layout)
        self.builder = FragmentBuilder(len(self.lanes))
        if "costs" in layout.depends_on:
            self.builder = Forecast(self.lanes, CostModel(layout.hardware))
        self.handover = Handover(layout, self.builder, self.lane, self.works)
        self.loader = Loader(layout, self.builder, self.lane, self.works, popularity, self._future)
        self.sites: Sites | None = None
        if isinstance(self.builder, Forecast):
            self.sites = Sites(layout, self.works, self.builder, self.lane, self.loader.in_main)
        self.micro_batches = min(self.scenario.pipeline.micro_batches, self.scenario.workload.batch)
        self.out_of_memory = self._fits_at_start()
        self._kv_now = dict.fromkeys(layout.kv_tiers, 0) | {tier: size for tier, line, size in self._initial() if line == "KV cache"}
        io = self.scenario.io
        periods = {tier: plan.spec.refresh_tokens for tier, plan in layout.pools.items()}
        periods[FAST_MAP] = io.fast_map_refresh_tokens if io.fast_map == "refreshed" else 0
        self._periods = {name: every for name, every in periods.items() if every}  # tokens between refreshes, by what is refreshed
        self._since = dict.fromkeys(self._periods, 0)
        self._window = {name: np.zeros_like(popularity) for name in self._periods}  # selections since the last refresh
        self._routers: dict[int, list[int]] = {}

    @property
    def dropped_prefetches(self) -> int:
        return self.loader.dropped_prefetches

    # ---- before the first step

    def _future(self) -> Iterator[tuple[int, list[int]]]:
        """Access index and keys of every layer-set of the run, for Belady's bound."""
        for step in self.steps:
            ids = self.trace.expert_ids[step.rows.ravel()]
            for i in range(len(self.moe)):
                yield step.index * len(self.moe) + i, [i * self.n_experts + int(e) for e in np.unique(ids[:, i]) if e >= 0]

    def _initial(self) -> Iterator[tuple[str, str, int]]:
        memory, cached = self.scenario.memory, self.scenario.workload.cached_tokens
        for line in self.layout.ledger.lines:
            size = line.bytes
            if line.pool == "experts" and memory.arena == "grown":
                size = self.loader.at_start[line.tier]
            elif line.name == "KV cache" and memory.kv != "maximum":
                size = self.layout.kv_bytes(line.tier, cached)
            elif line.name == HANDOVER:
                size = 0
            yield line.tier, line.name, size

    def initial_memory(self) -> list[tuple[int, int, int]]:
        """What is in memory before the first task: (tier, line, bytes)."""
        return [(self.tiers.index(tier), self.lines.index(line), size) for tier, line, size in self._initial()]

    def _fits_at_start(self) -> OutOfMemory | None:
        """Everything but a KV cache that grows must fit before the first step."""
        grows = self.scenario.memory.kv != "maximum"
        for tier, capacity in self.layout.capacities.items():
            total = 0
            for line in (x for x in self.layout.ledger.lines if x.tier == tier):
                total += 0 if line.pool == "kv" and grows else line.bytes
                if total > capacity.usable_bytes:
                    return OutOfMemory(tier, -1, total, capacity.usable_bytes, line.name)
        return None

    # ---- steps

    def fragments(self, steps_per_fragment: int = STEPS_PER_FRAGMENT) -> Iterator[Fragment]:
        """Plan the run; yield a fragment every few steps. Ends early where memory runs out."""
        if self.out_of_memory is not None:
            return
        pending = 0
        for step, upcoming in zip(self.steps, chain(islice(self.steps, 1, None), [None]), strict=True):
            self._begin(step.index)
            self._grow_kv(step)
            if self.out_of_memory is not None:
                break
            self._step(step, upcoming)
            pending += 1
            if pending == steps_per_fragment:
                yield self.builder.build()
                pending = 0
        if pending:
            yield self.builder.build()

    def _begin(self, index: int) -> None:
        """Begin a step: what is emitted from here on belongs to it."""
        self._first, self.loader.step, self.handover.step = self.builder.next_task, index, index

    def _grow_kv(self, step: Step) -> None:
        """Make room for the tokens of a step: note what changes when its first attention starts, or set ``out_of_memory``."""
        memory, layout = self.scenario.memory, self.layout
        context = step.context + step.rows.shape[1]
        self._changes: list[tuple[str, str, int]] = []  # tier, line, bytes
        self._room: Deps = []  # what must end before the KV cache takes room of experts
        if memory.kv == "maximum" and memory.kv_bytes is None and context <= layout.context_tokens:
            return
        for tier, now in self._kv_now.items():
            need = layout.kv_bytes(tier, context)
            usable = layout.capacities[tier].usable_bytes
            if memory.kv == "maximum":
                if need > now:
                    self.out_of_memory = OutOfMemory(tier, step.index, layout.fixed_bytes(tier) + need, usable, "KV cache")
                continue
            fixed = layout.fixed_bytes(tier)
            experts = layout.pools[tier].bytes if tier in layout.pools else 0
            over = fixed + need - usable
            if over > 0 and (not memory.kv_from_experts or over > experts or not self._shrink(tier, experts - over)):
                self.out_of_memory = OutOfMemory(tier, step.index, fixed + need, usable, "KV cache")
            self._changes.append((tier, "KV cache", need - now))
            self._kv_now[tier] = need

    def _shrink(self, tier: str, experts_bytes: int) -> bool:
        """Shrink a tier's expert pools to a budget (claim M5); return whether every layer can still be served."""
        plan, pool = self.layout.pools[tier], self.loader.pools[tier]
        if plan.spec.policy == "static" and not plan.transient_slots and not self.loader.buffers and not self.layout.in_place:
            return False  # a miss could not pass through
        sizes = [self.layout.expert_bytes[layer] for layer in plan.layers]
        if plan.spec.scope == "global":
            one = sizes[0] if len(set(sizes)) == 1 else 1
            budgets = [experts_bytes // one * one]
        else:
            budgets = [count * size for count, size in zip(spread(experts_bytes, sizes, [self.n_experts] * len(sizes)), sizes, strict=True)]
        if plan.spec.policy != "static" and min(budgets) < (max(sizes) if plan.spec.scope == "global" else 1):
            return False
        self.loader.release(tier)
        for i, budget in enumerate(budgets):
            before = pool.caches[i].capacity_bytes
            if budget >= before:
                continue
            given = pool.resize(i, budget)
            if given is None:
                return False
            touched, waits = given
            self._changes.append((tier, "routed experts", -(touched if self.scenario.memory.arena == "grown" else before - budget)))
            self._room += waits
        return True

    def _step(self, step: Step, upcoming: Step | None) -> None:
        """Emit one forward pass."""
        builder, m = self.builder, self.micro_batches
        self.step, self.upcoming = step, upcoming
        self.sequences, self.tokens, parts = self._split(step)
        self.chosen = [[_tally(ids[..., i, :]) for i in range(len(self.moe))] for ids in parts]
        self.routers: dict[int, list[int]] = {}
        self.streamed: set[int] = set()  # layers whose experts are all fetched in this step
        self.out: list[Deps] = [[*self._lookup(), *self._room]] * m  # what the next attention of each micro-batch waits for
        self.where = [self.layout.attention_device[0]] * m
        self._refresh()
        self._items()
        last = self._head()
        builder.end_step(step.index, self._first, last, step.phase, step.tokens, step.emits)
        self._routers = self.routers
        self._count()

    def _split(self, step: Step) -> tuple[list[int], list[int], list[NDArray[np.int16]]]:
        """Sequences, tokens and chosen experts (..., L, K) of each micro-batch of a step."""
        ids = self.trace.expert_ids[step.rows]  # (B, N, L, K)
        parts = np.array_split(np.arange(step.rows.shape[0]), self.micro_batches)
        return [len(part) for part in parts], [len(part) * step.rows.shape[1] for part in parts], [ids[part] for part in parts]

    def _attention_work(self, layer: int, mb: int) -> Work:
        new = self.step.rows.shape[1]
        return self.works.attention(layer, self.sequences[mb], new, self.step.context + new)

    def _task(self, kind_: Kind, device: str, work: Work, deps: Deps, layer: int, expert: int = -1, slot: int = -1) -> int:
        return self.builder.task(kind_, self.lane[device], work, deps, step=self.step.index, layer=layer, expert=expert, slot=slot)

    def _lookup(self) -> Deps:
        """Lookup tables that lie on storage are read before the first layer (claim T5)."""
        if kind(self.scenario.placement.lookup) != "ssd" or not self.layout.model.lookup_tables:
            return []
        return [(self._task(Kind.LOAD, self.layout.disk, self.works.lookup(self.step.tokens), [], 0), Dep.DATA)]

    def _items(self) -> None:
        """Emit fronts (attention to hand-over), backs (loads, FFNs) and tails (combine, prefetches) of all (layer, micro-batch) items.

        Where attention and experts run on different devices, the fronts of up to ``queue_depth`` later micro-batches are issued
        before a tail is waited for, so that both devices work; a bounded queue holds no more.
        """
        m = self.micro_batches
        n_items = self.layout.model.n_layers * m
        ahead = min(self.scenario.pipeline.queue_depth, m - 1)
        self._open: dict[int, tuple[int, int, Deps]] = {}  # item -> router, hand-over, shared expert
        fronts = 0
        for k in range(n_items):
            if fronts <= k:
                self._front(k)
                fronts = k + 1
            results = self._back(k)
            while fronts < n_items and fronts <= k + ahead and fronts - m < k:
                self._front(fronts)
                fronts += 1
            self._tail(k, results)

    def _front(self, k: int) -> None:
        """Attention, router, hand-over and shared expert of one item; a dense layer as a whole."""
        layer, mb = divmod(k, self.micro_batches)
        layout, tokens = self.layout, self.tokens[mb]
        device = layout.attention_device[layer]
        deps = self.handover.bring(self.where[mb], device, self.out[mb], layer, tokens)
        self.where[mb] = device
        attention = self._task(Kind.ATTENTION, device, self._attention_work(layer, mb), deps, layer)
        if k == 0:
            for tier, line, delta in self._changes:
                self.builder.memory(attention, False, self.tiers.index(tier), self.lines.index(line), delta)
        if layer not in self.moe_index:
            self.out[mb] = [(self._task(Kind.FFN, device, self.works.dense_ffn(layer, tokens), [(attention, Dep.DATA)], layer), Dep.DATA)]
            return
        router = self._task(Kind.ROUTER, device, self.works.router(layer, tokens), [(attention, Dep.DATA)], layer)
        self.routers.setdefault(self.moe_index[layer], []).append(router)
        if mb == 0 and layout.streamed_to(layer) and self._streams(layer, router):
            self.streamed.add(layer)
        hand, home = router, self._home(layer)
        if home != device:
            hand = self.handover.put("task", device, home, [(router, Dep.DATA)], layer, tokens)
        shared: Deps = []
        work = self.works.shared_expert(layer, tokens)
        if work is not None:
            where = layout.shared_device[layer]
            before = self.handover.bring(device, where, [(attention, Dep.DATA)], layer, tokens)
            shared = self.handover.bring(where, device, [(self._task(Kind.FFN, where, work, before, layer), Dep.DATA)], layer, tokens)
        self._open[k] = (router, hand, shared)

    def _back(self, k: int) -> Deps:
        """Loads and expert FFNs of one item; return what its combine waits for."""
        layer, mb = divmod(k, self.micro_batches)
        if layer not in self.moe_index:
            return []
        layout, tokens = self.layout, self.tokens[mb]
        router, hand, _ = self._open[k]
        here, home = layout.attention_device[layer], self._home(layer)
        ready: Deps = [(hand, Dep.DATA)]
        if home != here:
            ready = [(self.handover.get("task", home, hand, layer, tokens), Dep.DATA)]
        done: Deps = []
        away: list[tuple[str, Deps]] = []
        for device, keys in self._places(layer, mb, home, router, ready).items():
            sent = self.handover.bring(home, device, ready, layer, tokens)
            results = self._experts(layout.tier_of(device), device, keys, layer, mb, sent, router)
            if device == home:
                done += results
            else:
                away.append((device, results))
        for device, results in away:  # last, so that no load queues behind the way home
            done += self.handover.bring(device, home, results, layer, tokens)
        if mb == self.micro_batches - 1:
            self.loader.end_of_use((self.step.index, self.moe_index[layer]))
        if home != here:
            done = [(self.handover.put("result", home, here, done or ready, layer, tokens), Dep.DATA)]
        return done

    def _home(self, layer: int) -> str:
        """The device that a layer-set is handed to: its experts' own; attention's, where several own them; or the one that it is streamed to."""
        layout = self.layout
        if layer in self.streamed:
            return layout.streamed_to(layer)
        return layout.expert_device[layer] if len(layout.owners[layer]) == 1 else layout.attention_device[layer]

    def _streams(self, layer: int, router: int) -> bool:
        """Whether all experts of a layer that the CPU would compute are fetched in this step."""
        stated = self.scenario.placement.stream_from
        if self.sites is None or isinstance(stated, int):
            return isinstance(stated, int) and self.step.tokens >= stated
        home, i = self.layout.streamed_to(layer), self.moe_index[layer]
        tokens: Counter[int] = Counter()
        for chosen in self.chosen:
            tokens.update(chosen[i])
        near, far = self._near(home, i, {i * self.n_experts + e: n for e, n in tokens.items()})
        return self.sites.streams(layer, home, near, far, (router, router), self.step.tokens)

    def _near(self, device: str, i: int, tokens: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
        """Part keys into those that a device finds in its memory, and the others."""
        near = self.loader.near(self.layout.tier_of(device), (self.step.index, i))
        return {key: n for key, n in tokens.items() if key in near}, {key: n for key, n in tokens.items() if key not in near}

    def _places(self, layer: int, mb: int, home: str, router: int, ready: Deps) -> dict[str, list[int]]:
        """The keys of a layer-set by the device that computes them, the CPU first where it stands in for others."""
        layout, i = self.layout, self.moe_index[layer]
        owned: dict[str, dict[int, int]] = {}
        for expert, tokens in self.chosen[mb][i].items():
            owned.setdefault(layout.owner(layer, expert), {})[i * self.n_experts + expert] = tokens
        if layer in self.streamed:
            return {home: [key for keys in owned.values() for key in keys]}
        out: dict[str, list[int]] = {}
        for device, keys in owned.items():
            if layout.in_place and layout.tier_of(device) != layout.main_tier:
                near, far = self._near(device, i, keys)
                fetched: set[int] = set()
                if self.scenario.placement.site == "hybrid" and self.sites is not None:
                    fetched = self.sites.fetched(layer, device, near, far, (router, ready[-1][0]), self.tokens[mb])
                out["cpu"] = [*out.get("cpu", []), *(key for key in far if key not in fetched)]
                out[device] = [key for key in keys if key in near or key in fetched]
            else:
                out[device] = [*out.get(device, []), *keys]
        return {device: keys for device, keys in out.items() if keys}

    def _tail(self, k: int, results: Deps) -> None:
        """Combine of one item, and after a layer's last item the prefetches issued there."""
        layer, mb = divmod(k, self.micro_batches)
        if layer not in self.moe_index:
            return
        router, _, shared = self._open.pop(k)
        here = self.layout.attention_device[layer]
        if self._home(layer) != here:
            results = [(self.handover.get("result", here, results[0][0], layer, self.tokens[mb]), Dep.DATA)]
        work = self.works.combine(layer, self.tokens[mb])
        combine = self._task(Kind.COMBINE, here, work, [*results, *shared] or [(router, Dep.DATA)], layer)
        self.out[mb] = [(combine, Dep.DATA)]
        if mb == self.micro_batches - 1:
            i = self.moe_index[layer]
            if self.loader.buffers:
                self.loader.combined[self.step.index * len(self.moe) + i] = combine
            if self.predicted is not None:
                self._prefetch(i, self.predicted)

    def _head(self) -> int:
        """Logits and sampling where the step yields tokens; in any case the join of the micro-batches and the end of the step."""
        device, layer = self.layout.head_device, self.layout.model.n_layers
        deps: Deps = []
        for mb in range(self.micro_batches):
            deps += self.handover.bring(self.where[mb], device, self.out[mb], layer, self.sequences[mb])
        return self._task(Kind.HEAD, device, self.works.head(self.step.emits), deps, layer)

    # ---- experts

    def _experts(self, tier: str, device: str, keys: list[int], layer: int, mb: int, ready: Deps, router: int) -> Deps:
        """Run a layer-set on a device, group by group as its experts come into place; return its last FFN tasks."""
        use = (self.step.index, self.moe_index[layer])
        done: Deps = []
        wanted = {use[1] * self.n_experts + e for chosen in self.chosen[mb:] for e in chosen[use[1]]}
        for group in self.loader.layer_set(tier, keys, [(router, Dep.DATA)], use, wanted):
            done += self._ffns(device, layer, mb, group, ready)
        return done

    def _ffns(self, device: str, layer: int, mb: int, group: Group, ready: Deps) -> Deps:
        """FFN tasks of experts that share the room of a group, ascending; records accesses and last uses."""
        tokens = self.chosen[mb][self.moe_index[layer]]
        first_of_step = self.builder.gate + 1
        done: Deps = []
        if self.scenario.granularity == "layer":
            loads: Deps = [(t, Dep.DATA) for key in sorted(group) for t in group[key][0].loads]
            work = self.works.experts(device, layer, [tokens[key % self.n_experts] for key in sorted(group)])
            together = self._task(Kind.FFN, device, work, [*ready, *loads], layer)
            done = [(together, Dep.DATA)]
        for key in sorted(group):
            resident, outcome = group[key]
            expert = key % self.n_experts
            tasks: list[int] = [] if not done or self.scenario.granularity != "layer" else [done[0][0]]
            if tasks:
                self.builder.member(tasks[0], expert, resident.slot)
            else:
                pieces = self.works.expert_pieces(device, layer, tokens[expert])
                for p, work in enumerate(pieces):
                    waits = resident.loads[p : p + 1] if len(resident.loads) == len(pieces) else resident.loads
                    deps = [*(ready if p == 0 else [(tasks[-1], Dep.DATA)]), *((t, Dep.DATA) for t in waits)]
                    tasks.append(self._task(Kind.FFN, device, work, deps, layer, expert, resident.slot))
                done.append((tasks[-1], Dep.DATA))
            self.builder.access(self.step.index, layer, expert, outcome, tasks[0], resident.loads[-1] if resident.loads else -1)
            resident.uses = [*(u for u in resident.uses if u >= first_of_step), tasks[-1]]
            resident.prefetched = False
        return done

    def _prefetch(self, i: int, predicted: NDArray[np.int16]) -> None:
        """Issue what the prediction for the layer at prefetch distance asks for; it may lie in the next step.

        Of a step with several new tokens a sequence, only the first token can be predicted from the token before.
        """
        target, step, routers = i + self.scenario.prefetch.distance, self.step, self._routers
        rows = step.rows
        if target >= len(self.moe):
            target -= len(self.moe)
            if self.upcoming is None or target >= len(self.moe):
                return
            step, routers = self.upcoming, self.routers
            rows = step.rows if self.prediction_source == "none" else step.rows[:, :1]
        source = self.routers[i]
        if self.prediction_source == "both":  # the source layer's router and the token before, which a prompt chunk does not know
            rows = rows[:, :1]
        if self.prediction_source == "previous":
            rows, source = step.rows[:, :1], routers.get(target, [])
        if self.prediction_source == "none":
            source = []
        elif not source:
            return
        layer = self.moe[target]
        ranked = predicted[rows.ravel(), target].T.ravel()  # the likeliest of every token first
        keys: dict[str, list[int]] = {}
        for e in dict.fromkeys(ranked.tolist()):
            if e >= 0:
                keys.setdefault(self.layout.tier_of(self.layout.owner(layer, e)), []).append(target * self.n_experts + e)
        for tier, mine in keys.items():
            self.loader.prefetch(tier, mine, [(t, Dep.DATA) for t in source], (step.index, target))

    # ---- what is refreshed at step borders

    def _count(self) -> None:
        """Count the selections of a step for what is refreshed."""
        for name, window in self._window.items():
            self._since[name] += self.step.tokens
            for chosen in self.chosen:
                for i, tally in enumerate(chosen):
                    for expert, tokens in tally.items():
                        window[i, expert] += tokens

    def _refresh(self) -> None:
        """Refresh what is due, from the selections since the last time."""
        for name, every in self._periods.items():
            if self._since[name] < every:
                continue
            if name == FAST_MAP:
                self.loader.remap(self._window[name])
            else:
                self.loader.refresh(name, self._window[name])
            self._since[name] = 0
            self._window[name] = np.zeros_like(self._window[name])


def _tally(ids: NDArray[np.int16]) -> dict[int, int]:
    """Tokens of each chosen expert, ascending by expert."""
    counts = Counter(ids.ravel().tolist())
    counts.pop(-1, None)
    return dict(sorted(counts.items()))
