"""Owns what calibration text tells of a model: how large each input of each matrix is, and which experts are routed to most.

Sums of squares per input channel, counted where a token really reaches the matrix: an expert hears only what is routed to it. It must not
know formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesim.quality.subject import Site, Subject
from moesim.quality.text import Text, windows_of


@dataclass(frozen=True)
class Calibration:
    """What was heard.

    Parameters
    ----------
    squares : dict of str to (K,) float32 Tensor
        Sum of squares of each input, by its name.
    rows : dict of str to int
        Rows that were heard.
    routed : (L, E) int64
        Tokens that chose each expert.
    """

    squares: dict[str, Tensor]
    rows: dict[str, int]
    routed: NDArray[np.int64]

    def mean_square(self, site: Site) -> Tensor:
        """Mean squares of a matrix's inputs, (K,); all 1 where none was heard, so that no column counts more than another."""
        n = self.rows.get(site.source, 0)
        return self.squares[site.source] / n if n else torch.ones(site.cols)

    def most_routed(self, layer: int, n: int) -> list[int]:
        """The n most routed experts of a MoE layer (its place among them), ascending."""
        order = np.argsort(-self.routed[layer], kind="stable")[:n]
        return sorted(int(e) for e in order)


@torch.no_grad()
def calibrate(subject: Subject, text: Text, progress: Callable[[int, int], None] | None = None) -> Calibration:
    """Run a model over calibration text and listen."""
    squares: dict[str, Tensor] = {}
    rows: dict[str, int] = {}

    def heard(source: str, x: Tensor) -> None:
        squares[source] = squares.get(source, torch.zeros(x.shape[1])) + x.float().square().sum(0)
        rows[source] = rows.get(source, 0) + len(x)

    routed = np.zeros((len(subject.spec.moe_layers), subject.spec.n_experts), np.int64)
    done = 0
    for batch in windows_of(text, subject.window, subject.first_token):
        with subject.listen(heard):
            _, ids = subject.route(torch.from_numpy(batch.inputs))
        for layer in range(len(routed)):
            routed[layer] += np.bincount(ids[:, :, layer].ravel(), minlength=routed.shape[1])
        done += batch.targets.size
        if progress is not None:
            progress(done, text.n_tokens)
    return Calibration(squares, rows, routed)
