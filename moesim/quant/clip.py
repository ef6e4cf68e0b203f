"""Owns the clip search: for each group of a matrix the range that rounds it with the least squared error.

A narrower range has finer steps and cuts off what lies outside. Shares of the full range from 1 down to ``LEAST_SHARE`` are tried; the error
of a column may be weighted by the mean square of the activation that it is multiplied with, which makes it the error of the output as far as
activations are uncorrelated. It must not know models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesim.precision import Format
from moesim.quant.grid import Ranges, full_ranges, grid, grouped, nearest_steps

SHARES = 21
LEAST_SHARE = 0.4  # two bits want about half of the range of normal values


def clipped_ranges(weight: Tensor, format: Format, importance: Tensor | None = None) -> Ranges:
    """Return the best range of each group.

    Parameters
    ----------
    weight : Tensor
        (N, K) float32.
    format : Format
        An integer format.
    importance : (K,) Tensor, optional
        Weight of each column's squared error; by default all count the same.

    Returns
    -------
    (Tensor, Tensor)
        Least and greatest value of each group, (N, G).
    """
    low, high = full_ranges(weight, format)
    groups = grouped(weight, format)
    weigh = None if importance is None else grouped(importance[None], format)
    best = torch.full_like(low, torch.inf)
    kept_low, kept_high = low.clone(), high.clone()
    for share in torch.linspace(1.0, LEAST_SHARE, SHARES).tolist():
        to = grid(format, (low * share, high * share))
        off = nearest_steps(groups, to) * to.scale[..., None] + to.offset[..., None] - groups
        error = (off.square() if weigh is None else off.square() * weigh).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        kept_low, kept_high = torch.where(better, low * share, kept_low), torch.where(better, high * share, kept_high)
    return kept_low, kept_high
