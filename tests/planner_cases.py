"""What tests of the planner share: small models and machines, scenarios on them, and schedules as readable text."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moesim.planner import Planner
from moesim.scenario import Scenario
from moesim.schedule import Dep, Fragment, Kind
from moesim.simulate import Case, make_case
from moesim.trace import RoutingTrace, save_trace

EXPERT = 1000  # bytes of one expert of one layer in the small models

_TYPE = {Dep.DATA: "", Dep.SLOT: "s", Dep.BUFFER: "b", Dep.QUEUE: "q"}


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="moesim-planner-"))


def model(n_layers: int = 2, n_experts: int = 4, top_k: int = 1, **facts: Any) -> dict[str, Any]:
    """A model of declared totals: 1,000 B an expert and layer, 100 B of shared part a layer, 8 B of KV a token and layer (in raw-int8)."""
    return {
        "name": "small", "n_layers": n_layers, "hidden_size": 16,
        "attention": {"kind": "full", "n_heads": 2, "n_kv_heads": 1, "head_dim": 4},
        "experts": {"n_experts": n_experts, "top_k": top_k, **facts.pop("experts", {})},
        "declared": {"shared_params": 100 * n_layers, "expert_params": EXPERT * n_layers}, **facts,
    }  # fmt: skip


def real_model(n_layers: int = 3, **facts: Any) -> dict[str, Any]:
    """A model of synthesised tensors: gated experts of 3 x 16 x 8 parameters; layers without experts need ``dense_ffn``."""
    out = model(n_layers, **facts)
    del out["declared"]
    out["vocab_size"] = 32
    out["experts"] = {"intermediate_size": 8, **out["experts"]}
    return out


def machine(
    vram: int | None = 1_000_000, ram: int = 1_000_000, ssd: bool = True, *, npu: bool = False, fast: bool = False, launch: str = "1 us",
) -> dict[str, Any]:  # fmt: skip
    """GPU with its own memory, CPU, links, SSD; with ``vram`` None all devices address one unified memory. Round figures."""
    main = "unified" if vram is None else "ram"

    def device(tier: str, **more: Any) -> dict[str, Any]:
        peak = {"fp32": "1 GFLOP/s", "fp16": "1 GFLOP/s", "int8": "1 GFLOP/s"}
        return {"tier": tier, "peak": peak, "compute_efficiency": 1.0, "memory_efficiency": 1.0, "launch": launch, **more}

    tiers = {main: {"capacity": f"{ram} B", "channel": main}}
    channels = {main: {"bandwidth": "1 GB/s"}}
    devices = {"gpu": device(main), "cpu": device(main, cores=1)}
    links = {}
    if npu:
        devices["npu"] = device(main)
    if vram is not None:
        tiers = {"vram": {"capacity": f"{vram} B", "channel": "vram"}} | tiers
        channels |= {"vram": {"bandwidth": "10 GB/s"}, "up": {"bandwidth": "100 MB/s"}, "down": {"bandwidth": "100 MB/s"}}
        devices["gpu"] = device("vram")
        for name, source, target, channel in (("h2d", main, "vram", "up"), ("d2h", "vram", main, "down")):
            link = {
                "source": source,
                "target": target,
                "channel": channel,
                "latency": "1 us",
                "pinned_efficiency": 1.0,
                "pageable_efficiency": 0.5,
            }
            links[name] = link
    out: dict[str, Any] = {
        "name": "bench",
        "description": "a machine of round figures",
        "tiers": tiers,
        "channels": channels,
        "devices": devices,
    }
    if links:
        out["links"] = links
    if ssd:
        tiers["ssd"] = {"capacity": "1 GB", "channel": "ssd"}
        channels["ssd"] = {"bandwidth": "20 MB/s"}
        curve = [{"request": "1 kB", "depth": 1, "bandwidth": "5 MB/s"}, {"request": "10 kB", "depth": 1, "bandwidth": "10 MB/s"}]
        out["storage"] = {"ssd": {"tier": "ssd", "latency": "10 us", "curve": curve}}
        if fast:
            out["storage"]["ssd"]["fast_region"] = {"share": 0.25, "rest_factor": 0.5}
    return out


def trace(ids: Any, seq: Sequence[int] | None = None, prompt: int = 0, n_experts: int = 4) -> RoutingTrace:
    """A trace of ids (T, L, K); ``prompt`` rows of each sequence are prefill."""
    array = np.array(ids, np.int16)
    if array.ndim == 2:
        array = array[:, :, None]
    seq_id = np.array(seq if seq is not None else [0] * len(array), np.int32)
    position = np.array([int((seq_id[:t] == seq_id[t]).sum()) for t in range(len(array))], np.int32)
    phase = (position >= prompt).astype(np.uint8)
    return RoutingTrace(array, None, seq_id, position, phase, {"n_experts": n_experts})


def case(
    routing: RoutingTrace, *, on: dict[str, Any] | None = None, of: dict[str, Any] | None = None, base: Path | None = None, **settings: Any
) -> Case:  # fmt: skip
    """A case from plain data. By default the trace decodes whole sequences, one prediction and placement learn from its rows."""
    base = base or folder()
    files = {"model.yaml": of or model(), "machine.yaml": on or machine()}
    for name, data in files.items():
        (base / name).write_text(yaml.safe_dump(data, sort_keys=False))
    save_trace(routing, base / "trace.npz")
    use = {"source": "trace.npz", "train_fraction": 0.0} | settings.pop("trace", {})
    workload = {"output_tokens": int((routing.phase[routing.seq_id == routing.seq_id[0]] == 1).sum())} | settings.pop("workload", {})
    placement = settings.pop("placement", {})
    pools = settings.pop("pools", None)
    if pools is not None:
        placement = {**placement, "pools": pools}
    data = {
        "name": "test", "model": "model.yaml", "hardware": "machine.yaml", "precision": settings.pop("precision", {"default": "raw-int8", "kv": "raw-int8"}), "trace": use,
        "workload": workload, "placement": placement, "memory": {"workspace": "0 B"} | settings.pop("memory", {}), **settings,
    }  # fmt: skip
    return make_case(Scenario.model_validate(data), base=base)


def plan(it: Case, steps_per_fragment: int = 10_000) -> tuple[Planner, list[Fragment]]:
    planner = it.planner()
    return planner, list(planner.fragments(steps_per_fragment))


def text(it: Case) -> str:
    """The whole schedule, a task a line: ``id kind layer[.expert] lane [slot] [*prefetch] <- dependencies`` (s slot, b buffer, q queue)."""
    planner, fragments = plan(it)
    out = []
    for f in fragments:
        for row in range(f.n_tasks):
            kind = Kind(f.kind[row]).name.lower()
            where = f"{f.layer[row]}.{f.expert[row]}" if f.expert[row] >= 0 else f"{f.layer[row]}"
            star = " *" if f.prefetch[row] else ""
            slot = f" @{f.slot[row]}" if f.slot[row] >= 0 else ""
            deps = " ".join(f"{t}{_TYPE[why]}" for t, why in f.deps(row))
            out.append(f"{f.first_task + row} {kind} {where} {planner.lanes[f.lane[row]].name}{slot}{star} <- {deps}".rstrip())
    return "\n".join(out)


def same(it: Case, expected: str) -> None:
    """Assert the exact schedule; lines of ``expected`` are stripped, text after # is a remark."""
    want = [line.split("#")[0].strip() for line in expected.strip().splitlines()]
    assert text(it).splitlines() == [line for line in want if line]


def outcomes(it: Case) -> list[tuple[int, int, int, str]]:
    """Accesses as (step, layer, expert, outcome)."""
    names = ("cache", "prefetch", "miss")
    return [(int(a[0]), int(a[1]), int(a[2]), names[a[3]]) for f in plan(it)[1] for a in f.access]


class Drawn:
    """A case that prints as its scenario."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __repr__(self) -> str:
        return f"{self.case.scenario.model_dump(exclude_defaults=True)} {self.case.model} {sorted(self.case.hardware.tiers)}"
