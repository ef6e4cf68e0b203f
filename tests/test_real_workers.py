"""Worker threads of the real engine: order, waits, several servers, failures and interrupts. Needs no torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager

import pytest

from moesim.engines.real_workers import LaneProgram, WorkerFailed, run_lanes


def nothing() -> None:
    pass


def moesim_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("moesim ")]


def ping_pong(n: int, operation: Callable[[], int | None] = nothing) -> list[LaneProgram]:
    """Two lanes that take turns: each task waits for the one before."""
    even, odd = range(0, n, 2), range(1, n, 2)
    return [
        LaneProgram("a", 1, list(even), [operation] * len(even), [(t - 1,) if t else () for t in even]),
        LaneProgram("b", 1, list(odd), [operation] * len(odd), [(t - 1,) for t in odd]),
    ]


def test_no_task_starts_before_what_it_waits_for() -> None:
    record = run_lanes(ping_pong(2000), 2000)
    assert record.start_ns[0] >= 0
    assert all(record.start_ns[t] >= record.end_ns[t - 1] for t in range(1, 2000))


def test_operations_are_called_once_each_in_order_and_their_bytes_are_kept() -> None:
    called: list[int] = []

    def operation(task: int) -> int:
        called.append(task)
        return 10 * task

    tasks = list(range(50))
    lane = LaneProgram("a", 1, tasks, [lambda t=t: operation(t) for t in tasks], [()] * 50)
    record = run_lanes([lane], 50)
    assert called == tasks
    assert record.moved_bytes == [10 * t for t in tasks]


def test_several_servers_work_at_once_and_start_in_order() -> None:
    both = threading.Barrier(2)  # passes only if two operations are under way together

    def operation() -> None:
        both.wait(5)

    record = run_lanes([LaneProgram("ssd", 2, list(range(20)), [operation] * 20, [()] * 20)], 20)
    assert record.start_ns == sorted(record.start_ns)
    assert set(record.server) == {0, 1}


def test_a_waiting_task_blocks_those_behind_it_on_a_lane_of_several_servers() -> None:
    slow = LaneProgram("cpu", 1, [0], [lambda: time.sleep(0.05)], [()])
    ssd = LaneProgram("ssd", 2, [1, 2], [nothing, nothing], [(0,), ()])
    record = run_lanes([slow, ssd], 3)
    assert record.end_ns[0] <= record.start_ns[1] <= record.start_ns[2]


@pytest.mark.parametrize("width", [1, 3])
def test_a_failing_operation_stops_everybody(width: int) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    ssd = LaneProgram("ssd", width, [0, 1, 2], [nothing, fail, nothing], [(), (), ()])
    cpu = LaneProgram("cpu", 1, [3, 4], [nothing, nothing], [(1,), (2,)])
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="task 1 on lane ssd: OSError") as found:
        run_lanes([ssd, cpu], 5)
    assert time.monotonic() - began < 5
    assert found.value.task == 1
    assert isinstance(found.value.__cause__, OSError)
    assert not moesim_threads()


def test_a_lane_that_cannot_begin_stops_everybody() -> None:
    @contextmanager
    def broken():  # type: ignore[no-untyped-def]
        raise RuntimeError("no device")
        yield

    lanes = ping_pong(4)
    lanes[1].enter = broken
    with pytest.raises(WorkerFailed, match="no device"):
        run_lanes(lanes, 4)
    assert not moesim_threads()


def test_interrupt_ends_the_run_within_seconds(interruptible: None) -> None:
    interrupted: list[float] = []

    def slow() -> None:
        if not interrupted:
            interrupted.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run_lanes(ping_pong(100_000, slow), 100_000)
    assert time.monotonic() - interrupted[0] < 5
    assert not moesim_threads()


@pytest.mark.parametrize("born", [True, False])
def test_interrupt_while_a_thread_is_started(monkeypatch: pytest.MonkeyPatch, born: bool) -> None:
    """The last thread sets the others off, and may interrupt the run before its own ``start`` has returned."""
    start, runs, begun = threading.Thread.start, iter([False, True]), threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        last = next(runs)
        if born or not last:
            start(thread)
        if last:
            assert not born or begun.wait(5)
            raise KeyboardInterrupt

    def slow() -> None:
        begun.set()
        time.sleep(0.3)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_lanes(ping_pong(100, slow)[::-1], 100)  # the lane that begins is started last
    assert not moesim_threads()


def test_interpreter_settings_come_back() -> None:
    before = sys.getswitchinterval(), gc.isenabled()
    seen: list[bool] = []
    lane = LaneProgram("a", 1, [0], [lambda: seen.append(gc.isenabled())], [()])
    run_lanes([lane], 1, switch_interval_s=1e-3)
    assert seen == [False]
    assert (sys.getswitchinterval(), gc.isenabled()) == before
