"""Validation without torch: suites, comparison on hand-made timelines, tolerances, bisection, memory limits, reports."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.cost import Costs
from moesim.errors import InputError
from moesim.report import validate as report_validate
from moesim.schedule import Dep, FragmentBuilder, Kind, Lane, Schedule, Work
from moesim.simulate import load_case
from moesim.timeline import CAUSE_HEAD_OF_LINE, Timeline
from moesim.validate import comparison as validate_comparison
from moesim.validate.comparison import baselines_ms, costs_of, explain, rank_correlation, tokens, with_dispatch
from moesim.validate.oom import bisect
from moesim.validate.suite import entries
from moesim.validate.verdict import case_limit, criteria, oom_met, summary, within

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "scenarios" / "validation"
PROFILE = ROOT / "hardware_profiles" / "two-core-host.yaml"
CPU, SSD = 0, 1
LANES = (Lane("cpu"), Lane("ssd"))


# ---- suites


def test_the_bundled_suite_loads_and_crosses_what_it_should() -> None:
    found = entries(SUITE)
    cases = [entry.load(PROFILE) for entry in found]
    assert len(found) >= 24
    assert [case.scenario.name for case in cases] == [entry.name for entry in found]
    assert {case.scenario.io.engine for case in cases} == {"direct", "buffered", "mmap"}
    assert {case.scenario.workload.batch for case in cases} == {1, 4}
    assert {case.hardware.name for case in cases} == {"two-core-host"}
    slow = next(case for case in cases if case.scenario.name == "slow-drive-lru-50")
    assert slow.hardware.channels["ssd"].bandwidth.value == 400e6  # what a case changes stays on top of the profile
    assert len(entries(SUITE, quick=True)) == 6
    assert [entry.name for entry in entries(SUITE / "base.yaml", quick=True)] == ["base"]


def suite(tmp_path: Path, cases: str) -> Path:
    (tmp_path / "base.yaml").write_text((SUITE / "base.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "model.yaml").write_text((SUITE / "model.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "suite.yaml").write_text(f"base: base.yaml\ncases:\n{cases}", encoding="utf-8")
    return tmp_path


def test_errors_of_a_suite_name_the_case_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a name of its own for each case"):
        entries(suite(tmp_path, "  - {name: a}\n  - {name: a}\n"))
    with pytest.raises(InputError, match=r"suite\.yaml:3: .*quik"):
        entries(suite(tmp_path, "  - {name: a, quik: true}\n"))
    with pytest.raises(InputError, match=r"suite\.yaml:4: case b: io\.engine: expected"):
        for entry in entries(suite(tmp_path, "  - {name: a}\n  - {name: b, set: {io.engine: fast}}\n")):
            entry.load(PROFILE)
    with pytest.raises(InputError, match="cases marked quick"):
        entries(suite(tmp_path, "  - {name: a}\n"), quick=True)
    with pytest.raises(InputError, match=r"expected a suite\.yaml in the folder"):
        entries(tmp_path.parent)


# ---- comparison


def two_tokens() -> Schedule:
    """Twice: load on the drive, then an expert, then the head; the second load may begin at once."""
    builder = FragmentBuilder(2)
    for step in range(2):
        first = builder.n_tasks
        load = builder.task(Kind.LOAD, SSD, Work("ssd", transfer_bytes=8), [], step=step)
        ffn = builder.task(Kind.FFN, CPU, Work("cpu", weight_bytes=8), [(load, Dep.DATA)], step=step)
        head = builder.task(Kind.HEAD, CPU, Work("cpu", weight_bytes=4), [(ffn, Dep.DATA)], step=step)
        builder.end_step(step, first, head, 1, 1, 1)
    return Schedule(LANES, fragments=[builder.build()])


def line(*rows: tuple[int, int, int, int]) -> Timeline:
    """A timeline of (start, end, cause, why) by task id, in milliseconds."""
    ms = 10**9
    return Timeline.from_rows((task, a * ms, b * ms, 0, cause, why) for task, (a, b, cause, why) in enumerate(rows))


def costs(schedule: Schedule, latency: list[int]) -> list[Costs]:
    n = schedule.n_tasks
    price = np.arange(n, dtype=np.int32)
    return [Costs(("x",), np.array([1e12]), price, np.array(latency, np.int64), np.zeros(n), np.full(n, math.inf), np.zeros((n, 1)))]


DATA, LANE = int(Dep.DATA), int(Dep.LANE)
SAID = line((0, 10, -1, DATA), (10, 14, 0, DATA), (14, 15, 1, DATA), (15, 25, 2, DATA), (25, 29, 3, DATA), (29, 30, 4, DATA))


def test_dispatch_belongs_to_the_task() -> None:
    bare = line((2, 10, -1, DATA), (11, 14, 0, DATA), (15, 16, 0, CAUSE_HEAD_OF_LINE))
    moved = with_dispatch(bare)
    assert (moved.start_ps // 10**9).tolist() == [0, 10, 2]  # of head-of-line blocking: the start of the one before
    assert moved.end_ps is bare.end_ps


def test_tokens_and_their_latency() -> None:
    found = tokens(two_tokens(), SAID)
    assert found.mean_ms == pytest.approx(15.0)
    assert found.gaps_ms.tolist() == pytest.approx([15.0])


def test_errors_come_apart_and_add_up() -> None:
    schedule = two_tokens()
    #          load 0..12         ffn 12..20         head           the second load waits 1 ms for its worker
    took = line((0, 12, -1, DATA), (12, 20, 0, DATA), (20, 21, 1, DATA), (22, 33, 2, DATA), (33, 41, 3, DATA), (41, 42, 4, DATA))
    parts = explain(schedule, costs(schedule, [0] * 6), SAID, took)
    by_kind = {(it.lane, it.kind): it for it in parts.kinds}
    assert parts.schedule == 0.0
    assert parts.cost == pytest.approx((15 - 21) / 21)
    assert parts.dispatch == pytest.approx(0.5 / 21)  # 1 ms of 42
    assert by_kind["cpu", "ffn"].explains_ms == pytest.approx(-4)  # 4 for 8 ms, twice, over two tokens
    assert by_kind["ssd", "load"].explains_ms == pytest.approx(-2)  # 10 for 12 (dispatch included both times)
    assert by_kind["cpu", "head"].explains_ms == 0.0
    assert by_kind["cpu", "ffn"].error == pytest.approx(-0.5)
    assert parts.kinds[0].kind == "ffn"
    assert parts.cost + parts.schedule == pytest.approx(15 / 21 - 1)


def test_a_run_that_leaves_the_order_shows_in_the_schedule_error() -> None:
    schedule = two_tokens()
    # as predicted, but the second load idled until 20 although its step had begun at 15, and says it waited for the first ffn
    took = line((0, 10, -1, DATA), (10, 14, 0, DATA), (14, 15, 1, DATA), (14, 30, 1, DATA), (30, 34, 3, DATA), (34, 35, 4, DATA))
    parts = explain(schedule, costs(schedule, [0] * 6), SAID, took)
    assert parts.schedule == pytest.approx((36 - 35) / 35)  # by the rules it begins with its step, at 15, and lasts 16


def test_mean_durations_of_like_tasks() -> None:
    schedule = two_tokens()
    took = line((0, 8, -1, DATA), (8, 12, 0, DATA), (12, 13, 1, DATA), (13, 25, 2, DATA), (25, 29, 3, DATA), (29, 30, 4, DATA))
    parts = explain(schedule, costs(schedule, [0] * 6), SAID, took)
    assert parts.means == pytest.approx(0.0)  # loads of 8 and 12 ms follow one another: twice 10 is the same
    assert parts.cost == pytest.approx(0.0)


def test_rank_correlation() -> None:
    rng = np.random.default_rng(3)
    a = rng.normal(size=50)
    assert rank_correlation(a, np.exp(a)) == pytest.approx(1.0)
    assert rank_correlation(a, -a) == pytest.approx(-1.0)
    ties = rank_correlation(np.array([1.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert ties == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))  # ranks 1.5 1.5 3 4 beside 1 2 3 4
    assert rank_correlation(np.ones(5), a[:5]) is None
    assert rank_correlation(a[:2], a[:2]) is None


def test_baselines_have_the_costs_and_hits_of_the_run() -> None:
    entry = next(entry for entry in entries(SUITE) if entry.name == "tinymoe-int4")
    case = load_case(entry.scenario, (*entry.assignments, f"hardware={json.dumps(str(PROFILE))}", "workload.output_tokens=4"))
    planner = case.planner()
    schedule = Schedule(planner.lanes, fragments=list(planner.fragments()))
    alone = np.concatenate([c.alone_ps() for c in costs_of(case, schedule)]) * 1e-9 / 4
    loads = validate_comparison.column(schedule, "kind") == Kind.LOAD
    found = baselines_ms(case, schedule, costs_of(case, schedule))
    assert 0 < alone[loads].sum() != alone[~loads].sum() > 0
    assert found["sum"] == pytest.approx(alone.sum())
    assert found["overlap"] == pytest.approx(max(alone[loads].sum(), alone[~loads].sum()))
    assert found["active bytes"] < found["sum"]


# ---- verdict


def row(name: str = "a", error: float = 0.0, noise: float = 0.0, **changes: Any) -> dict[str, Any]:
    said = {"predicted": 10 * (1 + error), "measured": 10.0, "error": error}
    kind = {"lane": "cpu", "kind": "ffn", "n": 4, "predicted_us": 1.0, "measured_us": 2.0, "error": -0.5, "explains_ms": -0.1}
    both = {"predicted": 0.5, "measured": 0.5}
    return {
        "name": name, "failed": "", "hits_equal": True, "bytes_equal": True, "differences": [], "violations": 0, "inversions": {"cpu": 0},
        "hit_rate": 0.5, "tokens": 4, "latency_ms": said | {"noise": noise}, "median_ms": said, "p95_ms": said, "rank_correlation": 0.9,
        "overlap_coverage": both, "io_wait_ms_per_token": both, "lanes": {"cpu": both}, "kinds": [kind],
        "baselines": {"active bytes": -0.5, "sum": 0.4, "overlap": -0.3}, "baselines_ms": {"active bytes": 5.0, "sum": 14.0, "overlap": 7.0},
        "errors": {"cost": error, "schedule": 0.0, "means": 0.0, "dispatch": 0.1}, "router_agreement": None, "loss": None,
    } | changes  # fmt: skip


FAILED = {"name": "f", "failed": "ffn task 3 failed: wrong expert", "hits_equal": False, "bytes_equal": False, "differences": []}


def met(rows: list[dict[str, Any]], oom: list[dict[str, Any]] | None = None) -> dict[str, bool | None]:
    return {it.name: it.met for it in criteria(rows, oom or [])}


def test_noise_excuses_up_to_fifteen_percent() -> None:
    assert [case_limit(noise) for noise in (0.0, 0.06, 0.07, 0.5)] == [0.12, 0.12, 0.14, 0.15]
    assert within(row(error=-0.12))
    assert not within(row(error=0.13))
    assert within(row(error=0.13, noise=0.07))
    assert not within(row(error=0.16, noise=0.5))


@pytest.mark.parametrize(("n", "may_be_off"), [(24, 2), (36, 3), (6, 0), (1, 0)])
def test_enough_cases_in_proportion(n: int, may_be_off: int) -> None:
    fine = [row(str(i), 0.01) for i in range(n)]
    assert met([*fine[may_be_off:], *[row("off", 0.3)] * may_be_off])["within"]
    assert not met([*fine[may_be_off + 1 :], *[row("off", 0.3)] * (may_be_off + 1)])["within"]


def test_every_criterion_can_fail() -> None:
    fine = [row(str(i), 0.02) for i in range(6)]
    assert set(met(fine).values()) == {True}
    assert summary(fine)["met"]
    assert met([*fine, FAILED])["equal"] is False
    assert met([*fine[1:], row(bytes_equal=False)])["equal"] is False
    assert met([*fine[1:], row(differences=["lane cpu: 2 tasks started out of order"])])["equal"] is False
    assert met([row(str(i), 0.09) for i in range(6)])["median_error"] is False
    assert met([row(str(i), overlap_coverage={"predicted": 0.5, "measured": 0.4}) for i in range(6)])["overlap"] is False
    assert met([row(overlap_coverage={"predicted": None, "measured": None})])["overlap"] is None
    assert met([row(str(i), p95_ms={"error": 0.21}) for i in range(6)])["p95"] is False
    assert met([row(str(i), 0.16) for i in range(6)])["baselines"] is False  # best baseline: 30 %
    assert met([row(str(i), 0.15) for i in range(6)])["baselines"] is True
    assert met([row(errors={"cost": 0.0, "schedule": -0.04, "means": 0.0, "dispatch": 0.0})])["schedule_error"] is False
    assert met(fine, [{"predicted": 9, "measured": 7}])["oom"] is False
    assert not summary([*fine, FAILED])["met"]
    assert summary([FAILED])["failed"] == ["f"]


def test_out_of_memory_points_within_two_percent_or_one() -> None:
    assert oom_met({"predicted": 102, "measured": 100})
    assert not oom_met({"predicted": 103, "measured": 100})
    assert oom_met({"predicted": 7, "measured": 8})


# ---- out of memory


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 40))
def test_bisection_finds_the_point_whatever_the_guess(point: int, guess: int, step: int) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        assert 1 <= n <= 6000
        asked.append(n)
        return n <= point

    found = bisect(fits, guess, 1, 6000, step)
    assert point - step < found <= point
    assert len(set(asked)) <= 26


def test_bisection_at_its_bounds() -> None:
    assert bisect(lambda n: False, 5, 1, 16) == 0
    assert bisect(lambda n: True, 5, 1, 16) == 16
    asked: list[int] = []
    assert bisect(lambda n: asked.append(n) or n <= 7, 7, 1, 16) == 7  # type: ignore[func-returns-value]
    assert len(asked) <= 3


HOLDER = """
import sys, time
from pathlib import Path
from moesim.validate.oom_probe import main
def hold(size: str, _: tuple, folder: Path) -> None:
    if size == "wrong":
        raise ValueError("a bug")
    held = bytearray(int(size) << 20)
    time.sleep(0.02)  # some samples
sys.exit(main(sys.argv[1], hold))
"""


def held(megabytes: int | str, limit: int | None) -> tuple[int, dict[str, Any]]:
    """Hold some memory in a process that may hold ``limit`` bytes."""
    asked = {"scenario": str(megabytes), "assignments": [], "folder": ".", "limit_bytes": limit}
    done = subprocess.run([sys.executable, "-c", HOLDER, json.dumps(asked)], capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA and /proc of Linux")
def test_a_limited_process_says_that_memory_ran_out() -> None:
    code, free = held(4, None)
    assert (code, free["outcome"]) == (0, "ran")
    base = free["peak_bytes"] - (4 << 20)
    limit = base + (64 << 20)
    code, failed = held(80, limit)
    assert (code, failed["outcome"]) == (3, "out of memory")
    assert failed["message"]
    assert held("wrong", limit)[1]["outcome"] == "failed"
    found = bisect(lambda n: held(n, limit)[0] == 0, 64, 1, 200)
    assert abs(found - 64) <= 2


# ---- reports


def data(rows: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {"processor": "P", "cores": 2, "memory_bytes": 8 << 30, "system": "Linux", "python": "3.11", "torch": "2"}
    made = {"suite": "s", "date": "2030-01-01", "version": "0", "repeats": 5, "profile": "here", "machine": machine}
    point = {"dimension": "batch", "unit": "sequences", "predicted": 7, "measured": 7, "limit_bytes": 1 << 30, "runtime_bytes": 1 << 28,
             "probes": 3, "message": "ram is out of memory", "peak_bytes": 1, "untouched": True}  # fmt: skip
    return {"scenarios": rows, "oom": [point], "summary": summary(rows, [point]), "provenance": made}


def test_reports_show_every_case_the_worst_first() -> None:
    rows = [row("fine", 0.01), row("bad", 0.4), FAILED, row("moved", 0.02, differences=["bytes on lane ssd: planned 3, found 2"])]
    made = data(rows)
    for text in (report_validate.validate_text(made), report_validate.validate_markdown(made)):
        at = [text.index(name) for name in ("fine", "bad", "wrong expert", "planned 3, found 2", "ram is out of memory", "+40.0 %")]
        assert all(place > 0 for place in at)
        assert text.index("bad  ") < text.index("fine  ") if "bad  " in text else text.index("| bad") < text.index("| fine")
    assert json.loads(report_validate.validate_json(made))["summary"]["outside"] == ["bad", "f"]
    assert "outside tolerance: equal, within" in report_validate.verdict(made)
    page = report_validate.validate_html(made, {"suite": b"\x89PNG"})
    assert 'src="data:image/png;base64,' in page
    assert "http" not in page
    assert "<b>bad</b>" in page


def test_pictures_of_a_run() -> None:
    from moesim.plots import validate as plots_validate
    from moesim.validate.comparison import Executed, Measured

    schedule = two_tokens()
    it = Executed(None, schedule, costs(schedule, [0] * 6), SAID, [Measured(SAID, True, True)])  # type: ignore[arg-type]
    ax = plots_validate.both_timelines(it)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cpu predicted", "cpu measured", "ssd predicted", "ssd measured"]
    assert plots_validate.case_picture(it, row()).startswith(b"\x89PNG")
    assert plots_validate.suite_picture([row("a", 0.1), row("b", 0.3), FAILED]).startswith(b"\x89PNG")
