"""Owns the set-up of a real run: which store a case reads from, how, at which emulated rates, and the program made of its schedule.

A drive or link whose channel the scenario makes slower than its profile says is emulated: reads and copies are throttled to that rate.
It needs torch, which is optional.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from moesim import config, resources
from moesim.engines.real_program import Program
from moesim.engines.real_weights import RandomWeights, TinyMoeWeights, Weights
from moesim.expert_store import ExpertStore, index_path
from moesim.expert_store.builder import build_store
from moesim.expert_store.readers import Reader, open_reader
from moesim.hardware.compose import find_hardware
from moesim.host.links import CopyLink
from moesim.simulate import Case, Result

Progress = Callable[[str], None]


def _quiet(_text: str) -> None:
    pass


class Stores:
    """Expert stores of cases, built when first asked for.

    Parameters
    ----------
    folder : Path, optional
        Where they are kept and found again; by default in a temporary folder that ``close`` removes.
    progress : callable
        Told what is being built.
    """

    def __init__(self, folder: Path | None = None, progress: Progress = _quiet) -> None:
        self._temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="moesim-stores-")) if folder is None else folder
        self._progress = progress

    def get(self, case: Case) -> ExpertStore:
        """Return the store of a case's experts."""
        io, model = case.scenario.io, case.model
        facts = {
            "model": model.model_dump(mode="json"),
            "formats": [case.plan.format("routed_experts", layer).name for layer in model.moe_layers],
            "layout": [io.layout, io.align, io.scattered_piece if io.layout == "scattered" else 0],
            "seed": case.scenario.seed,
        }
        path = self.folder / f"{model.name}-{config.content_hash(facts)[:16]}.experts"
        if index_path(path).is_file() and path.is_file():
            return ExpertStore.open(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        size = sum(case.layout.expert_bytes) * model.n_experts
        self._progress(f"building {path.name}, {size / 1e6:,.0f} MB")
        weights = weights_of(case)
        source = None if isinstance(weights, RandomWeights) else weights.expert
        return build_store(
            path,
            model,
            case.plan,
            align=io.align,
            layout=io.layout,
            scattered_piece=io.scattered_piece,
            weights=source,
            seed=case.scenario.seed,
        )

    def close(self) -> None:
        """Remove what was built, unless a folder was named."""
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def weights_of(case: Case) -> Weights:
    """Return the weights that a case runs with: the bundled model's own, or random ones."""
    if case.model.name == "tinymoe":
        return TinyMoeWeights(resources.find("traces", "tinymoe", base=case.base).parent)
    return RandomWeights()


def throttles(case: Case) -> dict[str, float]:
    """Return the rates of drives and links that are to be emulated, by lane, in bytes/s."""
    own = find_hardware(case.scenario.hardware, case.base)
    out = {}
    channels = {name: link.channel for name, link in case.hardware.links.items()}
    channels |= {name: case.hardware.tiers[drive.tier].channel for name, drive in case.hardware.storage.items()}
    for name, channel in channels.items():
        rate = case.hardware.channels[channel].bandwidth.value
        if channel not in own.channels or rate < own.channels[channel].bandwidth.value:
            out[name] = rate
    return out


@dataclass
class RealCase:
    """A case ready to run for real; close it to give its memory and files back."""

    case: Case
    program: Program
    reader: Reader

    def close(self) -> None:
        self.reader.close()
        for arena in self.program.arenas.values():
            arena.close()

    def __enter__(self) -> RealCase:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def prepare(case: Case, result: Result, store: ExpertStore, arenas: Any = None) -> RealCase:
    """Make a program of a simulated run's schedule.

    Parameters
    ----------
    case : Case
    result : Result
        The simulation of the case, with its tasks kept.
    store : ExpertStore
        Its experts.
    arenas : mapping, optional
        Memory by tier; by default as much as is needed.
    """
    io, rates = case.scenario.io, throttles(case)
    reader = open_reader(
        store, io.engine, request_bytes=io.request, depth=io.depth if io.engine == "direct" else 1, bytes_per_s=rates.get(case.layout.disk)
    )
    try:
        links = {name: CopyLink(rate) for name, rate in rates.items() if name in case.hardware.links}
        return RealCase(case, Program(case, result.schedule, store, reader, weights_of(case), arenas, links), reader)
    except BaseException:
        reader.close()
        raise
