"""Owns the comparison of predicted with reported memory: weights, K/V cache and compute buffers per device, from the ledger of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moesim.architecture import MlaAttention
from moesim.backtest.buffers import compute_buffers, host_compute_buffer, repacked_bytes
from moesim.backtest.data import FieldRuns, Lacking, Row, as_reason
from moesim.backtest.run import FieldCases, Split, micro_batch, run_facts, split_of
from moesim.config import Document, build
from moesim.layout import Layout
from moesim.runtimes import RunFacts, Runtime, runtime_of
from moesim.scenario import Scenario

MIB = 2**20
GB = 1e9
DRIVER_BYTES = int(0.65 * GB)  # context of the driver and what else draws on the card, in figures of the whole device
MAIN = "ram"
SETTINGS = ("n_ubatch", "kv_type", "flash_attn", "ctx_size")
METRICS = (
    "gpu_weights_mib", "gpu_kv_mib", "gpu_compute_mib", "gpu_buffers_sum_mib", "host_weights_mib", "host_kv_mib", "host_compute_mib", "kv_total_mib",
    "vram_stated_gb",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryPrediction:
    """One reported memory figure and the predicted one, in the figure's own unit; None with a reason where it cannot be predicted."""

    row: Row
    predicted: float | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative error; None where nothing was predicted, or where nothing was measured and nothing predicted."""
        if self.predicted is None or self.row.value == 0:
            return None
        return self.predicted / self.row.value - 1


def predict_memory(data: FieldRuns) -> list[MemoryPrediction]:
    """Predict every row of memory.csv."""
    builder = FieldCases(data)
    out = []
    speeds = {row.text("run_id"): row for row in data.runs if not row.fault}
    for row in (_with_settings(row, speeds.get(row.text("run_id"))) for row in data.memory):
        try:
            out.append(MemoryPrediction(row, _predict(builder, row)))
        except Lacking as lacking:
            out.append(MemoryPrediction(row, None, str(lacking)))
    return out


def _with_settings(row: Row, speed: Row | None) -> Row:
    """Return a memory figure with the settings that only the speeds of the same run state."""
    if speed is None:
        return row
    return replace(row, cells={**row.cells, **{name: speed.text(name) for name in SETTINGS if not row.text(name)}})


@as_reason()
def _predict(builder: FieldCases, row: Row) -> float:
    row.check()
    metric = row.text("metric")
    if metric not in METRICS:
        raise Lacking("a figure of a whole process or device, which holds more than this run")
    machine, profile = builder.machine(row.text("machine"))
    model = builder.model(row.text("model"), None)
    runtime = _runtime(row.text("engine"))
    run = run_facts(row, machine, model, runtime)
    split = split_of(row, row.text("offload_kind"), model, bool(machine.gpu_bytes_per_s))
    if metric == "host_compute_mib" and (not split.on_cpu or machine.gpus):
        raise Lacking("what the CPU computes on beside a GPU")
    if split.on_cpu and metric in ("gpu_compute_mib", "gpu_buffers_sum_mib"):
        raise Lacking("buffers on a GPU that the run computes nothing on")
    context = row.whole("ctx_size")
    if context is None and metric not in ("gpu_weights_mib", "host_weights_mib"):
        raise Lacking("size of the context not stated")
    if MAIN not in profile.tiers:
        raise Lacking("unified memory holds everything in one place")
    plan = builder.plan(model, row, runtime)
    layout = Layout(_scenario(row, split, model.moe_layers, context or 512, runtime, run), model, plan, profile)
    lines: dict[tuple[str, str], int] = {}
    for line in layout.ledger.lines:
        lines[line.tier, line.pool] = lines.get((line.tier, line.pool), 0) + line.bytes
    values = _values(layout, lines, split, run, runtime, row, context or 0, machine.gpus)
    return values[metric]


def _values(layout: Layout, lines: Mapping[tuple[str, str], int], split: Split, run: RunFacts, runtime: Runtime, row: Row, context: int,
            gpus: int) -> dict[str, float]:  # fmt: skip
    """All figures of a run, in MiB (``vram_stated_gb``: GB)."""
    weights = lines.get(("vram", "weights"), 0) + lines.get(("vram", "experts"), 0)
    # of a mapped file every page is counted, also what was copied to the GPU, once the CPU computes on a part of it
    mapped = runtime.choose("pinned", run) == "no" and split.cpu_layers > 0
    host = (
        layout.model.weight_bytes(layout.plan)
        if mapped or split.on_cpu
        else lines.get((MAIN, "weights"), 0) + lines.get((MAIN, "experts"), 0)
    )
    if split.on_cpu and runtime.choose("repack", run) == "yes":
        host += repacked_bytes(layout)
    latent = _transposed(layout, run, runtime, context)
    kv = {tier: lines.get((tier, "kv"), 0) + latent * (tier == ("ram" if split.on_cpu else "vram")) for tier in ("vram", MAIN)}
    compute = 0 if split.on_cpu else sum(_compute(layout, split, run, runtime, row, context, gpus))
    sums = weights + kv["vram"] + compute
    return {
        "gpu_weights_mib": weights / MIB,
        "host_weights_mib": host / MIB,
        "gpu_kv_mib": kv["vram"] / MIB,
        "host_kv_mib": kv[MAIN] / MIB,
        "host_compute_mib": host_compute_buffer(layout, run, micro_batch(row, runtime), context) / MIB,
        "kv_total_mib": (kv["vram"] + kv[MAIN]) / MIB,
        "gpu_compute_mib": compute / MIB,
        "gpu_buffers_sum_mib": sums / MIB,
        "vram_stated_gb": (sums + DRIVER_BYTES) / GB,
    }


def _transposed(layout: Layout, run: RunFacts, runtime: Runtime, context: int) -> int:
    """Bytes of the second copy of latent values that attention without a fused kernel reads."""
    if not run.latent or runtime.choose("gpu_attention", run) != "unfused" or runtime.choose("latent_cache", run) != "compressed":
        return 0
    a = layout.model.attention
    v = layout.plan.format("kv", 0, "v")
    return context * v.bytes_for(1, a.kv_lora_rank) * layout.model.n_layers if isinstance(a, MlaAttention) else 0


def _compute(layout: Layout, split: Split, run: RunFacts, runtime: Runtime, row: Row, context: int, gpus: int) -> Iterator[int]:
    copies = bool(split.cpu_layers) and runtime.name == "llama.cpp"
    tokens = micro_batch(row, runtime)
    yield from compute_buffers(layout, runtime, run, tokens, context, gpus=max(gpus, 1), copies=copies)


def _runtime(engine: str) -> Runtime:
    """The runtime of an engine by its reported name, which may carry a version or a remark."""
    for name in ("ik_llama.cpp", "ktransformers", "vllm", "mlx", "llama.cpp", "llamacpp", "ollama"):
        if engine.lower().startswith(name):
            return runtime_of(name)
    raise Lacking(f"how {engine} allocates is not known")


def _scenario(row: Row, split: Split, moe: tuple[int, ...], context: int, runtime: Runtime, run: RunFacts) -> Scenario:
    device = "cpu" if split.on_cpu else "gpu"
    layers: list[dict[str, Any]] = []
    if not split.on_cpu:
        on_cpu = moe[: round(split.cpu_layers)]
        if split.whole_layers:
            layers += [{"layers": f"0-{split.whole_layers - 1}", "part": "attention", "device": "cpu"}]
        if on_cpu:
            layers += [{"layers": list(on_cpu), "part": "routed_experts", "device": "cpu"}]
        shared = row.whole("shared_expert_layers_on_cpu")
        if shared:
            layers += [{"layers": list(moe[:shared]), "part": "shared_expert", "device": "cpu"}]
    tokens = micro_batch(row, runtime)
    data = {
        "name": row.row_id, "model": row.text("model"), "hardware": row.text("machine"), "trace": {"generate": "uniform"}, "granularity": "layer",
        "workload": {"prompt_tokens": tokens, "output_tokens": 1, "prefill_chunk": tokens},
        "memory": {"context_tokens": context, "mla_compressed": runtime.choose("latent_cache", run) == "compressed"},
        "placement": {"attention": device, "experts": device, "layers": layers, "embeddings": MAIN},
    }  # fmt: skip
    return build(Scenario, Document(data, row.where))
