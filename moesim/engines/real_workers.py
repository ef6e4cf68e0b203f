"""Owns the worker threads of the real engine: who runs which prepared operation when, and what time it was. No torch, no schedule.

One thread serves each server of a lane. Tasks of a lane start in id order (timing rule 4, ``fifo``); on a lane of several servers the
thread whose turn it is holds the lane's ticket until its task may start. A thread that must wait for a task of another lane writes down
what it waits for, looks once more, and sleeps on a lock of its own; whoever ends a task releases the locks of the threads that wait for
it. The interpreter's own lock makes these steps sequential, so no wake-up is lost and nothing is polled. A lock may be released once too
often, so a woken thread looks again.
"""

from __future__ import annotations

import gc
import sys
import threading
from _thread import allocate_lock
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from time import perf_counter_ns

from moesim.errors import MoesimError
from moesim.host import collector

SWITCH_INTERVAL_S = 5e-3
"""The interpreter's switch interval during a run. Workers give up its lock at every operation of their own accord, so forcing them is of no
use: two workers that hand over to each other in turn took 4 us a hand-over at 5 ms and above, 9 us at 1 ms, 25 us at 5 us (best of 15)."""

INTERRUPT_S = 0.2  # how long an interrupt may wait for the main thread, which has nothing to do but wait for the workers

Operation = Callable[[], int | None]


@dataclass(slots=True)
class LaneProgram:
    """What one lane does, in order of task id; the lists are parallel.

    Parameters
    ----------
    name : str
    width : int
        Servers, each of them a thread.
    tasks : list of int
        Ascending task ids.
    operations : list of callable
        What each task does; it returns the bytes it moved, or None.
    waits : list of tuple
        Tasks of other lanes (or of the same, if it has several servers) that must end first.
    enter : callable
        Returns the context that each thread of the lane runs in.
    """

    name: str
    width: int
    tasks: list[int]
    operations: list[Operation]
    waits: list[tuple[int, ...]]
    enter: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(slots=True)
class Record:
    """What happened, by task id; times are ``perf_counter_ns`` less the start of the run. -1: the task never started."""

    start_ns: list[int]
    end_ns: list[int]
    server: list[int]
    moved_bytes: list[int | None]


class WorkerFailed(MoesimError):
    """An operation raised; the error is chained as the cause, ``task`` tells which one it was (-1: none yet)."""

    def __init__(self, lane: str, task: int, error: BaseException) -> None:
        super().__init__(f"task {task} on lane {lane}: {type(error).__name__}: {error}")
        self.lane, self.task = lane, task


class _Shared:
    """What all threads of one run share."""

    def __init__(self, n_tasks: int, n_workers: int) -> None:
        self.done = bytearray(n_tasks)
        self.waits_for = [-1] * n_workers
        self.locks = [allocate_lock() for _ in range(n_workers)]
        for lock in self.locks:
            lock.acquire()
        self.stop: list[BaseException] = []  # not empty: everybody leaves; the first entry is why
        self.began_ns = 0
        self.barrier = threading.Barrier(n_workers, self._begin)
        self.left = n_workers
        self.all_left = allocate_lock()
        self.all_left.acquire()
        self.leaving = allocate_lock()

    def _begin(self) -> None:
        self.began_ns = perf_counter_ns()

    def fail(self, error: BaseException) -> None:
        """Make every thread leave."""
        self.stop.append(error)
        self.barrier.abort()
        for lock in self.locks:
            _wake(lock)

    def leave(self) -> None:
        with self.leaving:
            self.left -= 1
            if self.left == 0:
                self.all_left.release()


def _wake(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:  # it has been woken already and has not looked yet
        pass


def run_lanes(lanes: Sequence[LaneProgram], n_tasks: int, switch_interval_s: float = SWITCH_INTERVAL_S) -> Record:
    """Run all lanes to their end.

    Parameters
    ----------
    lanes : sequence of LaneProgram
        Together they hold each task from 0 to ``n_tasks`` - 1 once; ids are a topological order of all waits.
    n_tasks : int
    switch_interval_s : float
        The interpreter's switch interval during the run.

    Raises
    ------
    WorkerFailed
        If an operation raised. All threads have ended by then; what never started has a start of -1.
    KeyboardInterrupt
        As it came, after all threads have ended.
    """
    first, total = [], 0
    for lane in lanes:
        first.append(total)
        total += lane.width
    shared = _Shared(n_tasks, total)
    record = Record([-1] * n_tasks, [-1] * n_tasks, [0] * n_tasks, [None] * n_tasks)
    wakes = _wakes(lanes, first, n_tasks)
    threads = []
    for lane, base in zip(lanes, first, strict=True):
        turn = _Turn()
        for server in range(lane.width):
            args = (lane, server, base + server, turn, shared, record, wakes)
            threads.append(threading.Thread(target=_work, args=args, name=f"moesim {lane.name} {server}", daemon=True))
    gc.collect()
    with collector.paused(), _switching(switch_interval_s):
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                started.append(thread)
                thread.start()
            while not shared.all_left.acquire(timeout=INTERRUPT_S):  # a signal that another thread received is handled here
                pass
        except BaseException as error:  # an interrupt, or no more threads to be had
            shared.fail(error)
            for thread in started:
                with suppress(RuntimeError):  # the last of them was not born, or finds the barrier broken when it is
                    thread.join()
            raise
        for thread in started:
            thread.join()
    if shared.stop:
        raise shared.stop[0] from shared.stop[0].__cause__
    began = shared.began_ns
    record.start_ns = [t - began for t in record.start_ns]
    record.end_ns = [t - began for t in record.end_ns]
    return record


@contextmanager
def _switching(interval_s: float) -> Iterator[None]:
    """Another switch interval of the interpreter until the context ends."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _wakes(lanes: Sequence[LaneProgram], first: Sequence[int], n_tasks: int) -> list[tuple[int, ...]]:
    """Return, for each task, the workers that may sleep until it ends."""
    found: list[tuple[int, ...]] = [()] * n_tasks
    for lane, base in zip(lanes, first, strict=True):
        mine = tuple(range(base, base + lane.width))
        for waits in lane.waits:
            for task in waits:
                if mine[0] not in found[task]:
                    found[task] += mine
    return found


class _Turn:
    """Whose turn it is on a lane of several servers."""

    __slots__ = ("lock", "next")

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.next = 0


def _work(
    lane: LaneProgram, server: int, me: int, turn: _Turn, shared: _Shared, record: Record, wakes: list[tuple[int, ...]]
) -> None:  # fmt: skip
    """One thread, from its birth to its end."""
    at = [-1]
    try:
        with lane.enter():
            shared.barrier.wait()
            serve = _serve if lane.width == 1 else _serve_in_turn
            serve(lane, server, me, turn, shared, record, wakes, at)
    except threading.BrokenBarrierError:
        pass
    except BaseException as error:
        failed = WorkerFailed(lane.name, at[0], error)
        failed.__cause__ = error
        shared.fail(failed)
    finally:
        shared.leave()


def _wait(waits: tuple[int, ...], me: int, shared: _Shared) -> None:
    """Sleep until all of some tasks have ended, or everybody leaves."""
    done, waits_for, mine, stop = shared.done, shared.waits_for, shared.locks[me], shared.stop
    for before in waits:
        while not done[before]:
            waits_for[me] = before
            if done[before]:
                break
            mine.acquire()
            if stop:
                return


def _serve(
    lane: LaneProgram, server: int, me: int, turn: _Turn, shared: _Shared, record: Record, wakes: list[tuple[int, ...]], at: list[int]
) -> None:  # fmt: skip
    """The only server of a lane: every step here is on the path of every task."""
    done, waits_for, locks, stop = shared.done, shared.waits_for, shared.locks, shared.stop
    start, end, moved = record.start_ns, record.end_ns, record.moved_bytes
    clock = perf_counter_ns
    for task, operation, waits in zip(lane.tasks, lane.operations, lane.waits, strict=True):
        if waits:
            _wait(waits, me, shared)
        if stop:
            return
        at[0] = task
        start[task] = clock()
        moved[task] = operation()
        end[task] = clock()
        done[task] = 1
        for worker in wakes[task]:
            if waits_for[worker] == task:
                _wake(locks[worker])


def _serve_in_turn(
    lane: LaneProgram, server: int, me: int, turn: _Turn, shared: _Shared, record: Record, wakes: list[tuple[int, ...]], at: list[int]
) -> None:  # fmt: skip
    """One of several servers of a lane: holds the lane's ticket until its task has started."""
    done, waits_for, locks, stop = shared.done, shared.waits_for, shared.locks, shared.stop
    start, end, moved = record.start_ns, record.end_ns, record.moved_bytes
    clock, n = perf_counter_ns, len(lane.tasks)
    while True:
        with turn.lock:
            row = turn.next
            if row == n or stop:
                return
            _wait(lane.waits[row], me, shared)
            if stop:
                return
            task = at[0] = lane.tasks[row]
            operation = lane.operations[row]
            record.server[task] = server
            turn.next = row + 1
            start[task] = clock()
        moved[task] = operation()
        end[task] = clock()
        done[task] = 1
        for worker in wakes[task]:
            if waits_for[worker] == task:
                _wake(locks[worker])
