"""Routing traces: the file format and all that it refuses, parts of a trace, adaptation to a model's shape."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moesim.trace as trace_module
from moesim.errors import InputError
from moesim.generate import uniform
from moesim.trace import RoutingTrace, adapt_trace, load_trace, save_trace
from moesim.trace_stats import analyse


def arrays() -> dict[str, Any]:
    """Three sequences of 3, 2 and 1 rows, two layers, top-2 of 6; cell (4, 1) is absent."""
    ids = np.array(
        [[[0, 1], [5, 4]], [[1, 2], [4, 3]], [[2, 0], [0, 1]], [[3, 4], [1, 2]], [[5, 0], [-1, -1]], [[1, 0], [2, 5]]],
        dtype=np.int16,
    )
    weights = np.where(ids >= 0, [0.75, 0.25], np.nan).astype(np.float16)
    return {
        "expert_ids": ids,
        "weights": weights,
        "seq_id": np.array([7, 7, 7, 2, 2, 9], dtype=np.int32),
        "position": np.array([0, 1, 2, 10, 11, 0], dtype=np.int32),
        "phase": np.array([0, 1, 1, 0, 1, 1], dtype=np.uint8),
        "meta": {
            "model": "tiny",
            "n_layers": 2,
            "n_experts": 6,
            "top_k": 2,
            "n_tokens": 6,
            "sequences": [{"seq_id": i} for i in (7, 2, 9)],
        },
    }


def small() -> RoutingTrace:
    return RoutingTrace(**arrays())


def write(path: Path, **changes: Any) -> Path:
    """Save the arrays with changes; None drops a key, text replaces the meta."""
    content = {**arrays(), **changes}
    content = {key: value for key, value in content.items() if value is not None}
    if isinstance(content.get("meta"), dict):
        content["meta"] = json.dumps(content["meta"])
    np.savez(path / "t.npz", **content)
    return path / "t.npz"


# --- the trace ------------------------------------------------------------------------------------------------------------------


def test_shape_and_sets() -> None:
    trace = small()
    assert (trace.n_rows, trace.n_layers, trace.top_k, trace.n_experts) == (6, 2, 2, 6)
    assert trace.sequences == [(0, 3), (3, 5), (5, 6)]
    assert trace.sets(2, 0) == (0, 2) and trace.sets(4, 1) == ()
    assert trace.counts().tolist() == [[4, 3, 2, 1, 1, 1], [1, 2, 2, 1, 2, 2]]
    assert repr(trace).startswith("RoutingTrace(tiny, T=6 rows in 3 sequences, L=2, E=6, K=2, 4 decode, weights, ")
    assert RoutingTrace(**{**arrays(), "meta": {}}).n_experts == 6, "largest id + 1"


def test_traces_are_frozen_and_compared_by_content() -> None:
    trace = small()
    with pytest.raises(ValueError, match="read-only"):
        trace.expert_ids[0, 0, 0] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace.meta = {}  # type: ignore[misc]
    assert trace == small() and hash(trace) == hash(small()) and len(trace.hash) == 16
    assert trace != RoutingTrace(**{**arrays(), "weights": None})
    assert trace != RoutingTrace(**{**arrays(), "meta": {"n_experts": 6}})
    assert trace.hash == RoutingTrace(**{**arrays(), "meta": {"n_experts": 6}}).hash, "description is no content"
    assert trace.hash != RoutingTrace(**{**arrays(), "meta": {"n_experts": 7}}).hash
    assert trace != "trace"


def test_parts() -> None:
    trace = small()
    part = trace.slice_rows(1, 4)
    assert part.position.tolist() == [1, 2, 10] and part.n_experts == 6 and "n_tokens" not in part.meta
    assert trace.decode_rows().position.tolist() == [1, 2, 11, 0]
    chosen = trace.select_sequences([2, 0, 0])
    assert chosen.seq_id.tolist() == [0, 1, 1, 1, 2, 2, 2], "renumbered: a repeated sequence does not melt into itself"
    assert chosen.meta["sequences"] == [{"seq_id": 0}, {"seq_id": 1}, {"seq_id": 2}]
    assert trace.select_sequences([]).n_rows == 0 and trace.select_sequences([]).sequences == []
    with pytest.raises(InputError, match="indices from 0 to 2, got 3"):
        trace.select_sequences([3])


def test_split_by_whole_sequences() -> None:
    train, test = small().split(0.5)
    assert (train.n_rows, test.n_rows) == (3, 3)
    one = small().select_sequences([0])
    train, test = one.split(0.5)
    assert (train.n_rows, test.n_rows) == (1, 2)
    ten = uniform(20, 1, 4, 1, np.random.default_rng(0), n_sequences=10)
    assert len(ten.split(0.3)[0].sequences) == 3, "0.3 * 10 is a little below 3 in binary"
    for fraction in (0.0, 1.0, float("nan")):
        with pytest.raises(InputError, match="between 0 and 1"):
            ten.split(fraction)
    with pytest.raises(InputError, match="got 0 of 3 sequences for training"):
        small().split(0.2)


# --- files ----------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), weights=st.booleans())
def test_save_and_load_give_an_equal_trace(tmp_path_factory: pytest.TempPathFactory, seed: int, weights: bool) -> None:
    rng = np.random.default_rng(seed)
    trace = uniform(int(rng.integers(1, 20)), 3, 9, 2, rng)
    values = rng.random(trace.expert_ids.shape).astype(np.float16) if weights else None
    trace = RoutingTrace(trace.expert_ids, values, trace.seq_id, trace.position, trace.phase, trace.meta)
    path = tmp_path_factory.mktemp("t") / "trace"  # no suffix is added
    save_trace(trace, path)
    assert load_trace(path) == trace


def test_saving_is_reproducible(tmp_path: Path) -> None:
    save_trace(small(), tmp_path / "a.npz")
    save_trace(small(), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with pytest.raises(InputError, match="JSON"):
        save_trace(RoutingTrace(**{**arrays(), "meta": {"x": {1}}}), tmp_path / "c.npz")
    with pytest.raises(InputError, match="a writable file"):
        save_trace(small(), tmp_path / "no" / "c.npz")


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_other_signed_integers_are_converted(tmp_path: Path, dtype: type[np.generic]) -> None:
    trace = load_trace(write(tmp_path, expert_ids=arrays()["expert_ids"].astype(dtype)))
    assert trace == small() and trace.expert_ids.dtype == np.int16


def test_fortran_order_and_further_arrays_are_read(tmp_path: Path) -> None:
    ids = np.asfortranarray(arrays()["expert_ids"])
    assert load_trace(write(tmp_path, expert_ids=ids, residency=np.zeros(3))) == small()
    assert load_trace(write(tmp_path, weights=None)).weights is None


def changed(name: str, change: Callable[[np.ndarray], None]) -> np.ndarray:
    array: np.ndarray = arrays()[name].copy()
    change(array)
    return array


def put(name: str, at: Any, value: Any) -> dict[str, Any]:
    return {name: changed(name, lambda array: array.__setitem__(at, value))}


META = arrays()["meta"]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"expert_ids": None}, "expert_ids: expected an array of that name"),
    "no phase": ({"phase": None}, "phase: expected an array of that name"),
    "no meta": ({"meta": None}, "meta: expected an array of that name"),
    "float ids": ({"expert_ids": arrays()["expert_ids"].astype(float)}, "expert_ids: expected signed integers"),
    "unsigned ids": ({"expert_ids": arrays()["expert_ids"].astype(np.uint16)}, "expert_ids: expected signed integers"),
    "flat ids": ({"expert_ids": arrays()["expert_ids"][:, :, 0]}, "expert_ids: expected signed integers .* got int16"),
    "empty": ({"expert_ids": np.zeros((0, 2, 2), np.int16)}, "at least one row"),
    "id too large": (put("expert_ids", (1, 0, 1), 6), "ids from -1 to 5, got 6 at row 1, layer 0, slot 1"),
    "id below -1": (put("expert_ids", (1, 0, 1), -2), "ids from -1 to 5, got -2"),
    "expert twice": (put("expert_ids", (3, 1, 1), 1), r"each expert once in a cell, got \[1, 1\] at row 3, layer 1"),
    "partly absent": (put("expert_ids", (3, 1, 1), -1), r"all slots of a cell absent .* got \[1, -1\] at row 3, layer 1"),
    "weights shape": ({"weights": arrays()["weights"][:5]}, "weights: expected shape"),
    "weights integers": ({"weights": np.ones((6, 2, 2), int)}, "weights: expected floats"),
    "weights NaN": (put("weights", (2, 1, 0), np.nan), "weights: expected finite .* got nan at row 2, layer 1, slot 0"),
    "weights infinite": (put("weights", (2, 1, 0), np.inf), "weights: expected finite"),
    "weights negative": (put("weights", (2, 1, 0), -0.5), "weights: expected finite"),
    "short column": ({"seq_id": arrays()["seq_id"][:5]}, "seq_id: expected 6 rows as in expert_ids, got 5"),
    "not contiguous": (put("seq_id", 5, 7), "seq_id: expected contiguous rows .* got sequence 7 again at row 5"),
    "phase 2": (put("phase", 4, 2), r"phase: expected 0 \(prefill\) or 1 \(decode\), got 2 at row 4"),
    "float phase": ({"phase": np.ones(6)}, "phase: expected integers"),
    "negative position": (put("position", 0, -1), "position: expected values from 0 .* got -1 at row 0"),
    "position repeats": (put("position", 2, 1), "position: expected positions that grow within a sequence, got 1 at row 2"),
    "position too large": ({"position": arrays()["position"].astype(np.int64) + 2**31}, "position: expected values"),
    "meta no JSON": ({"meta": "{model:"}, "meta: expected JSON text"),
    "meta a list": ({"meta": "[1]"}, "meta: expected a JSON object, got list"),
    "meta bytes": ({"meta": np.array(b"{}")}, "meta: expected JSON text in a 0-d string array"),
    "meta E": ({"meta": {**META, "n_experts": "6"}}, "meta.n_experts: expected an integer"),
    "meta E too large": ({"meta": {**META, "n_experts": 40_000}}, "meta.n_experts: expected an integer"),
    "meta L": ({"meta": {**META, "n_layers": 3}}, "meta.n_layers: expected 2, as in expert_ids"),
    "meta K": ({"meta": {**META, "top_k": 8}}, "meta.top_k: expected 2"),
    "pickled": ({"seq_id": np.array([7] * 5 + [None], dtype=object)}, "seq_id: .*pickled Python objects"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_files_are_refused_with_file_and_field(tmp_path: Path, case: str) -> None:
    changes, message = BAD[case]
    path = write(tmp_path, **changes)
    with pytest.raises(InputError, match=message) as error:
        load_trace(path)
    assert error.value.where == str(path)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an existing file, got none"):
        load_trace(tmp_path / "none.npz")
    with pytest.raises(InputError, match="a file, got a folder"):
        load_trace(tmp_path)
    (tmp_path / "x.npz").write_bytes(b"not a zip at all")
    with pytest.raises(InputError, match="x.npz: trace: expected an .npz file"):
        load_trace(tmp_path / "x.npz")
    np.save(tmp_path / "y.npy", np.zeros(3))
    with pytest.raises(InputError, match="expected an .npz file"):
        load_trace(tmp_path / "y.npy")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    save_trace(small(), tmp_path / "whole.npz")
    whole = (tmp_path / "whole.npz").read_bytes()
    for length in range(0, len(whole), 37):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(InputError, match="cut.npz: "):
            load_trace(tmp_path / "cut.npz")


def test_any_damaged_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    save_trace(small(), tmp_path / "whole.npz")
    whole = (tmp_path / "whole.npz").read_bytes()
    for at in range(0, len(whole), 3):
        (tmp_path / "bad.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            assert load_trace(tmp_path / "bad.npz") == small()
        except InputError:
            pass


def test_bombs_are_refused_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    monkeypatch.setattr(trace_module, "MAX_TRACE_BYTES", 1000)
    with pytest.raises(InputError, match=r"at most 1000 bytes uncompressed, got \d+ bytes declared"):
        load_trace(path)
    monkeypatch.undo()
    content = {name: zipfile.ZipFile(path).read(name) for name in zipfile.ZipFile(path).namelist()}
    header = np.lib.format.magic(1, 0)
    text = b"{'descr': '<i2', 'fortran_order': False, 'shape': (1000000000, 1000, 8)}".ljust(117) + b"\n"
    content["expert_ids.npy"] = header + len(text).to_bytes(2, "little") + text + b"\0" * 64
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(InputError, match=r"expert_ids: expected 16000000000000 bytes for int16 \(1000000000, 1000, 8\), got 64 bytes"):
        load_trace(path)


# --- adaptation -----------------------------------------------------------------------------------------------------------------


def test_a_fitting_trace_is_left_alone() -> None:
    trace = small()
    same, notes = adapt_trace(trace, 2, 6, 2)
    assert same is trace and notes == []


def test_mismatches_are_refused_with_a_way_out() -> None:
    with pytest.raises(InputError, match="trace n_layers: expected 4, .* got 2; say layers: tile"):
        adapt_trace(small(), 4, 6, 2)
    with pytest.raises(InputError, match="trace n_experts: expected 8, .* got 6; .*generate"):
        adapt_trace(small(), 2, 8, 2, layers="tile")
    with pytest.raises(InputError, match="trace top_k: expected 1, .* got 2; say slots: truncate"):
        adapt_trace(small(), 2, 6, 1)
    with pytest.raises(InputError, match="trace top_k: expected 3, .* got 2; the weaker choices were not recorded"):
        adapt_trace(small(), 2, 6, 3, slots="truncate")
    with pytest.raises(InputError, match="trace sequences: expected at least 4, got 3; say sequences: repeat"):
        adapt_trace(small(), 2, 6, 2, n_sequences=4)
    with pytest.raises(InputError, match="trace rows: expected at least 3 in each sequence, got 2 in sequence 1"):
        adapt_trace(small(), 2, 6, 2, rows_per_sequence=3)
    with pytest.raises(InputError, match='trace.layers: expected exact or tile, got "fold"'):
        adapt_trace(small(), 2, 6, 2, layers="fold")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="trace.n_sequences: expected at least 1"):
        adapt_trace(small(), 2, 6, 2, n_sequences=0)


def test_tiles_rename_experts_and_keep_the_statistics_of_their_layer() -> None:
    source = uniform(80, 3, 12, 2, np.random.default_rng(2), n_sequences=4)
    tiled, notes = adapt_trace(source, 8, 12, 2, layers="tile")
    assert len(notes) == 1 and "3 layers tiled to 8" in notes[0]
    assert (tiled.n_layers, tiled.meta["n_layers"]) == (8, 8)
    assert (tiled.expert_ids[:, :3] == source.expert_ids).all()
    assert (tiled.expert_ids[:, 3:6] != source.expert_ids).any() and (
        tiled.expert_ids[:, 3:6] != tiled.expert_ids[:, 6:][:, [0, 1, 1]]
    ).any()
    before, after = analyse(source), analyse(tiled)
    assert (np.sort(tiled.counts()) == np.sort(source.counts()[[0, 1, 2, 0, 1, 2, 0, 1]])).all()
    for layer in range(8):
        assert after["reuse"]["1"]["per_layer"][layer] == before["reuse"]["1"]["per_layer"][layer % 3]
        # Belady's ties do not alter hits; those of LRU go by id, and ids are renamed
        hits = after["cache"]["0.5"]["belady"]["hits_per_layer"][layer]
        assert hits == before["cache"]["0.5"]["belady"]["hits_per_layer"][layer % 3]
    again, _ = adapt_trace(source, 8, 12, 2, layers="tile")
    assert again == tiled, "the renaming is fixed"
    RoutingTrace(tiled.expert_ids, None, tiled.seq_id, tiled.position, tiled.phase, tiled.meta)  # still valid
    fewer, notes = adapt_trace(source, 2, 12, 2, layers="tile")
    assert (fewer.expert_ids == source.expert_ids[:, :2]).all() and notes == ["first 2 of 3 layers used"]


def test_tiling_keeps_absent_cells_and_weights() -> None:
    tiled, _ = adapt_trace(small(), 4, 6, 2, layers="tile")
    assert tiled.sets(4, 3) == () and tiled.weights is not None
    assert np.array_equal(tiled.weights[:, 2:], small().weights, equal_nan=True)  # type: ignore[arg-type]


def test_truncation_keeps_the_strongest() -> None:
    values = arrays()
    values["weights"][0, 0] = [0.25, 0.75]
    cut, notes = adapt_trace(RoutingTrace(**values), 2, 6, 1, slots="truncate")
    assert cut.expert_ids[:2, 0, 0].tolist() == [1, 1] and cut.top_k == cut.meta["top_k"] == 1
    assert cut.weights is not None and cut.weights[0, 0, 0] == 0.75
    assert notes == ["top-2 cut to the strongest 1 of each cell, weights not renormalised"]
    values["weights"] = None
    assert adapt_trace(RoutingTrace(**values), 2, 6, 1, slots="truncate")[0].expert_ids[0, 0, 0] == 0, (
        "router order where weights are not known"
    )


def test_sequences_are_repeated_and_cut() -> None:
    more, notes = adapt_trace(small(), 2, 6, 2, sequences="repeat", n_sequences=5)
    assert [stop - start for start, stop in more.sequences] == [3, 2, 1, 3, 2] and notes == ["3 sequences repeated to 5"]
    fewer, notes = adapt_trace(small(), 2, 6, 2, n_sequences=2)
    assert fewer.n_rows == 5 and notes == ["first 2 of 3 sequences used"]
    even, notes = adapt_trace(small(), 2, 6, 2, sequences="repeat", rows_per_sequence=4)
    assert even.sequences == [(0, 4), (4, 8), (8, 12)]
    assert even.position.tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 0, 1, 2, 3]
    assert even.phase.tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1], "the prompt does not come again"
    assert even.sets(3, 0) == small().sets(1, 0)
    assert notes == ["sequences brought to 4 rows: 0 cut, 3 started over"]
    cut, notes = adapt_trace(small(), 2, 6, 2, sequences="repeat", rows_per_sequence=2)
    assert cut.n_rows == 6 and notes == ["sequences brought to 2 rows: 1 cut, 1 started over"]


def test_damaged_array_headers_are_refused_or_harmless(tmp_path: Path) -> None:
    """NumPy parses headers as Python text, which fails in many ways; all of them are an InputError here."""
    path, rng = write(tmp_path), np.random.default_rng(0)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    letters = b"'{}()[],:<>|i2fOUb0123456789 -+eL\x00\xff\n"
    for name in [*content] * 60:
        damaged = bytearray(content[name])
        for at in rng.integers(0, 120, size=2):
            damaged[at] = letters[rng.integers(len(letters))]
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in content.items():
                archive.writestr(member, bytes(damaged) if member == name else data)
        try:
            load_trace(path)
        except InputError as error:
            assert error.where == str(path)
