"""Owns what is measured of llama.cpp's kernels on this machine, apart from the models that are predicted.

- products of matrices that no cache holds, by format, threads, and rows (one, or a prompt): what is left of a step without its operators
- operators, by threads: a step of a model so small that nothing else counts
- attention by format of the cache: cached tokens at three widths of heads and of the cache
- a mapped file read in memory that holds part of it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.thirdparty.measure import Asked
from benchmarks.thirdparty.models import Shape, write
from moesim.planner.works import ATTENTION_KERNELS, COMBINE_KERNELS, EXPERT_KERNELS, HEAD_KERNELS, ROUTER_KERNELS

PRODUCTS = Shape("products-qwen3moe", "qwen3moe", 4, 2048, 16, 4, 128, 24, 4, 512, 4096)
OPERATORS = Shape("operators-qwen3moe", "qwen3moe", 24, 64, 2, 1, 32, 4, 2, 64, 512)
HEADS = {
    (width, kv): Shape(f"heads{width}x{kv}-qwen3moe", "qwen3moe", 4, 512, 16, kv, width, 4, 2, 256, 4096)
    for width, kv in ((64, 1), (128, 1), (128, 8))
}
FORMATS = (("Q4_0", True), ("Q4_0", False), ("Q8_0", False), ("F16", False))
CACHES = (("f16", True), ("f16", False), ("q8_0", True))
THREADS = (1, 2)
DEPTH, PROMPT = 2000, 256
PROCESSES = 3
HELD = 0.6  # share of a file that memory holds
Run = Callable[..., dict[str, Any]]


def probe(models: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure all of it; takes about five minutes.

    Returns
    -------
    dict
        ``kernels`` as ``moesim.backtest.kernels`` reads it, ``mapped_read_gb_s``, ``read_around_kib``.
    """

    def run(shape: Shape, quant: str, **how: Any) -> dict[str, Any]:
        path = models / f"{shape.name}-{quant}.gguf"
        if not path.exists():
            write(shape, quant, path)
        log(f"probe {shape.name} {quant} {how}")
        return measured(Asked(str(path), **{"context": 4096, "tokens": 32, "repeats": 3} | how))

    operators = {n: run(OPERATORS, "Q8_0", threads=n, tokens=64)["cpu_s"] / kernels(OPERATORS) for n in THREADS}
    products = [_products(run, quant, repacked, n, operators[n]) for quant, repacked in FORMATS for n in THREADS]
    attention = [_attention(run, cache, flash) for cache, flash in CACHES]
    file = models / f"{PRODUCTS.name}-F16.gguf"
    return {
        "kernels": {
            "products": products,
            "operators": [{"threads": n, "us": round(1e6 * s, 3)} for n, s in operators.items()],
            "attention": attention,
        },
        "mapped_read_gb_s": round(_apart(f"read_mapped({str(file)!r}, {int(HELD * file.stat().st_size)})") / 1e9, 3),
        "read_around_kib": _read_ahead_kib(models),
    }


def measured(asked: Asked) -> dict[str, Any]:
    """Measure in processes of their own; return the median one, or the only one where memory is limited, which takes long."""
    found = [_measured(asked) for _ in range(1 if asked.limit_bytes else PROCESSES)]
    found.sort(key=lambda it: it["cpu_s"])
    return found[len(found) // 2] | {"processes_cpu_s": [it["cpu_s"] for it in found]}


def _measured(asked: Asked) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.thirdparty.measure", json.dumps(asdict(asked))], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{asked}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kernels(shape: Shape) -> int:
    """Operators of a decode step, as ``moesim.planner.works`` counts them for the CPU."""
    return shape.layers * (ATTENTION_KERNELS + ROUTER_KERNELS + EXPERT_KERNELS + COMBINE_KERNELS) + HEAD_KERNELS


def _products(run: Run, quant: str, repacked: bool, threads: int, operator_s: float) -> dict[str, Any]:
    shape, n = PRODUCTS, PRODUCTS.parameters
    layers = n["attention"] + n["experts"] * shape.top_k // shape.experts
    decode = run(shape, quant, threads=threads, repack=repacked)["cpu_s"] - operator_s * kernels(shape)
    prompt = run(shape, quant, threads=threads, repack=repacked, prompt=PROMPT)["cpu_s"]
    return {
        "weights": quant, "repacked": repacked, "threads": threads, "decode_gmac_s": round((layers + n["head"]) / decode / 1e9, 2),
        "prompt_gmac_s": round((layers + n["head"] / PROMPT) / prompt / 1e9, 2),
    }  # fmt: skip


def _attention(run: Run, cache: str, flash: bool) -> dict[str, Any]:
    """Solve for the time of a token, an element and a page from three shapes; times of the step with and without cached tokens."""

    def head_token_ns(width: int, kv: int) -> float:
        shape = HEADS[width, kv]
        deep, empty = (run(shape, "Q8_0", kv=cache, flash=flash, depth=depth)["cpu_s"] for depth in (DEPTH, 0))
        return 1e9 * (deep - empty) / (shape.layers * shape.heads * DEPTH)

    narrow, wide, far = head_token_ns(64, 1), head_token_ns(128, 1), head_token_ns(128, 8)
    element = max(wide - narrow, 0.0) / 64
    pages = 2 * 7 * 128 * {"f16": 2, "q8_0": 34 / 32}[cache] / 4096
    return {
        "cache": cache, "flash": flash, "token_ns": round(max(wide - 128 * element, 0.0), 3), "element_ns": round(element, 4),
        "page_ns": round(max(far - wide, 0.0) / pages, 3),
    }  # fmt: skip


def _apart(call: str) -> float:
    code = f"from benchmarks.thirdparty.measure import read_mapped; print({call})"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _read_ahead_kib(folder: Path) -> int:
    """What the system reads around a page that is touched, on the drive of a folder."""
    device = os.stat(folder).st_dev
    return int(Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb").read_text(encoding="ascii"))
