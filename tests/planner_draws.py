"""Random models, machines, pools and routing of the kind that the compiled planners cover, for Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from planner_cases import machine, model, real_model

one_of = st.sampled_from


@dataclass(frozen=True)
class Shape:
    """What a case is made of: parts of a scenario, and the routing (rows, MoE layers, K) of its trace."""

    n_experts: int
    n_moe: int
    ids: NDArray[np.int16]
    parts: dict[str, Any]  # of, on, precision, placement, pools: as ``planner_cases.case`` takes them


def draw_shape(draw: st.DrawFn, n_rows: int) -> Shape:
    """Draw a shape; some combinations of its parts are refused by the layout."""
    n_layers, n_experts = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    top_k = draw(st.integers(1, min(3, n_experts)))
    moe = sorted(draw(st.sets(st.integers(0, n_layers - 1), min_size=1)))
    layers = ",".join(map(str, moe)) if draw(st.booleans()) else "all"
    experts = {"n_experts": n_experts, "top_k": top_k, "layers": layers, "n_shared": draw(one_of([0, 0, 1]))}
    window = {"kind": "sliding", "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "window": 4}
    sliding = [{"layers": "0", "attention": window}] if draw(st.booleans()) else []
    declared = draw(one_of([True, False, False]))
    of = model(n_layers, n_experts, top_k, attention_overrides=sliding) if declared else real_model(
        n_layers, experts=experts, dense_ffn={"intermediate_size": 8}, attention_overrides=sliding
    )  # fmt: skip
    n_moe = n_layers if declared or layers == "all" else len(moe)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    liked = rng.random((n_moe, n_experts)) + draw(one_of([0.0, 0.5]))
    ids = np.array([[rng.choice(n_experts, top_k, replace=False, p=p / p.sum()) for p in liked] for _ in range(n_rows)], np.int16)
    ids[rng.random(ids.shape[:2]) < draw(one_of([0.0, 0.0, 0.2]))] = -1
    vram = draw(one_of([None, 4_000, 20_000, 100_000]))
    on = machine(vram, draw(one_of([9_000, 100_000])), vram is None or draw(st.booleans()), fast=draw(st.booleans()))
    policy = draw(one_of(["lru", "lfu", "static"]))
    top = {
        "hold": draw(one_of(["fit", "50 %", *range(n_experts + 1)])), "policy": policy, "warm": draw(st.booleans()),
        "transient_slots": draw(one_of([0, 1, 3, 6])) if policy == "static" else 0,
    }  # fmt: skip
    pools = {"unified": top} if vram is None else {"vram": top, "ram": {"hold": "all"}}
    precision: dict[str, Any] = {"default": "raw-int8", "kv": "raw-int8"}
    if policy != "static" and draw(st.booleans()):
        precision["overrides"] = [{"part": "routed_experts", "layers": "0", "format": "raw-int4"}]
    placement: dict[str, Any] = {}
    if draw(one_of([False, False, True])):  # whole layers on the CPU: hidden states are copied over and back where memories differ
        placement["layers"] = [{"layers": "0", "part": part, "device": "cpu"} for part in ("attention", "routed_experts")]
    return Shape(n_experts, n_moe, ids, {"of": of, "on": on, "precision": precision, "placement": placement, "pools": pools})
