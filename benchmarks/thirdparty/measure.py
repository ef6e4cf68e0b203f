"""Owns one measurement of llama.cpp in a process of its own: ``python -m benchmarks.thirdparty.measure '{"path": ..., ...}'`` prints JSON.

Time is process CPU time over threads, which a busy neighbour disturbs less than wall time; wall time stands beside it. Both are taken over
whole rounds of tokens from the same depth, as the system counts what other threads use by the tick; the median round counts. A memory limit
is a control group of this process alone: pages of the mapped file count in it, so that a model larger than the limit is read from the drive
again and again.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moesim.backtest.kernels import PAGE_BYTES
from moesim.capture.gguf import TENSOR
from moesim.capture.llama_cpp import LlamaCpp

BUFFER = re.compile(r"(\S+)\s+(model|KV|compute|output) buffer size =\s+([\d.]+) MiB")
GROUPS = Path("/sys/fs/cgroup/memory")
WARM_TOKENS = 4
PIECE_BYTES = 1 << 19
ROUTED_TOKENS = 300
WALKS, WALKED = 15, 1 / 8


@dataclass(frozen=True)
class Asked:
    """What to measure. ``limit_bytes`` 0: no limit."""

    path: str
    threads: int = 1
    depth: int = 0
    context: int = 1024
    micro_batch: int = 512
    kv: str = "f16"
    flash: bool | None = None
    repack: bool = True
    tokens: int = 24
    repeats: int = 3
    prompt: int = 0  # tokens of a prompt to measure instead of an answer
    limit_bytes: int = 0
    seed: int = 1


def limited(limit_bytes: int, path: str) -> None:
    """Put this process into a control group of its own with a memory limit, and let the system forget the file's pages: others hold them."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    group = GROUPS / f"thirdparty-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit_bytes), encoding="ascii")
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def read_mapped(path: str, limit_bytes: int) -> float:
    """Return bytes per second that a mapped file is read at in memory that holds part of it.

    As a model's experts are read: again and again from beginning to end, a random eighth of the pieces each time, all pages of a piece.
    """
    limited(limit_bytes, path)
    pieces = np.memmap(path, np.uint8, "r", shape=(os.path.getsize(path) // PIECE_BYTES, PIECE_BYTES))
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(WALKS):
        began, before = time.perf_counter(), _read_bytes()
        for piece in np.flatnonzero(rng.random(len(pieces)) < WALKED):
            int(pieces[piece, ::PAGE_BYTES].sum())
        rates.append((_read_bytes() - before) / (time.perf_counter() - began))
    return statistics.median(rates[WALKS // 3 :])


def measure(asked: Asked) -> dict[str, Any]:
    """Run one configuration; return seconds per token and the buffers that the engine reports."""
    if asked.limit_bytes:
        limited(asked.limit_bytes, asked.path)
    rng = np.random.default_rng(asked.seed)
    with LlamaCpp(
        Path(asked.path), context=asked.context, threads=asked.threads, micro_batch=asked.micro_batch, kv=asked.kv, flash=asked.flash,
        repack=asked.repack,
    ) as llama:  # fmt: skip

        def draw(n: int) -> list[int]:
            return [int(token) for token in rng.integers(2, llama.vocabulary, n)]

        if asked.depth:
            llama.decode(draw(asked.depth))
        count = asked.prompt or asked.tokens
        cpu_s, wall_s, read, faults = [], [], [], []
        for _ in range(asked.repeats):
            llama.rewind(asked.depth)
            steps = [draw(asked.prompt)] if asked.prompt else [[token] for token in draw(asked.tokens)]
            for token in draw(0 if asked.prompt else WARM_TOKENS):
                llama.decode([token])
            before = time.process_time(), time.perf_counter(), _read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            for step in steps:
                llama.decode(step)
            after = time.process_time(), time.perf_counter(), _read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            for out, one, other in zip((cpu_s, wall_s, read, faults), before, after, strict=True):
                out.append((other - one) / count)
        last = {(where, kind): float(size) for where, kind, size in BUFFER.findall("".join(llama.log))}  # printed once for each attempt
        buffers: Counter[str] = Counter()
        for (_, kind), size in last.items():
            buffers[f"{kind.lower()}_mib"] += size
    return {
        "cpu_s": statistics.median(cpu_s) / asked.threads, "wall_s": statistics.median(wall_s), "buffers": buffers,
        "faults_per_token": statistics.fmean(faults), "read_bytes_per_token": statistics.fmean(read),
    }  # fmt: skip


@cache
def chances(path: str, top_k: int, experts: int) -> list[float]:
    """Return the chances of experts to be used by a token, the highest first, in the mean over layers: what a routing trace says."""
    ids: dict[str, list[np.ndarray]] = {}
    with LlamaCpp(
        Path(path), repack=False, watch=lambda name: name.startswith(TENSOR), see=lambda name, found: ids.setdefault(name, []).append(found)
    ) as llama:  # fmt: skip
        for token in np.random.default_rng(1).integers(2, llama.vocabulary, ROUTED_TOKENS):
            llama.decode([int(token)])
    counts = [np.bincount(np.concatenate(found).ravel(), minlength=experts) for found in ids.values()]
    shares = np.mean([np.sort(c)[::-1] / c.sum() for c in counts], axis=0)
    return [round(float(share), 5) for share in np.minimum(shares * top_k, 1.0)]


def _read_bytes() -> int:
    return int(re.search(r"read_bytes: (\d+)", Path("/proc/self/io").read_text(encoding="ascii"))[1])  # type: ignore[index]


if __name__ == "__main__":
    print(json.dumps(measure(Asked(**json.loads(sys.argv[1])))))
