"""Conformance suite that every cache policy runs, hand-computed examples, and Belady's bound."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import InputError
from moesim.policies.cache import ExpertPool, future_uses, hottest
from moesim.policies.eviction import ARC, CACHE_POLICIES, CachePolicy, LeastStale, make_policy
from moesim.trace import load_trace

ROOT = Path(__file__).resolve().parents[1]

EVERY = sorted(CACHE_POLICIES)
DYNAMIC = [name for name in EVERY if CACHE_POLICIES[name].admits]
N_KEYS = 8


def policy_for(name: str, sets: list[list[int]]) -> CachePolicy:
    return make_policy(name, future_uses(enumerate(sets)) if name == "belady" else None)


def pool_for(name: str, capacity: int, sets: list[list[int]], sizes: list[int] | None = None) -> ExpertPool:
    return ExpertPool(capacity, sizes or [1] * N_KEYS, policy_for(name, sets), "vram.experts")


def hits(name: str, capacity: int, sets: list[list[int]]) -> int:
    pool = pool_for(name, capacity, sets)
    return sum(len(pool.access(keys, now).hits) for now, keys in enumerate(sets))


layer_sets = st.lists(st.lists(st.integers(0, N_KEYS - 1), min_size=1, max_size=3, unique=True), min_size=1, max_size=40)


# --- the conformance suite ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pool_invariants(name: str, data: st.DataObject) -> None:
    """Accesses, prefetches, pins and evictions in any order: the books balance and nothing protected ever leaves."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=N_KEYS, max_size=N_KEYS))
    capacity = data.draw(st.integers(4, 14))
    sets = data.draw(layer_sets)
    pool = pool_for(name, capacity, sets, sizes)
    if not pool.policy.admits:
        pool.preload(hottest(np.bincount([k for s in sets for k in s], minlength=N_KEYS)[:, None], sizes, capacity, per_layer=False))
    pins: dict[int, int] = {}
    for now, keys in enumerate(sets):
        waves = pool.split_waves(keys)
        assert [key for wave in waves for key in wave] == sorted(keys)
        for wave in waves:
            before = set(pool.resident)
            got = pool.access(wave, now)
            assert got.hits == sorted(set(wave) & before)
            assert sorted(got.hits + got.misses + got.transient) == wave
            assert not set(got.evicted) & set(wave), "a member of an atomic set evicted another"
            assert not set(got.evicted) & set(pins), "a pinned expert left"
            assert len(set(got.evicted)) == len(got.evicted) and set(got.evicted) <= before
            assert set(pool.resident) == before - set(got.evicted) | set(got.misses)
            if not pins and pool.policy.admits:
                assert not got.transient
            check_books(pool, sizes, pins)
        action = data.draw(st.sampled_from(["prefetch", "pin", "unpin", "evict", "none"]))
        if action == "prefetch":
            key = data.draw(st.integers(0, N_KEYS - 1))
            before = set(pool.resident)
            left = pool.prefetch(key, now, protect=keys)
            if left is None:
                assert set(pool.resident) == before and key not in before
            else:
                assert not set(left) & (set(pins) | set(keys)) and key in pool
                assert set(pool.resident) == before - set(left) | {key}
        elif action == "pin" and pool.resident:
            key = data.draw(st.sampled_from(sorted(pool.resident)))
            pool.pin(key)
            pins[key] = pins.get(key, 0) + 1
        elif action == "unpin" and pins:
            key = data.draw(st.sampled_from(sorted(pins)))
            pool.unpin(key)
            pins[key] -= 1
            pins = {k: n for k, n in pins.items() if n}
        elif action == "evict" and set(pool.resident) - set(pins):
            key = data.draw(st.sampled_from(sorted(set(pool.resident) - set(pins))))
            pool.evict(key)
            assert key not in pool
        check_books(pool, sizes, pins)


def check_books(pool: ExpertPool, sizes: list[int], pins: dict[int, int]) -> None:
    assert pool.used_bytes == sum(sizes[key] for key in pool.resident) <= pool.capacity_bytes
    assert pool.pinned_bytes == sum(sizes[key] for key in pins)
    assert set(pins) <= set(pool.resident)


@pytest.mark.parametrize("name", DYNAMIC)
@given(sets=layer_sets, capacity=st.integers(3, N_KEYS))
def test_victims_leave_only_when_needed(name: str, sets: list[list[int]], capacity: int) -> None:
    pool = pool_for(name, capacity, sets)
    for now, keys in enumerate(sets):
        others = len(set(pool.resident) - set(keys))
        got = pool.access(keys, now)
        assert len(got.evicted) == max(0, others + len(keys) - capacity)
        assert set(keys) <= set(pool.resident)


@pytest.mark.parametrize("name", DYNAMIC)
@settings(max_examples=40)
@given(sets=layer_sets, capacity=st.integers(3, N_KEYS))
def test_the_order_within_a_set_is_of_no_account(name: str, sets: list[list[int]], capacity: int) -> None:
    assert evictions(name, capacity, sets) == evictions(name, capacity, [keys[::-1] for keys in sets])


@pytest.mark.parametrize("name", DYNAMIC)
def test_memory_of_a_policy_stays_flat(name: str) -> None:
    """History is kept per key at most, never per access."""
    pool = pool_for(name, 4, [[0]])
    for now in range(3000):
        pool.access([now % 8, (now * 3 + 1) % 8] if now % 8 != (now * 3 + 1) % 8 else [now % 8], now)
    held = [value for value in vars(pool.policy).values() if hasattr(value, "__len__")]
    assert max([len(value) for value in held], default=0) < 200
    assert sum(sys.getsizeof(value) for value in held) < 20_000


@pytest.mark.parametrize("name", DYNAMIC)
def test_prefetch_is_dropped_when_all_is_pinned(name: str) -> None:
    pool = pool_for(name, 2, [[0, 1]])
    pool.access([0, 1], 0)
    pool.pin(0)
    pool.pin(1)
    assert pool.prefetch(2, 0) is None
    assert set(pool.resident) == {0, 1}
    pool.unpin(0)
    assert pool.prefetch(2, 0, protect=[0]) is None
    assert pool.prefetch(2, 0) == [0]
    assert pool.prefetch(2, 0) == [], "already there"


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_dropped_prefetch_of_a_large_expert_evicts_nothing(name: str) -> None:
    pool = pool_for(name, 3, [[0], [1], [2]], [1, 1, 1, 3, 1, 1, 1, 1])
    for key in range(3):
        pool.access([key], key)
    pool.pin(1)
    assert pool.prefetch(3, 3) is None
    assert set(pool.resident) == {0, 1, 2}


@pytest.mark.parametrize("name", DYNAMIC)
def test_pins_that_leave_no_room_make_the_miss_transient(name: str) -> None:
    pool = pool_for(name, 2, [[0, 1], [2]])
    pool.access([0, 1], 0)
    pool.pin(0)
    pool.pin(1)
    assert pool.split_waves([2, 3]) == [[2], [3]]
    got = pool.access([2], 1)
    assert (got.hits, got.misses, got.evicted, got.transient) == ([], [], [], [2])
    assert set(pool.resident) == {0, 1}


@pytest.mark.parametrize("name", DYNAMIC)
def test_expert_or_set_larger_than_the_pool_is_refused_with_both_numbers(name: str) -> None:
    pool = pool_for(name, 5, [[0]], [7, 2, 2, 2, 1, 1, 1, 1])
    with pytest.raises(InputError, match=r"vram.experts: expert key 0: expected at most 5 bytes.* got 7 bytes"):
        pool.access([0], 0)
    with pytest.raises(InputError, match=r"at most 5 bytes.* got 6 bytes; split it with split_waves"):
        pool.access([1, 2, 3], 0)
    with pytest.raises(InputError, match="got 7 bytes"):
        pool.prefetch(0, 0)
    assert pool.resident == {} and pool.used_bytes == 0


@pytest.mark.parametrize("name", EVERY)
def test_wrong_use_is_refused(name: str) -> None:
    pool = pool_for(name, 3, [[0]])
    pool.preload([4])
    with pytest.raises(InputError, match="each expert once"):
        pool.access([1, 1], 0)
    with pytest.raises(InputError, match="each expert once"):
        pool.preload([4])
    with pytest.raises(InputError, match="at most 3 bytes, got 4 bytes in 4 experts"):
        pool.preload([1, 2, 3])
    with pytest.raises(InputError, match="key 5, which is not resident"):
        pool.pin(5)
    with pytest.raises(InputError, match="key 4, which has no pin"):
        pool.unpin(4)
    pool.pin(4)
    pool.pin(4)
    pool.unpin(4)
    with pytest.raises(InputError, match="key 4, which is pinned"):
        pool.evict(4)
    with pytest.raises(InputError, match="at least 0"):
        ExpertPool(-1, [1], make_policy("lru"))


def test_names() -> None:
    with pytest.raises(InputError, match='did you mean "belady"'):
        make_policy("beladi")
    with pytest.raises(InputError, match="future"):
        make_policy("belady")


# --- hand-computed examples -----------------------------------------------------------------------------------------------------


def test_lru_by_hand() -> None:
    pool = pool_for("lru", 4, [])
    first = pool.access([3, 0], 0)
    assert (first.hits, first.misses, first.evicted) == ([], [0, 3], [])
    pool.access([5, 1], 1)  # order, oldest first: 0 3 1 5
    third = pool.access([2, 0], 2)  # 0 hits; 3 is the oldest outside the set
    assert (third.hits, third.misses, third.evicted) == ([0], [2], [3])
    fourth = pool.access([4, 6], 3)  # order was 1 5 0 2
    assert (fourth.hits, fourth.misses, fourth.evicted) == ([], [4, 6], [1, 5])
    assert set(pool.resident) == {0, 2, 4, 6}


def test_lru_member_at_the_old_end_is_spared() -> None:
    pool = pool_for("lru", 2, [])
    pool.access([0], 0)
    pool.access([1], 1)
    assert pool.access([0, 2], 2).evicted == [1]


def test_lfu_counts_survive_eviction_and_prefetch_is_no_use() -> None:
    pool = pool_for("lfu", 2, [])
    for now, key in enumerate([0, 0, 1, 2]):
        got = pool.access([key], now)
    assert got.evicted == [1], "1 use against 2"
    assert pool.access([1], 4).evicted == [2], "one use each, but 1 has its second now"
    assert pool.prefetch(3, 5) == [0], "two uses each: the older last use leaves"
    assert pool.prefetch(4, 6) == [3], "a prefetched expert has no use yet"


def test_lfu_ties_go_to_the_smaller_key() -> None:
    pool = pool_for("lfu", 3, [])
    pool.access([2, 5, 1], 0)
    assert pool.access([7], 1).evicted == [1]


def test_belady_by_hand() -> None:
    sets = [[0], [1], [2], [0], [1], [3], [0]]
    pool = pool_for("belady", 2, sets)
    evicted = [pool.access(keys, now).evicted for now, keys in enumerate(sets)]
    # at 2 (2 is never used again, but there is no bypass): 0 next at 3, 1 next at 4, so 1 leaves
    assert evicted == [[], [], [1], [], [2], [1], []]


def test_static_misses_are_transient_and_nothing_changes() -> None:
    pool = pool_for("static", 2, [])
    pool.preload([1, 2])
    got = pool.access([0, 1, 3], 0)
    assert (got.hits, got.misses, got.evicted, got.transient) == ([1], [], [], [0, 3])
    assert set(pool.resident) == {1, 2}
    assert pool.prefetch(5, 0) is None
    assert pool.split_waves([7, 3, 5]) == [[3, 5, 7]]


def test_waves() -> None:
    pool = pool_for("lru", 6, [], [1, 2, 3, 4, 1, 1, 1, 1])
    assert pool.split_waves([3, 2, 1, 0]) == [[0, 1, 2], [3]]
    assert pool.split_waves([]) == []
    pool.preload([2])
    pool.pin(2)  # 3 bytes are left, and 2 needs none
    assert pool.split_waves([0, 1, 2, 4]) == [[0, 1, 2], [4]]
    first, second = ([0, 1, 2], [4, 5, 6])
    pool.access(first, 0)
    assert pool.access(second, 0).evicted == [0, 1], "a later wave may evict an earlier one, never what is pinned"


def test_unequal_sizes_evict_as_many_as_needed() -> None:
    pool = pool_for("lru", 6, [], [1, 2, 3, 5, 1, 1, 1, 1])
    for now, key in enumerate([0, 1, 2]):
        pool.access([key], now)
    assert pool.access([3], 3).evicted == [0, 1, 2]
    assert pool.used_bytes == 5
    assert pool.access([4], 4).evicted == []


def test_preload_keeps_the_first_key_longest() -> None:
    pool = pool_for("lru", 3, [])
    pool.preload([5, 3, 1])
    assert pool.access([0], 0).evicted == [1]
    assert pool.access([2], 1).evicted == [3]


def evictions(name: str, capacity: int, sets: list[list[int]], sizes: list[int] | None = None) -> list[list[int]]:
    pool = pool_for(name, capacity, sets, sizes)
    return [pool.access(keys, now).evicted for now, keys in enumerate(sets)]


def test_aging_lfu_lets_a_past_favourite_go() -> None:
    sets = [[0]] * 3 + [[1], [2], [3], [4], [5]]
    # Values with 2 slots: 0 has 3; 1 enters with 1; 2 makes 1 leave (L = 1) and has 2; 3: 2 leaves (L = 2), has 3;
    # 4: 0 and 3 both have 3, 0 is older and leaves (L = 3). Plain LFU never lets 0 go.
    assert evictions("lfu-aging", 2, sets) == [[], [], [], [], [1], [2], [0], [3]]
    assert evictions("lfu", 2, sets) == [[], [], [], [], [1], [2], [3], [4]]


def test_aging_lfu_ages_by_the_least_value_whoever_leaves() -> None:
    pool = pool_for("lfu-aging", 3, [])
    for now, key in enumerate([0, 0, 0, 0, 1, 2]):
        pool.access([key], now)
    pool.evict(0)  # worth 4; the least of those present is 1, so newcomers start at 1
    pool.access([3], 6)
    assert pool.access([4], 7).evicted == [1], "1 and 2 have 1, 3 has 1 + 1"
    assert pool.access([5], 8).evicted == [2]


def test_lru_2_by_hand() -> None:
    # Times of the last two uses at the end: 0: (0, 1), 1: (2, 5), 2: (-, 3), 3: (-, 4)
    pool = pool_for("lru-k", 4, [])
    for now, key in enumerate([0, 0, 1, 2, 3, 1]):
        pool.access([key], now)
    assert pool.access([4], 6).evicted == [2], "of those with one use, the older"
    assert pool.access([2], 7).evicted == [3], "2 is back with the uses 3 and 7: history survives"
    assert pool.access([5], 8).evicted == [4], "one use"
    assert pool.access([6], 9).evicted == [5]
    pool.access([6], 10)  # now 0: (0, 1), 1: (2, 5), 2: (3, 7), 6: (9, 10)
    assert pool.access([7], 11).evicted == [0]


def test_lru_2_prefetch_is_no_use() -> None:
    pool = pool_for("lru-k", 2, [])
    pool.access([0], 0)
    pool.access([0], 1)
    pool.prefetch(1, 2)
    pool.access([1], 3)
    assert pool.access([2], 4).evicted == [1], "1 was used once, 0 twice"


def test_arc_resists_a_scan_and_follows_its_ghosts() -> None:
    # 0 and 1 are used twice (T2); a scan of 2 to 5 then passes through T1 alone: target 0, so |T1| > 0 is the victim list.
    scan = [[0], [1], [0], [1], [2], [3], [4], [5]]
    assert evictions("arc", 3, scan) == [[], [], [], [], [], [2], [3], [4]]
    assert evictions("lru", 3, scan) == [[], [], [], [], [], [0], [1], [2]]
    pool = pool_for("arc", 3, [])
    for now, keys in enumerate([*scan, [4]]):
        pool.access(keys, now)
    policy = pool.policy
    assert isinstance(policy, ARC)
    # |T1| + |B1| <= 3: T1 held 5, so B1 kept 3 and 4 of the three that left; 5 left for 4, which returned from B1: target + 1, into T2.
    assert policy._target == 1.0
    assert set(pool.resident) == {0, 1, 4} and list(policy._again) == [0, 1, 4]
    assert pool.access([6], 9).evicted == [0], "T1 is empty, not above its target of 1: the oldest of T2"
    assert pool.access([0], 10).evicted == [1], "|T1| = 1 is not above 1"
    assert policy._target == 0.0, "0 returned from B2: max(0, 1 - |B1| / |B2|)"


@settings(max_examples=60)
@given(sets=layer_sets, capacity=st.integers(3, N_KEYS))
def test_arc_ghosts_are_bounded(sets: list[list[int]], capacity: int) -> None:
    pool = pool_for("arc", capacity, sets)
    policy = pool.policy
    assert isinstance(policy, ARC)
    for now, keys in enumerate(sets):
        pool.access(keys, now)
        left_once, left_again = policy._ghosts
        assert set(policy._once) | set(policy._again) == set(pool.resident)
        assert not (set(left_once) | set(left_again)) & set(pool.resident) and not set(left_once) & set(left_again)
        assert len(policy._once) + len(left_once) <= capacity
        assert len(pool.resident) + len(left_once) + len(left_again) <= 2 * capacity
        assert 0 <= policy._target <= capacity


def test_arc_counts_a_prefetched_key_once_when_it_is_used() -> None:
    pool = pool_for("arc", 3, [])
    pool.prefetch(0, 0)
    pool.access([0], 0)
    policy = pool.policy
    assert isinstance(policy, ARC)
    assert list(policy._once) == [0]
    pool.access([0], 1)
    assert list(policy._again) == [0]


def test_least_stale_keeps_the_layers_that_come_next() -> None:
    """Four layers of one expert each, three slots: a cycle on which LRU never hits."""
    sets = [[t % 4] for t in range(24)]
    assert hits("lru", 3, sets) == 0
    pool = pool_for("least-stale", 3, sets)
    found = [pool.access(keys, now).hits for now, keys in enumerate(sets)]
    # Pass 0 and 1: the length of a pass is not known before 0 is back at 4, so 3 made 0 leave, and 0 makes 1 leave.
    # Then the pass is 4 long. At 5 (layer 1): 2 and 3 are stale, 0 is of this pass; 3's turn is farther than 2's: 3 leaves.
    assert [pool_key for keys in found[:8] for pool_key in keys] == [2]
    assert isinstance(pool.policy, LeastStale) and pool.policy._pass == 4
    assert sum(len(keys) for keys in found[8:]) == 8, "half of the four passes that are left"
    assert hits("belady", 3, sets) == 14, "the bound, over all six passes"


def test_least_stale_by_hand() -> None:
    # Two layers: keys 0 to 3 in layer 0 (even times), 4 to 7 in layer 1 (odd times).
    pool = pool_for("least-stale", 4, [])
    for now, key in enumerate([0, 4, 0, 5, 1]):  # 0 again at 2: a pass is 2 long
        pool.access([key], now)
    # At 5, layer 1 of pass 2: 4 (pass 0), 5 and 0 (pass 1) are stale, 1 is not. Layer 1 has its turn now, its next is a pass away.
    assert pool.access([6], 5).evicted == [4], "stale, of the present layer, the older"
    # At 6, layer 0 of pass 3: all are stale. The present layer first: 0 (pass 1) before 1 (pass 2).
    assert pool.access([2], 6).evicted == [0]
    assert pool.prefetch(3, 8, protect=[1]) == [5], "1 is protected; of layer 1 the older use leaves, before 2 of this very pass"


@settings(max_examples=60)
@given(sets=layer_sets, capacity=st.integers(3, N_KEYS))
def test_least_stale_in_one_layer_is_lru(sets: list[list[int]], capacity: int) -> None:
    spread = [(now * 5, keys) for now, keys in enumerate([[0], [0], *sets])]  # 0 at once again: a pass is 5 long

    def evicted(name: str) -> list[list[int]]:
        pool = pool_for(name, capacity, sets)
        return [pool.access(keys, now).evicted for now, keys in spread]

    assert evicted("least-stale") == evicted("lru")


@settings(max_examples=60)
@given(sets=layer_sets, capacity=st.integers(3, N_KEYS))
def test_cost_aware_with_equal_sizes_is_lru(sets: list[list[int]], capacity: int) -> None:
    size = 10**6
    assert evictions("cost-aware", capacity * size, sets, [size] * N_KEYS) == evictions("lru", capacity, sets)


def test_cost_aware_keeps_small_experts_longer() -> None:
    # value = 1 + 150 kB / size + L. 0 is small (1 + 1), 1 and 2 are ten times as large (1 + 0.1): 1 leaves, though 0 is older, L = 1.1.
    sizes = [150_000, 1_500_000, 1_500_000, 1_500_000, 1_500_000, 1, 1, 1]
    sets = [[0], [1], [2], [3], [4]]
    # 3: 2 has 1.1 + 0 and leaves, before 0 with 2 (L = 1.1); 3 has 2.2, 4 makes 0 (2.0) leave, and needs more room: 3.
    assert evictions("cost-aware", 3_200_000, sets, sizes) == [[], [], [], [1], [2]]
    assert evictions("lru", 3_200_000, sets, sizes) == [[], [], [], [0, 1], [2]]


@pytest.mark.parametrize("name", ["lfu", "lfu-aging", "cost-aware", "lru-k", "belady"])
def test_heap_stays_small(name: str) -> None:
    pool = pool_for(name, 4, [])
    for now in range(5000):
        pool.access([now % 4], now)
    assert len(pool.policy._heap) < 200  # type: ignore[attr-defined]


# --- the bound ------------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(sets=layer_sets, capacity=st.integers(3, N_KEYS))
def test_belady_is_not_beaten_by_demand_policies(sets: list[list[int]], capacity: int) -> None:
    best = hits("belady", capacity, sets)
    assert best >= max(hits(name, capacity, sets) for name in DYNAMIC)


@settings(max_examples=40, deadline=None)
@given(sets=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True), min_size=1, max_size=9), capacity=st.integers(2, 3))
def test_belady_is_optimal(sets: list[list[int]], capacity: int) -> None:
    """Against every choice of victims."""
    states = {frozenset[int](): 0}
    for keys in sets:
        following: dict[frozenset[int], int] = {}
        for cache, score in states.items():
            score += len(cache & set(keys))
            others = cache - set(keys)
            keep = min(len(others), capacity - len(keys))
            for kept in combinations(sorted(others), keep):
                state = frozenset(kept) | set(keys)
                following[state] = max(score, following.get(state, 0))
        states = following
    assert hits("belady", capacity, sets) == max(states.values())


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_policy_lies_between_nothing_and_belady_on_a_real_trace(scope: str) -> None:
    trace = load_trace(ROOT / "traces/tinymoe/tinymoe.npz").slice_rows(0, 400)
    keys = trace.expert_ids.astype(int) + [[layer * trace.n_experts] for layer in range(trace.n_layers)]
    caches = [[layer] for layer in range(trace.n_layers)] if scope == "layer" else [list(range(trace.n_layers))]
    slots = 4 if scope == "layer" else 12  # of 16 a layer; of 128, where a row needs 16
    rate: dict[str, int] = {}
    for name in DYNAMIC:
        rate[name] = 0
        for layers in caches:
            sets = [(t * trace.n_layers + m, keys[t, m].tolist()) for t in range(trace.n_rows) for m in layers]
            policy = make_policy(name, future_uses(sets) if name == "belady" else None)
            pool = ExpertPool(slots, lambda _key: 1, policy)
            rate[name] += sum(len(pool.access(members, now).hits) for now, members in sets)
    assert max(rate, key=lambda name: rate[name]) == "belady"
    assert rate["cost-aware"] == rate["lru"]
    if scope == "layer":
        assert rate["least-stale"] == rate["lru"]
        assert min(rate.values()) > 0.25 * keys.size, "4 of 16 slots hit at random a quarter of the time"
    else:
        assert rate["lru"] < 0.02 * keys.size < 0.1 * keys.size < rate["least-stale"], "below one token's working set recency is no use"


def test_belady_sees_a_prefetched_key_as_wanted_now() -> None:
    pool = ExpertPool(2, [1] * N_KEYS, make_policy("belady", {0: [5], 1: [9], 2: [7]}))
    pool.prefetch(0, 5)
    pool.prefetch(1, 5)
    assert pool.prefetch(2, 5) == [1]


# --- static sets ----------------------------------------------------------------------------------------------------------------


def test_hottest_is_greedy_by_benefit_per_byte() -> None:
    counts = np.array([[6, 1, 0], [8, 9, 2]])
    assert hottest(counts, [2, 3], 8, per_layer=False) == [0, 4, 3]  # 3.0, 3.0 (tie: smaller key), 2.67
    assert hottest(counts, [2, 3], 6, per_layer=False) == [0, 4]
    assert hottest(counts, [2, 3], 7, per_layer=False) == [0, 4, 1], "3 no longer fits, 1 does"
    assert hottest(counts, [1, 1], 2, per_layer=True) == [0, 1, 4, 3]
    assert hottest(counts, [1, 1], 0, per_layer=True) == []


def test_hottest_refuses_nonsense() -> None:
    with pytest.raises(InputError, match=r"counts \(L, E\)"):
        hottest(np.zeros(3), [1], 1, per_layer=True)
    with pytest.raises(InputError, match="positive sizes"):
        hottest(np.zeros((1, 3)), [0], 1, per_layer=True)
