"""Owns the comparison of one case: predicted against measured, baselines that know less, and which kind of task is off.

Definitions:

- Dispatch belongs to the task: a measured task counts from the end of what allowed its start (of head-of-line blocking: from its start),
  as the simulator counts a hand-over as latency. So durations, lanes and overlap of both are of the same thing.
- Latency of a token: the time since the token before, of the first since the start of the run. The mean is that of all tokens, the first
  (with its prompt) included; median, p95 and rank correlation are of the gaps between tokens.
- Two errors that add up: with P predicted, M measured and S what the simulator gives when each task lasts as long as it was measured to,
  cost = (P - S) / M and schedule = (S - M) / M. A kind of task explains what S changes by when that kind alone lasts as long as
  predicted. As dispatch belongs to the tasks, S is M wherever the real engine kept to the dependencies, lanes and order of the schedule;
  two figures beside it ask more: ``means``, (S - M) / M when each task lasts as long as its like did on average, and ``dispatch``,
  the share of M that S loses when tasks count from where they really began.
- Baselines have the same calibrated costs and the same hits: ``active bytes``: bytes that tasks touch over the bandwidth of their memory
  plus bytes read over the drive's; ``sum``: all tasks alone, one after the other; ``overlap``: compute alone or the busiest other lane
  alone, whichever is longer.

It must not know how runs are made, nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim import metrics
from moesim.calibrate.samples import eligible_ps
from moesim.cost import CostModel, Costs
from moesim.engines.retime import retime
from moesim.metrics.stream import Meter
from moesim.ranks import rank_correlation
from moesim.schedule import COMPUTE_KINDS, Kind, Schedule, Work
from moesim.simulate import Case, load_meter
from moesim.timeline import Timeline

MS = 1e-9  # of a picosecond
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tokens:
    """When tokens came."""

    end_ps: Ints  # (N,)

    @property
    def mean_ms(self) -> float:
        return float(self.end_ps[-1]) * MS / len(self.end_ps)

    @property
    def gaps_ms(self) -> Floats:
        """Time between tokens, (N - 1,); of a single token the time until it."""
        gaps = np.diff(self.end_ps) if len(self.end_ps) > 1 else self.end_ps
        return np.asarray(gaps * MS, np.float64)


def emitting(schedule: Schedule) -> Ints:
    """Return the last tasks of the steps that end a token, or of all steps where none does (a prompt alone)."""
    steps = np.concatenate([f.steps for f in schedule.fragments])
    out = steps[:, 5] > 0
    return np.asarray(steps[out if out.any() else slice(None), 2])


def tokens(schedule: Schedule, timeline: Timeline) -> Tokens:
    """Return when the tokens of a run came."""
    return Tokens(timeline.end_ps[emitting(schedule)])


def with_dispatch(timeline: Timeline) -> Timeline:
    """Return a measured timeline whose tasks start when nothing but the engine held them any more."""
    return replace(timeline, start_ps=np.minimum(timeline.start_ps, eligible_ps(timeline)))


def measure(case: Case, schedule: Schedule, costs: Sequence[Costs], timeline: Timeline) -> Meter:
    """Return the sums over a timeline, simulated or measured."""
    meter = load_meter(case, case.planner())
    for fragment, cost in zip(schedule.fragments, costs, strict=True):
        rows = slice(fragment.first_task, fragment.first_task + fragment.n_tasks)
        columns = (timeline.task, timeline.start_ps, timeline.end_ps, timeline.server, timeline.cause, timeline.cause_type)
        meter.add(fragment, cost, Timeline(*(column[rows] for column in columns)))  # type: ignore[arg-type]
    meter.finish(Timeline.concat([]))
    return meter


def costs_of(case: Case, schedule: Schedule) -> list[Costs]:
    """Return the costs of a schedule's fragments on the case's machine."""
    prices = CostModel(case.hardware)
    return [prices.costs(fragment) for fragment in schedule.fragments]


def lasting(schedule: Schedule, costs: Sequence[Costs], duration_ps: Ints) -> list[Costs]:
    """Return costs under which each task lasts as long as given, (N,), whatever else is under way."""
    out = []
    for fragment, cost in zip(schedule.fragments, costs, strict=True):
        rows = slice(fragment.first_task, fragment.first_task + fragment.n_tasks)
        n = fragment.n_tasks
        out.append(
            replace(
                cost, price=np.arange(n, dtype=np.int32), latency_ps=duration_ps[rows].copy(), volume=np.zeros(n), cap=np.full(n, np.inf),
                shares=np.zeros((n, cost.shares.shape[1])),
            )
        )  # fmt: skip
    return out


def baselines_ms(case: Case, schedule: Schedule, costs: Sequence[Costs]) -> dict[str, float]:
    """Return the mean latency of a token that simpler models predict from the same costs and the same hits."""
    kind, lane = column(schedule, "kind"), column(schedule, "lane")
    n = len(emitting(schedule))
    alone = np.concatenate([cost.alone_ps() for cost in costs])
    compute = np.isin(kind, COMPUTE_KINDS)
    busy = [float(alone[~compute & (lane == i)].sum()) / x.width for i, x in enumerate(schedule.lanes)]
    working = float(alone[compute].sum())
    return {
        "active bytes": _active_bytes_s(case, schedule) * 1e3 / n,
        "sum": (working + sum(busy)) * MS / n,
        "overlap": max(working, *busy) * MS / n,
    }


def _active_bytes_s(case: Case, schedule: Schedule) -> float:
    """Bytes over bandwidth: those of devices over what a task streams, those of links and drives over what they attain."""
    hardware, io = case.hardware, case.scenario.io
    total = 0.0
    for fragment in schedule.fragments:
        count = np.bincount(fragment.work, minlength=len(fragment.works)).tolist()
        for work, n in zip(fragment.works, count, strict=True):
            if work.resource in hardware.devices:
                total += n * (work.weight_bytes + work.state_bytes) / hardware.stream_cap(work.resource)
            elif work.resource in hardware.links:
                total += n * work.transfer_bytes / hardware.channels[hardware.links[work.resource].channel].bandwidth.value
            else:
                total += n * work.transfer_bytes / hardware.read_bandwidth(work.resource, io.request, io.depth, engine=io.engine)
    return total


def column(schedule: Schedule, name: str) -> Any:
    """Return a task column of a whole schedule, (N,)."""
    return np.concatenate([getattr(f, name) for f in schedule.fragments])


@dataclass(frozen=True)
class KindError:
    """How one kind of task on one lane was predicted, and how much of the latency's error that explains."""

    lane: str
    kind: str
    n: int
    predicted_us: float  # mean duration
    measured_us: float
    explains_ms: float  # per token, signed: above 0 where the prediction is too slow

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1 if self.measured_us > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "lane": self.lane, "kind": self.kind, "n": self.n, "predicted_us": self.predicted_us, "measured_us": self.measured_us,
            "error": self.error, "explains_ms": self.explains_ms,
        }  # fmt: skip


@dataclass(frozen=True)
class Explained:
    """The error of a mean latency in parts: ``cost`` + ``schedule`` is the whole of it, relative to what was measured."""

    cost: float
    schedule: float
    means: float
    dispatch: float
    kinds: tuple[KindError, ...]  # what explains most first


def explain(schedule: Schedule, costs: Sequence[Costs], predicted: Timeline, measured: Timeline) -> Explained:
    """Take the error of one run apart.

    Parameters
    ----------
    schedule : Schedule
    costs : sequence of Costs
        Any costs of the schedule; they give the channels.
    predicted, measured : Timeline
        The latter as it was measured, dispatch apart.
    """
    gates, counted = emitting(schedule), with_dispatch(measured)
    said, took = (line.end_ps - line.start_ps for line in (predicted, counted))
    bare = measured.end_ps - measured.start_ps
    kind, lane = column(schedule, "kind"), column(schedule, "lane")
    pairs = np.unique(np.stack([lane, kind], axis=1), axis=0).tolist()
    masks = [(lane == number) & (kind == what) for number, what in pairs]
    lengths = [took, bare, _mean_of_like(schedule, took), *(np.where(mask, said, took) for mask in masks)]
    ends = retime(schedule, [lasting(schedule, costs, length) for length in lengths]).step_end_ps
    last = np.flatnonzero(np.isin(np.concatenate([f.steps for f in schedule.fragments])[:, 2], gates))[-1]
    whole = ends[:, last].astype(np.float64) * MS / len(gates)
    p, m = (tokens(schedule, line).mean_ms for line in (predicted, measured))
    s = whole[0]
    kinds = [
        KindError(
            schedule.lanes[number].name, Kind(what).name.lower(), int(mask.sum()), float(said[mask].mean()) * 1e-6,
            float(took[mask].mean()) * 1e-6, float(whole[3 + i] - s),
        )
        for i, ((number, what), mask) in enumerate(zip(pairs, masks, strict=True))
    ]  # fmt: skip
    kinds.sort(key=lambda it: -abs(it.explains_ms))
    return Explained(float((p - s) / m), float((s - m) / m), float((whole[2] - m) / m), float((s - whole[1]) / m), tuple(kinds))


def _mean_of_like(schedule: Schedule, duration_ps: Ints) -> Ints:
    """Return for each task the mean duration of the tasks that ask the same of the same lane, (N,)."""
    numbers: dict[tuple[int, int, Work], int] = {}
    like = []
    for f in schedule.fragments:
        for lane, kind, work in zip(f.lane.tolist(), f.kind.tolist(), f.work.tolist(), strict=True):
            like.append(numbers.setdefault((lane, kind, f.works[work]), len(numbers)))
    mean = np.bincount(like, duration_ps) / np.bincount(like)
    return np.asarray(mean[like], np.int64)


@dataclass(frozen=True)
class Measured:
    """What one real run gave, in plain terms."""

    timeline: Timeline
    hits_equal: bool
    bytes_equal: bool
    differences: tuple[str, ...] = ()
    inversions: Mapping[str, int] | None = None  # by lane: tasks that started out of order
    violations: int = 0
    router_agreement: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Executed:
    """A case that was simulated and run. ``failed`` says why a real run did not end; ``runs`` is what ended before."""

    case: Case
    schedule: Schedule
    costs: Sequence[Costs]
    predicted: Timeline
    runs: Sequence[Measured]
    failed: str = ""

    @property
    def typical(self) -> Measured:
        """The run whose mean latency is the median, or nearest to it."""
        means = np.array([tokens(self.schedule, run.timeline).mean_ms for run in self.runs])
        return self.runs[int(np.abs(means - np.median(means)).argmin())]


def compare(it: Executed) -> dict[str, Any]:
    """Return all figures of a case, in the shape of ``validate -o json``."""
    out: dict[str, Any] = {"name": it.case.scenario.name, "failed": it.failed}
    if it.failed or not it.runs:
        return out | {"failed": it.failed or "it was not run", "hits_equal": False, "bytes_equal": False, "differences": []}
    said = tokens(it.schedule, it.predicted)
    came = [tokens(it.schedule, run.timeline) for run in it.runs]
    means = np.array([t.mean_ms for t in came])
    measured = float(np.median(means))
    noise = float(means.std(ddof=1) / measured) if len(means) > 1 else 0.0
    typical = it.typical
    hidden = it.case.scenario.io.engine == "mmap"
    simulated = measure(it.case, it.schedule, it.costs, it.predicted)
    sums, own = metrics.summary(simulated, hidden), metrics.lane_use(simulated)
    meters = [measure(it.case, it.schedule, it.costs, with_dispatch(run.timeline)) for run in it.runs]
    real = [metrics.summary(meter, hidden) for meter in meters]
    lanes = [metrics.lane_use(meter) for meter in meters]
    parts = explain(it.schedule, it.costs, it.predicted, typical.timeline)
    simple = baselines_ms(it.case, it.schedule, it.costs)
    gaps = np.median([t.gaps_ms for t in came], axis=0)
    return out | {
        "hits_equal": all(run.hits_equal for run in it.runs),
        "bytes_equal": all(run.bytes_equal for run in it.runs),
        "differences": list(dict.fromkeys(text for run in it.runs for text in run.differences)),
        "violations": sum(run.violations for run in it.runs),
        "inversions": {lane: sum((run.inversions or {}).get(lane, 0) for run in it.runs) for lane in own},
        "hit_rate": sums["expert_hit_rate"],
        "tokens": len(said.end_ps),
        "latency_ms": _pair(said.mean_ms, measured) | {"noise": noise, "runs": means.tolist()},
        "median_ms": _pair(float(np.median(said.gaps_ms)), float(np.median([np.median(t.gaps_ms) for t in came]))),
        "p95_ms": _pair(_p95(said), float(np.median([_p95(t) for t in came]))),
        "rank_correlation": rank_correlation(said.gaps_ms, gaps),
        "overlap_coverage": {"predicted": sums["overlap_coverage"], "measured": _median([r["overlap_coverage"] for r in real])},
        "io_wait_ms_per_token": {"predicted": sums["io_wait_ms_per_token"], "measured": _median([r["io_wait_ms_per_token"] for r in real])},
        "lanes": {
            lane: {"predicted": own[lane]["utilisation"], "measured": _median([use[lane]["utilisation"] for use in lanes])} for lane in own
        },
        "baselines": {name: value / measured - 1 for name, value in simple.items()},
        "baselines_ms": simple,
        "errors": {"cost": parts.cost, "schedule": parts.schedule, "means": parts.means, "dispatch": parts.dispatch},
        "kinds": [kind.as_dict() for kind in parts.kinds],
        "router_agreement": typical.router_agreement,
        "loss": typical.loss,
    }


def _p95(times: Tokens) -> float:
    return float(np.percentile(times.gaps_ms, 95))


def _pair(predicted: float, measured: float) -> dict[str, Any]:
    return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
