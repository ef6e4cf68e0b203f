"""Conformance suite that every predictor runs, and predictions computed by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import InputError
from moesim.generate import from_popularity, uniform
from moesim.policies import learned
from moesim.policies.learned import Linear, TwoStep
from moesim.policies.predictors import GATE_RECALL, GateLookahead, Predictor, previous_rows, source_cells
from moesim.policies.prefetch import PREDICTORS, make_predictor, source_of
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


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), distance=st.integers(1, 3), threshold=st.floats(0.01, 1.0))
def test_a_threshold_only_leaves_out(name: str, seed: int, distance: int, threshold: float) -> None:
    """What is left stands first and in the same order; a higher threshold leaves no more."""
    train, test = random_trace(seed, 3, 6, 3, n_rows=40).split(0.5)

    def predict(least: float) -> np.ndarray:
        predictor = make_predictor(name, threshold=least)
        predictor.fit(train)
        return predictor.predict(test, distance)

    full, some, fewer = predict(0.0), predict(threshold), predict(min(1.0, 1.5 * threshold))
    assert some.dtype == np.int16 and some.shape == full.shape
    assert (np.diff((some < 0).astype(int), axis=2) >= 0).all(), "the absent stand last"
    for cell_full, cell_some, cell_fewer in zip(full.reshape(-1, 3), some.reshape(-1, 3), fewer.reshape(-1, 3), strict=True):
        kept = [e for e in cell_some.tolist() if e >= 0]
        assert kept == [e for e in cell_full.tolist() if e in set(kept)]
        assert set(cell_fewer.tolist()) - {-1} <= set(kept)


def test_options_are_checked() -> None:
    with pytest.raises(InputError, match="options among threshold, got recall"):
        make_predictor("popularity", recall=0.5)
    with pytest.raises(InputError, match='did you mean "recall"'):
        make_predictor("gate-lookahead", recal=0.5)
    for bad in ({"threshold": -0.1}, {"threshold": float("nan")}, {"recall": 1.5}, {"loss": -1}):
        with pytest.raises(InputError, match="from 0 to 1"):
            make_predictor("gate-lookahead", **bad)
    with pytest.raises(InputError, match="above 0"):
        make_predictor("linear", ridge=0.0)


@pytest.mark.parametrize("name", ["popularity", "cooccurrence", "linear", "two-step", "gate-lookahead"])
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
        "linear": "both",
        "two-step": "both",
        "gate-lookahead": "router",
    }
    with pytest.raises(InputError, match='did you mean "linear"'):
        source_of("linea")
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


# --- the gate, as stated --------------------------------------------------------------------------------------------------------


def recall(predictor: Predictor, test: RoutingTrace, distance: int) -> float:
    """Of the cells that have a source."""
    cells = (source_cells(test, distance)[:, :, 0] >= 0) & test.present
    predicted = predictor.predict(test, distance)[cells]
    return float((predicted[:, :, None] == test.expert_ids[cells][:, None, :]).sum() / predicted.size)


@pytest.mark.parametrize("model", sorted(GATE_RECALL))
@pytest.mark.parametrize("distance", [1, 2, 4])
def test_gate_lookahead_keeps_its_stated_recall(model: str, distance: int) -> None:
    rng = np.random.default_rng(5)
    trace = from_popularity(rng.gamma(1.0, size=(6, 32)), 4, 2000, rng, n_sequences=4)
    predictor = GateLookahead(recall=GATE_RECALL[model])
    predictor.fit(trace)
    stated = GATE_RECALL[model] - 0.0375 * (distance - 1)
    assert predictor.recall_at(distance) == pytest.approx(stated)
    # 48,000 draws: one standard deviation is at most 0.0023
    assert recall(predictor, trace, distance) == pytest.approx(stated, abs=0.009)


def test_gate_lookahead_replaces_by_popularity_in_place() -> None:
    """Expert 0 is chosen always, 1 to 7 otherwise; of the outsiders 7 was seen 50 times as often as 2 to 6."""
    train = build([[[0, 7]]] * 100 + [[[0, e]] for e in (1, 2, 3, 4, 5, 6)] * 2, [0] * 112, 8)
    test = build([[[0, 1]]] * 4000, [0] * 4000, 8)
    predictor = make_predictor("gate-lookahead", recall=0.5, seed=1)
    predictor.fit(train)
    got = predictor.predict(test, 1)[1:, 0]  # the first row has no source
    assert (got[:, 0] != 1).all() and (got[:, 1] != 0).all(), "a member is never drawn, and stays in its slot"
    assert (got[:, 0] == 0).mean() == pytest.approx(0.5, abs=0.03) == pytest.approx((got[:, 1] == 1).mean(), abs=0.03)
    drawn = got[:, 0][got[:, 0] != 0]
    # First draw of one or two: 7 weighs 101 of 116, the others 3 each.
    assert (drawn == 7).mean() == pytest.approx(101 / 116, abs=0.03)
    assert not (got[:, 0] == got[:, 1]).any(), "without repeats"


def test_gate_lookahead_is_a_function_of_its_seed() -> None:
    train, test = random_trace(2, 3, 6, 2, n_rows=80).split(0.5)

    def predict(seed: int) -> np.ndarray:
        predictor = make_predictor("gate-lookahead", recall=0.5, seed=seed)
        predictor.fit(train)
        return predictor.predict(test, 1)

    assert (predict(3) == predict(3)).all() and (predict(3) != predict(4)).any()


def test_gate_lookahead_bounds() -> None:
    trace = random_trace(4, 3, 6, 2, n_rows=60)
    perfect, blind, far = GateLookahead(recall=1.0, loss=0.0), GateLookahead(recall=0.0), GateLookahead(threshold=0.85)
    for predictor in (perfect, blind, far):
        predictor.fit(trace)
    assert recall(perfect, trace, 3) == 1.0 and recall(blind, trace, 1) == 0.0
    assert blind.recall_at(3) == 0.0, "never below 0"
    assert (far.predict(trace, 1) >= 0).any() and (far.predict(trace, 3) < 0).all(), "0.886 - 0.075 is below the threshold"
    crowded = random_trace(4, 2, 3, 2, n_rows=60)  # one outsider: of two wrong members one stays
    blind.fit(crowded)
    assert recall(blind, crowded, 1) == 0.5


# --- learned --------------------------------------------------------------------------------------------------------------------


def cell_of(trace: RoutingTrace, t: int, m: int, distance: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source set and previous token's set of a cell, by their definitions."""
    old = t - 1 if t and trace.seq_id[t] == trace.seq_id[t - 1] else None
    before = trace.sets(old, m) if old is not None else ()
    if m >= distance:
        return trace.sets(t, m - distance), before
    return (trace.sets(old, m - distance + trace.n_layers) if old is not None else ()), before


@pytest.mark.parametrize("distance", [1, 2])
def test_linear_is_the_ridge_regression_that_it_says(distance: int) -> None:
    n_experts, ridge = 6, 2.0
    train, test = random_trace(11, 3, n_experts, 2, n_rows=80).split(0.5)
    predictor = Linear(ridge=ridge)
    predictor.fit(train)
    got = predictor.predict(test, distance)

    def features(source: tuple[int, ...], before: tuple[int, ...]) -> list[float]:
        return [*(e in source for e in range(n_experts)), *(e in before for e in range(n_experts)), not before, 1.0]

    for m in range(3):
        cells = [(t, *cell_of(train, t, m, distance)) for t in range(train.n_rows)]
        cells = [cell for cell in cells if cell[1] and train.sets(cell[0], m)]
        x = np.array([features(*cell[1:]) for cell in cells], dtype=float)
        y = np.array([[e in train.sets(cell[0], m) for e in range(n_experts)] for cell in cells], dtype=float)
        stacked = np.vstack([x, np.sqrt(ridge) * np.eye(x.shape[1])])  # the penalty as more rows: another road to the same weights
        weights = np.linalg.lstsq(stacked, np.vstack([y, np.zeros((x.shape[1], n_experts))]), rcond=None)[0]
        for t in range(test.n_rows):
            source, before = cell_of(test, t, m, distance)
            if not source:
                assert got[t, m].tolist() == [-1, -1]
                continue
            score = np.array(features(source, before)) @ weights
            chosen = got[t, m].tolist()
            assert score[chosen[0]] >= score[chosen[1]] - 1e-4
            assert all(score[chosen[1]] >= score[e] - 1e-4 for e in range(n_experts) if e not in chosen), (t, m)


def routed_by_both(n_rows: int) -> RoutingTrace:
    """Layer 1 chooses the source's expert plus 5 where the previous token's was even, else the previous token's own."""
    rng = np.random.default_rng(8)
    ids = rng.integers(0, 5, size=(n_rows, 2, 1))
    ids[:, 1] += 5
    for t in range(1, n_rows):
        ids[t, 1, 0] = ids[t - 1, 1, 0] if rng.random() < 0.5 else ids[t, 0, 0] + 5
    return build(ids, [t // 40 for t in range(n_rows)], 10)


@pytest.mark.parametrize("name", ["linear", "two-step"])
def test_learned_predictors_use_both_cells(name: str) -> None:
    train, test = routed_by_both(2000).split(0.5)
    share = {}
    for other in ("previous", "cooccurrence", name):
        predictor = make_predictor(other)
        predictor.fit(train)
        got = predictor.predict(test, 1)[:, 1, 0]
        share[other] = float((got == test.expert_ids[:, 1, 0])[previous_rows(test, test.expert_ids)[:, 1, 0] >= 0].mean())
    assert share[name] >= max(share.values()) - 0.02, "not below the better of its parts"
    sure = make_predictor(name, threshold=0.75)
    sure.fit(train)
    got = sure.predict(test, 1)[:, 1, 0]
    assert 0.05 < (got >= 0).mean() < 0.5, "sure only where both cells say the same"
    assert (got == test.expert_ids[:, 1, 0])[got >= 0].mean() > 0.95


def test_two_step_weights_by_hand() -> None:
    """The previous token decides alone: its weight is 1; the two others, constant here, cancel out."""
    rng = np.random.default_rng(3)
    ids = np.zeros((8000, 2, 1), dtype=np.int64)
    ids[:, 0, 0] = rng.integers(0, 4, size=8000)
    ids[:, 1, 0] = np.repeat(rng.integers(0, 4, size=800), 10)
    trace = build(ids, [t // 10 for t in range(8000)], 4)
    predictor = TwoStep()
    predictor.fit(trace)
    got = predictor.predict(trace, 1)
    constant, met, popular, stays, _ = predictor._learned[1][0][1]
    assert stays == pytest.approx(1, abs=0.01) and constant + (met + popular) / 4 == pytest.approx(0, abs=0.01)
    follows = previous_rows(trace, trace.expert_ids)[:, 1, 0] >= 0
    assert (got == trace.expert_ids)[follows, 1].all()


@pytest.mark.parametrize("name", ["previous", "popularity", "cooccurrence"])
def test_confidence_is_the_share_that_came_true_in_training(name: str) -> None:
    trace = build([[[0]], [[0]], [[0]], [[1]], [[1]], [[2]]], [0] * 6, 3)  # stays 3 of 5 times; 0 is chosen in 3 of 6 cells
    for threshold, there in ((0.5, True), (0.75, False)):
        predictor = make_predictor(name, threshold=threshold)
        predictor.fit(trace)
        got = predictor.predict(trace, 1)[:, 0, 0].tolist()
        # previous: 0.6 wherever there is one. popularity: 0, with 0.5. cooccurrence: after 0 0 in 2 of 3, after 1 a tie of 1/2, 2 never led on.
        want = {"previous": [-1, 0, 0, 0, 1, 1], "popularity": [0] * 6, "cooccurrence": [-1, 0, 0, 0, 1, 1]}[name]
        assert got == (want if there else [-1] * 6)


@pytest.mark.parametrize("name", ["cooccurrence", "linear", "two-step", "gate-lookahead"])
def test_forty_thousand_rows_take_seconds(name: str) -> None:
    rng = np.random.default_rng(1)
    trace = from_popularity(rng.gamma(1.0, size=(24, 32)), 4, 40_000, rng, n_sequences=150)
    begin = time.process_time()  # of this process alone: other tests run beside it
    predictor = make_predictor(name)
    predictor.fit(trace)
    predictor.predict(trace, 2)
    assert time.process_time() - begin < 20.0  # 1 to 3 s on one core of a small machine


@pytest.mark.parametrize("name", ["cooccurrence", "linear"])
@pytest.mark.parametrize("distance", [1, 2])
def test_compiled_loops_give_equal_predictions(name: str, distance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties are frequent here: few rows, and counts of popularity that coincide."""
    train, test = random_trace(5, 3, 9, 3, n_rows=60).split(0.4)
    plain, compiled = make_predictor(name), make_predictor(name)
    for predictor, many in ((plain, learned.MANY), (compiled, 0)):
        monkeypatch.setattr(learned, "MANY", many)
        predictor.fit(train)
        ranked = predictor._rank(test, distance)  # type: ignore[attr-defined]
        if predictor is plain:
            expected = ranked
    for got, want in zip(ranked, expected, strict=True):
        np.testing.assert_array_equal(got, want)
