"""Owns one step in its steady state: every work of a decode step or prefill chunk, layer by layer, one after the other.

For runs whose weights all lie where they are computed, an engine that does not overlap layers takes the sum of its works, whatever the
routing chose (docs/decisions/006-steady-state.md). The works are those that the planner gives to the engines, the prices those of
``CostModel``; only attention is split, into what reads weights and what reads the cache, because the two run at different rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moesim.cost import CostModel
from moesim.planner.works import ATTENTION_KERNELS, Works
from moesim.schedule import Work

PROJECTION_KERNELS = 5  # of the kernels of attention: norm, q, k, v, output projection


class Part(NamedTuple):
    """Some equal works of a step. ``times`` may be a fraction, where a matrix or two of a layer's experts lie elsewhere.

    ``units`` are the experts that are used, or the heads of attention; ``pairs`` the pairs of a token and a cached one; ``half_bytes`` the
    cache's size in 16 bit.
    """

    name: str
    work: Work
    times: float
    units: int = 1
    pairs: int = 0
    half_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes: ``sequences`` with ``new_tokens`` each, the last of which sees ``context`` tokens, itself included."""

    sequences: int
    new_tokens: int
    context: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.new_tokens


def expert_rows(n_experts: int, top_k: int, tokens: int, concentration: float = 1.0) -> tuple[int, ...]:
    """Return the rows of each expert that is used: ``E (1 - (1 - k/E)^T)`` of E that are equally likely, rows spread evenly.

    ``concentration`` is the share of the experts that tokens draw from: skewed routing uses fewer than equal chances would.
    """
    pool = max(n_experts * concentration, top_k)
    used = pool * (1 - (1 - top_k / pool) ** tokens) if tokens > 1 else top_k
    count = min(max(round(used), top_k), n_experts)
    rows = tokens * top_k
    return tuple(rows // count + (i < rows % count) for i in range(count))


def projections(works: Works, layer: int, tokens: int) -> Work:
    """The part of attention that multiplies weights."""
    model, plan = works.model, works.plan
    whole = works.attention(layer, tokens, 1, 1)
    return Work(
        whole.resource, flops=model.linear_flops(layer, "attention", tokens), compute=whole.compute, weight_bytes=whole.weight_bytes,
        state_bytes=whole.state_bytes - _cache_bytes(works, layer, StepShape(tokens, 1, 1)), kernels=PROJECTION_KERNELS, tokens=tokens,
        weights=plan.format("attention", layer).name,
    )  # fmt: skip


def scores(works: Works, layer: int, step: StepShape) -> Work:
    """The part of attention that reads the cache: scores, weighted values, recurrent state; in ``fp32``, as none of it is 8 bits wide."""
    compressed = works.layout.scenario.memory.mla_compressed
    flops = step.sequences * works.model.attention_flops(layer, step.new_tokens, step.context, compressed)
    return Work(
        works.layout.attention_device[layer], flops=flops, compute="fp32", state_bytes=_cache_bytes(works, layer, step),
        kernels=ATTENTION_KERNELS - PROJECTION_KERNELS, tokens=step.tokens,
    )  # fmt: skip


def _cache_bytes(works: Works, layer: int, step: StepShape) -> int:
    model, plan, compressed = works.model, works.plan, works.layout.scenario.memory.mla_compressed
    kept = model.kv_tokens(layer, step.context) + step.new_tokens
    per_token = model.kv_bytes_per_token(plan, layer, compressed)
    return step.sequences * (kept * per_token + 2 * model.state_bytes(plan, layer))


def price(parts: Iterable[Part], costs: CostModel) -> dict[str, float]:
    """Return seconds by the name of the part: latency, and volume at the rate that the work has to itself.

    Parameters
    ----------
    parts : iterable of Part
    costs : CostModel
        Of the machine as the runtime finds it.
    """
    out: dict[str, float] = {}
    for name, work, times, *_ in parts:
        out[name] = out.get(name, 0.0) + times * costs.alone_s(work)
    return out


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts with equal ones counted together."""
    counts: dict[tuple[str, Work, int, int, int], float] = {}
    for name, work, times, units, pairs, half in parts:
        key = name, work, units, pairs, half
        counts[key] = counts.get(key, 0.0) + times
    return tuple(Part(name, work, times, units, pairs, half) for (name, work, units, pairs, half), times in counts.items())
