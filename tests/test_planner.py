"""Exact schedules of small hand-built cases: every task, its lane, slot and typed dependencies, in order.

A line is ``id kind layer[.expert] lane [@slot] [*prefetch] <- dependencies``; s is a slot, b a buffer, q a queue dependency.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from planner_cases import EXPERT, case, machine, model, outcomes, plan, real_model, same, text, trace

from moesim import metrics
from moesim.cost import Costs
from moesim.engines.des import DesEngine
from moesim.errors import InputError
from moesim.metrics.stream import Meter
from moesim.model_files import load_model
from moesim.planner.residency import Rooms
from moesim.precision import plan_from
from moesim.schedule import Dep, FragmentBuilder, Kind, Lane, Outcome, Work
from moesim.simulate import Case, simulate

ALL: dict[str, Any] = {"vram": {"hold": "all"}}
RAM_ALL: dict[str, Any] = {"hold": "all"}


def over_ram(**vram: Any) -> dict[str, Any]:
    """A VRAM pool over a RAM that holds everything."""
    return {"vram": vram, "ram": RAM_ALL}


def works(it: Case, kind: Kind) -> list[Any]:
    return [f.works[f.work[row]] for f in plan(it)[1] for row in range(f.n_tasks) if f.kind[row] == kind]


# ---- decode


def test_all_resident() -> None:
    it = case(trace([[0, 1], [0, 2]]), pools=ALL)
    same(it, """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 ffn 0.0 gpu @0 <- 1
        3 combine 0 gpu <- 2
        4 attention 1 gpu <- 3
        5 router 1 gpu <- 4
        6 ffn 1.1 gpu @4 <- 5
        7 combine 1 gpu <- 6
        8 head 2 gpu <- 7
        9 attention 0 gpu <- 8
        10 router 0 gpu <- 9
        11 ffn 0.0 gpu @0 <- 10
        12 combine 0 gpu <- 11
        13 attention 1 gpu <- 12
        14 router 1 gpu <- 13
        15 ffn 1.2 gpu @5 <- 14             # slots in order of popularity, ties by id: 0.0 0.1 .. | 1.1 1.2
        16 combine 1 gpu <- 15
        17 head 2 gpu <- 16
    """)  # fmt: skip
    assert {o[3] for o in outcomes(it)} == {"cache"}


def test_absent_cells_run_no_expert() -> None:
    it = case(trace([[-1, 1]]), pools=ALL)
    assert text(it).splitlines()[2] == "2 combine 0 gpu <- 1" and len(outcomes(it)) == 1


def test_static_pool_passes_misses_through_its_slots_in_turn() -> None:
    it = case(trace([[[0, 1, 2], [1, 2, 3]]]), of=model(top_k=3), pools=over_ram(hold=1, transient_slots=1))
    same(it, """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 load 0.1 h2d @2 <- 1
        3 ffn 0.0 gpu @0 <- 1
        4 ffn 0.1 gpu @2 <- 1 2
        5 load 0.2 h2d @2 <- 1 4s           # the only slot: after the FFN that used it
        6 ffn 0.2 gpu @2 <- 1 5
        7 combine 0 gpu <- 3 4 6
        8 attention 1 gpu <- 7
        9 router 1 gpu <- 8
        10 load 1.2 h2d @2 <- 9 6s
        11 ffn 1.1 gpu @1 <- 9
        12 ffn 1.2 gpu @2 <- 9 10
        13 load 1.3 h2d @2 <- 9 12s
        14 ffn 1.3 gpu @2 <- 9 13
        15 combine 1 gpu <- 11 12 14
        16 head 2 gpu <- 15
    """)  # fmt: skip
    assert [o[3] for o in outcomes(it)] == ["cache", "miss", "miss"] * 2


def test_lru_load_waits_for_the_last_use_of_the_victim() -> None:
    it = case(trace([[0, 1], [1, 1], [0, 1]]), pools=over_ram(hold=1, policy="lru"))
    lines = text(it).splitlines()
    assert lines[2:4] == ["2 load 0.0 h2d @0 <- 1", "3 ffn 0.0 gpu @0 <- 1 2"]
    assert lines[13:15] == ["13 load 0.1 h2d @0 <- 12 3s", "14 ffn 0.1 gpu @0 <- 12 13"]
    assert lines[23:25] == ["23 load 0.0 h2d @0 <- 22 14s", "24 ffn 0.0 gpu @0 <- 22 23"]
    assert lines[18] == "18 ffn 1.1 gpu @1 <- 17 7"  # a hit still names its load, long ended
    assert [o[3] for o in outcomes(it)] == ["miss", "miss", "miss", "cache", "miss", "cache"]


def test_a_set_larger_than_its_pool_runs_in_waves_and_evicts_only_earlier_waves() -> None:
    it = case(trace([[[0, 1, 2]]]), of=model(1, top_k=3), pools=over_ram(hold=2, policy="lru"))
    same(it, """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 load 0.0 h2d @0 <- 1
        3 load 0.1 h2d @1 <- 1
        4 ffn 0.0 gpu @0 <- 1 2
        5 ffn 0.1 gpu @1 <- 1 3
        6 load 0.2 h2d @0 <- 1 4s           # trap: no member of a wave is evicted for the wave itself
        7 ffn 0.2 gpu @0 <- 1 6
        8 combine 0 gpu <- 4 5 7
        9 head 1 gpu <- 8
    """)  # fmt: skip


def test_tie_break_of_lfu_is_the_one_promised() -> None:
    """Equal counts: the older last use leaves; equal again (used in one set): the smaller id."""
    it = case(trace([[[0, 1]], [[0, 1]], [[2, 3]], [[0, 1]]]), of=model(1, top_k=2), pools=over_ram(hold=3, policy="lfu"))
    loads = [line.split()[2] for line in text(it).splitlines() if " load " in line]
    assert loads == ["0.0", "0.1", "0.2", "0.3", "0.0"]  # {2, 3} throws out 0 (as old as 1, smaller); then 0 throws out 2


# ---- prefetch


def test_prefetch_waits_for_the_router_d_layers_earlier_and_crosses_the_step_border() -> None:
    it = case(trace([[0, 1], [2, 3], [1, 0]]), pools=over_ram(hold=2, policy="lru"), prefetch={"predictor": "cooccurrence"})
    lines = text(it).splitlines()
    assert [line for line in lines if "*" in line] == [
        "5 load 1.1 h2d @2 * <- 1",
        "10 load 0.2 h2d @1 * <- 7",  # issued in step 0 for step 1
        "16 load 1.3 h2d @3 * <- 13",
        "21 load 0.1 h2d @0 * <- 18 3s",
        "27 load 1.0 h2d @2 * <- 24 8s",
    ]
    assert [o[3] for o in outcomes(it)] == ["miss"] + ["prefetch"] * 5
    fragments = plan(it)[1]
    assert fragments[0].use_step[10] == 1 and fragments[0].use_layer[10] == 0 and fragments[0].step[10] == 0


def test_prefetch_of_an_oracle_depends_on_its_room_and_step_alone() -> None:
    it = case(trace([[0, 1], [2, 3], [1, 0]]), pools=over_ram(hold=2, policy="lru"), prefetch={"predictor": "oracle"})
    assert [line for line in text(it).splitlines() if "*" in line] == [
        "5 load 1.1 h2d @2 * <-",
        "10 load 0.2 h2d @1 * <-",
        "16 load 1.3 h2d @3 * <- 11",  # gate of the step before
        "21 load 0.1 h2d @0 * <- 3s 11",
        "27 load 1.0 h2d @2 * <- 8s 22",
    ]


def test_prefetch_from_the_previous_token_needs_that_token_to_have_run() -> None:
    """At distance 2 of 2 layers: issued after the same layer of the token before, on its router."""
    it = case(trace([[0, 1], [0, 1], [2, 1]]), pools=over_ram(hold=1, policy="lru"), prefetch={"predictor": "previous", "distance": 1})
    assert not [line for line in text(it).splitlines() if "*" in line]  # all resident when predicted
    it = case(trace([[0, 1], [2, 3], [0, 1]]), pools=over_ram(hold="none"), prefetch={"predictor": "previous"})
    early = [line for line in text(it).splitlines() if "*" in line]
    assert early[0] == "10 load 0.0 h2d @0 * <- 1 3s"  # for step 1, from the router of layer 0 in step 0
    assert " 1.1 " in early[1] and early[1].split("<- ")[1].split()[0] == "6"


def test_a_chunk_cannot_be_predicted_from_its_own_tokens() -> None:
    """From the token before, only the first token of a chunk is known in advance; trap: a prefetch that reads its own step's routing."""
    rows = [[0, 0], [1, 1], [2, 2], [3, 3]]
    it = case(trace(rows, prompt=4), workload={"prompt_tokens": 4, "prefill_chunk": 2, "output_tokens": 0}, pools=over_ram(hold="none"),
              prefetch={"predictor": "previous"}, of=model(top_k=1))  # fmt: skip
    early = [line.split()[2] for line in text(it).splitlines() if "*" in line]
    assert early == ["0.1", "1.1"]  # token 2 from token 1 of the chunk before; not token 3 from token 2


def test_prefetch_without_evictable_room_is_dropped_and_counted() -> None:
    it = case(trace([[0, 1], [2, 3]]), pools=over_ram(hold=1, policy="lru"), prefetch={"predictor": "oracle"})
    planner, _ = plan(it)
    assert planner.dropped_prefetches == 3  # the last room of a pool is never taken by a prefetch
    assert not [line for line in text(it).splitlines() if "*" in line]


def test_a_prefetched_expert_is_pinned_until_its_layer_has_run() -> None:
    """Three layers in one global pool of 3: layer 1's demand load may not evict what layer 2 was promised, though it is colder."""
    it = case(trace([[0, 1, 2], [3, 3, 3]]), of=model(3), pools=over_ram(hold=1, policy="lru", scope="global"),
              prefetch={"predictor": "oracle", "distance": 2})  # fmt: skip
    served = dict(((s, layer), o) for s, layer, _, o in outcomes(it))
    assert served[0, 2] == "prefetch"


def test_mispredicted_experts_lose_their_pin_when_the_set_is_known() -> None:
    predicts_0 = [[0, 0]] * 4 + [[0, 3]] * 2  # learned: layer 1 takes 0; the run's last rows want 3
    it = case(trace(predicts_0, seq=[0, 0, 0, 0, 1, 1]), trace={"train_fraction": 0.5}, pools=over_ram(hold=2, policy="lru"),
              prefetch={"predictor": "popularity"}, workload={"output_tokens": 2})  # fmt: skip
    result = simulate(it)
    assert result.as_dict()["metrics"]["accesses"]["miss"] == 2  # 0.0 and 1.3, each once
    assert result.as_dict()["transfers"]["up"]["prefetch_wasted_bytes"] == EXPERT


@pytest.mark.parametrize("distance", [1, 2])
def test_layer_set_buffers_wait_for_the_combine_that_frees_them(distance: int) -> None:
    n = distance + 1
    it = case(trace([[0, 1, 2], [2, 3, 0], [1, 1, 1]]), of=model(3), pools=over_ram(hold="none"),
              prefetch={"predictor": "oracle", "into": "buffers", "buffers": n, "distance": distance})  # fmt: skip
    _, fragments = plan(it)
    (f,) = fragments
    combines = [row for row in range(f.n_tasks) if f.kind[row] == Kind.COMBINE]
    early = [row for row in range(f.n_tasks) if f.prefetch[row]]
    assert len(early) == 9 - distance
    for row in early:
        use = int(f.use_step[row]) * 3 + int(f.use_layer[row])
        buffers = [t for t, why in f.deps(row) if why == Dep.BUFFER]
        assert buffers == ([combines[use - n]] if use >= n else [])
        assert int(f.slot[row]) == use % n
    if distance == 1:
        assert "10 load 2.2 h2d @0 * <- 4b" in text(it) and "15 load 0.2 h2d @1 * <- 9b" in text(it)
    else:
        assert "11 load 0.2 h2d @0 * <- 4b" in text(it) and "16 load 1.3 h2d @1 * <- 10b" in text(it)


def test_buffers_hold_at_most_distance_plus_one_layer_sets() -> None:
    with pytest.raises(ValueError, match="one buffer is always in use"):
        case(trace([[0, 1]]), prefetch={"predictor": "oracle", "into": "buffers", "buffers": 2, "distance": 2})


@pytest.mark.parametrize("policy", ["static", "lru"])
def test_an_expert_in_a_buffer_is_used_there_and_not_loaded_again(policy: str) -> None:
    it = case(trace([[0, 1], [2, 3]]), pools=over_ram(hold=1, policy=policy), prefetch={"predictor": "oracle", "into": "buffers"})
    loads = [line.split()[2] for line in text(it).splitlines() if " load " in line]
    assert len(loads) == len(set(loads))
    assert [o[3] for o in outcomes(it)][-2:] == ["prefetch", "prefetch"]


def test_prefetched_experts_of_a_later_micro_batch_stay() -> None:
    """Trap met here: the first micro-batch's set took the others' predictions for wrong."""
    it = case(trace([[0, 1], [0, 2]], seq=[0, 1]), workload={"batch": 2}, pipeline={"micro_batches": 2},
              pools=over_ram(hold="none", transient_slots=3), prefetch={"predictor": "oracle"})  # fmt: skip
    assert [o for o in outcomes(it) if o[1] == 1] == [(0, 1, 1, "prefetch"), (0, 1, 2, "prefetch")]
    assert [o[3] for o in outcomes(it)[:2]] == ["miss", "cache"]  # what the first micro-batch brought is there for the second


# ---- tiers


def test_three_tiers_inclusive() -> None:
    it = case(trace([[0], [1], [0], [2]]), of=model(1), pools={"vram": {"hold": 1, "policy": "lru"}, "ram": {"hold": 2, "policy": "lru"}})
    assert [line for line in text(it).splitlines() if " load " in line] == [
        "2 load 0.0 ssd @0 <- 1",
        "3 load 0.0 h2d @0 <- 1 2",
        "9 load 0.1 ssd @1 <- 8",
        "10 load 0.1 h2d @0 <- 8 9 4s",
        "16 load 0.0 h2d @0 <- 15 2 11s",  # still in RAM: no read; its recency is refreshed (claim T3)
        "22 load 0.2 ssd @1 <- 21 10s",  # so 1 leaves the bounded RAM, once its copy has gone up
        "23 load 0.2 h2d @0 <- 21 22 17s",
    ]


def test_three_tiers_exclusive_moves_victims_down() -> None:
    it = case(
        trace([[0], [1], [0]]),
        of=model(1),
        pools={"vram": {"hold": 1, "policy": "lru"}, "ram": {"hold": 2, "policy": "lru", "inclusive": False}},
    )
    assert [line for line in text(it).splitlines() if " load " in line] == [
        "2 load 0.0 ssd @0 <- 1",
        "3 load 0.0 h2d @0 <- 1 2",
        "9 load 0.0 d2h @1 <- 8 4",  # decided by this step's router, after the last use
        "10 load 0.1 ssd @0 <- 8 3s",  # 0's place in RAM is free since it went up
        "11 load 0.1 h2d @0 <- 8 10 4s 9s",
        "17 load 0.1 d2h @0 <- 16 12 11s",
        "18 load 0.0 h2d @0 <- 16 9 12s 17s",
    ]


def test_demotion_does_not_evict_what_the_set_is_about_to_read() -> None:
    """Trap: VRAM starts with {2, 3}, an exclusive RAM of two places with {0, 1}; the set {0, 1} must not be thrown out for 2 and 3."""
    it = case(trace([[[2, 3]]] * 2 + [[[0, 1]]], seq=[0, 0, 1]), of=model(1, top_k=2), trace={"train_fraction": 0.5}, workload={"output_tokens": 1},
              pools={"vram": {"hold": 2, "policy": "lru", "warm": True}, "ram": {"hold": 2, "policy": "lru", "warm": True, "inclusive": False}})  # fmt: skip
    assert [line for line in text(it).splitlines() if " load " in line] == ["2 load 0.0 h2d @1 <- 1", "3 load 0.1 h2d @0 <- 1"]


def test_experts_pass_through_a_static_ram() -> None:
    it = case(
        trace([[[0, 1, 2]]]),
        of=model(1, top_k=3),
        pools={"vram": {"hold": "none", "transient_slots": 2}, "ram": {"hold": 1, "transient_slots": 1}},
    )
    same(it, """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 load 0.1 ssd @1 <- 1
        3 load 0.0 h2d @0 <- 1
        4 load 0.1 h2d @1 <- 1 2
        5 ffn 0.0 gpu @0 <- 1 3
        6 ffn 0.1 gpu @1 <- 1 4
        7 load 0.2 ssd @1 <- 1 4s           # the slot in RAM is free when its copy is up
        8 load 0.2 h2d @0 <- 1 7 5s         # the slot in VRAM when its FFN has run
        9 ffn 0.2 gpu @0 <- 1 8
        10 combine 0 gpu <- 5 6 9
        11 head 1 gpu <- 10
    """)  # fmt: skip


def test_ram_is_bounded_and_inclusive_of_vram() -> None:
    ids = [[(3 * t + layer) % 6 for layer in range(2)] for t in range(30)]
    it = case(
        trace(ids, n_experts=6), of=model(n_experts=6), pools={"vram": {"hold": 2, "policy": "lru"}, "ram": {"hold": 4, "policy": "lru"}}
    )
    planner = it.planner()
    for _ in planner.fragments(1):
        ram, vram = planner.loader.pools["ram"], planner.loader.pools["vram"]
        assert ram.used_bytes == EXPERT * len(ram.residents) <= 8 * EXPERT
        assert set(vram.residents) <= set(ram.residents)


def test_ram_below_a_global_static_pool_has_what_that_leaves_out() -> None:
    """A global pool takes 0.0 and 0.1, both of one layer: RAM must hold four experts of the other."""
    it = case(
        trace([[0, 0], [1, 1], [0, 2], [1, 3]]),
        pools={"vram": {"hold": 1, "scope": "global"}, "ram": {"hold": "all"}},
        on=machine(ssd=False),
    )
    planner, _ = plan(it)
    assert sorted(planner.loader.pools["vram"].residents) == [0, 1]
    assert sorted(planner.loader.pools["ram"].residents) == [2, 3, 4, 5, 6, 7]


def test_ram_takes_all_that_vram_leaves_however_uneven() -> None:
    """VRAM holds 2, 2 and 1 of 4; RAM has room for the other 2, 2 and 3, and no expert is without a place."""
    it = case(trace([[0, 1, 2], [3, 2, 1]]), of=model(3), pools={"vram": {"hold": "5 kB"}, "ram": {"hold": "fit"}}, on=machine(ram=9_000))
    assert (it.layout.pools["vram"].counts, it.layout.pools["ram"].counts) == ((2, 2, 1), (2, 2, 3))
    assert not [line for line in text(it).splitlines() if " ssd " in line]


def test_a_buffer_is_not_refilled_under_a_wrong_load() -> None:
    """Layer 1 is predicted 0 and takes 3: the load of 1.0 may still be under way when the buffer is released by the combine."""
    it = case(trace([[0, 0]] * 4 + [[0, 3]] * 3, seq=[0, 0, 0, 0, 1, 1, 1]), trace={"train_fraction": 0.5}, workload={"output_tokens": 2},
              pools=over_ram(hold="none"), prefetch={"predictor": "popularity", "into": "buffers"})  # fmt: skip
    wrong = next(int(line.split()[0]) for line in text(it).splitlines() if " load 1.0 " in line)
    later = [line for line in text(it).splitlines() if " load 1." in line and f" {wrong}s" in line]
    assert len(later) == 2  # the demand load that takes its room, and the refill in the next step


def test_an_inclusive_ram_must_be_larger_than_vram() -> None:
    with pytest.raises(InputError, match="inclusive"):
        case(trace([[0, 1]]), pools={"vram": {"hold": 3, "policy": "lru"}, "ram": {"hold": 2, "policy": "lru"}})


def test_each_layer_of_a_dynamic_pool_needs_room() -> None:
    with pytest.raises(InputError, match="at least one expert of each layer under lru"):
        case(trace([[0, 1]]), pools=over_ram(hold="1 kB", policy="lru"))


def test_without_storage_ram_is_where_experts_come_from() -> None:
    it = case(
        trace([[0, 1], [1, 2]]),
        on=machine(ssd=False),
        pools={"vram": {"hold": 1, "policy": "lru"}, "ram": {"hold": "all", "policy": "lru"}},
    )
    assert {line.split()[3] for line in text(it).splitlines()} == {"gpu", "h2d"}


def test_a_drive_may_have_another_name() -> None:
    on = machine()
    on["storage"]["ssd1"] = on["storage"].pop("ssd")
    it = case(trace([[0, 1]]), on=on, pools={"vram": {"hold": 1, "policy": "lru"}, "ram": {"hold": 2, "policy": "lru"}})
    assert "2 load 0.0 ssd1 @0 <- 1" in text(it)


# ---- places of computation


def test_in_place_experts_run_on_the_cpu_with_copies_of_hidden_states() -> None:
    it = case(trace([[[0, 1]], [[1, 3]]]), of=model(1, top_k=2), placement={"site": "in-place"}, pools=over_ram(hold=2))
    assert text(it).splitlines()[6:] == [
        "6 attention 0 gpu <- 5",
        "7 router 0 gpu <- 6",
        "8 copy 0 d2h <- 7",
        "9 ffn 0.3 cpu @0 <- 8",
        "10 ffn 0.1 gpu @0 <- 7",
        "11 copy 0 h2d <- 9",  # last: no load queues behind it
        "12 combine 0 gpu <- 10 11",
        "13 head 1 gpu <- 12",
    ]


def test_in_place_uses_what_was_prefetched_into_a_buffer() -> None:
    it = case(
        trace([[0, 1], [2, 3]]),
        placement={"site": "in-place"},
        pools=over_ram(hold="none"),
        prefetch={"predictor": "oracle", "into": "buffers"},
    )
    assert [o[3] for o in outcomes(it)] == ["cache", "prefetch", "prefetch", "prefetch"]
    assert [line.split()[3] for line in text(it).splitlines() if " ffn " in line] == ["cpu", "gpu", "gpu", "gpu"]


def test_attention_and_experts_hand_over_through_queues() -> None:
    on, of = machine(None, npu=True), model(1)
    it = case(trace([[0], [1]], seq=[0, 1]), of=of, on=on, placement={"experts": "npu"}, workload={"batch": 2},
              pipeline={"micro_batches": 2, "queue_depth": 1})  # fmt: skip
    same(it, """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 put 0 gpu <- 1
        3 get 0 npu <- 2
        4 ffn 0.0 npu @0 <- 3
        5 put 0 npu <- 4
        6 attention 0 gpu <-                # the second micro-batch goes on while the NPU computes
        7 router 0 gpu <- 6
        8 put 0 gpu <- 7 3q
        9 get 0 gpu <- 5
        10 combine 0 gpu <- 9
        11 get 0 npu <- 8
        12 ffn 0.1 npu @1 <- 11
        13 put 0 npu <- 12 9q
        14 get 0 gpu <- 13
        15 combine 0 gpu <- 14
        16 head 1 gpu <- 10 15
    """)  # fmt: skip
    staged = case(trace([[0], [1]], seq=[0, 1]), of=of, on=on, placement={"experts": "npu"}, workload={"batch": 2},
                  pipeline={"micro_batches": 2, "hidden_states": "staged"})  # fmt: skip
    copies = [line for line in text(staged).splitlines() if " copy " in line]
    assert copies == ["2 copy 0 gpu <- 1", "6 copy 0 npu <- 5", "10 copy 0 gpu <- 9", "16 copy 0 npu <- 15"]  # claim H3: each way


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_bounded_queues_never_deadlock(depth: int) -> None:
    """The i-th put waits for the (i - Q)-th get, in both queues, for 1 to 5 micro-batches, dense layers between."""
    of = real_model(4, experts={"n_experts": 4, "top_k": 2, "layers": "1,3"}, dense_ffn={"intermediate_size": 8})
    ids = [[[t % 4, (t + 1) % 4], [(t + 2) % 4, (t + 3) % 4]] for t in range(10)]
    for m in range(1, 6):
        it = case(trace(ids, seq=[t // 2 for t in range(10)]), of=of, on=machine(None, npu=True), placement={"experts": "npu"},
                  workload={"batch": 5, "output_tokens": 2}, pipeline={"micro_batches": m, "queue_depth": depth}, precision="raw-int8")  # fmt: skip
        (f,) = plan(it)[1]
        names = [lane.name for lane in it.planner().lanes]
        for put_on, get_on in (("gpu", "npu"), ("npu", "gpu")):
            puts = [r for r in range(f.n_tasks) if f.kind[r] == Kind.PUT and names[f.lane[r]] == put_on]
            gets = [r for r in range(f.n_tasks) if f.kind[r] == Kind.GET and names[f.lane[r]] == get_on]
            assert len(puts) == len(gets) == 2 * 2 * m
            for i, put in enumerate(puts):
                queue = [t for t, why in f.deps(put) if why == Dep.QUEUE]
                assert queue == ([gets[i - depth]] if i >= depth else [])
        meter = simulate(it).meter
        assert meter is not None and meter.n_tasks == f.n_tasks
        assert meter.peak_bytes[0] <= it.layout.ledger.planned_bytes("unified")


def test_layers_may_run_elsewhere() -> None:
    """Claim W1: experts, or attention too, of some layers on another device."""
    rule = {"layers": "1", "device": "cpu"}
    it = case(trace([[0, 1]]), placement={"layers": [rule]}, pools={"vram": {"hold": "all"}, "ram": RAM_ALL})
    assert text(it).splitlines()[6:13] == [
        "6 copy 1 d2h <- 5",
        "7 put 1 gpu <- 6",
        "8 get 1 cpu <- 7",
        "9 ffn 1.1 cpu @0 <- 8",
        "10 copy 1 h2d <- 9",
        "11 put 1 cpu <- 10",
        "12 get 1 gpu <- 11",
    ]
    assert it.layout.pools["vram"].layers == (0,) and it.layout.pools["ram"].layers == (0, 1)
    both = case(
        trace([[0, 1]]), placement={"layers": [rule, {**rule, "part": "attention"}]}, pools={"vram": {"hold": "all"}, "ram": RAM_ALL}
    )
    assert text(both).splitlines()[4:10] == [
        "4 copy 1 d2h <- 3",
        "5 attention 1 cpu <- 4",
        "6 router 1 cpu <- 5",
        "7 ffn 1.1 cpu @0 <- 6",
        "8 combine 1 cpu <- 7",
        "9 copy 2 h2d <- 8",
    ]
    assert both.layout.kv_tiers == ("vram", "ram")
    with pytest.raises(InputError, match="prefetch.into"):
        case(trace([[0, 1]]), placement={"layers": [rule]}, pools=ALL, prefetch={"predictor": "oracle", "into": "buffers"})


# ---- shapes of work


def test_granularity_matrix() -> None:
    it = case(trace([[1]]), of=real_model(1), granularity="matrix", pools=over_ram(hold=2, policy="lru"))
    same(it, """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 load 0.1 h2d @0 <- 1
        3 load 0.1 h2d @0 <- 1 2
        4 load 0.1 h2d @0 <- 1 3
        5 ffn 0.1 gpu @0 <- 1 2             # each product starts with its own matrix
        6 ffn 0.1 gpu @0 <- 5 3
        7 ffn 0.1 gpu @0 <- 6 4
        8 combine 0 gpu <- 7
        9 head 1 gpu <- 8
    """)  # fmt: skip
    whole = case(trace([[1]]), of=real_model(1), pools=over_ram(hold=2, policy="lru"))
    for kind, amount in ((Kind.LOAD, "transfer_bytes"), (Kind.FFN, "flops"), (Kind.FFN, "weight_bytes")):
        assert sum(getattr(w, amount) for w in works(it, kind)) == sum(getattr(w, amount) for w in works(whole, kind))


def test_granularity_layer() -> None:
    it = case(trace([[[0, 1, 2]], [[1, 2, 3]]]), of=model(1, top_k=3), granularity="layer", pools=over_ram(hold=2, policy="lru"))
    same(it, """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 load 0 h2d <- 1
        3 ffn 0 gpu <- 1 2
        4 load 0.2 h2d @0 <- 1 3s
        5 ffn 0 gpu <- 1 4
        6 combine 0 gpu <- 3 5
        7 head 1 gpu <- 6
        8 attention 0 gpu <- 7
        9 router 0 gpu <- 8
        10 ffn 0 gpu <- 9 2 4
        11 load 0.3 h2d @1 <- 9 10s
        12 ffn 0 gpu <- 9 11
        13 combine 0 gpu <- 10 12
        14 head 1 gpu <- 13
    """)  # fmt: skip
    assert [w.transfer_bytes for w in works(it, Kind.LOAD)] == [2 * EXPERT, EXPERT, EXPERT]


def test_dense_first_layers_and_shared_experts() -> None:
    of = real_model(2, experts={"n_experts": 4, "top_k": 1, "layers": "1", "n_shared": 1}, dense_ffn={"intermediate_size": 24})
    it = case(trace([[1]]), of=of, pools=ALL)
    same(it, """
        0 attention 0 gpu <-
        1 ffn 0 gpu <- 0                    # trap: interleaved dense layers have no router and no experts
        2 attention 1 gpu <- 1
        3 router 1 gpu <- 2
        4 ffn 1 gpu <- 2                    # the shared expert needs no router
        5 ffn 1.1 gpu @0 <- 3
        6 combine 1 gpu <- 5 4
        7 head 2 gpu <- 6
    """)  # fmt: skip
    dense, shared, routed = works(it, Kind.FFN)
    assert (dense.weight_bytes, shared.weight_bytes, routed.weight_bytes) == (3 * 16 * 24, 3 * 16 * 8, 3 * 16 * 8)
    assert it.layout.pools["vram"].layers == (1,)


def test_prefill_chunks_use_the_union_of_their_tokens_experts() -> None:
    it = case(trace([[0], [1], [0], [2], [3]], prompt=4), of=model(1), workload={"prompt_tokens": 4, "prefill_chunk": 3, "output_tokens": 2},
              pools=over_ram(hold=2, policy="lru"))  # fmt: skip
    same(it, """
        0 attention 0 gpu <-
        1 router 0 gpu <- 0
        2 load 0.0 h2d @0 <- 1
        3 load 0.1 h2d @1 <- 1
        4 ffn 0.0 gpu @0 <- 1 2
        5 ffn 0.1 gpu @1 <- 1 3
        6 combine 0 gpu <- 4 5
        7 head 1 gpu <- 6
        8 attention 0 gpu <- 7
        9 router 0 gpu <- 8
        10 load 0.2 h2d @0 <- 9 4s
        11 ffn 0.2 gpu @0 <- 9 10
        12 combine 0 gpu <- 11
        13 head 1 gpu <- 12
        14 attention 0 gpu <- 13
        15 router 0 gpu <- 14
        16 load 0.3 h2d @1 <- 15 5s
        17 ffn 0.3 gpu @1 <- 15 16
        18 combine 0 gpu <- 17
        19 head 1 gpu <- 18
    """)  # fmt: skip
    assert [w.tokens for w in works(it, Kind.FFN)] == [2, 1, 1, 1]
    assert [w.flops for w in works(it, Kind.FFN)][:2] == [2.0 * 2 * EXPERT, 2.0 * EXPERT]
    (f,) = plan(it)[1]
    assert f.steps.tolist() == [[0, 0, 7, 0, 3, 0], [1, 8, 13, 0, 1, 1], [2, 14, 19, 1, 1, 1]]  # the last chunk emits the first token


def test_batches_share_experts() -> None:
    it = case(
        trace([[0], [1], [1], [1], [3], [1]], seq=[0, 0, 1, 1, 2, 2]), of=model(1), workload={"batch": 3, "output_tokens": 2}, pools=ALL
    )
    assert [(o[0], o[2]) for o in outcomes(it)] == [(0, 0), (0, 1), (0, 3), (1, 1)]
    assert [w.tokens for w in works(it, Kind.FFN)] == [1, 1, 1, 3]
    assert plan(it)[1][0].steps[:, 4:].tolist() == [[3, 3], [3, 3]]


def test_an_answer_belongs_to_its_prompt() -> None:
    """The first sequence has a prompt long enough but no answer; rows of two sequences are never joined unasked."""
    ids = [[0], [0], [1], [2], [2], [3], [3]]
    routing = trace(ids, seq=[0, 0, 0, 1, 1, 1, 1], prompt=2)
    it = case(routing, of=model(1), workload={"prompt_tokens": 2, "output_tokens": 3}, pools=ALL)
    assert {o[2] for o in outcomes(it)} == {2, 3}
    with pytest.raises(InputError, match="sequences of that many prompt rows"):
        case(routing, of=model(1), workload={"prompt_tokens": 2, "output_tokens": 9}, pools=ALL).planner()


def test_borrowed_prompts_go_on_in_their_own_rows() -> None:
    ids = [[t % 4] for t in range(12)]
    it = case(trace(ids, seq=[0] * 3 + [1] * 3 + [2] * 3 + [3] * 3), of=model(1), trace={"prefill": "decode", "sequences": "chain"},
              workload={"batch": 2, "prompt_tokens": 3, "output_tokens": 3}, pools=ALL)  # fmt: skip
    steps = it.routing.steps
    assert steps.prompts.tolist() == [[0, 1, 2], [3, 4, 5]] and steps.answers.tolist() == [[6, 7], [9, 10]]


# ---- K/V cache


def kv_case(mode: str, tokens: int, vram: int, **more: Any) -> Case:
    """16 B of KV a token over 2 layers; 200 B shared part and 8,000 B of experts beside it."""
    memory = {"kv": mode, **more.pop("memory", {})}
    return case(trace([[0, 1]] * tokens), on=machine(vram), memory=memory, pools=more.pop("pools", over_ram(hold="all")), **more)


def test_kv_live_grows_token_by_token_and_runs_out() -> None:
    fixed = 200 + 8 * EXPERT
    it = kv_case("live", 10, fixed + 16 * 6 + 15)
    planner, fragments = plan(it)
    oom = planner.out_of_memory
    assert oom is not None and (oom.tier, oom.step, oom.needed_bytes, oom.usable_bytes) == ("vram", 6, fixed + 16 * 7, fixed + 16 * 6 + 15)
    assert len(fragments[0].steps) == 6  # the steps before keep their times
    assert it.layout.max_context_tokens == 6
    result = simulate(it)
    assert result.meter is not None and result.meter.peak_bytes[0] == fixed + 16 * 6
    assert result.oom is not None and result.oom["step"] == 6


def test_kv_paged_takes_whole_blocks() -> None:
    it = kv_case("paged", 5, 100_000, memory={"kv_block_tokens": 4})
    grown = [row.tolist() for f in plan(it)[1] for row in f.memory]
    assert [(row[0], row[4]) for row in grown] == [(0, 64), (36, 64)]  # 4 tokens of 16 B when step 0 begins, 4 more in step 4


def test_kv_maximum_is_reserved_at_the_start_and_ends_there() -> None:
    it = kv_case("maximum", 5, 100_000, memory={"context_tokens": 3})
    planner, _ = plan(it)
    assert ("vram", "KV cache", 48) in list(planner._initial())
    assert planner.out_of_memory is not None and planner.out_of_memory.step == 3
    assert kv_case("maximum", 5, 8_200).planner().out_of_memory is not None  # does not fit: before the first step


@pytest.mark.parametrize("arena", ["grown", "maximum"])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("policy", ["static", "lru"])
def test_kv_takes_its_bytes_from_the_expert_pool(policy: str, scope: str, arena: str) -> None:
    """Claim M5's cure: the pool shrinks by whole experts, memory never passes the tier, hits become misses."""
    slots = 2 * EXPERT if policy == "static" else 0
    ids = [[t % 4, (t + 1) % 4] for t in range(200)]
    memory = {"kv": "live", "kv_from_experts": True, "arena": arena}
    it = case(trace(ids), on=machine(200 + 8 * EXPERT + slots + 100), memory=memory, of=model(),
              pools=over_ram(hold=4 if policy == "lru" else "fit", policy=policy, scope=scope, transient_slots=2))  # fmt: skip
    planner, _ = plan(it)
    assert planner.out_of_memory is None
    capacity = sum(cache.capacity_bytes for cache in planner.loader.pools["vram"].caches)
    assert capacity == (8 - 4) * EXPERT  # 3,200 B of KV less 100 B that were free: four experts' room
    result = simulate(it)
    assert result.meter is not None
    assert result.meter.peak_bytes[0] <= 200 + 8 * EXPERT + slots + 100
    assert {o[3] for o in outcomes(it) if o[0] < 6} <= ({"cache"} if policy == "static" else {"miss", "cache"})
    assert "miss" in {o[3] for o in outcomes(it) if o[0] > 150}
    without = kv_case("live", 200, 200 + 8 * EXPERT + 100)
    assert plan(without)[0].out_of_memory is not None


def test_kv_waits_for_the_experts_it_displaces() -> None:
    """The first attention of the step that grows waits for what still uses the room: here a useless prefetch that may be under way."""
    it = kv_case("live", 8, 200 + 4 * EXPERT + 16 * 3, memory={"kv_from_experts": True}, pools=over_ram(hold=2, policy="lru"))
    lines = text(it).splitlines()
    shrunk = [line for line in lines if " attention 0 " in line and "s" in line.split("<-")[1]]
    assert len(shrunk) <= 1  # one shrink in eight tokens
    assert plan(it)[0].out_of_memory is None


def test_kv_from_experts_needs_a_cache_that_grows() -> None:
    with pytest.raises(InputError, match="live or paged with kv_from_experts"):
        kv_case("maximum", 4, 100_000, memory={"kv_from_experts": True})


def test_a_pool_that_must_hold_all_does_not_shrink() -> None:
    it = kv_case("live", 20, 200 + 8 * EXPERT + 100, memory={"kv_from_experts": True})
    assert plan(it)[0].out_of_memory is not None


# ---- refresh, maps, tables


def test_static_placement_is_refreshed_from_traffic() -> None:
    it = case(trace([[1], [2], [2], [2], [2], [2]]), of=model(1), trace={"train_fraction": 0.0}, pools=over_ram(hold=1, refresh_tokens=3))
    assert [(o[0], o[3]) for o in outcomes(it)][:1] == [(0, "miss")]
    it = case(trace([[1]] * 4 + [[2]] * 4, seq=[0] * 4 + [1] * 4), of=model(1), trace={"train_fraction": 0.5}, workload={"output_tokens": 4},
              pools=over_ram(hold=1, refresh_tokens=2))  # fmt: skip
    lines = text(it).splitlines()
    assert [line for line in lines if "*" in line] == ["12 load 0.2 h2d @0 * <- 11"]  # 1 was never used: nothing else to wait for
    assert [o[3] for o in outcomes(it)] == ["miss", "miss", "prefetch", "cache"]


def test_refresh_below_a_static_pool_leaves_its_experts_out() -> None:
    """RAM holds all that VRAM does not; a refresh must not throw one of them out for an expert that VRAM has already."""
    it = case(trace([[0], [0], [0], [2], [3], [1]]), of=model(1), pools={"vram": {"hold": 1}, "ram": {"hold": "all", "refresh_tokens": 2}})
    planner, _ = plan(it)
    assert sorted([*planner.loader.pools["vram"].residents, *planner.loader.pools["ram"].residents]) == [0, 1, 2, 3]


def test_the_fast_region_follows_use() -> None:
    """Claim P6: file order puts experts 0.0 and 0.1 of 8 into the fast quarter; after a refresh the most used are there."""
    pools = {"vram": {"hold": "none"}, "ram": {"hold": "none"}}
    io = {"fast_map": "refreshed", "fast_map_refresh_tokens": 2}
    it = case(trace([[0, 3], [0, 3], [0, 3], [2, 3]]), on=machine(fast=True), pools=pools, io=io)
    modes = [w.mode for w in works(it, Kind.LOAD) if w.resource == "ssd"]
    assert modes == ["direct+fast", "direct"] * 2 + ["direct+fast", "direct+fast"] + ["direct", "direct+fast"]
    fixed = case(trace([[0, 3], [0, 3], [0, 3], [2, 3]]), on=machine(fast=True), pools=pools)
    assert [w.mode for w in works(fixed, Kind.LOAD) if w.resource == "ssd"] == ["direct+fast", "direct"] * 3 + ["direct", "direct"]


def test_scattered_files_need_more_operations() -> None:
    """Claim P5: one extent an expert, or one a piece of each matrix."""
    of, pools = real_model(1), {"vram": {"hold": "none"}, "ram": {"hold": "none"}}
    merged = case(trace([[0]]), of=of, pools=pools)
    pieces = case(trace([[0]]), of=of, pools=pools, io={"layout": "scattered", "scattered_piece": "50 B"})
    counts = [[w.operations for w in works(it, Kind.LOAD) if w.resource == "ssd"] for it in (merged, pieces)]
    assert counts == [[1], [9]]  # three matrices of 128 B


def test_lookup_tables_may_lie_on_storage() -> None:
    """Claim T5: they take no memory then, and each step reads a few rows before its first layer."""
    tables = [{"name": "t", "rows": 100, "cols": 8, "rows_read_per_token": 2}]
    of = real_model(1, lookup_tables=tables)
    it = case(trace([[0]]), of=of, placement={"lookup": "ssd"}, pools=ALL)
    assert text(it).splitlines()[:2] == ["0 load 0 ssd <-", "1 attention 0 gpu <- 0"]
    assert works(it, Kind.LOAD)[0].transfer_bytes == 16
    assert simulate(it).as_dict()["oom"] is None
    assert not [line for line in it.layout.ledger.lines if "lookup" in line.name]
    resident = case(trace([[0]]), of=of, pools=ALL)
    assert [line.bytes for line in resident.layout.ledger.lines if "lookup" in line.name] == [800]


# ---- the ledger's traps


def test_kv_heads_times_head_dim_not_hidden_by_heads() -> None:
    """Trap: Qwen3-30B-A3B at 8,192 tokens in q8_0 (34 B per 32) is 428 MB, not 201 MB."""
    it = case(trace([[0, 1]]), of=model(), pools=ALL)
    assert it.layout.kv_bytes("vram", 10) == 10 * 2 * 2 * 4  # tokens x layers x (K, V) x one head of 4; hidden / heads would be 8
    qwen = load_model("qwen3-30b-a3b")
    size = qwen.kv_bytes(plan_from({"default": "q8_0", "kv": "q8_0"}), 8192)
    assert size == 8192 * 48 * 2 * (4 * 128 // 32) * 34 and round(size / 1e6) == 428


def test_sliding_layers_stop_at_their_window() -> None:
    window = {"kind": "sliding", "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "window": 4}
    of = model(2, attention_overrides=[{"layers": "1", "attention": window}])
    it = case(trace([[0, 1]] * 9), of=of, pools=ALL, memory={"kv": "live"})
    assert it.layout.kv_bytes("vram", 9) == (9 + 4) * 8  # trap: not 18 x 8
    grown = [row[4] for f in plan(it)[1] for row in f.memory.tolist()]
    assert grown == [16] * 4 + [8] * 5


def test_storage_is_no_scalar() -> None:
    """Trap: the same bytes in small requests take longer; the request size and depth set the rate."""
    times = []
    for request in ("1 kB", "10 kB"):
        of = model(1) | {"declared": {"shared_params": 100, "expert_params": 10_000}}
        result = simulate(
            case(trace([[0]]), of=of, pools={"vram": {"hold": "none"}, "ram": {"hold": "none"}}, io={"request": request, "depth": 1})
        )
        tasks = result.tasks
        read = next(t for t in range(len(tasks.kind)) if tasks.lanes[tasks.lane[t]].name == "ssd")
        times.append(int(tasks.end[read] - tasks.start[read]))
    assert times[0] == 2_000_000_000 and times[1] == 1_000_000_000  # 10 kB at 5 and at 10 MB/s, in ps


def test_rooms_shrink_by_what_was_free() -> None:
    rooms = Rooms(3 * EXPERT, [EXPERT])
    first, second = rooms.take(EXPERT), rooms.take(EXPERT)
    first.uses = [7]
    rooms.give(first)
    assert rooms.shrink(2 * EXPERT) == (EXPERT, [(7, Dep.SLOT)])  # one untouched, one that task 7 used last
    assert second.slot == 1 and not rooms.freed and rooms.untouched == 0


def test_fragments_are_plain_data() -> None:
    (f,) = plan(case(trace([[0, 1]]), pools=ALL))[1]
    assert all(not callable(getattr(f, field.name)) for field in dataclasses.fields(f))


def test_granularities_and_tiers_agree_on_accesses() -> None:
    ids = [[(5 * t + layer) % 4 for layer in range(2)] for t in range(12)]
    pools = {"vram": {"hold": 2, "policy": "lru"}, "ram": {"hold": 3, "policy": "lru"}}
    seen = {str(outcomes(case(trace(ids), of=real_model(2), pools=pools, granularity=g, lanes=lanes)))
            for g, lanes in product(("expert", "matrix", "layer"), ("fifo", "priority"))}  # fmt: skip
    assert len(seen) == 1


def test_queues_are_planned_in_the_tier_that_holds_them() -> None:
    """Tasks wait in the experts' memory, results in attention's; three sequences in two micro-batches make items of two."""
    it = case(trace([[0], [1], [2]], seq=[0, 1, 2]), of=model(1), placement={"experts": "cpu"}, workload={"batch": 3},
              pools={"ram": RAM_ALL}, pipeline={"micro_batches": 2, "queue_depth": 1})  # fmt: skip
    lines = {line.tier: line.bytes for line in it.layout.ledger.lines if line.name == "hand-over queues"}
    assert lines == {"vram": 2 * 16 * 2, "ram": 2 * 16 * 2}
    result = simulate(it)
    line = result.memory.lines.index("hand-over queues")
    for tier in (0, 1):
        level = result.memory.series(tier, line)[1]
        assert level.min() == 0 and level.max() == 64 and level[-1] == 0


def test_a_prefetch_is_late_only_if_it_was_waited_for() -> None:
    """The load ends at 5, when the router has long ended, but the GPU is busy with another expert until 9."""
    builder = FragmentBuilder(2)
    work = [Work("gpu", kernels=n) for n in range(4)]
    router = builder.task(Kind.ROUTER, 0, work[0], [])
    load = builder.task(Kind.LOAD, 1, work[1], [], prefetch=True)
    first = builder.task(Kind.FFN, 0, work[2], [(router, Dep.DATA)])
    second = builder.task(Kind.FFN, 0, work[3], [(router, Dep.DATA), (load, Dep.DATA)])
    builder.access(0, 0, 0, Outcome.CACHE, first)
    builder.access(0, 0, 1, Outcome.PREFETCH, second, load)
    builder.end_step(0, 0, second, 1, 1, 1)
    fragment = builder.build()
    for gpu_ps, late in ((8, 0), (1, 1)):
        latency = np.array([1, 5, gpu_ps, 1], np.int64)
        costs = Costs((), np.zeros(0), np.arange(4, dtype=np.int32), latency, np.zeros(4), np.full(4, np.inf), np.zeros((4, 0)))
        lanes = (Lane("gpu"), Lane("h2d"))
        engine = DesEngine(lanes)
        meter = Meter(lanes, 1, 4)
        meter.add(fragment, costs, engine.advance(fragment, costs))
        meter.finish(engine.finish())
        assert metrics.accesses(meter) == {"cache": 1, "prefetch": 1 - late, "late": late, "miss": 0}
        assert metrics.io_wait_s(meter) == pytest.approx(3e-12 * late)
