"""What tests of serving share: small scenarios of requests on the small models and machines of ``planner_cases``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from planner_cases import folder, machine, model, trace

from moesim.serving import load_serving
from moesim.serving.loop import ServingRun
from moesim.serving.requests import Requests
from moesim.serving.summary import ServingResult
from moesim.simulate import Case
from moesim.trace import save_trace


def write(serving: dict[str, Any], base: Path | None = None, **settings: Any) -> Path:
    """Write a scenario file of two layers of four experts, top-2 by default, half of them in VRAM; return its path."""
    base = base or folder()
    of = settings.pop("of", model(2, 4, 2))
    on = settings.pop("on", machine())
    for name, data in (("model.yaml", of), ("machine.yaml", on)):
        (base / name).write_text(yaml.safe_dump(data, sort_keys=False))
    rng = np.random.default_rng(3)
    ids = np.array([[rng.choice(4, 2, replace=False) for _ in range(2)] for _ in range(60)], np.int16)
    save_trace(trace(ids, seq=[t // 20 for t in range(60)], prompt=10), base / "trace.npz")
    data = {
        "name": "served", "model": "model.yaml", "hardware": "machine.yaml", "precision": {"default": "raw-int8", "kv": "raw-int8"},
        "trace": {"source": "trace.npz", "train_fraction": 0.0, "sequences": "repeat"} | settings.pop("trace", {}), "serving": serving,
        "memory": {"workspace": "0 B", "kv": "paged", "kv_block_tokens": 4} | settings.pop("memory", {}),
        "placement": {"pools": {"vram": {"hold": 2, "policy": "lru"}, "ram": {"hold": "all"}}} | settings.pop("placement", {}),
        "granularity": "layer", "engine": "des", **settings,
    }  # fmt: skip
    path = base / "scenario.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


SMALL: dict[str, Any] = {
    "requests": 9, "arrivals": {"process": "gamma", "requests_per_s": 3000.0, "burstiness": 0.4}, "most_sequences": 3, "step_tokens": 6,
    "prompt": {"distribution": "uniform", "low": 2, "high": 14}, "output": {"distribution": "uniform", "low": 1, "high": 7},
}  # fmt: skip


def load(serving: dict[str, Any] | None = None, *assignments: str, **settings: Any) -> tuple[Case, Requests]:
    return load_serving(write(SMALL | (serving or {}), **settings), assignments)


def on_engine(case: Case, engine: str) -> Case:
    out = replace(case, scenario=case.scenario.model_copy(update={"engine": engine}))
    out.__dict__["routing"] = case.routing
    return out


def result(case: Case, requests: Requests) -> ServingResult:
    """Run to the end, invariants checked after every step."""
    run = ServingRun(case, requests, debug=True)
    assert run.run()
    return ServingResult(run)
