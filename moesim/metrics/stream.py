"""Owns the Meter: what a run amounts to, summed up fragment by fragment as tasks end, in memory that does not grow with its length.

It holds a fragment until all its tasks have ended, measures it (``metrics_kernel.py``), and keeps what the next one needs: the
tail of tasks that ended no earlier than the last gate, busy time that may still be extended, prefetches that may still be used.
What grows is two numbers a step. ``metrics.py`` says what the sums mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.cost import Costs
from moesim.errors import MoesimError
from moesim.metrics import kernel as plain_kernels
from moesim.metrics.kernel import CHANNELS, LOAD
from moesim.schedule import Fragment, Ints, Kind, Lane
from moesim.timeline import NO_CAUSE, Timeline, plain

Array = NDArray[Any]
EARLY_GROUP, GROUPS = len(Kind), len(Kind) + 1  # of a lane: its kinds of task, prefetches apart
FEW = 4096  # prefetches that are not worth a look at which may still be used
_TIMES = {"start_ps": np.int64, "end_ps": np.int64, "cause": np.int64, "cause_type": np.int8}
_COLUMNS = {
    "kind": np.int8, "lane": np.int8, "layer": np.int16, "expert": np.int16, "prefetch": np.bool_, "dep_start": np.int64,
    "dep_task": np.int64, "dep_type": np.int8, "access": np.int64,
}  # fmt: skip
_COSTS = {"price": np.int32, "latency_ps": np.int64, "volume": np.float64, "cap": np.float64, "shares": np.float64, "limit": np.float64}


class _Open:
    """A fragment of which some tasks have not ended."""

    def __init__(self, fragment: Fragment, costs: Costs, begin_ps: int) -> None:
        self.fragment, self.costs, self.begin_ps = fragment, costs, begin_ps
        self.missing = fragment.n_tasks
        self.times: dict[str, Array] = {}

    def fill(self, ended: Timeline, place: Any) -> None:
        """Take over the tasks of this fragment among those that ended."""
        first, n = self.fragment.first_task, self.fragment.n_tasks
        a, b = np.searchsorted(ended.task, [first, first + n]).tolist()
        self.missing -= b - a
        columns = [plain(getattr(ended, name), dtype) for name, dtype in _TIMES.items()]
        if b - a == n:
            self.times = {name: column[a:b] for name, column in zip(_TIMES, columns, strict=True)}
            return
        if not self.times:
            self.times = {name: np.empty(n, dtype) for name, dtype in _TIMES.items()}
        place(first, a, b, ended.task, *columns, *self.times.values())


class Meter:
    """Sums over a run, filled by ``add`` and ``finish``.

    Parameters
    ----------
    lanes : tuple of Lane
    n_layers, n_experts : int
        Of the model; no load is of a higher layer or expert.
    tiers : int
        Tiers of memory.
    initial : sequence of (tier, line, bytes)
        What is in memory before the first task.
    kernels : module
        ``metrics_kernel``, or ``metrics_compiled`` for the same at compiled speed.
    keep : bool
        Also keep, per task, what ``tasks.Tasks`` tells of it.

    Attributes
    ----------
    steps, step_end_ps
        Rows as ``Fragment.steps``, (S, 6), and when their last task ended, (S,).
    n_tasks, makespan_ps, waited_ps : int
        Tasks; the last end; what loads alone cost compute tasks.
    busy_ps : (lanes,) int64
        Sum of durations.
    drawn : (lanes, C) float64
        Channel units that the tasks of each lane drew.
    moved : (5, C) float64
        Bytes of loads and copies by purpose, see ``metrics_kernel.MOVED``.
    covered_ps : (CHANNELS + C,) int64
        How long compute, loads, either, and loads and copies on each channel were under way.
    served : (4,) int64
        Cache hits, prefetch hits, misses, and prefetch hits that were waited for.
    path : (groups, 3) int64
        The critical path back from the end of the last step: tasks, ps, ps due to contention; of each of ``groups``, a lane and a kind.
    peak_bytes : (tiers,) int64
        The most that each tier held.
    """

    def __init__(
        self, lanes: tuple[Lane, ...], n_layers: int, n_experts: int, tiers: int = 0, initial: Sequence[tuple[int, int, int]] = (),
        kernels: Any = plain_kernels, keep: bool = False,
    ) -> None:  # fmt: skip
        self.lanes, self.channels = lanes, tuple[str, ...]()
        self.keep = keep
        self.free: list[Ints] = []  # kept: per fragment, when each compute task could have started but for loads
        self.used: list[Ints] = []  # kept: prefetches that were used
        self._kernels, self._interpreted = kernels, kernels is plain_kernels
        self._open: list[_Open] = []
        self._steps: list[Ints] = []
        self._step_end: list[Ints] = []
        self.n_tasks = self.makespan_ps = self.waited_ps = 0
        self.busy_ps, self.served = np.zeros(len(lanes), np.int64), np.zeros(4, np.int64)
        self._serial = np.array([lane.width == 1 and lane.discipline == "fifo" for lane in lanes])
        self._last_end = np.zeros(len(lanes), np.int64)
        self.groups: list[tuple[str, str]] = []
        self._group_row = np.full(len(lanes) * GROUPS, -1, np.int64)
        self.path = np.zeros((0, 3), np.int64)
        self._level = np.zeros(tiers, np.int64)
        for tier, _, size in initial:
            self._level[tier] += size
        self.peak_bytes = self._level.copy()
        self._events = np.zeros((0, 4), np.int64)  # of memory, not yet placed: time, task, tier, bytes
        self._begin = 0  # the last gate
        none = np.zeros(0, np.int64)
        # of the tasks measured those that ended no earlier than the last gate; of them those that had started before it, or were it; the rest
        self._recent: dict[str, Array] = {"id": none, "end": none, "load": np.zeros(0, np.bool_)}
        self._known: dict[str, Array] = {"id": none, "end": none, "from": none, "sum": np.zeros((0, 0, 3), np.int64)}
        self._late: dict[str, Array] = dict.fromkeys(("id", "start", "end", "cause"), none)
        self._late |= {"why": np.zeros(0, np.int8), "part": np.zeros((0, 3), np.int64)}
        self._dims = n_layers + 1, n_experts
        self._latest = np.full(len(lanes) * (n_layers + 1) * n_experts, -1, np.int64)
        self._count = self._left = 0  # prefetches that may still be used; how many the last clearing left

    @property
    def steps(self) -> Ints:
        return np.concatenate(self._steps) if self._steps else np.zeros((0, 6), np.int64)

    @property
    def step_end_ps(self) -> Ints:
        return np.concatenate(self._step_end) if self._step_end else np.zeros(0, np.int64)

    def add(self, fragment: Fragment, costs: Costs, ended: Timeline, begin_ps: int = 0) -> None:
        """Take a fragment, and the tasks that ended while the engine advanced through it; ``begin_ps`` is when the engine had it, if that
        was after the end of the one before.
        """
        if not self.n_tasks:
            self._begin_channels(costs)
        self.n_tasks += fragment.n_tasks
        self._open.append(_Open(fragment, costs, begin_ps))
        self._take(ended)

    def finish(self, ended: Timeline) -> None:
        """Take the tasks that ended after the last fragment."""
        self._take(ended)
        if self._open:
            raise MoesimError(f"{self._open[0].missing} tasks of {self._open[0].fragment!r} have not ended")
        if self.n_tasks:
            never = np.iinfo(np.int64).max
            self._kernels.settle(never, self.covered_ps, self._intervals, self._opened, self._closed)
            self._place(never)

    def _begin_channels(self, costs: Costs) -> None:
        self.channels = costs.channels
        n = len(costs.channels)
        self.drawn, self.moved = np.zeros((len(self.lanes), n)), np.zeros((5, n))
        self.covered_ps, self._intervals = np.zeros(CHANNELS + n, np.int64), np.zeros(CHANNELS + n, np.int64)
        self._opened, self._closed = (np.zeros((CHANNELS + n, 0), np.int64) for _ in range(2))
        self._ids, self._keys = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._amounts, self._used = np.zeros((0, n)), np.zeros(0, np.int8)
        self._needs_from, self._needs = np.zeros(1, np.int64), np.zeros(0, np.int64)

    def _take(self, ended: Timeline) -> None:
        for each in self._open:
            each.fill(ended, self._kernels.place)
        while self._open and not self._open[0].missing:
            done = self._open.pop(0)
            self._begin = max(self._begin, done.begin_ps)
            self._measure(done.fragment, done.costs, done.times)

    def _read(self, array: Array, dtype: Any) -> Any:
        """A column as its kernels read it fastest."""
        return array.tolist() if self._interpreted and array.ndim == 1 else plain(array, dtype)

    def _measure(self, fragment: Fragment, costs: Costs, times: dict[str, Array]) -> None:
        first, n = fragment.first_task, fragment.n_tasks
        end = times["end_ps"]
        f = {name: self._read(getattr(fragment, name), dtype) for name, dtype in _COLUMNS.items()}
        c = {name: self._read(getattr(costs, name), dtype) for name, dtype in _COSTS.items()}
        t = {name: self._read(times[name], dtype) for name, dtype in _TIMES.items()}
        step_from = self._read(np.append(fragment.steps[:, 1] - first, n), np.int64)
        step_last = self._read(fragment.steps[:, 2] - first, np.int64)
        self._waits(first, f, t, step_from, step_last, n)
        self._cover(f, c, t, step_from, step_last, n)
        self._use(first, f, c)
        self._walk(fragment, f, c, t, step_last, times)
        self._steps.append(fragment.steps)
        self._step_end.append(end[fragment.steps[:, 2] - first])
        self._begin = int(self._step_end[-1][-1])
        if len(fragment.memory):
            task, at_end, tier, _, delta = fragment.memory.T
            at = np.where(at_end == 1, end[task - first], times["start_ps"][task - first])
            self._events = np.concatenate([self._events, np.stack([at, task, tier, delta], axis=1)])
            self._place(self._begin)

    def _waits(self, first: int, f: dict[str, Any], t: dict[str, Any], step_from: Any, step_last: Any, n: int) -> None:
        free = np.zeros(n, np.int64)
        tail = self._recent["id"], self._recent["end"]
        waited, latest = self._kernels.waits(
            first, self._begin, *tail, self._recent["load"], step_from, step_last, f["kind"], f["lane"], f["dep_start"], f["dep_task"],
            t["start_ps"], t["end_ps"], self._serial, self._last_end, self.busy_ps, free,
        )  # fmt: skip
        self.waited_ps += int(waited)
        self.makespan_ps = max(self.makespan_ps, int(latest))
        self._kernels.served(first, *tail, f["access"], t["end_ps"], free, self.served)
        if self.keep:
            self.free.append(free)

    def _cover(self, f: dict[str, Any], c: dict[str, Any], t: dict[str, Any], step_from: Any, step_last: Any, n: int) -> None:
        room = int(self._intervals.max()) + n + 1
        if room > self._opened.shape[1]:
            more = (0, 0), (0, 2 * room - self._opened.shape[1])
            self._opened, self._closed = np.pad(self._opened, more), np.pad(self._closed, more)
        self._kernels.cover(
            step_from, step_last, f["kind"], f["lane"], f["prefetch"], c["price"], c["volume"], c["shares"], t["start_ps"], t["end_ps"],
            self.moved, self.drawn, self.covered_ps, self._intervals, self._opened, self._closed,
            np.zeros((len(c["shares"]), 1 + len(self.channels)), np.int64), np.zeros(len(self.covered_ps), np.int64),
        )  # fmt: skip

    def _use(self, first: int, f: dict[str, Any], c: dict[str, Any]) -> None:
        count = self._count
        rows, needs = count + len(f["kind"]), int(self._needs_from[count]) + len(f["dep_task"])
        if rows > len(self._ids) or needs > len(self._needs):
            more, much = max(2 * rows - len(self._ids), 0), max(2 * needs - len(self._needs), 0)
            self._ids, self._keys, self._used = np.pad(self._ids, (0, more)), np.pad(self._keys, (0, more)), np.pad(self._used, (0, more))
            self._amounts = np.pad(self._amounts, ((0, more), (0, 0)))
            self._needs_from, self._needs = np.pad(self._needs_from, (0, more)), np.pad(self._needs, (0, much))
        table = self._ids, self._keys, self._amounts, self._used, self._needs_from, self._needs
        scratch = np.empty(needs + len(f["access"]) + 1, np.int64)
        count = self._kernels.use(
            first, f["kind"], f["lane"], f["layer"], f["expert"], f["prefetch"], c["price"], c["volume"], c["shares"], f["dep_start"],
            f["dep_task"], f["dep_type"], f["access"], *self._dims, self._latest, count, *table, scratch, self.moved,
        )  # fmt: skip
        if self.keep:
            self.used.append(self._ids[:count][self._used[:count] == 1])
        self._count = count
        if self.keep or count > 2 * self._left + FEW:
            self._count = self._left = self._kernels.forget(self._latest, count, *table, np.zeros(count, np.bool_))

    def _walk(
        self, fragment: Fragment, f: dict[str, Any], c: dict[str, Any], t: dict[str, Any], step_last: Any, times: dict[str, Array]
    ) -> None:
        first = fragment.first_task
        start, end, last = times["start_ps"], times["end_ps"], int(step_last[-1])
        gate = end[last]
        rows = np.flatnonzero(end >= gate)
        waiting = (start[rows] >= gate) & (rows != last)
        still = self._late["start"] >= gate
        going = self._late["id"][~still & (self._late["end"] >= gate)]
        ids = np.sort(np.concatenate([self._known["id"][self._known["end"] >= gate], going, rows[~waiting] + first]))
        room = len(ids) + len(step_last)
        stamp = getattr(self._kernels, "stamp", None)
        known, late = self._known, self._late
        group = self._groups(fragment)
        if len(self.groups) > known["sum"].shape[1]:
            known["sum"] = np.pad(known["sum"], ((0, 0), (0, len(self.groups) - known["sum"].shape[1]), (0, 0)))
        next_from, next_sum = np.full(room, NO_CAUSE, np.int64), np.empty((room, len(self.groups), 3), np.int64)
        of_task = group, c["price"], c["latency_ps"], c["volume"], c["cap"], c["limit"], t["start_ps"], t["end_ps"]
        lost = self._kernels.walk(
            stamp, first, known["id"], known["from"], known["sum"], late["id"], late["part"], late["cause"], late["why"], step_last,
            *of_task, t["cause"], t["cause_type"], np.concatenate([ids, np.zeros(len(step_last), np.int64)]), next_from, next_sum,
            np.zeros(len(end), np.int32),
        )  # fmt: skip
        if lost >= 0:
            raise MoesimError(f"task {lost} was bound by a task that ended before its step began")
        self.path = next_sum[-1]
        late_rows = rows[waiting]
        part = np.empty((len(late_rows), 3), np.int64)
        self._kernels.parts(stamp, late_rows, *of_task, part)
        new = {"id": late_rows + first, "start": start[late_rows], "end": end[late_rows], "part": part}
        new |= {"cause": times["cause"][late_rows], "why": times["cause_type"][late_rows]}
        self._late = {name: np.concatenate([column[still], new[name]]) for name, column in late.items()}
        older = ids[ids < first]
        at = np.concatenate([self._recent["end"][np.searchsorted(self._recent["id"], older)], end[ids[len(older) :] - first]])
        self._known = {"id": ids, "end": at, "from": next_from[: len(ids)], "sum": next_sum[: len(ids)]}
        kept = self._recent["end"] >= gate
        new = {"id": rows + first, "end": end[rows], "load": np.asarray(f["kind"], np.int8)[rows] == LOAD}
        self._recent = {name: np.concatenate([column[kept], new[name]]) for name, column in self._recent.items()}

    def _groups(self, fragment: Fragment) -> Any:
        """Return the row of ``path`` of each task, (N,), after adding rows for lanes and kinds that are new."""
        codes = fragment.lane * np.int16(GROUPS) + np.where(fragment.prefetch, np.int8(EARLY_GROUP), fragment.kind)
        codes = codes.astype(np.intp)  # once, else each use converts them
        met = np.zeros(len(self._group_row), np.bool_)
        met[codes] = True
        for code in np.flatnonzero(met & (self._group_row < 0)).tolist():
            self._group_row[code] = len(self.groups)
            lane, group = divmod(code, GROUPS)
            self.groups.append((self.lanes[lane].name, "prefetch" if group == EARLY_GROUP else Kind(group).name.lower()))
        return self._read(self._group_row[codes], np.int64)

    def _place(self, until: int) -> None:
        """Let memory events up to an instant pass; at one instant they go in task order, which is causal."""
        time, task, tier, delta = self._events.T
        order = np.lexsort((delta, task, time))
        done = order[time[order] <= until]
        for number in np.unique(tier[done]):
            levels = self._level[number] + np.cumsum(delta[done[tier[done] == number]])
            self.peak_bytes[number] = max(self.peak_bytes[number], levels.max())
            self._level[number] = levels[-1]
        self._events = self._events[time > until]
