"""Owns one measurement of llama.cpp in a process of its own: ``python -m benchmarks.thirdparty.measure '{"path": ..., ...}'`` prints JSON.

Time is process CPU time over threads, which a busy neighbour disturbs less than wall time; wall time stands beside it. Decode: medians
over single tokens, of ``repeats`` rounds from the same depth. A memory limit is a control group of this process alone: pages of the mapped
file count in it, so that a model larger than the limit is read from the drive again and again.
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
from pathlib import Path
from typing import Any

import numpy as np

from moesim.capture.llama_cpp import LlamaCpp

BUFFER = re.compile(r"(\S+)\s+(model|KV|compute|output) buffer size =\s+([\d.]+) MiB")
GROUPS = Path("/sys/fs/cgroup/memory")
WARM_TOKENS = 4


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


def timed(llama: LlamaCpp, tokens: list[int], threads: int) -> tuple[float, float]:
    """Run tokens; return (CPU seconds over threads, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    llama.decode(tokens)
    return (time.process_time() - cpu) / threads, time.perf_counter() - wall


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
        samples: list[tuple[float, float]] = []
        before = resource.getrusage(resource.RUSAGE_SELF)
        read_before = _read_bytes()
        for _ in range(asked.repeats):
            llama.rewind(asked.depth)
            if asked.prompt:
                cpu, wall = timed(llama, draw(asked.prompt), asked.threads)
                samples.append((cpu / asked.prompt, wall / asked.prompt))
                continue
            for token in draw(WARM_TOKENS):
                llama.decode([token])
            samples += [timed(llama, [token], asked.threads) for token in draw(asked.tokens)]
        after = resource.getrusage(resource.RUSAGE_SELF)
        last = {(where, kind): float(size) for where, kind, size in BUFFER.findall("".join(llama.log))}  # printed once for each attempt
        buffers: Counter[str] = Counter()
        for (_, kind), size in last.items():
            buffers[f"{kind.lower()}_mib"] += size
    cpu_s, wall_s = ([s[i] for s in samples] for i in (0, 1))
    count = asked.repeats * (asked.prompt or asked.tokens + WARM_TOKENS)
    return {
        "cpu_s": statistics.median(cpu_s), "wall_s": statistics.median(wall_s), "mean_wall_s": statistics.fmean(wall_s),
        "spread": (np.quantile(cpu_s, 0.9) - np.quantile(cpu_s, 0.1)) / statistics.median(cpu_s), "buffers": buffers,
        "faults_per_token": (after.ru_majflt - before.ru_majflt) / count, "read_bytes_per_token": (_read_bytes() - read_before) / count,
    }  # fmt: skip


def _read_bytes() -> int:
    return int(re.search(r"read_bytes: (\d+)", Path("/proc/self/io").read_text(encoding="ascii"))[1])  # type: ignore[index]


if __name__ == "__main__":
    print(json.dumps(measure(Asked(**json.loads(sys.argv[1])))))
