"""Owns predictors: from a routing trace to the experts that a prefetcher would fetch, as data, before anything runs.

It must not know about pools, time or engines. A prediction is an array (T, L, K), best first, -1 where there is none. The target
is cell (t, m). At distance d its source is layer m - d of the same row, or, where m < d, layer m - d + L of row t - 1 of the same
sequence: prefetch across steps.

Not here: predictors that read hidden states (a router applied one layer early). A trace holds choices only.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError, did_you_mean
from moesim.trace import RoutingTrace

Source = Literal["none", "router", "previous"]


class Predictor(Protocol):
    """Predicts the experts of every cell. ``source`` names the task that yields the prediction: nothing, the router
    ``distance`` layers earlier, or the previous token's router of the same layer."""

    name: str
    source: Source

    def fit(self, train: RoutingTrace) -> None:
        """Learn from a training trace."""

    def predict(self, trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
        """Return (T, L, K) int16: experts predicted for cell (t, m), best first, -1 where there is no prediction."""


class Nothing:
    """Predicts nothing: demand loads alone."""

    name = "none"
    source: Source = "none"

    def fit(self, train: RoutingTrace) -> None:
        pass

    def predict(self, trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
        check_distance(distance, trace.n_layers)
        return np.full(trace.expert_ids.shape, -1, dtype=np.int16)


class Oracle:
    """Predicts the true set: the bound of every predictor."""

    name = "oracle"
    source: Source = "none"

    def fit(self, train: RoutingTrace) -> None:
        pass

    def predict(self, trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
        check_distance(distance, trace.n_layers)
        return trace.expert_ids.copy()


class Popularity:
    """Predicts the K experts of a layer that were chosen most often in training (tie: the smaller id)."""

    name = "popularity"
    source: Source = "none"

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] | None = None

    def fit(self, train: RoutingTrace) -> None:
        self._counts = train.counts()

    def predict(self, trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
        check_distance(distance, trace.n_layers)
        if self._counts is None:
            raise _unfitted(self.name)
        _check_shape(self.name, self._counts.shape, trace)
        best = np.argsort(-self._counts, axis=1, kind="stable")[:, : trace.top_k].astype(np.int16)
        return np.broadcast_to(best, trace.expert_ids.shape).copy()


class Previous:
    """Predicts what the previous token of the sequence chose in the same layer; nothing for a sequence's first row."""

    name = "previous"
    source: Source = "previous"

    def fit(self, train: RoutingTrace) -> None:
        pass

    def predict(self, trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
        check_distance(distance, trace.n_layers)
        return _previous_rows(trace, trace.expert_ids)


class Cooccurrence:
    """Predicts from the choices of the source layer, by how often experts met in training.

    score(x) = sum over e in S(source), ascending, of N[e, x] / max(1, N[e]); N[e, x] counts training cells with e in the source and
    x in the target, N[e] those with e in the source, over cells whose source and target are both present. The K best scores are
    predicted (tie: larger training count in the target layer, then the smaller id).
    """

    name = "cooccurrence"
    source: Source = "router"

    def __init__(self) -> None:
        self._train: RoutingTrace | None = None
        self._tables: dict[int, NDArray[np.int32]] = {}  # distance -> (L, E, E): N of each target layer

    def fit(self, train: RoutingTrace) -> None:
        self._train = train
        self._tables = {}

    def predict(self, trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
        check_distance(distance, trace.n_layers)
        if self._train is None:
            raise _unfitted(self.name)
        _check_shape(self.name, (self._train.n_layers, self._train.n_experts), trace)
        if distance not in self._tables:
            self._tables[distance] = _meetings(self._train, distance)
        popularity = np.argsort(-self._train.counts(), axis=1, kind="stable")
        source = np.sort(source_cells(trace, distance), axis=2)
        out = np.full(trace.expert_ids.shape, -1, dtype=np.int16)
        for layer in range(trace.n_layers):
            met = self._tables[distance][layer]
            # Each present pair has K targets, so a row of N sums to K times N[e].
            share = met / np.maximum(1, met.sum(axis=1) // self._train.top_k)[:, None]
            rows = np.flatnonzero(source[:, layer, 0] >= 0)
            order = popularity[layer]
            # Columns by popularity: the first of equal scores is then the one that the tie rule wants.
            best = _top_scores(share[:, order], source[rows, layer], trace.top_k)
            out[rows, layer] = order[best]
        return out


def _meetings(train: RoutingTrace, distance: int) -> NDArray[np.int32]:
    """(L, E, E) int32: per target layer, training cells with expert e in the source and x in the target."""
    n_experts = train.n_experts
    source = source_cells(train, distance).astype(np.int64)
    tables = np.zeros((train.n_layers, n_experts, n_experts), dtype=np.int32)
    for layer in range(train.n_layers):
        both = (source[:, layer, 0] >= 0) & train.present[:, layer]
        pairs = source[both, layer, :, None] * n_experts + train.expert_ids[both, layer, None, :]
        tables[layer] = np.bincount(pairs.ravel(), minlength=n_experts**2).reshape(n_experts, n_experts)
    return tables


def _top_scores(share: NDArray[np.float64], source: NDArray[np.int16], top_k: int) -> NDArray[np.intp]:
    """Return (n, K) columns of the largest summed shares, the first of equal ones first.

    K passes of argmax, which finds the first maximum, beat a stable sort of all E columns by far.
    """
    best = np.empty((len(source), top_k), dtype=np.intp)
    block = max(1, 2**22 // share.shape[1])  # rows at a time: 32 MB of scores
    for start in range(0, len(source), block):
        part = source[start : start + block]
        score = np.zeros((len(part), share.shape[1]))
        for slot in range(part.shape[1]):  # ascending ids: float sums in the order of the definition
            score += share[part[:, slot]]
        rows = np.arange(len(part))
        for rank in range(top_k):
            top = score.argmax(axis=1)
            best[start : start + block, rank] = top
            score[rows, top] = -1.0
    return best


def source_cells(trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
    """Return (T, L, K) int16: the choices at the source of each target cell, -1 where there is none."""
    check_distance(distance, trace.n_layers)
    out = np.full(trace.expert_ids.shape, -1, dtype=np.int16)
    out[:, distance:] = trace.expert_ids[:, : trace.n_layers - distance]
    out[:, :distance] = _previous_rows(trace, trace.expert_ids[:, trace.n_layers - distance :])
    return out


def _previous_rows(trace: RoutingTrace, cells: NDArray[np.int16]) -> NDArray[np.int16]:
    """Shift cells by one row inside each sequence; -1 in a sequence's first row."""
    out = np.full(cells.shape, -1, dtype=np.int16)
    if trace.n_rows:
        same = np.flatnonzero(trace.seq_id[1:] == trace.seq_id[:-1]) + 1
        out[same] = cells[same - 1]
    return out


def check_distance(distance: int, n_layers: int) -> None:
    """Refuse a prefetch distance outside 1 .. L."""
    if not 1 <= distance <= n_layers:
        raise InputError("prefetch distance", expected=f"1 to {n_layers} layers", got=str(distance), fix="at most one whole step ahead")


def _unfitted(name: str) -> InputError:
    return InputError(f"predictor {name}", expected="a training trace before the first prediction", got="none", fix="call fit first")


def _check_shape(name: str, trained: tuple[Any, ...], trace: RoutingTrace) -> None:
    if trained != (trace.n_layers, trace.n_experts):
        got = f"{trace.n_layers} layers of {trace.n_experts}"
        raise InputError(f"predictor {name}", expected=f"{trained[0]} layers of {trained[1]} experts, as trained", got=got)


PREDICTORS: dict[str, type[Any]] = {kind.name: kind for kind in (Nothing, Oracle, Popularity, Previous, Cooccurrence)}


def make_predictor(name: str) -> Predictor:
    """Build a predictor by its name, a key of ``PREDICTORS``; an unknown one is an InputError."""
    if name not in PREDICTORS:
        raise InputError("predictor", expected="a known name", got=f'"{name}"', fix=did_you_mean(name, PREDICTORS))
    predictor: Predictor = PREDICTORS[name]()
    return predictor


def source_of(name: str) -> Source:
    """Tell which task yields a predictor's output: ``none``, ``router`` (at the source layer) or ``previous`` (token's router)."""
    return make_predictor(name).source
