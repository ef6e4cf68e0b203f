"""Where experts are computed: fetched or in place by estimate, streamed layers, and several GPUs by layers or by experts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from planner_cases import EXPERT, case, machine, model, plan, same, text, trace

from moesim.engines.retime import retime
from moesim.errors import InputError
from moesim.hardware.compose import compose
from moesim.planner.fast import CompiledPlanner
from moesim.planner.forecast import Forecast
from moesim.schedule import Kind
from moesim.simulate import Case, Result, simulate
from moesim.whatif.replay import Replay

engines = pytest.mark.parametrize("engine", ["des", "fast"])
FOUR_OF_EIGHT = [[[0, 1, 2, 3]] * 2] * 4


def sites(site: str, link: str = "100 MB/s", cpu: str = "1 us", **settings: Any) -> Case:
    """Four of eight experts a layer, one of them in VRAM. Alone a load takes 1 us + 1000 B / link, an FFN 3 launches + 2 us wherever it runs."""
    on = machine()
    on["devices"]["cpu"]["launch"] = cpu
    on["channels"] |= {"up": {"bandwidth": link}, "down": {"bandwidth": link}}
    return case(trace(FOUR_OF_EIGHT, n_experts=8), on=on, of=model(2, n_experts=8, top_k=4),
                placement={"site": site}, pools={"vram": {"hold": 1}, "ram": {"hold": "all"}}, **settings)  # fmt: skip


def speed(result: Result) -> float:
    return float(result.as_dict()["metrics"]["decode_tok_s"])


def lanes_of_ffns(it: Case) -> list[str]:
    """``expert lane`` of the first step's FFNs in layer 0."""
    rows = [line.split() for line in text(it).splitlines() if " ffn 0." in line]
    return [f"{row[2].partition('.')[2]} {row[3]}" for row in rows[:4]]


# ---- hybrid


def test_hybrid_takes_what_is_done_first() -> None:
    """Experts 1 to 3 are away. States reach the CPU after 1.32 us and need as long to come back; a fetched expert is done 16 us after routing.

    On the CPU the first would be done (states back) after 1.32 + 5 + 1.32 = 7.64 us, the second after 12.64, the third after 17.64: it is fetched.
    """
    same(sites("hybrid", workload={"output_tokens": 1}), """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 copy 0 d2h <- 1
        3 ffn 0.1 cpu @0 <- 2
        4 ffn 0.2 cpu @1 <- 2
        5 load 0.3 h2d @2 <- 1
        6 ffn 0.0 gpu @0 <- 1
        7 ffn 0.3 gpu @2 <- 1 5
        8 copy 0 h2d <- 3 4          # behind the load
        9 combine 0 gpu <- 6 7 8
        10 attention 1 gpu <- 9
        11 router 1 gpu <- 10
        12 copy 1 d2h <- 11
        13 ffn 1.1 cpu @7 <- 12
        14 ffn 1.2 cpu @8 <- 12
        15 load 1.3 h2d @3 <- 11
        16 ffn 1.0 gpu @1 <- 11
        17 ffn 1.3 gpu @3 <- 11 15
        18 copy 1 h2d <- 13 14
        19 combine 1 gpu <- 16 17 18
        20 head 2 gpu <- 19
    """)  # fmt: skip


@pytest.mark.parametrize(
    ("link", "cpu", "on_cpu"),
    [
        ("10 MB/s", "1 us", 3),  # a load takes 101 us, all three on the CPU 23.4
        ("100 MB/s", "1 us", 2),
        (
            "5 GB/s",
            "4 us",
            1,
        ),  # 16 us on the CPU; fetched the first is done after 10 (behind the hit), the second after 15, the third after 20
        ("5 GB/s", "10 us", 0),  # 34 us on the CPU
    ],
)
def test_link_and_cpu_decide_how_many_are_fetched(link: str, cpu: str, on_cpu: int) -> None:
    assert sum(row.endswith("cpu") for row in lanes_of_ffns(sites("hybrid", link, cpu))) == on_cpu


@pytest.mark.parametrize("link", ["5 MB/s", "50 MB/s", "100 MB/s", "400 MB/s", "5 GB/s"])
def test_hybrid_is_as_fast_as_the_better_of_both(link: str) -> None:
    fetch, in_place, hybrid = (speed(simulate(sites(site, link))) for site in ("fetch", "in-place", "hybrid"))
    assert hybrid >= 0.999 * max(fetch, in_place), (fetch, in_place, hybrid)


def test_the_expert_of_most_tokens_is_fetched() -> None:
    """Of a prompt, expert 1 has 8 tokens and expert 2 one: reading it costs the CPU no more, computing it does."""
    ids = [[[0, 1]]] * 8 + [[[0, 2]]]
    on = machine()
    on["devices"]["cpu"]["peak"] = dict.fromkeys(("fp32", "fp16", "int8"), "0.5 GFLOP/s")
    on["devices"]["gpu"]["peak"] = dict.fromkeys(("fp32", "fp16", "int8"), "100 GFLOP/s")
    it = case(trace(ids, prompt=9, n_experts=8), on=on, of=model(1, n_experts=8, top_k=2), placement={"site": "hybrid"},
              pools={"vram": {"hold": 1}, "ram": {"hold": "all"}}, workload={"prompt_tokens": 9, "output_tokens": 1})  # fmt: skip
    assert sorted(row for row in lanes_of_ffns(it)) == ["0 gpu", "1 gpu", "2 cpu"]


def test_forecast_is_the_engine_where_nothing_is_shared() -> None:
    """With memories of 1 TB/s no flow holds another up, so each task ends when it was forecast to."""
    on = machine()
    on["channels"] |= {"ram": {"bandwidth": "1 TB/s"}, "vram": {"bandwidth": "1 TB/s"}}
    it = case(trace(FOUR_OF_EIGHT, n_experts=8), on=on, of=model(2, n_experts=8, top_k=4), placement={"site": "hybrid"},
              pools={"vram": {"hold": 1}, "ram": {"hold": "all"}})  # fmt: skip
    planner, fragments = plan(it)
    assert isinstance(planner.builder, Forecast)
    meter = simulate(it).meter
    assert meter is not None and planner.builder.end_s(fragments[-1].gate) == pytest.approx(meter.step_end_ps[-1] * 1e-12, rel=1e-9)


@engines
def test_a_schedule_that_costs_decided_is_not_retimed(engine: str) -> None:
    it = sites("hybrid", engine=engine)
    result = simulate(it)
    assert result.schedule.depends_on == {"trace", "costs"}
    with pytest.raises(InputError, match="costs"):
        retime(result.schedule, [])
    slow = sites("hybrid", "10 MB/s")
    assert Replay(it).speeds([it.hardware, slow.hardware]) == pytest.approx([speed(result), speed(simulate(slow))], rel=1e-12)


def test_sites_need_a_cpu() -> None:
    on = machine()
    del on["devices"]["cpu"]
    with pytest.raises(InputError, match="without a CPU"):
        case(trace([[0, 1]] * 4), on=on, placement={"site": "hybrid"})


# ---- streaming


def streaming(stream: str | int, link: str = "100 MB/s", prompt: int = 6, **settings: Any) -> Case:
    """Experts of both layers on the CPU, attention on the GPU: prompts may be streamed."""
    ids = [[[t % 4, (t + 1) % 4]] * 2 for t in range(prompt + 3)]
    on = machine()
    on["channels"]["up"] = {"bandwidth": link}
    placement = {"experts": "cpu", "stream_from": stream}
    return case(trace(ids, prompt=prompt), on=on, of=model(2, top_k=2), placement=placement, pools={"ram": {"hold": "all"}},
                workload={"prompt_tokens": prompt, "output_tokens": 3}, **settings)  # fmt: skip


def ttft(it: Case) -> float:
    return float(simulate(it).as_dict()["metrics"]["ttft_ms"]["mean"])


@engines
def test_prompts_are_streamed_and_decode_stays(engine: str) -> None:
    result = simulate(streaming(6, engine=engine))
    tasks = result.tasks
    lanes = np.array([lane.name for lane in tasks.lanes])[tasks.lane]
    for step, device in ((0, "gpu"), (1, "cpu"), (2, "cpu")):
        assert set(lanes[(tasks.kind == Kind.FFN) & (tasks.step == step)]) == {device}
    loads = (tasks.kind == Kind.LOAD) & (lanes == "h2d")
    assert loads.sum() == 2 * 4 and set(tasks.step[loads]) == {0}
    slots = [line for line in result.case.layout.ledger.lines if line.name == "transient slots"]
    assert [(line.tier, line.bytes) for line in slots] == [("vram", 4 * EXPERT)]  # room for a layer
    assert not any(line.name == "transient slots" for line in streaming("never").layout.ledger.lines)


def test_a_smaller_batch_is_not_streamed() -> None:
    assert " load " in text(streaming(6)) and " load " not in text(streaming(7))


def test_a_streamed_layer_takes_copy_and_compute_one_after_the_other() -> None:
    """With whole layer-sets as tasks: attention, router, copy, FFN, combine; the closed form of ``backtest``, whose runtimes do not overlap them."""
    tasks = simulate(streaming(6, granularity="layer")).tasks
    first = tasks.step == 0
    took = (tasks.end - tasks.start)[first]
    assert tasks.end[first].max() == took.sum() and (tasks.kind[first] == Kind.LOAD).sum() == 2


@pytest.mark.parametrize(("link", "wins"), [("5 MB/s", "never"), ("5 GB/s", 1)])
def test_cheaper_chooses_the_faster(link: str, wins: str | int) -> None:
    it = streaming("cheaper", link, prompt=32)
    both = {stream: ttft(streaming(stream, link, prompt=32)) for stream in ("never", 1)}
    assert min(both, key=lambda stream: both[stream]) == wins
    assert ttft(it) == both[wins] and it.layout.depends_on == {"trace", "costs"}


def test_experts_in_place_are_streamed_too() -> None:
    """Half in VRAM: decode computes the others on the CPU, a prompt fetches them."""
    ids = [[[t % 4, (t + 1) % 4]] * 2 for t in range(9)]
    it = case(trace(ids, prompt=6), of=model(2, top_k=2), placement={"site": "in-place", "stream_from": 6},
              pools={"vram": {"hold": 2}, "ram": {"hold": "all"}}, workload={"prompt_tokens": 6, "output_tokens": 3})  # fmt: skip
    lines = [line.split() for line in text(it).splitlines()]
    first = next(i for i, line in enumerate(lines) if line[1] == "head")
    assert {line[3] for line in lines[:first] if line[1] == "ffn"} == {"gpu"}
    assert sum(line[1] == "load" for line in lines[:first]) == 2 * 2
    assert {line[3] for line in lines[first:] if line[1] == "ffn"} == {"gpu", "cpu"} and not any(
        line[1] == "load" for line in lines[first:]
    )


def test_streamed_layers_do_not_pass_through_a_cache() -> None:
    with pytest.raises(InputError, match="static"):
        case(trace([[0, 1]] * 4), placement={"experts": "cpu", "stream_from": 2}, pools={"vram": {"policy": "lru"}, "ram": {"hold": "all"}})


# ---- several GPUs


def two_gpus(peer: bool) -> dict[str, Any]:
    """A second card like the first one, with or without a link between them."""
    on = machine()
    on["tiers"] = {"vram1": dict(on["tiers"]["vram"], channel="vram1"), **on["tiers"]}
    on["channels"] |= {"vram1": {"bandwidth": "10 GB/s"}, "up1": {"bandwidth": "100 MB/s"}, "down1": {"bandwidth": "100 MB/s"}}
    on["devices"] |= {"gpu1": dict(on["devices"]["gpu"], tier="vram1")}
    on["links"] |= {"h2d1": on["links"]["h2d"] | {"target": "vram1", "channel": "up1"},
                    "d2h1": on["links"]["d2h"] | {"source": "vram1", "channel": "down1"}}  # fmt: skip
    if peer:
        on["links"]["p2p"] = on["links"]["h2d"] | {"source": "vram", "target": "vram1", "channel": "up1"}
        on["links"]["p2p1"] = on["links"]["h2d"] | {"source": "vram1", "target": "vram", "channel": "up"}
    return json.loads(json.dumps(on))  # YAML knows no object in two places


BY_LAYERS = {"layers": [{"layers": "1", "part": part, "device": "gpu1"} for part in ("attention", "routed_experts")]}
ALL = {"vram": {"hold": "all"}, "vram1": {"hold": "all"}}


@pytest.mark.parametrize("peer", [True, False])
def test_layers_on_two_gpus(peer: bool) -> None:
    it = case(trace([[0, 1]] * 4), on=two_gpus(peer), placement=BY_LAYERS, pools=ALL, workload={"output_tokens": 1})
    over = ["copy 1 p2p <- 3"] if peer else ["copy 1 d2h <- 3", "copy 1 h2d1 <- 4"]
    n = 3 + len(over)
    lines = [
        "attention 0 gpu <-", "router 0 gpu <- 0", "ffn 0.0 gpu <- 1", "combine 0 gpu <- 2", *over,
        f"attention 1 gpu1 <- {n}", f"router 1 gpu1 <- {n + 1}", f"ffn 1.1 gpu1 <- {n + 2}", f"combine 1 gpu1 <- {n + 3}",
        *([f"copy 2 p2p1 <- {n + 4}"] if peer else [f"copy 2 d2h1 <- {n + 4}", f"copy 2 h2d <- {n + 5}"]),
    ]  # fmt: skip
    assert without_slots(it) == [*lines, f"head 2 gpu <- {len(lines) - 1}"]


def without_slots(it: Case) -> list[str]:
    return [" ".join(word for word in line.split()[1:] if not word.startswith("@")) for line in text(it).splitlines()]


def test_experts_on_two_gpus() -> None:
    """Even experts on the first card, odd ones on the second; the hidden states go over and their results come back."""
    it = case(trace([[[0, 1]], [[2, 3]]]), on=two_gpus(True), of=model(1, top_k=2), placement={"split": ["gpu", "gpu1"]}, pools=ALL,
              workload={"output_tokens": 2})  # fmt: skip
    assert {tier: pool.counts for tier, pool in it.layout.pools.items()} == {"vram": (2,), "vram1": (2,), "ram": (0,)}
    assert without_slots(it)[:8] == [
        "attention 0 gpu <-",
        "router 0 gpu <- 0",
        "ffn 0.0 gpu <- 1",
        "copy 0 p2p <- 1",
        "ffn 0.1 gpu1 <- 3",
        "copy 0 p2p1 <- 4",
        "combine 0 gpu <- 2 5",
        "head 1 gpu <- 6",
    ]


@engines
def test_each_card_loads_its_own_experts(engine: str) -> None:
    it = case(trace([[[0, 1]], [[2, 3]]] * 3, n_experts=4), on=two_gpus(False), of=model(1, top_k=2), placement={"split": ["gpu", "gpu1"]},
              pools={"vram": {"hold": 1, "policy": "lru"}, "vram1": {"hold": 1, "policy": "lru"}, "ram": {"hold": "all"}},
              prefetch={"predictor": "previous"}, workload={"output_tokens": 6}, engine=engine)  # fmt: skip
    tasks = simulate(it).tasks
    lanes = np.array([lane.name for lane in tasks.lanes])[tasks.lane]
    loads = tasks.kind == Kind.LOAD
    assert loads.any()
    for lane, odd in (("h2d", 0), ("h2d1", 1)):
        mine = tasks.expert[loads & (lanes == lane)]
        assert len(mine) and (mine % 2 == odd).all()


def test_cards_of_the_catalogue_make_such_a_machine() -> None:
    hardware = compose("2 x rtx-3090 + ryzen-9950x + ddr5-6000x2:96GiB + nvme-gen4")
    assert {"gpu", "gpu1"} <= set(hardware.devices) and {"p2p", "p2p1"} <= set(hardware.links)


def test_split_is_checked() -> None:
    for placement in ({"split": ["gpu", "gpu"]}, {"split": ["gpu", "gpu1"], "experts": "gpu"}, {"split": ["gpu", "gpu7"]}):
        with pytest.raises(InputError, match=r"placement\.split"):
            case(trace([[0, 1]] * 4), on=two_gpus(True), placement=placement)


# ---- the compiled planner stands back


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"placement": {"site": "hybrid"}}, "experts computed in place"),
        ({"placement": {"stream_from": 4, "experts": "cpu"}}, "streamed layers"),
        ({"placement": {"split": ["gpu", "gpu1"]}}, "experts split among devices"),
        ({"placement": BY_LAYERS}, "hidden states that pass through main memory"),
    ],
)
def test_the_compiled_planner_leaves_it_to_the_reference(settings: dict[str, Any], why: str) -> None:
    des, fast = (case(trace([[0, 1]] * 6, prompt=2), on=two_gpus(False), workload={"prompt_tokens": 2, "output_tokens": 3}, engine=engine, **settings)
                 for engine in ("des", "fast"))  # fmt: skip
    planner = fast.planner()
    assert isinstance(planner, CompiledPlanner) and planner.uncovered == why
    a, b = simulate(des).as_dict(), simulate(fast).as_dict()
    assert {**a, "provenance": None} == {**b, "provenance": None}


def test_layers_on_two_gpus_with_a_peer_link_are_compiled() -> None:
    it = case(trace([[0, 1]] * 4), on=two_gpus(True), placement=BY_LAYERS, pools=ALL, engine="fast")
    planner = it.planner()
    assert isinstance(planner, CompiledPlanner) and planner.uncovered == ""
