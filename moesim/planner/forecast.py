"""Owns estimates of when tasks will end, made while a run is planned, and the choice of a place for experts that rests on them.

A forecast takes every lane in order and every task alone on its channels: the engines' own times, but for contention and jitter. It looks
ahead of nothing, so a choice is that of list scheduling (Graham 1969): each expert, the most loaded first, goes where it is done first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

from moesim.cost import CostModel
from moesim.layout import Layout
from moesim.planner.works import Works
from moesim.schedule import Dep, FragmentBuilder, Kind, Lane, Work


class Forecast(FragmentBuilder):
    """Builds fragments and estimates when their tasks end.

    Parameters
    ----------
    lanes : tuple of Lane
    prices : CostModel
        Of the machine that the run is planned for.
    """

    def __init__(self, lanes: tuple[Lane, ...], prices: CostModel) -> None:
        super().__init__(len(lanes))
        self._prices = prices
        self._seconds: dict[Work, float] = {}
        self._free = [[0.0] * lane.width for lane in lanes]  # of each lane: when its servers are free, as a heap
        self._queued = [0.0] * len(lanes)  # when the latest task of each lane starts
        self._ends: dict[int, float] = {}  # of tasks that end after the step began
        self._began = 0.0

    def seconds(self, work: Work) -> float:
        """Return how long a work takes alone."""
        found = self._seconds.get(work)
        if found is None:
            found = self._seconds[work] = self._prices.alone_s(work)
        return found

    def end_s(self, task: int) -> float:
        """Return when a task ends; of tasks that ended before the step, when the step began."""
        return self._ends.get(task, self._began)

    def free_s(self, lane: int) -> float:
        """Return when a lane has a server free for one more task."""
        return max(self._free[lane][0], self._queued[lane], self._began)

    def task(self, kind: Kind, lane: int, work: Work, deps: Sequence[tuple[int, Dep]], **where: Any) -> int:
        task = super().task(kind, lane, work, deps, **where)
        start = max([self.free_s(lane), *(self.end_s(other) for other, _ in deps)])
        self._queued[lane] = start
        self._ends[task] = start + self.seconds(work)
        heapreplace(self._free[lane], self._ends[task])
        return task

    def end_step(self, step: int, first: int, last: int, phase: int, tokens: int, emits: int) -> None:
        super().end_step(step, first, last, phase, tokens, emits)
        self._began = self.end_s(last)
        self._ends = {task: end for task, end in self._ends.items() if end > self._began}


@dataclass(slots=True)
class _Lanes:
    """When each lane that a layer-set may use is free, seconds; ``back`` is what it takes to bring the CPU's results home."""

    routed: float
    home: float
    link: float
    disk: float
    cpu: float
    back: float


class Sites:
    """Chooses between fetching experts to a device and computing them on the CPU, by the estimated end of both.

    Parameters
    ----------
    layout : Layout
    works : Works
    forecast : Forecast
    lane : dict
        Lane numbers by name.
    in_main : callable
        Whether an expert (by key) lies in main memory.
    """

    def __init__(self, layout: Layout, works: Works, forecast: Forecast, lane: Mapping[str, int], in_main: Callable[[int], bool]) -> None:
        self.layout, self.works, self.forecast, self.lane, self.in_main = layout, works, forecast, lane, in_main
        self._n = layout.model.n_experts

    def fetched(
        self, layer: int, home: str, near: Mapping[int, int], far: Mapping[int, int], after: tuple[int, int], states: int
    ) -> set[int]:
        """Return which experts to fetch.

        Parameters
        ----------
        layer : int
        home : str
            The device that computes what is fetched.
        near, far : dict
            Tokens by key, of experts that are in its memory and of those that are not.
        after : (int, int)
            The router's task, and the one after which hidden states are on the device.
        states : int
            Tokens whose hidden states the CPU needs, whatever the number of its experts.
        """
        lanes = self._lanes(layer, home, near, after, states)
        out: set[int] = set()
        for key in sorted(far, key=lambda key: (-far[key], key)):
            there, (loaded, here) = self._in_place(lanes, layer, key, far[key]), self._here(lanes, layer, home, key, far[key])
            if here < there + lanes.back:
                out.add(key)
                lanes.link, lanes.home = loaded, here
            else:
                lanes.cpu = there
            lanes.disk = self._at_hand(lanes, layer, key)
        return out

    def streams(self, layer: int, home: str, near: Mapping[int, int], far: Mapping[int, int], after: tuple[int, int], states: int) -> bool:
        """Return whether a layer-set is done sooner if all of it is fetched than if the CPU computes what is ``far``; see ``fetched``."""
        lanes = self._lanes(layer, home, near, after, states)
        for key, tokens in far.items():
            lanes.cpu = self._in_place(lanes, layer, key, tokens)
            lanes.link, lanes.home = self._here(lanes, layer, home, key, tokens)
            lanes.disk = self._at_hand(lanes, layer, key)
        return bool(far) and lanes.home < lanes.cpu + lanes.back

    def _lanes(self, layer: int, home: str, near: Mapping[int, int], after: tuple[int, int], states: int) -> _Lanes:
        layout, forecast = self.layout, self.forecast
        router, there = (forecast.end_s(task) for task in after)
        top = layout.tier_of(home)
        free = {name: forecast.free_s(number) for name, number in self.lane.items()}
        return _Lanes(
            router,
            max(free[home], there) + sum(self._ffn(home, layer, tokens) for tokens in near.values()),
            max(free[layout.link(layout.main_tier, top)], router),
            max(free[layout.disk], router) if layout.disk else router,
            max(free["cpu"], there + self._copies(top, layout.main_tier, states)),
            self._copies(layout.main_tier, top, states),
        )

    def _copies(self, source: str, target: str, tokens: int) -> float:
        return sum(self.forecast.seconds(self.works.copy(link, tokens)) for link in self.layout.route(source, target))

    def _ffn(self, device: str, layer: int, tokens: int) -> float:
        return sum(self.forecast.seconds(work) for work in self.works.expert_pieces(device, layer, tokens))

    def _hop(self, lane: str, layer: int) -> float:
        return sum(self.forecast.seconds(work) for work in self.works.hop(lane, layer, 1, fast=False))

    def _at_hand(self, lanes: _Lanes, layer: int, key: int) -> float:
        """When the drive is done with an expert; it has nothing to do for one that lies in main memory."""
        return lanes.disk + (0.0 if self.in_main(key) else self._hop(self.layout.disk, layer))

    def _available(self, lanes: _Lanes, layer: int, key: int) -> float:
        return lanes.routed if self.in_main(key) else self._at_hand(lanes, layer, key)

    def _in_place(self, lanes: _Lanes, layer: int, key: int, tokens: int) -> float:
        """When the CPU is done with an expert."""
        return max(lanes.cpu, self._available(lanes, layer, key)) + self._ffn("cpu", layer, tokens)

    def _here(self, lanes: _Lanes, layer: int, home: str, key: int, tokens: int) -> tuple[float, float]:
        """When an expert is loaded to a device, and when that is done with it."""
        link = self.layout.link(self.layout.main_tier, self.layout.tier_of(home))
        loaded = max(lanes.link, self._available(lanes, layer, key)) + self._hop(link, layer)
        return loaded, max(lanes.home, loaded) + self._ffn(home, layer, tokens)
