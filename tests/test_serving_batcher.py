"""Steps are formed as stated, blocks and requests are conserved, and no order of arrivals breaks an invariant."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesim.errors import MoesimError
from moesim.serving.batcher import Batcher, Formed
from moesim.serving.kv import KvPlan
from moesim.serving_spec import Serving
from moesim.units import parse_bytes

few = settings(max_examples=200, deadline=None, suppress_health_check=[*HealthCheck])
one_of = st.sampled_from


def batcher(blocks: int, block_tokens: int = 4, swap_blocks: int = 0, most_tokens: int = 10_000, **spec: object) -> Batcher:
    if swap_blocks:
        spec |= {"preemption": "swap", "swap": f"{parse_bytes('1 B')} B"}
    plan = KvPlan(blocks, block_tokens, most_tokens, {"vram": 10}, {"vram": 0})
    return Batcher(Serving.model_validate({"most_sequences": 2, "step_tokens": 4} | spec), plan, swap_blocks, debug=True)


def all_steps(it: Batcher) -> list[Formed]:
    out = []
    while not it.idle:
        out.append(it.form())
    return out


def parts(steps: list[Formed]) -> list[list[tuple[int, int, int]]]:
    return [step.parts for step in steps]


def test_prompts_in_chunks_beside_decode_rows() -> None:
    """Budget of 4 tokens, two places. Request 1 comes while 0 computes its prompt of 6; request 2 waits for a place."""
    it = batcher(blocks=100)
    it.arrive(0, prompt=6, output=3)
    steps = [it.form()]
    it.arrive(1, prompt=5, output=2)
    it.arrive(2, prompt=1, output=1)
    steps += all_steps(it)
    assert parts(steps) == [
        [(0, 0, 4)],
        [(0, 4, 2), (1, 0, 2)],  # the rest of prompt 0, then what is left of the budget
        [(0, 6, 1), (1, 2, 3)],  # decode first
        [(0, 7, 1), (1, 5, 1)],  # the last token that is computed of 0 is its 8th: the 3rd that it emits needs no row
        [(2, 0, 1)],
    ]
    assert [step.emits for step in steps] == [[], [0], [0, 1], [0, 1], [2]]
    assert [step.ends for step in steps] == [[], [], [], [0, 1], [2]]
    assert [step.decodes for step in steps] == [False, False, False, True, True]
    assert it.pool.free == 100


def test_static_batches_run_to_their_end() -> None:
    it = batcher(blocks=100, batching="static")
    for r, output in enumerate((3, 1, 1)):
        it.arrive(r, prompt=1, output=output)
    assert parts(all_steps(it)) == [[(0, 0, 1), (1, 0, 1)], [(0, 1, 1)], [(0, 2, 1)], [(2, 0, 1)]]


def test_who_was_admitted_last_gives_way_and_computes_anew() -> None:
    """Three blocks of 2 tokens. Both hold one; when 0 and then 1 need a second one there is but one left."""
    it = batcher(blocks=3, block_tokens=2)
    it.arrive(0, prompt=1, output=4)
    it.arrive(1, prompt=1, output=4)
    steps = all_steps(it)
    assert parts(steps) == [
        [(0, 0, 1), (1, 0, 1)],
        [(0, 1, 1), (1, 1, 1)],
        [(0, 2, 1)],  # 0 takes the third block, 1 gives way
        [(0, 3, 1)],  # 1 needs 2 blocks for 3 tokens, 1 is free
        [(1, 0, 3)],  # prompt and both tokens emitted, anew
        [(1, 3, 1)],
    ]
    assert [step.gave_way for step in steps] == [0, 0, 1, 0, 0, 0]
    assert [step.kv_blocks for step in steps] == [2, 2, 2, 2, 2, 2]
    assert [step.emits for step in steps] == [[0, 1], [0, 1], [0], [0], [1], [1]]


def test_who_was_admitted_last_gives_way_and_comes_back() -> None:
    it = batcher(blocks=3, block_tokens=2, swap_blocks=1)
    it.arrive(0, prompt=1, output=4)
    it.arrive(1, prompt=1, output=4)
    steps = all_steps(it)
    assert parts(steps)[2:] == [[(0, 2, 1)], [(0, 3, 1)], [(1, 2, 1)], [(1, 3, 1)]]
    assert [(step.swapped_out, step.swapped_in) for step in steps[2:]] == [(1, 0), (0, 0), (0, 1), (0, 0)]
    assert it.swap_free == 1


def test_a_full_swap_space_means_computing_anew() -> None:
    it = batcher(blocks=4, block_tokens=1, swap_blocks=1)
    it.arrive(0, prompt=2, output=3)
    it.arrive(1, prompt=2, output=2)
    steps = all_steps(it)
    assert [step.swapped_out for step in steps] == [0] * len(steps)
    assert sum(step.gave_way for step in steps) == 1
    assert (1, 0, 3) in steps[-1].parts or (1, 0, 3) in steps[-2].parts


def test_a_shared_prefix_is_kept_and_computed_once() -> None:
    """Prefix of 6 tokens in blocks of 4: one whole block is shared, 2 tokens of it are not."""
    it = batcher(blocks=10, prefix_tokens=6, step_tokens=100)
    for r in range(2):
        it.arrive(r, prompt=7, output=2, group=0)
    steps = all_steps(it)
    assert parts(steps) == [[(0, 0, 7), (1, 4, 3)], [(0, 7, 1), (1, 7, 1)]]  # known to be there as soon as it is in a step
    assert steps[0].kv_blocks == 3  # 1 shared, and 1 each
    assert it.pool.free == 9 and it.pool.prefixes[0].blocks == 1  # it stays
    it.arrive(2, prompt=7, output=1, group=0)
    assert parts(all_steps(it)) == [[(2, 4, 3)]]
    it.arrive(3, prompt=40, output=1)  # takes all ten blocks
    assert len(all_steps(it)) == 1
    assert not it.pool.prefixes and it.pool.free == 10


def test_contiguous_slots_share_nothing() -> None:
    """kv: maximum is one block of the whole planned context for each sequence."""
    it = batcher(blocks=2, block_tokens=20, most_tokens=20, prefix_tokens=6, most_sequences=4)
    for r in range(3):
        it.arrive(r, prompt=7, output=2, group=0)
    assert [step.kv_blocks for step in all_steps(it)] == [1, 2, 2, 2, 2, 1, 1]
    assert not it.arrive(3, prompt=19, output=3)  # 21 tokens
    assert it.arrive(4, prompt=19, output=2)


def test_what_can_never_fit_is_refused() -> None:
    it = batcher(blocks=3, block_tokens=4)
    assert not it.arrive(0, prompt=10, output=4)  # 13 tokens in the cache at the end
    assert it.arrive(1, prompt=10, output=3)
    assert (it.arrived, it.refused) == (2, 1)


def test_a_broken_invariant_is_named() -> None:
    it = batcher(blocks=9)
    it.arrive(0, prompt=2, output=5)
    it.form()
    it.pool.free -= 1
    with pytest.raises(MoesimError, match="invariant 2 of the batcher is broken in step 1"):
        it.form()
    it.pool.free += 1
    it.arrived += 1
    with pytest.raises(MoesimError, match="invariant 1"):
        it.form()


@few
@given(data=st.data())
def test_every_request_ends_and_every_block_comes_back(data: st.DataObject) -> None:
    """Random requests at random times: invariants hold after every step, all end, each computes in order what it must."""
    draw = data.draw
    block_tokens, prefix = draw(one_of([1, 2, 4, 16])), draw(one_of([0, 0, 3, 8]))
    most_sequences = draw(st.integers(1, 4))
    spec = {
        "most_sequences": most_sequences, "step_tokens": draw(st.integers(most_sequences, 12)), "batching": draw(one_of(["continuous", "continuous", "static"])),
        "prefix_tokens": prefix,
    }  # fmt: skip
    swap = draw(one_of([0, 0, 1, 6]))
    it = batcher(draw(st.integers(2, 14)), block_tokens, swap, **spec)
    requests = draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=10)
    )
    done: dict[int, int] = {}
    emitted = dict.fromkeys(range(len(requests)), 0)
    taken = set()

    def step() -> None:
        nonlocal it
        if draw(st.booleans()):  # a state that is saved and read back changes nothing
            state = json.loads(json.dumps(it.state()))
            fresh = Batcher(it.spec, it.plan, it.swap_blocks, debug=True)
            fresh.restore(state)
            it = fresh
        formed = it.form()
        for r, start, tokens in formed.parts:
            assert start == done.get(r, 0) or start == 0 or (requests[r][2] >= 0 and start <= prefix)
            done[r] = start + tokens
        for r in formed.emits:
            emitted[r] += 1
            assert done[r] == requests[r][0] + emitted[r] - 1

    for r, (prompt, output, group, pause) in enumerate(requests):
        if it.arrive(r, prompt, output, group if prompt > prefix > 0 else -1):
            taken.add(r)
        for _ in range(pause):
            if not it.idle:
                step()
    while not it.idle:
        step()
    assert all(emitted[r] == (requests[r][1] if r in taken else 0) for r in emitted)
    assert it.ended == len(taken)
    assert it.pool.free + sum(p.blocks for p in it.pool.prefixes.values()) == it.plan.blocks
    assert it.swap_free == swap
