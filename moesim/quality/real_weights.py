"""Owns the hand-over of a quantised model to the real engine, and what a run there says of its loss.

The real engine multiplies the very bytes that were stored, in bf16 arithmetic, with the experts that the quantised router chose; the reference
computes the same tokens in float32 with the weights that the bytes stand for. It is the bundled model's: others have no text in a real run.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesim.engines import real
from moesim.engines.real_program import Program
from moesim.engines.real_weights import TinyMoeWeights
from moesim.expert_store.builder import build_store
from moesim.expert_store.readers import open_reader
from moesim.model_tensors import TensorSpec
from moesim.quality.quantise import Quantised
from moesim.quality.subject import TinyMoe
from moesim.quality.text import Batch
from moesim.scenario import Scenario
from moesim.schedule import Schedule
from moesim.simulate import make_case
from moesim.trace import DECODE, PREFILL, RoutingTrace, save_trace

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64


class QuantisedWeights:
    """A quantised bundled model as the real engine takes weights: packed bytes and adapters.

    Parameters
    ----------
    quantised : Quantised
    subject : TinyMoe
    batch : Batch
        The windows that will run: sequence i of the trace is window i.
    """

    def __init__(self, quantised: Quantised, subject: TinyMoe, batch: Batch) -> None:
        own = TinyMoeWeights(subject.folder)
        self.router_shift, self.rope_theta, self.norm_eps = own.router_shift, own.rope_theta, own.norm_eps
        self._quantised, self._batch = quantised, batch

    def tensor(self, spec: TensorSpec) -> Tensor | None:
        return self._quantised.packed[spec.name]

    def expert(self, layer: int, expert: int, matrix: str) -> Tensor:
        return self._quantised.packed[_key(layer, expert, matrix)]

    def adapter(self, layer: int, expert: int, matrix: str) -> tuple[Tensor, Tensor] | None:
        return self._quantised.adapters.get(_key(layer, expert, matrix))

    def text(self, trace: RoutingTrace) -> NDArray[np.int64] | None:
        at = trace.seq_id, trace.position
        return np.stack([self._batch.inputs[at], self._batch.targets[at]], axis=1)


def _key(layer: int, expert: int, matrix: str) -> str:
    return f"layers.{layer}.routed_experts.{matrix}.{expert}"


@dataclass(frozen=True, slots=True)
class RealCheck:
    """Losses (nats per token) of the same tokens in the real engine and in the reference, and how much of the routing agrees there."""

    real_loss: float
    reference_loss: float
    tokens: int
    router_agreement: float
    differences: list[str]

    @property
    def relative(self) -> float:
        return abs(self.real_loss / self.reference_loss - 1)


def run_real(subject: TinyMoe, quantised: Quantised, batch: Batch, folder: Path | None = None) -> RealCheck:
    """Run windows through the real engine, all experts in memory, and compare.

    Parameters
    ----------
    subject : TinyMoe
        With the quantised weights in it (``tune.weights_of``).
    quantised : Quantised
    batch : Batch
        Windows of at least ``PROMPT_TOKENS + OUTPUT_TOKENS``.
    folder : Path, optional
        Where the expert store and the trace lie meanwhile.
    """
    n = PROMPT_TOKENS + OUTPUT_TOKENS
    with torch.no_grad():
        logits, ids = subject.route(torch.from_numpy(batch.inputs[:, :n]))
    first = PROMPT_TOKENS - 1
    reference = torch.nn.functional.cross_entropy(
        logits[:, first : n - 1].flatten(0, 1), torch.from_numpy(batch.targets[:, first : n - 1]).flatten()
    )
    trace = _trace(ids, subject.spec.n_experts)
    with tempfile.TemporaryDirectory(prefix="moesim-quality-", dir=folder) as name:
        path = Path(name) / "trace.npz"
        save_trace(trace, path)
        case = make_case(_scenario(quantised, path, len(ids)))
        weights = QuantisedWeights(quantised, subject, batch)
        store = build_store(Path(name) / "experts.bin", case.model, case.plan, align=1, weights=weights.expert)
        reader = open_reader(store, "buffered", request_bytes=1 << 20)
        try:
            planner = case.planner()
            schedule = Schedule(planner.lanes, planner.tiers, planner.lines, fragments=list(planner.fragments()))
            run = real.run(Program(case, schedule, store, reader, weights))
        finally:
            reader.close()
    found = run.loss if run.loss is not None else float("nan")
    return RealCheck(found, float(reference), len(ids) * OUTPUT_TOKENS, run.router_agreement or 0.0, run.differences())


def _trace(ids: NDArray[np.int16], n_experts: int) -> RoutingTrace:
    n, length, n_layers, top_k = ids.shape
    position = np.tile(np.arange(length, dtype=np.int32), n)
    phase = np.where(position < PROMPT_TOKENS, PREFILL, DECODE).astype(np.uint8)
    meta = {"model": "tinymoe", "n_layers": n_layers, "n_experts": n_experts, "top_k": top_k}
    return RoutingTrace(
        ids.reshape(n * length, n_layers, top_k), None, np.repeat(np.arange(n, dtype=np.int32), length), position, phase, meta
    )


def _scenario(quantised: Quantised, trace: Path, batch: int) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "quality",
            "model": "tinymoe",
            "precision": quantised.plan.model_dump(mode="json", exclude_none=True),
            "hardware": "laptop-8gb",
            "trace": {"source": str(trace), "train_fraction": 0.0},
            "workload": {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "batch": batch},
            "memory": {"workspace": "0 B"},
            "placement": {"attention": "cpu", "experts": "cpu", "pools": {"ram": {"hold": "all"}}},
        }
    )
