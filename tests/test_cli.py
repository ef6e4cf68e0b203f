"""The command line: answers on stdout, everything else on stderr, exit codes, equal bytes for equal inputs, a fast start."""

from __future__ import annotations

import csv
import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, small_result, write_scenario

from moesim import __version__, frames, report
from moesim.cli import main as frame
from moesim.cli.main import COMMANDS, run
from moesim.errors import MoesimError
from moesim.report import budget as report_budget
from moesim.simulate import load_case

METRICS = {
    "ttft_ms", "tpot_ms", "itl_ms", "decode_tok_s", "prefill_tok_s", "output_throughput_tok_s", "overlap_coverage", "io_wait_ms_per_token",
    "exposed_io_ms_per_token", "expert_hit_rate", "cache_hit_rate", "accesses",
}  # fmt: skip
DOES_NOT_FIT = ("--set", "hardware_set.tiers.vram.capacity.value=515 MiB")


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = run(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    return write_scenario(tmp_path)


def test_run_answers_in_one_screen(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "run", scenario)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    words = "fits, tokens/s, TTFT, TPOT, p99, overlap, miss, pcie_h2d, wasted, lanes busy, critical path, waits for the SSD"
    for word in (*words.split(", "), "not measured", "generated: uniform", "simulated in"):
        assert word in out, word


def test_run_json_is_the_contract(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "run", scenario, "-o", "json")
    data = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert code == 0 and "tokens/s" in err
    assert set(data) == {"provenance", "memory", "oom", "metrics", "transfers", "lanes", "critical_path", "energy", "quality"}
    assert {"joules", "joules_per_token", "joules_per_request", "average_w", "peak_w", "battery_hours", "basis", "reason"} <= set(
        data["energy"]
    )
    assert METRICS <= set(data["metrics"])
    assert set(data["metrics"]["itl_ms"]) == {"mean", "median", "p95", "p99"}
    assert {"capacity_bytes", "planned_bytes", "peak_bytes", "lines"} <= set(data["memory"]["vram"])
    assert {"bytes", "demand_bytes", "prefetch_useful_bytes", "prefetch_wasted_bytes", "busy_s"} == set(data["transfers"]["ssd"])
    assert {"busy_s", "utilisation"} == set(data["lanes"]["gpu"])
    assert sum(row["share"] for row in data["critical_path"]) == pytest.approx(1.0)
    assert data["oom"] is None


@pytest.mark.parametrize("output", ["json", "csv", "md"])
def test_equal_inputs_give_equal_bytes(scenario: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = call(capsys, "run", scenario, "-o", output)[1]
    assert call(capsys, "run", scenario, "-o", output)[1] == first


def test_seed_and_derate_are_assignments(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    short = call(capsys, "run", scenario, "-o", "json", "--seed", "7", "--derate", "0.5")[1]
    assert short == call(capsys, "run", scenario, "-o", "json", "--set", "seed=7", "--set", "derate=0.5")[1]
    assert json.loads(short)["provenance"]["seed"] == 7
    full = json.loads(call(capsys, "run", scenario, "-o", "json", "--seed", "7")[1])
    assert json.loads(short)["metrics"]["decode_tok_s"] < full["metrics"]["decode_tok_s"]


def test_run_csv_is_flat_and_says_the_same(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(call(capsys, "run", scenario, "-o", "csv")[1])))
    data = json.loads(call(capsys, "run", scenario, "-o", "json")[1])
    found = {row["metric"]: row for row in rows}
    assert len(found) == len(rows) and list(rows[0]) == ["metric", "value", "unit"]
    assert float(found["metrics.itl_ms.p99"]["value"]) == data["metrics"]["itl_ms"]["p99"]
    assert found["metrics.itl_ms.p99"]["unit"] == "ms"
    assert found["memory.vram.capacity_bytes"]["unit"] == "B"
    assert found["metrics.decode_tok_s"]["unit"] == "tok/s"
    assert found["metrics.io_wait_ms_per_token"]["unit"] == "ms/token"
    assert found["metrics.expert_hit_rate"]["unit"] == ""


def test_run_markdown_has_tables(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = call(capsys, "run", scenario, "-o", "md")[1]
    assert out.startswith("# tinymoe on laptop-8gb: fits") and "| lane and kind | share |" in out and "- assumed: " in out


def test_timeline_and_plot(scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline, plot = tmp_path / "run.json", tmp_path / "run.png"
    assert call(capsys, "run", scenario, "--timeline", str(timeline), "--plot", str(plot))[0] == 0
    assert json.loads(timeline.read_text())["traceEvents"]
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000


def test_out_of_memory_before_the_first_step(scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "run", scenario, *DOES_NOT_FIT, "--plot", str(tmp_path / "x.png"))
    assert code == 3
    assert "does not fit. Out of memory in vram before the first step" in out and "no context fits" in out
    assert "nothing to plot" in err and "Traceback" not in err
    code, out, _ = call(capsys, "run", scenario, *DOES_NOT_FIT, "-o", "json")
    data = json.loads(out)
    assert code == 3 and data["metrics"] is None and data["oom"]["tier"] == "vram" and data["oom"]["step"] == -1


def test_out_of_memory_on_the_way(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "run", scenario, "--set", "memory={kv: maximum, context_tokens: 10}")
    assert code == 3
    assert "Out of memory in vram at step 3: KV cache needs" in out and "largest context that fits" in out and "critical path" in out
    assert len(out.splitlines()) <= 40


def test_budget(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "budget", scenario, "--set", "trace={source: not-there.npz}")
    assert (code, err) == (0, "")
    assert "routed experts" in out and "fits; largest context that fits" in out
    data = json.loads(call(capsys, "budget", scenario, "-o", "json")[1])
    assert data["fits"] is True and data["max_context_tokens"] > 1000
    assert data["tiers"]["vram"]["planned_bytes"] == sum(line["bytes"] for line in data["tiers"]["vram"]["lines"])
    run_data = json.loads(call(capsys, "run", scenario, "-o", "json")[1])
    assert data["tiers"]["vram"]["lines"] == run_data["memory"]["vram"]["lines"]


def test_budget_compares_plans(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    plans = ("--precision", "fp16", "--precision", "{default: int8, routed_experts: int4-g32}")
    code, out, _ = call(capsys, "budget", scenario, *plans)
    assert code == 0 and "plan 2: {default: int8, routed_experts: int4-g32}" in out
    data = json.loads(call(capsys, "budget", scenario, *plans, "-o", "json")[1])
    sizes = [plan["tiers"]["vram"]["planned_bytes"] for plan in data["plans"]]
    assert len(sizes) == 2 and sizes[0] > sizes[1]
    assert data["plans"][0]["precision"] == "fp16" and data["tiers"] == data["plans"][0]["tiers"]
    flat = call(capsys, "budget", scenario, *plans, "-o", "csv")[1]
    assert "plans.fp16.tiers.vram.planned_bytes" in flat
    assert "| vram | fp16 |" in call(capsys, "budget", scenario, *plans, "-o", "md")[1]


def test_budget_check_is_a_gate(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "budget", scenario, "--check")[0] == 0
    code, out, err = call(capsys, "budget", scenario, "--check", *DOES_NOT_FIT)
    assert code == 3 and "does not fit" in out
    assert err.startswith('error: vram does not fit: the line "') and len(err.splitlines()) == 1
    assert call(capsys, "budget", scenario, *DOES_NOT_FIT)[0] == 0


@pytest.mark.parametrize(("command", "name"), [("models", "tinymoe"), ("hardware", "ref-16gb"), ("scenarios", "ref-23b-plan-c")])
def test_lists(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, command)
    assert (code, err) == (0, "") and any(line.split()[0] == name for line in out.splitlines())
    rows = json.loads(call(capsys, command, "-o", "json")[1])
    assert name in [row["name"] for row in rows] and all(row["description"] for row in rows)


def test_trace_info(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(shared / "traces" / "switch_base_8_encoder.npz")
    code, out, _ = call(capsys, "trace", "info", path)
    assert code == 0 and "busier half of the experts" in out and max(map(len, out.splitlines())) <= 100
    data = json.loads(call(capsys, "trace", "info", path, "-o", "json")[1])
    oracle = json.loads((shared / "traces" / "oracle_shared.json").read_text())["traces"]["switch_base_8_encoder.npz"]
    assert set(data["all"]) == set(oracle["all"])
    assert data["all"]["cache"]["0.5"]["lru"]["hits"] == oracle["all"]["cache"]["0.5"]["lru"]["hits"]


def test_help_is_one_screen_and_true(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0 and "Example: moesim run" in out and len(out.splitlines()) <= 40
    for name, (module, line) in COMMANDS.items():
        code, text, _ = call(capsys, name, "--help")
        assert code == 0 and len(text.splitlines()) <= 40 and line.split(",")[0] in " ".join(text.split())
        assert importlib.import_module(module).app is not None


def test_version_and_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"moesim {__version__}\n", "")
    code, out, err = call(capsys)
    assert code == 2 and out == "" and "Usage: moesim" in err


@pytest.mark.parametrize("error", [ValueError("oh\nno"), MoesimError("deadlock")])
def test_a_bug_is_called_one(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(**_: Any) -> None:
        raise error

    monkeypatch.setattr(frame, "app", broken)
    monkeypatch.delenv("MOESIM_DEBUG", raising=False)
    code, out, err = call(capsys, "run", "x")
    assert code == 1 and out == "" and err.startswith("error: internal: ") and "bug" in err and len(err.splitlines()) == 1
    monkeypatch.setenv("MOESIM_DEBUG", "1")
    assert "Traceback" in call(capsys, "run", "x")[2]


def test_a_reader_that_leaves_gets_no_traceback(scenario: str) -> None:
    for command in (["run", scenario, "-o", "json"], ["models"]):
        program = subprocess.Popen([sys.executable, "-m", "moesim", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert program.stdout is not None and program.stderr is not None
        program.stdout.close()
        err = program.stderr.read()
        program.stderr.close()
        assert program.wait() == 141 and "Traceback" not in err and "Exception ignored" not in err


def test_the_start_is_fast_and_light() -> None:
    """CPU seconds, best of three: a busy test machine does not slow them down as it does the clock."""
    heavy = "[m for m in ('numpy', 'pydantic', 'matplotlib') if m in sys.modules]"
    code = f"import sys, time; from moesim.cli.main import run; run(['--help']); print({heavy}); print(time.process_time())"
    spent = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        modules, seconds = done.stdout.splitlines()[-2:]
        assert modules == "[]"
        spent.append(float(seconds))
    assert min(spent) < 0.5


def test_a_run_imports_no_heavy_module(scenario: str) -> None:
    heavy = "[m for m in ('torch', 'numba', 'matplotlib', 'pandas') if m in sys.modules]"
    code = f"import sys; from moesim.cli.main import run; run(['run', {scenario!r}]); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_frames_hold_what_json_holds() -> None:
    result = small_result()
    data, tables = result.as_dict(), frames.frames(result)
    assert list(tables) == list(frames.COLUMNS)
    assert tables["transfers"].set_index("channel").loc["ssd", "bytes"] == data["transfers"]["ssd"]["bytes"]
    assert tables["memory"]["bytes"].sum() == sum(tier["planned_bytes"] for tier in data["memory"].values())
    assert tables["steps"]["latency_ms"].iloc[1:].mean() == pytest.approx(data["metrics"]["itl_ms"]["mean"])
    assert tables["steps"]["end_s"].iloc[-1] == pytest.approx(
        data["metrics"]["tpot_ms"]["mean"] * 5e-3 + data["metrics"]["ttft_ms"]["mean"] * 1e-3
    )


def test_context_in_words() -> None:
    assert report.context_text(-1, 8, None).startswith("no context fits")
    assert report.context_text(report.NO_LIMIT, 8, None).startswith("the context does not limit")
    assert (
        report.context_text(9000, 8, 100)
        == "largest context that fits: 9,000 tokens (planned: 8); the stated KV allowance lasts for 100 tokens"
    )


def test_the_plan_goes_under_its_own_name(tmp_path: Path) -> None:
    text = SMALL.replace("precision: fp16", "precision: {default: int8, kv: fp16}")
    assert report_budget.plan_name(load_case(write_scenario(tmp_path, text))) == "{default: int8, kv: fp16}"


def test_a_cache_without_room_is_out_of_memory_not_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """``hold: fit`` where nothing is left: the ledger says what is missing (claim M8), and the gate trips."""
    small = ("--set", "hardware_set.tiers.unified.capacity=8 GB")
    code, _, err = call(capsys, "budget", "quickstart", "--check", *small)
    assert code == 3 and "unified does not fit" in err
    code, out, _ = call(capsys, "run", "quickstart", *small)
    assert code == 3 and "Out of memory in unified before the first step" in out
