"""Owns low-rank compensation: the best correction of a given rank for what rounding has done to a matrix.

With E = W - W', of which column k counts with the root mean square c_k of its activation, the correction B A of rank r that leaves the least
squared error of the output (activations uncorrelated) is the truncated SVD of E diag(c) = U S V^T: B = U_r S_r^(1/2), A = S_r^(1/2) V_r^T diag(1 / c).
As in LQER (arXiv:2402.02446). It must not know models.
"""

from __future__ import annotations

import torch
from torch import Tensor


def correction(error: Tensor, mean_square: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A (r, K) and B (N, r), float32, whose product B A approximates an error matrix.

    Parameters
    ----------
    error : Tensor
        (N, K) float32.
    mean_square : (K,) Tensor
        Mean squares of the activations; channels that were never seen count a little.
    rank : int
        At most min(N, K) of it is used; the rest is zeros.
    """
    rows, cols = error.shape
    weight = mean_square.sqrt()
    weight = weight.clamp(min=float(weight.max()) * 1e-3 + 1e-12)
    left, size, right = torch.linalg.svd(error * weight, full_matrices=False)
    n = min(rank, len(size))
    root = size[:n].sqrt()
    a, b = torch.zeros(rank, cols), torch.zeros(rows, rank)
    a[:n], b[:, :n] = root[:, None] * right[:n] / weight, left[:, :n] * root
    return a, b
