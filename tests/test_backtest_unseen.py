"""Folders with machines, models and engines that nobody has seen: a sensible prediction or a clear reason, never a crash."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from test_backtest import MACHINES, MODELS, folder, line

from moesim.backtest import backtest
from moesim.backtest.data import FieldRuns, Row, read_field_runs

ROWS = (line("g", "full_gpu", "decode_tok_s", "0", "100"), line("h", "gpu_cpu_experts", "decode_tok_s", "0", "40", cpu="24"),
        line("c", "cpu_only", "decode_tok_s", "0", "25"), line("p", "gpu_cpu_experts", "prefill_tok_s", "0", "900", cpu="24"))  # fmt: skip


def runs(path: Path, machines: str = MACHINES, models: str = MODELS, rows: tuple[str, ...] = ROWS) -> FieldRuns:
    folder(path, *rows)
    (path / "machines.yaml").write_text(machines)
    (path / "models.yaml").write_text(models)
    return read_field_runs(path)


def predicted(data: FieldRuns) -> dict[str, float]:
    return {p.case.row.row_id: p.predicted for p in backtest(data).predictions}


def skipped(data: FieldRuns) -> dict[str, str]:
    return {s.row.row_id: s.reason for s in backtest(data).skipped}


def test_an_unknown_card_runs_by_its_bandwidth(tmp_path: Path) -> None:
    known = predicted(runs(tmp_path))
    bare = MACHINES.replace("name: {v: RTX 3090}", "name: {v: Accelerator X9}").replace("fp16_tflops: {v: 142}", "fp16_tflops: {v: null}")
    data = runs(tmp_path, bare.replace("pcie_gen: {v: 4}, pcie_lanes: {v: 16}", "pcie_gen: {v: null}, pcie_lanes: {v: null}"))
    found = predicted(data)
    assert set(found) == set(known) and all(0.4 < found[row] / known[row] < 1.6 for row in ("g", "h", "c"))
    assert "GPU arithmetic from its bandwidth" in backtest(data).predictions[0].case.assumed


def test_what_rests_on_a_missing_bandwidth_is_skipped_and_the_rest_is_not(tmp_path: Path) -> None:
    no_card = runs(tmp_path, MACHINES.replace("mem_bw_gb_s: {v: 936}", "mem_bw_gb_s: {v: null}"))
    assert set(predicted(no_card)) == {"c"} and skipped(no_card)["g"] == "GPU not stated"
    memory = "mt_s: {v: 6000}, channels: {v: 2}, peak_bw_gb_s: {v: 96}"
    usual = runs(tmp_path, MACHINES.replace(memory, "mt_s: {v: null}, channels: {v: null}, peak_bw_gb_s: {v: null}"))
    assert set(predicted(usual)) == {"g", "h", "c", "p"}  # the processor's name settles it, and the report says so
    assert "2 memory channels" in backtest(usual).predictions[0].case.assumed
    unknown = MACHINES.replace(memory, "mt_s: {v: null}, channels: {v: null}, peak_bw_gb_s: {v: null}").replace(
        "Ryzen 9 7950X", "Processor Y"
    )
    assert skipped(runs(tmp_path, unknown))["h"] == "bandwidth of main memory not stated"


def test_a_new_model_needs_its_dimensions_and_no_counts(tmp_path: Path) -> None:
    known = predicted(runs(tmp_path))
    assert predicted(runs(tmp_path, models=MODELS.replace("  params: {params_total_b: 30.5319}\n", ""))) == pytest.approx(known)
    lacking = runs(tmp_path, models=MODELS.replace("  expert_intermediate_size: 768\n", "") + MODELS.replace("tiny:", "other:"),
                   rows=(*ROWS, line("o", "full_gpu", "decode_tok_s", "0", "100", model="other")))  # fmt: skip
    assert set(predicted(lacking)) == {"o"} and "expert_intermediate_size" in skipped(lacking)["g"]


def test_a_new_engine_runs_as_the_commonest_one(tmp_path: Path) -> None:
    known = predicted(runs(tmp_path))
    rows = tuple(row.replace("llama.cpp,llama.cpp", "nextgen 12.0,nextgen").replace("2026-01", "2031-05") for row in ROWS)
    data = runs(tmp_path, rows=rows)
    assert predicted(data) == pytest.approx(known)
    assert "nextgen executes as llama.cpp does" in backtest(data).predictions[0].case.assumed


def test_any_cell_may_be_empty_or_odd(tmp_path: Path) -> None:
    data = runs(tmp_path, rows=(*ROWS, line("z", "full_gpu", "decode_tok_s", "0", "100")))
    names = next(csv.reader((tmp_path / "runs.csv").read_text().splitlines()))
    numbers = {
        "bits_per_weight",
        "moe_layers_on_cpu",
        "threads",
        "flash_attn",
        "n_ubatch",
        "depth_n_kv",
        "prompt_tokens",
        "gen_tokens",
        "concurrency",
    }
    for name in names:
        if name in ("row_id", "metric", "value"):
            continue
        for value in ("", "0") if name in numbers else ("", "0", "odd"):
            changed = tuple(Row({**row.cells, name: value}, row.where) for row in data.runs[:-1])
            run = backtest(replace(data, runs=(*changed, data.runs[-1])))
            assert len(run.predictions) + len(run.skipped) == len(data.runs)
            assert all(p.predicted > 0 for p in run.predictions) and all(s.reason for s in run.skipped)
