"""Owns the compiled engine: the timeline of the reference engine, bit for bit, at compiled speed.

A fragment takes a few calls into compiled code. If every lane is fifo the linear pass is tried first (fast_linear.py); where a
channel may be contended it declines and the event loop runs instead (fast_events.py). Both begin from and leave the same
state (fast_state.py), so they may take turns within a run. Max-min rates and rounding are compiled from sharing.py.

The first use after installation compiles for some seconds and caches the machine code on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.cost import Costs
from moesim.engines import fast_state as fs
from moesim.engines.fast_events import run_events
from moesim.engines.fast_linear import run_linear
from moesim.errors import MoesimError
from moesim.schedule import Fragment, Lane
from moesim.timeline import Timeline, plain

Array = NDArray[Any]
_COLUMN_TYPES: tuple[Any, ...] = (  # of ``columns``, but for shares and capacity
    np.int8, np.int32, np.int16, np.bool_, np.int32, np.int64, np.int64, np.int8, np.int64, np.float64, np.float64,
)  # fmt: skip


def lane_table(lanes: tuple[Lane, ...]) -> Array:
    """Return the (lanes, columns) table of widths, disciplines and what each lane remembers."""
    table = np.full((len(lanes), 8), -1, np.int64)
    table[:, fs.WIDTH] = [lane.width for lane in lanes]
    table[:, fs.PRIORITY] = [lane.discipline == "priority" for lane in lanes]
    table[:, fs.OFFSET] = np.cumsum(table[:, fs.WIDTH]) - table[:, fs.WIDTH]
    return table


def columns(fragment: Fragment, costs: Costs) -> tuple[Array, ...]:
    """Return the columns of a fragment and its costs in the order that the kernels take them."""
    return (
        plain(fragment.lane, np.int8), plain(fragment.use_step, np.int32), plain(fragment.use_layer, np.int16), plain(fragment.prefetch, np.bool_),
        plain(costs.price, np.int32), plain(fragment.dep_start, np.int64), plain(fragment.dep_task, np.int64), plain(fragment.dep_type, np.int8),
        plain(costs.latency_ps, np.int64), plain(costs.volume, np.float64), plain(costs.cap, np.float64), plain(costs.shares, np.float64),
        plain(costs.capacity, np.float64),
    )  # fmt: skip


class FastEngine:
    """State of one simulation. ``advance`` takes the fragments in order, ``finish`` lets what is under way end."""

    name = "fast"

    def __init__(self, lanes: tuple[Lane, ...]) -> None:
        self.lanes = lanes
        self.next_task = 0
        self.now_ps = 0
        self._table = lane_table(lanes)
        self._all_fifo = all(lane.discipline == "fifo" for lane in lanes)
        self._carried = _nothing(0)
        self._capacity: Array = np.empty(0, np.float64)

    def advance(self, fragment: Fragment, costs: Costs) -> Timeline:
        """Add a fragment and simulate until its last step has ended; return the tasks that ended meanwhile."""
        if fragment.first_task != self.next_task:
            raise MoesimError(f"fragment begins at task {fragment.first_task}, the engine expected {self.next_task}")
        carried = self._carried[0]
        if costs.shares.shape[1] != self._carried[2].shape[1]:
            if len(carried):
                raise MoesimError(f"costs have {costs.shares.shape[1]} channels, those of earlier fragments {self._carried[2].shape[1]}")
            self._carried = (*_nothing(costs.shares.shape[1])[:4], self._carried[4])
        self.next_task += fragment.n_tasks
        given = columns(fragment, costs)
        self._capacity = given[-1]
        return self._run(len(carried) + fragment.gate - fragment.first_task, fragment.first_task, given)

    def wait(self, until_ps: int) -> Timeline:
        """Let time pass: all that happens up to ``until_ps`` happens, then the clock stands there; return the tasks that ended."""
        if until_ps < self.now_ps:
            raise MoesimError(f"cannot wait until {until_ps} ps, it is {self.now_ps} ps already")
        return self._run(-1, self.next_task, self._no_tasks(), until_ps)

    def finish(self) -> Timeline:
        """Simulate until every task has ended; the clock stays at the last end."""
        return self._run(-1, self.next_task, self._no_tasks())

    def _no_tasks(self) -> tuple[Array, ...]:
        none = [np.zeros(0, kind) for kind in _COLUMN_TYPES]
        none[5] = np.zeros(1, np.int64)
        return (*none, np.zeros((0, len(self._capacity))), self._capacity)

    def _run(self, gate: int, first: int, given: tuple[Array, ...], until: int = fs.NEVER) -> Timeline:
        status = fs.CONTENDED
        if self._all_fifo and until == fs.NEVER:
            status, culprit, now, ended, state = run_linear(self.now_ps, gate, first, self._table, *self._carried, *given)
        if status == fs.CONTENDED:
            status, culprit, now, ended, state = run_events(self.now_ps, gate, until, first, self._table, *self._carried, *given)
        if status != fs.OK:
            raise self._problem(status, culprit, now, first, given[0], state[0])
        self.now_ps, self._carried = now, state
        return Timeline(*ended)

    def _problem(self, status: int, task: int, now: int, first: int, lane: Array, waiting: Array) -> MoesimError:
        if status == fs.DEADLOCK:
            some = ", ".join(f"task {row[fs.ID]} on lane {self.lanes[row[fs.LANE]].name}" for row in waiting[:3])
            return MoesimError(f"deadlock at {now} ps: {len(waiting)} tasks wait for dependencies, {some}")
        carried = {int(row[fs.ID]): int(row[fs.LANE]) for row in self._carried[0]}
        name = self.lanes[int(lane[task - first]) if task >= first else carried[task]].name
        what = {
            fs.NEVER_ENDS: "never ends: its cap or a channel it flows through is 0",
            fs.NO_REASON: f"starts at {now} ps without a cause",
            fs.TOO_LONG: f"takes more than {fs.LONGEST_S:g} s",
        }
        return MoesimError(f"task {task} on lane {name} {what[status]}")


def _nothing(n_channels: int) -> tuple[Array, ...]:
    """Return the carried state of an engine at rest."""
    return (
        np.zeros((0, fs.C_INT), np.int64), np.zeros((0, 3), np.float64), np.zeros((0, n_channels), np.float64), np.zeros((0, 2), np.int64),
        np.zeros(0, np.int64),
    )  # fmt: skip
