"""Serving runs: requests from draws and files, one result in all engines however a run is cut, stopped or resumed, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planner_cases import machine, model, real_model
from serving_cases import SMALL, load, on_engine, result, write

from moesim.cli.main import run as cli
from moesim.errors import EXIT_DOES_NOT_FIT, EXIT_INPUT, InputError
from moesim.metrics import PS
from moesim.serving import load_serving, serve
from moesim.serving.curve import Saturation, at_rate, run_point, saturation
from moesim.serving.loop import ServingRun
from moesim.serving.request_files import read_requests
from moesim.serving.requests import draw_requests
from moesim.serving_spec import Serving
from moesim.simulate import load_case
from moesim.text_table import to_json

# --- one result


def as_json(case: Any, requests: Any) -> str:
    return to_json(result(case, requests).as_dict())


SWAPS = {"preemption": "swap", "swap": "2 kB", "most_sequences": 3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bursts": ({}, {}),
    "users": ({"arrivals": {"process": "concurrency", "concurrency": 5}}, {}),
    "one task an expert": ({}, {"granularity": "expert"}),
    "static batches": ({"batching": "static"}, {}),
    "computed anew": ({"arrivals": {"process": "concurrency", "concurrency": 4}}, {"memory": {"kv_bytes": "320 B"}}),
    "swapped out": (SWAPS, {"memory": {"kv_bytes": "480 B"}}),
    "shared prefixes": ({"prefix_tokens": 5, "prefix_groups": 2}, {}),
    "contiguous": ({}, {"memory": {"kv": "maximum"}}),
    "prefetched": ({}, {"prefetch": {"predictor": "popularity", "distance": 1}, "trace": {"train_fraction": 0.4}}),
    "unified, from storage": ({}, {"on": machine(None, 12_000), "placement": {"pools": {"unified": {"hold": 2, "policy": "static"}}}}),
    "jitter": ({}, {"timing": {"jitter": 0.2}}),
    "micro-batches on two devices": ({}, {"on": machine(None, npu=True), "pipeline": {"micro_batches": 2}, "placement": {"experts": "npu", "pools": {"unified": {"hold": "all"}}}}),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", CASES)


def served(kind: str) -> tuple[Any, Any]:
    serving, settings = CASES[kind]
    return load(serving, **settings)


@kinds
def test_engines_agree_byte_for_byte(kind: str) -> None:
    case, requests = served(kind)
    texts = {engine: as_json(on_engine(case, engine), requests) for engine in ("des", "fast")}
    assert texts["des"] == as_json(on_engine(case, "des"), requests)
    assert texts["fast"].replace('"engine": "fast"', '"engine": "des"') == texts["des"]


def test_what_the_cases_are_named_after_happens() -> None:
    found = {kind: result(*served(kind)).as_dict() for kind in CASES}
    assert found["computed anew"]["kv"]["preemptions"] > 0
    assert found["computed anew"]["kv"]["computed_tokens"] > found["computed anew"]["kv"]["needed_tokens"]
    assert found["swapped out"]["kv"]["swapped_blocks"] > 0
    assert found["swapped out"]["transfers"]["down"]["bytes"] == found["swapped out"]["kv"]["swapped_blocks"] // 2 * 64
    assert found["shared prefixes"]["kv"]["computed_tokens"] < found["shared prefixes"]["kv"]["needed_tokens"]
    assert found["prefetched"]["metrics"]["accesses"]["prefetch"] > 0
    assert found["contiguous"]["kv"]["block_tokens"] > 4
    assert all(data["requests"]["ended"] == 9 for data in found.values())


@kinds
def test_stopped_after_any_step_and_resumed(kind: str) -> None:
    case, requests = served(kind)
    whole = ServingRun(case, requests, debug=True)
    whole.run()
    expected = to_json(json.loads(to_json(_result(whole))))
    for steps in range(0, whole.n_steps + 1, 1 if kind == "bursts" else 7):
        first = ServingRun(case, requests, debug=True)
        assert not first.run(steps) or steps == whole.n_steps
        assert first.n_steps == steps
        state = json.loads(json.dumps(first.state()))
        second = ServingRun(case, requests, debug=True, state=state)
        assert second.n_steps == steps and json.loads(json.dumps(second.state())) == state
        second.run()
        assert to_json(_result(second)) == expected


def _result(run: ServingRun) -> dict[str, Any]:
    from moesim.serving.summary import ServingResult

    return ServingResult(run).as_dict()


def test_a_state_goes_on_in_the_other_engine() -> None:
    case, requests = load()
    first = ServingRun(on_engine(case, "des"), requests)
    first.run(11)
    second = ServingRun(on_engine(case, "fast"), requests, state=json.loads(json.dumps(first.state())))
    second.run()
    whole = ServingRun(on_engine(case, "fast"), requests)
    whole.run()
    assert to_json(_result(second)) == to_json(_result(whole))


def test_a_state_of_another_scenario_is_refused() -> None:
    case, requests = load()
    run = ServingRun(case, requests)
    run.run(3)
    other, others = load({"step_tokens": 5})
    with pytest.raises(InputError, match="state"):
        ServingRun(other, others, state=run.state())


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_how_a_run_is_cut_changes_nothing(engine: str) -> None:
    case, requests = load()
    case = on_engine(case, engine)
    step_by_step = ServingRun(case, requests)
    while not step_by_step.run(step_by_step.n_steps + 1):
        pass
    assert to_json(_result(step_by_step)) == as_json(case, requests)


def test_fragments_are_kept_and_say_what_they_follow_from() -> None:
    case, requests = load()
    run = ServingRun(case, requests, keep=True)
    run.run()
    assert run.schedule.n_tasks == run.meter.n_tasks
    assert run.schedule.depends_on == {"trace", "time"}
    closed = ServingRun(*load({"arrivals": {"process": "concurrency"}}))
    assert closed.depends_on == {"trace"}
    with pytest.raises(InputError, match="keep=True"):
        closed.schedule  # noqa: B018


# --- what the seed changes


def test_another_seed_changes_arrivals_alone() -> None:
    a_case, a = load({"prefix_tokens": 3, "prefix_groups": 3})
    b_case, b = load({"prefix_tokens": 3, "prefix_groups": 3}, "seed=8")
    assert a.arrival_ps is not None and b.arrival_ps is not None
    assert (a.arrival_ps != b.arrival_ps).all()
    for name in ("prompt", "output", "group"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a_case.routing.used == b_case.routing.used
    one, two = (ServingRun(case, requests) for case, requests in ((a_case, a), (b_case, b)))
    for r in range(len(a)):
        np.testing.assert_array_equal(one.rows.rows(r), two.rows.rows(r))


def test_another_seed_leaves_generated_routing_alone() -> None:
    hashes = {load(None, f"seed={seed}", trace={"source": "", "generate": "zipf"})[0].routing.source_hash for seed in (0, 1)}
    assert len(hashes) == 1
    other = load(None, "serving.content_seed=1", trace={"source": "", "generate": "zipf"})
    assert other[0].routing.source_hash not in hashes


def test_another_rate_stretches_the_same_draws() -> None:
    spec = Serving.model_validate(SMALL)
    slow, fast = (draw_requests(at_rate(spec, rate), 0).arrival_ps for rate in (1.0, 4.0))
    assert slow is not None and fast is not None
    np.testing.assert_allclose(slow / 4, fast, atol=1)


@pytest.mark.parametrize(("process", "burstiness", "cv"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)])
def test_gaps_have_the_stated_rate_and_spread(process: str, burstiness: float, cv: float) -> None:
    """cv: standard deviation over mean, 1 / sqrt(burstiness)."""
    spec = Serving.model_validate({"requests": 40_000, "arrivals": {"process": process, "requests_per_s": 5.0, "burstiness": burstiness}})
    arrival = draw_requests(spec, 3).arrival_ps
    assert arrival is not None
    gaps = np.diff(arrival) * PS
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_lengths_are_drawn_as_stated() -> None:
    lognormal = {"distribution": "lognormal", "mean": 512, "sigma": 0.8, "low": 1, "high": 1_000_000}
    spec = Serving.model_validate({"requests": 40_000, "prompt": lognormal, "output": {"distribution": "uniform", "low": 3, "high": 9}})
    drawn = draw_requests(spec, 0)
    assert drawn.prompt.mean() == pytest.approx(512, rel=0.03)
    assert np.log(drawn.prompt).std() == pytest.approx(0.8, rel=0.03)
    assert (drawn.output.min(), drawn.output.max()) == (3, 9)


# --- files


def test_the_columns_of_the_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319569,3180,8\n")
    found = read_requests(path, "azure")
    assert found.arrival_ps is not None
    assert (found.prompt.tolist(), found.output.tolist(), found.arrival_ps.tolist()) == ([4808, 3180], [10, 8], [0, 51_996_900_000])


def test_conversations(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    talks = [
        {
            "id": "a",
            "conversations": [{"from": "human", "value": "x" * 9}, {"from": "gpt", "value": "é" * 6}, {"from": "human", "value": "y"}],
        },
        {"id": "b", "conversations": [{"from": "gpt", "value": "no question"}]},
        {
            "id": "c",
            "conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "ab"}, {"from": "assistant", "value": "c"}],
        },
    ]
    path.write_text(json.dumps(talks))
    found = read_requests(path, "sharegpt")
    assert (found.prompt.tolist(), found.output.tolist(), found.arrival_ps) == ([3, 1], [3, 1], None)
    assert "1 conversations" in found.notes[1]


def test_a_run_of_a_file(tmp_path: Path) -> None:
    """In the order of the file's times, exact to the picosecond; then drawn from it, both lengths of a row together."""
    (tmp_path / "requests.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0.5,3,2\n0.25,4,1\n0.000000000001,5,3\n")
    serving = {"file": "requests.csv", "arrivals": {"process": "file"}, "requests": 5}
    case, requests = load_serving(write(SMALL | serving, tmp_path))
    assert requests.arrival_ps is not None
    assert requests.arrival_ps.tolist() == [1, 250_000_000_000, 500_000_000_000]
    assert (requests.prompt.tolist(), requests.output.tolist()) == ([5, 4, 3], [3, 1, 2])
    assert any("3 requests, as many as requests.csv has" in note for note in requests.notes)
    assert result(case, requests).times_ps["arrival"].tolist() == requests.arrival_ps.tolist()
    _, drawn = load_serving(write(SMALL | {"file": "requests.csv", "requests": 50}, tmp_path))
    assert set(zip(drawn.prompt.tolist(), drawn.output.tolist(), strict=True)) == {(5, 3), (4, 1), (3, 2)}


HEAD = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("form", "text", "says"),
    [
        ("csv", "", "columns"),
        ("csv", "prompt_tokens,answer\n1,2\n", "columns"),
        ("csv", HEAD, "at least one request"),
        ("csv", HEAD + "0,1\n", ":2"),
        ("csv", HEAD + "0,5,5\nx,1,1\n", ":3"),
        ("csv", HEAD + "nan,1,1\n", "arrival_s"),
        ("csv", HEAD + "-1,1,1\n", "arrival_s"),
        ("csv", HEAD + "0,0,1\n", "prompt_tokens"),
        ("csv", HEAD + "0,1,99999999\n", "output_tokens"),
        ("csv", HEAD + "0,1,1.5\n", "output_tokens"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "TIMESTAMP"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-41 00:00:00,1,1\n", "TIMESTAMP"),
        ("sharegpt", "[", "JSON"),
        ("sharegpt", "{}", "list of conversations"),
        ("sharegpt", '[{"id": 1}]', "conversations"),
        ("sharegpt", '[{"conversations": [{"from": "human", "value": 7}]}]', "at least one request"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, form: str, text: str, says: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_requests(path, form)
    assert says in str(caught.value)


# --- what is refused


@pytest.mark.parametrize(
    ("serving", "settings", "says"),
    [
        ({"step_tokens": 2}, {}, "step_tokens"),
        ({"arrivals": {"process": "poisson", "burstiness": 0.5}}, {}, "burstiness"),
        ({"arrivals": {"process": "file"}}, {}, "file"),
        ({"file": "nowhere.csv"}, {}, "nowhere.csv"),
        ({"arrivals": {"requests_per_s": 0.0}}, {}, "requests_per_s"),
        ({"arrivals": {"requests_per_s": float("nan")}}, {}, "requests_per_s"),
        ({"arrivals": {"requests_per_s": 0.0001}, "requests": 2000}, {}, "104 days"),
        ({"prompt": {"distribution": "uniform", "low": 9, "high": 3}}, {}, "low"),
        ({"prompt": {"mean": 0}}, {}, "mean"),
        ({"preemption": "swap"}, {}, "swap"),
        ({"swap": "1 kB"}, {}, "swap"),
        ({"levels": {"mine": {"ttft": "0 s", "tpot": "1 s"}}}, {}, "ttft"),
        ({"levels": {"mine": {"ttft": 1, "tpot": "1 s"}}}, {}, "ttft"),
        ({"unknown": 1}, {}, "unknown"),
        ({}, {"workload": {"output_tokens": 3}}, "both"),
        ({}, {"memory": {"kv_bytes": "10 B"}}, "kv_bytes"),
        ({"prompt": {"mean": 14}}, {"trace": {"sequences": "exact"}}, "sequences"),
        ({}, {"memory": {"kv_from_experts": True}}, "kv_from_experts"),
        ({}, {"placement": {"pools": {"vram": {"hold": 2, "policy": "belady"}, "ram": {"hold": "all"}}}}, "belady"),
        ({}, {"prefetch": {"predictor": "previous"}}, "prefetch"),
        (
            {"preemption": "swap", "swap": "1 kB"},
            {"on": machine(None, 100_000), "placement": {"pools": {"unified": {"hold": "all"}}}},
            "preemption",
        ),
    ],
)
def test_bad_scenarios_are_refused(serving: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        result(*load(serving, **settings))
    assert says in str(caught.value)


def test_a_lockstep_command_refuses_a_scenario_of_requests() -> None:
    with pytest.raises(InputError, match="serve-sim"):
        load_case(write(SMALL))
    with pytest.raises(InputError, match="moesim run"):
        load_serving(Path(__file__).parents[1] / "scenarios" / "quickstart.yaml")


def test_requests_longer_than_the_cache_are_counted() -> None:
    for arrivals in (SMALL["arrivals"], {"process": "concurrency", "concurrency": 2}):
        data = result(*load({"arrivals": arrivals}, memory={"context_tokens": 10, "kv_bytes": "400 B"})).as_dict()
        assert data["requests"]["refused"] > 0
        assert data["requests"]["ended"] + data["requests"]["refused"] == data["requests"]["offered"] == 9


def test_out_of_memory_is_a_result() -> None:
    case, requests = load(None, on=machine(3_000), placement={"pools": {"vram": {"hold": 4}, "ram": {"hold": "all"}}})
    data = serve(case, requests).as_dict()
    assert data["oom"]["tier"] == "vram" and data["metrics"] is None


# --- figures


def test_figures_of_one_request() -> None:
    """One request of 8 + 3 tokens, 6 a step: its times are those of its four steps."""
    served = result(*load({"requests": 1, "prompt": {"mean": 8}, "output": {"mean": 3}, "most_sequences": 1}))
    record, data = served.run.record, served.as_dict()
    arrival, ends = int(served.run.arrival_ps[0]), record.end_ps
    assert [one.parts for one in record.formed] == [[(0, 0, 6)], [(0, 6, 2)], [(0, 8, 1)], [(0, 9, 1)]]
    assert record.begin_ps == [arrival, *ends[:-1]]
    ms = 1e-9
    assert data["metrics"]["ttft_ms"]["mean"] == pytest.approx((ends[1] - arrival) * ms, rel=1e-12)
    assert data["metrics"]["tpot_ms"]["mean"] == pytest.approx((ends[3] - ends[1]) / 2 * ms, rel=1e-12)
    assert data["metrics"]["itl_ms"]["mean"] == pytest.approx((ends[3] - ends[1]) / 2 * ms, rel=1e-12)
    assert data["metrics"]["e2el_ms"]["mean"] == pytest.approx((ends[3] - arrival) * ms, rel=1e-12)
    assert data["queue"]["delay_ms"]["mean"] == 0
    assert data["metrics"]["output_throughput_tok_s"] == pytest.approx(3 / ((ends[3] - arrival) * PS), rel=1e-12)
    assert data["kv"]["peak_occupancy"] == 1.0  # 10 of at most 11 tokens: all 3 blocks of 4


def test_levels_split_good_from_bad() -> None:
    case, requests = load({"arrivals": {"process": "concurrency", "concurrency": 5}})
    served = result(case, requests)
    ttft_s = float(np.median(served.ttft_ms)) / 1e3
    levels = {"mine": {"ttft": f"{ttft_s * 1e9 + 1:.0f} ns", "tpot": "1 s"}, "none": {"ttft": "1 ps", "tpot": "1 ps"}}
    data = result(*load({"arrivals": {"process": "concurrency", "concurrency": 5}, "levels": levels})).as_dict()["levels"]
    assert data["mine"]["good_requests"] == 5 and not data["mine"]["holds"]
    assert data["none"]["good_requests"] == 0
    assert data["chat"]["good_requests"] == 9 and data["chat"]["holds"]


def test_io_wait_does_not_count_time_without_requests() -> None:
    """All experts are in place, so nothing ever waits for a load, however long nobody comes."""
    data = result(
        *load({"arrivals": {"process": "poisson", "requests_per_s": 5.0}}, placement={"pools": {"vram": {"hold": "all"}}})
    ).as_dict()
    assert data["metrics"]["io_wait_s"] == 0.0
    assert data["lanes"]["gpu"]["utilisation"] < 0.1


def test_a_mixed_step_loads_the_union_of_its_experts() -> None:
    """Three sequences of two experts a layer: a step moves no expert twice, and counts the tokens of each in its compute."""
    served = result(
        *load(
            {"arrivals": {"process": "concurrency", "concurrency": 3}}, placement={"pools": {"vram": {"hold": 0}, "ram": {"hold": "all"}}}
        )
    )
    ids, rows = served.run.case.routing.used.expert_ids, served.run.rows
    sets = sum(
        len(np.unique(ids[np.concatenate([rows.rows(r)[a : a + n] for r, a, n in one.parts]), layer]))
        for one in served.run.record.formed
        for layer in range(2)
    )
    data = served.as_dict()
    assert data["metrics"]["accesses"] == {"cache": 0, "prefetch": 0, "late": 0, "miss": sets}
    assert data["transfers"]["up"]["bytes"] == 1000 * sets


# --- the curve


@cache
def curve() -> Saturation:
    case, _ = load()
    return saturation(case, [300.0, 3000.0, 30000.0], [1, 4], debug=True)


def test_a_curve_has_a_knee_and_capacities() -> None:
    made = curve()
    data = made.as_dict()["curves"]
    assert [point["offered"] for point in data["requests_per_s"]["points"]] == [300.0, 3000.0, 30000.0]
    assert [point["offered"] for point in data["users"]["points"]] == [1.0, 4.0]
    powers = {point["offered"]: point["power"] for point in data["requests_per_s"]["points"]}
    assert data["requests_per_s"]["knee"] == max(powers, key=lambda rate: powers[rate])
    assert data["users"]["capacity"]["chat"] == 4.0
    ttft = [point["metrics"]["ttft_ms"]["mean"] for point in data["requests_per_s"]["points"]]
    assert ttft == sorted(ttft) and ttft[0] < ttft[2]


def test_a_point_of_a_curve_is_the_run_alone() -> None:
    case, requests = load({"arrivals": {"process": "gamma", "requests_per_s": 3000.0, "burstiness": 0.4}})
    point = curve().curve("requests_per_s")[1][1]
    alone = result(case, requests).as_dict()
    assert to_json(point) == to_json(alone)


@pytest.mark.parametrize(("rates", "users"), [([1.0, 1.0], []), ([-1.0], []), ([float("nan")], []), ([], [0])])
def test_bad_points_are_refused(rates: list[float], users: list[int]) -> None:
    with pytest.raises(InputError, match="each once"):
        saturation(load()[0], rates, users)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = str(write(SMALL, tmp_path)), tmp_path / "curve.png"
    texts = []
    for _ in range(2):
        assert cli(["serve-sim", path, "--rates", "300,3000", "--concurrency", "1,2", "-o", "json", "--plot", str(plot), "--debug"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    data = json.loads(texts[0])
    assert sorted(data["curves"]) == ["requests_per_s", "users"]
    assert list(data) == sorted(data)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert cli(["serve-sim", path, "--rates", "300,3000", "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["offered"] for row in rows] == ["300.0", "3000.0"] and float(rows[0]["metrics.ttft_ms.p99"]) > 0
    for form in ("text", "md"):
        assert cli(["serve-sim", path, "-o", form]) == 0
        assert "Goodput" in capsys.readouterr().out
    assert cli(["serve-sim", path, "--seed", "3", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["curves"]["as_stated"]["points"][0]["provenance"]["seed"] == 3


@pytest.mark.parametrize(
    "arguments", [["--rates", "a"], ["--rates", "1,,2"], ["--concurrency", "1.5"], ["--concurrency", "0"], ["--plot", "x.txt"]]
)
def test_command_line_refuses(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["serve-sim", str(write(SMALL, tmp_path)), *arguments]) == EXIT_INPUT
    assert "error:" in capsys.readouterr().err


def test_command_line_says_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(SMALL, tmp_path, on=machine(3_000), placement={"pools": {"vram": {"hold": 4}, "ram": {"hold": "all"}}})
    assert cli(["serve-sim", str(path), "--rates", "1,2"]) == EXIT_DOES_NOT_FIT
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "scenarios" / "serving").glob("*.yaml")), ids=lambda p: p.stem)
def test_bundled_scenarios_run(path: Path) -> None:
    case, requests = load_serving(path.stem, ("serving.requests=2",))
    spec = case.scenario.serving
    assert spec is not None
    assert run_point(case, spec, debug=True).as_dict()["requests"]["ended"] == 2
    assert requests.prompt.min() > 0


def test_importing_serving_is_light() -> None:
    heavy = "import sys, moesim.serving, moesim.serving.curve; print(sorted({'numba', 'torch', 'matplotlib', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_windows_and_states_are_set_aside() -> None:
    """A layer with a window of 4 tokens takes 4 tokens of every sequence whatever its context; blocks count the other layer alone."""
    window = {"kind": "sliding", "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "window": 4}
    of = model(2, 4, 2, attention_overrides=[{"layers": "0", "attention": window}])
    case, requests = load(None, of=of, memory={"kv_bytes": "1000 B"})
    run = ServingRun(case, requests)
    assert run.kv.fixed_bytes == {"vram": 4 * 8} and run.kv.block_bytes == {"vram": 4 * 8}
    assert run.kv.blocks == (1000 - 3 * 32) // 32
    assert result(*load(None, of=real_model(2, experts={"n_experts": 4, "top_k": 2}))).as_dict()["requests"]["ended"] == 9
