"""Owns what dequantisation costs on this machine: the product of one token with one expert, weights in each format (claim Q9)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from moesim.precision import get_format
from moesim.quant.packing import packed_layout, random_packed, view

ROWS, COLS = 1024, 1024  # a matrix of one million weights: larger than a core's cache in 16 bits
REPEATS = 15


@dataclass(frozen=True, slots=True)
class Dequant:
    """One format: stored bytes of the matrix, CPU time of a product with one token (median), and how it is computed."""

    format: str
    bytes: int
    time_s: float
    how: str


def measure(formats: Sequence[str]) -> list[Dequant]:
    """Time each format in turn, one round after the other, so that a busy machine slows all alike; bf16 comes first."""
    matrices = []
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, COLS), np.float32)).to(torch.bfloat16)
    for name in dict.fromkeys(("bf16", *formats)):
        layout = packed_layout(get_format(name), ROWS, COLS)
        matrices.append((name, view(torch.from_numpy(random_packed(np.random.default_rng(1), layout)), layout)))
    times: dict[str, list[float]] = {name: [] for name, _ in matrices}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(REPEATS):
            for name, matrix in matrices:
                began = time.process_time()
                matrix.matmul(x)
                times[name].append(time.process_time() - began)
    finally:
        torch.set_num_threads(threads)
    return [
        Dequant(name, m.layout.n_bytes, median(times[name]), "decoded each time" if m.layout.kernel == "decode" else "torch's kernel")
        for name, m in matrices
    ]
