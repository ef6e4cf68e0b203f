"""What holds for every scenario: bytes conserved, atomic sets, slots never shared in time, causality, lower bounds, chunked planning."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import metrics_reference as reference
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from planner_cases import Drawn, case, machine, model, plan, real_model, trace

from moesim import metrics
from moesim.cost import CostModel
from moesim.engines.des import DesEngine
from moesim.errors import InputError
from moesim.layout import PoolPlan
from moesim.ledger import largest, spread
from moesim.metrics import compiled as metrics_compiled
from moesim.metrics import kernel as metrics_kernel
from moesim.metrics.stream import Meter
from moesim.planner import Planner
from moesim.policies.cache import Access, ExpertPool, future_uses, hottest, make_policy
from moesim.schedule import Fragment, Kind, Outcome
from moesim.simulate import Case
from moesim.tasks import Tasks, join, watermark
from moesim.timeline import Timeline
from moesim.trace import load_trace

some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
one_of = st.sampled_from


@st.composite
def pools(draw: st.DrawFn, n_experts: int) -> dict[str, Any]:
    policy = draw(one_of(["static", "lru", "lfu", "belady"]))
    return {
        "hold": draw(one_of(["all", "fit", "none", "50 %", "3 kB", *range(n_experts + 1)])),
        "policy": policy,
        "scope": draw(one_of(["layer", "global"])),
        "refresh_tokens": draw(one_of([0, 0, 1, 3])) if policy == "static" else 0,
        "transient_slots": draw(one_of([0, 0, 1, 3])),
        "warm": draw(st.booleans()),
        "inclusive": draw(st.booleans()),
    }


@st.composite
def cases(draw: st.DrawFn) -> Drawn:
    """A random scenario; combinations that the layout refuses are left out."""
    n_layers, n_experts = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    top_k = draw(st.integers(1, min(3, n_experts)))
    batch, output = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    prompt = draw(st.integers(0 if output else 1, 5))
    moe = sorted(draw(st.sets(st.integers(0, n_layers - 1), min_size=1)))
    layers = ",".join(map(str, moe)) if draw(st.booleans()) else "all"
    experts = {"n_experts": n_experts, "top_k": top_k, "layers": layers, "n_shared": draw(one_of([0, 0, 1]))}
    declared = draw(st.booleans())
    of = model(n_layers, n_experts, top_k) if declared else real_model(n_layers, experts=experts, dense_ffn={"intermediate_size": 8})
    n_moe = n_layers if declared or layers == "all" else len(moe)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    rows = batch * (prompt + output + 1)
    ids = np.array([[rng.choice(n_experts, top_k, replace=False) for _ in range(n_moe)] for _ in range(2 * rows)], np.int16)
    routing = trace(ids, seq=[t // (rows // batch) for t in range(2 * rows)], prompt=prompt, n_experts=n_experts)
    vram = draw(one_of([None, 2_500, 8_000, 20_000, 100_000]))
    on = machine(
        vram,
        draw(one_of([9_000, 30_000, 100_000])),
        draw(one_of([True, True, True, False])),
        npu=draw(st.booleans()),
        fast=draw(st.booleans()),
    )
    devices = list(on["devices"])
    precision: dict[str, Any] = {"default": "raw-int8", "kv": "raw-int8"}
    if draw(st.booleans()):
        precision["overrides"] = [{"part": "routed_experts", "layers": "0", "format": "raw-int4"}]
    placement: dict[str, Any] = {
        "site": draw(one_of(["fetch", "fetch", "in-place", "hybrid"])), "stream_from": draw(one_of(["never", "never", "cheaper", 2]))
    }  # fmt: skip
    split = draw(one_of([False, False, True]))
    placement |= (
        {"split": draw(st.permutations(devices))[: draw(st.integers(1, len(devices)))]}
        if split
        else {"experts": draw(one_of(["", "", *devices]))}
    )
    if draw(st.booleans()):
        part, device = draw(one_of(["attention", "routed_experts", "shared_expert"])), draw(one_of(devices))
        placement["layers"] = [{"layers": str(draw(st.integers(0, n_layers - 1))), "part": part, "device": device}]
    tiers = ["unified"] if vram is None else ["vram", "ram"]
    buffers = draw(st.integers(2, 3))
    prefetch = {
        "predictor": draw(one_of(["none", "oracle", "popularity", "previous", "cooccurrence"])), "distance": draw(st.integers(1, min(n_moe, buffers - 1, 3))),
        "into": draw(one_of(["cache", "buffers"])), "buffers": buffers,
    }  # fmt: skip
    memory = {
        "kv": draw(one_of(["maximum", "live", "paged"])), "kv_block_tokens": 4, "kv_from_experts": draw(one_of([False, False, True])),
        "arena": draw(one_of(["grown", "maximum"])),
    }  # fmt: skip
    try:
        it = case(
            routing, on=on, of=of, precision=precision, placement=placement, pools={tier: draw(pools(n_experts)) for tier in tiers},
            trace={"train_fraction": 0.5}, prefetch=prefetch, memory=memory, granularity=draw(one_of(["expert", "matrix", "layer"])),
            workload={"batch": batch, "prompt_tokens": prompt, "output_tokens": output, "prefill_chunk": draw(st.integers(1, 4))},
            lanes=draw(one_of(["fifo", "priority"])), io={"threads": draw(st.integers(1, 3)), "fast_map": draw(one_of(["file-order", "refreshed"]))},
            pipeline={"micro_batches": draw(st.integers(1, 4)), "queue_depth": draw(st.integers(1, 3)), "hidden_states": draw(one_of(["shared", "staged"]))},
        )  # fmt: skip
        it.routing.steps  # noqa: B018  loads the trace while its file is there
    except InputError:
        assume(False)
        raise
    return Drawn(it)


# ---- logical order


def check_pools(planner: Planner) -> None:
    """Bytes are conserved: residents, free room and pool agree in every tier, and never pass the plan."""
    for tier, pool in planner.loader.pools.items():
        by_cache: dict[int, int] = defaultdict(int)
        for key, resident in pool.residents.items():
            assert resident.bytes == planner.loader._size(key)
            by_cache[pool.cache_of(key)] += resident.bytes
        for i, (cache, rooms) in enumerate(zip(pool.caches, pool.rooms, strict=True)):
            assert set(cache.resident) == {k for k in pool.residents if pool.cache_of(k) == i}
            assert cache.used_bytes == by_cache[i] <= cache.capacity_bytes
            assert rooms.untouched + sum(size for _, size, _ in rooms.freed) + cache.used_bytes == cache.capacity_bytes
        assert sum(cache.capacity_bytes for cache in pool.caches) <= planner.layout.pools[tier].bytes
        if planner.layout.pools[tier].spec.scope == "layer" and pool.residents:
            slots = [(pool.cache_of(k), r.slot) for k, r in pool.residents.items()]
            assert len(set(slots)) == len(slots) and all(s >= 0 for _, s in slots)
    for passing in (*planner.loader.passing.values(), *planner.loader.buffers):
        held = sum(r.bytes for group in passing.held.values() for r in group.values())
        assert passing.free_bytes + held == passing.capacity_bytes
        assert passing.rooms.untouched + sum(size for _, size, _ in passing.rooms.freed) == passing.free_bytes


def planned(it: Case, steps_per_fragment: int, check: bool = False) -> tuple[Planner, list[Fragment]]:
    planner = it.planner()
    fragments = []
    for fragment in planner.fragments(steps_per_fragment):
        fragments.append(fragment)
        if check:
            check_pools(planner)
    return planner, fragments


def timed(
    it: Case, planner: Planner, fragments: list[Fragment], kernels: Any = metrics_kernel
) -> tuple[Timeline, Tasks, Meter, reference.Tasks]:
    engine, prices = DesEngine(planner.lanes), CostModel(it.hardware)
    parts = [(fragment, prices.costs(fragment)) for fragment in fragments]
    shape = it.model.n_layers, it.model.n_experts, len(planner.tiers), planner.initial_memory()
    meter = Meter(planner.lanes, *shape, kernels=kernels, keep=True)
    ended = []
    for fragment, costs in parts:
        ended.append(engine.advance(fragment, costs))
        meter.add(fragment, costs, ended[-1])
    ended.append(engine.finish())
    meter.finish(ended[-1])
    timeline = Timeline.concat(ended)
    return timeline, join(parts, timeline, meter), meter, reference.join(planner.lanes, parts, timeline)


class Violation(AssertionError):
    pass


@pytest.fixture
def atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every access to a pool is watched: a set never evicts its own members, nor anything that is pinned."""
    original = ExpertPool.access

    def watched(self: ExpertPool, keys: Any, now: int) -> Access:
        pinned = [key for key in self.resident if self.is_pinned(key)]
        out = original(self, keys, now)
        if set(out.evicted) & {*keys, *pinned}:
            raise Violation(f"{out.evicted} left for {keys}, pinned {pinned}")
        return out

    monkeypatch.setattr(ExpertPool, "access", watched)


@given(cases())
@settings(some, suppress_health_check=[*HealthCheck])
def test_plan(atomic: None, drawn: Drawn) -> None:
    """Logical invariants, step by step; and chunks of any size give the same schedule and the same times."""
    it = drawn.case
    planner, steps = planned(it, 1, check=True)
    n = planner.n_experts
    expected = 0
    work = it.routing.steps
    for step in list(work)[: len(steps)]:
        ids = it.routing.used.expert_ids[step.rows]
        for part in np.array_split(np.arange(len(step.rows)), planner.micro_batches):
            expected += sum(len(np.unique(ids[part, :, i])) for i in range(ids.shape[2]))
    seen = [tuple(a[:3]) for f in steps for a in f.access]
    assert len(seen) == expected and all(0 <= e < n for _, _, e in seen)
    if planner.micro_batches == 1:
        assert len(set(seen)) == len(seen)
    for f in steps:
        for row in range(f.n_tasks):
            assert all(t < f.first_task + row for t, _ in f.deps(row))
    if not steps:
        return
    timeline, tasks, meter, whole = timed(it, planner, steps)
    check_time(it, planner, steps, tasks, meter)
    check_critical_path(whole)
    check_meter(it, planner, tasks, meter, whole)
    for size, kernels in ((3, metrics_compiled), (10_000, metrics_kernel)):
        other, chunks = planned(it, size)
        again, _, same, _ = timed(it, other, chunks, kernels)
        for column in fields(Timeline):
            np.testing.assert_array_equal(getattr(timeline, column.name), getattr(again, column.name), err_msg=column.name)
        for measure in (metrics.summary, metrics.transfers, metrics.lane_use, metrics.critical_shares):
            assert json.dumps(measure(meter)) == json.dumps(measure(same))
        for name in ("steps", "step_end_ps", "drawn", "peak_bytes"):
            np.testing.assert_array_equal(getattr(meter, name), getattr(same, name), err_msg=name)


def check_meter(it: Case, planner: Planner, tasks: Tasks, meter: Meter, whole: reference.Tasks) -> None:
    """What is summed up step by step is what all tasks at once give."""
    for name in ("summary", "transfers", "lane_use", "critical_shares"):
        assert json.dumps(getattr(metrics, name)(meter)) == json.dumps(getattr(reference, name)(whole))
    mark = reference.watermark(whole, planner.tiers, planner.lines, planner.initial_memory())
    assert meter.peak_bytes.tolist() == [mark.peak_bytes(tier) for tier in range(len(planner.tiers))]
    compute = tasks.is_compute
    np.testing.assert_array_equal(tasks.free_of_loads[compute], whole.free_of_loads[compute])
    np.testing.assert_array_equal(tasks.useful, reference.useful_loads(whole))
    for number in range(len(tasks.lanes)):
        mine = tasks.lane == number
        np.testing.assert_array_equal(meter.drawn[number], tasks.amounts[mine].sum(axis=0))


# ---- time


def check_time(it: Case, planner: Planner, fragments: list[Fragment], tasks: Tasks, meter: Meter) -> None:
    start, end = tasks.start.tolist(), tasks.end.tolist()
    for t in range(len(start)):
        for d in range(tasks.dep_start[t], tasks.dep_start[t + 1]):
            assert end[tasks.dep_task[d]] <= start[t] <= end[t]
    for number, lane in enumerate(tasks.lanes):
        mine = np.nonzero(tasks.lane == number)[0]
        events = sorted(
            [(start[t], 1) for t in mine if end[t] > start[t]] + [(end[t], -1) for t in mine if end[t] > start[t]],
            key=lambda x: (x[0], x[1]),
        )
        running = 0
        for _, change in events:
            running += change
            assert running <= lane.width
        assert tasks.makespan_ps * lane.width >= sum(end[t] - start[t] for t in mine)
    check_memory(it, planner, tasks, meter)
    if it.scenario.granularity != "layer":
        check_slots(planner, fragments, tasks)
    counts = metrics.accesses(meter)
    assert sum(counts.values()) == len(tasks.access)
    assert metrics.io_wait_s(meter) >= 0
    coverage, exposed = metrics.transfers_overlap(meter, False)
    assert exposed >= 0 and (coverage is None or 0 <= coverage <= 1)
    for line in metrics.transfers(meter).values():
        copies = line["bytes"] - line["demand_bytes"] - line["prefetch_useful_bytes"] - line["prefetch_wasted_bytes"]
        assert copies >= 0 and line["busy_s"] * 1e12 <= tasks.makespan_ps + 1


def check_critical_path(tasks: reference.Tasks) -> None:
    """Contiguous from time 0 to the end of the last step's gate."""
    path = reference.critical_path(tasks)
    gate = int(tasks.steps[-1, 2])
    assert path[0] == gate and tasks.start[path[-1]] == 0
    for later, earlier in zip(path, path[1:], strict=False):
        assert tasks.end[earlier] == tasks.start[later]
    assert sum(int(tasks.end[t] - tasks.start[t]) for t in path) == tasks.end[gate]
    shares = reference.critical_shares(tasks)
    assert sum(row["share"] for row in shares) == pytest.approx(1.0 if tasks.end[gate] else 0.0)
    assert all(0 <= row["contention"] <= row["share"] + 1e-12 for row in shares)


def check_memory(it: Case, planner: Planner, tasks: Tasks, meter: Meter) -> None:
    layout = it.layout
    mark = watermark(tasks, planner.tiers, planner.lines, planner.initial_memory())
    for number, tier in enumerate(planner.tiers):
        assert meter.peak_bytes[number] <= layout.capacities[tier].usable_bytes
        if layout.ledger.fits and not it.scenario.memory.kv_from_experts:
            assert meter.peak_bytes[number] <= layout.ledger.planned_bytes(tier)
        for line, name in enumerate(planner.lines):
            level = mark.series(number, line)[1]
            assert level.min() >= 0
            if name == "routed experts" and tier in layout.pools:
                assert level.max() <= layout.pools[tier].bytes


def check_slots(planner: Planner, fragments: list[Fragment], tasks: Tasks) -> None:
    """A slot is loaded only after all that used it before has ended, and used only after it is loaded."""
    layout, main = planner.layout, planner.layout.main_tier
    slots = np.concatenate([f.slot for f in fragments]).tolist()
    target: dict[int, str] = {}
    for number, lane in enumerate(tasks.lanes):
        link = layout.hardware.links.get(lane.name)
        target[number] = link.target if link is not None else main if lane.name in layout.hardware.storage else layout.tier_of(lane.name)
    holds: dict[tuple[str, int], tuple[int, int]] = {}
    busy: dict[tuple[str, int], list[int]] = defaultdict(list)
    where: dict[tuple[str, int, int], tuple[str, int]] = {}
    for t, slot in enumerate(slots):
        if slot < 0:
            continue
        tier, key = target[int(tasks.lane[t])], (int(tasks.layer[t]), int(tasks.expert[t]))
        place = (tier, slot)
        if tasks.kind[t] == Kind.LOAD:
            piece = holds.get(place) == key and all(tasks.kind[u] == Kind.LOAD and target[int(tasks.lane[u])] == tier for u in busy[place])
            if not piece:
                assert all(tasks.end[u] <= tasks.start[t] for u in busy[place]), f"task {t} fills {place} while it is in use"
                holds[place], busy[place] = key, []
            busy[place].append(t)
            where[tier, *key] = place
            link = layout.hardware.links.get(tasks.lanes[int(tasks.lane[t])].name)
            if link is not None:  # it reads a slot of the other tier
                source = where.get((link.source, *key))
                if source is not None and holds.get(source) == key:
                    busy[source].append(t)
        else:
            if place in holds:
                assert holds[place] == key, f"task {t} finds {holds[place]} in {place}, not {key}"
            busy[place].append(t)


# ---- outcomes against an independent replay


def replay(it: Case, tier: str, popularity: Any) -> list[tuple[int, int, int, bool]]:
    """Hits of a pool on its own: one policy object a cache, sets in order, waves where a set is too large."""
    layout, routing = it.layout, it.routing
    pool: PoolPlan = layout.pools[tier]
    n, moe = layout.model.n_experts, layout.moe_layers
    size = [layout.expert_bytes[layer] for layer in moe]
    sets = []
    for step in routing.steps:
        ids = routing.used.expert_ids[step.rows.ravel()]
        for i in range(len(moe)):
            sets.append((step.index, i, [i * n + int(e) for e in np.unique(ids[:, i])]))
    future = future_uses([(s * len(moe) + i, keys) for s, i, keys in sets])

    def fresh(budget: int) -> ExpertPool:
        return ExpertPool(budget, lambda key: size[key // n], make_policy(pool.spec.policy, future))

    if pool.spec.scope == "global":
        shared = fresh(pool.bytes)
        caches = [shared] * len(moe)
        start = [(shared, hottest(popularity, size, pool.bytes, per_layer=False))]
    else:
        caches = [fresh(count * s) for count, s in zip(pool.counts, size, strict=True)]
        start = [(c, [i * n + int(e) for e in np.argsort(-popularity[i], kind="stable")[: pool.counts[i]]]) for i, c in enumerate(caches)]
    if pool.spec.policy == "static" or pool.spec.warm:
        for cache, keys in start:
            cache.preload(keys)
    out = []
    for s, i, keys in sets:
        for wave in caches[i].split_waves(keys):
            found = caches[i].access(wave, s * len(moe) + i)
            out += [(s, moe[i], key % n, key in found.hits) for key in wave]
    return out


@given(cases())
@settings(
    some, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
)  # most have no one pool to replay
def test_hits_equal_a_replay_of_the_pool(drawn: Drawn) -> None:
    """Without prefetch, refresh, shrinking or micro-batches the planner's hits are those of the pool alone."""
    it = drawn.case
    scenario = it.scenario
    assume(not scenario.placement.split)  # a pool holds some of the experts only
    object.__setattr__(scenario, "placement", scenario.placement.model_copy(update={"stream_from": "never"}))
    layout = type(it.layout)(scenario, it.model, it.plan, it.hardware)
    tops = {layout.tier_of(device) for device in layout.expert_device}
    assume(len(tops) == 1 and not scenario.memory.kv_from_experts)
    (tier,) = tops
    assume(not (layout.in_place and tier != layout.main_tier))
    object.__setattr__(scenario, "prefetch", scenario.prefetch.model_copy(update={"predictor": "none"}))
    object.__setattr__(scenario, "pipeline", scenario.pipeline.model_copy(update={"micro_batches": 1}))
    again = Case(scenario, it.model, it.plan, it.hardware, type(it.layout)(scenario, it.model, it.plan, it.hardware), it.document, it.base)
    again.__dict__["routing"] = it.routing
    pool = again.layout.pools[tier]
    assume(not (pool.spec.policy == "static" and pool.spec.refresh_tokens))
    assume(again.layout.disk or tier != again.layout.main_tier)  # an origin that starts full
    planner, fragments = plan(again)
    got = {(int(a[0]), int(a[1]), int(a[2]), a[3] == Outcome.CACHE) for f in fragments for a in f.access}
    want = set(replay(again, tier, it.routing.popularity))
    ran = {f_step for f in fragments for f_step in f.steps[:, 0].tolist()}
    assert got == {row for row in want if row[0] in ran}


ORACLE_FILE = "gptoss20b_Polyglot-or-Not_Fact-Completion.npz"


@pytest.mark.parametrize("policy,scope,name,fraction", [
    ("lru", "layer", "lru", "0.25"), ("lfu", "layer", "lfu", "0.5"), ("belady", "layer", "belady", "0.25"), ("static", "layer", "static", "0.5"),
    ("lru", "global", "lru_global", "0.25"),
])  # fmt: skip
def test_planner_hits_equal_the_reference(shared: Path, policy: str, scope: str, name: str, fraction: str) -> None:
    """Row by row through the planner, per-layer pools of C slots: the reference's integers on a real gpt-oss trace.

    ``train_fraction`` 0 lets the static set learn from the very rows that run, as the reference's does.
    """
    reference = json.loads((shared / "traces" / "oracle_shared.json").read_text())
    part = reference["traces"][ORACLE_FILE]["all"]
    want = part["cache"][fraction][name]
    routing = load_trace(shared / "traces" / ORACLE_FILE)
    assert part["cache_rows"] == routing.n_rows == 1188 and part["sequences"] == 4
    slots = part["cache"][fraction]["slots_per_layer"]
    of = model(24, 32, 4) | {"declared": {"shared_params": 2400, "expert_params": 24 * 10}}
    decode = trace(routing.expert_ids, n_experts=32)  # one long answer: rows in file order
    it = case(
        decode,
        of=of,
        on=machine(1_000_000, 1_000_000, ssd=False),
        pools={"vram": {"hold": slots, "policy": policy, "scope": scope}, "ram": {"hold": "all"}},
    )
    planner = it.planner()
    hits = np.zeros(24, np.int64)
    total = 0
    for fragment in planner.fragments(64):
        hit = fragment.access[:, 3] == Outcome.CACHE
        hits += np.bincount(fragment.access[hit, 1], minlength=24)
        total += len(hit)
    assert (int(hits.sum()), total) == (want["hits"], want["accesses"])
    if "hits_per_layer" in want:
        assert hits.tolist() == want["hits_per_layer"]


# ---- ledger


@given(st.integers(0, 10_000), st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(0, 12))
def test_spread_uses_a_budget_evenly(budget: int, sizes: list[int], most: int) -> None:
    counts = spread(budget, sizes, [most] * len(sizes))
    assert sum(c * s for c, s in zip(counts, sizes, strict=True)) <= budget
    assert max(counts) <= most and max(counts) - min(counts) <= 1
    limits = [most // (i + 1) for i in range(len(sizes))]
    enough = sum(c * s for c, s in zip(limits, sizes, strict=True))
    assert spread(enough, sizes, limits) == limits  # what fits whole is taken whole


@given(st.integers(-1, 5000), st.integers(0, 4000))
def test_largest_is_the_largest(last: int, limit: int) -> None:
    assert largest(lambda n: n <= last, limit) == min(last, limit)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12),
)
def test_unions_and_overlaps_equal_counting_every_instant(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    def made(rows: list[tuple[int, int]]) -> tuple[Any, set[int]]:
        begin = np.array([x for x, _ in rows], np.int64)
        stop = begin + np.array([n for _, n in rows], np.int64)
        return reference.union(begin, stop), {t for x, n in rows for t in range(x, x + n)}

    (left, ticks), (right, tocks) = made(a), made(b)
    assert reference.length(left) == len(ticks) and reference.overlap(left, right) == len(ticks & tocks)
    assert all(p[1] < q[0] for p, q in zip(left, left[1:], strict=False))  # disjoint, and not even touching
