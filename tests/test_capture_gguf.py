"""Routing recorded from llama.cpp on a small model of random weights: every token in every layer, whatever stands beside it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from test_cli import call

pytest.importorskip("xllamacpp", reason="llama.cpp runs GGUF files here: pip install 'moesim[llama]'")
pytest.importorskip("gguf", reason="models are written with the gguf package: pip install 'moesim[llama]'")

from benchmarks.thirdparty.__main__ import Row  # noqa: E402
from benchmarks.thirdparty.folder import write_folder  # noqa: E402
from benchmarks.thirdparty.measure import Asked, measure  # noqa: E402
from benchmarks.thirdparty.models import SHAPES, Shape, write  # noqa: E402
from benchmarks.thirdparty.probe import attention as probed_attention  # noqa: E402
from benchmarks.thirdparty.report import report  # noqa: E402
from moesim.backtest.kernels import CpuKernels  # noqa: E402
from moesim.capture.gguf import capture_gguf  # noqa: E402
from moesim.errors import InputError  # noqa: E402

SMALL = Shape("small", "qwen3moe", 3, 256, 4, 2, 64, 8, 2, 256, vocabulary=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(SMALL, "Q8_0", tmp_path_factory.mktemp("gguf") / "small.gguf")


def prompts(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_token_of_every_layer_is_recorded(model: Path, tmp_path: Path) -> None:
    asked = prompts(tmp_path, '{"token_ids": [5, 6, 7, 8, 9]}\n{"token_ids": [11, 12]}\n')
    trace = capture_gguf(model, asked, tmp_path / "t.npz", new_tokens=3)
    assert trace.expert_ids.shape == (5 + 2 + 2 + 2, 3, 2) and trace.n_experts == 8
    assert trace.phase.tolist() == [0] * 5 + [1] * 2 + [0] * 2 + [1] * 2
    assert trace.position.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert (trace.expert_ids >= 0).all() and (trace.expert_ids[..., 0] != trace.expert_ids[..., 1]).all()


def test_routing_does_not_depend_on_the_neighbours(model: Path, tmp_path: Path) -> None:
    """A causal model: the routing of a prompt's beginning is that of the shorter prompt; in the last layer too."""
    long = capture_gguf(model, prompts(tmp_path, '{"token_ids": [5, 6, 7, 8, 9]}'), tmp_path / "a.npz")
    short = capture_gguf(model, prompts(tmp_path, '{"token_ids": [5, 6, 7]}'), tmp_path / "b.npz")
    assert np.array_equal(np.sort(long.expert_ids[:3], axis=2), np.sort(short.expert_ids, axis=2))
    assert len(np.unique(long.expert_ids)) > 2


def test_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = prompts(tmp_path, '{"token_ids": [5, 6, 7]}')
    code, text, _ = call(capsys, "trace", "capture", str(model), "--prompts", str(asked), "--out", str(tmp_path / "o.npz"))
    assert code == 0 and "3" in text and (tmp_path / "o.npz").exists()


def test_bad_input(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="token ids from 0 to 299"):
        capture_gguf(model, prompts(tmp_path, '{"token_ids": [300]}'), tmp_path / "o.npz")
    assert not (tmp_path / "o.npz").exists() and not list(tmp_path.glob(".moesim*"))


def test_measured_rows_become_a_folder_that_is_predicted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    products = [{"weights": "Q8_0", "repacked": False, "threads": 1, "decode_gmac_s": 20.0}]
    probed = {
        "kernels": {"products": products, "operators": [{"threads": 1, "us": 0.5}], "attention": []}, "mapped_read_gb_s": 1.0, "read_around_kib": 128,
    }  # fmt: skip
    found = []
    for row in (Row("a", "small", "Q8_0"), Row("b", "small", "Q8_0", depth=20), Row("c", "small", "Q8_0", prompt=8)):
        asked = Asked(str(model), depth=row.depth, context=1024, prompt=row.prompt, tokens=3, repeats=2)
        got = measure(asked)
        assert 0 < got["cpu_s"] < 1 and got["buffers"]["model_mib"] > 1
        extra = {"bytes": model.stat().st_size, "chances": [0.25] * SMALL.experts, "processes_cpu_s": [got["cpu_s"]]}
        found.append(asdict(row) | asdict(asked) | extra | got)
    write_folder(tmp_path, found, Path(__file__).parents[1] / "hardware_profiles" / "desktop-24gb.yaml", probed)
    (tmp_path / "measured.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in found))
    table = report(tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in table[2:5]] == ["| a", "| b", "| c"]
    assert any("host_kv_mib: off by 0.00%" in line for line in table)


def test_the_probe_finds_the_attention_law_that_the_prediction_uses() -> None:
    law = CpuKernels({}, {}, {}, {("f16", True): (5e-9, 0.15e-9, 20e-9)})

    def run(shape: Shape, _quant: str, *, kv: str, flash: bool, depth: int) -> dict[str, float]:
        step = shape.kv_heads * shape.head_dim * 2
        return {"cpu_s": 1e-3 + shape.layers * shape.heads * depth * (law.head_token_s(kv, flash, shape.head_dim, step) or 0.0)}

    found = probed_attention(run, "f16", True)
    assert (found["token_ns"], found["element_ns"], found["page_ns"]) == pytest.approx((5, 0.15, 20), abs=1e-3)
