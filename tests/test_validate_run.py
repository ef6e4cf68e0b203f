"""``moesim validate`` from end to end on a suite of a small model, and runs that must fail it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_cases import direct_folder

pytest.importorskip("torch", reason="real runs need torch: pip install 'moesim[validate]'")

from moesim.cli.main import run
from moesim.engines.real_tasks import Tag
from moesim.engines.real_workers import LaneProgram
from moesim.schedule import Kind
from moesim.validate import case as real_case
from moesim.validate import oom as validate_oom
from moesim.validate import run as validate_run
from moesim.validate import validation
from moesim.validate.case import RealCase

ROOT = Path(__file__).resolve().parents[1]
PROFILE = ROOT / "hardware_profiles" / "two-core-host.yaml"
BASE = """
model: tinymoe
precision: {default: int8, routed_experts: int8, router: bf16, norms: bf16, embeddings: bf16, kv: bf16}
hardware: two-core-host
trace: {source: tinymoe, sequences: chain}
workload: {output_tokens: 4, cached_tokens: 8}
memory: {context_tokens: 64}
placement: {attention: cpu, experts: cpu, pools: {ram: {hold: 4, policy: lru, warm: true}}}
io: {engine: direct, request: 1 MiB, depth: 4, align: 4 KiB}
engine: auto
"""
SUITE = """
base: base.yaml
cases:
  - {name: one, quick: true}
  - {name: two, set: {prefetch: {predictor: oracle, distance: 1}}}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = direct_folder(tmp_path) / "suite"
    folder.mkdir()
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    (folder / "suite.yaml").write_text(SUITE, encoding="utf-8")
    return folder


def call(capsys: pytest.CaptureFixture[str], suite: Path, *argv: str) -> tuple[int, str, str]:
    code = run(["validate", str(suite), "--profile", str(PROFILE), "--stores", str(suite.parent / "stores"), *argv])
    return code, *capsys.readouterr()


def test_from_suite_to_answer(suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, plots, lines = tmp_path / "validation.md", tmp_path / "plots", tmp_path / "timelines"
    wanted = ("--record", str(record), "--plot", str(plots), "--timeline", str(lines))
    code, out, err = call(capsys, suite, "--repeats", "2", "-o", "json", *wanted)
    assert code in (0, 4), err
    found = json.loads(out)
    assert (code == 0) == found["summary"]["met"]
    assert [row["name"] for row in found["scenarios"]] == ["one", "two"]
    for row in found["scenarios"]:
        assert row["failed"] == ""
        assert row["differences"] == []
        assert row["hits_equal"]
        assert row["bytes_equal"]
        assert row["latency_ms"]["predicted"] > 0
        assert row["latency_ms"]["measured"] > 0
        assert len(row["latency_ms"]["runs"]) == 2
        assert row["p95_ms"]["measured"] > 0
        assert set(row["overlap_coverage"]) == {"predicted", "measured"}
        assert set(row["baselines"]) == {"active bytes", "sum", "overlap"}
        assert abs(row["errors"]["schedule"]) < 1e-6
        assert row["errors"]["cost"] + row["errors"]["schedule"] == pytest.approx(row["latency_ms"]["predicted"] / typical(row) - 1)
    assert found["provenance"]["machine"]["torch"]
    assert sorted(path.name for path in plots.iterdir()) == ["one.png", "suite.png", "two.png"]
    assert sorted(path.name for path in lines.iterdir()) == ["one.json", "two.json"]
    events = json.loads((lines / "one.json").read_text(encoding="utf-8"))["traceEvents"]
    slices = [[(x["name"], x["tid"]) for x in events if x["ph"] == "X" and x["pid"] == pid] for pid in (1, 2)]
    assert slices[0] == slices[1] and len(slices[0]) > 10  # the same tasks on the same tracks
    page = record.read_text(encoding="utf-8")
    assert "| one |" in page
    assert "| two |" in page


def typical(row: dict[str, Any]) -> float:
    """The measured mean latency of the run that errors are told of: the first of those nearest to the median."""
    middle = row["latency_ms"]["measured"]
    return float(min(row["latency_ms"]["runs"], key=lambda mean: abs(mean - middle)))


def test_exit_code_says_whether_it_is_within_tolerance(
    suite: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = validation.summary
    for verdict, code in ((True, 0), (False, 4)):
        monkeypatch.setattr(validation, "summary", lambda rows, oom, met=verdict: judge(rows, oom) | {"met": met})
        assert call(capsys, suite, "--quick", "--repeats", "1")[0] == code


def wrong_slot(real: RealCase) -> None:
    """The first expert task looks into a slot that holds nobody."""
    next(iter(real.program.expert_tasks.values())).tag = Tag()


def first_load(real: RealCase) -> tuple[LaneProgram, int]:
    """The lane and the row of the first load."""
    kinds = [int(kind) for f in real.program.schedule.fragments for kind in f.kind]
    task = kinds.index(int(Kind.LOAD))
    lane = next(lane for lane in real.program.lanes if task in lane.tasks)
    return lane, lane.tasks.index(task)


def skipped_load(real: RealCase) -> None:
    """The first load says that it has read, and has not."""
    lane, at = first_load(real)
    lane.operations[at] = lambda: 0


def lost_bytes(real: RealCase) -> None:
    """The first load reads all, but says that it read a byte less."""
    lane, at = first_load(real)
    read = lane.operations[at]
    lane.operations[at] = lambda: (read() or 0) - 1


@pytest.mark.parametrize(
    ("fault", "says"), [(wrong_slot, "found no expert"), (skipped_load, "expected layer"), (lost_bytes, "bytes on lane ssd")]
)
def test_what_goes_wrong_for_real_fails_the_validation(
    suite: Path, fault: Callable[[RealCase], None], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any) -> RealCase:
        real = real_case.prepare(*arguments)
        if real.case.scenario.name == "one":
            fault(real)
        return real

    monkeypatch.setattr(validate_run, "prepare", broken)
    code, out, _ = call(capsys, suite, "--repeats", "1", "-o", "json")
    one, two = json.loads(out)["scenarios"]
    assert code == 4
    assert says in one["failed"] or any(says in text for text in one["differences"])
    assert not (one["hits_equal"] and one["bytes_equal"])
    assert two["failed"] == ""  # the other case was run all the same
    assert two["hits_equal"]


def test_programs_are_made_anew_where_memory_is_short(
    suite: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate_run, "free_bytes", lambda: 0)
    made: list[str] = []

    def counted(*arguments: Any) -> RealCase:
        made.append(arguments[0].scenario.name)
        return real_case.prepare(*arguments)

    monkeypatch.setattr(validate_run, "prepare", counted)
    assert call(capsys, suite, "--repeats", "1")[0] in (0, 4)
    assert made == ["one", "two", "one", "two"]  # round by round


def test_a_real_run_under_a_limit_says_what_it_lacked(suite: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stores"
    changes = (f"hardware={json.dumps(str(PROFILE))}",)
    free = validate_oom.probe(suite / "base.yaml", changes, folder, None)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    short = validate_oom.probe(suite / "base.yaml", (*changes, "memory.context_tokens=40000"), folder, free.peak_bytes + (16 << 20))
    assert free.fits
    assert not short.fits
    assert short.message.startswith("out of memory: ")
    assert "ram is out of memory: the system refused the mapping" in short.message
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before
