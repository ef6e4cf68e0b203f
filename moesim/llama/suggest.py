"""Owns the search for llama.cpp flags: which placement, K/V format and micro-batch of a scenario's model are fastest on its machine.

For each K/V format and micro-batch it takes the fewest MoE layers whose experts must lie in main memory so that the ledger fits (bisection:
more of them never need more of the GPU's memory); where not even all are enough, the fewest layers that must leave the GPU whole. Each such
candidate is simulated, with an answer of at most ``ANSWER`` tokens, and ranked by

    seconds = prompt / prefill rate + answer / decode rate

Of candidates within ``CLOSE`` of the best the one with the more exact K/V cache wins.
"""

from __future__ import annotations

import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from moesim.architecture import MlaAttention
from moesim.backtest.buffers import compute_buffers
from moesim.errors import DoesNotFit
from moesim.hardware import kind
from moesim.layout import Layout
from moesim.llama.flags import to_flags
from moesim.llama.model import cache_type
from moesim.llama.options import MAINLINE
from moesim.llama.quants import spans
from moesim.precision import PrecisionPlan
from moesim.runtimes import RunFacts, runtime_of
from moesim.scenario import Io, MemoryPlan, Pipeline, Placement, Prefetch
from moesim.simulate import Case, simulate
from moesim.text_table import columns, to_json, wrap
from moesim.units import show

KV_CHOICES = ("fp16", "Q8_0")  # most exact first
CHUNKS = (512, 2048)
ANSWER = 16
CLOSE = 0.02


@dataclass(frozen=True)
class Candidate:
    """One configuration. ``seconds`` is for the scenario's own prompt and answer; rates are None where there was nothing to do."""

    case: Case
    flags: tuple[str, ...]
    kv: str
    layers_on_cpu: int
    prefill_tok_s: float | None
    decode_tok_s: float | None
    seconds: float

    @property
    def line(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(self.flags)

    @property
    def left_bytes(self) -> dict[str, int]:
        """What each memory tier has left."""
        ledger = self.case.layout.ledger
        return {tier: ledger.left_bytes(tier) for tier in ledger.capacities}


def suggest(case: Case, tool: str = "llama-cli", engine: str = MAINLINE) -> list[Candidate]:
    """Return simulated candidates, the best first.

    Raises
    ------
    DoesNotFit
        If none fits the machine's memory.
    """
    chunks = [c for c in CHUNKS if c == CHUNKS[0] or case.scenario.workload.prompt_tokens > CHUNKS[0]]
    found = [
        _simulated(*laid, case.scenario.workload.output_tokens, tool, engine)
        for kv in KV_CHOICES
        for chunk in chunks
        if (laid := _fitting(case, kv, chunk, engine)) is not None
    ]
    if not found:
        raise DoesNotFit(f"{case.model.name} does not fit {case.hardware.name} in any way that llama.cpp can place it")
    least = min(c.seconds for c in found)
    return sorted(
        found, key=lambda c: (c.seconds > least * (1 + CLOSE), KV_CHOICES.index(c.kv) if c.seconds <= least * (1 + CLOSE) else 0, c.seconds)
    )


def _fitting(case: Case, kv: str, chunk: int, engine: str) -> tuple[Case, str] | None:
    """The case with the least on the CPU that fits, or None; on a machine without a GPU all of it is there."""
    moe, n = case.model.moe_layers, case.model.n_layers
    try_ = partial(_laid_out, case, kv, chunk, engine)
    ways: list[Callable[[int], Case]] = [lambda k: try_(k, 0), lambda first: try_(len(moe), first)]
    if "gpu" not in case.hardware.devices:
        ways = [lambda _: try_(len(moe), n + 1)]
    for way, most in zip(ways, (len(moe), n + 1), strict=False):
        k = bisect_left(range(most + 1), True, key=lambda k: way(k).layout.ledger.fits)
        if k <= most:
            return way(k), kv
    return None


def _laid_out(case: Case, kv: str, chunk: int, engine: str, on_cpu: int, first: int) -> Case:
    """The case with experts of the first ``on_cpu`` MoE layers, and all of the layers before ``first``, on the CPU."""
    model, hardware, scenario = case.model, case.hardware, case.scenario
    plan = _with_kv(case.plan, kv)
    cpu = first > model.n_layers
    layers = [i for i in model.moe_layers[:on_cpu] if i >= first] if not cpu else []
    rules = [{"layers": spans(layers), "part": "routed_experts", "device": "cpu"}] if layers else []
    if first and not cpu:
        rules += [{"layers": f"0-{first - 1}", "part": part, "device": "cpu"} for part in ("attention", "routed_experts")]
    main = case.layout.main_tier
    pools: dict[str, Any] = {main: {"hold": "fit", "policy": "lru", "warm": True} if hardware.storage else {"hold": "all"}}
    if not cpu and hardware.devices["gpu"].tier == "vram":
        pools["vram"] = {"hold": "all"}
    runtime = runtime_of(engine)
    context = -(-case.layout.context_tokens // runtime.kv_round_tokens) * runtime.kv_round_tokens
    latent = isinstance(model.attention, MlaAttention)
    run = RunFacts(latent=latent, mixed=bool(on_cpu) and not cpu, kv="f16" if kv == "fp16" else kv.lower())
    workspace = max(compute_buffers(case.layout, runtime, run, chunk, context, copies=run.mixed and engine == MAINLINE))
    device, work = "cpu" if cpu else "gpu", scenario.workload
    changed = scenario.model_copy(update={
        "workload": work.model_copy(update={"prefill_chunk": chunk, "output_tokens": min(work.output_tokens, ANSWER)}),
        "memory": MemoryPlan.model_validate({"context_tokens": context, "workspace": f"{workspace} B", "mla_compressed": runtime.choose("latent_cache", run) == "compressed"}),
        "placement": Placement.model_validate({"attention": device, "experts": device, "embeddings": main, "layers": rules, "pools": pools}),
        "prefetch": Prefetch(), "pipeline": Pipeline(), "granularity": "layer", "io": Io(engine="mmap") if hardware.storage else Io(),
    })  # fmt: skip
    return Case(changed, model, plan, hardware, Layout(changed, model, plan, hardware), case.document, case.base)


def _with_kv(plan: PrecisionPlan, kv: str) -> PrecisionPlan:
    return plan.model_copy(update={"kv": kv, "overrides": tuple(o for o in plan.overrides if o.part != "kv")})


def _simulated(case: Case, kv: str, answer: int, tool: str, engine: str) -> Candidate:
    metrics = simulate(case, keep=False).as_dict()["metrics"] or {}
    prefill, decode = metrics.get("prefill_tok_s"), metrics.get("decode_tok_s")
    work = case.scenario.workload
    rates = ((work.prompt_tokens * work.batch, prefill), (answer * work.batch, decode))
    seconds = sum(tokens / rate for tokens, rate in rates if tokens and rate) or float("inf")
    whole = case.scenario.model_copy(update={"workload": work.model_copy(update={"output_tokens": answer})})
    flags = to_flags(replace(case, scenario=whole), tool, engine)
    on_cpu = sum(case.layout.expert_device[i] == "cpu" for i in case.model.moe_layers)
    return Candidate(case, tuple(flags), kv, on_cpu, prefill, decode, seconds)


# ---- what is said


def as_json(found: list[Candidate]) -> str:
    """Return all candidates as JSON, the best first."""
    return to_json({"best": _plain(found[0]), "candidates": [_plain(c) for c in found]})


def _plain(c: Candidate) -> dict[str, Any]:
    return {"flags": c.line, "kv": cache_type(c.kv), "micro_batch": c.case.scenario.workload.prefill_chunk, "moe_layers_on_cpu": c.layers_on_cpu,
            "prefill_tok_s": c.prefill_tok_s, "decode_tok_s": c.decode_tok_s, "left_bytes": c.left_bytes}  # fmt: skip


def text(found: list[Candidate]) -> str:
    """Return the best flags on the first line, then what is predicted of all candidates."""
    best = found[0]
    lines = [best.line, ""]
    tiers = [t for t in best.left_bytes if kind(t) in ("vram", "ram", "unified")]
    head = ["", "KV", "micro-batch", "MoE layers on CPU", "prefill tok/s", "decode tok/s", *(f"{t} left" for t in tiers)]
    lines += columns([head, *_rows(found, tiers)], range(2, len(head)))
    said = (
        "Predicted by the simulator from the machine's profile: trust the order before the figures. q8_0 halves the cache and is not exact."
    )
    return "\n".join([*lines, "", *wrap(said)]) + "\n"


def _rows(found: list[Candidate], tiers: list[str]) -> Iterator[list[str]]:
    for i, c in enumerate(found):
        rates = ["-" if rate is None else f"{rate:.3g}" for rate in (c.prefill_tok_s, c.decode_tok_s)]
        chunk = str(c.case.scenario.workload.prefill_chunk)
        yield [
            "best" if i == 0 else "",
            cache_type(c.kv),
            chunk,
            str(c.layers_on_cpu),
            *rates,
            *(show(c.left_bytes[t], "bytes") for t in tiers),
        ]
