"""Owns the folder of field runs that measurements of llama.cpp become: runs.csv, memory.csv, machines.yaml, models.yaml."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.thirdparty.models import SHAPES, Shape
from moesim.capture.llama_cpp import VERSION
from moesim.hardware import HardwareProfile, load_hardware

GIB, GB = 2**30, 1e9
HOST = "this machine"
# The engine's prebuilt library has kernels for AVX2 at most, whatever the processor offers.
SIMD = "avx2"


def write_folder(out: Path, found: list[dict[str, Any]], profile: Path, probed: dict[str, Any]) -> None:
    """Write measured rows as a folder that ``moesim backtest`` reads.

    Parameters
    ----------
    out : Path
    found : list of dict
        Rows as ``measured.jsonl`` holds them.
    profile : Path
        This machine as ``moesim calibrate`` measured it.
    probed : dict
        What ``probe`` found.
    """
    hardware = load_hardware(str(profile))
    machines = {_machine(entry): machine_record(hardware, entry, probed) for entry in found}
    (out / "machines.yaml").write_text(yaml.safe_dump(machines, sort_keys=False), encoding="utf-8")
    models = {_model(entry): model_record(SHAPES[entry["shape"]]) | {"expert_chances": entry["chances"]} for entry in found}
    (out / "models.yaml").write_text(yaml.safe_dump(models, sort_keys=False), encoding="utf-8")
    runs = [_run(number, entry) for number, entry in enumerate(found, start=1)]
    _write(
        out / "runs.csv",
        [
            r | {"metric": "prefill_tok_s" if e["prompt"] else "decode_tok_s", "value": _rate(e), "stdev": ""}
            for r, e in zip(runs, found, strict=True)
        ],
    )
    memory = [
        r | {"metric": metric, "value": e["buffers"][key], "unit": "MiB", "detail": ""}
        for r, e in zip(runs, found, strict=True)
        for metric, key in (("host_kv_mib", "kv_mib"), ("host_compute_mib", "compute_mib"), ("host_weights_mib", "model_mib"))
    ]  # fmt: skip
    _write(out / "memory.csv", memory)


def _rate(entry: dict[str, Any]) -> float:
    """Tokens per second; of a run that waits for the drive by wall time, of others by CPU time over threads."""
    return round(1 / (entry["wall_s"] if entry["limit_bytes"] else entry["cpu_s"]), 4)


def _machine(entry: dict[str, Any]) -> str:
    return HOST + (f", {entry['limit_bytes'] / GB:.2f} GB" if entry["limit_bytes"] else "")


def _model(entry: dict[str, Any]) -> str:
    return f"{entry['shape']} {entry['quant']}"


def machine_record(hardware: HardwareProfile, entry: dict[str, Any], probed: dict[str, Any]) -> dict[str, Any]:
    """Return a machine's record: what was calibrated and probed, and what the engine's library is built for."""
    fact = lambda v, prov: {"v": v, "prov": prov}  # noqa: E731
    limit = entry["limit_bytes"]
    alone = {"page_cache_gib": fact(limit / GIB, "reported")} if limit else {}
    drive = max(p.bandwidth.value for p in hardware.storage["ssd"].curve)
    return {
        "host_group": HOST, "unified": False, "gpus": [],
        "cpu": {"name": fact("virtual server cores", "reported"), "sockets": fact(1, "reported"), "cores": fact(2, "reported"), "simd": fact(SIMD, "reported"),
                "kernels": probed["kernels"]},
        "ram": {"gib": fact((limit or hardware.tiers["ram"].capacity.value) / GIB, "reported"), "type": fact("DDR5", "inferred"),
                "mt_s": fact(4800, "inferred"), "channels": fact(8, "inferred"), "peak_bw_gb_s": fact(307.2, "derived"),
                "measured_bw_gb_s": fact(round(hardware.channels["ram"].bandwidth.value / GB, 2), "reported"), **alone},
        "ssd": {"name": fact("virtual drive", "reported"), "seq_read_gb_s": fact(round(drive / GB, 2), "reported"),
                "mapped_read_gb_s": fact(probed["mapped_read_gb_s"], "reported"), "read_around_kib": fact(probed["read_around_kib"], "reported")},
    }  # fmt: skip


def model_record(shape: Shape) -> dict[str, Any]:
    """Return a model's record."""
    n = {key: value / 1e9 for key, value in shape.parameters.items()}
    active = n["experts"] * shape.top_k / shape.experts
    return {
        "arch": {"qwen3moe": "qwen3_moe", "olmoe": "olmoe"}[shape.arch], "n_layers": shape.layers, "n_moe_layers": shape.layers,
        "hidden_size": shape.hidden, "n_experts": shape.experts, "top_k": shape.top_k, "expert_intermediate_size": shape.expert_ffn,
        "n_heads": shape.heads, "n_kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab": shape.vocabulary, "tied_embeddings": False,
        "params": {"expert_params_m": 3 * shape.hidden * shape.expert_ffn / 1e6, "routed_total_b": n["experts"], "routed_active_b": active, "shared_b": 0.0,
                   "attention_b": n["attention"], "dense_ffn_b": 0.0, "router_b": n["router"], "embedding_b": n["embedding"], "lm_head_b": n["head"],
                   "params_total_b": sum(n.values())},
    }  # fmt: skip


def _run(number: int, entry: dict[str, Any]) -> dict[str, Any]:
    shape = SHAPES[entry["shape"]]
    limit = entry["limit_bytes"]
    bits = 8 * entry["bytes"] / sum(shape.parameters.values())
    return {
        "row_id": f"T{number:03d}", "run_id": entry["name"], "source": "benchmarks/thirdparty", "source_loc": entry["name"],
        "date": datetime.date.today().isoformat(), "model": _model(entry), "quant": entry["quant"], "model_file_gib": round(entry["bytes"] / GIB, 4),
        "bits_per_weight": round(bits, 4), "bpw_prov": "file", "engine": "llama.cpp", "engine_family": "llama.cpp", "engine_version": VERSION,
        "machine": _machine(entry), "offload_kind": "ssd" if limit else "cpu_only", "moe_layers_on_cpu": shape.layers, "moe_layers_on_cpu_prov": "reported",
        "moe_layers_total": shape.layers, "host_weights_over_ram": round(entry["bytes"] / limit, 3) if limit else "", "threads": entry["threads"],
        "kv_type": entry["kv"], "flash_attn": "" if entry["flash"] is None else int(entry["flash"]), "n_ubatch": entry["micro_batch"], "ctx_size": entry["context"],
        "depth_n_kv": entry["depth"], "prompt_tokens": entry["prompt"] or "", "gen_tokens": entry["tokens"], "concurrency": 1, "includes_prompt_time": 0,
        "flags": "" if entry["repack"] else "no-repack", "quality": "A",
    }  # fmt: skip


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
