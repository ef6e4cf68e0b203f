"""Owns the probe runs of a calibration: small real runs with random routing, from which the times of tasks are read.

A probe is a scenario like any other, planned, executed by the real engine and sampled; no run that is to be predicted later takes part
in it. All probes run in turn, several times over, so that a drift of the machine touches all of them alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim import config
from moesim.calibrate.samples import Samples, take_samples
from moesim.config import Document
from moesim.engines.real import run
from moesim.scenario import Scenario
from moesim.simulate import Case, make_case, simulate
from moesim.validate.case import Stores, prepare

SEED = 20_000  # far from the seeds that scenarios use


@dataclass(frozen=True)
class Probe:
    """A probe: its name, and what differs from the base scenario, by dotted path."""

    name: str
    changes: dict[str, Any]


RESIDENT: dict[str, Any] = {"placement.pools.ram": {"hold": "all"}}
READING: dict[str, Any] = {
    "placement.pools.ram": {"hold": "25 %", "policy": "lru", "warm": True},
    "prefetch": {"predictor": "oracle", "distance": 1},
}
WAITING: dict[str, Any] = {"placement.pools.ram": {"hold": "50 %", "policy": "lru", "warm": True}}
COPYING: dict[str, Any] = {
    "placement": {
        "attention": "gpu",
        "experts": "gpu",
        "pools": {"vram": {"hold": "50 %", "policy": "lru", "warm": True}, "ram": {"hold": "all"}},
    },
    "prefetch": {"predictor": "oracle", "distance": 1},
}


def probes(formats: Sequence[str], context_tokens: int, small: bool) -> list[Probe]:
    """Return the probes of one model shape: decode at two contexts, batches and prompts for each format, then reads and copies beside compute."""
    out = []
    near, far = context_tokens // 8, context_tokens - 64
    tokens = 48 if small else 24
    for form in formats:
        base = RESIDENT | {"precision.routed_experts": form}
        out.append(Probe(f"{form} decode", base | {"workload": {"output_tokens": 2 * tokens, "cached_tokens": near}}))
        for batch in (2, 4, 8):
            out.append(
                Probe(f"{form} batch {batch}", base | {"workload": {"output_tokens": tokens // 2, "cached_tokens": near, "batch": batch}})
            )
        for chunk in (16, 32, 64):
            work = {"prompt_tokens": 2 * chunk, "prefill_chunk": chunk, "output_tokens": 1}
            out.append(Probe(f"{form} prompt {chunk}", base | {"workload": work}))
    first = {"precision.routed_experts": formats[0]}
    for batch in (1, 4):
        work = {"output_tokens": tokens // 2, "cached_tokens": far, "batch": batch}
        out.append(Probe(f"context batch {batch}", RESIDENT | first | {"workload": work}))
    work = {"output_tokens": tokens, "cached_tokens": near}
    out += [
        Probe(name, what | first | {"workload": work}) for name, what in (("reading", READING), ("waiting", WAITING), ("copying", COPYING))
    ]
    return out


class ProbeRunner:
    """Runs the probes of one model shape.

    Parameters
    ----------
    model : str or Path
        Model spec, as in a scenario.
    hardware : Path
        A profile of this machine; only its sizes matter.
    stores : Stores
    """

    def __init__(self, model: str, context_tokens: int, hardware: Path, stores: Stores, base: Path) -> None:
        self._stores, self._base = stores, base
        self._scenario: dict[str, Any] = {
            "name": "calibration",
            "model": model,
            "precision": {"default": "int8", "router": "bf16", "norms": "bf16", "embeddings": "bf16", "kv": "bf16"},
            "hardware": str(hardware),
            "trace": {"generate": "uniform", "sequences": "repeat"},
            "memory": {"context_tokens": context_tokens},
            "placement": {"attention": "cpu", "experts": "cpu", "pools": {}},
            "io": {"engine": "direct", "request": "1 MiB", "depth": 4, "align": "4 KiB"},
            "engine": "des",
            "seed": SEED,
        }

    def case(self, probe: Probe) -> Case:
        """Return the case of a probe."""
        data = copy.deepcopy(self._scenario)
        for path, value in probe.changes.items():
            *parents, last = path.split(".")
            at = data
            for name in parents:
                at = at.setdefault(name, {})
            at[last] = value
        document = Document(data, f"calibration probe {probe.name}")
        return make_case(config.build(Scenario, document), document, self._base)

    def sample(self, probe: Probe, repeats: int, progress: Callable[[], None]) -> list[Samples]:
        """Run a probe, once to warm up and then ``repeats`` times; return the samples of each run."""
        case = self.case(probe)
        result = simulate(case, keep=True)
        out = []
        with prepare(case, result, self._stores.get(case)) as real:
            for i in range(repeats + 1):
                timeline = run(real.program).timeline
                if i:
                    out.append(take_samples(result.schedule, timeline))
                progress()
        return out
