"""A folder of measured runs, predicted: nothing dropped, nothing of the host used cold, one row used warm, closed forms beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moesim.backtest import DECODE, Backtest, Score, backtest, depth_of, rank_correlation, score, slopes
from moesim.backtest.data import Lacking, read_field_runs
from moesim.backtest.machine import machine_of
from moesim.backtest.memory import predict_memory
from moesim.backtest.model import model_of
from moesim.backtest.precision import plan_of, recipe_of
from moesim.backtest.run import FieldCases, effective_cores
from moesim.errors import InputError
from moesim.runtimes import attained_file, held_out, load_rates, load_runtimes, runtime_of

SHARED = Path(__file__).resolve().parents[2] / "shared" / "field_runs"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the public measured runs are not beside this checkout")

MACHINES = """
box:
  host_group: box
  unified: false
  gpus:
  - {name: {v: RTX 3090}, count: {v: 1}, vram_gib: {v: 24}, mem_bw_gb_s: {v: 936}, fp16_tflops: {v: 142}, pcie_gen: {v: 4}, pcie_lanes: {v: 16}}
  cpu: {name: {v: Ryzen 9 7950X}, sockets: {v: 1}, cores: {v: 16}, simd: {v: avx512}}
  ram: {gib: {v: 64}, type: {v: DDR5}, mt_s: {v: 6000}, channels: {v: 2}, peak_bw_gb_s: {v: 96}, measured_bw_gb_s: {v: null}}
  ssd: {name: {v: null}, seq_read_gb_s: {v: null}}
bare:
  host_group: bare
  gpus: []
  cpu: {name: {v: null}, cores: {v: null}}
  ram: {gib: {v: null}, peak_bw_gb_s: {v: null}}
"""
MODELS = """
tiny:
  arch: qwen3_moe
  n_layers: 48
  n_moe_layers: 48
  hidden_size: 2048
  n_experts: 128
  top_k: 8
  expert_intermediate_size: 768
  n_heads: 32
  n_kv_heads: 4
  head_dim: 128
  vocab: 151936
  tied_embeddings: false
  params: {params_total_b: 30.5319}
"""
HEAD = ("row_id,run_id,source,date,model,quant,bits_per_weight,engine,engine_family,machine,offload_kind,moe_layers_on_cpu,threads,kv_type,flash_attn,n_ubatch,depth_n_kv,"
        "prompt_tokens,gen_tokens,concurrency,flags,metric,value")  # fmt: skip


def line(
    row: str,
    placement: str,
    metric: str,
    depth: str,
    value: str,
    *,
    machine: str = "box",
    model: str = "tiny",
    bits: str = "4.85",
    cpu: str = "",
) -> str:
    prompt, answer = ("512", "") if metric == "prefill_tok_s" else ("", "32")
    return f"{row},run-{placement},x,2026-01,{model},Q4_K_M,{bits},llama.cpp,llama.cpp,{machine},{placement},{cpu},16,f16,1,512,{depth},{prompt},{answer},1,ngl=99,{metric},{value}"


def folder(path: Path, *lines: str) -> Path:
    (path / "machines.yaml").write_text(MACHINES)
    (path / "models.yaml").write_text(MODELS)
    (path / "runs.csv").write_text("\n".join([HEAD, *lines]) + "\n")
    return path


def test_every_row_is_predicted_or_skipped_with_a_reason(tmp_path: Path) -> None:
    run = backtest(read_field_runs(folder(
        tmp_path, line("a", "full_gpu", "decode_tok_s", "0", "150"), line("b", "cpu_only", "decode_tok_s", "0", "30"),
        line("c", "cpu_only", "decode_tok_s", "0", "30", machine="bare"), line("d", "full_gpu", "decode_tok_s", "0", "30", model="unknown"),
        line("e", "full_gpu", "decode_tok_s", "0", "30", bits=""), line("f", "gpu_cpu_experts", "decode_tok_s", "0", "30"),
        line("g", "gpu_cpu_experts", "prefill_tok_s", "0", "900", cpu="24"), line("h", "gpu_pcie_cached", "decode_tok_s", "0", "9"))))  # fmt: skip
    assert [p.case.row.row_id for p in run.predictions] == ["a", "b", "g"]
    assert {s.row.row_id: s.reason for s in run.skipped} == {
        "c": "no memory bandwidth stated", "d": "model has no record", "e": "bits per weight not stated", "f": "layers on the CPU not stated",
        "h": "placement gpu_pcie_cached is not modelled"}  # fmt: skip


def test_prediction_is_between_the_roofline_and_a_tenth_of_it(tmp_path: Path) -> None:
    run = backtest(
        read_field_runs(
            folder(tmp_path, line("a", "full_gpu", "decode_tok_s", "0", "150"), line("b", "cpu_only", "decode_tok_s", "0", "30"))
        )
    )
    for p, bandwidth in zip(run.predictions, (936e9, 96e9), strict=True):
        model, plan = p.case.model, p.case.layout.plan
        weights = (
            model.weight_bytes(plan)
            - model.part_bytes(plan, "routed_experts") * (1 - model.top_k / model.n_experts)
            - model.part_bytes(plan, "embeddings")
        )
        assert 0.1 * bandwidth / weights < p.predicted < bandwidth / weights


def test_deeper_and_more_on_the_cpu_is_slower(tmp_path: Path) -> None:
    lines = [line(f"d{d}", "cpu_only", "decode_tok_s", str(d), "20") for d in (0, 4096, 16384)]
    lines += [line(f"c{n}", "gpu_cpu_experts", "decode_tok_s", "0", "20", cpu=str(n)) for n in (0, 12, 48)]
    speeds = [p.predicted for p in backtest(read_field_runs(folder(tmp_path, *lines))).predictions]
    assert speeds[0] > speeds[1] > speeds[2] and speeds[3] > speeds[4] > speeds[5]


def test_warm_uses_one_row_per_host_and_engine_and_does_not_score_it(tmp_path: Path) -> None:
    rows = [line("p", "full_gpu", "prefill_tok_s", "0", "3000"), line("b", "full_gpu", "decode_tok_s", "4096", "50"),
            line("a", "full_gpu", "decode_tok_s", "0", "60"), line("c", "full_gpu", "decode_tok_s", "8192", "45")]  # fmt: skip
    data = read_field_runs(folder(tmp_path, *rows))
    cold, warm = backtest(data), backtest(data, warm=True)
    assert [p.case.row.row_id for p in warm.predictions if p.calibrates] == ["a"]
    assert [p.case.row.row_id for p in warm.scored] == ["p", "b", "c"]
    by_id = {p.case.row.row_id: p for p in cold.predictions}
    off = by_id["a"].log_error  # all of it on the GPU, so half of it is the GPU's and half the row's, within two spreads
    limit = 2 * load_rates("")["deviation"] * 2**0.5
    factor = np.exp(-min(max(off, -limit), limit) / 2)
    for p in warm.scored:
        expected = by_id[p.case.row.row_id].predicted * (1.0 if p.case.mode == "prefill" else factor)
        assert p.predicted == pytest.approx(expected)


def test_warm_corrects_the_device_that_the_measured_row_used(tmp_path: Path) -> None:
    lines = [line("a", "cpu_only", "decode_tok_s", "0", "20"), line("b", "full_gpu", "decode_tok_s", "0", "100"),
             line("c", "gpu_cpu_experts", "decode_tok_s", "0", "40", cpu="48")]  # fmt: skip
    data = read_field_runs(folder(tmp_path, *lines))
    cold, warm = ({p.case.row.row_id: p for p in backtest(data, warm=w).predictions} for w in (False, True))
    assert warm["b"].parts == cold["b"].parts  # the GPU was not measured
    ratio = {name: warm["c"].parts[name] / seconds for name, seconds in cold["c"].parts.items()}
    assert ratio["CPU experts"] == ratio["hand-over"] != 1.0 and ratio["projections"] == 1.0


def test_rates_fitted_without_a_host_are_used_for_it() -> None:
    for host, rates in held_out().items():
        assert load_rates(host).values == load_rates("").values | rates
    assert load_rates("a new machine").values == {name: rate.value for name, rate in attained_file().rates.items()}


def test_fitted_rates_number_at_most_25_and_each_says_what_it_means() -> None:
    rates = attained_file().rates
    assert sum(rate.basis == "fitted" for rate in rates.values()) <= 25
    assert all(rate.meaning and rate.source for rate in rates.values())
    assert {"llama.cpp", "ik_llama.cpp", "ktransformers", "vllm", "mlx"} <= {r.name for r in load_runtimes()}
    with pytest.raises(InputError, match="known engine"):
        runtime_of("lama.cpp")


def test_the_mix_of_formats_gives_the_size_of_the_file(tmp_path: Path) -> None:
    model = model_of(read_field_runs(folder(tmp_path, line("a", "full_gpu", "decode_tok_s", "0", "1"))).models["tiny"])
    for quant, bits in (("Q4_K_M", 4.85), ("Q8_0", 8.51), ("UD-Q2_K_XL", 2.9), ("mix-IQ3_K", 3.9), ("a new format", 5.2)):
        plan = plan_of(model, quant, bits, "fp16")
        assert model.weight_bytes(plan) * 8 / model.params_total == pytest.approx(bits, rel=0.01)
    assert recipe_of("custom IQ4_XS experts + Q5_K attn + Q6_K output", 4.3).dense == "Q5_K"
    with pytest.raises(InputError, match="room for routed experts"):
        plan_of(model, "Q8_0", 1.0, "fp16")


def test_scores_and_slopes(tmp_path: Path) -> None:
    found = score([(110.0, 100.0, "a"), (90.0, 100.0, "a"), (150.0, 100.0, "b")])
    assert found.median_ape == pytest.approx(0.1) and found.within_20 == pytest.approx(2 / 3)
    assert found.machine_mean == pytest.approx((0.1 + 0.5) / 2)
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0])) == pytest.approx(1.0)
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([9.0, 4.0, 1.0])) == pytest.approx(-1.0)
    lines = [line(f"d{d}", "full_gpu", "decode_tok_s", str(d), f"{1000 / (10 + d / 1000):.6f}") for d in (0, 4000, 8000)]
    (slope,) = slopes(backtest(read_field_runs(folder(tmp_path, *lines))).scored, "depth", depth_of, 3)
    assert slope.measured == pytest.approx(1e-6, rel=1e-3)


def test_an_unreadable_folder_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="runs.csv"):
        read_field_runs(tmp_path / "nowhere")
    folder(tmp_path)
    (tmp_path / "machines.yaml").write_text("box: {")
    with pytest.raises(InputError, match=r"machines.yaml:1.*YAML"):
        read_field_runs(tmp_path)
    (tmp_path / "runs.csv").write_text("row_id\n1\n")
    with pytest.raises(InputError, match="columns"):
        read_field_runs(tmp_path)


def test_engines_differ_where_their_rules_say(tmp_path: Path) -> None:
    lines = [
        line(row, "full_gpu", "decode_tok_s", "16384", "50").replace(",f16,1,512,", f",{kv},1,512,")
        for row, kv in (("a", "q8_0"), ("b", "q5_1"))
    ]
    a, b = backtest(read_field_runs(folder(tmp_path, *lines))).predictions
    assert b.parts["attention"] > 5 * a.parts["attention"]  # no kernel for q5_1 in default builds: the CPU computes it
    assert (
        effective_cores(16, 16) == 16 and effective_cores(24, 16) == 12 and effective_cores(8, None) == 8 and effective_cores(None, 6) == 6
    )


def test_memory_takes_settings_from_the_speeds_of_the_same_run(tmp_path: Path) -> None:
    where = folder(tmp_path, line("a", "full_gpu", "prefill_tok_s", "0", "3000").replace(",1,512,0,", ",1,1024,0,"))
    head = "row_id,run_id,model,quant,bits_per_weight,engine,machine,offload_kind,ctx_size,metric,value"
    rows = [
        f"{n},{run},tiny,Q4_K_M,4.85,llama.cpp,box,full_gpu,4096,gpu_compute_mib,1" for n, run in (("m", "run-full_gpu"), ("n", "other"))
    ]
    (where / "memory.csv").write_text("\n".join([head, *rows]) + "\n")
    m, n = predict_memory(read_field_runs(where))
    assert m.predicted == pytest.approx(2 * (n.predicted or 0))  # a micro-batch of 1024 against the engine's default of 512


def test_machine_facts(tmp_path: Path) -> None:
    data = read_field_runs(folder(tmp_path, line("a", "full_gpu", "decode_tok_s", "0", "1")))
    box = machine_of(data.machines["box"])
    assert (box.platform, box.ram_bytes_per_s, box.gpu_bytes_per_s, box.pcie_bytes_per_s) == (
        "desktop",
        96e9,
        936e9,
        pytest.approx(31.5e9, rel=1e-3),
    )
    with pytest.raises(Lacking, match="bandwidth"):
        FieldCases(data).machine("bare")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moesim.cli.main import run

    where = folder(tmp_path, line("a", "full_gpu", "decode_tok_s", "0", "150"), line("b", "full_gpu", "decode_tok_s", "8192", "90"))
    assert run(["backtest", str(where), "-o", "json", "--plot", str(tmp_path / "p.png")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"groups", "baselines", "rows", "slopes", "memory", "skipped", "overall"} <= set(data)
    group = data["groups"][0]
    assert {
        "placement",
        "mode",
        "depth_range",
        "n",
        "n_skipped",
        "median_ape",
        "mean_ape",
        "within_20",
        "bias",
        "rank_corr",
        "interval_coverage",
    } <= set(group)
    assert (tmp_path / "p.png").stat().st_size > 1000
    for form in ("text", "md", "csv"):
        assert run(["backtest", str(where), "--warm", "-o", form]) == 0
        assert "full_gpu" in capsys.readouterr().out
    assert run(["backtest", str(tmp_path / "nowhere")]) == 2


LIMITS = {"full_gpu": 0.12, "gpu_cpu_experts": 0.22, "cpu_only": 0.25}
WARM_LIMIT = 0.10
OVER_MACHINES = 1.3  # of the limit: the mean over machines of each machine's median


def decode_score(run: Backtest, placement: str) -> Score:
    rows = [p for p in run.scored if p.case.placement == placement and p.case.mode in DECODE]
    return score([(p.predicted, p.measured, p.case.machine.name) for p in rows])


@needs_shared
def test_public_runs_cold_and_memory() -> None:
    data = read_field_runs(SHARED)
    run = backtest(data)
    assert len(run.predictions) + len(run.skipped) == len(data.runs)
    assert set(held_out()) == {p.case.machine.host for p in run.predictions}
    for placement, limit in LIMITS.items():
        found = decode_score(run, placement)
        assert (found.median_ape or 1) <= limit and (found.machine_mean or 1) <= OVER_MACHINES * limit, (placement, found)
    rows = [p for p in run.scored if p.case.mode in DECODE]
    assert np.median([s.error for s in slopes(rows, "depth", depth_of, 3)]) <= 0.15
    errors = [abs(m.error) for m in predict_memory(data) if m.error is not None and m.row.text("metric").endswith("_mib")]
    assert np.median(errors) < 0.03 and np.quantile(errors, 0.9) < 0.1


@needs_shared
def test_public_runs_warm() -> None:
    run = backtest(read_field_runs(SHARED), warm=True)
    for placement in LIMITS:
        found = decode_score(run, placement)
        assert (found.median_ape or 1) <= WARM_LIMIT and (found.machine_mean or 1) <= OVER_MACHINES * WARM_LIMIT, (placement, found)
