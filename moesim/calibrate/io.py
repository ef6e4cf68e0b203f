"""Owns the timing of reads and copies on this machine, through the very operations that a real run uses.

Operations run in a thread of their own while the others wait, experts in random order, so that nothing lies in a cache; each figure is
the mean over rounds that are interleaved with those of all other figures, its spread that of the rounds.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from moesim.calibrate.samples import trimmed_mean
from moesim.expert_store import ExpertStore
from moesim.expert_store.readers import Engine, open_reader
from moesim.host.arena import Arena
from moesim.host.links import CopyLink

ROUNDS, READS = 4, 16
SLOTS = 24  # memory that reads and copies go through, so that what is overwritten has left the caches


@dataclass(frozen=True)
class Timed:
    """Mean time of an operation and the relative standard deviation of its rounds."""

    mean_s: float
    spread: float

    @staticmethod
    def of(rounds: Sequence[float]) -> Timed:
        """From the means of rounds."""
        values = np.array(rounds)
        return Timed(float(values.mean()), float(values.std(ddof=1) / values.mean()) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Way:
    """A way of reading."""

    engine: Engine
    request_bytes: int
    depth: int


def in_a_thread(work: Callable[[], None]) -> None:
    """Run work in a worker thread, as the engine does; its error is raised here."""
    failed: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def time_each(operations: Sequence[Callable[[], int]]) -> float:
    """Return the mean time of operations that run one after the other in a worker thread."""
    taken: list[float] = []

    def work() -> None:
        for operation in operations:
            begin = time.perf_counter()
            operation()
            taken.append(time.perf_counter() - begin)

    in_a_thread(work)
    return trimmed_mean(np.array(taken))


def time_reads(store: ExpertStore, ways: Sequence[Way], rng: np.random.Generator, progress: Callable[[], None]) -> dict[Way, Timed]:
    """Return how long the read of one expert takes in each way."""
    layer = store.layers[0]
    size = store.slot_bytes(layer)
    found: dict[Way, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        arena = stack.enter_context(Arena("calibration", SLOTS * (size + 4096)))
        slots = [arena.take(size, 4096) for _ in range(SLOTS)]
        arena.touch()
        readers = {
            way: stack.enter_context(open_reader(store, way.engine, request_bytes=way.request_bytes, depth=way.depth)) for way in ways
        }
        for _ in range(ROUNDS):
            for way, reader in readers.items():
                layers = rng.choice(store.layers, READS)
                experts = rng.integers(0, store.n_experts, READS)
                slot_of = rng.permutation(SLOTS)
                reads = [
                    reader.prepare(int(x), int(e), slots[slot_of[i % SLOTS]]) for i, (x, e) in enumerate(zip(layers, experts, strict=True))
                ]
                found[way].append(time_each(reads))
                progress()
        del slots, reads
    return {way: Timed.of(rounds) for way, rounds in found.items()}


def attained_bytes_per_s(way: Way, n_bytes: int, extents: int, time_s: float, latency_s: float) -> float:
    """Return the bandwidth that gives back the time of a read in the cost model's formula (``cost.py``, storage).

    time = ceil(n / depth) latency + bytes / cap, with request / cap = request / bandwidth - latency / depth.
    """
    request = min(way.request_bytes, n_bytes / extents)
    rounds = math.ceil(math.ceil(n_bytes / request) / way.depth)
    return n_bytes / (time_s - rounds * latency_s + n_bytes / request * latency_s / way.depth)


def time_copies(sizes: Sequence[int], rng: np.random.Generator, progress: Callable[[], None]) -> dict[int, Timed]:
    """Return how long the copy of one expert from one memory slot to another takes, by size."""
    found: dict[int, list[float]] = {size: [] for size in sizes}
    link = CopyLink()
    for _ in range(ROUNDS):
        for size in sizes:
            n = max(SLOTS, min(4096, (64 << 20) // size))
            with Arena("calibration", 2 * n * size) as arena:
                sources, targets = [arena.take(size) for _ in range(n)], [arena.take(size) for _ in range(n)]
                arena.touch()
                pairs = zip(rng.permutation(n)[: 2 * READS].tolist(), rng.permutation(n)[: 2 * READS].tolist(), strict=True)
                copies = [link.prepare(sources[a], targets[b]) for a, b in pairs]
                found[size].append(time_each(copies))
                del copies, sources, targets
            progress()
    return {size: Timed.of(rounds) for size, rounds in found.items()}


def memory_bytes_per_s(threads: int, seconds: float = 0.6) -> float:
    """Return the bytes read and written a second by so many threads that copy memory at once."""
    size = 64 << 20
    moved = [0] * threads
    stop = threading.Event()

    def work(me: int) -> None:
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        ready.wait()
        while not stop.is_set():
            np.copyto(target, source)
            moved[me] += 2 * size

    ready = threading.Barrier(threads + 1)
    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    begin = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for worker in workers:
        worker.join()
    return sum(moved) / (time.perf_counter() - begin)
