"""Owns how the points of a sweep get computed: in chunks, on all cores or on a Dask cluster, stored as they arrive.

It must not know what is searched for. What is in the store is never computed again; points that share a schedule travel together.
"""

from __future__ import annotations

import importlib
import json
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from moesim.errors import InputError, MoesimError
from moesim.sweep.space import Point, Resolved, Space, code_identity
from moesim.sweep.store import Row, Store
from moesim.sweep.work import Chunk, compute, compute_apart

TOGETHER = 128  # most points of a chunk: what is lost at most when a worker dies
CONNECT_S = 30.0  # how long a lost scheduler is waited for, each time
LOOK_S = 2.0  # how often a client looks which workers there are
AHEAD = 3  # tasks submitted for each thread of the cluster: enough that none waits for the client
TASK_S = 0.5  # of computing that a task holds at least, while there is enough to do: scheduling one takes some 10 ms
ATTEMPTS = 5  # connections in a row without a single result, until the cluster is given up
Runner = Callable[[Sequence[Chunk]], Iterator[list[Row]]]


@dataclass
class Evaluator:
    """Computes points of one space, with one store and one way of running.

    Attributes
    ----------
    computed, found : int
        Points computed by this object, and points that were in the store.
    """

    space: Space
    store: Store
    runner: Runner
    workers: int
    progress: Callable[[int, int], None] | None = None  # points done, points in all
    computed: int = 0
    found: int = 0
    keys: dict[Point, str] = field(default_factory=dict)

    def __call__(self, points: Sequence[Point], done: int = 0, of: int = 0) -> None:
        """Compute the points that the store lacks, and note every point's key; ``done`` of ``of`` points were computed before."""
        total = of or len(points)
        there = self.store.keys()
        groups: dict[str, list[tuple[Resolved, Point]]] = {}
        refused: list[Row] = []
        new: set[str] = set()
        for point in points:
            resolved = self.space.resolve(point)
            self.keys[point] = resolved.key
            if resolved.key in there or resolved.key in new:
                continue
            new.add(resolved.key)
            if resolved.error:
                stated = {path: value for path, value, _ in self.space.settings(point)}
                text = json.dumps(stated, sort_keys=True, separators=(",", ":"))
                refused.append(Row(resolved.key, "failed", text, None, resolved.error))
            else:
                groups.setdefault(resolved.plan_key, []).append((resolved, point))
        self.store.add(refused)
        done += len(points) - len(new) + len(refused)
        self.found += len(points) - len(new)
        self._tell(done, total)
        with closing(self.runner(self._chunks(list(groups.values())))) as results:  # type: ignore[type-var]
            for rows in results:
                self.store.add(rows)
                self.computed += len(rows)
                done += len(rows)
                self._tell(done, total)
        self.computed += len(refused)

    def _tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def _chunks(self, groups: Sequence[Sequence[tuple[Resolved, Point]]]) -> list[Chunk]:
        """Cut groups so that no worker is idle while another holds a large one."""
        total = sum(map(len, groups))
        most = TOGETHER if len(groups) >= 2 * self.workers else max(1, min(TOGETHER, -(-total // (2 * self.workers))))
        out = []
        for group in groups:
            for i in range(0, len(group), most):
                part = group[i : i + most]
                files = tuple(sorted({pair for resolved, _ in part for pair in resolved.files}))
                points = tuple((resolved.key, self.space.settings(point)) for resolved, point in part)
                out.append(Chunk(self.space.base, str(self.space.folder), code_identity(), files, points))
        return out


def on_cores(jobs: int) -> Runner:
    """Return a runner on this machine's cores; one job runs in this process."""

    def run(chunks: Sequence[Chunk]) -> Iterator[list[Row]]:
        if jobs == 1 or len(chunks) == 1:
            yield from map(compute, chunks)
            return
        import joblib
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        pool = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")
        try:
            yield from pool(joblib.delayed(compute_apart)([chunk]) for chunk in chunks)
        except TerminatedWorkerError:
            fix = "what is finished is stored: run again with fewer --jobs"
            raise InputError("sweep", expected="workers that live", got="one that was killed, often for want of memory", fix=fix) from None

    return run


def on_cluster(address: str) -> Runner:
    """Return a runner on the workers of a Dask scheduler.

    A worker that is lost has its chunks run elsewhere; a scheduler that is lost and comes back is given what was not finished.

    Raises
    ------
    InputError
        If the extra is not installed, or there is no scheduler at the address.
    """
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise InputError("--cluster", expected="the extra cluster", got="no distributed", fix="pip install 'moesim[cluster]'") from None

    def run(chunks: Sequence[Chunk]) -> Iterator[list[Row]]:
        left = deque(chunks)
        failures = 0
        while left:
            try:
                client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
            except (OSError, TimeoutError, ValueError) as error:
                failures += 1
                if failures >= ATTEMPTS or isinstance(error, ValueError):
                    raise InputError(
                        "--cluster", expected="a Dask scheduler", got=f'"{address}": {error}', fix="start dask scheduler first"
                    ) from None
                continue
            try:
                for rows, done in _submitted(client, tuple(left)):
                    for chunk in done:
                        left.remove(chunk)
                    failures = 0
                    yield rows
            except _Lost:
                failures += 1
                if failures >= ATTEMPTS:
                    fix = "what is finished is stored: run again to go on"
                    raise InputError(
                        "--cluster", expected="a scheduler that stays", got="one that was lost again and again", fix=fix
                    ) from None
            finally:
                _close(client)

    return run


class _Lost(Exception):
    """The scheduler went away with work that it held."""


def _submitted(client: Any, chunks: Sequence[Chunk]) -> Iterator[tuple[list[Row], Sequence[Chunk]]]:
    """Submit chunks, somewhat more than there are threads at a time; yield results as they arrive, with the chunks they are of."""
    waiting = deque(chunks)
    under_way: dict[Any, Sequence[Chunk]] = {}
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    slots, asked, began, finished = 0, -math.inf, time.monotonic(), 0
    while waiting or under_way:
        if time.monotonic() - asked > LOOK_S:  # workers come and go
            if client.status != "running":
                raise _Lost
            slots, asked = max(sum(client.nthreads().values()), 1), time.monotonic()
        while waiting and len(under_way) < AHEAD * slots:
            pace = finished / slots / (time.monotonic() - began)
            size = max(1, min(int(TASK_S * pace), len(waiting) // (AHEAD * slots)))
            task = [waiting.popleft() for _ in range(size)]
            future = client.submit(compute_apart, task, pure=False)
            under_way[future] = task
            future.add_done_callback(arrived.put)
        try:
            future = arrived.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        rows, done = _result(future), under_way.pop(future)
        finished += len(done)
        yield rows, done


def _result(future: Any) -> list[Row]:
    """Return what a finished future holds."""
    if future.status not in ("finished", "error"):
        raise _Lost
    try:
        rows: list[Row] = future.result(timeout=CONNECT_S)
        return rows
    except MoesimError:
        raise
    except Exception as error:
        if future.status == "finished":  # done, but its worker went away before it handed over
            raise _Lost from None
        raise InputError("--cluster", expected="workers that live", got=f"{type(error).__name__}: {error}", fix="see their logs") from None


def _close(client: Any) -> None:
    try:
        client.close(timeout=2)
    except Exception:  # a client without its scheduler cannot say goodbye
        return
