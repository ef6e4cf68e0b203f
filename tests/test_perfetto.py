"""The exported timeline: a sound Chrome trace, tracks without overlap, sums that equal the metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from chrome_trace import problems
from small_runs import small_result

from moesim import metrics, perfetto
from moesim.simulate import load_case, simulate

Event = dict[str, Any]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads(json.dumps(perfetto.export(small_result()), allow_nan=False))


@pytest.fixture(scope="module")
def names(document: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}


def of(document: dict[str, Any], phase: str) -> list[Event]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_every_event_is_well_formed(document: dict[str, Any]) -> None:
    assert problems(document) == [] and document["otherData"]["model"] == "tinymoe"


def test_a_run_of_64_tokens_loads_and_its_sums_are_the_metrics() -> None:
    result = simulate(load_case("quickstart", ("workload.output_tokens=64", "engine=fast")))
    written = json.loads(json.dumps(perfetto.export(result), allow_nan=False))
    assert problems(written) == [] and result.meter is not None
    names = {e["tid"]: e["args"]["name"] for e in of(written, "M") if e["name"] == "thread_name"}
    sums: dict[str, float] = defaultdict(float)
    for event in of(written, "X"):
        sums[names[event["tid"]]] += event["dur"] * 1e-6
    busy = {lane: use["busy_s"] for lane, use in metrics.lane_use(result.meter).items()}
    assert {lane: sums[lane] for lane in busy} == pytest.approx(busy, rel=1e-9) and len(busy) >= 3
    assert sum(event["name"].startswith("decode token") for event in of(written, "X")) == 63  # the first comes with the prompt


def longer(event: Event) -> None:
    """Let a slice end within the next one of its track."""
    event["dur"] *= 1.01


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda events: events.append({**events[-1], "ph": "Z"}), "unknown phase"),
        (lambda events: next(e for e in events if e["ph"] == "X").update(dur=-1.0), "dur"),
        (lambda events: next(e for e in events if e["ph"] == "X" and e["dur"] > 0).update(ts=float("nan")), "ts"),
        (lambda events: longer(next(e for e in events if e["ph"] == "X" and e["cat"] == "step")), "ends after"),
        (lambda events: events.remove(next(e for e in events if e["ph"] == "f")), "flow"),
        (lambda events: next(e for e in events if e["ph"] == "s").update(ts=1e12), "no slice"),
        (lambda events: next(e for e in events if e["ph"] == "C").update(args={"x": "1"}), "counter"),
        (lambda events: events.remove(next(e for e in events if e["name"] == "thread_name")), "has no name"),
    ],
)
def test_the_reader_sees_what_is_wrong(change: Any, problem: str, document: dict[str, Any]) -> None:
    """The tests above would pass with a reader that accepts everything."""
    broken = json.loads(json.dumps(document))
    change(broken["traceEvents"])
    assert any(problem in text for text in problems(broken))


def test_each_lane_server_is_one_named_track(document: dict[str, Any], names: dict[int, str]) -> None:
    assert list(names.values()) == ["steps", "gpu", "h2d", "d2h", "ssd"]
    assert {event["tid"] for event in of(document, "X")} <= set(names)


def test_slices_of_a_track_do_not_overlap(document: dict[str, Any]) -> None:
    tracks: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in of(document, "X"):  # as Perfetto reads them: whole nanoseconds
        start = int(event["ts"] * 1000)
        tracks[event["tid"]].append((start, start + int(event["dur"] * 1000)))
    for spans in tracks.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_sums_per_lane_equal_the_metrics(document: dict[str, Any], names: dict[int, str]) -> None:
    meter = small_result().meter
    assert meter is not None
    sums: dict[str, float] = defaultdict(float)
    for event in of(document, "X"):
        sums[names[event["tid"]]] += event["dur"] * 1e-6
    for lane, use in metrics.lane_use(meter).items():
        assert sums[lane] == pytest.approx(use["busy_s"], rel=1e-9)
    assert sums["steps"] == pytest.approx(metrics.latency(meter)["e2el_ms"]["mean"] * 1e-3)


def test_steps_and_arguments(document: dict[str, Any], names: dict[int, str]) -> None:
    steps = [event["name"] for event in of(document, "X") if names[event["tid"]] == "steps"]
    assert steps == ["prefill chunk 1", *(f"decode token {i}" for i in range(1, 6))]
    loads = [event for event in of(document, "X") if event["name"].startswith(("load L", "prefetch L"))]
    assert loads and all(event["args"]["bytes"] > 0 and event["args"]["expert"] >= 0 for event in loads)
    assert {event["args"]["prefetch"] for event in loads} == {True, False}


def test_flows_go_from_loads_to_what_used_them(document: dict[str, Any], names: dict[int, str]) -> None:
    begins, ends = {e["id"]: e for e in of(document, "s")}, {e["id"]: e for e in of(document, "f")}
    assert begins and begins.keys() == ends.keys()
    starts = {(event["tid"], event["ts"]): event for event in of(document, "X")}
    for key, begin in begins.items():
        end = ends[key]
        load, ffn = starts[begin["tid"], begin["ts"]], starts[end["tid"], end["ts"]]
        assert load["cat"] in ("load", "prefetch") and ffn["cat"] == "ffn"
        assert load["args"]["expert"] == ffn["args"]["expert"] and begin["ts"] < end["ts"]


def test_counters(document: dict[str, Any]) -> None:
    result = small_result()
    assert result.meter is not None
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in of(document, "C"):
        by_name[event["name"]].append(event)
    channels = {"bandwidth vram", "bandwidth ram", "bandwidth ssd", "bandwidth pcie_h2d"}
    assert set(by_name) == {"memory vram", "memory ram", "loads in flight", "expert hit rate"} | channels
    for i, tier in enumerate(result.memory.tiers):
        assert max(sum(event["args"].values()) for event in by_name[f"memory {tier}"]) == result.meter.peak_bytes[i]
    flying = [event["args"]["loads"] for event in by_name["loads in flight"]]
    assert min(flying) == 0 == flying[-1] and max(flying) >= 1
    for events in by_name.values():
        assert all(a["ts"] <= b["ts"] for a, b in zip(events, events[1:], strict=False))


def test_bandwidth_adds_up_to_what_was_moved(document: dict[str, Any]) -> None:
    tasks = small_result().tasks
    most = small_result().case.hardware.channel_capacities()
    for c, channel in enumerate(tasks.channels):
        events = [event for event in of(document, "C") if event["name"] == f"bandwidth {channel}"]
        level = [event["args"]["bytes_per_s"] for event in events]
        moved = sum(rate * (b["ts"] - a["ts"]) * 1e-6 for rate, a, b in zip(level, events, events[1:], strict=False))
        lasting = tasks.end > tasks.start
        assert moved == pytest.approx(float(tasks.amounts[lasting, c].sum()), rel=1e-6)
        assert not level or (level[-1] == 0 and max(level) <= 1.001 * most[channel])


def test_hit_rate_per_step(document: dict[str, Any]) -> None:
    result = small_result()
    events = [event for event in of(document, "C") if event["name"] == "expert hit rate"]
    begins = [event["ts"] for event in of(document, "X") if event["cat"] == "step"]
    assert [event["ts"] for event in events] == begins
    access = result.tasks.access
    hits = sum(event["args"]["share"] * (access[:, 0] == step).sum() for step, event in enumerate(events))
    assert hits / len(access) == pytest.approx(result.as_dict()["metrics"]["expert_hit_rate"], abs=1e-5)


def test_two_timelines_in_one_file() -> None:
    result = small_result()
    slow = replace(result.timeline, start_ps=2 * result.timeline.start_ps, end_ps=2 * result.timeline.end_ps)
    pair = json.loads(json.dumps(perfetto.export_pair(result.case, result.schedule, {"simulated": result.timeline, "measured": slow})))
    said, took = ([event for event in pair["traceEvents"] if event["pid"] == pid] for pid in (1, 2))
    assert said[0]["args"]["name"].startswith("simulated: tinymoe") and took[0]["args"]["name"].startswith("measured: tinymoe")
    assert said[1:] == [event for event in perfetto.export(result)["traceEvents"] if event["ph"] != "M" or event["name"] != "process_name"]
    assert [2 * x["dur"] for x in said if x["ph"] == "X"] == pytest.approx([x["dur"] for x in took if x["ph"] == "X"])
    assert problems(pair) == []
    assert len({x["id"] for x in pair["traceEvents"] if x["ph"] == "s"}) == sum(x["ph"] == "s" for x in pair["traceEvents"])
