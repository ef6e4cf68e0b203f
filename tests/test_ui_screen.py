"""What the controls of the what-if page mean as a scenario, without a browser: the YAML file gives what the page shows, for every control."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_writer
import pytest
from small_runs import SMALL, small_result, write_scenario

from moesim import resources
from moesim.cli.main import run
from moesim.errors import InputError
from moesim.scenario import load_scenario
from moesim.simulate import load_case, simulate
from moesim.ui import answers, screen
from moesim.ui.screen import LABELS, Screen, start

CONFIG: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "num_local_experts": 8, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def first(tmp_path: Path) -> Screen:
    return start(write_scenario(tmp_path))


def read_back(found: answers.Answer, path: Path) -> dict[str, Any]:
    """What the downloaded file gives, which states all of it: but for the engine's name, as the result is the same with all, and what was set."""
    path.write_text(found.yaml, encoding="utf-8")
    data = simulate(load_case(path)).as_dict()
    data["provenance"] |= {key: found.data["provenance"][key] for key in ("engine", "set")}
    return data


CHANGES: list[dict[str, Any]] = [
    {}, {"model": "ref-23b"}, {"experts": "Q4_K"}, {"hardware": "ref-16gb"}, {"hardware": "ryzen-9600x + ddr5-5600x2:32GiB + nvme-gen4"},
    {"hold": "25 %"}, {"hold": "5"}, {"policy": "lfu"}, {"site": "in-place", "predictor": "none"}, {"distance": 2}, {"predictor": "oracle"},
    {"io_engine": "buffered", "io_depth": 2, "io_threads": 2}, {"users": 3}, {"context_tokens": 4096}, {"cached_tokens": 100}, {"prompt_tokens": 16},
    {"output_tokens": 3}, {"figures": (("hardware_scale.ssd", 1.25e9), ("hardware_set.tiers.ram.capacity.value", 16e9))},
    {"figures": (("hardware_set.tiers.vram.capacity.value", 900e6),), "hold": "all", "below": "all"},
    {"below": "12"}, {"below": ""},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: ", ".join(f"{k}={v}" for k, v in change.items()) or "as it starts")
def test_the_file_and_the_command_give_what_the_page_shows(change: dict[str, Any], first: Screen, tmp_path: Path) -> None:
    found = answers.answer(replace(first, **change))
    data = read_back(found, tmp_path / "what-if.yaml")
    assert data == found.data
    by_command = simulate(load_case(first.scenario, found.assignments)).as_dict()
    assert by_command["provenance"].pop("engine") and by_command["provenance"] | {"engine": "fast"} == data["provenance"]
    assert by_command | {"provenance": None} == data | {"provenance": None}
    assert found.assignments if change else found.assignments == ()


def test_a_screen_starts_as_the_scenario_says(first: Screen) -> None:
    assert screen.settings(first) == () and (first.users, first.hold, first.policy, first.predictor) == (1, "4", "lru", "cooccurrence")
    data = answers.answer(first).data
    assert data["metrics"] == small_result().as_dict()["metrics"]


@pytest.mark.parametrize("name", list(resources.names("scenarios")))
def test_every_bundled_scenario_has_a_screen(name: str) -> None:
    shown = start(name)
    assert screen.settings(shown) == ()
    scenario, document, _ = screen.document_of(shown)
    assert scenario.model_dump(exclude={"trace"}) == load_scenario(name)[0].model_dump(exclude={"trace"})
    assert {LABELS["hardware"]}.isdisjoint(document.lines.values())
    assert any(figure.path == "hardware_scale.ssd" for figure in screen.machine_figures(shown))


def test_an_edited_figure_is_the_machines(first: Screen) -> None:
    case = answers.answer(
        replace(first, figures=(("hardware_scale.ssd", 1.25e9), ("hardware_set.tiers.ram.capacity.value", 12e9)))
    ).result.case
    assert case.hardware.channels["ssd"].bandwidth.value == pytest.approx(1.25e9)
    assert case.hardware.tiers["ram"].capacity.value == 12_000_000_000


def test_another_machine_keeps_what_it_can(first: Screen) -> None:
    case = answers.answer(replace(first, hardware="ref-16gb")).result.case
    assert set(case.layout.pools) == {"unified"} and case.layout.pools["unified"].counts[0] == 4 and case.scenario.placement.experts == ""
    moved = answers.answer(replace(start("quickstart"), hardware="laptop-8gb", output_tokens=2)).result.case
    assert moved.scenario.placement.attention == "gpu" and moved.scenario.placement.experts == ""  # laptop-8gb has no NPU
    assert moved.scenario.placement.pools["vram"].warm


def test_another_model_brings_its_own_routing(first: Screen) -> None:
    like = dict((path, value) for path, value, _ in screen.settings(replace(first, model="mixtral-8x7b")))
    assert like["trace"] == {"generate": "like", "profile": "mixtral-8x7b"} and "precision" not in like
    skewed = dict((path, value) for path, value, _ in screen.settings(replace(first, model="ref-23b")))
    assert skewed["trace"] == screen.SKEWED


def test_dropped_files_are_models(first: Screen, tmp_path: Path) -> None:
    dropped = screen.keep("../../config.json", json.dumps(CONFIG).encode())
    found = answers.answer(replace(first, model=dropped))
    assert Path(dropped).name == "config.json" and found.result.case.model.n_experts == 8
    assert re.search("^model: config.json$", found.yaml, re.M) and "# put the model's config.json beside this file" in found.yaml
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert read_back(found, tmp_path / "what-if.yaml")["metrics"] == found.data["metrics"]


def test_a_gguf_brings_its_precision(first: Screen, tmp_path: Path) -> None:
    gguf_writer.write(tmp_path / "m.gguf", "qwen3moe", *gguf_writer.qwen3moe())
    dropped = screen.keep("m.gguf", (tmp_path / "m.gguf").read_bytes())
    found = answers.answer(replace(first, model=dropped))
    assert found.result.case.scenario.precision == "file"
    other = answers.answer(replace(first, model=dropped, experts="Q8_0")).result.case
    assert other.plan.format("routed_experts", other.layout.moe_layers[0]).name == "Q8_0"


def test_relative_files_of_a_scenario_are_written_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    found = answers.answer(start(write_scenario(tmp_path, SMALL.replace("model: tinymoe", "model: config.json"))))
    assert f"model: {tmp_path / 'config.json'}\n" in found.yaml


@pytest.mark.parametrize(
    ("change", "label", "expected"),
    [
        ({"hardware": "rtx-9999 + ryzen-9950x"}, "Machine", "a GPU, SoC, CPU or drive"),
        ({"hardware": "nowhere"}, "Machine", "a bundled name or a file"),
        ({"model": "nothing"}, "Model", "a bundled name or a file"),
        ({"hold": "lots"}, "Experts held", ""),
        ({"users": 0}, "Users at the same time", "greater than or equal to 1"),
        ({"prompt_tokens": 0, "output_tokens": 0}, "", "above 0"),
        ({"figures": (("hardware_scale.ssd", 0.0),)}, "ssd bandwidth (GB/s)", "a factor above 0"),
    ],
    ids=str,
)
def test_impossible_input_names_the_control(change: dict[str, Any], label: str, expected: str, first: Screen) -> None:
    with pytest.raises(InputError) as error:
        answers.answer(replace(first, **change))
    said = dict(screen.explain(error.value))
    assert expected in said.get("expected", "") and label in said["where"] and said["got"]


def test_what_does_not_fit_is_an_answer(first: Screen) -> None:
    found = answers.answer(replace(first, figures=(("hardware_set.tiers.vram.capacity.value", 515 * 2**20),)))
    assert found.data["oom"]["tier"] == "vram" and found.data["metrics"] is None
    assert "too many" in answers.glance_html(found, "A") and answers.whatif_html(answers.what_if(found)) == ""


def test_tables_of_an_answer(first: Screen) -> None:
    found = answers.answer(first)
    glance = answers.glance_html(found, "A")
    assert "Lanes over time" in glance and "of the critical path" in glance and "routed experts" in glance
    assert "infinitely fast" in answers.whatif_html(answers.what_if(found))
    assert "Experts held" not in glance and "A is the fastest" in answers.comparison_html([found, found], ["A", "B"])


def test_the_what_if_of_a_run_does_not_run_again(first: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers.answer(first)
    monkeypatch.setattr("moesim.whatif.replay.simulate", None)
    assert answers.what_if(found).speed == pytest.approx(found.data["metrics"]["decode_tok_s"])


def test_the_command_refuses_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(["ui", "nothing"]) == 2 and "scenario: expected a bundled name or a file" in capsys.readouterr().err
    monkeypatch.setattr("moesim.cli.ui.find_spec", lambda name: None)
    assert run(["ui", write_scenario(tmp_path)]) == 2 and "pip install 'moesim[ui]'" in capsys.readouterr().err


def test_an_update_takes_less_than_two_seconds() -> None:
    """Of this process's own time, as the machine may be busy: run, bars, lanes and what-if of the page's default scenario."""
    first = start("quickstart")
    answers.what_if(answers.answer(first))  # a first run loads the trace and the compiled code
    began = time.process_time()
    found = answers.answer(replace(first, figures=(("hardware_scale.ssd", 7e9),)))
    assert answers.glance_html(found, "A") and answers.whatif_html(answers.what_if(found))
    assert time.process_time() - began < 2.0
