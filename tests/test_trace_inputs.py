"""What commands take for a trace: any known format, whole files, never the file that is written; and the baselines that they draw."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moesim import config
from moesim.cli.main import app
from moesim.errors import InputError
from moesim.trace import RoutingTrace, load_trace, save_trace
from moesim.trace_files import import_trace, notes_of
from moesim.trace_formats.source import Options


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["trace", *map(str, words)])
    error = done.exception if isinstance(done.exception, InputError) else ""
    return done.exit_code, f"{done.output}{error}"


def small(path: Path) -> RoutingTrace:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((64, 3, 8)), axis=2)[:, :, :2].astype(np.int16)
    phase = np.ones(64, np.uint8)
    trace = RoutingTrace(ids, None, np.zeros(64, np.int32), np.arange(64, dtype=np.int32), phase, {"model": "m", "n_experts": 8})
    save_trace(trace, path)
    return trace


@pytest.mark.parametrize("field", ["sgl_ext", "sglext", "meta_info"])
@pytest.mark.parametrize("of_choice", [True, False])
def test_routing_in_sglang_answers_of_any_version(tmp_path: Path, field: str, of_choice: bool) -> None:
    ids = np.arange(2 * 3 * 2, dtype="<i4").reshape(2, 3, 2)
    holder = {field: {"routed_experts": base64.b64encode(ids.tobytes()).decode()}}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"choices": [holder]} if of_choice else {"choices": [{}]} | holder))
    found = import_trace(path, "auto", Options(n_layers=3, top_k=2))
    assert np.array_equal(found.expert_ids, ids)  # type: ignore[union-attr]


def test_a_route_log_without_some_of_its_layers_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    meta = {"type": "meta", "layers_logged": [0, 1], "top_k": 1}
    route = {"type": "route", "req_id": "r", "token_idx": 0, "layer": 0, "topk_ids": [1], "topk_weights": [1.0]}
    path.write_text("\n".join(json.dumps(x) for x in (meta, route)) + "\n")
    with pytest.raises(InputError, match="expected routes of all layers_logged 0, 1, got none of layer 1; the file is cut off"):
        import_trace(path)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    small(tmp_path / "a.npz")
    assert run("convert", tmp_path / "a.npz", "--to", "bigmoeonedge", "-o", tmp_path / "a.csv")[0] == 0
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.csv").read_bytes())
    for format in ("auto", "bigmoeonedge"):
        assert import_trace(tmp_path / "b.csv", format).hash == import_trace(tmp_path / "a.csv").hash  # type: ignore[union-attr]


def test_files_of_text_are_read_without_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa,b\n")
    assert config.read_text(tmp_path / "a.txt") == "a,b\n"


def test_a_cut_archive_is_said_to_be_one(tmp_path: Path) -> None:
    small(tmp_path / "a.npz")
    cut = tmp_path / "cut.npz"
    cut.write_bytes((tmp_path / "a.npz").read_bytes()[:300])
    with pytest.raises(InputError, match="got a zip archive without its list of members, which stands at the end: cut off at byte 300"):
        import_trace(cut)
    with pytest.raises(InputError, match="it is cut off or damaged"):
        load_trace(cut)


def test_the_last_token_of_a_prompt_that_is_answered_has_all_layers(tmp_path: Path) -> None:
    small(tmp_path / "a.npz")
    assert run("convert", tmp_path / "a.npz", "--to", "bigmoeonedge", "-o", tmp_path / "a.csv")[0] == 0
    lines = (tmp_path / "a.csv").read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("turn"))
    names = lines[head].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines[head + 1 :]]
    for row in rows:
        row["phase"] = "0" if int(row["step"]) < 4 else "1"
    kept = [row for row in rows if not (row["phase"] == "0" and row["layer"] == "2")]
    (tmp_path / "b.csv").write_text("\n".join([*lines[: head + 1], *(",".join(row.values()) for row in kept)]) + "\n")
    with pytest.raises(InputError, match="expected the last layer at least for the last prompt token"):
        import_trace(tmp_path / "b.csv")


def test_a_trace_is_not_written_over_the_one_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    small(path)
    before = path.read_bytes()
    for words in (["convert", path, "-o", path], ["slice", path, "--rows", "0:4", "-o", path], ["merge", path, path, "-o", path]):
        code, text = run(*words)
        assert code != 0 and "expected another file than the one that is read" in text
    assert path.read_bytes() == before


def test_arrays_that_a_trace_does_not_keep_are_named(tmp_path: Path) -> None:
    trace = small(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as arrays:
        np.savez(tmp_path / "b.npz", **arrays, residency=np.zeros(3, np.int8))
    found = import_trace(tmp_path / "b.npz")
    assert notes_of(found) == ["arrays that a trace does not keep are left out: residency"]
    assert np.array_equal(found.expert_ids, trace.expert_ids)  # type: ignore[union-attr]


def test_statistics_and_profiles_are_of_any_format(tmp_path: Path) -> None:
    small(tmp_path / "a.npz")
    assert run("convert", tmp_path / "a.npz", "--to", "bigmoeonedge", "-o", tmp_path / "a.csv")[0] == 0
    code, text = run("info", tmp_path / "a.csv")
    assert code == 0 and "T=64" in text or "64" in text
    assert run("fit", tmp_path / "a.csv", "--out", tmp_path / "fit.json")[0] == 0
    small_counts = tmp_path / "counts.csv"
    assert run("convert", tmp_path / "a.npz", "-o", small_counts)[0] == 0
    code, text = run("info", small_counts)
    assert code != 0 and "a source of counts, which has no rows" in text


@pytest.mark.parametrize(("like", "skewed"), [("uniform", False), ("zipf", True)])
def test_baselines_have_the_shape_of_a_model(tmp_path: Path, like: str, skewed: bool) -> None:
    out = tmp_path / "a.npz"
    assert run("generate", "--like", like, "--model", "mixtral-8x7b", "--rows", 400, "--sequences", 2, "--out", out)[0] == 0
    trace = load_trace(out)
    assert trace.expert_ids.shape == (400, 32, 2) and trace.n_experts == 8
    most = trace.counts().max(axis=1).mean() / 100  # over what is fair
    assert most > 1.5 if skewed else most < 1.3
    code, text = run("generate", "--like", like, "--rows", 4, "--out", out)
    assert code != 0 and "say --model NAME with them" in text
