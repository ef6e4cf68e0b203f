"""The doctor finds what was planted, says what it costs, and finds nothing where nothing is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from planner_cases import machine, model, trace

from moesim.cli.main import run
from moesim.doctor import Diagnosis, Finding, doctor
from moesim.simulate import load_case, simulate
from moesim.trace import save_trace
from moesim.whatif.replay import speed_of


def scenario(folder: Path, *, vram: int | None = None, changed: dict[str, Any] | None = None, **settings: Any) -> str:
    """A scenario of four layers of four experts on a small machine whose figures are all measured; ``changed`` lays over the machine."""
    on = machine(vram, launch="0 s")
    for tier in on["tiers"].values():
        tier["capacity"] = {"value": tier["capacity"], "basis": "measured", "source": "test"}
    on["derate"] = 0.9
    for part, items in (changed or {}).items():
        for name, values in items.items():
            on[part][name] = {**on[part][name], **values}
    ids = [[(t * t + layer) % 4 for layer in range(4)] for t in range(12)]
    (folder / "model.yaml").write_text(yaml.safe_dump(model(4)))
    (folder / "machine.yaml").write_text(yaml.safe_dump(on, sort_keys=False))
    save_trace(trace(ids), folder / "trace.npz")
    data = {
        "name": "bench", "model": "model.yaml", "hardware": "machine.yaml", "precision": {"default": "fp16", "kv": "fp16"},
        "trace": {"source": "trace.npz", "train_fraction": 0.0}, "workload": {"output_tokens": 12}, "memory": {"workspace": "0 B"}, **settings,
    }  # fmt: skip
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return str(path)


def codes(found: Diagnosis) -> dict[str, Finding]:
    return {f.suspicion.code: f for f in found.findings}


def pools(hold: Any, policy: str = "static") -> dict[str, Any]:
    return {"placement": {"pools": {"unified": {"hold": hold, "policy": policy}}}}


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    name = scenario(tmp_path, **pools("all"))
    assert set(codes(doctor(name))) == {"machine-unmeasured"}  # the rest of the small machine is assumed


@pytest.mark.parametrize(
    ("code", "settings"),
    [
        ("scattered-experts", {"io": {"layout": "scattered", "scattered_piece": "100 B", "depth": 1}}),
        ("mmap-reads", {"io": {"engine": "mmap", "depth": 1}}),
        ("buffered-reads", {"io": {"engine": "buffered", "depth": 1}}),
        ("drive-below-need", {"io": {"depth": 1}}),
    ],
)
def test_reads_that_cost(tmp_path: Path, code: str, settings: dict[str, Any]) -> None:
    name = scenario(tmp_path, **pools("none"), **settings)
    found = doctor(name)
    finding = codes(found)[code]
    assert finding.gain is not None and finding.gain > 0
    again = speed_of(simulate(load_case(name, finding.assignments), keep=False))
    assert finding.speed == again and found.speed == speed_of(simulate(load_case(name), keep=False))
    gains = [f.gain for f in found.findings if f.gain is not None]
    assert [g for g in gains if g > 0] == sorted((g for g in gains if g > 0), reverse=True)


def test_the_drives_evidence_is_in_numbers(tmp_path: Path) -> None:
    evidence = codes(doctor(scenario(tmp_path, **pools("none"), io={"depth": 1})))["drive-below-need"].suspicion.evidence
    assert "8 kB are read per token" in evidence and "below the 3 GB/s of claim B2" in evidence  # four experts of 2 kB in fp16


def test_unaligned_experts(tmp_path: Path) -> None:
    assert "unaligned-experts" in codes(doctor(scenario(tmp_path, **pools("none"))))
    assert "unaligned-experts" not in codes(doctor(scenario(tmp_path, **pools("none"), io={"align": "4096 B"})))


def test_single_channel_memory(tmp_path: Path) -> None:
    single = {"channels": {"ram": {"bandwidth": "25.6 GB/s", "facts": {"memory_channels": 1, "mt_s": 3200}}}}
    double = {"channels": {"ram": {"bandwidth": "51.2 GB/s", "facts": {"memory_channels": 2, "mt_s": 3200}}}}
    settings: dict[str, Any] = {"placement": {"attention": "cpu"}}
    assert "single-channel-ram" in codes(doctor(scenario(tmp_path, vram=1_000_000, changed=single, **settings)))
    assert "single-channel-ram" not in codes(doctor(scenario(tmp_path, vram=1_000_000, changed=double, **settings)))


def test_memory_that_is_reserved_in_vain(tmp_path: Path) -> None:
    memory = {"workspace": "0 B", "arena": "maximum", "context_tokens": 4096}
    found = codes(doctor(scenario(tmp_path, memory=memory, **pools("all"))))
    assert {"arena-at-maximum", "kv-at-maximum"} <= set(found)
    assert "4,096 tokens; this run reaches 12" in found["kv-at-maximum"].suspicion.evidence


def test_a_queue_that_bounds_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"placement": {"experts": "cpu", "pools": {"unified": {"hold": "all"}}}, "pipeline": {"queue_depth": 1000}}
    assert "unbounded-queue" in codes(doctor(scenario(tmp_path, **settings)))
    settings["pipeline"] = {"queue_depth": 2}
    assert "unbounded-queue" not in codes(doctor(scenario(tmp_path, **settings)))


def test_a_prefetch_that_is_missing(tmp_path: Path) -> None:
    slow = {"devices": {"gpu": {"peak": {"fp32": "10 MFLOP/s", "fp16": "10 MFLOP/s", "int8": "10 MFLOP/s"}}}}
    found = codes(doctor(scenario(tmp_path, changed=slow, **pools(2, "lru"))))
    assert found["no-prefetch"].gain is not None and found["no-prefetch"].gain > 0


def test_pageable_and_staged(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "io": {"pinned": False},
        "pipeline": {"hidden_states": "staged"},
        "placement": {"pools": {"vram": {"hold": "none"}, "ram": {"hold": "all"}}},
    }
    found = codes(doctor(scenario(tmp_path, vram=1_000_000, **settings)))
    assert {"pageable-copies", "staged-states"} <= set(found)
    assert found["pageable-copies"].gain is not None and found["pageable-copies"].gain > 0


def test_quality_and_data_sheets(tmp_path: Path) -> None:
    name = scenario(tmp_path, **pools("all"))
    found = codes(doctor(name, ("precision={default: raw-int4}",)))
    assert "raw-int4 (4 bits)" in found["quality-unmeasured"].suspicion.evidence and found["quality-unmeasured"].gain is None
    data = yaml.safe_load((tmp_path / "machine.yaml").read_text())
    del data["derate"]
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    assert "data-sheet-rates" in codes(doctor(name))
    assert "data-sheet-rates" not in codes(doctor(name, ("derate=0.6",)))


def test_memory_that_is_full_or_overfull(tmp_path: Path) -> None:
    name = scenario(tmp_path, **pools("all"))
    need = sum(line.bytes for line in load_case(name).layout.ledger.lines)
    tight = (f"hardware_set.tiers.unified.capacity.value={need + 10} B",)
    assert "memory-nearly-full" in codes(doctor(name, tight))
    found = doctor(name, (f"hardware_set.tiers.unified.capacity.value={need - 10} B",))
    assert found.findings[0].suspicion.code == "out-of-memory"


def test_a_measured_profile_takes_the_place_of_the_stated_one(tmp_path: Path) -> None:
    name = scenario(tmp_path, **pools("none"), io={"depth": 1})
    data = yaml.safe_load((tmp_path / "machine.yaml").read_text())
    for point in data["storage"]["ssd"]["curve"]:
        point["bandwidth"] = {"value": "1 MB/s", "basis": "measured", "source": "test"}
    (tmp_path / "measured.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    found = doctor(name, profile=str(tmp_path / "measured.yaml"))
    stated = doctor(name)
    assert found.speed < stated.speed
    assert f"counted with {stated.speed:.3g} tok/s, measured it is {found.speed:.3g}" in codes(found)["not-as-stated"].suspicion.evidence


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = scenario(tmp_path, **pools("none"), io={"engine": "mmap"})
    assert run(["doctor", name, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    keys = {
        "code",
        "claims",
        "what",
        "evidence",
        "speed_now_tok_s",
        "speed_changed_tok_s",
        "gain_tok_s",
        "problem",
        "set",
        "advice",
        "command",
    }
    assert rows and all(set(row) == keys for row in rows)
    for way in ("text", "md", "csv"):
        assert run(["doctor", name, "-o", way]) == 0
        assert "mmap-reads" in capsys.readouterr().out
