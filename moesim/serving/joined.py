"""Owns the joining of fragments that follow each other, with their costs and timelines, so that what takes them pays once for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moesim.cost import Costs
from moesim.schedule import Fragment
from moesim.timeline import Timeline

_COLUMNS = (
    "kind", "step", "layer", "expert", "lane", "use_step", "use_layer", "prefetch", "slot", "dep_task", "dep_type", "memory", "access", "steps",
    "members",
)  # fmt: skip


def joined(parts: Sequence[tuple[Fragment, Costs, Timeline]]) -> tuple[Fragment, Costs, Timeline]:
    """Return fragments as one. Works stand one fragment after another, also where they are equal."""
    if len(parts) == 1:
        return parts[0]
    fragments, costs, times = zip(*parts, strict=True)

    def column(of: Sequence[Any], name: str) -> Any:
        return np.concatenate([getattr(one, name) for one in of])

    work, price, starts, rows, prices, deps = [], [], [np.zeros(1, np.int64)], 0, 0, 0
    for one, cost in zip(fragments, costs, strict=True):
        work.append(one.work + np.int32(rows))
        price.append(cost.price + np.int32(prices))
        starts.append(one.dep_start[1:] + deps)
        rows += len(one.works)
        prices += len(cost.cap)
        deps += int(one.dep_start[-1])
    fragment = Fragment(
        first_task=fragments[0].first_task, works=tuple(work for one in fragments for work in one.works), work=np.concatenate(work),
        dep_start=np.concatenate(starts), **{name: column(fragments, name) for name in _COLUMNS},
    )  # fmt: skip
    whole = (column(costs, name) for name in ("latency_ps", "volume", "cap", "shares"))
    return fragment, Costs(costs[0].channels, costs[0].capacity, np.concatenate(price), *whole), Timeline.concat(times)
