"""Owns the discrete changes that one could make to a run: what to buy, what to switch, what only bounds the gain; each tried in full.

A change is settings of a scenario, dotted paths and values as ``moesim sweep`` takes them, so every outcome can be had again with
``moesim run --set``. What the program cannot model is listed with the reason, not left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moesim import config
from moesim.errors import InputError
from moesim.hardware import kind
from moesim.precision import FORMATS
from moesim.scenario import Scenario
from moesim.simulate import Case, make_case, simulate
from moesim.sweep.space import lay, machine
from moesim.units import show
from moesim.whatif.replay import speed_of

LADDERS = (("fp32", "bf16", "int8", "int4-g128", "int3-g128", "int2-g128"), ("F16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"))
GIB = 2**30
MORE_RAM, MORE_VRAM = 16 * GIB, 8 * GIB
SITES = {
    "in-place": "CPU computes what is not in VRAM",
    "hybrid": "CPU computes what is not in VRAM, or it is fetched where that is sooner",
    "fetch": "fetch experts to the GPU",
}
UNMEASURED = "quality changes and is not measured here"


@dataclass(frozen=True, slots=True)
class Change:
    """Something to try. ``group`` is buy, switch or bound (cannot be had, and shows what is left to gain); ``why_not`` says what is not modelled."""

    name: str
    group: str
    settings: tuple[tuple[str, Any], ...] = ()
    remark: str = ""
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change gave. ``speed`` is nan where it does not fit or cannot be, and ``problem`` says why."""

    change: Change
    speed: float
    ttft_ms: float | None
    problem: str
    assignments: tuple[str, ...]


def changes(case: Case) -> list[Change]:
    """Return the changes that make sense for a case, things to buy first."""
    return [*_purchases(case), *_switches(case), *_bounds(case)]


def _purchases(case: Case) -> Iterator[Change]:
    hw = case.hardware
    for disk in _disks(case):
        channel = hw.tiers[hw.storage[disk].tier].channel
        yield Change(f"2 x {disk} speed", "buy", (times_as_fast(case, channel, 2.0),), "a drive twice as fast in every respect but latency")
    for name, tier in hw.tiers.items():
        if kind(name) != "ssd":
            more = MORE_VRAM if kind(name) == "vram" else MORE_RAM
            yield Change(
                f"+{more // GIB} GiB {name}", "buy", ((f"hardware_set.tiers.{name}.capacity.value", f"{tier.capacity.value + more} B"),)
            )
            yield Change(f"2 x {name} bandwidth", "buy", (times_as_fast(case, tier.channel, 2.0),))
    yield from _next_pcie(case)
    yield _second_gpu(case)


def _disks(case: Case) -> list[str]:
    return [case.layout.disk] if case.layout.disk else []


def _next_pcie(case: Case) -> Iterator[Change]:
    hw = case.hardware
    channels = dict.fromkeys(link.channel for link in hw.links.values())
    gens = {gen for name in channels if (facts := hw.channels[name].facts) and (gen := facts.pcie_gen)}
    if channels:
        label = f"PCIe {min(gens) + 1}.0 instead of {min(gens)}.0" if gens else "links twice as fast"
        yield Change(
            label, "buy", tuple(times_as_fast(case, name, 2.0) for name in channels), "both directions; card and board must have it"
        )


def _second_gpu(case: Case) -> Change:
    """The same card again, layers cut in two halves; each card caches the experts of its own."""
    hw, scenario, name = case.hardware, case.scenario, "a second GPU of the same kind"
    main = case.layout.main_tier
    if "gpu" not in hw.devices:
        return Change(name, "buy", why_not="the machine has no GPU")
    if hw.devices["gpu"].tier == main:
        return Change(name, "buy", why_not="not modelled: a GPU beside one that shares the memory of the CPU")
    if any(kind(device) == "gpu" and device != "gpu" for device in hw.devices) or scenario.placement.layers:
        return Change(name, "buy", why_not="not tried: layers are placed already; state placement.layers")
    if set(case.layout.attention_device) | set(case.layout.expert_device) != {"gpu"} or scenario.prefetch.into == "buffers":
        return Change(name, "buy", why_not="not tried: only where one GPU computes every layer, without layer-set buffers")
    plain = machine(replace(case.document, data=case.document.data | {"hardware_scale": {}, "derate": 1.0}), case.base)
    data, tier = plain.model_dump(mode="json"), plain.devices["gpu"].tier
    links = {key: link for key, link in plain.links.items() if tier in (link.source, link.target)}
    renamed = {
        tier: f"{tier}1",
        hw.tiers[tier].channel: f"{hw.tiers[tier].channel}1",
        **{x.channel: f"{x.channel}1" for x in links.values()},
    }

    def copied(item: Mapping[str, Any]) -> dict[str, Any]:
        return {key: renamed.get(value, value) if key in ("tier", "channel", "source", "target") else value for key, value in item.items()}

    settings: list[tuple[str, Any]] = [
        (f"hardware_set.tiers.{tier}1", copied(data["tiers"][tier])),
        ("hardware_set.devices.gpu1", copied(data["devices"]["gpu"])),
        *((f"hardware_set.channels.{new}", data["channels"][old]) for old, new in renamed.items() if old in data["channels"]),
        *((f"hardware_set.links.{key}1", copied(data["links"][key])) for key in links),
        *((f"hardware_scale.{new}", scenario.hardware_scale[old]) for old, new in renamed.items() if old in scenario.hardware_scale),
    ]
    up = next(link for link in links.values() if link.target == tier)
    across = {key: value for key, value in up.model_dump(mode="json").items() if value}
    for link_name, source, target, channel in (("p2p", tier, f"{tier}1", renamed[up.channel]), ("p2p1", f"{tier}1", tier, up.channel)):
        settings.append((f"hardware_set.links.{link_name}", {**across, "source": source, "target": target, "channel": channel}))
    half = f"{case.model.n_layers // 2}-{case.model.n_layers - 1}"
    rules = [{"layers": half, "part": part, "device": "gpu1"} for part in ("attention", "routed_experts")]
    return Change(
        name, "buy", (*settings, ("placement.layers", rules)), "layers cut in two halves, one card after the other; no tensor parallelism"
    )


def _switches(case: Case) -> Iterator[Change]:
    yield from _prefetches(case)
    yield from _policies(case)
    scenario = case.scenario
    if case.layout.disk:
        if scenario.io.engine != "direct":
            yield Change("direct reads", "switch", (("io.engine", "direct"),))
        if scenario.io.layout != "merged":
            yield Change("experts merged into one aligned file", "switch", (("io.layout", "merged"),))
        yield Change("4 x I/O depth", "switch", (("io.depth", 4 * scenario.io.depth),))
    if "cpu" in case.hardware.devices and case.layout.expert_device[:1] == ["gpu"] and not case.hardware.is_unified:
        for site, name in SITES.items():
            if site != scenario.placement.site:
                alone = (("prefetch.predictor", "none"),) if site == "in-place" else ()
                yield Change(name, "switch", (("placement.site", site), *alone))
    if scenario.memory.kv == "maximum":
        yield Change("KV cache paged", "switch", (("memory.kv", "paged"),))
    yield from _precision_steps(case)


def _prefetches(case: Case) -> Iterator[Change]:
    prefetch = case.scenario.prefetch
    if not prefetch.on:
        yield Change("prefetch by co-occurrence", "switch", (("prefetch.predictor", "cooccurrence"), ("prefetch.distance", 1)))
        return
    for distance in (prefetch.distance + 1, prefetch.distance - 1):
        name = f"prefetch distance {distance}" if distance else "no prefetch"
        room = (("prefetch.buffers", distance + 1),) if prefetch.into == "buffers" and distance >= prefetch.buffers else ()
        yield Change(name, "switch", (("prefetch.distance", distance), *room) if distance else (("prefetch.predictor", "none"),))


def _policies(case: Case) -> Iterator[Change]:
    for tier, pool in case.layout.pools.items():
        if tier not in ("vram", "ram", "unified") or all(count >= case.model.n_experts for count in pool.counts) or not sum(pool.counts):
            continue
        for policy in ("static", "lru", "lfu"):
            if policy != pool.spec.policy:
                warm = ((f"placement.pools.{tier}.warm", True),) if policy != "static" else ()
                yield Change(f"{tier} cache {policy}", "switch", ((f"placement.pools.{tier}.policy", policy), *warm))


def _precision_steps(case: Case) -> Iterator[Change]:
    layer = next(iter(case.layout.moe_layers), None)
    if layer is None:
        return
    now = case.plan.format("routed_experts", layer)
    stated = case.scenario.precision
    if "file" in (stated, isinstance(stated, dict) and stated.get("default")):
        yield Change("experts one precision step lower", "switch", why_not="not modelled: the precision is that of a file")
        return
    plan = stated if isinstance(stated, dict) else {"default": stated}
    ladder = LADDERS[now.kind == "gguf"]
    bits = [FORMATS[name].bits_per_weight for name in ladder]
    below = next((name for name, b in zip(ladder, bits, strict=True) if b < 0.9 * now.bits_per_weight), None)
    above = next((name for name, b in reversed(list(zip(ladder, bits, strict=True))) if b > 1.1 * now.bits_per_weight), None)
    for name, way in ((below, "lower"), (above, "higher")):
        if name is not None:
            settings = (("precision", {**plan, "routed_experts": name}),)
            yield Change(f"experts {name} instead of {now.name}", "switch", settings, f"one step {way}; {UNMEASURED}")


def _bounds(case: Case) -> Iterator[Change]:
    yield Change(
        "a perfect predictor", "bound", (("prefetch.predictor", "oracle"), ("prefetch.distance", max(case.scenario.prefetch.distance, 1)))
    )
    for tier, pool in case.layout.pools.items():
        if tier in ("vram", "ram", "unified") and any(count < case.model.n_experts for count in pool.counts):
            settings = ((f"placement.pools.{tier}.policy", "belady"), (f"placement.pools.{tier}.warm", True))
            yield Change(f"{tier} cache that knows the future", "bound", settings)


def attempt(case: Case, change: Change) -> Outcome:
    """Run a case with a change, in full."""
    if change.why_not:
        return Outcome(change, math.nan, None, change.why_not, ())
    try:
        changed, assignments = changed_case(case, change.settings)
        result = simulate(changed, keep=False)
    except InputError as error:
        return Outcome(change, math.nan, None, f"cannot be: {_short(error)}", ())
    if result.oom is not None:
        over = show(result.oom["needed_bytes"] - result.oom["usable_bytes"], "bytes")
        return Outcome(change, math.nan, None, f"does not fit: {over} too many in {result.oom['tier']}", assignments)
    ttft = result.as_dict()["metrics"]["ttft_ms"]
    return Outcome(change, speed_of(result), ttft["mean"] if ttft else None, "", assignments)


def changed_case(case: Case, settings: Sequence[tuple[str, Any]]) -> tuple[Case, tuple[str, ...]]:
    """Return a case with settings laid over it, and the ``--set`` assignments that do the same.

    Raises
    ------
    InputError
        If the case was not loaded from a file or mapping, or a setting is wrong.
    """
    if not isinstance(case.document.data, dict):
        raise InputError("scenario", expected="one that was loaded from a file", got="one without a document", fix="use load_case")
    document = lay(case.document, [(path, value, "what-if") for path, value in settings])
    scenario = config.build(Scenario, document).model_copy(update={"name": case.scenario.name, "engine": case.scenario.engine})
    out = make_case(scenario, document, case.base)
    if "routing" in case.__dict__ and all(
        getattr(scenario, x) == getattr(case.scenario, x) for x in ("model", "trace", "workload", "seed")
    ):
        out.__dict__["routing"] = case.routing
    return out, document.assignments[len(case.document.assignments) :]


def times_as_fast(case: Case, channel: str, factor: float) -> tuple[str, float]:
    """Return the setting that makes a channel of a case so many times as fast as it is."""
    return f"hardware_scale.{channel}", case.scenario.hardware_scale.get(channel, 1.0) * factor


def _short(error: InputError) -> str:
    text = f"{error.what}: " + ", ".join(
        x for x in (error.expected and f"expected {error.expected}", error.got and f"got {error.got}") if x
    )
    return text if len(text) <= 160 else text[:157] + "..."
