"""Folders with odd cells and records: one that cannot be used is skipped with what is wrong with it, and all others are predicted."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from test_backtest import HEAD, MACHINES, MODELS, folder, line

from moesim.backtest import backtest
from moesim.backtest.data import read_field_runs
from moesim.backtest.memory import predict_memory
from moesim.cli.main import run as command

GOOD = line("good", "full_gpu", "decode_tok_s", "0", "100")
NUMBER = "expected a number of at least 0, or nothing, got"


def odd_row(**cells: str) -> str:
    """A row of a hybrid run with some cells replaced or added."""
    names = HEAD.split(",")
    row = dict(zip(names, line("odd", "gpu_cpu_experts", "decode_tok_s", "0", "40", cpu="24").split(","), strict=True)) | cells
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([row[name] for name in names])
    return out.getvalue()


def reasons(path: Path) -> dict[str, str]:
    run = backtest(read_field_runs(path))
    assert len(run.predictions) + len(run.skipped) == len(run.data.runs)
    return {s.row.row_id: s.reason for s in run.skipped}


@pytest.mark.parametrize(("column", "cell", "wrong"), [
    ("value", "0", 'value: expected a measured value above 0, got "0"'), ("value", "", "value: expected a measured value above 0"),
    ("value", "-3", f'value: {NUMBER} "-3"'), ("value", "nan", f'value: {NUMBER} "nan"'), ("value", "12 t/s", f'value: {NUMBER} "12 t/s"'),
    ("metric", "ttft_ms", "metric: expected decode_tok_s or batched_decode_tok_s or prefill_tok_s, got"), ("depth_n_kv", "8k", NUMBER),
    ("depth_n_kv", "-5", NUMBER), ("threads", "16+16", NUMBER), ("threads", "-4", NUMBER), ("flash_attn", "auto", NUMBER), ("concurrency", "x", NUMBER),
    ("gen_tokens", "-100", NUMBER), ("prompt_tokens", "-10", NUMBER), ("moe_layers_on_cpu", "-3", NUMBER),
    ("bits_per_weight", "-1", NUMBER), ("kv_type", "turbo3", 'q6_0, or nothing, got "turbo3"'), ("offload_kind", "", "placement not stated"),
])  # fmt: skip
def test_an_odd_cell_costs_its_own_row_only(tmp_path: Path, column: str, cell: str, wrong: str) -> None:
    found = reasons(folder(tmp_path, odd_row(**{column: cell}), GOOD))
    assert set(found) == {"odd"} and wrong in found["odd"] and "csv" not in found["odd"]


def test_experts_used_are_at_most_those_of_the_model(tmp_path: Path) -> None:
    where = folder(tmp_path)
    rows = [f"{GOOD.replace('good', name)},{top_k}" for name, top_k in (("a", "-1"), ("b", "129"), ("c", "4"), ("d", ""))]
    (where / "runs.csv").write_text("\n".join([HEAD + ",top_k_override", *rows]) + "\n")
    assert reasons(where) == {
        "a": f'top_k_override: {NUMBER} "-1"',
        "b": "top_k_override: expected at most the model's 128 experts, got 129",
    }


@pytest.mark.parametrize("old, new, wrong", [
    ("cores: {v: 16}", "cores: {v: '8+8'}", "box.cpu.cores: expected a number of at least 0, got '8+8'"),
    ("peak_bw_gb_s: {v: 96}", "peak_bw_gb_s: {v: '~80'}", "box.ram.peak_bw_gb_s: expected a number of at least 0, got '~80'"),
    ("gib: {v: 64}", "gib: {v: true}", "box.ram.gib: expected a number of at least 0, got True"),
    ("count: {v: 1}", "count: {v: 0}", "box.gpus.0.count: expected a number of at least 1, got 0"),
    ("pcie_gen: {v: 4}", "pcie_gen: {v: .inf}", "box.gpus.0.pcie_gen: expected a number of at least 0, got inf"),
])  # fmt: skip
def test_an_odd_fact_costs_the_rows_of_its_machine_only(tmp_path: Path, old: str, new: str, wrong: str) -> None:
    where = folder(tmp_path, GOOD, line("twin", "full_gpu", "decode_tok_s", "0", "100", machine="twin"))
    (where / "machines.yaml").write_text(MACHINES.split("bare:")[0].replace(old, new) + MACHINES.split("bare:")[0].replace("box", "twin"))
    assert reasons(where) == {"good": wrong}


def test_numbers_written_as_text_are_read(tmp_path: Path) -> None:
    where = folder(tmp_path, GOOD, odd_row())
    known = [p.predicted for p in backtest(read_field_runs(where)).predictions]
    text = MACHINES.replace("pcie_gen: {v: 4}", "pcie_gen: {v: '4.0'}").replace("count: {v: 1}", "count: {v: '1'}")
    (where / "machines.yaml").write_text(text)
    assert [p.predicted for p in backtest(read_field_runs(where)).predictions] == known


@pytest.mark.parametrize("record", ["null", "7", "a text", "[1]"])
def test_a_record_that_is_none_costs_its_rows_only(tmp_path: Path, record: str) -> None:
    rows = (
        GOOD,
        line("m", "full_gpu", "decode_tok_s", "0", "9", machine="gone"),
        line("o", "full_gpu", "decode_tok_s", "0", "9", model="lost"),
    )
    where = folder(tmp_path, *rows)
    (where / "machines.yaml").write_text(MACHINES + f"gone: {record}\n")
    (where / "models.yaml").write_text(MODELS + f"lost: {record}\n")
    found = reasons(where)
    assert set(found) == {"m", "o"} and found["m"].startswith("record of gone: expected a mapping of facts, got")
    assert found["o"].startswith("record of lost: expected a mapping")


@pytest.mark.parametrize("cut", ["odd,run", "odd,run,x,2026-01,tiny", odd_row() + ",7", odd_row()[:-3]])
def test_a_line_with_cells_missing_or_too_many_is_skipped(tmp_path: Path, cut: str) -> None:
    (found,) = reasons(folder(tmp_path, cut, GOOD)).items()
    assert found[0] == "odd" and found[1].startswith("line: expected one cell for each column, got")
    assert not reasons(folder(tmp_path, GOOD + ",,,"))  # empty cells at the end, as spreadsheets write them


def test_a_line_that_no_csv_reader_takes_is_skipped(tmp_path: Path) -> None:
    found = reasons(folder(tmp_path, odd_row(quant="x" * 200_000), GOOD))
    assert list(found) == [""] and "field larger than" in found[""]


def test_odd_memory_figures_are_skipped(tmp_path: Path) -> None:
    where = folder(tmp_path, line("a", "full_gpu", "decode_tok_s", "0", "100"))
    head = "row_id,run_id,model,quant,bits_per_weight,engine,machine,offload_kind,ctx_size,kv_type,metric,value"
    start = "r,tiny,Q4_K_M,4.85,llama.cpp,box,full_gpu"
    rows = ["a,{},4096,,gpu_weights_mib,17000", "b,{},4096,,gpu_kv_mib,-1", "c,{},-5,,gpu_kv_mib,384", "d,{},4096,turbo3,gpu_kv_mib,384",
            "e,{},4096,,gpu_kv_mib,", "f,{}", "g,{},4096,,gpu_kv_mib,0"]  # fmt: skip
    (where / "memory.csv").write_text("\n".join([head, *(row.format(start) for row in rows)]) + "\n")
    found = {m.row.row_id: m for m in predict_memory(read_field_runs(where))}
    assert [name for name, m in found.items() if not m.reason] == ["a", "g"]
    assert found["a"].error is not None and found["g"].error is None and found["b"].error is None
    wrong = {"b": "value", "c": "ctx_size", "d": "kv_type", "e": "value", "f": "line"}
    assert all(found[name].reason.startswith(what + ": expected ") for name, what in wrong.items())


def test_what_is_skipped_is_counted_in_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (odd_row(depth_n_kv="8k"), odd_row(metric="ttft_ms"), odd_row(value="-1", depth_n_kv="16384"), "cut,run", GOOD)
    assert command(["backtest", str(folder(tmp_path, *rows)), "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    groups = {(g["placement"], g["mode"], g["depth_range"]): g["n_skipped"] for g in data["groups"]}
    assert groups["gpu_cpu_experts", "decode", "all"] == 2 and groups["gpu_cpu_experts", "decode", "from 8k"] == 1
    assert groups["gpu_cpu_experts", "ttft_ms", "all"] == 1 and groups["", "", "all"] == 1
    assert sum(n for (_, _, depth), n in groups.items() if depth == "all") == data["overall"]["n_skipped"] == 4
    assert [r["where"] for r in data["rows"] if "skipped" in r] == ["runs.csv:2", "runs.csv:3", "runs.csv:4", "runs.csv:5"]


@pytest.mark.parametrize("use", ["--cold", "--warm"])
def test_a_folder_of_which_nothing_can_be_predicted_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], use: str) -> None:
    where = folder(tmp_path, GOOD)
    for name in ("machines.yaml", "models.yaml", "memory.csv"):
        (where / name).write_text("")
    for form in ("text", "md", "csv"):
        assert command(["backtest", str(where), use, "-o", form, "--ablation", "--plot", str(tmp_path / "p.png")]) == 0
        assert "machine has no record" in capsys.readouterr().out
    assert command(["backtest", str(where), use, "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["overall"]["n"], data["overall"]["n_skipped"]) == (0, 1) and data["memory"] == []
    (group,) = (g for g in data["groups"] if g["depth_range"] == "all")
    assert (group["n"], group["n_skipped"], group["skipped"]) == (0, 1, {"machine has no record": 1})
    folder(where)
    assert command(["backtest", str(where), use]) == 0  # not even a row
    (where / "runs.csv").write_text("")
    assert command(["backtest", str(where), use]) == 2


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    where = folder(tmp_path, GOOD)
    for name in ("runs.csv", "machines.yaml", "models.yaml"):
        (where / name).write_text("\ufeff" + (where / name).read_text(), encoding="utf-8")
    assert not reasons(where)


def test_the_rows_that_calibrated_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line("p", "full_gpu", "prefill_tok_s", "0", "3000"), line("b", "full_gpu", "decode_tok_s", "512", "90"), line("c", "full_gpu", "decode_tok_s", "512", "91"),
            line("q", "full_gpu", "prefill_tok_s", "0", "3000").replace("llama.cpp,llama.cpp", "vllm,vllm")]  # fmt: skip
    where = folder(tmp_path, *rows)
    for use, calibrating in (("--cold", []), ("--warm", ["b", "q"])):  # the first decode row, and of an engine without one its first row
        assert command(["backtest", str(where), use, "-o", "json"]) == 0
        assert [r["row_id"] for r in json.loads(capsys.readouterr().out)["rows"] if r["calibrates"]] == calibrating
