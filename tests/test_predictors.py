"""Conformance suite that every predictor runs, and predictions computed by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import InputError
from moesim.generate import from_popularity, uniform
from moesim.policies.prefetch import PREDICTORS, make_predictor, source_cells, source_of
from moesim.trace import RoutingTrace

EVERY = sorted(PREDICTORS)


def build(ids: object, seq: list[int], n_experts: int) -> RoutingTrace:
    array = np.array(ids, dtype=np.int16)
    position = np.arange(len(seq), dtype=np.int32)
    return RoutingTrace(array, None, np.array(seq, dtype=np.int32), position, np.ones(len(seq), np.uint8), {"n_experts": n_experts})


def random_trace(seed: int, n_layers: int, n_experts: int, top_k: int, n_rows: int = 24) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    trace = uniform(n_rows, n_layers, n_experts, top_k, rng, n_sequences=3)
    ids = trace.expert_ids.copy()
    ids[rng.random(ids.shape[:2]) < 0.15] = -1
    return RoutingTrace(ids, None, trace.seq_id, trace.position, trace.phase, trace.meta)


# --- the conformance suite ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), n_layers=st.integers(1, 5), n_experts=st.integers(2, 6), distance=st.integers(1, 5), top_k=st.integers(1, 2)
)
def test_predictions_are_well_formed(name: str, seed: int, n_layers: int, n_experts: int, distance: int, top_k: int) -> None:
    trace = random_trace(seed, n_layers, n_experts, top_k)
    train, test = trace.split(0.4)
    predictor = make_predictor(name)
    assert predictor.name == name
    predictor.fit(train)
    if distance > n_layers:
        with pytest.raises(InputError, match="prefetch distance"):
            predictor.predict(test, distance)
        return
    got = predictor.predict(test, distance)
    assert got.dtype == np.int16 and got.shape == test.expert_ids.shape
    assert got.min() >= -1 and got.max() < n_experts
    ordered = np.sort(got, axis=2)
    assert not ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(), "an expert twice in one prediction"
    assert ((got >= 0).all(axis=2) | (got < 0).all(axis=2)).all(), "a prediction is whole or absent"
    assert (got == predictor.predict(test, distance)).all(), "predicting twice gives the same"
    # causality: nothing but the oracle looks at the target cell or behind it
    if name != "oracle":
        row = test.n_rows // 2
        later = test.expert_ids.copy()
        later[row:] = np.where(later[row:] >= 0, (later[row:] + 1) % n_experts, -1)
        changed = RoutingTrace(later, None, test.seq_id, test.position, test.phase, test.meta)
        assert (predictor.predict(changed, distance)[:row] == got[:row]).all()


@pytest.mark.parametrize("name", ["popularity", "cooccurrence"])
def test_untrained_and_misfit_predictors_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="call fit first"):
        make_predictor(name).predict(random_trace(0, 2, 4, 1), 1)
    predictor = make_predictor(name)
    predictor.fit(random_trace(0, 2, 4, 1))
    with pytest.raises(InputError, match="expected 2 layers of 4 experts, as trained, got 3 layers of 4"):
        predictor.predict(random_trace(0, 3, 4, 1), 1)


def test_names_and_sources() -> None:
    assert {name: source_of(name) for name in EVERY} == {
        "none": "none",
        "oracle": "none",
        "popularity": "none",
        "previous": "previous",
        "cooccurrence": "router",
    }
    with pytest.raises(InputError, match='did you mean "popularity"'):
        make_predictor("popularty")


# --- by hand --------------------------------------------------------------------------------------------------------------------


def test_source_cells_wrap_into_the_previous_row_of_the_sequence() -> None:
    trace = build([[[0], [1], [2]], [[3], [-1], [5]], [[6], [7], [8]]], [0, 0, 1], 9)
    assert source_cells(trace, 1)[:, :, 0].tolist() == [[-1, 0, 1], [2, 3, -1], [-1, 6, 7]]
    assert source_cells(trace, 2)[:, :, 0].tolist() == [[-1, -1, 0], [1, 2, 3], [-1, -1, 6]]
    assert source_cells(trace, 3)[:, :, 0].tolist() == [[-1, -1, -1], [0, 1, 2], [-1, -1, -1]]


def test_previous_token() -> None:
    trace = build([[[0, 1]], [[2, 3]], [[-1, -1]], [[1, 0]]], [0, 0, 0, 1], 4)
    assert make_predictor("previous").predict(trace, 1)[:, 0].tolist() == [[-1, -1], [0, 1], [2, 3], [-1, -1]]


def test_popularity_prefers_the_smaller_id_on_ties() -> None:
    predictor = make_predictor("popularity")
    predictor.fit(build([[[3, 1]], [[3, 2]], [[0, 3]]], [0, 0, 0], 5))
    assert predictor.predict(build([[[0, 1]], [[-1, -1]]], [0, 0], 5), 1)[:, 0].tolist() == [[3, 0], [3, 0]]


def test_oracle_and_none() -> None:
    trace = random_trace(3, 3, 5, 2)
    assert (make_predictor("oracle").predict(trace, 2) == trace.expert_ids).all()
    assert (make_predictor("none").predict(trace, 2) == -1).all()


def test_cooccurrence_by_hand() -> None:
    # layer 0 -> layer 1: 0 met 2 twice and 1 once; 1 met 1 once; expert 3 of layer 0 was never seen
    train = build([[[0], [2]], [[0], [2]], [[0], [1]], [[1], [1]]], [0, 1, 2, 3], 4)
    predictor = make_predictor("cooccurrence")
    predictor.fit(train)
    got = predictor.predict(build([[[0], [0]], [[1], [0]], [[3], [0]], [[-1], [0]]], [0, 1, 2, 3], 4), 1)
    assert got[:, 1, 0].tolist() == [2, 1, 1, -1], "unseen sources fall back to popularity: 1 and 2 tie, the smaller id"
    assert got[:, 0, 0].tolist() == [-1, -1, -1, -1], "no row before: nothing to go by"


def test_cooccurrence_learns_across_steps() -> None:
    """Layer 0 of a row repeats layer 1 of the row before, plus one: distance 1 wraps."""
    ids = [[[t % 5], [(3 * t) % 5]] for t in range(40)]
    for t in range(1, 40):
        ids[t][0][0] = (ids[t - 1][1][0] + 1) % 5
    trace = build(ids, [0] * 40, 5)
    train, test = trace.split(0.5)
    predictor = make_predictor("cooccurrence")
    predictor.fit(train)
    assert (predictor.predict(test, 1)[1:, 0] == test.expert_ids[1:, 0]).all()
    assert (predictor.predict(test, 1)[0, 0] == -1).all(), "the part starts here"


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_cooccurrence_equals_its_definition(distance: int) -> None:
    trace = random_trace(9, 3, 6, 2, n_rows=60)
    train, test = trace.split(0.5)
    predictor = make_predictor("cooccurrence")
    predictor.fit(train)
    got = predictor.predict(test, distance)

    def source(part: RoutingTrace, t: int, m: int) -> tuple[int, ...]:
        if m >= distance:
            return part.sets(t, m - distance)
        return part.sets(t - 1, m - distance + 3) if t and part.seq_id[t] == part.seq_id[t - 1] else ()

    for m in range(3):
        pairs = [(source(train, t, m), train.sets(t, m)) for t in range(train.n_rows)]
        pairs = [(a, b) for a, b in pairs if a and b]
        popular = [sum(x in train.sets(t, m) for t in range(train.n_rows)) for x in range(6)]
        for t in range(test.n_rows):
            start = source(test, t, m)
            if not start:
                assert got[t, m].tolist() == [-1, -1]
                continue
            score = [0.0] * 6
            for e in start:
                seen = sum(e in a for a, _ in pairs)
                for x in range(6):
                    score[x] += sum(e in a and x in b for a, b in pairs) / max(1, seen)
            want = sorted(range(6), key=lambda x: (-score[x], -popular[x], x))[:2]
            assert got[t, m].tolist() == want, (t, m)


def test_forty_thousand_rows_take_seconds() -> None:
    rng = np.random.default_rng(1)
    trace = from_popularity(rng.gamma(1.0, size=(24, 32)), 4, 40_000, rng, n_sequences=150)
    begin = time.perf_counter()
    predictor = make_predictor("cooccurrence")
    predictor.fit(trace)
    predictor.predict(trace, 2)
    assert time.perf_counter() - begin < 20.0  # about 2 s on one core of a small machine
