"""Owns the runs of a validation: every case simulated, then executed for real in rounds, so that what drifts on the machine hits all alike.

Round r runs every case once; the first round only warms up. Programs are kept between rounds as long as memory lasts, the rest is made
anew each time. All real runs happen with the cores kept awake. It needs torch, which is optional.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from moesim.engines.real import RealRun, TaskFailed, planned_bytes, run
from moesim.errors import InputError
from moesim.host.awake import cores_awake
from moesim.simulate import Case, Result, simulate
from moesim.validate.case import RealCase, Stores, prepare
from moesim.validate.comparison import Executed, Measured, costs_of

Progress = Callable[[str, int, int], None]

KEPT_SHARE = 0.5  # of the memory that is free: the rest is for stores in the page cache and for what a run allocates
OBJECTS_BYTES = 96 << 20  # of a program beside its arenas: other weights, prepared operations


def execute(cases: Sequence[Case], stores: Stores, repeats: int, progress: Progress = lambda *_: None) -> list[Executed]:
    """Simulate cases and run each of them ``repeats`` times, after a run that warms up.

    A real run in which a task fails (a wrong expert in a slot, a failed read) ends its case, not the others; the reason is kept.

    Parameters
    ----------
    cases : sequence of Case
    stores : Stores
        Shared by cases of equal experts.
    repeats : int
    progress : callable
        Told (what, done, all).

    Raises
    ------
    InputError
        If a case cannot be run for real, or does not fit the simulated machine.
    """
    if repeats < 1:
        raise InputError("--repeats", expected="at least 1", got=str(repeats))
    whole = len(cases) * (repeats + 3)
    done = 0

    def tick(what: str) -> None:
        nonlocal done
        progress(what, done, whole)
        done += 1

    results = []
    for case in cases:
        tick(f"simulating {case.scenario.name}")
        results.append(_simulated(case))
    for case in cases:
        tick(f"store of {case.scenario.name}")
        stores.get(case)
    os.sync()  # what was written would otherwise be written back while reads are timed
    failed = dict.fromkeys(range(len(cases)), "")
    runs: list[list[Measured]] = [[] for _ in cases]
    with ExitStack() as stack, cores_awake(), _few_to_collect():
        programs = _Programs(cases, results, stores, stack)
        for turn in range(repeats + 1):
            for i, case in enumerate(cases):
                tick(f"{'warm-up' if turn == 0 else f'run {turn}'} of {case.scenario.name}")
                if failed[i]:
                    continue
                try:
                    with programs.ready(i) as real:
                        ended = run(real.program)
                except TaskFailed as error:
                    failed[i] = str(error)
                    continue
                if turn:
                    runs[i].append(measured(ended))
    progress("done", whole, whole)
    return [
        Executed(case, result.schedule, costs_of(case, result.schedule), result.timeline, runs[i], failed[i])
        for i, (case, result) in enumerate(zip(cases, results, strict=True))
    ]


def measured(ended: RealRun) -> Measured:
    """Return what a real run gave, compared with what its schedule says."""
    planned = np.concatenate([f.access for f in ended.schedule.fragments])[:, 3]
    sizes = planned_bytes(ended.schedule)
    return Measured(
        ended.timeline,
        hits_equal=np.array_equal(planned, ended.outcomes) and ended.evictions == ended.expected_evictions,
        bytes_equal=all(size == ended.lane_bytes.get(lane, 0) for lane, size in sizes.items()),
        differences=tuple(ended.differences()),
        inversions=dict(ended.inversions),
        violations=ended.violations,
        router_agreement=ended.router_agreement,
        loss=ended.loss,
    )


def _simulated(case: Case) -> Result:
    result = simulate(case)
    if result.oom is not None:
        where = case.document.where(("memory",))
        raise InputError(
            f"case {case.scenario.name}", expected="one that fits the machine", got=f"out of memory in {result.oom['tier']}", where=where
        )
    return result


class _Programs:
    """Prepared cases, kept while memory lasts."""

    def __init__(self, cases: Sequence[Case], results: Sequence[Result], stores: Stores, stack: ExitStack) -> None:
        self._cases, self._results, self._stores, self._stack = cases, results, stores, stack
        self._kept: dict[int, RealCase] = {}
        self._left_bytes = int(free_bytes() * KEPT_SHARE)

    @contextmanager
    def ready(self, number: int) -> Iterator[RealCase]:
        """A case ready to run; it may be closed afterwards."""
        if number in self._kept:
            yield self._kept[number]
            return
        case = self._cases[number]
        real = prepare(case, self._results[number], self._stores.get(case))
        size = sum(arena.capacity_bytes for arena in real.program.arenas.values()) + OBJECTS_BYTES
        if size <= self._left_bytes:
            self._left_bytes -= size
            self._kept[number] = self._stack.enter_context(real)
            gc.collect()
            gc.freeze()
            yield real
            return
        with real:
            yield real


@contextmanager
def _few_to_collect() -> Iterator[None]:
    """Programs that are kept hold millions of objects, which each run would have the collector look at."""
    try:
        yield
    finally:
        gc.unfreeze()


def free_bytes() -> int:
    """Memory that can be had without swapping; 0 where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
