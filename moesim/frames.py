"""Owns results as pandas frames: unit-suffixed columns, one frame per table of ``run -o json``, one of steps."""

from __future__ import annotations

from typing import Any

import pandas as pd

from moesim.metrics import PS
from moesim.simulate import Result

COLUMNS = {
    "memory": ["tier", "name", "pool", "bytes", "basis", "note"],
    "transfers": ["channel", "bytes", "demand_bytes", "prefetch_useful_bytes", "prefetch_wasted_bytes", "busy_s"],
    "lanes": ["lane", "busy_s", "utilisation"],
    "critical_path": ["lane", "kind", "share", "contention"],
    "steps": ["step", "phase", "tokens", "sequences", "start_s", "end_s", "latency_ms"],
}


def frames(result: Result) -> dict[str, pd.DataFrame]:
    """Return ``memory``, ``transfers``, ``lanes``, ``critical_path`` and ``steps``; empty frames where nothing ran."""
    data = result.as_dict()
    rows: dict[str, list[dict[str, Any]]] = {
        "memory": [line for tier in data["memory"].values() for line in tier["lines"]],
        "transfers": [{"channel": name, **row} for name, row in (data["transfers"] or {}).items()],
        "lanes": [{"lane": name, **row} for name, row in (data["lanes"] or {}).items()],
        "critical_path": data["critical_path"] or [],
        "steps": _steps(result),
    }
    return {name: pd.DataFrame(rows[name], columns=columns) for name, columns in COLUMNS.items()}


def _steps(result: Result) -> list[dict[str, Any]]:
    if result.meter is None:
        return []
    out, before = [], 0.0
    ends = (result.meter.step_end_ps * PS).tolist()
    for (step, _, _, phase, tokens, emits), end in zip(result.meter.steps.tolist(), ends, strict=True):
        names = "prefill" if phase == 0 else "decode"
        row = {"step": step, "phase": names, "tokens": tokens, "sequences": emits, "start_s": before, "end_s": end}
        out.append({**row, "latency_ms": (end - before) * 1e3})
        before = end
    return out
