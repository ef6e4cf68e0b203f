"""Owns predictors that learn, in the training part, how a cell follows from the cells before it.

They go by two cells: the source (``distance`` layers earlier) and the previous token's cell in the target layer. A score is computed
for each of the E experts of the target layer; the K largest are predicted (tie: larger training count, then the smaller id). Where
there is no source cell there is no prediction. Weights are learned for each target layer and distance, in closed form, and rounded to
2**-20: a machine that adds in another order then makes the same predictions.

The previous token's cell is known when the source's router has run only if the two tokens are in different steps. Inside a chunk of a
prompt it is not: the planner must not use a prediction of ``source`` "both" there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.policies.predictors import Ranked, Ranking, Source, check_shape, popularity, previous_rows, source_cells, unfitted
from moesim.trace import RoutingTrace

BLOCK = 2**22  # scores at a time: 32 MB
MANY = 2**23  # scores, or meetings, from which on compiled loops (predict_kernel.py) are worth loading: they take NumPy half a second


class _Learned(Ranked):
    """Base: learns once a distance (``_learn``), scores blocks of cells (``_scores``), takes the best."""

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__(threshold)
        self._train: RoutingTrace | None = None
        self._learned: dict[int, Any] = {}

    def fit(self, train: RoutingTrace) -> None:
        self._train = train
        self._learned = {}

    def _rank(self, trace: RoutingTrace, distance: int) -> Ranking:
        train = self._train
        if train is None:
            raise unfitted(self.name)
        check_shape(self.name, (train.n_layers, train.n_experts), trace)
        if distance not in self._learned:
            self._learned[distance] = self._learn(train, distance)
        order = np.argsort(-train.counts(), axis=1, kind="stable")
        source = np.sort(source_cells(trace, distance), axis=2)
        before = previous_rows(trace, trace.expert_ids) if self.source == "both" else source  # who goes by the router alone reads none
        experts = np.full(trace.expert_ids.shape, -1, dtype=np.int16)
        confidence = np.zeros(experts.shape, dtype=np.float32)
        for layer in range(trace.n_layers):
            # Columns by popularity: the first of equal scores is then the one that the tie rule wants.
            given = self._learned[distance], layer, source[:, layer], before[:, layer]
            self._likeliest(given, order[layer], experts[:, layer], confidence[:, layer])
        return experts, confidence

    @abstractmethod
    def _learn(self, train: RoutingTrace, distance: int) -> Any:
        """Return what is to be remembered of the training part for one distance."""

    @abstractmethod
    def _scores(self, learned: Any, layer: int, source: NDArray[np.int16], before: NDArray[np.int16]) -> NDArray[np.float64]:
        """Return (n, E) float64 from (n, K) source cells, all present, and (n, K) previous cells, -1 where absent."""

    def _likeliest(
        self, given: tuple[Any, ...], order: NDArray[np.intp], experts: NDArray[np.int16], confidence: NDArray[np.float32]
    ) -> None:
        """Fill in one layer's (T, K) likeliest experts and their confidence where there is a source; ``given`` is what ``_scores`` takes."""
        learned, layer, source, before = given
        for rows in _blocks(np.flatnonzero(source[:, 0] >= 0), len(order)):
            best, value = _best(self._scores(learned, layer, source[rows], before[rows])[:, order], source.shape[1])
            experts[rows] = order[best]
            confidence[rows] = self._confidence(value)

    def _confidence(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the confidence of (n, K) scores."""
        return np.minimum(np.maximum(scores, 0.0), 1.0)


class _Sums(_Learned):
    """Base of predictors whose score is a sum of table rows; compiled for long traces."""

    @abstractmethod
    def _summed(
        self, learned: Any, layer: int, source: NDArray[np.int16], before: NDArray[np.int16]
    ) -> tuple[NDArray[np.float64], NDArray[Any]]:
        """Return a table (rows, E) and the rows (n, slots) of it whose sums are the scores."""

    def _scores(self, learned: Any, layer: int, source: NDArray[np.int16], before: NDArray[np.int16]) -> NDArray[np.float64]:
        return _sum_of_rows(*self._summed(learned, layer, source, before))

    def _likeliest(
        self, given: tuple[Any, ...], order: NDArray[np.intp], experts: NDArray[np.int16], confidence: NDArray[np.float32]
    ) -> None:
        if not self.compiled and len(experts) * len(order) * given[0].shape[0] < MANY:
            super()._likeliest(given, order, experts, confidence)
            return
        table, cells = self._summed(*given)
        value = np.zeros(experts.shape)
        best_sums = import_module("moesim.policies.predict_kernel").best_sums
        best_sums(table.take(order, axis=1), cells, order, np.empty(len(order)), experts, value)
        confidence[:] = self._confidence(value)


class Cooccurrence(_Sums):
    """Predicts from the source alone, by how often experts met in training.

    score(x) = sum over e in S(source), ascending, of N[e, x] / max(1, N[e]); N[e, x] counts training cells with e in the source and
    x in the target, N[e] those with e in the source, over cells whose source and target are both present.

    Confidence: score / K, the mean over the source's experts of the share of their cells that chose x.
    """

    name = "cooccurrence"
    source: Source = "router"

    def _learn(self, train: RoutingTrace, distance: int) -> Any:
        return _met_shares(train, distance, self.compiled)

    def _summed(
        self, learned: Any, layer: int, source: NDArray[np.int16], before: NDArray[np.int16]
    ) -> tuple[NDArray[np.float64], NDArray[Any]]:
        return learned[layer], source

    def _confidence(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        mean: NDArray[np.float64] = scores / scores.shape[1]
        return mean


class Linear(_Sums):
    """Predicts by ridge regression on who was chosen in the source and by the previous token in the target layer, one expert at a time.

    score(x) = b[x] + sum over e in S(source) of A[e, x] + sum over e in S(previous) of B[e, x] (or c[x] where there is no previous
    token), with A, B, b, c that minimise the squared error of score against "x was chosen" over the training cells plus ridge x the
    sum of their squares (Hoerl and Kennard 1970, "Ridge regression", Technometrics 12(1)).

    Confidence: the score, cut to [0, 1]: a linear model of the probability that x is chosen.

    Parameters
    ----------
    threshold : float
    ridge : float
        Weight of the penalty, in training cells.
    """

    name = "linear"
    source: Source = "both"

    def __init__(self, threshold: float = 0.0, ridge: float = 10.0) -> None:
        super().__init__(threshold)
        if not (np.isfinite(ridge) and ridge > 0):
            raise InputError("predictor ridge", expected="a finite number above 0", got=str(ridge))
        self.ridge = ridge

    def _learn(self, train: RoutingTrace, distance: int) -> Any:
        n_experts = train.n_experts
        size = 2 * n_experts + 2
        source, before = source_cells(train, distance), previous_rows(train, train.expert_ids)
        weights = np.zeros((train.n_layers, size + 1, n_experts))
        for layer in range(train.n_layers):
            square, product = np.zeros((size + 1, size + 1)), np.zeros((size + 1, n_experts))
            for rows in _blocks(np.flatnonzero((source[:, layer, 0] >= 0) & train.present[:, layer]), 4 * train.top_k**2):
                x = _inputs(source[rows, layer], before[rows, layer], n_experts)
                square += _meetings(x, x, square.shape, self.compiled)
                product += _meetings(x, train.expert_ids[rows, layer], product.shape, self.compiled)
            weights[layer, :size] = np.linalg.solve(square[:size, :size] + self.ridge * np.eye(size), product[:size])
        return _rounded(weights)

    def _summed(
        self, learned: Any, layer: int, source: NDArray[np.int16], before: NDArray[np.int16]
    ) -> tuple[NDArray[np.float64], NDArray[Any]]:
        return learned[layer], _inputs(source, before, learned.shape[2])


class TwoStep(_Learned):
    """Predicts by co-occurrence first, then weighs that with popularity and the previous token's set.

    score(x) = w0 + w1 cooccurrence(x) + w2 popularity(x) + w3 [x in S(previous)] + w4 popularity(x) [no previous token], weights by
    least squares against "x was chosen". The weights of a layer are learned on the last quarter of the training rows with tables of the
    first three quarters, so that they know what a table is worth on rows that it has not seen; the tables are then made of all training rows.

    Confidence: the score, cut to [0, 1].
    """

    name = "two-step"
    source: Source = "both"

    def _learn(self, train: RoutingTrace, distance: int) -> Any:
        border = train.n_rows * 3 // 4
        first, last = (train.slice_rows(0, border), train.slice_rows(border, train.n_rows)) if border else (train, train)
        weights = self._weights(last, distance, _met_shares(first, distance, self.compiled), popularity(first))
        return weights, _met_shares(train, distance, self.compiled), popularity(train)

    def _weights(self, part: RoutingTrace, distance: int, met: NDArray[np.float64], popular: NDArray[np.float64]) -> NDArray[np.float64]:
        source, before = source_cells(part, distance), previous_rows(part, part.expert_ids)
        weights = np.zeros((part.n_layers, 5))
        for layer in range(part.n_layers):
            square, product = 1e-3 * np.eye(5), np.zeros(5)  # the diagonal decides where features do not vary
            for rows in _blocks(np.flatnonzero((source[:, layer, 0] >= 0) & part.present[:, layer]), 5 * part.n_experts):
                x = self._features(met[layer], popular[layer], source[rows, layer], before[rows, layer])
                y = _members(part.expert_ids[rows, layer], part.n_experts)
                square += np.tensordot(x, x, axes=([1, 2], [1, 2]))
                product += np.tensordot(x, y, axes=([1, 2], [0, 1]))
            weights[layer] = np.linalg.solve(square, product)
        return _rounded(weights)

    def _features(
        self, met: NDArray[np.float64], popular: NDArray[np.float64], source: NDArray[np.int16], before: NDArray[np.int16]
    ) -> NDArray[np.float64]:
        """Return (5, n, E)."""
        x = np.ones((5, len(source), len(popular)))
        x[1] = _sum_of_rows(met, np.sort(source, axis=1)) / source.shape[1]
        x[2] = popular
        x[3] = _members(before, len(popular))
        x[4] = popular * (before[:, :1] < 0)
        return x

    def _scores(self, learned: Any, layer: int, source: NDArray[np.int16], before: NDArray[np.int16]) -> NDArray[np.float64]:
        weights, met, popular = learned
        scores = np.zeros((len(source), met.shape[1]))
        for weight, feature in zip(weights[layer], self._features(met[layer], popular[layer], source, before), strict=True):
            scores += weight * feature
        return scores


def _met_shares(train: RoutingTrace, distance: int, compiled: bool = False) -> NDArray[np.float64]:
    """(L, E, E) float64: of the training cells with expert e in the source, the share that has x in the target."""
    n_experts = train.n_experts
    source = source_cells(train, distance)
    shares = np.zeros((train.n_layers, n_experts, n_experts))
    for layer in range(train.n_layers):
        met = _meetings(source[:, layer], train.expert_ids[:, layer], (n_experts, n_experts), compiled)
        # Each present pair has K targets, so a row of N sums to K times N[e].
        shares[layer] = met / np.maximum(1, met.sum(axis=1) // train.top_k)[:, None]
    return shares


def _sum_of_rows(table: NDArray[np.float64], cells: NDArray[Any]) -> NDArray[np.float64]:
    """(n, E): sums of the rows of ``table`` (rows, E) that ``cells`` (n, slots) name; slot by slot, the order of the definition."""
    scores = np.zeros((len(cells), table.shape[1]))
    for slot in range(cells.shape[1]):
        scores += table[cells[:, slot]]
    return scores


def _members(cells: NDArray[np.int16], n_experts: int) -> NDArray[np.float64]:
    """(n, E) float64: 1 where an expert is in the (n, K) cell."""
    out = np.zeros((len(cells), n_experts + 1))
    np.put_along_axis(out, cells.astype(np.intp), 1.0, axis=1)  # -1, absent, falls into the last column
    return out[:, :n_experts]


def _inputs(source: NDArray[np.int16], before: NDArray[np.int16], n_experts: int) -> NDArray[np.int64]:
    """(n, 2K + 1) inputs that are 1: source's experts from 0, previous token's from E, 2E no previous token, 2E + 1 always; 2E + 2 is none."""
    out = np.full((len(source), source.shape[1] + before.shape[1] + 1), 2 * n_experts + 2, dtype=np.int64)
    out[:, : source.shape[1]] = source
    known = before[:, 0] >= 0
    out[known, source.shape[1] : -1] = before[known] + np.int64(n_experts)
    out[~known, source.shape[1]] = 2 * n_experts
    out[:, -1] = 2 * n_experts + 1
    return out


def _meetings(a: NDArray[Any], b: NDArray[Any], shape: tuple[int, int], compiled: bool = False) -> NDArray[np.int64]:
    """``shape`` int64: rows in which i is in ``a`` (n, A) and x in ``b`` (n, B), rows that begin with -1 in either left out; an index of
    ``a`` that repeats counts as often."""
    if compiled or a.size * b.shape[1] >= MANY // 128:  # a share of what all layers come to
        counts = np.zeros(shape, np.int64)
        import_module("moesim.policies.predict_kernel").meetings(a, b, counts)
        return counts
    both = (a[:, 0] >= 0) & (b[:, 0] >= 0)
    pairs = a[both, :, None] * np.int64(shape[1]) + b[both, None, :]
    return np.bincount(pairs.ravel(), minlength=shape[0] * shape[1]).reshape(shape)


def _best(scores: NDArray[np.float64], top_k: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return (n, K) columns of the largest scores, the first of equal ones first, and the scores; ``scores`` is spoilt.

    K passes of argmax, which finds the first maximum, beat a stable sort of all E columns by far.
    """
    rows = np.arange(len(scores))
    best = np.empty((len(scores), top_k), dtype=np.intp)
    value = np.empty((len(scores), top_k))
    for rank in range(top_k):
        top = scores.argmax(axis=1)
        best[:, rank], value[:, rank] = top, scores[rows, top]
        scores[rows, top] = -np.inf
    return best, value


def _blocks(rows: NDArray[np.intp], width: int) -> Iterator[NDArray[np.intp]]:
    step = max(1, BLOCK // width)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _rounded(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    rounded: NDArray[np.float64] = np.round(weights * 2**20) / 2**20
    return rounded
