"""An engine's kernels as a machine's record states them, its page cache, and its buffers: closed forms, limits, and what the engine itself reported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moesim.backtest import backtest
from moesim.backtest.data import Facts, read_field_runs
from moesim.backtest.kernels import kernels_of
from moesim.backtest.memory import predict_memory
from moesim.backtest.paging import reread_share

KERNELS = {
    "products": [
        {"weights": "Q4_0", "repacked": True, "threads": 1, "decode_gmac_s": 30.0, "prompt_gmac_s": 50.0},
        {"weights": "Q4_0", "repacked": True, "threads": 4, "decode_gmac_s": 90.0, "prompt_gmac_s": 190.0},
        {"weights": "Q4_0", "repacked": False, "threads": 1, "decode_gmac_s": 20.0, "prompt_gmac_s": 25.0},
        {"weights": "Q8_0", "repacked": False, "threads": 1, "decode_gmac_s": 10.0, "prompt_gmac_s": 40.0},
    ],
    "operators": [{"threads": 1, "us": 0.5}],
    "attention": [{"cache": "f16", "flash": True, "token_ns": 8.0, "element_ns": 0.125, "page_ns": 20.0}],
}
MACHINE = {
    "unified": False, "gpus": [], "cpu": {"cores": 4, "simd": "avx2", "kernels": KERNELS},
    "ram": {"gib": 64, "channels": 2, "mt_s": 4800, "peak_bw_gb_s": 300.0},
    "ssd": {"seq_read_gb_s": 3.0, "mapped_read_gb_s": 1.5, "read_around_kib": 8192},
}  # fmt: skip
N = {"attention": 12 * 2048 * 128 * 40, "experts": 12 * 32 * 3 * 2048 * 768, "router": 12 * 32 * 2048, "embedding": 32000 * 2048}
WIDE = {
    "arch": "qwen3_moe", "n_layers": 12, "n_moe_layers": 12, "hidden_size": 2048, "n_experts": 32, "top_k": 4, "expert_intermediate_size": 768,
    "n_heads": 16, "n_kv_heads": 4, "head_dim": 128, "vocab": 32000, "tied_embeddings": False,
    "params": {"params_total_b": (sum(N.values()) + N["embedding"]) / 1e9},
}  # fmt: skip
ACTIVE = N["attention"] + N["experts"] / 8 + N["router"] + N["embedding"]  # the head is as large as the embedding
ROW: dict[str, Any] = {
    "row_id": "T1", "run_id": "a", "model": "wide", "quant": "Q4_0", "bits_per_weight": 4.5, "engine": "llama.cpp", "engine_family": "llama.cpp",
    "engine_version": "", "date": "2026-01-01", "source": "", "source_loc": "", "machine": "box", "offload_kind": "cpu_only", "moe_layers_on_cpu": 12,
    "threads": 1, "kv_type": "f16", "flash_attn": 1, "n_ubatch": 512, "ctx_size": 1024, "depth_n_kv": 0, "prompt_tokens": "", "gen_tokens": 2,
    "concurrency": 1, "flags": "", "metric": "decode_tok_s", "value": 50.0, "unit": "",
}  # fmt: skip


def folder(path: Path, *rows: dict[str, Any], memory: list[dict[str, Any]] | None = None, machine: dict[str, Any] = MACHINE) -> Path:
    path.mkdir(exist_ok=True)
    for name, data in (("machines", {"box": machine}), ("models", {"wide": WIDE})):
        (path / f"{name}.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    for name, found in (("runs", [ROW | {"row_id": f"T{i}"} | row for i, row in enumerate(rows)]), ("memory", memory or [])):
        lines = [",".join(ROW)] + [",".join(str(value) for value in row.values()) for row in found]
        (path / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def seconds(path: Path, **row: Any) -> dict[str, float]:
    """Predicted seconds of a row by part."""
    run = backtest(read_field_runs(folder(path, row)), warm=False)
    return dict(run.predictions[0].parts)


def test_products_take_multiply_adds_over_the_measured_rate(tmp_path: Path) -> None:
    for changes, rate in (
        ({}, 30e9), ({"flags": "no-repack"}, 20e9), ({"quant": "Q8_0", "bits_per_weight": 8.5}, 10e9), ({"threads": 3}, 30e9), ({"threads": 4}, 90e9),
    ):  # fmt: skip
        parts = seconds(tmp_path, **changes)
        operators = 0.5e-6 * (15 * 12 + 3)
        products = sum(parts.values()) - parts["attention"]
        assert products == pytest.approx(ACTIVE / rate + operators, rel=0.01), changes


def test_attention_walks_over_tokens_and_pages(tmp_path: Path) -> None:
    parts = seconds(tmp_path, depth_n_kv=4000)
    step = 4 * 128 * 2  # bytes of all heads' keys of a token
    head_token = (8.0 + 128 * 0.125 + 2 * step / 4096 * 20.0) * 1e-9
    assert parts["attention"] == pytest.approx(12 * 16 * 4002 * head_token, rel=0.01)


def test_a_prompt_has_rates_of_its_own(tmp_path: Path) -> None:
    parts = seconds(tmp_path, metric="prefill_tok_s", prompt_tokens=512, depth_n_kv=0)
    every = N["attention"] + N["experts"] / 8
    assert parts["CPU experts"] + parts["projections"] == pytest.approx(512 * every / 50e9, rel=0.02)


def test_a_record_without_kernels_states_none() -> None:
    assert kernels_of(Facts("box", {"cpu": {"cores": 4}}, "machines.yaml")) is None


def test_what_was_not_measured_is_not_made_up() -> None:
    kernels = kernels_of(Facts("box", MACHINE, "machines.yaml"))
    assert kernels is not None
    assert kernels.products("Q6_K", False, 1, prompt=False) is None
    assert kernels.head_token_s("q8_0", True, 128, 1024.0) is None
    assert kernels.products("Q4_0", True, 16, prompt=True) == 190e9


def test_single_pieces_of_which_few_are_used() -> None:
    assert reread_share(0.7, [0.01], 1.0) == pytest.approx(0.01 * 0.3, rel=0.02)


def test_windows_of_many_pieces_become_a_sweep() -> None:
    for cached in (0.3, 0.6, 0.9):
        read = reread_share(cached, [0.5], 200.0)
        assert 1 - read == pytest.approx(math.exp(-read / cached), abs=0.01)


def test_what_fits_is_read_once_and_less_memory_reads_more() -> None:
    assert reread_share(1.0, [0.125], 20.0) == 0.0
    assert reread_share(0.0, [0.125], 20.0) == pytest.approx(1 - (1 - 0.125) ** 20, rel=1e-6)
    reads = [reread_share(cached, [0.125], 20.0) for cached in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)]
    assert reads == sorted(reads, reverse=True)


@pytest.mark.parametrize(
    ("cached", "chances", "around"),
    [
        (0.5, [0.125], 20),
        (0.8, [0.125], 20),
        (0.7, [0.25], 8),
        (0.6, [0.125], 1),
        (0.7, [0.8, 0.5, 0.2, 0.1, 0.05, 0.0, 0.0, 0.0], 20),
        (0.6, [0.9, 0.01], 1),
    ],
)
def test_reading_again_equals_a_drawn_cache_that_gives_up_pages_at_random(cached: float, chances: list[float], around: int) -> None:
    rng = np.random.default_rng(1)
    pieces, room = 4000, round(4000 * cached)
    used = rng.permutation(np.resize(chances, pieces))
    present = np.zeros(pieces, bool)
    held: list[int] = []
    reads = []
    for _ in range(40):
        read = 0
        for piece in np.flatnonzero(rng.random(pieces) < used):
            if present[piece]:
                continue
            low = max(piece - around // 2, 0)
            for new in (low + np.flatnonzero(~present[low : piece + (around + 1) // 2])).tolist():
                present[new] = True
                held.append(new)
                read += 1
                if len(held) > room:
                    at = rng.integers(len(held))
                    present[held[at]] = False
                    held[at] = held[-1]
                    held.pop()
        reads.append(read / pieces)
    assert reread_share(cached, chances, around) == pytest.approx(
        np.mean(reads[20:]), rel=0.2, abs=0.005
    )  # neighbours are taken to be independent


def test_a_limit_on_memory_reads_from_the_drive_at_the_measured_rate(tmp_path: Path) -> None:
    limited = MACHINE | {"ram": MACHINE["ram"] | {"page_cache_gib": 0.8}}
    run = backtest(read_field_runs(folder(tmp_path, {"offload_kind": "ssd", "flags": "no-repack"}, machine=limited)), warm=False)
    weights = (sum(N.values()) + N["embedding"]) * 4.5 / 8
    kv, buffer, flight = 24 * 2**20, 83.5 * 2**20, 2 * 8 * 2**20
    share = reread_share((0.8 * 2**30 - kv - buffer - flight) / weights, [1 / 8], 8 * 2**20 / (2048 * 768 * 4.5 / 8))
    assert run.predictions[0].parts["experts from storage"] == pytest.approx(share * weights / 1.5e9, rel=0.03)


@pytest.mark.parametrize(
    ("metric", "context", "flash", "quant", "bits", "reported"),
    [
        ("host_compute_mib", 1024, 1, "Q4_0", 4.5, 83.52), ("host_compute_mib", 3072, 1, "Q4_0", 4.5, 85.52), ("host_compute_mib", 4096, 0, "Q4_0", 4.5, 162.02),
        ("host_kv_mib", 3072, 1, "Q4_0", 4.5, 72.0), ("host_weights_mib", 1024, 1, "Q4_0", 4.52, 2152.52), ("host_weights_mib", 1024, 1, "Q8_0", 8.53, 2099.52),
    ],
)  # fmt: skip
def test_buffers_are_those_that_the_engine_reports(
    tmp_path: Path, metric: str, context: int, flash: int, quant: str, bits: float, reported: float
) -> None:
    row = ROW | {
        "metric": metric,
        "ctx_size": context,
        "flash_attn": flash,
        "quant": quant,
        "bits_per_weight": bits,
        "value": reported,
        "unit": "MiB",
    }
    found = predict_memory(read_field_runs(folder(tmp_path, {}, memory=[row])))
    assert found[0].error == pytest.approx(0.0, abs=0.01), found[0]
