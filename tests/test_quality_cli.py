"""moesim quality: plans by name and file, resumed runs, every output, pictures; the search; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="moesim quality runs real models: pip install 'moesim[quality]'")
pytest.importorskip("transformers", reason="the model of these tests is one of transformers: pip install 'moesim[quality]'")

from test_quality import folder_of  # noqa: E402

from moesim.cli.main import app, run  # noqa: E402
from moesim.precision import plan_from  # noqa: E402
from moesim.report import quality as report  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and texts of two domains, held out and to calibrate."""
    folder = tmp_path_factory.mktemp("quality")
    folder_of("Mixtral", folder)
    rng = np.random.default_rng(0)
    for name in ("prose", "code", "prose-cal", "code-cal"):
        lines = [json.dumps({"token_ids": rng.integers(2, 96, 40).tolist()}) for _ in range(3)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def texts(place: Path) -> list[str]:
    held = [f"--text={place / name}.jsonl" for name in ("prose", "code")]
    return [*held, *(f"--calibration={place / name}-cal.jsonl" for name in ("prose", "code"))]


def call(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["quality", *words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def evaluated(place: Path, *more: str) -> str:
    plans = ["--plan", "int8", "--plan", "int2", "--plan", "{default: int4-g64, attention: fp16}", "--sensitivity", "int2"]
    return call(str(place / "Mixtral"), *plans, *texts(place), "--store", str(place / "store"), *more)


def test_every_output_says_the_same(place: Path) -> None:
    data = json.loads(evaluated(place, "-o", "json"))
    assert [p["name"] for p in data["plans"]] == ["int8", "int2", "{default: int4-g64, attention: fp16}"]
    assert all(p["stored_bytes"] == p["ledger_bytes"] for p in data["plans"])
    assert data["provenance"]["unit"] == "bits per token" and data["provenance"]["held_out"]["documents"] == 6
    assert set(data["reference"]["bits_by_domain"]) == {"prose", "code"}
    units = {u["unit"] for u in data["sensitivity"]["units"]}
    assert {"layer 0", "layer 1", "attention", "routed_experts"} <= units
    int2 = data["plans"][1]
    assert int2["loss_percent"]["low"] <= int2["loss_percent"]["value"] <= int2["loss_percent"]["high"]
    assert 0 <= int2["router_agreement"] < data["plans"][0]["router_agreement"] <= 1
    assert data["position"]["ends"] == [16, 32] and data["dequantisation"][0]["format"] == "bf16"
    for output in ("text", "md", "csv"):
        said = evaluated(place, "-o", output)
        assert f"{int2['stored_bytes']:,}" in said or str(int2["stored_bytes"]) in said
    assert evaluated(place, "-o", "md").startswith(report.headline(data))


def test_a_second_run_measures_nothing_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = json.loads(evaluated(place, "-o", "json"))
    import importlib

    module = importlib.import_module("moesim.quality.study")
    monkeypatch.setattr(module, "evaluate", lambda *_a, **_k: pytest.fail("measured again"))
    second = json.loads(evaluated(place, "-o", "json"))
    for data in (first, second):
        data.pop("dequantisation"), data.pop("claims")  # timed anew
    assert first == second


def test_saved_plans_are_what_scenarios_take(place: Path, tmp_path: Path) -> None:
    call(
        str(place / "Mixtral"),
        "--plan",
        "int8",
        *texts(place),
        "--store",
        str(place / "store"),
        "--sensitivity",
        "int2",
        "--save",
        str(tmp_path),
    )
    plan = plan_from(str(tmp_path / "int8.yaml"))
    known = plan.known_quality("Mixtral")
    assert known is not None and known.basis == "measured" and abs(known.loss_percent) < 5
    assert (tmp_path / "int8.safetensors").is_file()
    scenario = {
        "model": str(place / "Mixtral"), "precision": str(tmp_path / "int8.yaml"), "hardware": "laptop-8gb", "trace": {"generate": "uniform"},
        "workload": {"output_tokens": 4},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "run.yaml"), "-o", "json"])
    data = json.loads(done.stdout)
    assert data["quality"]["basis"] == "measured" and data["quality"]["loss_percent"] == known.loss_percent


def test_pictures(place: Path, tmp_path: Path) -> None:
    evaluated(place, "--plot", str(tmp_path / "q.png"))
    assert (tmp_path / "q.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("goal", [["--budget", "60 KB"], ["--min-quality", "20 %"]])
def test_a_search_ends_in_a_plan(place: Path, tmp_path: Path, goal: list[str]) -> None:
    out = tmp_path / "plan.yaml"
    words = [str(place / "Mixtral"), *goal, *texts(place), "--store", str(place / "store"), "--out", str(out)]
    data = json.loads(call("search", *words, "-o", "json"))
    assert {p["name"] for p in data["plans"]} >= {"search", "reverse ranking"}
    best = data["plans"][0]
    if goal[0] == "--budget":
        assert best["stored_bytes"] <= 60_000
    else:
        assert best["choosing_percent"] <= 20
    assert all(p["stored_bytes"] <= max(best["stored_bytes"], 60_000) for p in data["plans"])
    plan = plan_from(str(out))
    assert plan.quality is not None and plan.quality.plan_hash == plan.hash
    text = call("search", *words)
    assert "default:" in text and "held-out" in text and "```yaml" in call("search", *words, "-o", "md")


def test_a_search_for_speed_needs_a_machine(place: Path) -> None:
    words = ["search", str(place / "Mixtral"), *texts(place), "--store", str(place / "store")]
    call(*words, "--budget", "10 tok/s", code=1)
    assert run(["quality", *words, "--budget", "10 tok/s"]) == 2


def test_a_search_for_speed(place: Path, tmp_path: Path) -> None:
    scenario = {
        "model": str(place / "Mixtral"), "hardware": "laptop-8gb", "trace": {"generate": "uniform"}, "workload": {"output_tokens": 4},
    }  # fmt: skip
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    words = ["search", str(place / "Mixtral"), *texts(place), "--store", str(place / "store"), "--scenario", str(tmp_path / "s.yaml")]
    data = json.loads(call(*words, "--budget", "1 tok/s", "-o", "json"))
    assert data["plans"][0]["plan"]["default"] == "fp16"  # fast enough as it is
    assert run(["quality", *words, "--budget", "90000000 tok/s"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{model}"], "--text and --calibration"),
        (["{model}", "--text", "{text}", "--calibration", "{text}"], "held-out text must be held out"),
        (["tinymoe", "--plan", "int5"], "did you mean"),
        (["nowhere", "--text", "{text}", "--calibration", "{cal}"], "config.json"),
        (["search", "tinymoe"], "one of --budget and --min-quality"),
        (["search", "tinymoe", "--budget", "3 apples"], "size"),
        (["search", "tinymoe", "--min-quality", "much"], "a number with its unit"),
        (["tinymoe", "--plot", "q.pdf"], ".png"),
    ],
)
def test_what_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"model": place / "Mixtral", "text": place / "prose.jsonl", "cal": place / "code-cal.jsonl"}
    assert run(["quality", *(word.format(**named) if word.startswith("{") else word for word in words)]) == 2
    assert message in capsys.readouterr().err
