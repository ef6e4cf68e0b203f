"""Owns routing that is drawn like a model's: from a fitted profile to a trace of any length.

It must not know how a profile was fitted. The model, for token t of a sequence, layer l and expert e:

    class     c_t  = argmax over m of  step[c_(t-1), m] + h_t[m] + Gumbel noise          (a Markov chain whose weights drift)
    factors   f_t  = mean[c_t] + sum over k of  x_t^k                                     (R numbers per token, shared by all layers)
    drift     x_t^k = rho_k x_(t-1)^k + sqrt(1 - rho_k^2) N(0, S_k)                       (h alike: AR(1), stationary)
    log rate  u_tle = bias[l, e] + loadings[l, e] . f_t
    choice    the K experts of a layer with the largest u + Gumbel noise, the strongest first; with probability repeat[l] a cell keeps
              the noise of the row before

The part of the drift with rho = 1 is drawn once per sequence: its topic. Factors that all layers share make one layer tell of the
next. The last line is an exponential race: expert e arrives at rate exp(u), the first K win, which is successive sampling without
replacement (Yellott 1977, J. Math. Psychol. 15(2); Kool et al. 2019, arXiv 1903.06059), as in ``generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.generate.routing_profile import CLASS_PERSISTENCE, FACTOR_PERSISTENCE, LikeProfile
from moesim.trace import DECODE, PREFILL, RoutingTrace

_BLOCK = 2**21  # random numbers at a time (8 MB); the draws do not depend on it
_FEW_TOPICS = 8  # below it a column of draws says too little of its own mean and variance to correct them


@dataclass(frozen=True, slots=True)
class Latent:
    """The hidden process of some rows.

    Parameters
    ----------
    factors : (T, R) float64
    classes : (T,) int64
    tilt : (T, M) float64
        The slow part h of the classes' log weights.
    """

    factors: NDArray[np.float64]
    classes: NDArray[np.int64]
    tilt: NDArray[np.float64]


def generate(
    profile: LikeProfile,
    n_rows: int,
    rng: np.random.Generator,
    *,
    n_sequences: int = 1,
    prefill_rows: int = 0,
    lengths: Sequence[int] | None = None,
) -> RoutingTrace:
    """Generate a trace that routes like the profile's model.

    Parameters
    ----------
    profile : LikeProfile
        Its shape L, E, K becomes the trace's.
    n_rows : int
        Rows T over all sequences.
    rng : numpy.random.Generator
        Source of all randomness.
    n_sequences : int
        Sequences of equal length (the first ones one row longer where it does not divide).
    prefill_rows : int
        First rows of each sequence that are prefill.
    lengths : sequence of int, optional
        Rows of each sequence, instead of equal ones; they must add up to ``n_rows``.

    Raises
    ------
    InputError
        On an impossible shape.
    """
    rows = _lengths(n_rows, n_sequences, lengths)
    if not 0 <= prefill_rows <= rows.min():
        raise InputError("prefill_rows", expected=f"0 to {rows.min()}, the rows of the shortest sequence", got=str(prefill_rows))
    position = np.concatenate([np.arange(length, dtype=np.int32) for length in rows])
    phase = np.where(position < prefill_rows, PREFILL, DECODE).astype(np.uint8)
    latent = draw_latent(profile, rows, rng)
    gap = np.minimum(position, 1)
    ids = draw_experts(profile, latent.factors, rng, gap, phase == PREFILL)
    entropy = getattr(rng.bit_generator.seed_seq, "entropy", None)
    caveats = (
        [] if profile.prefill_shift is not None or not prefill_rows else ["prefill is drawn like decode: the profile does not know it"]
    )
    meta = {
        "model": profile.model,
        "dataset": "generated like " + profile.source,
        "captured_by": "moesim.generate.like: drifting token classes, shared factors, successive sampling",
        "generated": True,
        "seed": entropy if isinstance(entropy, int) else str(entropy),
        "bit_generator": type(rng.bit_generator).__name__,
        "n_layers": profile.n_layers,
        "n_experts": profile.n_experts,
        "top_k": profile.top_k,
        "caveats": [*caveats, *profile.notes],
    }
    return RoutingTrace(
        expert_ids=ids,
        weights=None,
        seq_id=np.repeat(np.arange(len(rows), dtype=np.int32), rows),
        position=position,
        phase=phase,
        meta=meta,
    )


def _lengths(n_rows: int, n_sequences: int, lengths: Sequence[int] | None) -> NDArray[np.int64]:
    if lengths is not None:
        rows = np.array(lengths, dtype=np.int64)
        if not rows.size or rows.min() < 1 or rows.sum() != n_rows:
            raise InputError(
                "lengths", expected=f"numbers of at least 1 that add up to n_rows = {n_rows}", got=f"{len(rows)} numbers, sum {rows.sum()}"
            )
        return rows
    if not 1 <= n_sequences <= n_rows:
        raise InputError("n_rows", expected=f"at least one row for each of {n_sequences} sequences (at least 1)", got=str(n_rows))
    return np.array([n_rows // n_sequences + (i < n_rows % n_sequences) for i in range(n_sequences)], dtype=np.int64)


def draw_latent(profile: LikeProfile, lengths: NDArray[np.int64], rng: np.random.Generator) -> Latent:
    """Draw the hidden process of sequences of the given lengths, row after row, all sequences side by side."""
    n_rows, n_sequences = int(lengths.sum()), len(lengths)
    factors = np.zeros((n_rows, profile.loadings.shape[2]))
    tilt = np.zeros((n_rows, len(profile.class_share)))
    moving: list[tuple[NDArray[Any], NDArray[Any], float]] = []
    for out, stack, persistences in ((factors, profile.drift, FACTOR_PERSISTENCE), (tilt, profile.class_drift, CLASS_PERSISTENCE)):
        for covariance, rho in zip(stack, persistences, strict=True):
            root = _root(covariance)
            if not root.size:
                continue
            if rho == 1.0:
                out += np.repeat(_topics(n_sequences, root.shape[1], rng) @ root.T, lengths, axis=0)
            elif rho == 0.0:
                out += rng.standard_normal((n_rows, root.shape[1])) @ root.T
            else:
                moving.append((out, root, rho))
    steps = list(_steps(lengths))
    if moving:
        state = rng.standard_normal((n_rows, sum(root.shape[1] for _, root, _ in moving)))
        rho_of = np.repeat([rho for _, _, rho in moving], [root.shape[1] for _, root, _ in moving])
        fresh = np.sqrt(1 - rho_of**2)
        for rows in steps[1:]:
            state[rows] = rho_of * state[rows - 1] + fresh * state[rows]
        at = 0
        for out, root, _ in moving:
            out += state[:, at : at + root.shape[1]] @ root.T
            at += root.shape[1]
    classes = np.zeros(n_rows, dtype=np.int64)
    if tilt.shape[1] > 1:
        score = tilt + rng.gumbel(size=tilt.shape)
        with np.errstate(divide="ignore"):
            classes[steps[0]] = (np.log(profile.class_share) + score[steps[0]]).argmax(axis=1)
        for rows in steps[1:]:
            classes[rows] = (profile.class_step[classes[rows - 1]] + score[rows]).argmax(axis=1)
    return Latent(factors + profile.class_mean[classes], classes, tilt)


def _topics(n_sequences: int, number: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """(S, number) standard normal, brought to mean 0 and variance 1 in each column: a few dozen topics then stand for all better."""
    draw = rng.standard_normal((n_sequences, number))
    if n_sequences < _FEW_TOPICS:
        return draw
    return np.asarray((draw - draw.mean(axis=0)) / draw.std(axis=0))


def _steps(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Rows that are the i-th of their sequence, for i = 0, 1, ..."""
    order = np.argsort(-lengths, kind="stable")
    start = (np.cumsum(lengths) - lengths)[order]
    longer = np.searchsorted(-lengths[order], -np.arange(int(lengths.max())), side="left")
    return [start[:n] + i for i, n in enumerate(longer.tolist())]


def _root(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, m) with root @ root.T = covariance, without the directions of no variance."""
    value, vector = np.linalg.eigh(covariance)
    kept = value > 1e-9 * max(float(value.max()), 1e-9)
    return np.asarray(vector[:, kept] * np.sqrt(value[kept]))


def draw_experts(
    profile: LikeProfile,
    factors: NDArray[np.float64],
    rng: np.random.Generator,
    gap: NDArray[Any],
    prefill: NDArray[np.bool_] | None = None,
) -> NDArray[np.int16]:
    """Draw the choices of rows with the given factors.

    Parameters
    ----------
    profile : LikeProfile
    factors : (T, R) float64
    rng : numpy.random.Generator
    gap : (T,) int
        How many tokens after the row before it each row is; 0 where a sequence begins.
    prefill : (T,) bool, optional
        Rows that take the profile's prefill shift, where it has one.

    Returns
    -------
    (T, L, K) int16
        Chosen experts, the strongest first.
    """
    n_layers, n_experts, k = profile.n_layers, profile.n_experts, profile.top_k
    loadings = profile.loadings.reshape(n_layers * n_experts, -1).astype(np.float32)
    bias = profile.bias.ravel().astype(np.float32)
    kept = np.where(gap[:, None] > 0, profile.repeat ** np.maximum(gap, 1)[:, None], 0.0)
    keeps = rng.random(kept.shape, dtype=np.float32) < kept
    out = np.empty((len(factors), n_layers, k), dtype=np.int16)
    block = max(1, _BLOCK // bias.size)
    last = np.zeros((1, n_layers, n_experts), dtype=np.float32)
    for at in range(0, len(factors), block):
        part = factors[at : at + block].astype(np.float32)
        log_rate = part @ loadings.T
        log_rate += bias
        if prefill is not None and profile.prefill_shift is not None:
            log_rate[prefill[at : at + block]] += profile.prefill_shift.ravel().astype(np.float32)
        # Arrival times of an exponential race, in logarithms: the smallest K win.
        noise = np.maximum(rng.standard_exponential((len(part), n_layers, n_experts), dtype=np.float32), np.float32(1e-30))
        np.log(noise, out=noise)
        again = keeps[at : at + block]
        if again.any():
            noise = np.concatenate([last, noise])
            newest = np.maximum.accumulate(np.where(again, 0, np.arange(1, len(part) + 1)[:, None]), axis=0)
            row, layer = np.nonzero(again)
            noise[row + 1, layer] = noise[newest[row, layer], layer]
            noise = noise[1:]
        last = noise[-1:]
        arrival = noise - log_rate.reshape(noise.shape)
        best = np.argpartition(arrival, k - 1, axis=2)[:, :, :k] if k < n_experts else np.argsort(arrival, axis=2)
        order = np.argsort(np.take_along_axis(arrival, best, 2), axis=2)
        out[at : at + block] = np.take_along_axis(best, order, 2)
    return out
