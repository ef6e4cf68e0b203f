"""What is summed up piece by piece is what all tasks at once give, however a run is cut; and memory does not grow with the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import metrics_reference as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import write_scenario
from test_fast import cuts_of, few, jittered, programs
from timeline_program import Pieces, Program

from moesim import metrics
from moesim.cost import CostModel
from moesim.engines.des import DesEngine
from moesim.errors import InputError, MoesimError
from moesim.metrics import compiled as metrics_compiled
from moesim.metrics import kernel as metrics_kernel
from moesim.metrics.stream import Meter
from moesim.schedule import Kind
from moesim.simulate import LONG_RUN_TASKS, Result, load_case, simulate
from moesim.timeline import Timeline

KERNELS = {"plain": metrics_kernel, "compiled": metrics_compiled}


def measured(p: Program, pieces: Pieces, kernels: Any) -> tuple[Meter, Timeline]:
    meter, engine = Meter(p.lanes, 1, 1, kernels=kernels, keep=True), DesEngine(p.lanes)
    parts = []
    for fragment, costs in pieces:
        parts.append(engine.advance(fragment, costs))
        meter.add(fragment, costs, parts[-1])
    parts.append(engine.finish())
    meter.finish(parts[-1])
    return meter, Timeline.concat(parts)


@settings(few, max_examples=150)
@given(p=st.booleans().flatmap(lambda calm: programs(calm)), data=st.data())
def test_pieces_add_up_to_the_whole(p: Program, data: st.DataObject) -> None:
    """Any lanes and kinds; tasks that cross several borders, and such as are bound by tasks of later fragments (priority lanes)."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kinds = rng.choice(np.array(Kind, np.int8), p.n_tasks)
    pieces = tuple((replace(f, kind=kinds[f.first_task : f.first_task + f.n_tasks]), c) for f, c in p.pieces(cuts_of(p, data)))
    if data.draw(st.booleans()):
        pieces = jittered(pieces, data.draw(st.integers(0, 2**32)))
    for kernels in KERNELS.values():
        meter, timeline = measured(p, pieces, kernels)
        whole = reference.join(p.lanes, pieces, timeline)
        for name in ("summary", "lane_use", "critical_shares"):
            assert json.dumps(getattr(metrics, name)(meter)) == json.dumps(getattr(reference, name)(whole)), name
        got, expected = metrics.transfers(meter), reference.transfers(whole)
        assert {name: row["busy_s"] for name, row in got.items()} == {name: row["busy_s"] for name, row in expected.items()}
        compute = np.isin(kinds, [k for k in Kind if k.name in ("ATTENTION", "ROUTER", "FFN", "COMBINE", "HEAD")])
        np.testing.assert_array_equal(np.concatenate(meter.free)[compute], whole.free_of_loads[compute])


def check(result: Result) -> None:
    """A result that kept its tasks against the reference."""
    meter, prices = result.meter, CostModel(result.case.hardware)
    assert meter is not None and result.n_tasks == result.schedule.n_tasks
    whole = reference.join(meter.lanes, [(f, prices.costs(f)) for f in result.schedule.fragments], result.timeline)
    for name in ("summary", "transfers", "lane_use", "critical_shares"):
        assert json.dumps(getattr(metrics, name)(meter)) == json.dumps(getattr(reference, name)(whole)), name
    mark = result.memory
    at_once = reference.Watermark(mark.tiers, mark.lines, mark.events, mark.initial)
    assert meter.peak_bytes.tolist() == [at_once.peak_bytes(tier) for tier in range(len(mark.tiers))]
    np.testing.assert_array_equal(result.tasks.useful, reference.useful_loads(whole))


@pytest.mark.parametrize(
    ("scenario", "changes"),
    [
        ("quickstart", ("workload.prompt_tokens=8", "workload.output_tokens=24", "placement.pools.unified.hold=8")),
        ("quickstart", ("workload.output_tokens=12", "prefetch.predictor=popularity", "lanes=priority", "granularity=matrix")),
        ("ref-23b-plan-c", ("workload.prompt_tokens=16", "workload.output_tokens=12")),
        ("qwen3-30b-desktop", ("workload.output_tokens=70", "lanes=priority")),
    ],
)
@pytest.mark.parametrize("engine", ["des", "fast"])
def test_scenarios_add_up(scenario: str, changes: tuple[str, ...], engine: str) -> None:
    if scenario == "qwen3-30b-desktop" and engine == "des":
        changes = ("workload.output_tokens=4", "lanes=priority")
    check(simulate(load_case(scenario, (*changes, f"engine={engine}"))))


def test_sums_need_no_tasks(tmp_path: Path) -> None:
    name = write_scenario(tmp_path)
    kept, sums = simulate(load_case(name)), simulate(load_case(name), keep=False)
    assert kept.as_dict() == sums.as_dict() and sums.kept is None
    with pytest.raises(InputError, match=r"expected a run that kept them, got sums alone; call simulate\(case, keep=True\)"):
        _ = sums.timeline


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """All that a meter carries besides two numbers a step is as large after 1,600 tokens as after 400."""
    sizes = []
    for tokens in (400, 1_600):
        meter = simulate(load_case(write_scenario(tmp_path), (f"workload.output_tokens={tokens}", "engine=fast")), keep=False).meter
        assert meter is not None and meter.n_tasks > 50 * tokens
        held = [value for name, value in vars(meter).items() if name not in ("_steps", "_step_end")]
        held += [column for value in held if isinstance(value, dict) for column in value.values()]
        sizes.append(sum(value.nbytes for value in held if isinstance(value, np.ndarray)))
    assert sizes[1] < 1.5 * sizes[0]


def test_a_run_that_has_not_ended_is_refused() -> None:
    p = Program([])
    meter = Meter(p.lanes, 1, 1)
    meter.finish(Timeline.from_rows([]))
    assert meter.steps.shape == (0, 6) and meter.n_tasks == 0
    from timeline_program import program

    p = program("a")
    p.task("a", 5)
    ((fragment, costs),) = p.pieces()
    meter = Meter(p.lanes, 1, 1)
    meter.add(fragment, costs, Timeline.from_rows([]))
    with pytest.raises(MoesimError, match="1 tasks of .* have not ended"):
        meter.finish(Timeline.from_rows([]))


def test_auto_takes_compiled_code_for_long_runs() -> None:
    """The engine that ran is named in the result; a name in the scenario is obeyed."""
    short, long = load_case("quickstart", ("workload.output_tokens=16",)), load_case("quickstart", ("workload.output_tokens=4000",))
    assert (short.engine, long.engine) == ("des", "fast")
    assert short._expected_tasks < LONG_RUN_TASKS < long._expected_tasks
    assert load_case("quickstart", ("workload.output_tokens=4000", "engine=des")).engine == "des"
    assert simulate(short, keep=False).as_dict()["provenance"]["engine"] == "des"
