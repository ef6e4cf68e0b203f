"""Owns the estimators that a routing fit is made of: shared factors, race regression, clusters, drift covariances.

It must not know about traces, files or generation: arrays in, arrays out.

Factors of choices   Principal factors of the choice indicators X (T, L*E) between layers: same-layer blocks of the covariance are
                     replaced by what the factors explain (iterated principal factoring, Harman 1976, "Modern factor analysis", ch. 8),
                     because competition for K places correlates the experts of one layer for another reason.
Race regression      P(X = 1) = 1 - exp(-exp(b + W f)): expert e arrives before time 1 in an exponential race (the complementary log-log
                     link of McCullagh and Nelder 1989, "Generalized linear models", ch. 4). W, b and the factors f of each row are found
                     together by maximum posterior with f ~ N(0, 1): exponential-family factor analysis (Collins, Dasgupta and Schapire 2001, NIPS 14).
Drift                Lagged covariances G(lag) = sum over k of rho_k^lag S_k with S_k without negative directions: projected gradient steps
                     with Nesterov's momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Progress = Callable[[str, int, int], None]


def principal_factors(deviation: Singles, n_layers: int, rank: int, rng: np.random.Generator, rounds: int = 12) -> tuple[Floats, Floats]:
    """Find the directions in which choices of different layers vary together.

    Parameters
    ----------
    deviation : (T, L*E) float32
        Choice indicators less their means.
    n_layers, rank : int
        L, and the number R of directions wanted.
    rng : numpy.random.Generator
        Start of the subspace iteration.

    Returns
    -------
    vectors : (L*E, R) float64
        Orthonormal, the strongest first.
    variances : (R,) float64
        Variance along each, not below 0.
    """
    n_rows, size = deviation.shape
    n_experts = size // n_layers
    blocks = np.stack([part.T @ part / n_rows for part in np.split(deviation, n_layers, axis=1)]).astype(np.float64)
    explained = np.zeros_like(blocks)
    vectors = np.linalg.qr(rng.standard_normal((size, rank)))[0]

    def apply(v: Floats) -> Floats:
        whole = (deviation.T @ (deviation @ v.astype(np.float32)) / n_rows).astype(np.float64)
        split = v.reshape(n_layers, n_experts, -1)
        return np.asarray(whole + ((explained - blocks) @ split).reshape(size, -1))

    for _ in range(rounds):
        image = apply(vectors)
        value, turn = np.linalg.eigh(_symmetric(vectors.T @ image))
        split = (vectors @ turn).reshape(n_layers, n_experts, -1)
        explained = (split * np.maximum(value, 0)) @ split.transpose(0, 2, 1)
        vectors = np.linalg.qr(image)[0]
    value, turn = np.linalg.eigh(_symmetric(vectors.T @ apply(vectors)))
    order = np.argsort(-value)
    return vectors @ turn[:, order], np.maximum(value[order], 0)


def race_regression(
    chosen: Singles, vectors: Floats, variances: Floats, rounds: int = 110, rate: float = 0.06, progress: Progress | None = None
) -> tuple[Floats, Floats, Floats]:
    """Fit log rates b + W f to choice indicators.

    Parameters
    ----------
    chosen : (T, D) float32
        Choice indicators; a value between 0 and 1 where a cell was not recorded.
    vectors, variances
        Of ``principal_factors``: where to start.
    rounds, rate : int, float
        Steps of Adam (Kingma and Ba 2015, arXiv 1412.6980) and its largest step size, which falls over the last two thirds.

    Returns
    -------
    loadings : (D, R) float64
    bias : (D,) float64
    factors : (T, R) float64
        With mean 0.
    """
    n_rows = len(chosen)
    share = np.clip(chosen.mean(axis=0), 0.3 / n_rows, 1 - 0.3 / n_rows)
    sd = np.sqrt(np.maximum(variances, 1e-6 * max(variances.max(), 1e-6)))
    bias = np.log(-np.log1p(-share)).astype(np.float32)
    factors = ((chosen - share) @ (vectors / sd).astype(np.float32)).astype(np.float32)
    factors /= np.maximum(factors.std(axis=0), 1e-6)
    loadings = (vectors * sd / np.sqrt(share * (1 - share) + 0.01)[:, None]).astype(np.float32)
    parts = [factors, loadings, bias]
    moments = [(np.zeros_like(part), np.zeros_like(part)) for part in parts]
    for step in range(1, rounds + 1):
        log_rate = factors @ loadings.T
        log_rate += bias
        np.clip(log_rate, -12, 3, out=log_rate)
        arrivals = np.exp(log_rate)
        # Derivative of the log likelihood by the log rate: -v where not chosen, v / (e^v - 1) where chosen.
        slope = chosen * (arrivals / np.expm1(arrivals) + arrivals) - arrivals
        gradients = [slope @ loadings - factors, slope.T @ factors / n_rows - 1e-3 * loadings, slope.mean(axis=0)]
        size = rate * min(1.0, 3 * (1 - step / (rounds + 1)))
        for part, gradient, (first, second) in zip(parts, gradients, moments, strict=True):
            first += 0.1 * (gradient - first)
            second += 0.02 * (gradient**2 - second)
            part += size * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.98**step)) + 1e-8)
        if progress is not None:
            progress("factors", step, rounds)
    middle = factors.mean(axis=0, dtype=np.float64)
    return loadings.astype(np.float64), bias + loadings @ middle, factors - middle


def clusters(points: Floats, number: int, rng: np.random.Generator, rounds: int = 30) -> tuple[Floats, NDArray[np.int64]]:
    """K-means (Lloyd 1982): centres (M, R) and the cluster of each point, numbered from 0 without gaps."""
    centres = points[rng.choice(len(points), number, replace=False)]
    near = np.zeros(len(points), dtype=np.int64)
    for _ in range(rounds):
        near = ((centres**2).sum(axis=1) - 2 * points @ centres.T).argmin(axis=1)
        members, near = np.unique(near, return_inverse=True)
        count = np.bincount(near)
        centres = np.stack([np.bincount(near, weights=column) for column in points.T], axis=1) / count[:, None]
    return centres, near


def lagged(values: Floats, seq_id: NDArray[np.int32], row: NDArray[np.int64], lag: int) -> tuple[Floats, int]:
    """Symmetric covariance (n, n) of (T, n) values of mean 0 with those ``lag`` rows later in their sequence, and the pairs counted.

    ``row`` numbers the rows in the trace they come from, for values that are not all of it.
    """
    if lag >= len(values):
        return np.zeros((values.shape[1], values.shape[1])), 0
    first = np.flatnonzero((seq_id[:-lag] == seq_id[lag:]) & (row[lag:] - row[:-lag] == lag)) if lag else np.arange(len(values))
    return _symmetric(values[first].T @ values[first + lag]) / max(1, len(first)), len(first)


def covariance_of_mean(values: Floats, seq_id: NDArray[np.int32]) -> Floats:
    """Covariance (n, n) of the mean over all rows, each sequence being one independent sample of its topic.

    (T, n) values of mean 0. With w_i the part of the rows that sequence i has and T the covariance of one sequence's mean, the mean
    over all has sum w_i^2 T, and the deviations w_i (mean_i - mean) have the squares (sum w_i^2 - 2 sum w_i^3 + (sum w_i^2)^2) T.
    One sequence does not tell: 0.
    """
    start = np.flatnonzero(np.r_[True, seq_id[1:] != seq_id[:-1]])
    parts = np.add.reduceat(values, start, axis=0) / len(values)
    weight = np.diff(np.r_[start, len(values)]) / len(values)
    square = float((weight**2).sum())
    of_parts = square - 2 * float((weight**3).sum()) + square**2
    return np.asarray(parts.T @ parts * (square / of_parts if len(start) > 1 else 0.0))


def flatter_shares(share: Floats, square: float, n_rows: int) -> Floats:
    """(L, E) shares whose squares add up to ``square``: the log rates of each layer, all drawn together by one factor."""
    if square >= float((share**2).sum()):
        return share
    rate = np.log(-np.log1p(-np.clip(share, 0.3 / n_rows, 1 - 0.3 / n_rows)))
    rate -= rate.mean(axis=1, keepdims=True)
    total = share.sum(axis=1, keepdims=True)

    def drawn_together(part: float) -> Floats:
        shift = np.zeros_like(total)
        for _ in range(60):
            chance = -np.expm1(-np.exp(part * rate + shift))
            shift += np.log(total / chance.sum(axis=1, keepdims=True))
        return np.asarray(chance)

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if float((drawn_together(middle) ** 2).sum()) < square else (low, middle)
    return drawn_together(low)


def turns(first: Floats, second: Floats, lacking: Floats) -> tuple[Floats, Floats]:
    """Find A and B such that A first A' + B second B' is about first + second + lacking, for covariances (n, n).

    In each direction of their sum, made white, each of the two takes what is lacking by its part in it; no step is longer than a tenth.
    """
    value, vector = np.linalg.eigh(first + second)
    size = np.sqrt(np.maximum(value, max(1e-4 * value[-1], 1e-12)))
    root, back = vector * size @ vector.T, vector / size @ vector.T
    part, axes = np.linalg.eigh(back @ first @ back)
    part = np.clip(part, 0, 1)
    relative = axes.T @ back @ lacking @ back @ axes
    out = []
    for weight in (part, 1 - part):
        value, vector = np.linalg.eigh(np.sqrt(weight)[:, None] * relative * np.sqrt(weight))
        step = vector * (1 + np.clip(value / 2, -0.1, 0.1)) @ vector.T
        out.append(np.asarray(root @ axes @ step @ axes.T @ back))
    return out[0], out[1]


def drift_covariances(
    targets: Sequence[Floats], lags: Sequence[int], weights: Sequence[float], persistence: Sequence[float], start: Floats, rounds: int = 60
) -> Floats:
    """Split lagged covariances into parts that fade at given speeds.

    Parameters
    ----------
    targets : sequence of (n, n) float64
        Covariance at each lag.
    lags, weights : sequence
        The lags, and how much each target counts.
    persistence : sequence of float
        rho of each part.
    start : (P, n, n) float64
        First guess.

    Returns
    -------
    (P, n, n) float64
        Covariance of each part, without negative directions.
    """
    design = np.array(persistence)[None, :] ** np.array(lags)[:, None]
    weight = np.array(weights)
    normal = (design * weight[:, None]).T @ design
    right = np.einsum("tp,t,tij->pij", design, weight, np.stack(targets))
    step = 1 / np.linalg.eigvalsh(normal)[-1]
    now, ahead, momentum = start, start, 1.0
    for _ in range(rounds):
        value, vector = np.linalg.eigh(ahead - step * (np.einsum("pq,qij->pij", normal, ahead) - right))
        new = np.einsum("pik,pk,pjk->pij", vector, np.maximum(value, 0), vector)
        following = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead, now, momentum = new + (momentum - 1) / following * (new - now), new, following
    return np.asarray(_symmetric(now))


def response_inverse(driver: Floats, answer: Floats, ridge: float) -> Floats:
    """Regularised inverse (m, n) of the regression of (T, m) answers on (T, n) drivers of mean 0.

    If J is the regression, a change dS of the drivers' covariance changes the answers' by J' dS J, so that X' dG X, with X the
    result, is the change that a missing dG asks for. ``ridge`` is relative to the largest singular value: weak directions are left alone.
    """
    size = driver.shape[1]
    second = driver.T @ driver / len(driver)
    jacobian = np.linalg.solve(second + 0.02 * max(np.trace(second) / size, 1e-9) * np.eye(size), driver.T @ answer / len(driver))
    left, value, right = np.linalg.svd(jacobian, full_matrices=False)
    return np.asarray((right.T * (value / (value**2 + ridge * value.max() ** 2 + 1e-12))) @ left.T)


def _symmetric(matrix: Floats) -> Floats:
    return np.asarray((matrix + np.swapaxes(matrix, -1, -2)) / 2)
