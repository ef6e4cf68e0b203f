"""Owns the way from one row of a folder of field runs to a case that can be priced: model, precision, layout, runtime, works of one step.

A row that lacks a fact which its prediction rests on is refused with the reason; what the runtime or the platform settles is
filled in and listed in ``assumed``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moesim import resources
from moesim.architecture import FullAttention, LinearAttention, MlaAttention
from moesim.backtest.attained import as_executed, as_found, attain
from moesim.backtest.buffers import host_compute_buffer
from moesim.backtest.data import FieldRuns, Lacking, Row, as_reason, quoted
from moesim.backtest.machine import Machine, machine_of, profile_of
from moesim.backtest.model import model_of
from moesim.backtest.paging import reread_share
from moesim.backtest.precision import plan_of
from moesim.config import Document, build
from moesim.cost import CostModel
from moesim.errors import InputError
from moesim.hardware import HardwareProfile
from moesim.layout import Layout
from moesim.model import ModelSpec, visible_pairs
from moesim.model_files import load_model_with_plan
from moesim.planner.works import Works
from moesim.precision import PrecisionPlan
from moesim.runtimes import Rates, RunFacts, Runtime, runtime_of
from moesim.scenario import Scenario
from moesim.schedule import Work
from moesim.steady import Part, StepShape, expert_rows, merged, price, projections, scores

KV_FORMATS = {"f16": "fp16", "fp16": "fp16", "bf16": "bf16", "f32": "fp32", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0",
              "q5_1": "Q5_1", "iq4_nl": "IQ4_NL", "q6_0": "Q6_K"}  # fmt: skip
MANY_EXPERTS = 128
IN_FLIGHT = 2  # windows of read-around whose pages take room before anything uses them
SHORT_ANSWER = 128  # tokens of an answer whose length nobody stated
PLACEMENTS = ("cpu_only", "full_gpu", "gpu_cpu_experts", "gpu_cpu_layers", "ssd")
NORM_KERNELS = 6  # of models with normed queries and keys: two norms and their scales, the sum and the division of router weights


@dataclass(frozen=True)
class FieldCase:
    """A row with everything that its prediction needs. ``parts`` are the works of one step, whatever the rates."""

    row: Row
    machine: Machine
    model: ModelSpec
    runtime: Runtime
    run: RunFacts
    layout: Layout
    step: StepShape
    mode: str
    cpu_layers: float
    cores: float
    parts: tuple[Part, ...]
    assumed: tuple[str, ...]

    @property
    def placement(self) -> str:
        return self.row.text("offload_kind")

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Return the predicted seconds of the step by part."""
        it = attain(
            self.machine, self.runtime, self.run, rates, prefill=self.mode == "prefill", cores=self.cores, step_bytes=self._key_bytes
        )
        return price(as_executed(self.parts, it), CostModel(as_found(self.layout.hardware, it)))

    @property
    def _key_bytes(self) -> float:
        """Bytes of one token's keys in a layer's cache."""
        a = self.model.attention
        if not isinstance(a, FullAttention):
            return 0.0
        return self.layout.plan.format("kv", 0, "k").bytes_for(1, a.n_kv_heads * a.head_dim)

    def device(self, part: str) -> str:
        """Return what a part of the step's time depends on: the cpu, the gpu or the drive."""
        if part == "experts from storage":
            return "ssd"
        return "cpu" if part in ("CPU experts", "hand-over") else self.layout.attention_device[0]

    def tokens_per_s(self, seconds: float) -> float:
        """Return what the row's metric counts."""
        return self.step.tokens / seconds


@dataclass
class FieldCases:
    """Builds cases; models, machines and layouts of a folder are made once."""

    data: FieldRuns
    _models: dict[str, ModelSpec] = field(default_factory=dict)
    _machines: dict[str, tuple[Machine, HardwareProfile]] = field(default_factory=dict)
    _plans: dict[tuple[str, int, str, float, str], PrecisionPlan] = field(default_factory=dict)

    def machine(self, name: str) -> tuple[Machine, HardwareProfile]:
        """Return a machine and its profile of peaks."""
        if name not in self._machines:
            facts = self.data.machines.get(name)
            if facts is None:
                raise Lacking("machine has no record")
            machine = machine_of(facts)
            self._machines[name] = machine, profile_of(machine)
        return self._machines[name]

    def model(self, name: str, top_k: int | None) -> ModelSpec:
        """Return a model, with the number of experts that a run used."""
        if name not in self._models:
            facts = self.data.models.get(name)
            if facts is None and name.lower() not in resources.names("models"):
                raise Lacking("model has no record")
            self._models[name] = model_of(facts) if facts else load_model_with_plan(name.lower(), Path(), "")[0]
        model = self._models[name]
        if top_k and top_k > model.n_experts:
            raise InputError("top_k_override", expected=f"at most the model's {model.n_experts} experts", got=str(top_k))
        if top_k and top_k != model.top_k:
            return model.model_copy(update={"experts": model.experts.model_copy(update={"top_k": top_k})})
        return model

    def _chances(self, row: Row) -> list[float]:
        """Chances of a model's experts to be used by a token, as its record states them; empty where it does not."""
        facts = self.data.models.get(row.text("model"))
        if facts is None:
            return []
        return [facts.number("expert_chances", i) or 0.0 for i in range(len(facts.items("expert_chances")))]

    def plan(self, model: ModelSpec, row: Row, runtime: Runtime) -> PrecisionPlan:
        """Return the precision of a row's file and cache."""
        bits = row.number("bits_per_weight")
        if bits is None:
            raise Lacking("bits per weight not stated")
        key = model.name, model.top_k, row.text("quant"), bits, _kv_format(row, runtime)
        if key not in self._plans:
            self._plans[key] = plan_of(model, *key[2:])
        return self._plans[key]

    @as_reason()
    def case(self, row: Row, rates: Rates) -> FieldCase:
        """Return the case of a row.

        Parameters
        ----------
        row : Row
        rates : Rates
            For what decides which works there are: the concentration of routing, and the page cache.

        Raises
        ------
        Lacking
            With the reason why the row cannot be predicted.
        """
        row.check()
        mode, placement, assumed = row.mode, row.text("offload_kind"), []
        if placement not in PLACEMENTS:
            raise Lacking(f"placement {quoted(placement)[1:-1]} is not modelled" if placement else "placement not stated")
        machine, profile = self.machine(row.text("machine"))
        model = self.model(row.text("model"), row.whole("top_k_override"))
        try:
            runtime = runtime_of(row.text("engine_family"))
        except InputError:
            runtime = runtime_of("llama.cpp")
            assumed.append(f"{row.text('engine_family')} executes as llama.cpp does")
        split = split_of(row, placement, model, bool(machine.gpu_bytes_per_s))
        cores = _needed(row, machine, placement, split)
        plan = self.plan(model, row, runtime)
        run = run_facts(row, machine, model, runtime)
        walks = split.on_cpu and runtime.choose("cpu_attention", run) == "serial"  # token by token, and no further than there are any
        step = _step(row, runtime, mode, 1 if walks else runtime.kv_round_tokens)
        layout = Layout(_scenario(row, step, split, runtime, run), model, plan, profile)
        skew = 1.0  # a prompt's batch is large enough to meet every expert
        if step.new_tokens == 1:
            skew = rates["routing_concentration" if model.n_experts >= MANY_EXPERTS else "routing_concentration_few"]
        rows = expert_rows(model.n_experts, model.top_k, step.tokens, skew)
        misses = _misses(row, layout, machine, runtime, run, split, rates, self._chances(row)) if placement == "ssd" else 0.0
        parts = merged(_parts(layout, runtime, run, step, rows, split, misses))
        return FieldCase(
            row, machine, model, runtime, run, layout, step, mode, split.cpu_layers, cores, parts, (*machine.assumed, *assumed)
        )


@dataclass(frozen=True, slots=True)
class Split:
    """What runs where: MoE layers whose experts the CPU computes, and whole layers that it runs with their attention."""

    cpu_layers: float
    whole_layers: int
    on_cpu: bool  # everything


def split_of(row: Row, placement: str, model: ModelSpec, has_gpu: bool) -> Split:
    """Return what a row says about the split between CPU and GPU.

    Raises
    ------
    Lacking
        If it does not say.
    """
    moe = len(model.moe_layers)
    stated = row.number("moe_layers_on_cpu")
    offloaded = row.flag("ngl") or row.flag("gpu_layers")
    whole = max(model.n_layers - int(offloaded), 0) if offloaded.isdigit() and placement in ("gpu_cpu_layers", "ssd") else 0
    if placement == "cpu_only" or not has_gpu and placement == "ssd":
        return Split(float(moe), model.n_layers, True)
    if placement == "full_gpu":
        return Split(0.0, 0, False)
    if whole:
        return Split(float(sum(layer < whole for layer in model.moe_layers)), whole, False)
    if stated is None:
        if placement == "ssd":  # streaming engines compute on the GPU what they read
            return Split(0.0, 0, False)
        raise Lacking("layers on the CPU not stated")
    return Split(min(stated, float(moe)), 0, False)


def _needed(row: Row, machine: Machine, placement: str, split: Split) -> float:
    """Check the machine's facts, and return the CPU cores in use."""
    if not split.on_cpu and not machine.gpu_bytes_per_s:
        raise Lacking("GPU not stated")
    if placement == "ssd" and not machine.ssd_bytes_per_s:
        raise Lacking("read rate of the drive not stated")
    if placement == "ssd" and not machine.ram_bytes:
        raise Lacking("size of main memory not stated")
    if split.cpu_layers == 0:
        return machine.cores or 1
    if not machine.ram_bytes_per_s:
        raise Lacking("bandwidth of main memory not stated")
    return effective_cores(row.whole("threads"), machine.cores)


def effective_cores(threads: int | None, cores: int | None) -> float:
    """Return how many cores' work threads do that each take an equal part: the slowest shares its core with others.

    Raises
    ------
    Lacking
        If neither threads nor cores are stated.
    """
    if not threads and not cores:
        raise Lacking("CPU cores not stated")
    used = threads or cores or 1
    return used / math.ceil(used / (cores or used))


def _misses(
    row: Row, layout: Layout, machine: Machine, runtime: Runtime, run: RunFacts, split: Split, rates: Rates, chances: Sequence[float]
) -> float:
    """Bytes that a token reads from the drive, over those of the experts in main memory that it uses."""
    model, plan = layout.model, layout.plan
    all_experts = model.part_bytes(plan, "routed_experts")
    experts = all_experts * (split.cpu_layers / max(len(model.moe_layers), 1) if split.cpu_layers else 1.0)
    dense = (model.weight_bytes(plan) - all_experts) if split.on_cpu or machine.platform == "soc" else 0
    if machine.page_cache_bytes:
        cache = machine.page_cache_bytes - _own_bytes(row, layout, runtime, run) - IN_FLIGHT * machine.read_around_bytes
    else:
        cache = (machine.ram_bytes or 0) * rates["page_cache_share"]
    used = model.top_k / model.n_experts
    matrix = max(model.expert_matrix_bytes(plan, model.moe_layers[-1]).values())
    read = reread_share(cache / (experts + dense), chances or [used], machine.read_around_bytes / matrix)
    return read * (experts + dense) / (used * experts)


def _own_bytes(row: Row, layout: Layout, runtime: Runtime, run: RunFacts) -> float:
    """Bytes of the K/V cache and the compute buffer."""
    context, model = row.whole("ctx_size") or layout.context_tokens, layout.model
    per_token = sum(model.kv_bytes_per_token(layout.plan, i, layout.scenario.memory.mla_compressed) for i in range(model.n_layers))
    return context * per_token + host_compute_buffer(layout, run, micro_batch(row, runtime), context)


def run_facts(row: Row, machine: Machine, model: ModelSpec, runtime: Runtime) -> RunFacts:
    """Return what the rules of a runtime may ask of a row."""
    weights = model.params_total * (row.number("bits_per_weight") or 16.0) / 8
    full = [a for a in map(model.attention_at, range(model.n_layers)) if isinstance(a, FullAttention)]
    run = RunFacts(
        date=row.text("date") or "9999",
        version=row.text("engine_version"),
        flags=row.flags,
        latent=isinstance(model.attention, MlaAttention),
        kv=_kv_type(row) or "f16",
        head=full[0].head_dim if full else 128,
        room_twice=(machine.ram_bytes or math.inf) > 2 * weights,
        mixed=row.text("offload_kind") in ("gpu_cpu_experts", "gpu_cpu_layers"),
        gpu=machine.gpu_name,
        quant=row.text("quant"),
    )
    stated = row.number("flash_attn")
    return replace(run, flash=runtime.choose("flash", run) == "yes" if stated is None else bool(stated))


def _kv_type(row: Row) -> str:
    return row.text("kv_type").strip().lower()


def _kv_format(row: Row, runtime: Runtime) -> str:
    """The format of a row's K/V cache, the runtime's own where none is stated."""
    name = _kv_type(row)
    if name and name not in KV_FORMATS:
        raise InputError("kv_type", expected=f"{', '.join(KV_FORMATS)}, or nothing", got=quoted(name), where=row.where)
    return KV_FORMATS[name] if name else runtime.kv


def micro_batch(row: Row, runtime: Runtime) -> int:
    """Return the tokens that a run computes at once at most."""
    return row.whole("n_ubatch") or runtime.micro_batch


def _step(row: Row, runtime: Runtime, mode: str, round_tokens: int) -> StepShape:
    """The step that a row measures; a cache is read in pieces of ``round_tokens``."""
    depth, prompt = row.number("depth_n_kv"), row.number("prompt_tokens")
    if mode == "prefill":
        if not prompt:
            raise Lacking("length of the prompt not stated")
        chunk = max(min(micro_batch(row, runtime), int(prompt)), 1)
        return StepShape(1, chunk, int((depth or 0) + (prompt + chunk) / 2))
    if depth is None:
        depth = prompt or 0
    answer = row.number("gen_tokens") or SHORT_ANSWER
    context = int(depth + answer / 2) + 1
    return StepShape(max(row.whole("concurrency") or 1, 1), 1, -(-context // round_tokens) * round_tokens)


def _scenario(row: Row, step: StepShape, split: Split, runtime: Runtime, run: RunFacts) -> Scenario:
    device = "cpu" if split.on_cpu else "gpu"
    layers = []
    if split.whole_layers and not split.on_cpu:
        layers = [{"layers": f"0-{split.whole_layers - 1}", "part": part, "device": "cpu"} for part in ("attention", "routed_experts")]
    data = {
        "name": row.row_id, "model": row.text("model"), "hardware": row.text("machine"), "granularity": "layer", "trace": {"generate": "uniform"},
        "workload": {"prompt_tokens": step.new_tokens if step.new_tokens > 1 else 0, "output_tokens": 1, "batch": step.sequences,
                     "prefill_chunk": step.new_tokens, "cached_tokens": max(step.context - step.new_tokens, 0)},
        "memory": {"mla_compressed": runtime.choose("latent_cache", run) == "compressed"},
        "placement": {"attention": device, "experts": device, "layers": layers},
    }  # fmt: skip
    return build(Scenario, Document(data, row.where))


def _parts(
    layout: Layout, runtime: Runtime, run: RunFacts, step: StepShape, rows: tuple[int, ...], split: Split, misses: float
) -> Iterator[Part]:
    """Yield the works of one step."""
    works, model = Works(layout), layout.model
    share = split.cpu_layers / max(len(model.moe_layers), 1)
    link = "h2d" in layout.hardware.links and step.tokens >= runtime.copy_from_tokens
    copies = link and runtime.choose("prefill_experts", run) == "gpu"
    apart = runtime.choose("norms", run) == "apart"
    absorbed = step.new_tokens > 1 and runtime.choose("latent_prompt", run) == "absorbed"
    left_to_cpu = runtime.choose("gpu_attention", run) == "none"
    for layer in range(model.n_layers):
        if model.attention_at(layer).kind != "none":
            yield _projections(works, layer, step, apart)
            yield _attention(works, layer, step, absorbed, left_to_cpu)
        if model.dense_size(layer):
            yield Part("dense FFN", works.dense_ffn(layer, step.tokens), 1.0)
        if model.is_moe(layer):
            on_cpu = share if not split.whole_layers else float(layer < split.whole_layers)
            streamed = on_cpu if split.cpu_layers else 1.0
            yield from _experts(works, layer, step, rows, on_cpu, streamed, copies, misses if streamed else 0.0)
    yield Part("head", works.head(step.sequences), 1.0)


def _experts(
    works: Works, layer: int, step: StepShape, rows: tuple[int, ...], cpu_share: float, streamed: float, copies: bool, misses: float
) -> Iterator[Part]:
    """Yield a layer's routed and shared experts; ``cpu_share`` of the former are computed by the CPU, ``streamed`` pass through main memory."""
    attention = works.layout.attention_device[layer]
    mixed = attention == "gpu" and cpu_share > 0
    copied = mixed and copies
    yield Part("router", works.router(layer, step.tokens), 1.0)
    shared = works.shared_expert(layer, step.tokens)
    if shared is not None:
        yield Part("shared expert", shared, 1.0)
    yield Part("combine", works.combine(layer, step.tokens), 1.0)
    on_gpu = 0.0 if attention == "cpu" else 1.0 if copied else 1.0 - cpu_share
    if on_gpu:
        yield Part("GPU experts", works.experts("gpu", layer, rows), on_gpu, len(rows))
    size = works.experts(attention, layer, rows).weight_bytes
    if copied:
        yield Part("copy of experts", Work("h2d", transfer_bytes=size, operations=3, mode="pinned"), cpu_share)
    elif cpu_share:
        yield Part("CPU experts", works.experts("cpu", layer, rows), cpu_share, len(rows))
        if mixed:
            yield Part("hand-over", Work("cpu"), cpu_share)
    if misses:
        yield Part("experts from storage", Work("ssd", transfer_bytes=round(size * misses), operations=1, mode="mmap"), streamed)


def _projections(works: Works, layer: int, step: StepShape, apart: bool) -> Part:
    """The part of attention that reads weights; norms of queries, keys and router weights in kernels of their own, where they are apart."""
    a, work = works.model.attention_at(layer), projections(works, layer, step.tokens)
    normed = apart and work.resource == "gpu" and isinstance(a, FullAttention) and a.qk_norm != "none"
    return Part("projections", replace(work, kernels=work.kernels + NORM_KERNELS) if normed else work, 1.0)


def _attention(works: Works, layer: int, step: StepShape, absorbed: bool, left_to_cpu: bool) -> Part:
    a, work = works.model.attention_at(layer), scores(works, layer, step)
    if left_to_cpu and not isinstance(a, LinearAttention):
        work = replace(work, resource="cpu")
    if isinstance(a, LinearAttention):
        return Part("linear attention", work, 1.0)
    heads, window, width = 1, None, 0
    if isinstance(a, FullAttention):
        heads, window, width = a.n_heads, a.window, a.n_kv_heads * (a.head_dim + a.v_dim)
    if isinstance(a, MlaAttention):
        heads, width = a.n_heads, a.kv_lora_rank + a.qk_rope_head_dim
    if isinstance(a, MlaAttention) and absorbed:
        expanded = a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim
        work = replace(work, flops=work.flops * (2 * a.kv_lora_rank + a.qk_rope_head_dim) / expanded)
    half = 2 * width * works.model.kv_tokens(layer, step.context) * step.sequences
    return Part("attention", work, 1.0, heads * step.sequences, visible_pairs(step.new_tokens, step.context, window), half)


def describe(parts: Mapping[str, float]) -> str:
    """Return a breakdown in words: parts by falling share of the time."""
    total = sum(parts.values())
    shown = sorted(parts.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in shown) if total else ""


def as_plain(case: FieldCase) -> dict[str, Any]:
    """Return what a case is, for a report."""
    return {"row_id": case.row.row_id, "run_id": case.row.text("run_id"), "machine": case.machine.name, "host": case.machine.host,
            "engine": case.row.text("engine_family"), "model": case.row.text("model"), "quant": case.row.text("quant"), "placement": case.placement,
            "mode": case.mode, "depth": case.row.number("depth_n_kv"), "cpu_layers": case.cpu_layers, "assumed": list(case.assumed)}  # fmt: skip
