"""Owns the layout: which tier holds each part, how large each expert pool is, and the ledger of it all.

A layout is a scenario with every "as many as fit" decided. It knows the shape of the workload (tokens per step, context)
but no trace: which experts a pool holds is decided by the planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from moesim.errors import InputError, did_you_mean
from moesim.hardware import HardwareProfile, kind
from moesim.ledger import Capacity, Ledger, Line, blocks, largest, spread
from moesim.model import ModelSpec
from moesim.places import Places
from moesim.precision import PrecisionPlan
from moesim.scenario import Pool, Scenario
from moesim.units import parse_bytes

_PARTS_WITH_ATTENTION = ("attention", "router", "norms", "dense_ffn")


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Experts of one tier. ``layers`` are the MoE layers whose experts it may hold, ``counts`` how many of each."""

    tier: str
    spec: Pool
    layers: tuple[int, ...]
    counts: tuple[int, ...]
    bytes: int
    transient_slots: int
    transient_bytes: int


class Layout(Places):
    """A scenario's parts on a machine; see ``Places`` for where each is computed.

    Parameters
    ----------
    scenario : Scenario
    model : ModelSpec
    plan : PrecisionPlan
    hardware : HardwareProfile
        Already derated.

    Raises
    ------
    InputError
        If the scenario names a device, tier or layer that does not exist, or combines switches that exclude each other.
    """

    def __init__(self, scenario: Scenario, model: ModelSpec, plan: PrecisionPlan, hardware: HardwareProfile) -> None:
        super().__init__(scenario, model, plan, hardware)
        self.matrix_bytes = [self._padded(model.expert_matrix_bytes(plan, layer)) for layer in range(model.n_layers)]
        self.expert_bytes = [sum(sizes.values()) for sizes in self.matrix_bytes]
        if scenario.memory.kv_from_experts and scenario.memory.kv == "maximum":
            raise InputError(
                "memory.kv", expected="live or paged with kv_from_experts", got="maximum", fix="a cache at its maximum never grows"
            )
        if (
            scenario.prefetch.on
            and scenario.prefetch.into == "buffers"
            and len({self.tier_of(device) for x in self.moe_layers for device in self.owners[x]}) > 1
        ):
            raise InputError("prefetch.into", expected="cache, where experts run from several tiers", got="buffers")
        work = scenario.workload
        self.most_tokens = work.batch * max(min(work.prefill_chunk, work.prompt_tokens), 1)
        self.context_tokens = scenario.memory.context_tokens or (work.cached_tokens + work.prompt_tokens + work.output_tokens)
        self.pools: dict[str, PoolPlan] = {}
        self._plan_pools()

    def _padded(self, sizes: dict[str, int]) -> dict[str, int]:
        """Bytes of an expert's matrices with padding: at the end of the expert, or of each matrix where it is read alone or in pieces."""
        io = self.scenario.io
        if io.layout == "scattered" or self.scenario.granularity == "matrix":
            return {name: -(-size // io.align) * io.align for name, size in sizes.items()}
        padding = -sum(sizes.values()) % io.align
        return {name: size + (padding if i == len(sizes) - 1 else 0) for i, (name, size) in enumerate(sizes.items())}

    # ---- pools

    def _plan_pools(self) -> None:
        """Decide pool sizes, nearest tier first: what a static upper pool holds need not lie in the tier below."""
        stated = {str(tier): pool for tier, pool in self.scenario.placement.pools.items()}
        for tier in stated:
            if tier not in self.hardware.tiers:
                fix = did_you_mean(tier, self.hardware.tiers)
                raise InputError(f"placement.pools.{tier}", expected=f"a tier of {self.hardware.name}", got=f'"{tier}"', fix=fix)
        tops = dict.fromkeys(self.tier_of(device) for layer in self.moe_layers for device in self._devices_on(layer))
        order = [*(t for t in tops if t != self.main_tier), self.main_tier]
        above: Counter[int] = Counter()  # by layer: experts that upper static pools keep for good
        for tier in order:
            layers = self._layers_on(tier)
            if not layers:
                continue
            spec = stated.get(tier, Pool())
            main = tier == self.main_tier
            most = [self.model.n_experts - above[layer] if main else self._owned(layer, tier) for layer in layers]
            if not main and 0 in most and spec.policy != "static":
                raise InputError(
                    f"placement.pools.{tier}.policy",
                    expected="static, where some layers only pass through, in streamed steps",
                    got=spec.policy,
                )
            self.pools[tier] = self._pool(tier, spec, layers, most)
            if self.keeps(spec) and spec.scope == "layer":  # how many of each layer a global pool takes depends on the trace
                above.update(dict(zip(layers, self.pools[tier].counts, strict=True)))
        self._check_inclusive()

    def keeps(self, spec: Pool) -> bool:
        """Whether a pool never gives up what it holds at the start."""
        return spec.policy == "static" and not spec.refresh_tokens and not self.scenario.memory.kv_from_experts

    def _check_inclusive(self) -> None:
        """An inclusive RAM cache keeps all that lies in VRAM, and needs room for one more expert to pass."""
        below = self.pools.get(self.main_tier)
        if below is None or below.spec.policy == "static" or not below.spec.inclusive:
            return
        uppers = [pool for tier, pool in self.pools.items() if tier != self.main_tier and not self.keeps(pool.spec)]
        held = dict(zip(below.layers, below.counts, strict=True))
        most: Counter[int] = Counter()
        for pool in uppers:
            for layer, count in zip(pool.layers, pool.counts, strict=True):
                most[layer] += pool.bytes // self.expert_bytes[layer] if pool.spec.scope == "global" else count
        short = any(held[layer] < min(count + 1, self.model.n_experts) for layer, count in most.items())
        above_bytes = sum(pool.bytes for pool in uppers)
        if uppers and below.spec.scope == "global":
            short = below.bytes <= above_bytes and any(c < self.model.n_experts for c in below.counts)
        if short:
            tiers = " and ".join(pool.tier for pool in uppers)
            raise InputError(f"placement.pools.{self.main_tier}.hold", expected=f"more experts than {tiers} holds, as it is inclusive of {tiers}",
                             got=f"{below.bytes} bytes below {above_bytes}", fix="hold more, or set inclusive: false")  # fmt: skip

    def _pool(self, tier: str, spec: Pool, layers: tuple[int, ...], most: list[int]) -> PoolPlan:
        sizes = [self.expert_bytes[layer] for layer in layers]
        everything = sum(m * s for m, s in zip(most, sizes, strict=True))
        where = f"placement.pools.{tier}"
        if spec.refresh_tokens and spec.policy != "static":
            raise InputError(
                f"{where}.refresh_tokens", expected="0, or policy static", got=f"{spec.refresh_tokens} with policy {spec.policy}"
            )
        slots, transient = self._transient(tier, spec, sizes)
        shrinks = self.scenario.memory.kv_from_experts and tier in self.kv_tiers
        counts: list[int]
        hold = spec.hold
        if isinstance(hold, bool) or isinstance(hold, int) and hold < 0:
            raise InputError(f"{where}.hold", expected="a number of experts per layer of at least 0", got=str(hold))
        if isinstance(hold, int):
            if hold > self.model.n_experts:
                raise InputError(f"{where}.hold", expected=f"at most {self.model.n_experts} experts per layer", got=str(hold))
            counts = [min(hold, m) for m in most]
        elif hold in ("all", "none"):
            counts = most if hold == "all" else [0] * len(most)
        else:
            if hold == "fit":
                budget = Ledger(tuple(self._lines(self.context_tokens)), self.capacities).left_bytes(tier)
                if budget >= everything and not shrinks and not self._streams(tier):
                    transient = slots = 0
                budget -= transient
                if spec.policy != "static":  # a cache needs some room, whether the tier has it or not: the ledger then says what is missing
                    budget = max(budget, sum(s for s, m in zip(sizes, most, strict=True) if m) if spec.scope == "layer" else max(sizes))
            elif hold.endswith("%"):
                try:
                    budget = int(everything * float(hold[:-1]) / 100)
                except (ValueError, OverflowError):
                    raise InputError(f"{where}.hold", expected='a share such as "50 %"', got=f'"{hold}"') from None
            else:
                try:
                    budget = parse_bytes(hold)
                except InputError as error:
                    expected = 'all, fit, none, experts per layer, a share such as "50 %" or a size such as "4.8 GB"'
                    raise InputError(f"{where}.hold", expected=expected, got=f'"{hold}"', fix=error.fix) from None
            budget = max(min(budget, everything), 0)
            counts = spread(budget, sizes, most)
        used = sum(c * s for c, s in zip(counts, sizes, strict=True))
        if all(c == m for c, m in zip(counts, most, strict=True)):
            if not shrinks and not self._streams(tier):
                transient = slots = 0
        elif spec.policy != "static" and (
            used < max(sizes) if spec.scope == "global" else any(c == 0 < m for c, m in zip(counts, most, strict=True))
        ):
            room = "one expert" if spec.scope == "global" else "one expert of each layer"
            raise InputError(
                f"{where}.hold",
                expected=f"room for at least {room} under {spec.policy}",
                got=str(hold),
                fix="hold more, or use policy static",
            )
        if not self.disk and tier == self.main_tier and any(c < m for c, m in zip(counts, most, strict=True)):
            raise InputError(f"{where}.hold", expected="all experts, as the machine has no storage", got=str(hold))
        return PoolPlan(tier, spec, layers, tuple(counts), used, slots, transient)

    def _streams(self, tier: str) -> bool:
        """Whether layers are streamed to a device of a tier."""
        return any(device and self.tier_of(device) == tier for device in map(self.streamed_to, self.moe_layers))

    def _transient(self, tier: str, spec: Pool, sizes: Sequence[int]) -> tuple[int, int]:
        """Slots for misses of a pool that does not admit them, for prefetches into it, and for whole layers that are streamed."""
        if spec.policy != "static":
            return 0, 0
        prefetch, streams = self.scenario.prefetch, self._streams(tier)
        if not streams and (spec.hold == "all" or self.scenario.placement.site == "in-place" and tier != self.main_tier):
            return 0, 0
        if prefetch.on and prefetch.into == "buffers" and any(tier == self.tier_of(self.expert_device[x]) for x in self.moe_layers):
            return 0, 0
        ahead = prefetch.distance if prefetch.on else 0
        usual = self.model.n_experts if streams else min(self.model.top_k * (1 + ahead), self.model.n_experts)
        slots = spec.transient_slots or usual
        return slots, slots * max(sizes)

    # ---- ledger

    @cached_property
    def capacities(self) -> dict[str, Capacity]:
        """Capacities of the memory tiers (storage is no line of the ledger)."""
        return {n: Capacity(t.capacity.value, t.reserved.value) for n, t in self.hardware.tiers.items() if kind(n) != "ssd"}

    @cached_property
    def kv_tiers(self) -> tuple[str, ...]:
        """Tiers that hold a KV cache: those of the attention devices."""
        return tuple(dict.fromkeys(self.tier_of(device) for device in self.attention_device))

    def kv_of_sequence(self, tier: str) -> tuple[int, int]:
        """Bytes of one sequence in a tier: per token of context, and whatever the context is (windows, recurrent states)."""
        kinds, fixed = self._kv_kinds[tier]
        grows, endless = 0, 2**40
        for layer, size in kinds:
            tokens = self.model.kv_tokens(layer, endless)
            if tokens == endless:
                grows += size
            else:
                fixed += min(tokens, self.context_tokens) * size
        return grows, fixed

    def kv_bytes(self, tier: str, context_tokens: int) -> int:
        """Bytes of the KV cache (and recurrent state) of all sequences in one tier at a context."""
        memory = self.scenario.memory
        tokens = blocks(context_tokens, memory.kv_block_tokens) if memory.kv == "paged" else context_tokens
        kinds, states_bytes = self._kv_kinds[tier]
        kept = sum(self.model.kv_tokens(layer, tokens) * per_token for layer, per_token in kinds)
        return (kept + states_bytes) * self.scenario.workload.batch

    @cached_property
    def _kv_kinds(self) -> dict[str, tuple[list[tuple[int, int]], int]]:
        """By tier: one layer of each kind of attention with what all of its kind keep per kept token; bytes of recurrent state."""
        out: dict[str, tuple[list[tuple[int, int]], int]] = {}
        for tier in self.hardware.tiers:
            layers = [x for x in range(self.model.n_layers) if self.tier_of(self.attention_device[x]) == tier]
            kinds: dict[Hashable, list[int]] = {}
            for layer in layers:
                kinds.setdefault(self.model.attention_at(layer), []).append(layer)
            compressed = self.scenario.memory.mla_compressed
            per_token = [sum(self.model.kv_bytes_per_token(self.plan, x, compressed) for x in alike) for alike in kinds.values()]
            states_bytes = sum(self.model.state_bytes(self.plan, x) for x in layers)
            out[tier] = list(zip([alike[0] for alike in kinds.values()], per_token, strict=True)), states_bytes
        return out

    @property
    def layer_set(self) -> int:
        """Experts that a decode step may use in one layer: what a layer-set buffer holds."""
        return min(self.model.n_experts, self.model.top_k * self.scenario.workload.batch)

    def buffer_lines(self) -> list[Line]:
        """Prefetch buffers and hand-over queues."""
        out = []
        prefetch, pipeline = self.scenario.prefetch, self.scenario.pipeline
        if prefetch.on and prefetch.into == "buffers" and self.moe_layers:
            size = prefetch.buffers * self.layer_set * max(self.expert_bytes)
            tier = self.tier_of(self.expert_device[self.moe_layers[0]])
            out.append(Line("prefetch buffers", tier, "buffers", size, note=f"{prefetch.buffers} layer-sets of {self.layer_set} experts"))
        crossing = [x for x in self.moe_layers if self.attention_device[x] != self.expert_device[x]]
        if crossing:
            batch = self.scenario.workload.batch
            tokens = -(-batch // min(pipeline.micro_batches, batch)) * (self.most_tokens // batch)
            if self.scenario.serving is not None:  # one sequence's prompt may fill a step
                tokens = self.most_tokens
            size = pipeline.queue_depth * tokens * self.model.hidden_size * 2
            ends = [{self.tier_of(device[x]) for x in crossing} for device in (self.expert_device, self.attention_device)]
            for tier in self.capacities:
                queues = sum(tier in end for end in ends)
                if queues:
                    note = f"{queues} x {pipeline.queue_depth} items of {tokens} hidden states"
                    out.append(Line("hand-over queues", tier, "buffers", queues * size, note=note))
        return out

    def _lines(self, context_tokens: int) -> list[Line]:
        """All lines at a context, in the order in which memory is asked for; pools that are decided already among them."""
        model, plan, memory = self.model, self.plan, self.scenario.memory
        out: list[Line] = []

        def add(name: str, tier: str, pool: str, size: int, basis: str = "spec", note: str = "") -> None:
            if size and tier in self.capacities:  # storage is no line of the ledger
                out.append(Line(name, tier, pool, size, basis, note))

        first = self.tier_of(self.attention_device[0])
        label = {"attention": "shared part"} if model.declared is not None else {}
        sizes: dict[tuple[str, str], int] = {}
        for layer in range(model.n_layers):
            for part in _PARTS_WITH_ATTENTION:
                where = (label.get(part, part), self.tier_of(self.attention_device[layer]))
                sizes[where] = sizes.get(where, 0) + model.part_bytes(plan, part, layer)
            where = ("shared expert", self.tier_of(self.shared_device[layer]))
            sizes[where] = sizes.get(where, 0) + model.part_bytes(plan, "shared_expert", layer)
            where = ("adapters", self.tier_of(self.expert_device[layer]))
            sizes[where] = sizes.get(where, 0) + model.adapter_bytes(plan, layer)
        for (part, tier), size in sizes.items():
            add(f"weights: {part}", tier, "weights", size)
        outside = sum(model.part_bytes(plan, part, -1) for part in _PARTS_WITH_ATTENTION)
        add("weights: outside layers", first, "weights", outside)
        add("weights: embeddings", self.scenario.placement.embeddings or first, "weights", model.part_bytes(plan, "embeddings", -1))
        add("weights: head", self.tier_of(self.head_device), "weights", model.part_bytes(plan, "head", -1))
        add("weights: lookup", self.scenario.placement.lookup or first, "weights", model.part_bytes(plan, "lookup"))
        add("weights: vision", first, "weights", model.part_bytes(plan, "vision"))
        for tier, pool in self.pools.items():
            note = f"{_span(pool.counts)} of {model.n_experts} experts per layer, {pool.spec.policy}"
            add("routed experts", tier, "experts", pool.bytes, note=note)
            add(
                "transient slots", tier, "buffers", pool.transient_bytes, note=f"{pool.transient_slots} slots for experts that pass through"
            )
        for tier in self.kv_tiers:
            add("KV cache", tier, "kv", *self._kv_line(tier, context_tokens))
        if self.scenario.serving is not None:
            add("KV swap space", self.main_tier, "buffers", self.scenario.serving.swap, "assumed", "stated by the scenario")
        out += self.buffer_lines()
        workspace, basis, note = memory.workspace, "assumed", "stated by the scenario"
        if workspace is None:
            workspace = self.most_tokens * (model.vocab_size + 2 * model.hidden_size) * 4
            basis, note = "reported", "tokens of a step x (vocabulary + 2 hidden) x 4 B, the compute buffer of llama.cpp"
        add("workspace", first, "workspace", workspace, basis, note)
        add("runtime", first, "runtime", memory.runtime, "assumed", "stated by the scenario")
        return out

    def _kv_line(self, tier: str, context_tokens: int) -> tuple[int, str, str]:
        """Bytes, basis and note of a tier's KV cache."""
        memory, work = self.scenario.memory, self.scenario.workload
        if memory.kv_bytes is not None:
            return memory.kv_bytes // len(self.kv_tiers), "assumed", "allowance stated by the scenario"
        if memory.kv_from_experts:
            return (
                self.kv_bytes(tier, work.cached_tokens),
                "spec",
                f"{work.cached_tokens} tokens x {work.batch} at the start; grows into the expert pool",
            )
        return self.kv_bytes(tier, context_tokens), "spec", f"{context_tokens} tokens x {work.batch}, {memory.kv}"

    @cached_property
    def ledger(self) -> Ledger:
        """The plan at its worst: every pool full, the KV cache at the planned context."""
        return Ledger(tuple(self._lines(self.context_tokens)), self.capacities)

    @cached_property
    def line_names(self) -> tuple[str, ...]:
        """Names of the ledger's lines, each once."""
        return tuple(dict.fromkeys([*(line.name for line in self.ledger.lines), "routed experts", "KV cache", "hand-over queues"]))

    def fixed_bytes(self, tier: str) -> int:
        """Bytes of a tier that do not depend on the context: all but the KV cache."""
        return sum(line.bytes for line in self.ledger.lines if line.tier == tier and line.pool != "kv")

    @cached_property
    def max_context_tokens(self) -> int:
        """The largest context at which everything else still fits; -1 if none does. A stated KV allowance counts as what it is: room."""

        def fits(context: int) -> bool:
            for tier, capacity in self.capacities.items():
                experts = (
                    sum(x.bytes for x in self.ledger.lines if x.tier == tier and x.pool == "experts")
                    if self.scenario.memory.kv_from_experts
                    else 0
                )
                if self.fixed_bytes(tier) - experts + self.kv_bytes(tier, context) > capacity.usable_bytes:
                    return False
            return True

        return largest(fits)

    @cached_property
    def kv_allowance_tokens(self) -> int | None:
        """The context that a stated KV allowance lasts for, or None where none is stated."""
        allowance = self.scenario.memory.kv_bytes
        if allowance is None:
            return None
        return largest(lambda context: all(self.kv_bytes(t, context) <= allowance // len(self.kv_tiers) for t in self.kv_tiers))

    def __repr__(self) -> str:
        return f"Layout({self.model.name} on {self.hardware.name}, {'fits' if self.ledger.fits else 'does not fit'})"


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
