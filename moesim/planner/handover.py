"""Owns how hidden states get from one device to another: copies where memories differ, and the bounded queues between two stages.

A queue of depth Q is a dependency of the i-th put on the (i - Q)-th get (timing rule 7), whatever layer or micro-batch they belong to; an
item takes its memory from the first copy or put that writes it until the get has ended.
"""

from __future__ import annotations

from collections.abc import Mapping

from moesim.layout import Layout
from moesim.planner.residency import Deps
from moesim.planner.works import Works
from moesim.schedule import Dep, FragmentBuilder, Kind, Work

LINE = "hand-over queues"


class Handover:
    """Emits copies, puts and gets into the planner's builder.

    Parameters
    ----------
    layout : Layout
    builder : FragmentBuilder
    lane : dict
        Lane numbers by name.
    works : Works

    Attributes
    ----------
    step : int
        The step that is being planned.
    """

    def __init__(self, layout: Layout, builder: FragmentBuilder, lane: Mapping[str, int], works: Works) -> None:
        self.layout, self.builder, self.lane, self.works = layout, builder, lane, works
        self.step = 0
        self._tier = {tier: i for i, tier in enumerate(layout.capacities)}
        self._line = layout.line_names.index(LINE)
        self._queues: dict[str, tuple[list[int], list[int]]] = {"task": ([], []), "result": ([], [])}  # puts, gets

    def bring(self, source: str, target: str, deps: Deps, layer: int, tokens: int) -> Deps:
        """Copy hidden states to another device where it does not share their memory (or the scenario stages them)."""
        if source == target or not deps:
            return deps
        tiers = self.layout.tier_of(source), self.layout.tier_of(target)
        if tiers[0] == tiers[1] and self.layout.scenario.pipeline.hidden_states == "shared":
            return deps
        for lane in (source,) if tiers[0] == tiers[1] else self.layout.route(*tiers):
            deps = [(self._task(Kind.COPY, lane, self.works.copy(lane, tokens), deps, layer), Dep.DATA)]
        return deps

    def put(self, queue: str, source: str, target: str, deps: Deps, layer: int, tokens: int) -> int:
        """Put an item into a queue. Where hidden states are copied it is the first copy that waits for room, as it writes into the item's."""
        puts, gets = self._queues[queue]
        before = len(puts) - self.layout.scenario.pipeline.queue_depth
        if before >= 0:
            deps = [*deps, (gets[before], Dep.QUEUE)]
        first = self.builder.next_task
        deps = self.bring(source, target, deps, layer, tokens)
        task = self._task(Kind.PUT, source, self.works.handoff(source), deps, layer)
        puts.append(task)
        self._memory(target, first, False, tokens)
        return task

    def get(self, queue: str, target: str, put: int, layer: int, tokens: int) -> int:
        """Take the item that ``put`` put in."""
        task = self._task(Kind.GET, target, self.works.handoff(target), [(put, Dep.DATA)], layer)
        self._queues[queue][1].append(task)
        self._memory(target, task, True, -tokens)
        return task

    def _memory(self, device: str, task: int, at_end: bool, tokens: int) -> None:
        self.builder.memory(task, at_end, self._tier[self.layout.tier_of(device)], self._line, tokens * self.layout.model.hidden_size * 2)

    def _task(self, kind: Kind, lane: str, work: Work, deps: Deps, layer: int) -> int:
        return self.builder.task(kind, self.lane[lane], work, deps, step=self.step, layer=layer)
