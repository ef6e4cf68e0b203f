"""Owns the saturation curve: one scenario at several offered rates or numbers of users, and where its knee is.

The knee is the point of the highest *power*, output throughput / mean end-to-end latency (Kleinrock, ICC 1979): before it throughput grows
faster than latency, behind it latency grows faster than throughput. It is one of the points that were run, so it is no finer than they are.
A level's capacity is the highest rate (or number of users) at which the level holds, see ``summary.py``.

All points have the same lengths and routing, and stretched arrivals of the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moesim.errors import InputError
from moesim.serving.loop import ServingRun
from moesim.serving.requests import at_concurrency, at_rate, draw_requests
from moesim.serving.summary import ServingResult
from moesim.serving_spec import Serving
from moesim.simulate import Case

RATE, USERS, AS_STATED = "requests_per_s", "users", "as_stated"


@dataclass(frozen=True, eq=False)
class Saturation:
    """What each point gave: its kind, what was offered, and its result as plain data."""

    case: Case
    points: tuple[tuple[str, float, dict[str, Any]], ...]

    def curve(self, kind: str) -> list[tuple[float, dict[str, Any]]]:
        return [(offered, data) for which, offered, data in self.points if which == kind]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _, _ in self.points))

    @property
    def oom(self) -> dict[str, Any] | None:
        return next((data["oom"] for _, _, data in self.points if data["oom"] is not None), None)

    def knee(self, kind: str) -> float | None:
        """The offered rate or number of users with the highest power; None of a single point, or where nothing ran."""
        powers = [(power(data), -offered) for offered, data in self.curve(kind) if data["metrics"] is not None]
        return -max(powers)[1] if len(powers) > 1 else None

    def capacity(self, kind: str) -> dict[str, float | None]:
        """By level: the most that was offered while it held; None where it never did."""
        ran = [(offered, data["levels"]) for offered, data in self.curve(kind) if data["levels"] is not None]
        return {
            name: max((offered for offered, levels in ran if levels[name]["holds"]), default=None) for name in (ran[0][1] if ran else ())
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the answer in a stable shape: points in the order of the command line."""
        curves = {}
        for kind in self.kinds:
            points = [{"offered": offered, "power": power(data) if data["metrics"] else None, **data} for offered, data in self.curve(kind)]
            curves[kind] = {"points": points, "knee": self.knee(kind), "capacity": self.capacity(kind)}
        return {"scenario": self.case.scenario.name, "curves": curves, "oom": self.oom}


def power(data: dict[str, Any]) -> float:
    """Output throughput / mean end-to-end latency, tokens/s^2."""
    return float(data["metrics"]["output_throughput_tok_s"] / (data["metrics"]["e2el_ms"]["mean"] * 1e-3))


def saturation(
    case: Case, rates: Sequence[float] = (), users: Sequence[int] = (), *, debug: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Saturation:  # fmt: skip
    """Run a scenario at several mean rates (requests/s) and numbers of users; as it states them where neither is given.

    Raises
    ------
    InputError
        If a rate is not positive, or one of them is named twice.
    """
    spec = case.scenario.serving
    if spec is None:
        raise InputError("serving", expected="a scenario with requests", got="none")
    for name, values in (("--rates", rates), ("--concurrency", users)):
        if len(set(values)) < len(values) or any(not 0 < value <= 1e6 for value in values):
            raise InputError(name, expected="numbers above 0, each once", got=",".join(f"{value:g}" for value in values))
    wanted: list[tuple[str, float, Serving]] = [(RATE, float(rate), at_rate(spec, rate)) for rate in rates]
    wanted += [(USERS, float(count), at_concurrency(spec, count)) for count in users]
    if not wanted:
        how = spec.arrivals
        wanted = [(AS_STATED, float(how.concurrency) if how.process == "concurrency" else how.requests_per_s or 0.0, spec)]
    points = []
    for done, (kind, offered, at) in enumerate(wanted):
        points.append((kind, offered, run_point(case, at, debug).as_dict()))
        if progress is not None:
            progress(done + 1, len(wanted))
    return Saturation(case, tuple(points))


def run_point(case: Case, spec: Serving, debug: bool = False) -> ServingResult:
    """Run a case with other arrivals; layout and routing stay as they are."""
    mine = replace(case, scenario=case.scenario.model_copy(update={"serving": spec}))
    mine.__dict__["routing"] = case.routing
    stated, users = case.scenario.serving or spec, spec.arrivals.concurrency
    closed = spec.arrivals.process == "concurrency"  # the same requests as stated, those of a file in its order, without times
    requests = draw_requests(spec.model_copy(update={"arrivals": stated.arrivals}) if closed else spec, case.scenario.seed, case.base)
    if closed:
        requests = replace(requests, arrival_ps=None, users=users)
    run = ServingRun(mine, requests, debug=debug)
    run.run()
    return ServingResult(run)
