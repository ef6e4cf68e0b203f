"""The compiled replays of caches equal the pools that a simulation uses, hit for hit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.policies.cache import ExpertPool, future_uses, make_policy
from moesim.policies.kernels import BELADY, LFU, lru_replay, next_uses, ranked_replay, stack_depths


def sets_of(seed: int, n_rows: int, n_experts: int, top_k: int) -> np.ndarray:
    """Skewed random sets, ascending in each row, (R, K)."""
    rng = np.random.default_rng(seed)
    weight = rng.dirichlet(np.full(n_experts, 0.4)) + 1e-6
    return np.sort([rng.choice(n_experts, top_k, replace=False, p=weight / weight.sum()) for _ in range(n_rows)], axis=1).astype(np.int64)


def pool_hits(policy: str, cells: np.ndarray, slots: int, fresh: np.ndarray | None = None) -> int:
    future = future_uses(enumerate(cells.tolist())) if policy == "belady" else None
    pool = ExpertPool(slots, lambda key: 1, make_policy(policy, future))
    hits = 0
    for row, cell in enumerate(cells.tolist()):
        if fresh is not None and fresh[row]:
            pool = ExpertPool(slots, lambda key: 1, make_policy(policy, future))
        hits += len(pool.access(cell, row).hits)
    return hits


shapes = st.tuples(st.integers(0, 2**32), st.integers(1, 80), st.integers(2, 24), st.integers(1, 6), st.integers(0, 20))


@settings(max_examples=150, deadline=None)
@given(shapes)
def test_replays_equal_the_pools(shape: tuple[int, int, int, int, int]) -> None:
    seed, n_rows, n_experts, top_k, more = shape
    top_k = min(top_k, n_experts)
    slots = min(top_k + more, n_experts)
    cells = sets_of(seed, n_rows, n_experts, top_k)
    fresh = np.random.default_rng(seed).random(n_rows) < 0.1
    coming = next_uses(cells, n_experts)
    assert lru_replay(cells, np.zeros(n_rows, bool), n_experts, slots).sum() == pool_hits("lru", cells, slots)
    assert lru_replay(cells, fresh, n_experts, slots).sum() == pool_hits("lru", cells, slots, fresh)
    assert ranked_replay(LFU, cells, coming, n_experts, slots) == pool_hits("lfu", cells, slots)
    assert ranked_replay(BELADY, cells, coming, n_experts, slots) == pool_hits("belady", cells, slots)


@pytest.mark.parametrize("slots", [4, 5, 9, 16])
def test_stack_depths_give_every_capacity_at_once(slots: int) -> None:
    cells = sets_of(3, 400, 16, 4)
    assert np.cumsum(stack_depths(cells, 16))[slots - 1] == pool_hits("lru", cells, slots)
