"""Owns samples of task times from real runs: how long each kind of task took, alone and beside other lanes, and how long it took to begin.

Dispatch belongs to a task: its time runs from the end of what held it (its cause in the timeline) to its own end. A task that waited
for another lane's worker begins later than one that follows on its own lane; the difference is the hand-over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.schedule import Kind, Schedule, Work
from moesim.timeline import CAUSE_HEAD_OF_LINE, Timeline

Ints = NDArray[np.int64]
Seconds = NDArray[np.floating[Any]]  # or shares
ALONE, BESIDE = 0.05, 0.9  # shares of a task's time during which another lane was busy


def eligible_ps(timeline: Timeline) -> Ints:
    """Return when nothing but the engine itself held each task any more, (N,): the end of its cause."""
    cause = timeline.cause
    at = np.where(timeline.cause_type == CAUSE_HEAD_OF_LINE, timeline.start_ps[cause], timeline.end_ps[cause])
    return np.where(cause >= 0, at, 0)


@dataclass(frozen=True)
class Samples:
    """Tasks of one real run, (N,) columns.

    Parameters
    ----------
    works : list of Work
        What each task asked for.
    kind, lane : arrays
    lanes : tuple of str
        Names of the lane numbers.
    taken_s : array
        Time with dispatch.
    begun_s : array
        From the end of the cause to the start.
    handed : array of bool
        Whether the cause was a task of another lane.
    beside : dict
        By lane: the share of each task's time during which that lane was busy.
    """

    works: list[Work]
    kind: NDArray[np.int8]
    lane: NDArray[np.int8]
    lanes: tuple[str, ...]
    taken_s: Seconds
    begun_s: Seconds
    handed: NDArray[np.bool_]
    beside: Mapping[str, Seconds]

    def on(self, lane: str) -> NDArray[np.bool_]:
        """Tasks of a lane."""
        return np.asarray(self.lane == self.lanes.index(lane))

    @property
    def alone(self) -> NDArray[np.bool_]:
        """Tasks beside which no other lane was busy to speak of."""
        return np.asarray(sum(self.beside.values()) < ALONE)


def take_samples(schedule: Schedule, timeline: Timeline) -> Samples:
    """Return the samples of one real run."""
    parts = schedule.fragments
    works = [f.works[row] for f in parts for row in f.work.tolist()]
    kind, lane = np.concatenate([f.kind for f in parts]), np.concatenate([f.lane for f in parts])
    free, cause = eligible_ps(timeline), timeline.cause
    beside = {}
    for number, other in enumerate(schedule.lanes):
        mine = lane == number
        share = _busy_share(timeline.start_ps[mine], timeline.end_ps[mine], timeline.start_ps, timeline.end_ps)
        beside[other.name] = np.where(mine, 0.0, share)
    return Samples(
        works, kind, lane, tuple(x.name for x in schedule.lanes), (timeline.end_ps - free) * 1e-12, (timeline.start_ps - free) * 1e-12,
        (cause >= 0) & (lane[cause] != lane), beside,
    )  # fmt: skip


def _busy_share(start: Ints, end: Ints, a: Ints, b: Ints) -> Seconds:
    """Share of each interval (a, b) that disjoint intervals (start, end) cover; tasks of one server never overlap."""
    if not len(start):
        return np.zeros(len(a))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    total = np.concatenate([[0], np.cumsum(end - np.maximum(start, np.concatenate([[0], end[:-1]])))])

    def until(x: Ints) -> Ints:
        i = np.searchsorted(start, x, side="right")
        last = np.maximum(i - 1, 0)
        return total[i] - np.where(i > 0, np.maximum(end[last] - x, 0), 0)

    share: Seconds = (until(b) - until(a)) / np.maximum(b - a, 1)
    return share


def trimmed_mean(values: Seconds, cut: float = 0.05) -> float:
    """Mean without the largest and smallest ``cut`` of the values: stalls of the machine are no property of a kernel."""
    ordered = np.sort(values)
    drop = int(len(ordered) * cut)
    return float(ordered[drop : len(ordered) - drop].mean())


COMPUTE = (Kind.ATTENTION, Kind.ROUTER, Kind.FFN, Kind.COMBINE, Kind.HEAD, Kind.COPY)
