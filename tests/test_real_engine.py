"""Real runs: what they count is what the schedule says, what they compute is right, and what is wrong stops them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real runs need torch (pip install 'moesim[validate]')")

from moesim import metrics  # noqa: E402
from moesim.cost import CostModel  # noqa: E402
from moesim.engines import real  # noqa: E402
from moesim.engines.real_layers import Batch, Network  # noqa: E402
from moesim.engines.real_program import Program  # noqa: E402
from moesim.engines.real_slots import at_start, tier_slots, traffic  # noqa: E402
from moesim.engines.real_tasks import LoadTask, WrongExpert  # noqa: E402
from moesim.engines.real_weights import RandomWeights, TinyMoeWeights, load_weights  # noqa: E402
from moesim.errors import InputError  # noqa: E402
from moesim.expert_store.builder import build_store  # noqa: E402
from moesim.expert_store.readers import open_reader  # noqa: E402
from moesim.host.arena import Arena, OutOfMemory  # noqa: E402
from moesim.model import ModelSpec  # noqa: E402
from moesim.precision import PrecisionPlan  # noqa: E402
from moesim.scenario import Scenario  # noqa: E402
from moesim.schedule import Kind, Outcome, Schedule  # noqa: E402
from moesim.simulate import Case, load_meter, make_case  # noqa: E402
from moesim.timeline import CAUSE_HEAD_OF_LINE, Timeline  # noqa: E402

TINYMOE = Path(__file__).resolve().parents[1] / "traces" / "tinymoe"

SMALL = {
    "name": "small-real", "n_layers": 4, "hidden_size": 256, "vocab_size": 128, "tied_embeddings": True,
    "attention": {"kind": "full", "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "qk_norm": "head", "bias": True, "o_bias": True},
    "attention_overrides": [{"layers": [2], "attention": {"kind": "sliding", "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "window": 5}}],
    "experts": {"n_experts": 8, "top_k": 2, "intermediate_size": 256, "n_shared": 1, "shared_gate": True, "layers": "1-3"},
    "dense_ffn": {"intermediate_size": 128},
}  # fmt: skip
BF16 = {"default": "bf16", "kv": "bf16"}


def case(pools: dict[str, Any] | None = None, **settings: Any) -> Case:
    """Decode (or what is set) of the bundled model on the CPU, its experts half in memory."""
    placement = {"attention": "cpu", "experts": "cpu"} | settings.pop("placement", {})
    data = {
        "name": "real", "model": "tinymoe", "precision": BF16, "hardware": "laptop-8gb",
        "trace": {"source": "tinymoe", "sequences": "chain"}, "workload": {"prompt_tokens": 6, "output_tokens": 8},
        "memory": {"workspace": "0 B"}, "io": {"align": "4 KiB"} | settings.pop("io", {}),
        "placement": {**placement, "pools": pools or {"ram": {"hold": 8, "policy": "lru"}}},
    } | settings  # fmt: skip
    return make_case(Scenario.model_validate(data))


GPU = {"attention": "gpu", "experts": "gpu"}
STAGED = {"vram": {"hold": 4, "policy": "lru"}, "ram": {"hold": 8, "policy": "lru"}}
CASES: dict[str, dict[str, Any]] = {
    "lru": {},
    "static": {"pools": {"ram": {"hold": 8}}},
    "warm global": {"pools": {"ram": {"hold": 6, "policy": "lfu", "scope": "global", "warm": True}}},
    "all resident": {"pools": {"ram": {"hold": "all"}}},
    "nothing resident": {"pools": {"ram": {"hold": "none"}}},
    "refreshed": {"pools": {"ram": {"hold": 8, "refresh_tokens": 4}}},
    "prefetch into the cache": {"prefetch": {"predictor": "cooccurrence"}},
    "prefetch two layers ahead": {"prefetch": {"predictor": "oracle", "distance": 2}},
    "prefetch beside a static pool": {"pools": {"ram": {"hold": 6}}, "prefetch": {"predictor": "previous"}},
    "prefetch into buffers": {
        "pools": {"ram": {"hold": 4}},
        "prefetch": {"predictor": "cooccurrence", "into": "buffers", "buffers": 3, "distance": 2},
    },
    "batch": {"workload": {"prompt_tokens": 4, "output_tokens": 8, "batch": 2}},
    "micro-batches": {"workload": {"prompt_tokens": 4, "output_tokens": 8, "batch": 3}, "pipeline": {"micro_batches": 2}},
    "prefill in chunks": {"workload": {"prompt_tokens": 21, "output_tokens": 2, "prefill_chunk": 8}},
    "two I/O threads": {"io": {"threads": 2}, "prefetch": {"predictor": "oracle"}},
    "staged": {"placement": GPU, "pools": STAGED, "prefetch": {"predictor": "cooccurrence"}},
    "staged from all in memory": {"placement": GPU, "pools": {"vram": {"hold": 4, "policy": "lru"}, "ram": {"hold": "all"}}},
    "staged, exclusive": {
        "placement": GPU,
        "pools": {"vram": {"hold": 4, "policy": "lru"}, "ram": {"hold": 8, "policy": "lru", "inclusive": False}},
    },
    "computed in place": {"placement": {**GPU, "site": "in-place"}, "pools": {"vram": {"hold": 4}, "ram": {"hold": "all"}}},
    "two devices": {"placement": {"attention": "gpu", "experts": "cpu"}, "pipeline": {"hidden_states": "staged"}},
    "layer-sets": {"granularity": "layer", "prefetch": {"predictor": "oracle"}},
    "layer-sets, staged": {"granularity": "layer", "placement": GPU, "pools": STAGED},
    "int4": {"precision": {**BF16, "routed_experts": "int4-g32-torch"}},
    "int8": {"precision": {"default": "int8", "kv": "bf16", "embeddings": "bf16", "router": "bf16", "norms": "bf16"}},
    "mixed": {"precision": {**BF16, "overrides": [{"part": "routed_experts", "layers": "0-3", "format": "int8"}]}},
    "scattered": {"io": {"layout": "scattered", "scattered_piece": "8 KiB"}},
}


class Bench:
    """Cases made into programs; stores are built once a format and layout."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tiny = folder, TinyMoeWeights(TINYMOE)
        self.stores: dict[str, Any] = {}
        self.readers: list[Any] = []

    def program(self, it: Case, **more: Any) -> Program:
        planner = it.planner()
        schedule = Schedule(planner.lanes, planner.tiers, planner.lines, fragments=list(planner.fragments()))
        io = it.scenario.io
        weights = self.tiny if it.model.name == "tinymoe" else RandomWeights()
        key = f"{it.model.name} {it.plan!r} {io.layout} {io.scattered_piece}"
        if key not in self.stores:
            source = weights.expert if it.model.name == "tinymoe" else None
            self.stores[key] = build_store(
                self.folder / f"{len(self.stores)}.bin", it.model, it.plan, align=io.align, layout=io.layout,
                scattered_piece=io.scattered_piece, weights=source,
            )  # fmt: skip
        rate = more.pop("bytes_per_s", None)
        reader = open_reader(self.stores[key], "buffered", request_bytes=1 << 20, bytes_per_s=rate)
        self.readers.append(reader)
        return Program(it, schedule, self.stores[key], reader, weights, **more)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("experts"))
    yield made
    for reader in made.readers:
        reader.close()


def moesim_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("moesim ")]


# ---- counts


@pytest.mark.parametrize("name", CASES)
def test_what_is_counted_is_what_was_planned(bench: Bench, name: str) -> None:
    program = bench.program(case(**CASES[name]))
    first, second = real.run(program), real.run(program)
    for run in (first, second):
        assert run.differences() == []
        assert run.violations == 0
        planned = np.concatenate([f.access for f in program.schedule.fragments])[:, 3]
        assert run.accesses == {o.name.lower(): int((planned == o).sum()) for o in Outcome}
        assert run.evictions == program.traffic.evictions
    assert np.array_equal(first.tokens_out, second.tokens_out)  # a second run begins where the first did
    assert first.loss == second.loss
    assert not moesim_threads()


def test_the_cases_meet_every_outcome(bench: Bench) -> None:
    """The test above would pass on cases that never hit, prefetch or evict."""
    run = real.run(bench.program(case(**CASES["prefetch into the cache"])))
    assert min(run.accesses.values()) > 0
    assert run.evictions > 0
    assert run.lane_bytes["ssd"] > 0


def test_a_difference_is_told(bench: Bench) -> None:
    program = bench.program(case())
    program.traffic.moves.popitem()  # as if one eviction less had been planned
    fragment = program.schedule.fragments[0]
    fragment.access[0, 3] = Outcome.CACHE
    found = real.run(program).differences()
    assert any("planned cache, found miss" in text for text in found)


# ---- what is wrong stops the run


def tasks_of(program: Program, kind: Kind) -> list[int]:
    return [f.first_task + int(row) for f in program.schedule.fragments for row in np.flatnonzero(f.kind == kind)]


def replace(program: Program, task: int, operation: Any) -> Any:
    """Exchange what a task does; return what it did."""
    for lane in program.lanes:
        if task in lane.tasks:
            row = lane.tasks.index(task)
            before, lane.operations[row] = lane.operations[row], operation
            return before
    raise AssertionError(f"no task {task}")


def test_a_wrong_slot_is_seen(bench: Bench) -> None:
    it = case()
    planner = it.planner()
    fragments = list(planner.fragments())
    loads = np.flatnonzero(fragments[0].kind == Kind.LOAD)
    fragments[0].slot[loads[1]] = fragments[0].slot[loads[0]]  # into the room of another expert of the layer
    bad = bench.program(it)
    bad.schedule.fragments = fragments
    program = Program(it, bad.schedule, bad.store, bad.reader, bench.tiny)
    with pytest.raises(real.TaskFailed, match=r"ffn task \d+ on lane cpu \(step 0, layer 0, expert \d+\) failed: WrongExpert") as found:
        real.run(program)
    assert isinstance(found.value.__cause__, WrongExpert)
    assert not moesim_threads()


def test_a_skipped_load_is_seen(bench: Bench) -> None:
    program = bench.program(case())
    load = tasks_of(program, Kind.LOAD)[3]
    replace(program, load, lambda: 98304)
    with pytest.raises(real.TaskFailed, match="expected layer .* in its slot, found no expert"):
        real.run(program)


@pytest.mark.parametrize("before", [0, 1])
def test_a_load_that_reads_nothing_is_seen(bench: Bench, before: int) -> None:
    """Its tag is right, but the bytes are not: also if a run before had left the right ones there."""
    program = bench.program(case())
    for _ in range(before):
        real.run(program)
    task = tasks_of(program, Kind.LOAD)[0]
    (load,) = program.load_tasks[task]
    assert isinstance(load, LoadTask)
    load.move = lambda: 98304
    with pytest.raises(real.TaskFailed, match="a load was skipped, partial or wrong"):
        real.run(program)


def test_a_copy_from_the_wrong_slot_is_seen(bench: Bench) -> None:
    program = bench.program(case(placement=GPU, pools=STAGED))
    copies = [x for loads in program.load_tasks.values() for x in loads if x.source is not None]
    other = next(x for x in copies if x.source is not copies[0].source)
    copies[0].source = other.source
    with pytest.raises(real.TaskFailed, match="in the slot that is copied"):
        real.run(program)


def test_a_failing_read_names_its_expert(bench: Bench) -> None:
    program = bench.program(case())
    task = tasks_of(program, Kind.LOAD)[2]
    (load,) = program.load_tasks[task]

    def fail() -> int:
        raise OSError(5, "Input/output error")

    load.move = fail
    began = time.monotonic()
    with pytest.raises(real.TaskFailed, match="Input/output error") as found:
        real.run(program)
    assert time.monotonic() - began < 5
    assert (found.value.task, found.value.layer, found.value.expert) == (task, *load.key)
    assert found.value.step == 0
    assert not moesim_threads()


def test_interrupt_ends_a_run_within_seconds(bench: Bench, interruptible: None) -> None:
    program = bench.program(case(), bytes_per_s=200_000)  # half a second an expert
    (load,) = program.load_tasks[tasks_of(program, Kind.LOAD)[0]]
    read, began = load.move, 0.0

    def interrupt() -> int:
        nonlocal began
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        return read()

    load.move = interrupt
    with pytest.raises(KeyboardInterrupt):
        real.run(program)
    assert time.monotonic() - began < 5
    assert not moesim_threads()


# ---- times


def test_a_measured_timeline_has_the_causes_of_the_reference_engine(bench: Bench) -> None:
    program = bench.program(case(prefetch={"predictor": "oracle"}))
    run = real.run(program)
    t, lane = run.timeline, np.concatenate([f.lane for f in program.schedule.fragments])
    for task in range(1, len(t)):
        cause, why = int(t.cause[task]), int(t.cause_type[task])
        assert cause >= 0 and why != CAUSE_HEAD_OF_LINE  # lanes of one server
        assert t.end_ps[cause] <= t.start_ps[task]
        fragment = next(f for f in program.schedule.fragments if task < f.first_task + f.n_tasks)
        deps = [d for d, _ in fragment.deps(task - fragment.first_task)]
        same = np.flatnonzero(lane[:task] == lane[task])
        latest = max([int(t.end_ps[d]) for d in deps] + ([int(t.end_ps[same[-1]])] if len(same) else []))
        assert t.end_ps[cause] == latest  # nothing that held it ended later


def test_head_of_line_blocking_on_two_servers() -> None:
    """Task 1 waits for task 0; task 2, free to go, waits its turn behind it."""
    from moesim.engines.real_workers import Record
    from moesim.schedule import Dep, FragmentBuilder, Lane, Work

    builder = FragmentBuilder(2)
    builder.task(Kind.ATTENTION, 0, Work("cpu"), [])
    builder.task(Kind.LOAD, 1, Work("ssd"), [(0, Dep.DATA)])
    builder.task(Kind.LOAD, 1, Work("ssd"), [])
    builder.end_step(0, 0, 2, 1, 1, 1)
    schedule = Schedule((Lane("cpu"), Lane("ssd", 2)), fragments=[builder.build()])
    t = real.measured_timeline(schedule, Record([0, 11, 12], [10, 20, 20], [0, 0, 1], [None, 1, 1]))
    assert t.start_ps.tolist() == [0, 11_000, 12_000]
    assert t.cause.tolist() == [-1, 0, 1]
    assert t.cause_type.tolist() == [Dep.DATA, Dep.DATA, CAUSE_HEAD_OF_LINE]


def test_the_same_metrics_read_a_measured_run(bench: Bench) -> None:
    it = case(prefetch={"predictor": "cooccurrence"})
    program = bench.program(it)
    run = real.run(program)
    prices = CostModel(it.hardware)
    meter = load_meter(it, it.planner())
    for fragment in program.schedule.fragments:
        meter.add(fragment, prices.costs(fragment), Timeline.from_rows([]))
    meter.finish(run.timeline)
    found = metrics.summary(meter)
    assert found["makespan_s"] == pytest.approx(run.timeline.makespan_ps * 1e-12)
    assert found["accesses"]["miss"] == run.accesses["miss"]
    assert found["accesses"]["prefetch"] + found["accesses"]["late"] == run.accesses["prefetch"]
    assert 0 <= found["overlap_coverage"] <= 1
    assert sum(row["share"] for row in metrics.critical_shares(meter)) == pytest.approx(1)


# ---- what is computed


@pytest.mark.parametrize("workload", [{"prompt_tokens": 64, "output_tokens": 60}, {"prompt_tokens": 30, "output_tokens": 40, "batch": 2, "prefill_chunk": 7}])  # fmt: skip
def test_real_tokens_flow_as_through_the_unquantised_model(bench: Bench, workload: dict[str, int]) -> None:
    sys.path.insert(0, str(TINYMOE))
    try:
        from model import load_model
    finally:
        sys.path.remove(str(TINYMOE))
    it = case(workload=workload)
    program = bench.program(it)
    run = real.run(program)
    text = bench.tiny.text(it.routing.used)
    assert text is not None
    steps = it.routing.steps
    both = text[np.concatenate([steps.prompts, steps.answers], axis=1)]  # (B, S, 2): token and the next one
    tokens, targets = torch.from_numpy(both[:, :, 0].copy()), torch.from_numpy(both[:, :, 1].copy())
    with torch.no_grad():
        logits = load_model(TINYMOE)(tokens)
    first = workload["prompt_tokens"] - 1
    plain = float(torch.nn.functional.cross_entropy(logits[:, first:].flatten(0, 1), targets[:, first:].flatten(), ignore_index=-1))
    assert run.loss == pytest.approx(plain, rel=1e-2)
    assert (logits[:, first:].argmax(2).T.reshape(-1).numpy() == run.tokens_out).mean() > 0.85
    assert run.router_agreement is not None and run.router_agreement > 0.95


def test_forced_experts_that_the_router_would_not_choose_are_told(bench: Bench) -> None:
    """Random context makes the router see other states than the trace's."""
    run = real.run(bench.program(case(workload={"output_tokens": 20, "cached_tokens": 40})))
    assert run.loss is None  # no text continues random context
    assert run.router_agreement is not None and run.router_agreement < 0.95


def small_case(folder: Path, **settings: Any) -> Case:
    import yaml

    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    settings = {"precision": {**BF16, "default": "int8", "embeddings": "bf16", "routed_experts": "int4-g32-torch"}} | settings
    return case(model=str(folder / "small.yaml"), trace={"generate": "zipf"}, pools={"ram": {"hold": 4, "policy": "lru"}}, **settings)


@pytest.mark.parametrize("workload", [{"output_tokens": 12}, {"prompt_tokens": 9, "prefill_chunk": 4, "output_tokens": 5, "batch": 2}])
def test_random_weights_of_any_shape(bench: Bench, tmp_path: Path, workload: dict[str, int]) -> None:
    """A dense layer, a sliding window, biases, head norms, a gated shared expert, a tied head."""
    program = bench.program(small_case(tmp_path, workload=workload))
    first, second = real.run(program), real.run(program)
    assert first.differences() == []
    assert np.array_equal(first.tokens_out, second.tokens_out)
    assert len(set(first.tokens_out.tolist())) > 1
    x = program.inputs._batches[0, workload.get("batch", 1), 1].x
    assert torch.isfinite(x).all()
    assert 0.1 < float(x.float().square().mean().sqrt()) < 100


def attention_outputs(model: ModelSpec, layer: int, chunks: list[int], change_first: bool = False) -> Any:
    """Outputs of one layer's attention on the same random inputs, given in chunks; (B, tokens, D). The first token may be another."""
    loaded = load_weights(model, PrecisionPlan(default="bf16", kv="bf16"), RandomWeights(), seed=3)
    network = Network(loaded, 2, sum(chunks), lambda _layer, size: torch.zeros(size, dtype=torch.uint8))
    inputs = torch.randn(2, sum(chunks), model.hidden_size, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    if change_first:
        inputs[:, 0] = inputs[:, 0].flip(1)
    out, past = [], 0
    for n in chunks:
        batch = Batch(2, n, model.hidden_size, model.top_k)
        batch.xs.copy_(inputs[:, past : past + n])
        network.attention[layer].run(batch, None, network.place(layer, 0, 2, past, n))
        out.append(batch.xs.clone())
        past += n
    return torch.cat(out, 1).float()


@pytest.mark.parametrize("layer", [0, 2])  # full, sliding
def test_attention_does_not_depend_on_how_a_prompt_is_cut(layer: int) -> None:
    model = ModelSpec.model_validate(SMALL)
    whole = attention_outputs(model, layer, [12])
    for chunks in ([1] * 12, [5, 7], [6, 1, 1, 4]):
        assert torch.allclose(attention_outputs(model, layer, chunks), whole, atol=0.06)


@pytest.mark.parametrize(("layer", "reach"), [(0, 12), (2, 5)])  # full; a window of 5
@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 7]])
def test_how_far_back_a_query_sees(layer: int, reach: int, chunks: list[int]) -> None:
    model = ModelSpec.model_validate(SMALL)
    changed = (attention_outputs(model, layer, chunks) != attention_outputs(model, layer, chunks, change_first=True)).any(2).any(0)
    assert changed.tolist() == [position < reach for position in range(12)]


# ---- slots, and what is refused


def test_slots_are_aligned_and_apart() -> None:
    it = case(pools={"ram": {"hold": 4}}, prefetch={"predictor": "oracle", "into": "buffers", "buffers": 2})
    slots = tier_slots(it.layout, lambda layer: 5000)["ram"]
    n = 8 * 4 + it.layout.pools["ram"].transient_slots + 2 * it.layout.layer_set
    assert slots.offsets == tuple(8192 * i for i in range(n))
    assert slots.bytes == 8192 * n


def test_what_lies_where_follows_from_the_schedule() -> None:
    it = case(placement=GPU, pools=STAGED)
    planner = it.planner()
    found = traffic(it.layout, planner.lanes, list(planner.fragments()), at_start(planner))
    copies = [move for moves in found.moves.values() for move in moves if move.source is not None]
    assert copies and all(move.target[0] == "vram" and move.source[0] == "ram" for move in copies if move.source)
    lies: dict[tuple[str, int], tuple[int, int]] = {}
    for task in sorted(found.moves):
        for move in found.moves[task]:
            assert move.source is None or lies[move.source] == move.key
            lies[move.target] = move.key


def test_memory_is_limited_to_the_byte(bench: Bench) -> None:
    used = real.run(bench.program(case())).arena_bytes["ram"]
    assert real.run(bench.program(case(), arenas={"ram": Arena("ram", used)})).differences() == []
    with pytest.raises(OutOfMemory, match="ram is out of memory"):
        bench.program(case(), arenas={"ram": Arena("ram", used - 1)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"granularity": "matrix"}, "granularity: expected expert or layer"),
        ({"lanes": "priority"}, "lanes: expected fifo"),
        ({"precision": {**BF16, "kv": "fp8"}}, "precision.kv: expected fp16 or bf16"),
        ({"precision": "Q4_K"}, "expected one with a real kernel"),
        (
            {
                "precision": {**BF16, "overrides": [{"part": "routed_experts", "layers": "0-3", "format": "int8"}]},
                "pools": {"ram": {"hold": "50 %", "policy": "lru", "scope": "global"}},
            },
            "scope: layer",
        ),
    ],
)
def test_what_real_runs_do_not_do_is_refused(bench: Bench, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench.program(case(**settings))


def test_latent_attention_is_refused() -> None:
    mla = {"kind": "mla", "n_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    model = ModelSpec.model_validate({**SMALL, "attention": mla, "attention_overrides": []})
    loaded = load_weights(model, PrecisionPlan(default="bf16", kv="bf16"), RandomWeights())
    with pytest.raises(InputError, match="attention of layer 0: expected full or sliding"):
        Network(loaded, 1, 8, lambda _layer, size: torch.zeros(size, dtype=torch.uint8))
