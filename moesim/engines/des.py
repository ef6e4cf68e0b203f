"""Owns the reference engine: discrete-event simulation on SimPy, one process per lane, timing rules 3 to 6 to the letter.

An instant runs in three rounds, told apart by event priority: tasks and latencies end (RETIRE), then lanes grant servers
in lane order (GRANT), then flow rates are shared anew (SHARE). Whatever that causes at the same instant starts the rounds
again. Stale flow timers are recognised by a serial number when they fire; nothing is searched or cancelled.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator
from typing import Any

import simpy

from moesim.cost import Costs
from moesim.errors import MoesimError
from moesim.schedule import Dep, Fragment, Lane
from moesim.sharing import ceil_ps, max_min_rates
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE, Timeline

RETIRE, GRANT, SHARE = 0, 1, 2

Process = Generator[simpy.Event, Any, None]


class _Task:
    """A task that has not ended."""

    __slots__ = (
        "id", "lane", "key", "missing", "ready_ps", "bound", "start_ps", "server", "cause", "dependents",
        "latency_ps", "volume", "cap", "shares", "rate", "since_ps", "done_serial",
    )  # fmt: skip

    def __init__(
        self, task: int, lane: _LaneState, key: tuple[int, int, bool, int], latency_ps: int, volume: float, cap: float, shares: list[float],
    ) -> None:  # fmt: skip
        self.id, self.lane, self.key = task, lane, key
        self.latency_ps, self.volume, self.cap, self.shares = latency_ps, volume, cap, shares
        self.missing = 0
        self.ready_ps = -1
        self.bound: tuple[int, int] = (NO_CAUSE, Dep.DATA)  # the dependency that ended last
        self.start_ps = -1
        self.server = -1
        self.cause: tuple[int, int] = (NO_CAUSE, Dep.DATA)
        self.dependents: list[tuple[_Task | _Stop, int]] = []
        self.rate = 0.0
        self.since_ps = 0
        self.done_serial = 0


class _LaneState:
    """Queue and servers of one lane."""

    __slots__ = ("lane", "fifo", "ready", "free", "wake", "dirty", "touched_at", "idle_before", "freed_at", "freed_by", "last_granted")

    def __init__(self, lane: Lane, env: simpy.Environment) -> None:
        self.lane = lane
        self.fifo: deque[_Task] = deque()  # every waiting task, in id order
        self.ready: list[tuple[tuple[int, int, bool, int], _Task]] = []  # heap of ready tasks, for priority lanes
        self.free = list(range(lane.width))
        self.wake = env.event()
        self.dirty = False
        self.touched_at, self.idle_before = -1, 0  # servers that were idle before this instant
        self.freed_at, self.freed_by = -1, NO_CAUSE
        self.last_granted: _Task | None = None

    def touch(self, now: int) -> None:
        """Note, before the first end or grant of an instant, how many servers were idle until then."""
        if self.touched_at != now:
            self.touched_at, self.idle_before = now, len(self.free)

    def pop(self) -> _Task | None:
        """Take the next task that the discipline allows to start, if any."""
        if self.lane.discipline == "priority":
            return heapq.heappop(self.ready)[1] if self.ready else None
        return self.fifo.popleft() if self.fifo and self.fifo[0].missing == 0 else None


class DesEngine:
    """State of one simulation. ``advance`` takes the fragments in order, ``finish`` lets what is under way end."""

    name = "des"

    def __init__(self, lanes: tuple[Lane, ...]) -> None:
        self.env = simpy.Environment(0)
        self.lanes = [_LaneState(lane, self.env) for lane in lanes]
        self.alive: dict[int, _Task] = {}
        self.next_task = 0
        self.flows: dict[int, _Task] = {}
        self.capacity: list[float] = []
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._grant_pending = self._share_pending = False
        self._ended_at, self._just_ended = -1, set[int]()  # the tasks that ended at the latest instant at which any did
        for lane in self.lanes:
            self.env.process(self._lane(lane))
        self.env.run(until=self._event(RETIRE))  # let the processes reach their first wait

    @property
    def now_ps(self) -> int:
        """The current time; after ``advance`` the end of the fragment's gate."""
        return int(self.env.now)

    def advance(self, fragment: Fragment, costs: Costs) -> Timeline:
        """Add a fragment and simulate until its last step has ended; return the tasks that ended meanwhile."""
        if fragment.first_task != self.next_task:
            raise MoesimError(f"fragment begins at task {fragment.first_task}, the engine expected {self.next_task}")
        self._add(fragment, costs)
        gate = self.alive.get(fragment.gate)
        if gate is not None:
            stop = self.env.event()
            gate.dependents.append((_Stop(stop), Dep.DATA))
            try:
                self.env.run(until=stop)
            except RuntimeError:
                raise MoesimError(f"deadlock at {self.env.now} ps: {self._waiting()}") from None
        return self._take()

    def wait(self, until_ps: int) -> Timeline:
        """Let time pass: all that happens up to ``until_ps`` happens, then the clock stands there; return the tasks that ended."""
        if until_ps < self.env.now:
            raise MoesimError(f"cannot wait until {until_ps} ps, it is {self.env.now} ps already")
        while self.env.peek() <= until_ps:
            self.env.step()
        if self.env.now < until_ps:
            self._event(RETIRE, until_ps - int(self.env.now))
            self.env.step()
        return self._take()

    def finish(self) -> Timeline:
        """Simulate until every task has ended; the clock stays at the last end, whatever stale timers are left."""
        try:
            while self.alive:
                self.env.step()
        except simpy.core.EmptySchedule:
            raise MoesimError(f"deadlock at {self.env.now} ps: {self._waiting()}") from None
        return self._take()

    def _waiting(self) -> str:
        some = [t for t in self.alive.values() if t.start_ps < 0][:3]
        return ", ".join(f"task {t.id} on lane {t.lane.lane.name} waits for {t.missing} dependencies" for t in some)

    def _take(self) -> Timeline:
        rows, self._rows = self._rows, []
        return Timeline.from_rows(rows)

    def _add(self, fragment: Fragment, costs: Costs) -> None:
        self.capacity = costs.capacity.tolist()
        if self.flows:  # capacities may have changed at this step border
            self._request_share()
        latency, volume, cap, shares = costs.latency_ps.tolist(), costs.volume.tolist(), costs.cap.tolist(), costs.shares.tolist()
        price, lanes = costs.price.tolist(), fragment.lane.tolist()
        use = zip(fragment.use_step.tolist(), fragment.use_layer.tolist(), fragment.prefetch.tolist(), strict=True)
        starts, deps, types = fragment.dep_start.tolist(), fragment.dep_task.tolist(), fragment.dep_type.tolist()
        now = int(self.env.now)
        for row, (use_step, use_layer, prefetch) in enumerate(use):
            lane, p = self.lanes[lanes[row]], price[row]
            task_id = fragment.first_task + row
            task = _Task(task_id, lane, (use_step, use_layer, prefetch, task_id), latency[p], volume[p], cap[p], shares[p])
            self.alive[task.id] = task
            if lane.lane.discipline == "fifo":
                lane.fifo.append(task)
            for d in range(starts[row], starts[row + 1]):
                before = self.alive.get(deps[d])
                if before is not None:
                    before.dependents.append((task, types[d]))
                    task.missing += 1
                elif self._ended_at == now and deps[d] in self._just_ended:
                    self._bind(task, deps[d], types[d], now)
                elif task.ready_ps != now and deps[d] > task.bound[0]:
                    task.bound = (deps[d], types[d])
            if task.missing == 0:
                self._ready(task, now)
        self.next_task += fragment.n_tasks

    def _event(self, priority: int, delay: int = 0, value: Any = None) -> simpy.Event:
        event = self.env.event()
        event._ok, event._value = True, value
        self.env.schedule(event, priority, delay)  # type: ignore[arg-type]
        return event

    def _lane(self, lane: _LaneState) -> Process:
        """One lane: woken when a server may have become free or a task ready, it grants until neither holds."""
        while True:
            yield lane.wake
            lane.wake = self.env.event()
            now = int(self.env.now)
            lane.touch(now)
            while lane.free:
                task = lane.pop()
                if task is None:
                    break
                task.cause = self._cause(task, lane, now)
                task.start_ps, task.server = now, heapq.heappop(lane.free)
                lane.last_granted = task
                if task.latency_ps > 0:
                    self._event(RETIRE, task.latency_ps, task).callbacks.append(self._latency_over)
                else:
                    self._flow_or_end(task)

    @staticmethod
    def _cause(task: _Task, lane: _LaneState, now: int) -> tuple[int, int]:
        if task.ready_ps == now:
            return task.bound
        if lane.idle_before == 0:
            return lane.freed_by, Dep.LANE
        if lane.last_granted is not None:  # a server was idle, so only the queue can have held it
            return lane.last_granted.id, CAUSE_HEAD_OF_LINE
        raise MoesimError(f"task {task.id} starts at {now} ps without a cause")

    def _latency_over(self, event: simpy.Event) -> None:
        self._flow_or_end(event._value)

    def _flow_or_end(self, task: _Task) -> None:
        if task.volume > 0.0:
            self.flows[task.id] = task
            task.since_ps = int(self.env.now)
            self._request_share()
        elif task.start_ps == self.env.now:  # of no duration: it ends in the next round of this instant
            self._event(RETIRE, 0, task).callbacks.append(self._ended)
        else:
            self._end(task)

    def _ended(self, event: simpy.Event) -> None:
        self._end(event._value)

    def _request_share(self) -> None:
        if not self._share_pending:
            self._share_pending = True
            self._event(SHARE).callbacks.append(self._share)

    def _share(self, _event: simpy.Event) -> None:
        """Give every flow its max-min rate; flows whose rate stays keep the end they have."""
        self._share_pending = False
        now = int(self.env.now)
        flows = [self.flows[i] for i in sorted(self.flows)]
        rates = [0.0] * len(flows)
        max_min_rates([f.shares for f in flows], [f.cap for f in flows], self.capacity, rates)
        for flow, rate in zip(flows, rates, strict=True):
            if rate <= 0.0:
                raise MoesimError(f"task {flow.id} on lane {flow.lane.lane.name} never ends: its cap or a channel it flows through is 0")
            if rate == flow.rate:
                continue
            flow.volume = max(flow.volume - flow.rate * ((now - flow.since_ps) / 1e12), 0.0)
            flow.rate, flow.since_ps = rate, now
            flow.done_serial += 1
            delay = ceil_ps(flow.volume / rate)
            self._event(RETIRE, delay, (flow, flow.done_serial)).callbacks.append(self._flow_over)

    def _flow_over(self, event: simpy.Event) -> None:
        flow, serial = event._value
        if serial == flow.done_serial:
            del self.flows[flow.id]
            if self.flows:
                self._request_share()
            self._end(flow)

    def _end(self, task: _Task) -> None:
        now = int(self.env.now)
        lane = task.lane
        lane.touch(now)
        heapq.heappush(lane.free, task.server)
        if lane.freed_at != now or task.id > lane.freed_by:
            lane.freed_at, lane.freed_by = now, task.id
        self._mark(lane)
        self._rows.append((task.id, task.start_ps, now, task.server, *task.cause))
        del self.alive[task.id]
        if self._ended_at != now:
            self._ended_at = now
            self._just_ended.clear()
        self._just_ended.add(task.id)
        for dependent, why in task.dependents:
            if isinstance(dependent, _Stop):
                dependent.fire(self.env)
                continue
            dependent.missing -= 1
            self._bind(dependent, task.id, why, now)
            if dependent.missing == 0:
                self._ready(dependent, now)

    @staticmethod
    def _bind(task: _Task, dependency: int, why: int, now: int) -> None:
        """A dependency of ``task`` ended now; of several that end at one instant the largest id binds."""
        if task.ready_ps != now or dependency > task.bound[0]:
            task.bound = (dependency, why)
        task.ready_ps = now

    def _ready(self, task: _Task, now: int) -> None:
        task.ready_ps = now
        if task.lane.lane.discipline == "priority":
            heapq.heappush(task.lane.ready, (task.key, task))
        self._mark(task.lane)

    def _mark(self, lane: _LaneState) -> None:
        lane.dirty = True
        if not self._grant_pending:
            self._grant_pending = True
            self._event(GRANT).callbacks.append(self._grant)

    def _grant(self, _event: simpy.Event) -> None:
        """Wake, in lane order, the lanes on which something changed."""
        self._grant_pending = False
        for lane in self.lanes:
            if lane.dirty:
                lane.dirty = False
                lane.wake._ok, lane.wake._value = True, None
                self.env.schedule(lane.wake, RETIRE)  # type: ignore[arg-type]


class _Stop:
    """Stands among the dependents of a gate and stops ``advance`` there."""

    def __init__(self, event: simpy.Event) -> None:
        self.event = event

    def fire(self, env: simpy.Environment) -> None:
        self.event._ok, self.event._value = True, None
        env.schedule(self.event, RETIRE)  # type: ignore[arg-type]
