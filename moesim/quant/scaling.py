"""Owns activation-aware scaling: factors of input channels that make what large activations meet round more finely.

W x = (W diag(s)) (x / s): columns that meet large activations are scaled up before rounding, and 1 / s is folded into whatever makes x (a
norm's weight, the rows of the matrix before), so no format changes and nothing is computed in addition. s = (rms of x)^alpha over its
geometric mean; alpha is searched for the least error of the output, as far as activations are uncorrelated: the idea of AWQ
(arXiv:2306.00978), with mean squares in place of mean magnitudes. It must not know models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesim.precision import Format
from moesim.quant.grid import rounded

ALPHAS = 11  # from 0, which scales nothing, to 1


def best_scale(weights: Sequence[tuple[Tensor, Format, Tensor]], mean_square: Tensor, made_by: Tensor) -> Tensor:
    """Return a factor for each channel of what makes the input of several matrices.

    Parameters
    ----------
    weights : sequence of (Tensor, Format, Tensor)
        Each matrix (N, K) float32, its format, and the sum of squares of its own inputs, (K,); floats count no error.
    mean_square : (K,) Tensor
        Mean squares of the inputs of all of them, from which factors are made.
    made_by : (K,) int64 Tensor
        The channel of the maker that each input channel comes from: several, where heads of a group share a value.

    Returns
    -------
    Tensor
        (M,) float32 factors, all 1 where scaling does not help.
    """
    n = int(made_by.max()) + 1
    rms = (torch.zeros(n).index_add(0, made_by, mean_square) / torch.bincount(made_by, minlength=n)).sqrt()
    rms = rms.clamp(min=float(rms.max()) * 1e-4 + 1e-12)
    best, found = torch.inf, torch.ones_like(rms)
    for alpha in torch.linspace(0, 1, ALPHAS).tolist():
        scale = rms**alpha
        scale = scale / scale.log().mean().exp()
        at = scale[made_by]
        error = 0.0
        for weight, format, squares in weights:
            if format.kind == "int":
                off = rounded(weight * at, format) / at - weight
                error += float((off.square().sum(0) * squares).sum())
        if error < best:
            best, found = error, scale
    return found
