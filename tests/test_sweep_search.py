"""Searches: as many points as asked for, the same by the same seed, the best of small spaces in few points."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_cases import write_sweep

from moesim import resources
from moesim.errors import InputError
from moesim.sweep import Sweep, plan_sweep, sweep
from moesim.sweep.record import value
from moesim.sweep.space import code_identity
from moesim.sweep.store import Store

pytest.importorskip("optuna", reason="needs the extra search")


def best_of(found: Sweep) -> float:
    key, sign = found.plan.objectives[0]
    assert found.best is not None
    return sign * (value(found.rows[found.best].record, key) or 0.0)


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_seed_gives_the_same_points(tmp_path: Path, sampler: str) -> None:
    plan = plan_sweep(write_sweep(tmp_path), limit=None)
    first = sweep(plan, workers=1, sampler=sampler, trials=12, seed=3)
    again = sweep(plan, workers=2, sampler=sampler, trials=12, seed=3)
    other = sweep(plan, workers=1, sampler=sampler, trials=12, seed=4)
    assert first.points == again.points and first.rows == again.rows
    assert len(set(first.points)) == 12 and first.points != other.points
    assert first.as_dict()["provenance"]["points"] == f"{sampler}, 12 trials, seed 3"


def test_a_search_of_the_whole_space_is_the_grid(tmp_path: Path) -> None:
    axes = "axes:\n  prefetch.predictor: [none, oracle]\n  prefetch.distance: {values: [1, 2], when: {prefetch.predictor: oracle}}\n"
    plan = plan_sweep(write_sweep(tmp_path, axes), limit=None)
    found = sweep(plan, workers=1, sampler="tpe", trials=50)
    assert {p.choice for p in found.points} == {(0, -1), (1, 0), (1, 1)}


def test_a_search_finds_what_is_in_the_store(tmp_path: Path) -> None:
    plan = plan_sweep(write_sweep(tmp_path), limit=None)
    counts: list[int] = []
    with Store(tmp_path / "s.sqlite", code_identity()) as store:
        for _ in range(2):
            sweep(plan, store, workers=1, sampler="tpe", trials=10, counted=lambda c: counts.append(c["computed"]))
    assert counts == [10, 0]


def test_constraints_hold_in_a_search(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, more="constraints: {max: {memory: 1 B}}\n")
    found = sweep(plan_sweep(path, limit=None), workers=1, sampler="tpe", trials=8)
    assert found.best is None and found.n_points == 8


@pytest.mark.parametrize(("sampler", "trials", "words"), [("tpe", 0, "at least 1"), ("random", 3, "tpe, nsga2")])
def test_bad_searches_are_refused(tmp_path: Path, sampler: str, trials: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        sweep(plan_sweep(write_sweep(tmp_path)), workers=1, sampler=sampler, trials=trials)


@pytest.mark.nightly
@pytest.mark.parametrize("name", resources.names("scenarios/sweeps"))
def test_a_tenth_of_a_bundled_space_suffices(name: str, tmp_path: Path) -> None:
    """Within 2 % of the best of the whole grid, with a tenth of its points."""
    plan = plan_sweep(name)
    with Store(tmp_path / "s.sqlite", code_identity()) as store:
        grid = sweep(plan, store)
        few = sweep(plan, store, sampler="tpe", trials=grid.n_points // 10, seed=0)
    assert few.n_points == grid.n_points // 10
    assert best_of(few) >= best_of(grid) - 0.02 * abs(best_of(grid))
