"""Closed forms and field claims, found again by simulation (CLAIMS.md: M1, M2, M4, M5, M9, P1, P2, H4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metrics_reference import Tasks, join
from planner_cases import case, machine, model, trace

from moesim.cost import CostModel
from moesim.hardware import load_hardware
from moesim.layout import Layout
from moesim.metrics import PS
from moesim.model_files import load_model
from moesim.precision import plan_from
from moesim.scenario import MemoryPlan, Placement, Pool, Scenario, TraceUse, Workload, load_scenario
from moesim.schedule import Kind
from moesim.simulate import Case, Result, make_case, simulate

GB = 10**9
PLAN_C = {"default": "raw-int8", "routed_experts": "raw-int4", "kv": "fp16"}
KV_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # claim M2


def plan_c(workload: Workload, **memory: Any) -> Case:
    """Plan C of claim M4, routed at random: what memory does depends on no routing."""
    scenario, _, _ = load_scenario("ref-23b-plan-c")
    return make_case(scenario.model_copy(update={
        "trace": TraceUse(generate="uniform"), "workload": workload, "memory": scenario.memory.model_copy(update=memory),
    }))  # fmt: skip


def tasks_of(result: Result) -> Tasks:
    prices = CostModel(result.case.hardware)
    parts = [(fragment, prices.costs(fragment)) for fragment in result.schedule.fragments]
    return join(result.schedule.lanes, parts, result.timeline)


def alone(tasks: Tasks, layer: int, *kinds: Kind, step: int = 1) -> int:
    """Time of the tasks of some kinds in one layer, each with every channel to itself."""
    mine = (tasks.layer == layer) & (tasks.step == step) & np.isin(tasks.kind, kinds)
    return int(tasks.alone[mine].sum())


# ---- P1


def p1(link: str, prefetch: dict[str, Any]) -> Tasks:
    """Twelve layers of one expert each over a link; the GPU draws so little memory bandwidth that nothing contends."""
    on = machine(launch="10 us")
    on["channels"]["up"]["bandwidth"] = link
    on["devices"]["gpu"]["memory_efficiency"] = 0.5
    ids = [[(t + layer) % 4 for layer in range(12)] for t in range(3)]
    return tasks_of(
        simulate(case(trace(ids), of=model(12), on=on, pools={"vram": {"hold": "none"}, "ram": {"hold": "all"}}, prefetch=prefetch))
    )


COMPUTE = (Kind.ATTENTION, Kind.ROUTER, Kind.FFN, Kind.COMBINE)


@pytest.mark.parametrize("link,io_bound", [("1 GB/s", False), ("2 MB/s", True)])
def test_p1_without_overlap_a_layer_takes_compute_plus_io(link: str, io_bound: bool) -> None:
    tasks = p1(link, {"predictor": "none"})
    for layer in (4, 5, 6):
        compute, io = alone(tasks, layer, *COMPUTE), alone(tasks, layer, Kind.LOAD)
        assert (io > compute) == io_bound
        combines = [t for t in range(len(tasks.kind)) if tasks.kind[t] == Kind.COMBINE and tasks.step[t] == 1]
        assert tasks.end[combines[layer]] - tasks.end[combines[layer - 1]] == compute + io


@pytest.mark.parametrize("link,io_bound", [("1 GB/s", False), ("2 MB/s", True)])
@pytest.mark.parametrize("distance", [1, 2])
def test_p1_with_perfect_prefetch_a_layer_takes_the_longer_of_both(link: str, io_bound: bool, distance: int) -> None:
    tasks = p1(link, {"predictor": "oracle", "into": "buffers", "buffers": distance + 1, "distance": distance})
    combines = [t for t in range(len(tasks.kind)) if tasks.kind[t] == Kind.COMBINE and tasks.step[t] == 1]
    for layer in (4, 5, 6):
        compute, io = alone(tasks, layer, *COMPUTE), alone(tasks, layer, Kind.LOAD, step=1)
        assert (io > compute) == io_bound
        assert tasks.end[combines[layer]] - tasks.end[combines[layer - 1]] == max(compute, io)


def test_p2_eight_experts_of_600_mb() -> None:
    """A batch of four tokens that hits 8 different experts in each layer reads 4.8 GB, 2.4 s at 2 GB/s. One layer's share is 18.75 MB."""
    scenario, _, base = load_scenario("ref-23b-plan-c")
    ids = np.tile(np.arange(8, dtype=np.int16).reshape(4, 1, 2), (1, 32, 1))
    it = make_case(scenario.model_copy(update={
        "trace": TraceUse(generate="uniform"), "workload": Workload(output_tokens=1, batch=4),
        "placement": Placement(experts="npu", pools={"unified": Pool(hold="none")}),
    }), base=base)  # fmt: skip
    routing = it.routing
    ids = np.concatenate([ids] * 2)[: routing.used.n_rows]
    object.__setattr__(routing.used, "expert_ids", np.resize(ids, routing.used.expert_ids.shape))
    rows = routing.steps.answers.ravel()
    routing.used.expert_ids[rows] = ids[:4]
    assert it.layout.expert_bytes[0] == 18_750_000
    result = simulate(it).as_dict()["transfers"]["ssd"]
    assert result["bytes"] == 8 * 600 * 10**6
    assert result["busy_s"] == pytest.approx(2.4, rel=0.01)


# ---- two stages


@pytest.mark.parametrize("slow", ["gpu", "npu"])
def test_two_stage_pipeline_runs_at_the_pace_of_its_slower_stage(slow: str) -> None:
    """GPU (attention, router, combine) and NPU (FFN): one micro-batch takes a + f a layer, two take 2 max(a, f)."""
    on = machine(None, npu=True)
    for name in ("gpu", "npu"):
        on["devices"][name] |= {"memory_efficiency": 0.3, "launch": "40 us" if name == slow else "10 us"}
    ids = [[layer % 4 for layer in range(10)]] * 4
    periods = {}
    for m in (1, 2):
        it = case(trace(ids, seq=[0, 0, 1, 1]), of=model(10), on=on, placement={"experts": "npu"}, pools={"unified": {"hold": "all"}},
                  workload={"batch": 2, "output_tokens": 2}, pipeline={"micro_batches": m})  # fmt: skip
        tasks = tasks_of(simulate(it))
        a, f = alone(tasks, 5, Kind.ATTENTION, Kind.ROUTER, Kind.COMBINE), alone(tasks, 5, Kind.FFN)
        ends = [
            max(int(tasks.end[t]) for t in np.nonzero((tasks.kind == Kind.COMBINE) & (tasks.step == 1) & (tasks.layer == x))[0])
            for x in range(10)
        ]
        periods[m] = set(np.diff(ends[2:8]).tolist())
        assert periods[m] == {a + f if m == 1 else max(a, f)}, (periods, a, f)  # a and f add the micro-batches up


# ---- M: memory


def test_m1_weights() -> None:
    ref = load_model("ref-23b")
    assert ref.params_total == 23_200_000_000
    assert ref.weight_bytes(plan_from("fp16")) == 46.4 * GB
    mixed = plan_from(PLAN_C)
    assert (ref.part_bytes(mixed, "routed_experts"), ref.part_bytes(mixed, "attention")) == (9.6 * GB, 4.0 * GB)
    assert ref.weight_bytes(mixed) == 13.6 * GB


def test_m2_kv_cache() -> None:
    ref, plan = load_model("ref-23b"), plan_from(PLAN_C)
    assert ref.kv_bytes(plan, 8192) == 8192 * KV_PER_TOKEN == 1_073_741_824  # 1.074 GB


def test_m4_plan_c() -> None:
    it = plan_c(Workload(prompt_tokens=64, output_tokens=128))
    tiers = it.layout.ledger.tiers()["unified"]
    assert {line["name"]: line["bytes"] for line in tiers["lines"] if line["pool"] != "buffers"} == {
        "weights: shared part": 4 * GB, "routed experts": 4.8 * GB, "KV cache": 2 * GB, "workspace": 2 * GB, "runtime": 0.5 * GB,
    }  # fmt: skip
    queues = sum(line["bytes"] for line in tiers["lines"] if line["pool"] == "buffers")  # hidden states on their way: not in the claim
    assert queues < 0.01 * GB
    assert tiers["planned_bytes"] - queues == 13.3 * GB and tiers["left_bytes"] + queues == 2.7 * GB


def last_context(it: Case) -> int:
    """The context at which a run ended, out of memory or done: tokens in the cache after its last whole step."""
    result = simulate(it)
    work = it.scenario.workload
    return work.cached_tokens + len(tasks_of(result).steps)


def test_m5_two_context_lengths_and_the_cure() -> None:
    """The 2 GB allowance lasts to 15,258 tokens; with the margin of 2.7 GB to 35,858; a pool that gives way lasts longer."""
    near = Workload(cached_tokens=15_255, output_tokens=8)
    fixed = simulate(plan_c(near))
    assert fixed.oom is not None and (fixed.oom["tier"], fixed.oom["asked_by"], fixed.oom["step"]) == ("unified", "KV cache", 3)
    assert last_context(plan_c(near)) == 15_258 == 2 * GB // KV_PER_TOKEN
    assert plan_c(near).layout.kv_allowance_tokens == 15_258

    far = Workload(cached_tokens=35_850, output_tokens=16)
    live = plan_c(far, kv="live")
    slack = sum(line.bytes for line in live.layout.ledger.lines if line.name == "hand-over queues")
    reached = last_context(live)
    assert reached == (4_700_000_000 - slack) // KV_PER_TOKEN and 35_858 - reached <= 1  # the queues take some KB
    assert live.layout.max_context_tokens == reached
    assert simulate(live).oom is not None
    alone_on_gpu = make_case(live.scenario.model_copy(update={"placement": live.scenario.placement.model_copy(update={"experts": ""})}))
    assert last_context(alone_on_gpu) == 35_858  # without a hand-over the claim's figure to the token

    cured = plan_c(far, kv="live", kv_bytes=None, kv_from_experts=True)
    result = simulate(cured)
    assert result.oom is None and last_context(cured) == 35_866
    assert result.meter is not None and result.meter.peak_bytes[0] <= 16 * GB
    assert result.case.layout.max_context_tokens > 35_858


def test_m8_a_grown_model_no_longer_fits() -> None:
    """Twenty experts of which half are resident: the same plan needs 1.2 GB more; with the live KV of 35,000 tokens it is over."""
    it = plan_c(Workload(cached_tokens=30_000, output_tokens=1), kv="live", kv_bytes=None)
    assert it.layout.ledger.fits
    twenty = it.model.model_copy(update={"experts": it.model.experts.model_copy(update={"n_experts": 20})})
    pools = {"unified": Pool(hold=10, policy="lru")}
    scenario = it.scenario.model_copy(update={"placement": it.scenario.placement.model_copy(update={"pools": pools})})
    grown = Layout(scenario, twenty, it.plan, it.hardware)
    assert grown.ledger.planned_bytes("unified") - it.layout.ledger.planned_bytes("unified") == 1.2 * GB
    assert not grown.ledger.fits
    over = grown.ledger.first_over()
    assert over is not None and over[0] == "unified"


# ---- M9


def moe_70b(n_experts: int = 64, top_k: int = 4) -> dict[str, Any]:
    """70 B parameters of which 8 B are active: e = 62 / (n - k), shared 8 - k e; 80 layers, 8 K/V heads of 128."""
    expert = 62 * 10**9 // (n_experts - top_k) // 80 * 80
    return {
        "name": "moe-70b", "n_layers": 80, "hidden_size": 8192, "attention": {"kind": "full", "n_heads": 64, "n_kv_heads": 8, "head_dim": 128},
        "experts": {"n_experts": n_experts, "top_k": top_k},
        "declared": {"shared_params": 8 * 10**9 - top_k * expert, "expert_params": expert},
    }  # fmt: skip


def test_m9_reproduced_and_refuted() -> None:
    """The claim's table holds for active weights alone; then every other expert is fetched again for each token."""
    active = 8 * 10**9
    table = {"fp16": (16, 2), "int8": (8, 2), "int4": (4, 1)}  # GB of weights and of K/V, batch 1
    bits = {"fp16": 16, "int8": 8, "int4": 4}
    for name, (weights, _) in table.items():
        assert active * bits[name] / 8 == weights * GB
    assert 4 + 4 * 1 == 8  # INT4, batch 4: at the limit of 8 GB
    # (1) all weights: 70 B, not 8 B. Not even INT4 fits a card of 8 or 24 GB.
    ids = [[[(4 * t + i) % 64 for i in range(4)]] * 80 for t in range(3)]
    it = case(trace(ids, n_experts=64), of=moe_70b(), on=card(), precision={"default": "raw-int4", "kv": "fp16"}, workload={"output_tokens": 3},
              pools={"vram": {"hold": "none", "transient_slots": 4}, "ram": {"hold": "all"}}, memory={"context_tokens": 2048})  # fmt: skip
    assert abs(it.model.params_total - 70 * 10**9) < 10**4 and abs(it.model.params_active - active) < 10**4
    assert it.model.weight_bytes(it.plan) > 34 * GB
    # (2) keeping only what is active, by simulation: each token fetches its four experts of every layer again
    assert it.layout.ledger.fits and it.layout.ledger.planned_bytes("vram") < 8 * GB
    result = simulate(it).as_dict()
    moved = result["transfers"]["up"]["bytes"] / 3
    assert moved == 80 * 4 * it.layout.expert_bytes[0] == pytest.approx(2.07 * GB, rel=0.01)
    assert result["metrics"]["accesses"] == {"cache": 0, "prefetch": 0, "late": 0, "miss": 3 * 80 * 4}
    assert result["metrics"]["decode_tok_s"] < 24 * GB / moved  # under 12 tokens/s even at 24 GB/s over PCIe
    # (3) the K/V figure: 1 MB a token, three times what 80 GQA layers need
    per_token = sum(it.model.kv_bytes_per_token(it.plan, layer) for layer in range(80))
    assert per_token == 327_680
    assert 2 * GB / 2048 / per_token == pytest.approx(3.0, abs=0.03)


def card() -> dict[str, Any]:
    """An 8 GB card over 64 GB of RAM by 24 GB/s of PCIe."""
    out = machine(8 * GB, 64 * GB)
    for name, rate in {"vram": "500 GB/s", "ram": "80 GB/s", "up": "24 GB/s", "down": "24 GB/s"}.items():
        out["channels"][name]["bandwidth"] = rate
    out["devices"]["gpu"]["peak"] = dict.fromkeys(("fp32", "fp16", "int8"), "50 TFLOP/s")
    return out


# ---- H4


def test_h4_the_budget_does_not_add_up() -> None:
    attention, experts, loading, rest = 8e-3, 35e-3, 25e-3, 5e-3
    total = attention + experts + loading + rest
    assert total == pytest.approx(73e-3) and 1 / total == pytest.approx(13.7, abs=0.05)
    assert not 4 <= 1 / total <= 6  # "4 to 6 tokens/s", though nothing is hidden in this sum
    assert 1 / (total - 0.7 * loading) > 1 / total  # hiding makes the gap wider


def test_h4_reading_a_memory_bandwidth() -> None:
    """4 GB shared + 1.2 GB of experts a token: 4 to 6 tokens/s are 21 to 31 GB/s; 8 ms of attention would be 500 GB/s."""
    ref, plan = load_model("ref-23b"), plan_from(PLAN_C)
    shared = ref.part_bytes(plan, "attention")
    routed = ref.top_k * sum(ref.expert_bytes(plan, layer) for layer in range(32))
    assert (shared, routed) == (4 * GB, 1.2 * GB)
    assert [rate * (shared + routed) / GB for rate in (4, 6)] == pytest.approx([20.8, 31.2])
    assert shared / 8e-3 == 500 * GB
    for bandwidth, low, high in (("20.8 GB/s", 3.8, 4.01), ("31.2 GB/s", 5.6, 6.01)):
        assert low <= resident_speed(bandwidth) <= high
    hardware = load_hardware("ref-16gb")
    assert shared / hardware.stream_cap("gpu") == pytest.approx(78e-3, rel=0.01)  # ten times the claimed 8 ms, on an LPDDR5X machine


def resident_speed(bandwidth: str) -> float:
    """Decode speed of the reference model with every expert resident, if the GPU attains all of a memory bandwidth."""
    scenario = Scenario(
        name="h4", model="ref-23b", precision=PLAN_C, hardware="ref-16gb", trace=TraceUse(generate="uniform"), workload=Workload(output_tokens=3),
        hardware_set={"channels": {"unified": {"bandwidth": bandwidth, "facts": None}}, "devices": {"gpu": {"memory_efficiency": 1.0, "launch": "0 s"}}},
        placement=Placement(pools={"unified": Pool(hold="all")}), memory=MemoryPlan.model_validate({"workspace": "0 B"}),
    )  # fmt: skip
    speed = simulate(make_case(scenario)).as_dict()["metrics"]["decode_tok_s"]
    assert isinstance(speed, float)
    return speed


def test_h4_reading_b_hit_rate() -> None:
    """25 ms at 2 GB/s are 2.7 of 64 reads; T2's 80 % of hits are 240 MB: 120 ms, or 200 ms at 0.6 of the bandwidth."""
    ref, plan = load_model("ref-23b"), plan_from(PLAN_C)
    one, reads = ref.expert_bytes(plan, 0), 32 * ref.top_k
    rate = load_hardware("ref-16gb").read_bandwidth("ssd", 2**20, 8)
    assert rate == 2 * GB and (one, reads) == (18_750_000, 64)
    misses = 25e-3 * rate / one
    assert misses == pytest.approx(2.67, abs=0.01) and 1 - misses / reads == pytest.approx(0.958, abs=0.001)
    moved = 0.2 * reads * one
    assert moved == pytest.approx(240e6) and moved / rate == pytest.approx(0.120)
    derated = load_hardware("ref-16gb").derated(0.6).read_bandwidth("ssd", 2**20, 8)
    assert moved / derated == pytest.approx(0.200) and derated / moved == pytest.approx(5.0)
    # by simulation: the SSD is busy for 9.4 ms a miss, whatever else happens
    result = simulate(plan_c(Workload(output_tokens=4)))
    tasks = tasks_of(result)
    n_reads = int((tasks.kind == Kind.LOAD).sum())
    assert n_reads == result.as_dict()["metrics"]["accesses"]["miss"]
    assert result.as_dict()["transfers"]["ssd"]["busy_s"] == pytest.approx(n_reads * one / rate, rel=0.01)


def test_h4_reading_c_wait_per_layer() -> None:
    """P6's 7 ms of waiting, if meant per layer: 224 ms a token, 4.5 tokens/s; before the map 25 ms: 0.8 s."""
    assert 32 * 7e-3 == pytest.approx(0.224) and 1 / (32 * 7e-3) == pytest.approx(4.46, abs=0.01)
    assert 32 * 25e-3 == pytest.approx(0.8)


def test_makespan_is_the_critical_path() -> None:
    result = simulate(plan_c(Workload(prompt_tokens=16, output_tokens=3)))
    tasks = tasks_of(result)
    assert sum(row["share"] for row in result.as_dict()["critical_path"]) == pytest.approx(1.0)
    assert result.as_dict()["metrics"]["e2el_ms"]["mean"] == pytest.approx(float(tasks.end[tasks.steps[-1, 2]]) * PS * 1e3)
