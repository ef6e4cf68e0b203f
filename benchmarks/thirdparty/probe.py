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
from moesim.backtest.kernels import PAGE_BYTES
from moesim.planner.works import ATTENTION_KERNELS, COMBINE_KERNELS, EXPERT_KERNELS, HEAD_KERNELS, ROUTER_KERNELS

PRODUCTS = Shape("products-qwen3moe", "qwen3moe", 4, 2048, 16, 4, 128, 24, 4, 512, 4096)
OPERATORS = Shape("operators-qwen3moe", "qwen3moe", 24, 64, 2, 1, 32, 4, 2, 64, 512)
HEADS = {
    (width, kv): Shape(f"heads{width}x{kv}-qwen3moe", "qwen3moe", 4, 512, 16, kv, width, 4, 2, 256, 4096)
    for width, kv in ((64, 1), (128, 1), (128, 8))
}
FORMATS = (("Q4_0", True), ("Q4_0", False), ("Q8_0", False), ("F16", False))
CACHES = (("f16", True), ("f16", False), ("q8_0", True))
CACHE_BYTES = {"f16": 2.0, "q8_0": 34 / 32}  # of an element
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
    return {
        "kernels": {
            "products": products,
            "operators": [{"threads": n, "us": round(1e6 * s, 3)} for n, s in operators.items()],
            "attention": [attention(run, cache, flash) for cache, flash in CACHES],
        },
        "mapped_read_gb_s": _mapped_read_gb_s(models / f"{PRODUCTS.name}-F16.gguf"),
        "read_around_kib": _read_ahead_kib(models),
    }


def measured(asked: Asked) -> dict[str, Any]:
    """Measure in processes of their own; return the median one, or the only one where memory is limited, which takes long."""
    found = [_measured(asked) for _ in range(1 if asked.limit_bytes else PROCESSES)]
    found.sort(key=lambda it: it["cpu_s"])
    return found[len(found) // 2] | {"processes_cpu_s": [it["cpu_s"] for it in found]}


def _measured(asked: Asked) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_python("-m", "benchmarks.thirdparty.measure", json.dumps(asdict(asked))))
    return found


def _python(*arguments: str) -> str:
    """Run Python in a process of its own; return what it prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr[-500:]}")
    return done.stdout


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


def attention(run: Run, cache: str, flash: bool) -> dict[str, Any]:
    """Solve for the time of a token, an element and a page from three shapes; times of the step with and without cached tokens."""

    def head_token_ns(width: int, kv: int) -> float:
        shape = HEADS[width, kv]
        deep, empty = (run(shape, "Q8_0", kv=cache, flash=flash, depth=depth)["cpu_s"] for depth in (DEPTH, 0))
        return 1e9 * (deep - empty) / (shape.layers * shape.heads * DEPTH)

    def pages(width: int, kv: int) -> float:
        return 2 * kv * width * CACHE_BYTES[cache] / PAGE_BYTES

    narrow, wide, far = (head_token_ns(*shape) for shape in HEADS)
    page = max(far - wide, 0.0) / (pages(128, 8) - pages(128, 1))
    element = max(wide - narrow - page * (pages(128, 1) - pages(64, 1)), 0.0) / 64
    token = max(wide - 128 * element - page * pages(128, 1), 0.0)
    return {"cache": cache, "flash": flash, "token_ns": round(token, 3), "element_ns": round(element, 4), "page_ns": round(page, 3)}


def _mapped_read_gb_s(file: Path) -> float:
    call = f"read_mapped({str(file)!r}, {int(HELD * file.stat().st_size)})"
    return round(float(_python("-c", f"from benchmarks.thirdparty.measure import read_mapped; print({call})")) / 1e9, 3)


def _read_ahead_kib(folder: Path) -> int:
    """What the system reads around a page that is touched, on the drive of a folder."""
    device = os.stat(folder).st_dev
    return int(Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb").read_text(encoding="ascii"))
