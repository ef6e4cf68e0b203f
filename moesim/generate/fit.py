"""Owns the fit of a routing profile: from a trace to the numbers that ``generate_like`` draws from.

It must not know about files. Four steps, deterministic for a given generator:

1. moments of the trace: share of each expert, principal factors of the choices, their lagged covariances G(lag);
2. race regression on pieces of all sequences gives loadings and the factors of each row; k-means on these gives token classes,
   their succession, and the drift of the factors within them;
3. simulation-based calibration (indirect inference: Gourieroux, Monfort and Renault 1993, J. Appl. Econometrics 8): traces are drawn from
   the profile, and bias, class means, class succession and drifts are moved until shares, the covariance between layers, successions
   and G(lag) are those of the trace;
4. the figures that the profile is made for are written beside it.

The drift keeps the size that step 2 found: a lagged covariance that is too small moves variance from fast parts to slow ones instead
of adding any, because added Gaussian variance would blur the classes, and the layers would tell less of each other.

The mean over few sequences contains their topics. Their covariance is estimated from the sequences, added to G, and taken off the
shares, which are flattened until their squares are smaller by its trace; without it topics would count twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.generate.factors import (
    Floats,
    Progress,
    Singles,
    clusters,
    covariance_of_mean,
    drift_covariances,
    flatter_shares,
    lagged,
    principal_factors,
    race_regression,
    response_inverse,
    turns,
)
from moesim.generate.like import draw_experts, draw_latent
from moesim.generate.routing_profile import CLASS_PERSISTENCE, FACTOR_PERSISTENCE, Figure, LikeProfile
from moesim.trace import DECODE, PREFILL, RoutingTrace
from moesim.trace_stats import FRACTIONS, LAGS, lru_hits, prediction_statistics, reuse, top_half_share

RANK, CLASSES = 48, 48
_MOMENT_CELLS = 40_000_000  # rows x layers x experts whose choices are held at once (160 MB)
_SAMPLED = (0, 1, 2, 4, 8, 16, 64)  # rows of a calibration sequence that are drawn
_PAIRS = {1: ((0, 1), (1, 2)), 2: ((0, 2), (2, 4)), 4: ((0, 4), (4, 8)), 8: ((0, 8), (8, 16)), 16: ((0, 16),), 64: ((0, 64),)}
_WARM = 4  # rows of a calibration sequence before the first that counts
_FEWEST_PAIRS = 30
# Successions of classes are taken back this far towards independence: at full strength the chain swings back after two rows, and
# reuse at lag 2 came out as high as at lag 1 (chosen on mmlu_dev's half A).
_SUCCESSION = 0.5
_TILT = 50.0  # variance of a class's log weight, at most: with more the same class is drawn in every row anyway
# What reuse lacks pulls at the drifts at once and in sum (PI control). The sum alone answers to drifts that add up too: it swung with a
# period of 15 rounds, and the last rounds of 20 lay up to 0.02 off, the same way at all lags.
_AT_ONCE, _SUMMED = 2.0, 0.5
# Covariance between layers that is aimed at, in parts of the trace's, because the weakest directions stay below it: recall came out
# 0.02 and 0.00 below halves A of mmlu_dev and sorry_bench at 1, 0.01 and 0.02 above at 1.1.
_STRENGTH = 1.05


@dataclass(frozen=True, slots=True)
class Targets:
    """What the calibration aims at, all from the trace."""

    share: Floats  # (L*E,) of rows in which an expert is chosen
    vectors: Singles  # (L*E, R) principal factors
    moments: dict[int, Floats]  # lag -> (R, R) covariance of the choices along them
    between: Floats  # (R, R) that part of moments[0] which lies between different layers
    class_share: Floats  # (M,) of rows in each token class
    reuse: dict[int, Floats]  # lag -> (L,) reuse of each layer


def fit(
    trace: RoutingTrace,
    rng: np.random.Generator,
    *,
    rank: int = RANK,
    classes: int = CLASSES,
    max_rows: int = 6000,
    rounds: int = 30,
    source: str = "",
    progress: Progress | None = None,
) -> LikeProfile:
    """Fit a profile to a trace.

    Parameters
    ----------
    trace : RoutingTrace
        Its decode rows, where it has some; prefill rows give a shift of the bias.
    rng : numpy.random.Generator
        Source of all randomness.
    rank, classes : int
        Factors R and token classes M at most; a short trace gets fewer.
    max_rows : int
        Rows used for the regression; all rows count in the moments.
    rounds : int
        Rounds of calibration.
    source : str
        What the profile says of its origin.
    progress : callable, optional
        Called with (stage, done, all).

    Raises
    ------
    InputError
        If the trace has fewer than 32 rows to learn from.
    """
    prefill = trace.phase == PREFILL
    rows = trace if prefill.all() or not prefill.any() else trace.decode_rows()
    if rows.n_rows < 32:
        raise InputError("trace", expected="at least 32 rows to fit a profile to", got=str(rows.n_rows), fix="record a longer trace")
    if rounds < 1 or rank < 1 or classes < 1 or max_rows < 32:
        raise InputError(
            "fit",
            expected="rounds, rank and classes of at least 1, max_rows of at least 32",
            got=f"{rounds}, {rank}, {classes}, {max_rows}",
        )
    name = source or str(trace.meta.get("dataset", "a trace"))
    learned = _limited(rows, rng)
    rank = max(1, min(rank, learned.n_rows // 12, rows.n_layers * rows.n_experts))
    profile, targets = _first_guess(learned, rng, rank, max(1, min(classes, learned.n_rows // 150)), max_rows, progress)
    profile = _calibrated(profile, targets, rng, rounds, progress)
    notes = [f"fitted to {rows.n_rows} rows in {len(rows.sequences)} sequences"]
    shift = None
    if prefill.all():
        notes.append("the trace holds prefill only: decode is assumed to be alike")
    elif prefill.any():
        shift = _prefill_shift(trace, rows)
        notes.append(
            f"prefill: popularity of {int(prefill.sum())} rows; reuse and dependence between layers are assumed to be those of decode"
        )
    else:
        notes.append("the trace holds no prefill: it is drawn like decode")
    model = str(trace.meta.get("model", "unknown model"))
    return replace(profile, model=model, source=name, prefill_shift=shift, notes=tuple(notes), figures=_figures(rows, name)).rounded()


def _limited(trace: RoutingTrace, rng: np.random.Generator) -> RoutingTrace:
    """Whole sequences, drawn at random, as many as the moments can hold; one sequence that is too long is cut."""
    most = max(64, _MOMENT_CELLS // (trace.n_layers * trace.n_experts))
    if trace.n_rows <= most:
        return trace
    order = rng.permutation(len(trace.sequences))
    lengths = np.array([trace.sequences[i][1] - trace.sequences[i][0] for i in order])
    number = max(1, int(np.searchsorted(np.cumsum(lengths), most)))
    part = trace.select_sequences(sorted(order[:number].tolist()))
    return part if part.n_rows <= most else part.slice_rows(0, most)


def indicators(trace: RoutingTrace) -> Singles:
    """(T, L*E) float32: 1 where an expert is chosen; its mean where the cell was not recorded."""
    shape = (trace.n_rows, trace.n_layers, trace.n_experts)
    out = np.zeros(shape, dtype=np.float32)
    row, layer = np.nonzero(trace.present)
    out[row[:, None], layer[:, None], trace.expert_ids[row, layer]] = 1
    absent = ~trace.present
    if absent.any():
        mean = out.sum(axis=0) / np.maximum(1, trace.present.sum(axis=0))[:, None]
        out[absent] = np.broadcast_to(mean, shape)[absent]
    return out.reshape(trace.n_rows, -1)


def _pieces(trace: RoutingTrace, most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Rows of one piece of each sequence, about ``most`` in all."""
    spans = trace.sequences
    longest = max(32, most // len(spans))
    rows = []
    for start, stop in spans:
        length = min(longest, stop - start)
        begin = start + int(rng.integers(0, stop - start - length + 1))
        rows.append(np.arange(begin, begin + length))
    return np.concatenate(rows)[: 2 * most]


def _first_guess(
    trace: RoutingTrace, rng: np.random.Generator, rank: int, classes: int, max_rows: int, progress: Progress | None
) -> tuple[LikeProfile, Targets]:
    chosen = indicators(trace)
    share = chosen.mean(axis=0, dtype=np.float64)
    vectors, variances = principal_factors(chosen - share.astype(np.float32), trace.n_layers, rank, rng)
    scores = ((chosen - share.astype(np.float32)) @ vectors.astype(np.float32)).astype(np.float64)
    everything = np.arange(trace.n_rows)
    topics = covariance_of_mean(scores, trace.seq_id)
    flatter = flatter_shares(share.reshape(trace.n_layers, -1), float(share @ share - np.trace(topics)), trace.n_rows).ravel()
    moments = {}
    for lag in (0, *_PAIRS):
        covariance, pairs = lagged(scores, trace.seq_id, everything, lag)
        if pairs >= _FEWEST_PAIRS:
            moments[lag] = covariance + topics
    between = moments[0] - _within_layers(chosen - share.astype(np.float32), vectors, trace.n_layers, trace.seq_id)
    rows = _pieces(trace, max_rows, rng)
    loadings, bias, factors = race_regression(chosen[rows], vectors, variances, progress=progress)
    del chosen
    means, token_class = clusters(factors, classes, rng)
    number = len(means)
    class_share = np.bincount(token_class) / len(token_class)
    seq_id = trace.seq_id[rows]
    next_row = np.flatnonzero((seq_id[1:] == seq_id[:-1]) & (np.diff(rows) == 1))
    succession = np.zeros((number, number))
    np.add.at(succession, (token_class[next_row], token_class[next_row + 1]), 1)
    succession = (succession + np.outer(class_share, class_share) * number) / (len(next_row) + number)
    within = factors - means[token_class]
    parts = [(lag, *lagged(within, seq_id, rows, lag)) for lag in moments]
    topics = covariance_of_mean(within - within.mean(axis=0), seq_id)
    kept = [(lag, covariance + topics) for lag, covariance, pairs in parts if pairs >= _FEWEST_PAIRS]
    lags, covariances = [lag for lag, _ in kept], [covariance for _, covariance in kept]
    nothing = np.zeros((len(FACTOR_PERSISTENCE), rank, rank))
    drift = drift_covariances(covariances, lags, [1.0] * len(kept), FACTOR_PERSISTENCE, nothing, 200)
    drift[-1] += _within(covariances[0] - drift.sum(axis=0))
    follows = np.log(succession / succession.sum(axis=1, keepdims=True))
    shape = (trace.n_layers, trace.n_experts)
    profile = LikeProfile(
        model="being fitted",
        source="being fitted",
        top_k=trace.top_k,
        bias=bias.reshape(shape),
        loadings=loadings.reshape(*shape, rank),
        class_share=class_share,
        class_step=_SUCCESSION * follows + (1 - _SUCCESSION) * np.log(class_share),
        class_mean=means,
        class_drift=np.stack([weight * np.eye(number) for weight in (0.5, 0.1, 0.1)]) * (number > 1),
        drift=drift,
        repeat=np.zeros(trace.n_layers),
    )
    reused = {lag: np.array([value or 0.0 for value in reuse(trace, lag)["per_layer"]]) for lag in moments if lag}
    return profile, Targets(flatter, vectors.astype(np.float32), moments, between, class_share, reused)


def _within_layers(deviation: Singles, vectors: Floats | Singles, n_layers: int, seq_id: NDArray[np.int32] | None = None) -> Floats:
    """(R, R) covariance along the vectors that comes from the choices of one layer with each other."""
    parts = zip(np.split(deviation, n_layers, axis=1), np.split(vectors.astype(np.float32), n_layers), strict=True)
    total = np.zeros((vectors.shape[1], vectors.shape[1]))
    for part, along in parts:
        scores = (part @ along).astype(np.float64)
        total += scores.T @ scores / len(scores)
        if seq_id is not None:
            total += covariance_of_mean(scores, seq_id)
    return total


def _calibrated(profile: LikeProfile, targets: Targets, rng: np.random.Generator, rounds: int, progress: Progress | None) -> LikeProfile:
    """Draw, compare, correct; the last quarter of the rounds takes half steps, and their mean is the result: one round follows its draw."""
    late = []
    lags = [lag for lag in targets.moments if lag]
    total = profile.drift.sum(axis=0)
    number, n_sequences = len(profile.class_share), 1000
    length = _WARM + 1 + max(_SAMPLED if 64 in lags else _SAMPLED[:-1])
    share = np.clip(targets.share, 1e-5, 1 - 1e-5)
    aim = dict.fromkeys(targets.moments, 1.0)
    for done in range(rounds):
        gain = 0.7 if done < 0.75 * rounds else 0.35
        latent = draw_latent(profile, np.full(n_sequences, length), rng)
        at = [_WARM + t for t in _SAMPLED if _WARM + t < length]
        factors = latent.factors.reshape(n_sequences, length, -1)[:, at].reshape(n_sequences * len(at), -1)
        gap = np.tile(np.diff([0, *at]) * (np.arange(len(at)) > 0), n_sequences)
        ids = draw_experts(profile, factors, rng, gap)
        cells = np.zeros((len(ids), profile.n_layers, profile.n_experts), dtype=np.float32)
        np.put_along_axis(cells, ids.astype(np.int64), 1, axis=2)
        drawn_reuse = _reuse(cells.reshape(n_sequences, len(at), profile.n_layers, -1), profile.top_k, lags)
        chosen = cells.reshape(len(ids), -1)
        drawn_share = chosen.mean(axis=0, dtype=np.float64)
        scores = ((chosen - drawn_share.astype(np.float32)) @ targets.vectors).astype(np.float64)
        pull = {0: 1.0}
        for lag in lags:
            # Choices reach beyond the factors, so equal covariances along them do not make equal reuse: aim a little off.
            gap_of = float((targets.reuse[lag] - drawn_reuse[lag]).mean()) * profile.top_k * profile.n_layers
            size = max(float(np.trace(targets.moments[lag])), 1e-9)
            aim[lag] = float(np.clip(aim[lag] + _SUMMED * gain * gap_of / size, 0.3, 2.5))
            pull[lag] = float(np.clip(aim[lag] + _AT_ONCE * gap_of / size, 0.3, 2.5))
        missing = _missing(scores.reshape(n_sequences, len(at), -1), {lag: pull[lag] * moment for lag, moment in targets.moments.items()})
        inverse = response_inverse(factors - factors.mean(axis=0), scores, 0.03)
        wanted = [_at_lag(profile.drift, FACTOR_PERSISTENCE, lag) + gain * inverse.T @ missing[lag] @ inverse for lag in lags]
        within = _within_layers(chosen - drawn_share.astype(np.float32), targets.vectors, profile.n_layers)
        flat = scores - scores.mean(axis=0)
        lacking = _STRENGTH * targets.between - (flat.T @ flat / len(flat) - within)
        # Where classes make the covariance their means move; where the drift does it is turned, and keeps its size: more would blur the classes.
        middle = profile.class_mean - targets.class_share @ profile.class_mean
        of_classes = (middle.T * targets.class_share) @ middle
        class_turn, drift_turn = turns(of_classes, total, gain * inverse.T @ lacking @ inverse)
        turned = drift_turn @ total @ drift_turn.T
        total = turned * (np.trace(total) / max(np.trace(turned), 1e-12))
        drift = drift_covariances([total, *wanted], [0, *lags], [6.0] + [1.0] * len(lags), FACTOR_PERSISTENCE, profile.drift, 40)
        changes: dict[str, Any] = {"drift": drift, "class_mean": profile.class_mean @ class_turn.T}
        if number > 1:
            classes = latent.classes.reshape(n_sequences, length)
            changes |= _class_changes(profile, targets.class_share, classes[:, _WARM:], latent.tilt, scores, missing, at, gain)
        rows = len(ids)
        seen = np.clip((drawn_share * rows + 2 * share) / (rows + 2), 1e-6, 1 - 1e-6)
        if {1, 2} <= set(lags):
            fade = targets.reuse[1] - targets.reuse[2] - drawn_reuse[1] + drawn_reuse[2]
            changes["repeat"] = np.clip(profile.repeat + 5 * gain * fade, 0.0, 0.5)
        correction = np.clip(gain * (np.log(-np.log1p(-share)) - np.log(-np.log1p(-seen))), -1, 1)
        profile = replace(profile, bias=profile.bias + correction.reshape(profile.bias.shape), **changes)
        if done + 1 >= 0.75 * rounds:
            late.append(profile)
        if progress is not None:
            progress("calibration", done + 1, rounds)
    moved = ("bias", "class_step", "class_mean", "class_drift", "drift", "repeat")
    return replace(profile, **{name: np.mean([getattr(each, name) for each in late], axis=0) for name in moved})


def _class_changes(
    profile: LikeProfile,
    class_share: Floats,
    classes: NDArray[np.int64],
    tilt: Floats,
    scores: Floats,
    missing: dict[int, Floats],
    at: Sequence[int],
    gain: float,
) -> dict[str, Floats]:
    """Corrected class weights and drift: every class as frequent as it was, and its persistence what the lagged covariances ask for."""
    number = len(profile.class_share)
    seen = np.bincount(classes.ravel(), minlength=number) / classes.size
    step = np.clip(np.log((class_share + 1e-3) / (seen + 1e-3)), -1, 1)
    n_sequences = len(classes)
    sampled = tilt.reshape(n_sequences, -1, number)[:, list(at)].reshape(len(scores), number)
    inverse = response_inverse(sampled - sampled.mean(axis=0), scores, 0.05)
    lags = [lag for lag in missing if lag]
    drift = profile.class_drift
    if lags:
        wanted = [_at_lag(drift, CLASS_PERSISTENCE, lag) + 0.5 * gain * inverse.T @ missing[lag] @ inverse for lag in lags]
        drift = drift_covariances(wanted, lags, [1.0] * len(lags), CLASS_PERSISTENCE, drift, 30)
        drift = np.stack([_within(part, _TILT) for part in drift])
    return {"class_step": profile.class_step + gain * step, "class_drift": drift}


def _missing(scores: Floats, wanted: dict[int, Floats]) -> dict[int, Floats]:
    """Target less drawn covariance at each lag; (S, P, R) scores of sequences at the sampled rows."""
    out = {}
    for lag, target in wanted.items():
        if lag:
            pairs = [(scores[:, _SAMPLED.index(a)], scores[:, _SAMPLED.index(b)]) for a, b in _PAIRS[lag]]
            found = np.mean([a.T @ b / len(a) for a, b in pairs], axis=0)
        else:
            flat = scores.reshape(-1, scores.shape[2])
            found = flat.T @ flat / len(flat)
        out[lag] = target - (found + found.T) / 2
    return out


def _reuse(chosen: Singles, top_k: int, lags: Sequence[int]) -> dict[int, Floats]:
    """(L,) reuse at each lag; (S, P, L, E) choices of sequences at the sampled rows."""
    out = {}
    for lag in lags:
        pairs = [(chosen[:, _SAMPLED.index(a)], chosen[:, _SAMPLED.index(b)]) for a, b in _PAIRS[lag]]
        out[lag] = np.mean([np.einsum("sle,sle->l", a, b) / (len(a) * top_k) for a, b in pairs], axis=0)
    return out


def _at_lag(stack: Floats, persistence: Sequence[float], lag: int) -> Floats:
    return np.asarray(np.einsum("p,pij->ij", np.array(persistence) ** lag, stack))


def _within(matrix: Floats, most: float = np.inf) -> Floats:
    """The nearest covariance whose variance along any direction is from 0 to ``most``."""
    value, vector = np.linalg.eigh(matrix)
    return np.asarray((vector * np.clip(value, 0, most)) @ vector.T)


def _prefill_shift(trace: RoutingTrace, decode: RoutingTrace) -> Floats:
    """(L, E): log rate in prefill less that in decode; five rows of decode are added to both, so that few rows say little."""
    every = trace.counts().astype(np.float64)
    late = decode.counts().astype(np.float64)
    share = (late + 1 / decode.n_experts) / np.maximum(1, decode.present.sum(axis=0) + 1)[:, None]
    rows = (trace.present.sum(axis=0) - decode.present.sum(axis=0))[:, None]
    early = np.clip((every - late + 5 * share) / (rows + 5), 1e-4, 1 - 1e-4)
    return np.asarray(np.log(-np.log1p(-early)) - np.log(-np.log1p(-np.clip(share, 1e-4, 1 - 1e-4))))


def statistics(trace: RoutingTrace) -> dict[str, float]:
    """The figures that a profile is made for, those of ``trace_stats`` over all rows; without those that a trace is too short for."""
    sizes = {fraction: int(trace.n_experts * fraction) for fraction in FRACTIONS}
    hits = lru_hits(trace, sorted({size for size in sizes.values() if size >= trace.top_k}))
    accesses = int(trace.present.sum()) * trace.top_k
    out = {f"LRU hit rate at {fraction:.1%}": sum(hits[size]) / accesses for fraction, size in sizes.items() if size in hits}
    found = {f"reuse at lag {lag}": reuse(trace, lag)["micro"] for lag in LAGS}
    shares = [top_half_share(row) for row in trace.counts()]
    found["top-half share"] = float(np.mean([share for share in shares if share is not None]))
    for distance in (1, 2, 4):
        if distance < trace.n_layers:
            found[f"co-occurrence recall, distance {distance}"] = prediction_statistics(trace, distance)["cooccurrence"]["recall"]
    return out | {name: float(value) for name, value in found.items() if value is not None}


def _figures(trace: RoutingTrace, source: str) -> tuple[Figure, ...]:
    return tuple(Figure(name, round(value, 4), "measured", source) for name, value in statistics(trace).items())


def decode_part(trace: RoutingTrace) -> RoutingTrace:
    """The decode rows where there are both phases, else all rows: what a profile's figures describe."""
    decode = trace.phase == DECODE
    return trace.decode_rows() if decode.any() and not decode.all() else trace
