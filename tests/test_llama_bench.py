"""Results of llama-bench: every format gives the same rows; a profile is turned until the simulation gives what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from moesim.calibrate.bench import calibrate_from, profile_text
from moesim.cli.main import run
from moesim.config import Document, build
from moesim.errors import InputError
from moesim.hardware import load_hardware
from moesim.llama.bench import read_bench
from moesim.llama.flags import to_scenario
from moesim.scenario import Scenario
from moesim.simulate import make_case, simulate

FILE = "olmoe-1b-7b-Q8_0.gguf"
MACHINE = "laptop-8gb"
SETTINGS = {"model_filename": FILE, "n_gpu_layers": 99, "n_ubatch": 512, "n_batch": 2048, "type_k": "f16", "type_v": "f16", "flash_attn": True,
            "tensor_split": "0.00", "tensor_buft_overrides": "none", "use_mmap": True, "no_kv_offload": False}  # fmt: skip


def result(prompt: int, generate: int, depth: int, speed: float, **settings: object) -> dict[str, object]:
    return {**SETTINGS, **settings, "n_prompt": prompt, "n_gen": generate, "n_depth": depth, "avg_ts": speed, "stddev_ts": 0.1}


def speed(prompt: int, generate: int, depth: int, hardware: str = MACHINE) -> float:
    """What the simulator says of a run with everything on the GPU, by the figures of the profile."""
    from moesim.llama.options import parse_command

    line = f"llama-bench -m {FILE} -ngl 99 -fa 1 -p {prompt} -n {generate} -d {depth}"
    data = {**to_scenario(parse_command(line), hardware).scenario, "runtime": None}
    case = make_case(build(Scenario, Document(data, "test")))
    metrics = simulate(case, keep=False).as_dict()["metrics"]
    return float(metrics["prefill_tok_s" if prompt else "decode_tok_s"])


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    results = [result(512, 0, 0, 900.5), result(0, 128, 4096, 60.25)]
    (tmp_path / "a.json").write_text(json.dumps(results))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(r) for r in results))
    head = list(results[0])
    (tmp_path / "c.csv").write_text("\n".join([",".join(head), *(",".join(f'"{r[c]}"' for c in head) for r in results)]))
    table = ["| model | size | params | backend | ngl | fa | test | t/s |", "| --- | ---: | ---: | --- | --: | -: | --: | ---: |"]
    table += ["| olmoe A1.7B Q8_0 | 6 GiB | 6.92 B | CUDA | 99 | 1 | pp512 | 900.50 ± 0.10 |"]
    table += ["| olmoe A1.7B Q8_0 | 6 GiB | 6.92 B | CUDA | 99 | 1 | tg128 @ d4096 | 60.25 ± 0.10 |", "", "build: 1234 (1)"]
    (tmp_path / "d.md").write_text("\n".join(table))
    read = {path.suffix: read_bench(path) for path in sorted(tmp_path.iterdir())}
    assert [(row.test, row.tok_s, row.prefill) for row in read[".json"]] == [("pp512", 900.5, True), ("tg128 @ d4096", 60.25, False)]
    assert [row.command for row in read[".json"]] == [row.command for row in read[".jsonl"]] == [row.command for row in read[".csv"]]
    assert [(row.test, row.tok_s) for row in read[".md"]] == [(row.test, row.tok_s) for row in read[".json"]]
    assert read[".json"][0].command.flash and read[".json"][0].command.model == FILE
    assert read[".md"][1].where == f"{tmp_path / 'd.md'}:4"


def test_prompts_with_answers_are_left_out_and_broken_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([result(512, 128, 0, 100.0), result(0, 16, 0, 50.0)]))
    assert [row.test for row in read_bench(path)] == ["tg16"]
    for text, words in (("[]", "got none"), ("[{", "JSON as llama-bench"), (json.dumps([result(0, 16, 0, 0.0)]), "above 0"),
                        (json.dumps([result(0, 16, 0, 5.0, type_k="q9")]), "one of those known")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            read_bench(path)


def test_a_calibrated_profile_gives_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "bench.json", tmp_path / "machine.yaml"
    wanted = {"pp256": 0.5 * speed(256, 0, 0), "tg8": 0.7 * speed(0, 8, 0)}
    path.write_text(json.dumps([result(256, 0, 0, wanted["pp256"]), result(0, 8, 0, wanted["tg8"])]))
    found = calibrate_from(path, MACHINE)
    for row in found.rows:
        assert row.devices == ("gpu",) and row.after == pytest.approx(wanted[row.row.test], rel=0.02)
    assert found.factors["gpu"][0] == pytest.approx(0.7, rel=0.05)
    gpu, before = found.profile.devices["gpu"], load_hardware(MACHINE).devices["gpu"]
    assert gpu.memory_efficiency.basis == "measured" and "bench.json" in gpu.memory_efficiency.source
    assert found.profile.devices["cpu"] == load_hardware(MACHINE).devices["cpu"] and gpu.peak == before.peak
    assert yaml.safe_load(profile_text(found))["name"] == MACHINE
    assert run(["calibrate", "--from", str(path), "--hardware", MACHINE, "-o", str(out)]) == 0
    assert "tg8 on gpu: measured" in capsys.readouterr().err
    assert speed(0, 8, 0, str(out)) == pytest.approx(wanted["tg8"], rel=0.02)


def test_rows_of_both_devices_find_the_cpu_once_the_gpu_is_known(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps([result(0, 8, 0, speed(0, 8, 0)), result(0, 8, 0, 20.0, n_cpu_moe=16)]))
    found = calibrate_from(path, MACHINE)
    assert found.factors["gpu"] == (1.0, 1.0) and found.factors["cpu"][0] < 1
    assert found.rows[1].after == pytest.approx(20.0, rel=0.05) and found.rows[0].after == found.rows[0].before


def test_a_calibration_needs_its_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps([result(0, 8, 0, 20.0)]))
    assert run(["calibrate", "--from", str(path)]) == 2
    assert "--hardware beside it" in capsys.readouterr().err
