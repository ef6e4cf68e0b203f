"""Owns what one pass over a text measures: losses by document and by position, next tokens, and the routing.

Everything is kept by document, so that intervals can be drawn over documents, and differences between plans over the same ones. Losses are in
nats. It must not know plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesim.quality.subject import Subject
from moesim.quality.text import Text, windows_of
from moesim.trace import DECODE, PREFILL, RoutingTrace

Floats = NDArray[np.float64]
FIRST_BUCKET = 16  # positions of the first bucket; each later one ends at twice the position


@dataclass(frozen=True)
class Evaluation:
    """One pass over a text of D documents.

    Parameters
    ----------
    loss : (D, P) float64
        Sum of losses by document and bucket of positions in the window.
    tokens : (D, P) int64
        Predicted tokens of each.
    right : (D,) int64
        Tokens that were the likeliest.
    """

    loss: Floats
    tokens: NDArray[np.int64]
    right: NDArray[np.int64]

    def as_dict(self) -> dict[str, Any]:
        return {"loss": self.loss.tolist(), "tokens": self.tokens.tolist(), "right": self.right.tolist()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Evaluation:
        return cls(np.array(data["loss"], np.float64), np.array(data["tokens"], np.int64), np.array(data["right"], np.int64))

    @property
    def mean_loss(self) -> float:
        """Loss per token, all tokens alike."""
        return float(self.loss.sum() / self.tokens.sum())


def buckets(window: int) -> list[int]:
    """Return the position at which each bucket of a window ends: 16, 32, 64, ..., the window."""
    ends = [FIRST_BUCKET]
    while ends[-1] < window:
        ends.append(ends[-1] * 2)
    return [*(end for end in ends if end < window), window]


@torch.no_grad()
def evaluate(
    subject: Subject, text: Text, progress: Callable[[int, int], None] | None = None, routing: bool = True
) -> tuple[Evaluation, RoutingTrace | None]:
    """Run a model, as its weights now are, over a text.

    Returns
    -------
    Evaluation, RoutingTrace or None
        One sequence of the trace is one window; the first quarter of it is marked prefill. None without ``routing``.
    """
    ends = np.array(buckets(subject.window))
    n, places = len(text.documents), len(ends)
    loss, tokens, right = np.zeros((n, places)), np.zeros((n, places), np.int64), np.zeros(n, np.int64)
    cells: list[NDArray[np.int16]] = []
    lengths: list[int] = []
    done = 0
    for batch in windows_of(text, subject.window, subject.first_token):
        given = torch.from_numpy(batch.inputs)
        if routing:
            logits, ids = subject.route(given)
            cells += list(ids)
            lengths += [batch.inputs.shape[1]] * len(ids)
        else:
            logits = subject.run(given)
        target = torch.from_numpy(batch.targets)
        each = (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).double().numpy()
        )
        place = np.searchsorted(ends, np.arange(each.shape[1]), side="right")
        for row, document in enumerate(batch.document.tolist()):
            loss[document] += np.bincount(place, each[row], places)
            tokens[document] += np.bincount(place, minlength=places)
        np.add.at(right, batch.document, (logits.argmax(2) == target).sum(1).numpy())
        done += target.numel()
        if progress is not None:
            progress(done, text.n_tokens)
    trace = None
    if routing:
        position = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        sequence = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        phase = np.where(position < np.repeat(lengths, lengths) // 4, PREFILL, DECODE).astype(np.uint8)
        meta = {"model": subject.spec.name, "n_layers": len(subject.spec.moe_layers), "n_experts": subject.spec.n_experts,
                "top_k": subject.spec.top_k, "captured_by": "moesim quality", "text_hash": text.hash}  # fmt: skip
        trace = RoutingTrace(np.concatenate(cells), None, sequence, position, phase, meta)
    return Evaluation(loss, tokens, right), trace


def agreement(one: RoutingTrace, other: RoutingTrace) -> float:
    """Share of cells (token, layer) whose set of experts is the same in two traces of one text."""
    same = (np.sort(one.expert_ids, 2) == np.sort(other.expert_ids, 2)).all(2)
    return float(same.mean())
