"""Generated traces: distribution, reproducibility, refusals; popularity from count files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moesim.generate as generate
from moesim.errors import InputError
from moesim.generate import from_popularity, popularity_from_counts_csv, uniform
from moesim.trace import load_trace, save_trace

HEADER = "model,dataset,layer,expert,count,unit,source,licence\n"


def test_uniform_is_uniform() -> None:
    trace = uniform(20_000, 2, 8, 2, np.random.default_rng(5))
    share = trace.counts() / trace.n_rows
    assert np.abs(share - 2 / 8).max() < 0.015  # 4.9 standard deviations of 0.0031
    assert trace.weights is None and trace.n_experts == 8 and (trace.phase == 1).all()


def test_first_choice_follows_popularity_and_the_second_is_drawn_from_the_rest() -> None:
    popularity = np.array([[0.5, 0.3, 0.2]])
    ids = from_popularity(popularity, 2, 60_000, np.random.default_rng(7)).expert_ids[:, 0]
    first = np.bincount(ids[:, 0], minlength=3) / len(ids)
    assert np.abs(first - popularity[0]).max() < 0.01
    after_zero = ids[ids[:, 0] == 0, 1]
    assert abs((after_zero == 1).mean() - 0.3 / 0.5) < 0.01


def test_experts_of_popularity_zero_never_appear() -> None:
    trace = from_popularity(np.array([[0, 1, 5, 0, 2]]), 3, 200, np.random.default_rng(0))
    assert set(trace.expert_ids.ravel().tolist()) == {1, 2, 4}
    assert set(uniform(5, 1, 3, 3, np.random.default_rng(0)).sets(0, 0)) == {0, 1, 2}


def test_sequences_and_prefill() -> None:
    trace = uniform(11, 1, 4, 1, np.random.default_rng(0), n_sequences=3, prefill_rows=2)
    assert trace.sequences == [(0, 4), (4, 8), (8, 11)]
    assert trace.position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert trace.phase.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1]


def test_equal_seeds_give_equal_traces_whatever_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    popularity = np.random.default_rng(1).gamma(1.0, size=(3, 6))
    one = from_popularity(popularity, 2, 50, np.random.default_rng(42))
    monkeypatch.setattr(generate, "_BLOCK", 40)
    assert from_popularity(popularity, 2, 50, np.random.default_rng(42)) == one
    assert from_popularity(popularity, 2, 50, np.random.default_rng(43)) != one
    assert one.meta["generated"] is True and one.meta["seed"] == 42 and one.meta["dataset"] == "popularity"
    save_trace(one, tmp_path / "t.npz")
    assert load_trace(tmp_path / "t.npz") == one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.array([[1.0, -1.0]]), 1, 3), r"-1.0 at layer 0, expert 1"),
        ((np.array([[1.0, np.nan]]), 1, 3), "nan at layer 0, expert 1"),
        ((np.array([[1.0, 2.0], [0.0, 3.0]]), 2, 3), "top_k: expected 1 to 1, the experts of positive popularity in layer 1, got 2"),
        ((np.array([[1.0, 2.0]]), 0, 3), "top_k"),
        ((np.array([1.0, 2.0]), 1, 3), r"numbers \(L, E\)"),
        ((np.zeros((0, 4)), 1, 3), r"numbers \(L, E\)"),
        ((np.ones((1, 2)), 1, 0), "n_rows"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[np.ndarray, int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_popularity(*arguments, np.random.default_rng(0))


def test_impossible_shapes_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="n_experts"):
        uniform(3, 1, 0, 1, rng)
    with pytest.raises(InputError, match="n_rows"):
        uniform(3, 1, 4, 1, rng, n_sequences=4)
    with pytest.raises(InputError, match="prefill_rows"):
        uniform(6, 1, 4, 1, rng, n_sequences=2, prefill_rows=4)


def write(path: Path, *lines: str, header: str = HEADER) -> Path:
    file = path / "counts.csv"
    file.write_text(header + "".join(line + ",selections,s,MIT\n" for line in lines))
    return file


def test_counts_are_read(tmp_path: Path) -> None:
    file = write(
        tmp_path, "m,a,3,0,5", "m,a,3,1,7", "m,a,9,1,1", "m,a,9,0,2", "m,b,3,0,1", "m,b,3,1,1", "m,b,9,0,1", "m,b,9,1,1", "n,a,0,0,1"
    )
    assert popularity_from_counts_csv(file, "m", "a").tolist() == [[5, 7], [2, 1]]
    assert popularity_from_counts_csv(file, "m").tolist() == [[6, 8], [3, 2]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["m,a,0,0,1", "m,a,0,1,-4"], r"counts.csv:3: count: expected a whole number of at least 0, got '-4'"),
        (["m,a,0,0,1.5"], r"counts.csv:2: count"),
        (["m,a,0,x,1"], r"counts.csv:2: expert"),
        (["m,a,,0,1"], r"counts.csv:2: layer"),
        (["m,a,0,0,1", "m,a,0,0,1"], r"counts.csv:3: counts: expected each layer and expert once"),
        (["m,a,0,0,1", "m,a,1,1,1"], "no row for layer 0, expert 1 in dataset a"),
        (["m,a,0,0,1", "m,b,1,0,1"], "no row for layer 1, expert 0 in dataset a; state the dataset"),
        (["mixtral,a,0,0,1"], "model: expected a model of the file"),
    ],
)
def test_bad_counts_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        popularity_from_counts_csv(write(tmp_path, *lines), "m")


def test_other_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an existing file"):
        popularity_from_counts_csv(tmp_path / "none.csv", "m")
    with pytest.raises(InputError, match="counts.csv:1: .*got no unit"):
        popularity_from_counts_csv(write(tmp_path, header="model,dataset,layer,expert,count\n"), "m")
    file = write(tmp_path, "m,a,0,0,1")
    file.write_text(file.read_text().replace("selections", "share"))
    with pytest.raises(InputError, match="counts.csv:2: unit: expected selections, got 'share'"):
        popularity_from_counts_csv(file, "m")
    with pytest.raises(InputError, match='got "a2"; known: a1'):
        popularity_from_counts_csv(write(tmp_path, "m,a1,0,0,1"), "m", "a2")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        popularity_from_counts_csv(file, "m")
