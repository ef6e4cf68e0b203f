"""Queueing theory holds where it must: Lindley's recursion exactly, M/M/1 and M/D/1 means, Little's law, the utilisation law."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from planner_cases import machine
from serving_cases import SMALL, load, on_engine, result
from timeline_program import ENGINES, Program

from moesim.schedule import Lane
from moesim.serving.curve import at_rate, run_point
from moesim.serving.summary import ServingResult

Ints = NDArray[np.int64]


def lindley(arrival: Ints, service: Ints) -> Ints:
    """When each customer of a single server begins, in whole picoseconds: max(arrival, the end of the one before)."""
    begin, free = np.zeros(len(arrival), np.int64), 0
    for i, (at, time) in enumerate(zip(arrival.tolist(), service.tolist(), strict=True)):
        begin[i] = max(at, free)
        free = int(begin[i]) + time
    return begin


def served_by(engine: Any, arrival: Ints, service: Ints) -> Ints:
    """The same from an engine: one task a customer, added when it has come and the lane is free."""
    p = Program([Lane("gpu")])
    for time in service.tolist():
        p.task("gpu", time)
        p.end_step()
    state = engine(p.lanes)
    begin = []
    for at, (fragment, costs) in zip(arrival.tolist(), p.pieces(), strict=True):
        if at > state.now_ps:
            state.wait(at)
        begin += state.advance(fragment, costs).start_ps.tolist()
    return np.array(begin)


def draws(law: str, load_: float, n: int, seed: int) -> tuple[Ints, Ints]:
    rng = np.random.default_rng(seed)
    mean_ps = 1e9
    arrival = np.cumsum(rng.standard_exponential(n) * mean_ps / load_)
    service = rng.standard_exponential(n) * mean_ps if law == "M/M/1" else np.full(n, mean_ps)
    return np.ceil(arrival).astype(np.int64), np.ceil(service).astype(np.int64)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("law", ["M/M/1", "M/D/1"])
def test_an_engine_that_waits_is_lindleys_recursion(engine: Any, law: str) -> None:
    arrival, service = draws(law, 0.8, 400, 1)
    np.testing.assert_array_equal(served_by(engine, arrival, service), lindley(arrival, service))


@pytest.mark.parametrize("load_", [0.5, 0.8])
@pytest.mark.parametrize("law", ["M/M/1", "M/D/1"])
def test_mean_waits(law: str, load_: float) -> None:
    """Pollaczek and Khinchine: W = rho S / (1 - rho), half of it for constant service; standard error from 40 batches."""
    arrival, service = draws(law, load_, 12_000, 7)
    wait = (served_by(ENGINES[0], arrival, service) - arrival)[1000:] / 1e9
    batches = wait[: len(wait) // 40 * 40].reshape(40, -1).mean(axis=1)
    theory = load_ / (1 - load_) * (1.0 if law == "M/M/1" else 0.5)
    error = batches.std(ddof=1) / math.sqrt(40)
    assert abs(batches.mean() - theory) < 3 * error
    assert error < 0.2 * theory  # else the test could not fail


ONE: dict[str, Any] = {"most_sequences": 1, "step_tokens": 4, "requests": 40, "arrivals": {"process": "poisson", "requests_per_s": 2500.0}}


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_one_place_is_a_single_server(engine: str) -> None:
    """With room for one sequence a whole run is Lindley's recursion over the times that requests take."""
    case, requests = load(ONE)
    times = result(on_engine(case, engine), requests).times_ps
    begin = lindley(times["arrival"], times["last"] - times["begin"])
    np.testing.assert_array_equal(times["begin"], begin)
    assert (begin > times["arrival"]).any() and (begin == times["arrival"]).any()


def constant(n: int, load_: float, engine: str = "des") -> tuple[ServingResult, int]:
    """Requests of one prompt token and one answer token: one step, always as long. Returns the result and how long."""
    serving = ONE | {"prompt": {"mean": 1}, "output": {"mean": 1}}
    case, requests = load(serving, on=machine(), placement={"pools": {"vram": {"hold": "all"}}})
    case = on_engine(case, engine)
    alone = result(case, requests).times_ps
    service = set((alone["last"] - alone["begin"]).tolist())
    assert len(service) == 1
    (service_ps,) = service
    spec = case.scenario.serving
    assert spec is not None
    at = at_rate(spec, load_ / (service_ps * 1e-12)).model_copy(update={"requests": n})
    return run_point(case, at, debug=True), service_ps


@pytest.mark.parametrize("load_", [0.5, 0.8])
def test_serving_constant_requests_is_m_d_1(load_: float) -> None:
    served, service_ps = constant(1600, load_, "fast")
    times = served.times_ps
    wait = (times["begin"] - times["arrival"])[100:] / service_ps
    batches = wait.reshape(20, -1).mean(axis=1)
    theory, error = load_ / (1 - load_) / 2, batches.std(ddof=1) / math.sqrt(20)
    assert abs(batches.mean() - theory) < 3 * error
    assert error < 0.3 * theory


@pytest.mark.parametrize("engine", ["des", "fast"])
def test_utilisation_law(engine: str) -> None:
    """Busy time of the one lane that works = requests x service time of one, in whole picoseconds; so U = X S."""
    served, service_ps = constant(60, 0.7, engine)
    meter = served.run.meter
    assert int(meter.busy_ps.max()) == int(meter.busy_ps.sum()) == 60 * service_ps
    data = served.as_dict()
    completed_per_s = 60 / data["metrics"]["makespan_s"]
    assert data["lanes"]["gpu"]["utilisation"] == pytest.approx(completed_per_s * service_ps * 1e-12, rel=1e-12)


@pytest.mark.parametrize(
    "arrivals", [SMALL["arrivals"], {"process": "poisson", "requests_per_s": 900.0}, {"process": "concurrency", "concurrency": 3}]
)
def test_littles_law_exactly(arrivals: dict[str, Any]) -> None:
    """The integral of the number in the system, sampled between all its changes, equals the sum of times in it; nothing is rounded."""
    served = result(*load({"arrivals": arrivals, "requests": 25}))
    arrival, last = served.times_ps["arrival"], served.times_ps["last"]
    changes = np.unique(np.concatenate([arrival, last]))
    inside = [(int(b - a), int(((arrival <= a) & (last > a)).sum())) for a, b in zip(changes[:-1], changes[1:], strict=True)]
    assert sum(span * number for span, number in inside) == int((last - arrival).sum())
    little = served.as_dict()["little"]
    assert little["mean_in_system"] == pytest.approx(little["arrivals_per_s"] * little["mean_time_s"], rel=1e-12)


def test_a_closed_loop_keeps_its_users_busy() -> None:
    """Whoever gets the last token sends the next request at that very instant; so all users are in the system until requests run out."""
    served = result(*load({"arrivals": {"process": "concurrency", "concurrency": 4}, "requests": 20, "most_sequences": 2}))
    times = served.times_ps
    np.testing.assert_array_equal(np.sort(times["arrival"]), np.sort(np.concatenate([[0] * 4, np.sort(times["last"])[:16]])))
