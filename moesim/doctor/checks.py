"""Owns what usually goes wrong in such runs, as checks of one result: the field claims of practitioners, each with the numbers that bear on it.

A check yields suspicions: what it is, the evidence, and what to set instead. Whether it costs anything is found out by simulating that
(``doctor.py``). ``least`` is the relative gain from which a suspicion counts; None where it counts in any case. Numbers in brackets name
the claims of the field notes (B bandwidth, H pipeline, M memory, P prefetch, Q quantisation, S serving, T tiers, W way of working).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moesim.bottleneck import lane_shares
from moesim.hardware import assumed_figures
from moesim.hardware.compose import find_hardware
from moesim.simulate import Case, Result
from moesim.units import show
from moesim.whatif.upgrades import times_as_fast

BLOCK = 4096  # bytes; what direct reads must be aligned to on usual drives
SLOW_DRIVE = 3e9  # bytes/s, claim B2
SHARE = 0.10  # of the critical path from which a drive counts as a limit
DEEP_QUEUE = 8  # items; two keep both sides busy (claim H2)
FEW_TOKENS = 1.05  # largest context over planned below which memory counts as nearly full
WORTH = 0.02  # relative gain from which another switch is worth naming
DERATE = 0.6  # claim B1


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Something that may be wrong. Empty settings: nothing to simulate."""

    code: str
    claims: str
    what: str
    evidence: str
    settings: tuple[tuple[str, Any], ...] = ()
    least: float | None = None
    advice: str = ""


def suspicions(case: Case, result: Result, data: Mapping[str, Any]) -> list[Suspicion]:
    """Return what is suspicious about a run."""
    out = [*_memory(case), *_reading(case), *_machine(case)]
    if data["metrics"] is not None:
        out += [*_drive(case, result, data), *_prefetch(case, data), *_caches(case, data), *_site(case, data)]
    return out + [*_full(case), *_quality(case), *_unmeasured(case)]


def _tokens(result: Result) -> int:
    return max(int(result.meter.steps[:, 4].sum()), 1) if result.meter is not None else 1


def _drive(case: Case, result: Result, data: Mapping[str, Any]) -> Iterator[Suspicion]:
    disk, hw = case.layout.disk, case.hardware
    if not disk:
        return
    channel = hw.tiers[hw.storage[disk].tier].channel
    moved = data["transfers"].get(channel)
    share = lane_shares(data["critical_path"]).get(disk, 0.0)
    if not moved or not moved["bytes"]:
        return
    io = case.scenario.io
    request = min(io.request, max(case.layout.expert_bytes))
    rate = hw.read_bandwidth(disk, request, io.depth, engine=io.engine)
    if share > SHARE:
        slow = f", below the {show(SLOW_DRIVE, 'bytes_per_s')} of claim B2" if rate < SLOW_DRIVE else ""
        evidence = (
            f"{show(moved['bytes'] / _tokens(result), 'bytes')} are read per token at {show(rate, 'bytes_per_s')}{slow}; reads are {share:.0%} of the critical "
            f"path, compute waits {data['metrics']['io_wait_ms_per_token']:.3g} ms per token"
        )
        yield Suspicion("drive-below-need", "B2", "the drive is slower than the run needs", evidence, (times_as_fast(case, channel, 2.0),), None,
                        "a drive twice as fast, or more room for experts")  # fmt: skip
    best = max(hw.read_bandwidth(disk, request, depth, engine=io.engine) for depth in (64, 512))
    if io.engine == "direct" and best > 1.1 * rate:
        evidence = f"{show(rate, 'bytes_per_s')} at depth {io.depth}; the drive gives {show(best, 'bytes_per_s')} when deeper"
        yield Suspicion("shallow-reads", "B2, P3", "too few reads are in flight", evidence, (("io.depth", 64),), WORTH)


def _reading(case: Case) -> Iterator[Suspicion]:
    io, layout = case.scenario.io, case.layout
    pool = layout.pools.get(layout.main_tier)
    reads = bool(layout.disk) and pool is not None and any(count < case.model.n_experts for count in pool.counts)
    if not reads:
        return
    if io.layout == "scattered":
        evidence = f"an expert is read as pieces of {show(io.scattered_piece, 'bytes')}; merged it is one read of {show(max(layout.expert_bytes), 'bytes')}"
        yield Suspicion("scattered-experts", "P5", "experts lie scattered in the file", evidence, (("io.layout", "merged"),))
    if io.engine == "mmap":
        fault = case.hardware.storage[layout.disk].engines.mmap.fault_size.value
        evidence = f"pages come by faults of {show(fault, 'bytes')}, one per faulting thread at a time"
        yield Suspicion("mmap-reads", "P8", "experts are read through mmap", evidence, (("io.engine", "direct"),))
    elif io.engine == "buffered":
        yield Suspicion("buffered-reads", "P7", "experts are read through the page cache", "each byte is copied once more",
                        (("io.engine", "direct"),))  # fmt: skip
    odd = sum(size % BLOCK != 0 for size in layout.expert_bytes if size)
    if io.engine == "direct" and odd and io.align % BLOCK:
        evidence = (
            f"experts of {odd} layers are no multiple of {BLOCK} B (io.align = {io.align}); direct reads need that, or read the edges twice"
        )
        yield Suspicion("unaligned-experts", "P5", "experts are not aligned to the drive's blocks", evidence, (("io.align", f"{BLOCK} B"),))


def _machine(case: Case) -> Iterator[Suspicion]:
    hw, scenario = case.hardware, case.scenario
    main = hw.tiers[case.layout.main_tier].channel
    facts = hw.channels[main].facts
    if facts is not None and (facts.memory_channels == 1 or (facts.bus_bits == 64 and not hw.is_unified)):
        evidence = f"{main} has one channel of 64 bit at {facts.mt_s} MT/s: {show(hw.channels[main].bandwidth.value, 'bytes_per_s')}"
        yield Suspicion("single-channel-ram", "B2", "memory runs in a single channel", evidence, (times_as_fast(case, main, 2.0),), None,
                        "a second module of the same kind")  # fmt: skip
    if not scenario.io.pinned and hw.links:
        yield Suspicion("pageable-copies", "P7", "copies to the card start from pageable memory", "each goes through the driver's own buffer",
                        (("io.pinned", True),))  # fmt: skip
    if scenario.pipeline.hidden_states == "staged":
        yield Suspicion("staged-states", "H3", "hidden states are copied between devices", "pipeline.hidden_states is staged",
                        (("pipeline.hidden_states", "shared"),))  # fmt: skip
    if scenario.derate is None and find_hardware(scenario.hardware, case.base).derate == 1:
        yield Suspicion("data-sheet-rates", "B1, W3", "rates are those of data sheets", "real devices under load gave about half; claim B1 plans with 0.6",
                        (("derate", DERATE),), None, "measure the machine with moesim calibrate")  # fmt: skip


def _memory(case: Case) -> Iterator[Suspicion]:
    memory, layout, pipeline = case.scenario.memory, case.layout, case.scenario.pipeline
    if memory.arena == "maximum":
        yield Suspicion("arena-at-maximum", "M6", "the runtime's arena takes its maximum at the start", "memory.arena is maximum",
                        (("memory.arena", "grown"),))  # fmt: skip
    work = case.scenario.workload
    used = work.cached_tokens + work.prompt_tokens + work.output_tokens
    if memory.kv == "maximum" and memory.kv_bytes is None and layout.context_tokens > 2 * used:
        planned, real = (sum(layout.kv_bytes(tier, n) for tier in layout.kv_tiers) for n in (layout.context_tokens, used))
        evidence = f"{show(planned, 'bytes')} are reserved for {layout.context_tokens:,} tokens; this run reaches {used:,} and {show(real, 'bytes')}"
        yield Suspicion("kv-at-maximum", "M5, M10", "the KV cache is reserved at its maximum", evidence,
                        (("memory.kv", "paged"), ("memory.kv_from_experts", True)))  # fmt: skip
    queues = sum(line.bytes for line in layout.buffer_lines() if line.name == "hand-over queues")
    if pipeline.queue_depth > DEEP_QUEUE and queues:
        evidence = f"{pipeline.queue_depth} items wait at most: {show(queues, 'bytes')}"
        yield Suspicion(
            "unbounded-queue", "M7, H2", "the hand-over queue is so deep that it bounds nothing", evidence, (("pipeline.queue_depth", 2),)
        )


def _full(case: Case) -> Iterator[Suspicion]:
    layout = case.layout
    most, planned = layout.max_context_tokens, layout.context_tokens
    if not layout.ledger.fits or most >= FEW_TOKENS * planned:
        return
    tier = min(layout.capacities, key=lambda t: layout.ledger.left_bytes(t) / layout.capacities[t].usable_bytes)
    pool = layout.pools.get(tier)
    settings: tuple[tuple[str, Any], ...] = ()
    if pool is not None and min(pool.counts) > 1 and tier in ("vram", "ram", "unified"):
        settings = ((f"placement.pools.{tier}.hold", min(pool.counts) - 1),)
    left = show(layout.ledger.left_bytes(tier), "bytes")
    evidence = f"{tier} has {left} left; {most:,} tokens of context fit and {planned:,} are planned"
    yield Suspicion(
        "memory-nearly-full", "M5, M8", "memory is nearly full", evidence, settings, None, "the change buys margin and costs speed"
    )


def _prefetch(case: Case, data: Mapping[str, Any]) -> Iterator[Suspicion]:
    prefetch, metrics = case.scenario.prefetch, data["metrics"]
    if metrics["accesses"]["miss"] + metrics["accesses"]["prefetch"] + metrics["accesses"]["late"] == 0:
        return
    loads = sum(it["busy_s"] for lane, it in data["lanes"].items() if lane in case.hardware.storage or lane in case.hardware.links)
    compute = sum(it["busy_s"] for lane, it in data["lanes"].items() if lane in case.hardware.devices)
    ratio = loads / compute if compute else math.inf
    evidence = f"loads take {ratio:.2g} times as long as compute; {metrics['io_wait_ms_per_token']:.3g} ms per token are waited for loads"
    if not prefetch.on:
        what = "nothing is prefetched although prefetching would help"
        for predictor in ("cooccurrence", "linear"):
            settings: tuple[tuple[str, Any], ...] = (("prefetch.predictor", predictor), ("prefetch.distance", 1))
            yield Suspicion("no-prefetch", "P1", what, evidence, settings, WORTH)
        return
    late, wasted = metrics["accesses"]["late"], sum(row["prefetch_wasted_bytes"] for row in data["transfers"].values())
    evidence += f"; at distance {prefetch.distance} {late:,} prefetches come late and {show(wasted, 'bytes')} in vain"
    for distance in (prefetch.distance - 1, prefetch.distance + 1, prefetch.distance + 2):
        room = (("prefetch.buffers", distance + 1),) if prefetch.into == "buffers" and distance >= prefetch.buffers else ()
        settings = (("prefetch.distance", distance), *room) if distance else (("prefetch.predictor", "none"),)
        yield Suspicion(
            "prefetch-distance", "P4", f"prefetch distance {prefetch.distance} does not suit the ratio", evidence, settings, WORTH
        )


def _caches(case: Case, data: Mapping[str, Any]) -> Iterator[Suspicion]:
    for tier, pool in case.layout.pools.items():
        full = all(count >= case.model.n_experts for count in pool.counts)
        if tier not in ("vram", "ram", "unified") or full or not sum(pool.counts):
            continue
        rate, misses = data["metrics"]["cache_hit_rate"], data["metrics"]["accesses"]["miss"]
        hits = "no access" if rate is None else f"{rate:.1%} of accesses hit, {misses:,} loads are waited for"
        if pool.spec.policy != "static":
            yield Suspicion("cache-churn", "T4", f"the {pool.spec.policy} cache in {tier} churns where a static one would win", hits,
                            ((f"placement.pools.{tier}.policy", "static"),), WORTH)  # fmt: skip
        else:
            yield Suspicion("static-stale", "T4", f"the static experts in {tier} do not follow the routing", hits,
                            ((f"placement.pools.{tier}.policy", "lru"), (f"placement.pools.{tier}.warm", True)), WORTH)  # fmt: skip


def _site(case: Case, data: Mapping[str, Any]) -> Iterator[Suspicion]:
    placement, layout = case.scenario.placement, case.layout
    if case.hardware.is_unified or "cpu" not in case.hardware.devices or set(layout.expert_device) != {"gpu"}:
        return
    share = sum(part for lane, part in lane_shares(data["critical_path"]).items() if lane in case.hardware.links)
    if placement.site == "fetch" and share > SHARE:
        evidence = f"copies to the card are {share:.0%} of the critical path"
        what = "experts are fetched that the CPU could compute where they lie"
        for settings in ((("placement.site", "in-place"), ("prefetch.predictor", "none")), (("placement.site", "hybrid"),)):
            yield Suspicion("fetch-over-link", "T4, S1", what, evidence, settings, WORTH)


def _quality(case: Case) -> Iterator[Suspicion]:
    layers = case.layout.moe_layers or (0,)
    formats = {part: case.plan.format(part, layers[0]) for part in ("attention", "routed_experts")}
    low = {part: f for part, f in formats.items() if f.bits_per_weight < 16}
    if low and case.plan.known_quality(case.model.name) is None:
        evidence = ", ".join(f"{part} {f.name} ({f.bits_per_weight:.3g} bits)" for part, f in low.items())
        yield Suspicion("quality-unmeasured", "Q1, Q2, Q7", "weights are quantised and what that costs in quality is not known here",
                        f"{evidence}; practitioners claim 1.5 to 3 % for INT4 and under 1 % for INT8, by one average", (), None,
                        "moesim quality measures it; on your own task, long texts apart")  # fmt: skip


def _unmeasured(case: Case) -> Iterator[Suspicion]:
    names = assumed_figures(case.hardware)
    if names:
        yield Suspicion("machine-unmeasured", "W3", "the machine has not been measured", f"{len(names)} figures are assumed, {names[0]} the first", (),
                        None, "moesim calibrate, then moesim doctor --profile measured.yaml; moesim whatif says which figure matters")  # fmt: skip
