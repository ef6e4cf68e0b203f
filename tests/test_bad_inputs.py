# ruff: noqa: E501 (a table reads better with one case a line)
"""Bad inputs: each gives exit code 2 and one line that names the file (or option) and the field; never a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import SMALL, write_scenario

from moesim import resources
from moesim.cli.main import run

ROWS, LAYERS, TOP_K = 24, 8, 2  # tinymoe's shape
Argv = list[str]


def arrays(**changes: Any) -> dict[str, Any]:
    """Arrays of a good trace of tinymoe's shape, with changes."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((ROWS, LAYERS, 16)), axis=2)[:, :, :TOP_K].astype(np.int16)
    good: dict[str, Any] = {
        "expert_ids": ids, "weights": np.full(ids.shape, 0.5, np.float16), "seq_id": np.zeros(ROWS, np.int32),
        "position": np.arange(ROWS, dtype=np.int32), "phase": np.ones(ROWS, np.uint8), "meta": np.array(json.dumps({"n_experts": 16})),
    }  # fmt: skip
    return {name: value for name, value in (good | changes).items() if value is not None}


def with_trace(folder: Path, **changes: Any) -> Argv:
    np.savez(folder / "trace.npz", **arrays(**changes))
    return use_trace(folder)


def use_trace(folder: Path) -> Argv:
    text = SMALL.replace("{generate: uniform}", "{source: trace.npz, prefill: decode, train_fraction: 0}").replace(
        "output_tokens: 6", "output_tokens: 4"
    )
    return ["run", write_scenario(folder, text)]


def small(folder: Path, old: str, new: str) -> Argv:
    assert old in SMALL
    return ["run", write_scenario(folder, SMALL.replace(old, new))]


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cut_trace(folder: Path) -> Argv:
    argv = with_trace(folder)
    whole = (folder / "trace.npz").read_bytes()
    put(folder / "trace.npz", whole[: len(whole) // 2])
    return argv


def pickled_trace(folder: Path) -> Argv:
    np.savez(folder / "trace.npz", **arrays(expert_ids=np.array([[{"a": 1}]], dtype=object)))
    return use_trace(folder)


def sparse(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        os.truncate(file.fileno(), size)
    return path


def one_wrong(field: str, at: tuple[int, ...], value: Any) -> dict[str, Any]:
    array = arrays()[field].copy()
    array[at] = value
    return {field: array}


def model(folder: Path, name: str, content: str | bytes) -> Argv:
    put(folder / name, content)
    return small(folder, "model: tinymoe", f"model: {name}")


def hardware(folder: Path, old: str, new: str) -> Argv:
    text = resources.names("hardware_profiles")["laptop-8gb"].read_text()
    assert old in text
    put(folder / "machine.yaml", text.replace(old, new, 1))
    return small(folder, "hardware: laptop-8gb", "hardware: machine.yaml")


def gguf_cut(folder: Path) -> Argv:
    return model(folder, "cut.gguf", b"GGUF" + (3).to_bytes(4, "little") + (5).to_bytes(8, "little") + (7).to_bytes(8, "little") + b"\x10")


def set_(folder: Path, *assignments: str) -> Argv:
    return ["run", write_scenario(folder), *(part for text in assignments for part in ("--set", text))]


DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}

CASES: dict[str, tuple[Callable[[Path], Argv], tuple[str, ...]]] = {
    # the command line
    "no command": (lambda d: ["fly"], ("fly",)),
    "no such option": (lambda d: ["run", "x", "--fast"], ("--fast",)),
    "no scenario": (lambda d: ["run"], ("SCENARIO",)),
    "unknown format": (lambda d: ["run", "x", "-o", "xml"], ("-o", "xml", "json")),
    "seed no number": (lambda d: ["run", "x", "--seed", "one"], ("--seed", "integer")),
    "negative seed": (lambda d: [*set_(d), "--seed", "-1"], ("seed", "-1")),
    "derate above 1": (lambda d: [*set_(d), "--derate", "1.5"], ("derate", "1.5")),
    "derate NaN": (lambda d: [*set_(d), "--derate", "nan"], ("derate", "nan")),
    "plot into no folder": (lambda d: [*set_(d), "--plot", str(d / "no" / "x.png")], ("--plot", "x.png")),
    "plot of another kind": (lambda d: [*set_(d), "--plot", str(d / "x.txt")], ("--plot", "x.txt", ".png")),
    "timeline is a folder": (lambda d: [*set_(d), "--timeline", str(d)], ("--timeline", ".json")),
    "set without a value": (lambda d: set_(d, "seed"), ("--set", "path=value", "seed")),
    "set of an unknown path": (lambda d: set_(d, "prefetch.distanse=2"), ("--set", "prefetch.distanse", 'did you mean "distance"')),
    "set through a scalar": (lambda d: set_(d, "trace.layers.0.x=2"), ("--set", "trace.layers")),
    "set of bad YAML": (lambda d: set_(d, "seed={"), ("--set seed={", "YAML")),
    "set of a hidden boolean": (lambda d: set_(d, "io.pinned=no"), ("--set", "io.pinned", "true or false")),
    "unknown precision": (lambda d: ["budget", write_scenario(d), "--precision", "int5"], ("precision", "int5", "did you mean")),
    "precision of an unknown part": (lambda d: ["budget", write_scenario(d), "--precision", "{default: int8, atention: fp16}"], ("atention", "attention")),
    # the scenario file
    "no such scenario": (lambda d: ["run", "quickstat"], ("scenario", "quickstat", "did you mean")),
    "a folder": (lambda d: ["run", str(d)], ("scenario", "a folder")),
    "a name too long": (lambda d: ["run", "x" * 5000], ("scenario",)),
    "empty file": (lambda d: ["run", write_scenario(d, "")], ("scenario.yaml", "document", "mapping")),
    "a list": (lambda d: ["run", write_scenario(d, "- 1\n- 2\n")], ("scenario.yaml:1", "document", "mapping")),
    "binary file": (lambda d: ["run", str(put(d / "b.yaml", bytes(range(256))))], ("b.yaml", "UTF-8")),
    "zeros": (lambda d: ["run", str(put(d / "z.yaml", b"\0" * 64))], ("z.yaml", "YAML")),
    "huge file": (lambda d: ["run", str(sparse(d / "huge.yaml", 1 << 30))], ("huge.yaml", "bytes")),
    "broken YAML": (lambda d: ["run", write_scenario(d, "model: [1, 2\nhardware: x\n")], ("scenario.yaml:", "YAML")),
    "two documents": (lambda d: ["run", write_scenario(d, SMALL + "---\n" + SMALL)], ("scenario.yaml:", "one document")),
    "an alias": (lambda d: small(d, "hardware: laptop-8gb", "hardware: &a laptop-8gb"), ("scenario.yaml:4", "anchors")),
    "a tag": (lambda d: small(d, "precision: fp16", "precision: !!python/name:os.system x"), ("scenario.yaml:3", "precision", "tag")),
    "deep nesting": (lambda d: ["run", write_scenario(d, "x: " + "[" * 5000 + "]" * 5000)], ("scenario.yaml:1", "levels")),
    "duplicate key": (lambda d: small(d, "precision: fp16", "precision: fp16\nprecision: int8"), ("scenario.yaml:4", "precision", "each key once")),
    "unknown key": (lambda d: small(d, "prefetch:", "prefech:"), ("scenario.yaml:11", "prefech", 'did you mean "prefetch"')),
    "missing key": (lambda d: small(d, "hardware: laptop-8gb\n", ""), ("scenario.yaml", "hardware", "expected a value")),
    "hidden boolean": (lambda d: small(d, "policy: lru}\n    ram", "policy: lru, warm: no}\n    ram"), ("scenario.yaml:9", "placement.pools.vram.warm", "no")),
    "number read as text": (lambda d: ["run", write_scenario(d, SMALL + "seed: 1.0e9\n")], ("scenario.yaml:12", "seed", "1.0e9")),
    "fraction for a count": (lambda d: small(d, "output_tokens: 6", "output_tokens: 6.5"), ("scenario.yaml:6", "workload.output_tokens", "6.5")),
    "negative count": (lambda d: small(d, "output_tokens: 6", "output_tokens: -6"), ("scenario.yaml:6", "workload.output_tokens", "-6")),
    "number of 40 digits": (lambda d: small(d, "output_tokens: 6", f"output_tokens: {'9' * 40}"), ("scenario.yaml:6", "workload.output_tokens", "30 digits")),
    "nothing to do": (lambda d: small(d, "prompt_tokens: 8, output_tokens: 6", "prompt_tokens: 0, output_tokens: 0"), ("scenario.yaml:6", "workload")),
    "bare number": (lambda d: small(d, "prefetch:", "memory: {runtime: 600}\nprefetch:"), ("scenario.yaml:11", "memory.runtime", "bare number 600")),
    "another dimension": (lambda d: small(d, "prefetch:", "memory: {runtime: 6 GB/s}\nprefetch:"), ("scenario.yaml:11", "memory.runtime", "6 GB/s")),
    "unknown unit": (lambda d: small(d, "prefetch:", "memory: {runtime: 6 gb}\nprefetch:"), ("scenario.yaml:11", "memory.runtime", "gb")),
    "negative size": (lambda d: small(d, "prefetch:", "memory: {runtime: -6 GB}\nprefetch:"), ("scenario.yaml:11", "memory.runtime", "negative")),
    "unknown policy": (lambda d: small(d, "{hold: 4, policy: lru}", "{hold: 4, policy: lruu}"), ("scenario.yaml:9", "placement.pools.vram.policy", "lruu", "lru")),
    "unknown tier": (lambda d: small(d, "    vram:", "    vran:"), ("scenario.yaml:9", "placement.pools", "vran")),
    "tier the machine lacks": (lambda d: small(d, "    vram:", "    unified:"), ("scenario.yaml:", "placement.pools.unified", "laptop-8gb")),
    "hold more than experts": (lambda d: small(d, "hold: 4", "hold: 17"), ("scenario.yaml:9", "placement.pools.vram.hold", "at most 16", "17")),
    "hold of nonsense": (lambda d: small(d, "hold: 4", "hold: most"), ("scenario.yaml:9", "placement.pools.vram.hold", "most")),
    "hold NaN %": (lambda d: small(d, "hold: 4", 'hold: "nan %"'), ("scenario.yaml:9", "placement.pools.vram.hold", "nan")),
    "hold -50 %": (lambda d: small(d, "hold: 4", 'hold: "-50 %"'), ("scenario.yaml:9", "placement.pools.vram.hold", "-50")),
    "lru without room": (lambda d: small(d, "hold: 4", "hold: none"), ("scenario.yaml:9", "placement.pools.vram.hold", "at least one expert")),
    "device the machine lacks": (lambda d: small(d, "placement:", "placement:\n  experts: npu"), ("scenario.yaml:8", "placement.experts", "npu", "laptop-8gb")),
    "layer the model lacks": (lambda d: small(d, "placement:", "placement:\n  layers: [{layers: 0-99, device: cpu}]"), ("scenario.yaml:8", "placement.layers.0.layers", "0 to 7")),
    "layer of nonsense": (lambda d: small(d, "placement:", "placement:\n  layers: [{layers: [-1], device: cpu}]"), ("scenario.yaml:8", "placement.layers.0")),
    "dotted hardware_set": (lambda d: small(d, "trace:", 'hardware_set: {"storage.ssd.latencey": 5 us}\ntrace:'), ("scenario.yaml:5", "latencey")),
    "hardware_set of a whole part": (lambda d: set_(d, "hardware_set.tiers=3"), ("tiers", "3")),
    "io request of 0": (lambda d: small(d, "trace:", "io: {request: 0 B}\ntrace:"), ("scenario.yaml:5", "io.request")),
    "scattered pieces of 0": (lambda d: small(d, "trace:", "io: {layout: scattered, scattered_piece: 0 B}\ntrace:"), ("scenario.yaml:5", "io.scattered_piece")),
    "too many I/O threads": (lambda d: small(d, "trace:", "io: {threads: 1000000000}\ntrace:"), ("scenario.yaml:5", "io.threads")),
    "a workload of 10^12 tokens": (lambda d: small(d, "output_tokens: 6", "output_tokens: 1000000000000"), ("scenario.yaml:6", "workload")),
    "a batch of 10^9": (lambda d: small(d, "output_tokens: 6", "output_tokens: 6, batch: 1000000000"), ("scenario.yaml:6", "workload")),
    "a seed of 25 digits": (lambda d: set_(d, "seed=-" + "9" * 25), ("seed",)),
    "a horizon of jitter": (lambda d: set_(d, "timing.jitter=3"), ("timing.jitter", "3")),
    "train fraction of 1": (lambda d: set_(d, "trace.train_fraction=1.0"), ("train_fraction", "1")),
    "micro batches of text": (lambda d: set_(d, "pipeline.micro_batches=two"), ("pipeline.micro_batches", "two")),
    "in-place without a CPU": (lambda d: small(d, "hardware: laptop-8gb", "hardware: nocpu.yaml"), ("hardware", "nocpu.yaml")),
    "prefetch beyond the buffers": (lambda d: small(d, "distance: 1", "distance: 2, into: buffers, buffers: 2"), ("scenario.yaml:11", "prefetch", "buffers - 1")),
    "prefetch beyond the layers": (lambda d: small(d, "distance: 1", "distance: 99"), ("scenario.yaml:11", "prefetch.distance", "at most 8")),
    "unknown predictor": (lambda d: small(d, "cooccurrence", "cooccurence"), ("scenario.yaml:11", "prefetch.predictor", "cooccurence")),
    # models
    "unknown model": (lambda d: small(d, "tinymoe", "tinymo"), ("scenario.yaml:2", "model", "tinymo", 'did you mean "tinymoe"')),
    "dense model": (lambda d: model(d, "config.json", json.dumps(DENSE)), ("config.json", "expert")),
    "broken JSON": (lambda d: model(d, "config.json", '{"a": 1,\n"b" 2}'), ("config.json:2", "JSON")),
    "NaN in JSON": (lambda d: model(d, "config.json", '{"hidden_size": NaN}'), ("config.json", "NaN")),
    "GGUF cut off": (gguf_cut, ("cut.gguf",)),
    "model spec of another kind": (lambda d: model(d, "m.yaml", "name: x\nlayers: 3\n"), ("m.yaml", "layers", "n_layers")),
    "empty model file": (lambda d: model(d, "m.yaml", ""), ("m.yaml", "document")),
    "file precision without a file": (lambda d: small(d, "precision: fp16", "precision: file"), ("scenario.yaml:3", "precision", "GGUF")),
    # machines
    "unknown machine": (lambda d: small(d, "laptop-8gb", "laptop-8bg"), ("scenario.yaml:4", "hardware", 'did you mean "laptop-8gb"')),
    "bandwidth as a size": (lambda d: hardware(d, '"256 GB/s"', '"256 GB"'), ("machine.yaml:", "channels.vram.bandwidth", "256 GB")),
    "bandwidth of 0": (lambda d: hardware(d, '"256 GB/s"', '"0 GB/s"'), ("machine.yaml:", "channels.vram.bandwidth")),
    "capacity bare": (lambda d: hardware(d, '"8 GiB"', "8"), ("machine.yaml:", "tiers.vram.capacity", "bare number 8")),
    "unknown basis": (lambda d: hardware(d, "basis: spec, ", "basis: guess, "), ("machine.yaml:", "basis", "guess")),
    "channel that is not there": (lambda d: hardware(d, "channel: vram", "channel: vrom"), ("machine.yaml:", "tiers.vram.channel", "vrom")),
    "hardware_set of an unknown figure": (lambda d: set_(d, "hardware_set.storage.ssd.latencey=5 us"), ("latencey", "latency")),
    "a run of years": (lambda d: set_(d, "hardware_set.storage.ssd.latency=1000000 s"), ("scenario.yaml:4", "hardware", "106 days")),
    "hardware_set without a unit": (lambda d: set_(d, "hardware_set.storage.ssd.latency=5"), ("storage.ssd.latency", "bare number 5")),
    # traces
    "unknown trace": (lambda d: small(d, "generate: uniform", "source: tinymo"), ("scenario.yaml:5", "trace", "tinymo", 'did you mean "tinymoe"')),
    "source and generate": (lambda d: small(d, "generate: uniform", "generate: uniform, source: tinymoe"), ("scenario.yaml:5", "trace", "either")),
    "popularity without counts": (lambda d: small(d, "generate: uniform", "generate: popularity"), ("scenario.yaml:5", "trace", "counts")),
    "counts file missing": (lambda d: small(d, "generate: uniform", "generate: popularity, counts: c.csv"), ("scenario.yaml:5", "c.csv")),
    "counts of no columns": (lambda d: (put(d / "c.csv", "a,b\n1,2\n"), small(d, "generate: uniform", "generate: popularity, counts: c.csv"))[1], ("c.csv:1", "columns")),
    "truncated npz": (cut_trace, ("trace.npz", "zip")),
    "pickled npz": (pickled_trace, ("trace.npz", "expert_ids", "pickled")),
    "text as npz": (lambda d: (put(d / "trace.npz", "hello"), use_trace(d))[1], ("trace.npz", "zip")),
    "huge npz": (lambda d: (sparse(d / "trace.npz", 1 << 33), use_trace(d))[1], ("trace.npz",)),
    "field missing": (lambda d: with_trace(d, seq_id=None), ("trace.npz", "seq_id")),
    "ids of two axes": (lambda d: with_trace(d, expert_ids=np.zeros((ROWS, LAYERS), np.int16)), ("trace.npz", "expert_ids", "(T, L, K)")),
    "ids as floats": (lambda d: with_trace(d, expert_ids=np.zeros((ROWS, LAYERS, TOP_K))), ("trace.npz", "expert_ids", "integers")),
    "id out of range": (lambda d: with_trace(d, **one_wrong("expert_ids", (3, 2, 1), 16)), ("trace.npz", "expert_ids", "16", "row 3", "layer 2")),
    "id below -1": (lambda d: with_trace(d, **one_wrong("expert_ids", (3, 2, 1), -2)), ("trace.npz", "expert_ids", "-2", "row 3")),
    "NaN weight": (lambda d: with_trace(d, **one_wrong("weights", (5, 1, 0), np.nan)), ("trace.npz", "weights", "nan", "row 5")),
    "weights of another shape": (lambda d: with_trace(d, weights=np.ones((ROWS, LAYERS, 3), np.float16)), ("trace.npz", "weights", "shape")),
    "rows of seq_id": (lambda d: with_trace(d, seq_id=np.zeros(ROWS - 1, np.int32)), ("trace.npz", "seq_id", "24")),
    "phase 2": (lambda d: with_trace(d, **one_wrong("phase", (4,), 2)), ("trace.npz", "phase", "2", "row 4")),
    "position that stalls": (lambda d: with_trace(d, position=np.zeros(ROWS, np.int32)), ("trace.npz", "position", "grow")),
    "meta no JSON": (lambda d: with_trace(d, meta=np.array("{")), ("trace.npz", "meta", "JSON")),
    "no rows": (lambda d: with_trace(d, expert_ids=np.zeros((0, LAYERS, TOP_K), np.int16), weights=None, seq_id=np.zeros(0, np.int32),
                                     position=np.zeros(0, np.int32), phase=np.zeros(0, np.uint8)), ("trace.npz", "expert_ids", "at least one row")),
    "experts of another model": (lambda d: with_trace(d, meta=np.array(json.dumps({"n_experts": 32}))), ("scenario.yaml:5", "n_experts", "16", "32")),
    "layers of another model": (lambda d: with_trace(d, **{k: v[:, :6] for k, v in arrays().items() if k in ("expert_ids", "weights")}),
                                ("scenario.yaml:5", "n_layers", "8", "6", "tile")),
    "top-k of another model": (lambda d: with_trace(d, **{k: v[:, :, :1] for k, v in arrays().items() if k in ("expert_ids", "weights")}),
                               ("scenario.yaml:5", "top_k", "2", "1")),
    "more tokens than the trace has": (lambda d: [*with_trace(d), "--set", "workload.output_tokens=500"], ("workload.output_tokens", "500", "trace.sequences")),
    "decode rows only": (lambda d: [*with_trace(d), "--set", "trace.prefill=exact"], ("trace.prefill", "decode")),
    "trace info of nothing": (lambda d: ["trace", "info", "nothing.npz"], ("trace", "nothing.npz")),
    "trace info of a folder": (lambda d: ["trace", "info", str(d)], ("trace", "a folder")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = CASES[name]
    argv = make(tmp_path)
    code = run(argv)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert "Traceback" not in err and "internal" not in err
    for word in words:
        assert word in err, f"{word!r} is not in: {err}"


def test_there_are_enough() -> None:
    assert len(CASES) >= 45


def test_an_unreadable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(write_scenario(tmp_path))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    assert run(["run", str(path)]) == 2
    assert "scenario.yaml" in capsys.readouterr().err
