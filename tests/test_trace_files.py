"""Traces of other tools: every format read back exactly, recognised by content, real files, and what each reader must refuse or say."""

from __future__ import annotations

import csv
import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trace_writers as w

from moesim.cli.main import run
from moesim.errors import InputError
from moesim.profile import RoutingProfile, load_profile, save_profile
from moesim.trace import RoutingTrace, load_trace, save_trace
from moesim.trace_edit import merge_traces
from moesim.trace_files import FORMATS, import_trace, load_map, notes_of, sniff
from moesim.trace_formats import sglang
from moesim.trace_formats.source import Options, Source

CASES = w.cases()


def trace_of(path: Path, options: Options | None = None, format: str = "auto") -> RoutingTrace:
    found = import_trace(path, format, options)
    assert isinstance(found, RoutingTrace)
    return found


def profile_of(path: Path, options: Options | None = None) -> RoutingProfile:
    found = import_trace(path, options=options)
    assert isinstance(found, RoutingProfile)
    return found


def said(found: RoutingTrace | RoutingProfile, text: str) -> bool:
    return any(text in note for note in notes_of(found))


# --- all formats ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
def test_round_trip(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = tmp_path / "named.dat"  # the name must not matter
    options = case.write(case.trace, path)
    assert sniff(Source(path)) == case.format
    found = import_trace(path, options=options)
    if isinstance(found, RoutingProfile):
        assert (np.rint(found.popularity * found.selections[:, None]) == case.trace.counts()).all()
        assert (found.selections == case.trace.counts().sum(1)).all() and found.unknown
        return
    want = case.trace
    for array in ("expert_ids", "seq_id", "position", "phase"):
        assert np.array_equal(getattr(found, array), getattr(want, array)), array
    if case.format != "router-logits":
        assert found.hash == want.hash, "weights too"
    assert found.n_experts == want.n_experts
    if want.phase[0] == 0 and (want.expert_ids[:, -1] < 0).any():
        assert said(found, "ragged prefill: layer 3 routed"), "absent cells are reported"
    save_trace(found, tmp_path / "again.npz")
    assert load_trace(tmp_path / "again.npz") == found, "notes and all"


HOLDS_DECODE = ["bigmoeonedge", "policylang", "stratamoe", "routed_npz", "routed_vllm", "routed_sglang", "llama_steps"]


@pytest.mark.parametrize("name", HOLDS_DECODE)
def test_round_trip_of_a_real_trace(tmp_path: Path, shared: Path, name: str) -> None:
    real = load_trace(shared / "traces" / "gptoss20b_Polyglot-or-Not_Fact-Completion.npz").select_sequences([0, 3])
    if name != "bigmoeonedge":  # the others hold no context position: it counts from 0
        starts = np.repeat([real.position[a] for a, _ in real.sequences], [b - a for a, b in real.sequences])
        phase = np.zeros_like(real.phase) if name == "stratamoe" else real.phase
        weights = real.weights if name == "policylang" else None
        real = RoutingTrace(real.expert_ids, weights, real.seq_id, real.position - starts, phase, {"n_experts": 32})
    path = tmp_path / "t"
    options = CASES[name].write(real, path)
    assert trace_of(path, options).hash == real.hash


@pytest.mark.parametrize("name", list(CASES))
def test_reading_is_fast(tmp_path: Path, name: str) -> None:
    """A million token-layer rows of any text format take under 20 s: a fortieth of it here, with the same speed asked for."""
    case = CASES[name]
    big = w.make(sequences=1, prompt=5, decode=1037, layers=24, experts=32, k=4, weights=True)
    if case.format in ("router-logits", "imatrix", "profile") or case.format.startswith("counts"):
        pytest.skip("no text with a line or more a token")
    path = tmp_path / "t"
    options = case.write(big, path)
    took = []
    for _ in range(3):  # the first one imports pandas, and others may run beside it
        began = time.process_time()
        found = trace_of(path, options)
        took.append(time.process_time() - began)
    assert min(took) < 0.5
    assert np.array_equal(found.expert_ids, big.expert_ids)


def test_every_format_has_a_case() -> None:
    own = {"moesim", "sglang"}
    assert {case.format for case in CASES.values()} | own == set(FORMATS)


# --- choosing a format ----------------------------------------------------------------------------------------------------------


def test_unknown_and_ambiguous_files(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("hello\n")
    with pytest.raises(InputError, match="format: expected one of moesim, profile, .*got a file that begins with 'hello"):
        import_trace(path)
    path.write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match="format: expected one of"):
        import_trace(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="an empty one"):
        import_trace(path)
    path.write_text(json.dumps({"selections": [[[0]]], "expertsPerLayer": 2, "choices": [{"routed_experts": [[[0]]]}]}))
    with pytest.raises(InputError, match="format: expected one that fits, got routed-experts-json and stratamoe; say which with --format"):
        import_trace(path)
    with pytest.raises(InputError, match='--format: expected auto or a known format, got "mblt"; did you mean "mbolt"'):
        import_trace(path, "mblt")
    with pytest.raises(InputError, match="an existing file, got none"):
        import_trace(tmp_path / "none")
    with pytest.raises(InputError, match="a file, got a folder"):
        import_trace(tmp_path)


def test_a_stated_format_is_not_second_guessed(tmp_path: Path) -> None:
    CASES["mbolt"].write(CASES["mbolt"].trace, tmp_path / "x")
    for name in FORMATS:
        if name != "mbolt":
            with pytest.raises(InputError) as error:
                import_trace(tmp_path / "x", name, Options(top_k=3))
            assert error.value.where.startswith(str(tmp_path / "x"))


# --- BigMoeOnEdge ---------------------------------------------------------------------------------------------------------------


def test_real_bigmoeonedge(shared: Path) -> None:
    found = trace_of(shared / "traces/raw/bigmoeonedge_qwen3_route_trace_v1_head.csv")
    want = load_trace(shared / "traces/qwen3_30b_a3b_bmoe.npz").slice_rows(0, 60)
    for array in ("expert_ids", "position", "phase"):
        assert np.array_equal(getattr(found, array), getattr(want, array)), array
    assert np.array_equal(found.weights, want.weights, equal_nan=True)  # type: ignore[arg-type]
    assert found.n_experts == 128 and found.meta["layer_expert_bytes"] == want.meta["layer_expert_bytes"]
    assert said(found, "layer 47 routed 1 of 28 prompt tokens") and said(found, "residency")


def bmoe(
    *rows: str,
    head: str = "# model=m arch=a n_layer=2 n_expert=8 n_expert_used=2",
    columns: str = "turn,phase,step,layer,slot,expert,weight",
) -> str:
    return "\n".join(["# route_trace v1", head, columns, *rows]) + "\n"


GOOD = ("0,1,5,0,0,3,0.5", "0,1,5,0,1,2,0.5", "0,1,5,1,0,7,0.5", "0,1,5,1,1,0,0.5")
BMOE_BAD = {
    "value": (bmoe(*GOOD[:3], "0,1,5,1,1,x,0.5"), ":7: expert: expected a whole number, got 'x'"),
    "columns": (bmoe(*GOOD[:2], "0,1,5,1,0,7", GOOD[3]), ":6: columns: expected 7: .*got 6"),
    "extra column": (bmoe(GOOD[0] + ",9", *GOOD[1:]), ":4: columns: expected 7: .*got 8"),
    "id": (bmoe(*GOOD[:3], "0,1,5,1,1,8,0.5"), ":6: expert: expected ids from 0 to 7, got 8"),
    "twice": (bmoe(*GOOD[:3], "0,1,5,1,1,7,0.5"), ":6: experts of a token: expected each expert once"),
    "slot": (bmoe(*GOOD[:3], "0,1,5,1,2,0,0.5"), ":7: slot: expected 0 to 1, got 2"),
    "slot twice": (bmoe(*GOOD[:3], "0,1,5,1,0,0,0.5"), ":6: slots of a token in a layer"),
    "layer": (bmoe(*GOOD[:2], "0,1,5,2,0,7,0.5", "0,1,5,2,1,0,0.5"), ":6: layer: expected 0 to 1, got 2"),
    "phase": (bmoe("0,2,5,0,0,3,0.5", *GOOD[1:]), ":4: phase: expected 0 to 1, got 2"),
    "both phases": (bmoe(*GOOD[:2], "0,0,5,1,0,7,0.5", "0,0,5,1,1,0,0.5"), "phase: expected one phase"),
    "weight": (bmoe(*GOOD[:3], "0,1,5,1,1,0,-0.5"), ":6: weight: expected finite numbers"),
    "no line end": (bmoe(*GOOD).rstrip("\n"), ":7: last line: expected a line end after it"),
    "version": (bmoe(*GOOD).replace("v1", "v2"), ':1: version: expected "# route_trace v1"'),
    "header": (bmoe(*GOOD, columns="turn,phase,step,layer,slot,id,weight"), ":3: header: expected the columns"),
    "n_expert": (bmoe(*GOOD, head="# n_expert=0"), ":2: n_expert: expected a whole number from 1"),
    "nothing": ("# route_trace v1\n", "header: expected a line with the columns"),
    "no rows": (bmoe(), "rows: expected at least one line of data"),
    "cut decode": (
        bmoe(*GOOD, "0,1,6,0,0,3,0.5", "0,1,6,0,1,2,0.5", *(g.replace(",5,", ",7,", 1) for g in GOOD)),
        "layers of a token: expected all 2 layers, got layer 1 missing for row 1",
    ),
}


@pytest.mark.parametrize("name", list(BMOE_BAD))
def test_bad_bigmoeonedge(tmp_path: Path, name: str) -> None:
    text, message = BMOE_BAD[name]
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=message) as error:
        import_trace(tmp_path / "t.csv")
    assert error.value.where.startswith(str(tmp_path / "t.csv"))


def test_bigmoeonedge_columns_by_name_and_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{r.split(',')[5]},new,{','.join(r.split(',')[:5])},nan,1" for r in GOOD]
    path.write_text(bmoe(*rows, columns="expert,later,turn,phase,step,layer,slot,weight,dropped"))
    found = trace_of(path)
    assert found.expert_ids.tolist() == [[[3, 2], [7, 0]]] and found.weights is None
    assert said(found, "weights are not known") and said(found, "4 routings were dropped")


def test_a_recorder_stopped_within_a_token(tmp_path: Path) -> None:
    """Cut at any line end: what is whole is read, the rest is left out with a note, or the file is refused."""
    lines = (CASES["bigmoeonedge"].write(CASES["bigmoeonedge"].trace, tmp_path / "t.csv"), (tmp_path / "t.csv").read_text().splitlines())[1]
    want = CASES["bigmoeonedge"].trace
    read = 0
    for stop in range(10, len(lines)):
        (tmp_path / "t.csv").write_text("\n".join(lines[:stop]) + "\n")
        try:
            found = trace_of(tmp_path / "t.csv")
        except InputError:
            continue
        read += 1
        assert found.n_layers == want.n_layers or said(found, "it may be cut off")
        same = found.expert_ids == want.expert_ids[: found.n_rows, : found.n_layers]
        assert same[found.present].all(), "what is read is right, be it less"
    assert read > 50


# --- llama.cpp ------------------------------------------------------------------------------------------------------------------


def test_pairs_with_and_without_header(tmp_path: Path) -> None:
    case = CASES["llama_pairs"]
    options = case.write(case.trace, tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").write_text("layer,expert\n" + text)
    found = trace_of(tmp_path / "t.csv", options)
    assert found.hash == case.trace.hash and said(found, "top_k = 3 is inferred")
    assert trace_of(tmp_path / "t.csv", Options(top_k=3, n_experts=16)).hash == case.trace.hash
    with pytest.raises(InputError, match="a multiple of top_k = 2, got"):
        import_trace(tmp_path / "t.csv", options=Options(top_k=2))
    (tmp_path / "t.csv").write_text("0,1\n0,2\n0,3\n0,4\n")
    with pytest.raises(InputError, match="--top-k: with one MoE layer"):
        import_trace(tmp_path / "t.csv")
    assert trace_of(tmp_path / "t.csv", Options(top_k=2)).expert_ids.tolist() == [[[1, 2]], [[3, 4]]]


def strided(trace: RoutingTrace) -> list[list[np.ndarray]]:
    """Passes as a recorder writes them that copies n * k ids flat from argsort rows of E."""
    rng = np.random.default_rng(9)
    out = []
    for one in w.passes(trace):
        flat = []
        for ids in one:
            rows = [np.r_[cell, rng.permutation(np.setdiff1d(np.arange(trace.n_experts), cell))] for cell in ids]
            flat.append(np.concatenate(rows)[: ids.size].reshape(ids.shape) if len(rows) else ids)
        out.append(flat)
    return out


def test_flat_copies_of_strided_rows_are_recognised(tmp_path: Path) -> None:
    trace = w.make(sequences=1, prompt=9, decode=6, layers=6, experts=16, k=3)
    path = tmp_path / "t.csv"
    path.write_text("".join(f"{layer},{e}\n" for one in strided(trace) for layer, ids in enumerate(one) for e in ids.reshape(-1).tolist()))
    found = trace_of(path, Options(top_k=3, n_experts=16))
    assert said(found, "1 prefill passes left out: their ids are a flat copy of the whole argsort rows")
    assert np.array_equal(found.expert_ids, trace.expert_ids[9:]) and (found.phase == 1).all()
    lines, at = [], 0
    for number, one in enumerate(strided(trace)):
        for layer, ids in enumerate(one):
            lines += [",".join(map(str, (-(9 - j) if number == 0 else number - 1, layer, *cell))) for j, cell in enumerate(ids.tolist())]
        at += len(one[0])
    path.write_text("\n".join(lines) + "\n")
    found = trace_of(path, Options(n_experts=16))
    assert said(found, "flat copy") and np.array_equal(found.expert_ids, trace.expert_ids[9:])


def test_orders_of_the_headerless_stream(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    trace = w.make(prompt=5, decode=7, layers=4)
    w.llama_bin(trace, path, "kn")
    found = trace_of(path, Options(n_experts=16))
    assert found.hash == trace.hash and said(found, "layer, k, n_tokens")
    short = w.make(sequences=1, prompt=0, decode=1, layers=2)
    w.llama_bin(short, path)
    with pytest.raises(InputError, match="one order of n_tokens and k that fits, got both: top_k = 3 and top_k = 1; give --top-k"):
        import_trace(path, "llama-bin")
    assert trace_of(path, Options(top_k=3), "llama-bin").top_k == 3
    long = w.make(sequences=1, prompt=0, decode=200, layers=4)
    w.llama_bin(long, path)
    assert trace_of(path, Options(n_experts=16)).top_k == 3, (
        "one-token passes whose ids never repeat, read the wrong way, are no three tokens"
    )


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


MBOLT = (0x544C424D, 1, 8)
MBOLT_BAD = {
    "version": (words(0x544C424D, 2, 8), "byte 4: version: expected 1, got 2"),
    "experts": (words(0x544C424D, 1, 0), "byte 8: n_expert: expected 1 to 32767"),
    "empty": (words(*MBOLT), "byte 12: records: expected at least one"),
    "cut head": (words(*MBOLT, 0, 2), "byte 12: record: expected 3 numbers, got 2"),
    "cut ids": (words(*MBOLT, 0, 2, 1, 5), "byte 24: ids: expected 2 numbers, got 1 to the end"),
    "odd size": (words(*MBOLT, 0, 2, 1, 5, 6)[:-1], "byte 28: int32: expected 4 bytes, got 3"),
    "layer": (words(*MBOLT, -1, 2, 1, 5, 6), "byte 12: layer: expected 0 to 4095, got -1"),
    "huge": (words(*MBOLT, 0, 2**30, 2**30), "byte 16: record sizes"),
    "id": (words(*MBOLT, 0, 2, 1, 5, -6), "byte 12: expert: expected ids from 0"),
    "id above E": (words(*MBOLT, 0, 2, 1, 5, 8), "expected ids from -1 to 7, got 8"),
    "k changes": (words(*MBOLT, 0, 2, 1, 5, 6, 1, 1, 1, 5), "byte 36: k: expected 2"),
    "layers change": (words(*MBOLT, 0, 1, 1, 5, 1, 1, 1, 6, 0, 1, 1, 5, 0, 1, 1, 5, 1, 1, 1, 5), "layers of a pass"),
    "ragged middle": (
        words(*MBOLT, 0, 1, 2, 5, 6, 1, 1, 1, 6, 2, 1, 2, 5, 6),
        "byte 32: tokens of a record: expected 2, as in the pass's other layers, got 1",
    ),
}


@pytest.mark.parametrize("name", list(MBOLT_BAD))
def test_bad_mbolt(tmp_path: Path, name: str) -> None:
    data, message = MBOLT_BAD[name]
    (tmp_path / "t.bin").write_bytes(data)
    with pytest.raises(InputError, match=message) as error:
        import_trace(tmp_path / "t.bin")
    assert error.value.where.startswith(str(tmp_path / "t.bin"))


def test_last_layer_records_that_cannot_be_attributed(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    one = [0, 1, 4, 5, 6, 7, 1, 1, 1, 2, 5, 6]  # 4 tokens, the last layer routes 2 of them
    path.write_bytes(words(*MBOLT, *one, 0, 1, 1, 5, 1, 1, 1, 6))
    found = trace_of(path)
    assert said(found, "1 records of the last layer hold some of the pass's tokens and do not say which")
    assert (found.expert_ids[:4, 1] == -1).all() and found.expert_ids[4, 1, 0] == 6
    path.write_bytes(words(*MBOLT, 0, 1, 3, 5, 6, 7, 0, 1, 2, 5, 6, 1, 1, 1, 6))  # the first chunk asks for no logits
    found = trace_of(path)
    assert found.expert_ids[:, 1, 0].tolist() == [-1, -1, -1, -1, 6] and found.position.tolist() == [0, 1, 2, 3, 4]


def test_an_incomplete_last_pass_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(words(*MBOLT, 0, 1, 1, 5, 1, 1, 1, 6, 0, 1, 1, 5))
    found = trace_of(path)
    assert found.n_rows == 1 and said(found, "the last pass has only 1 of 2 layers: left out")


def test_truncated_dumps_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    w.eval_callback(w.make(sequences=1, experts=16, k=8), path)
    with pytest.raises(
        InputError,
        match=r't.txt:\d+: tensor values: expected all 8 x 5 ids, got a dump that was shortened with "..."; record with llama-moe-trace',
    ):
        import_trace(path)
    w.eval_callback(w.make(sequences=1, prompt=7), path)
    with pytest.raises(InputError, match="expected all 3 x 7 ids, got a dump that was shortened"):
        import_trace(path)
    trace = w.make(sequences=1, prompt=9, experts=16, k=8)
    options = w.eval_callback(trace, path, limit=10**6)
    assert trace_of(path, options).hash == trace.hash, "a build that prints all"
    path.write_text(path.read_text().replace("common_debug_cb_eval", "ggml_debug"))
    assert trace_of(path, options).hash == trace.hash, "older builds name the function ggml_debug"
    path.write_text(w.print_tensor("l_out-1", "f32", "ADD", np.zeros((2, 2))))
    with pytest.raises(InputError, match="none: no MoE model"):
        import_trace(path, "eval-callback")


def test_the_sum_of_a_dump_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    text = w.print_tensor("ffn_moe_topk-0", "i32", "TOP_K", np.array([[1, 2], [3, 4]]))
    path.write_text(text.replace(" 2.0000", " 5.0000"))
    with pytest.raises(InputError, match="t.txt:1: sum: expected 13, the sum of the ids, got 10"):
        import_trace(path)
    path.write_text(text.replace(" 2.0000", " 2.5000").replace("sum", "s"))
    with pytest.raises(InputError, match="t.txt:1: ids: expected whole numbers, got 2.5"):
        import_trace(path)


def test_imatrix(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    counts = np.array([[5, 0, 3], [4, 4, 0], [0, 0, 0]])
    w.imatrix(counts, path, [3, 4, 9])
    found = profile_of(path)
    assert found.layers == (3, 4) and found.popularity[0].tolist() == [0.625, 0.0, 0.375] and found.selections.tolist() == [8, 8]
    assert said(found, "1 layers without selections left out") and found.meta["chunk_size"] == 512
    assert said(found, "cannot be known from counts: the order of tokens")
    w.imatrix(np.array([[512]]), path)
    with pytest.raises(
        InputError, match=r"byte \d+: blk.0.ffn_(down|gate|up)_exps.weight.counts: expected one number an expert, got one number for all"
    ):
        import_trace(path)
    import gguf_writer

    gguf_writer.write(path, "qwen3moe", *gguf_writer.qwen3moe())
    with pytest.raises(InputError, match="this is a model, not an importance matrix"):
        import_trace(path)


# --- servers --------------------------------------------------------------------------------------------------------------------


def test_real_vllm_route_log(shared: Path) -> None:
    path = shared / "traces/raw/vllm_moe_routes_fixture.jsonl"
    found = trace_of(path)
    assert said(found, "2 dummy passes of 1024, 64 equal rows at the start left out")
    assert said(found, "the prompts in each follow one another without borders") and said(found, "nothing says which request ended")
    assert ((found.phase == 0).sum(), (found.phase == 1).sum()) == (122, 171)
    known = trace_of(path, Options(prompt_tokens=(20, 27, 34, 41)))
    lengths = [b - a for a, b in known.sequences][:4]
    decode = [length - prompt for length, prompt in zip(lengths, (20, 27, 34, 41), strict=True)]
    assert len(set(decode)) == 1 and decode[0] > 0, "the first decode passes, of four rows, belong to the four prompts"
    assert not said(known, "without borders") and (known.phase == 1).sum() == 171
    for a, b in known.sequences[:4]:
        assert known.position[a:b].tolist() == list(range(b - a))
    with pytest.raises(InputError, match="--prompt-tokens: expected lengths that add up to the rows of the prefill passes, 122"):
        import_trace(path, options=Options(prompt_tokens=(20, 27)))


def route(token: int, layer: int, *ids: int, weights: list[float] | None = None) -> str:
    row: dict[str, Any] = {"type": "route", "req_id": "r", "token_idx": token, "layer": layer, "topk_ids": list(ids)}
    return json.dumps(row if weights is None else {**row, "topk_weights": weights})


def test_dummies_are_known_by_equal_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    real = [route(i, 0, i, i + 1) for i in range(5)]
    many, few, one = (
        [route(i, 0, 7, 9, weights=[0.4, 0.1 * i / 20]) for i in range(8)],
        [route(i, 0, 7, 9) for i in range(4)],
        [route(0, 0, 7, 9)],
    )
    path.write_text("\n".join([*many, *few, *real, *one]) + "\n")
    found = trace_of(path)
    assert said(found, "2 dummy passes of 8, 4 equal rows") and found.n_rows == 6, "whatever their weights"
    path.write_text("\n".join([*few, *real]) + "\n")
    found = trace_of(path)
    assert found.n_rows == 9 and not said(found, "dummy"), "a few rows may agree by chance"
    path.write_text("\n".join([*many, *one, *one]) + "\n")
    found = trace_of(path)
    assert found.n_rows == 2 and said(found, "it may be one of them"), "a pass of one row is real"
    path.write_text("\n".join([*real, *many]) + "\n")
    assert trace_of(path).n_rows == 13, "only leading passes: later ones may be samples of one prompt"
    path.write_text("\n".join([*many, *many]) + "\n")
    with pytest.raises(InputError, match="at least one that is not a dummy"):
        import_trace(path)


VLLM_BAD = {
    "no JSON": ([route(0, 0, 1, 2), '{"type": '], ":2: JSON: expected one object on the line"),
    "two on a line": ([route(0, 0, 1, 2), route(1, 0, 1, 2) + "," + route(2, 0, 1, 2)], ":2: JSON"),
    "list": ([route(0, 0, 1, 2), "[1]"], ":2: JSON: expected one object on the line, got list"),
    "gap": ([route(0, 0, 1, 2), route(2, 0, 1, 2)], ":2: token_idx: expected 1, the next row of the pass, got 2"),
    "ids": ([route(0, 0, 1, 2), route(1, 0, 1)], ":2: topk_ids: expected 2 expert ids"),
    "bool": ([route(0, 0, 1, 2), route(1, 0, 1, 2).replace("[1,", "[null,")], ":2: topk_ids"),
    "negative": ([route(0, 0, 1, 2), route(1, 0, 1, -2)], ":2: topk_ids"),
    "layer": ([route(0, 0, 1, 2), route(1, -1, 1, 2)], ":2: layer: expected a whole number"),
    "twice": ([route(0, 0, 1, 2), route(1, 0, 2, 2)], ":1: experts of a token: expected each expert once"),
    "missing": ([route(0, 0, 1, 2), route(1, 0, 1, 2).replace("topk_ids", "ids")], ":2: topk_ids"),
    "weights": ([route(0, 0, 1, 2, weights=[1, 2]), route(1, 0, 1, 2, weights=[1])], ":2: topk_weights: expected 2 numbers"),
}


@pytest.mark.parametrize("name", list(VLLM_BAD))
def test_bad_route_logs(tmp_path: Path, name: str) -> None:
    lines, message = VLLM_BAD[name]
    (tmp_path / "t").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match="t" + message):
        import_trace(tmp_path / "t", "vllm-jsonl")


def test_routed_experts_of_servers(tmp_path: Path) -> None:
    trace = w.make(sequences=1, layers=3)
    path = tmp_path / "t"
    ids = np.concatenate([np.zeros((12, 1, 3), np.int64), trace.expert_ids], axis=1)
    path.write_text(json.dumps({"choices": [{"routed_experts": w.npy64(ids.astype(np.uint8))}]}))
    found = trace_of(path)
    assert said(found, "1 layers hold placeholders alone (0 or -1) and are left out as dense: 0") and found.meta["layer_numbers"] == [
        1,
        2,
        3,
    ]
    assert np.array_equal(found.expert_ids, trace.expert_ids) and said(found, "does not tell prompt from answer")
    import base64

    data = base64.b64encode(trace.expert_ids.astype("<i4").tobytes()).decode()
    path.write_text(json.dumps({"meta_info": {"routed_experts": data}}))
    with pytest.raises(InputError, match="--layers and --top-k: flat int32 does not say its shape"):
        import_trace(path)
    with pytest.raises(InputError, match="a multiple of 5 layers x 3 slots"):
        import_trace(path, options=Options(n_layers=5, top_k=3))
    path.write_text(json.dumps({"routed_experts": {"shape": [12, 3, 3], "data": data}}))
    assert np.array_equal(trace_of(path).expert_ids, trace.expert_ids), "LightLLM's shape and data"
    path.write_text(json.dumps({"meta_info": {"routed_experts": data[:-2]}}))
    with pytest.raises(InputError, match="base64"):
        import_trace(path, options=Options(n_layers=3, top_k=3))
    np.save(tmp_path / "objects.npy", np.array([[["a", None]]], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="Python objects"):
        import_trace(tmp_path / "objects.npy", "routed-experts")


def test_sglang_per_token(tmp_path: Path) -> None:
    trace = w.make(sequences=3, prompt=5, decode=7)
    (tmp_path / "t.pt").write_bytes(b"PK")
    for start in (0, 4):
        part = w.make(sequences=3, prompt=5, decode=7, start=start)
        found = sglang.convert(w.sglang_dump(part), Source(tmp_path / "t.pt"), Options(n_experts=16))
        assert isinstance(found, RoutingTrace) and found.hash == part.hash
        assert said(found, "slots 3 to 7 are padding") and said(found, "experts were rebalanced") and said(found, "equal positions")
    dump = w.sglang_dump(trace)
    mapping = dump.pop("last_physical_to_logical_map")
    found = sglang.convert(dump, Source(tmp_path / "t.pt"), Options(n_experts=20))
    assert isinstance(found, RoutingTrace) and said(found, "no physical-to-logical map") and found.hash != trace.hash
    np.save(tmp_path / "map.npy", mapping)
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": mapping.tolist()}))
    for name in ("map.npy", "map.json"):
        given = Options(n_experts=16, mapping=load_map(tmp_path / name))
        again = sglang.convert(w.sglang_dump(trace), Source(tmp_path / "t.pt"), given)
        assert isinstance(again, RoutingTrace) and again.hash == trace.hash
    for key, value, message in (
        ("positions", [0], "positions of record 0"),
        ("extend_seq_lens", [4, 5, 7], "extend_seq_lens of record 0"),
        ("topk_ids_of_layer", np.zeros((4, 15, 8)), "an integer tensor"),
    ):
        bad = w.sglang_dump(trace)
        bad["records"][0][key] = value
        with pytest.raises(InputError, match=message):
            sglang.convert(bad, Source(tmp_path / "t.pt"), Options())


def test_sglang_counts(tmp_path: Path) -> None:
    (tmp_path / "t.pt").write_bytes(b"PK")
    counts = np.arange(24).reshape(2, 3, 4)
    found = sglang.convert({"rank": 0, "logical_count": counts}, Source(tmp_path / "t.pt"), Options())
    assert isinstance(found, RoutingProfile) and found.selections.tolist() == counts.sum((0, 2)).tolist()
    records = [{"forward_pass_id": i, "global_physical_count": np.array([[1, 2, 3], [4, 5, 6]])} for i in range(2)]
    found = sglang.convert(
        {"records": records, "last_physical_to_logical_map": np.array([[0, 1, 0], [1, 0, 1]])}, Source(tmp_path / "t.pt"), Options()
    )
    assert isinstance(found, RoutingProfile)
    assert (found.popularity * found.selections[:, None]).round().tolist() == [[8, 4], [10, 20]]
    with pytest.raises(InputError, match="logical_count .*or records"):
        sglang.convert({"x": 1}, Source(tmp_path / "t.pt"), Options())


def test_sglang_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch, the optional extra that reads .pt files")
    trace = w.make(sequences=3, prompt=5, decode=7)
    dump = w.sglang_dump(trace)
    dump["records"] = [{k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in r.items()} for r in dump["records"]]
    dump["last_physical_to_logical_map"] = torch.from_numpy(dump["last_physical_to_logical_map"])
    path = tmp_path / "expert_distribution_recorder_1.pt"
    torch.save(dump, path)
    assert sniff(Source(path)) == "sglang"
    assert trace_of(path, Options(n_experts=16)).hash == trace.hash
    torch.save({"logical_count": torch.ones(2, 3, 4, dtype=torch.int32), "rank": 0}, path)
    assert profile_of(path).popularity.tolist() == [[0.25] * 4] * 3
    torch.save({"logical_count": Path("x")}, path)
    with pytest.raises(InputError, match="plain data and tensors"):
        import_trace(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            import_trace(path, "sglang")


def test_pt_files_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    monkeypatch.setitem(sys.modules, "torch", None)
    with zipfile.ZipFile(tmp_path / "t.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    with pytest.raises(
        InputError, match=r"torch: expected torch, to read .pt files, got no torch in this environment; pip install 'moesim\[validate\]'"
    ):
        import_trace(tmp_path / "t.pt")


# --- logits, StrataMoE, PolicyLang ----------------------------------------------------------------------------------------------


def test_router_logits(tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    logits = np.log(np.array([[[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]], np.float32))
    np.save(path, logits)
    found = trace_of(path, Options(top_k=2))
    assert found.expert_ids[:, 0].tolist() == [[0, 1], [3, 2]] and found.weights is not None
    assert np.allclose(found.weights[:, 0].astype(float), [[0.5, 0.25], [0.4, 0.3]], atol=1e-3)
    assert trace_of(path, Options(top_k=3)).expert_ids[0, 0].tolist() == [0, 1, 2], "ties go to the lower id"
    assert said(found, "softmax over all 4 experts") and said(found, "all rows are one sequence")
    with pytest.raises(InputError, match="--top-k: logits do not say how many"):
        import_trace(path)
    with pytest.raises(InputError, match="top_k: expected 1 to 4"):
        import_trace(path, options=Options(top_k=5))
    logits[0, 1, 2] = np.nan
    np.save(path, logits)
    with pytest.raises(InputError, match="layer 0: expected finite numbers, got nan at token 1, expert 2"):
        import_trace(path, options=Options(top_k=2))
    np.savez(tmp_path / "t.npz", **{"l.3": logits[0], "l.1": logits[0, :1]})
    with pytest.raises(InputError, match="router_logits of layer 3: expected floats .*as in the first layer"):
        import_trace(tmp_path / "t.npz", options=Options(top_k=2))


def test_real_stratamoe(shared: Path, tmp_path: Path) -> None:
    path = shared / "traces/raw/switch_base_8_router-trace.v2.json"
    found = trace_of(path)
    assert found.hash == load_trace(shared / "traces/switch_base_8_encoder.npz").hash, "the metadata beside it states the trace's SHA-256"
    assert found.meta["layer_numbers"] == [1, 3, 5, 7, 9, 11] and said(found, "encoder layers")
    (tmp_path / "t.json").write_bytes(path.read_bytes())
    alone = trace_of(tmp_path / "t.json")
    assert len(alone.sequences) == 1 and said(alone, "no capture metadata")
    given = Options(metadata=shared / "traces/raw/switch_base_8_capture-metadata.json")
    assert trace_of(tmp_path / "t.json", given).hash == found.hash
    (tmp_path / "t.json").write_bytes(path.read_bytes().replace(b"domain-shift", b"domain_shift"))
    with pytest.raises(InputError, match="capture-metadata.json: trace_sha256: .*the metadata belongs to another trace"):
        import_trace(tmp_path / "t.json", options=given)


def test_bad_stratamoe(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    w.stratamoe(w.make(decode=0), path)
    data = json.loads(path.read_text())
    for change, message in (
        ({"version": 3}, "version: expected 1 or 2"),
        ({"tokens": 11}, r"selections: expected a list of 11 tokens, got 10"),
        ({"topK": 2}, r"selections\[0\]\[0\]: expected 2 expert ids"),
        ({"expertsPerLayer": 15}, r"expert, selections\[0\]\[0\]: expected ids from 0 to 14, got 15"),
        ({"layers": "4"}, "layers: expected a whole number"),
    ):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(InputError, match=message):
            import_trace(path)
    data["selections"][3][1] = [0, 1]
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"selections\[3\]\[1\]: expected 3 expert ids, got \[0, 1\]"):
        import_trace(path)
    path.write_text(json.dumps(data, indent=1)[:400])
    with pytest.raises(InputError, match=r"t.json:\d+: JSON"):
        import_trace(path)


def test_bad_policylang(tmp_path: Path) -> None:
    path = tmp_path / "t"
    w.policylang(w.make(), path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(InputError, match="num_entries: expected 96 lines after the header, got 95"):
        import_trace(path)
    for number, old, new, message in (
        (3, '"l": 2', '"l": 9', "t:4: l: expected a whole number from 0 to 3, got 9"),
        (3, '"l": 2', '"l": 1', "t:4: entry: expected each token and layer once"),
        (2, '"t": 0', '"t": null', "t:3: t: expected a whole number"),
        (0, '"top_k": 3', '"top_k": 2', "t:2: e: expected 2 expert ids"),
        (0, '"num_experts": 16', '"num_experts": 15', "t:2: expert: expected ids from 0 to 14, got 15"),
    ):
        changed = list(lines)
        assert old in changed[number]
        changed[number] = changed[number].replace(old, new)
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(InputError, match=message):
            import_trace(path)


# --- counts and profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["expert_counts.csv", "expert_counts_mixtral_gemma.csv"])
def test_real_count_tables(shared: Path, name: str) -> None:
    path = shared / "traces" / name
    with pytest.raises(InputError, match='model: expected one model, got .*; say --select model="..."'):
        import_trace(path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for model in dict.fromkeys(row["model"] for row in rows):
        found = profile_of(path, Options(select={"model": model}))
        want: dict[tuple[int, int], int] = {}
        for row in rows:
            if row["model"] == model:
                key = int(row["layer"]), int(row["expert"])
                want[key] = want.get(key, 0) + int(row["count"])
        for (layer, expert), count in want.items():
            i = found.layers.index(layer)
            assert round(found.popularity[i, expert] * found.selections[i]) == count
    with pytest.raises(InputError, match="--select: expected a column of the file"):
        import_trace(path, options=Options(select={"size": "1"}))
    with pytest.raises(InputError, match="--select: expected model one of"):
        import_trace(path, options=Options(select={"model": "none"}))


def test_counts_in_json(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for data in (
        [[1, 3], [2, 2]],
        {"0": [1, 3], "1": [2, 2]},
        {"expert_counts": {"0": {"0": 1, "1": 3}, "1": {"0": 2, "1": 2}}},
        {"layers": [{"counts": [1, 3]}, {"counts": [2, 2]}]},
    ):
        path.write_text(json.dumps(data))
        assert profile_of(path).popularity.tolist() == [[0.25, 0.75], [0.5, 0.5]], data
    for data, message in (
        ({"counts": [[1, 3], [2]]}, "layer 1: expected 2 counts, as in the first layer, got 1"),
        ({"counts": [[1, -3]]}, "layer 0, expert 1: expected a count"),
        ({"counts": {"a": [1]}}, "layer: expected different numbers"),
        ({"counts": [[0, 0]]}, "counts: expected at least one selection"),
    ):
        path.write_text(json.dumps(data))
        with pytest.raises(InputError, match=message):
            import_trace(path)


def test_profiles_are_saved_and_checked(tmp_path: Path) -> None:
    found = RoutingProfile.from_counts(np.array([[1, 2], [3, 4]]), [5, 7], "here", ["a note"], {"model": "m"})
    save_profile(found, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == found and import_trace(tmp_path / "p.json") == found
    assert repr(found) == "RoutingProfile(m, L=2, E=2, 10 selections, no order)"
    data = found.as_dict()
    for change, message in (
        ({"popularity": [[0.5, 0.6], [0.5, 0.5]]}, "shares that sum to 1"),
        ({"popularity": [[0.5, 0.5], [1.0]]}, "rows of finite numbers"),
        ({"popularity": [[1.5, -0.5], [0.5, 0.5]]}, "finite shares of at least 0"),
        ({"selections": [0, 1]}, "numbers of at least 1"),
        ({"layers": [1, 1]}, "2 different layer numbers"),
        ({"notes": [1]}, "texts"),
        ({"format": "x"}, 'expected "moesim-profile v1"'),
        ({"meta": None}, "meta: expected a dict"),
    ):
        (tmp_path / "p.json").write_text(json.dumps({**data, **change}))
        with pytest.raises(InputError, match=message) as error:
            load_profile(tmp_path / "p.json")
        assert error.value.where == str(tmp_path / "p.json")


# --- what the caller states -----------------------------------------------------------------------------------------------------


def test_statements_must_agree_with_the_file(tmp_path: Path) -> None:
    case = CASES["mbolt"]
    case.write(case.trace, tmp_path / "t")
    for options, message in (
        (Options(top_k=4), "top_k: expected 3, as in the file, got 4"),
        (Options(n_layers=5), "n_layers: expected 4, as in the file"),
        (Options(n_experts=17), "n_experts: expected 16, as in the file"),
    ):
        with pytest.raises(InputError, match=message):
            import_trace(tmp_path / "t", options=options)
    w.llama_steps(CASES["llama_steps"].trace, tmp_path / "t")
    assert said(trace_of(tmp_path / "t"), "16 = largest id seen + 1 is assumed")
    with pytest.raises(InputError, match="expert: expected ids from 0 to 9"):
        import_trace(tmp_path / "t", options=Options(n_experts=10))


# --- joining and the command line -----------------------------------------------------------------------------------------------


def test_merge() -> None:
    a, b = w.make(0, weights=True), w.make(1, weights=True)
    both = merge_traces([a, b], ["a.npz", "b.npz"])
    assert both.n_rows == 48 and len(both.sequences) == 4 and both.seq_id.tolist() == sorted(both.seq_id.tolist())
    assert np.array_equal(both.expert_ids[24:], b.expert_ids) and np.array_equal(both.position[24:], b.position)
    assert both.meta["merged_from"] == ["a.npz", "b.npz"] and both.meta["model"] == "test/random" and both.weights is not None
    half = merge_traces([a, w.make(1)], ["a", "b"])
    assert half.weights is None and "weights left out: not all parts have them" in half.meta["notes"]
    with pytest.raises(InputError, match="c: n_experts: expected 16, as in a, got 17"):
        merge_traces([a, w.make(experts=17)], ["a", "c"])
    with pytest.raises(InputError, match="at least two"):
        merge_traces([a], ["a"])


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["bigmoeonedge"]
    case.write(case.trace, tmp_path / "t.csv")
    out = str(tmp_path / "t.npz")
    assert run(["trace", "import", str(tmp_path / "t.csv"), "-o", out]) == 0
    said_here = capsys.readouterr()
    assert said_here.out.startswith("RoutingTrace(test.gguf, T=24 rows") and "note: ragged prefill" in said_here.err
    assert load_trace(out).hash == case.trace.hash
    assert run(["trace", "convert", out, "-o", str(tmp_path / "again.csv"), "--to", "bigmoeonedge"]) == 0
    assert trace_of(tmp_path / "again.csv").hash == case.trace.hash
    assert run(["trace", "convert", out, "-o", str(tmp_path / "counts.csv")]) == 0
    assert run(["trace", "convert", out, "-o", str(tmp_path / "p.json")]) == 0
    assert np.allclose(profile_of(tmp_path / "counts.csv").popularity, load_profile(tmp_path / "p.json").popularity)
    assert run(["trace", "import", str(tmp_path / "counts.csv"), "-o", str(tmp_path / "q.json")]) == 0
    assert run(["trace", "slice", out, "--sequences", "1,0", "--phase", "decode", "--rows", "2:9", "-o", str(tmp_path / "s.npz")]) == 0
    part = load_trace(tmp_path / "s.npz")
    want = np.r_[case.trace.expert_ids[17:24], case.trace.expert_ids[5:12]][2:9]
    assert np.array_equal(part.expert_ids, want) and (part.phase == 1).all()
    assert run(["trace", "slice", out, "--phase", "prefill", "-o", str(tmp_path / "pre.npz")]) == 0
    assert load_trace(tmp_path / "pre.npz").n_rows == 10
    assert run(["trace", "merge", out, str(tmp_path / "s.npz"), "-o", str(tmp_path / "m.npz")]) == 0
    assert load_trace(tmp_path / "m.npz").n_rows == 31
    capsys.readouterr()
    for arguments, message in (
        (["import", str(tmp_path / "no.csv")], "expected a bundled name or a file"),
        (["import", out, "--format", "nonsense"], "--format: expected auto or a known format"),
        (["import", out, "--select", "model"], "--select: expected COLUMN=VALUE"),
        (["import", out, "-o", str(tmp_path / "x.txt")], "a file name that ends in .npz"),
        (["import", out, "--prompt-tokens", "1-3"], "--prompt-tokens: expected numbers"),
        (["import", str(tmp_path / "counts.csv"), "-o", str(tmp_path / "x.npz")], "a file name that ends in .json"),
        (["convert", str(tmp_path / "counts.csv"), "-o", str(tmp_path / "x.npz")], "the source holds counts without order"),
        (["slice", out, "-o", str(tmp_path / "x.npz")], "expected --rows, --sequences or --phase"),
        (["slice", out, "--rows", "5:2", "-o", str(tmp_path / "x.npz")], "--rows: expected A:B"),
        (["slice", out, "--sequences", "9", "-o", str(tmp_path / "x.npz")], "indices from 0 to 1"),
        (["merge", out, "-o", str(tmp_path / "x.npz")], "at least two"),
        (["merge", out, str(tmp_path / "p.json"), "-o", str(tmp_path / "x.npz")], "a source of counts, which has no rows"),
    ):
        assert run(["trace", *arguments]) == 2, arguments
        answer = capsys.readouterr()
        assert message in answer.err and "Traceback" not in answer.err and not answer.out, arguments


def test_no_heavy_imports() -> None:
    code = "import sys, moesim.trace_files; print([m for m in ('torch', 'numba', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
