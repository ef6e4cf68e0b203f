"""Owns the predictors' contract, their source cells, and the predictors that need no model of the routing.

It must not know about pools, time or engines. A prediction is an array (T, L, K), best first, -1 where there is none. The target
is cell (t, m). At distance d its source is layer m - d of the same row, or, where m < d, layer m - d + L of row t - 1 of the same
sequence: prefetch across steps.

Every predictor states a confidence in [0, 1] for each expert that it predicts: its estimate of the share of such predictions that
come true. With a threshold above 0 those below it are left out (-1, at the end), so that a cell has fewer than K predictions, and
fewer bytes are read in vain.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import RoutingTrace

Source = Literal["none", "router", "previous", "both"]
Ranking = tuple[NDArray[np.int16], NDArray[np.float32]]  # (T, L, K) experts, best first; their confidence


class Predictor(Protocol):
    """Predicts the experts of every cell. ``source`` names the task that yields the prediction: nothing, the router
    ``distance`` layers earlier, the previous token's router of the same layer, or both of these."""

    name: str
    source: Source
    compiled: bool

    def fit(self, train: RoutingTrace) -> None:
        """Learn from a training trace."""

    def predict(self, trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
        """Return (T, L, K) int16: experts predicted for cell (t, m), best first, -1 where there is no prediction."""


class Ranked(ABC):
    """Base of predictors: ``_rank`` gives K experts a cell with their confidence, ``predict`` leaves out the doubtful ones.

    Parameters
    ----------
    threshold : float
        Least confidence of a prediction, in [0, 1]; 0 leaves nothing out.

    Attributes
    ----------
    compiled : bool
        Use compiled loops for short traces too: set where compiled code is loaded anyway. The predictions are the same.
    """

    name = ""
    source: Source = "none"
    compiled = False

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = _share("threshold", threshold)

    def fit(self, train: RoutingTrace) -> None:  # noqa: B027 (most learn nothing)
        """Most predictors learn nothing here."""

    def predict(self, trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
        check_distance(distance, trace.n_layers)
        experts, confidence = self._rank(trace, distance)
        if self.threshold > 0:
            experts[confidence < self.threshold] = -1
            experts = np.take_along_axis(experts, np.argsort(experts < 0, axis=2, kind="stable"), axis=2)
        return experts

    @abstractmethod
    def _rank(self, trace: RoutingTrace, distance: int) -> Ranking:
        """Return the K likeliest experts of each cell, best first (-1: none), and their confidence; both (T, L, K)."""


class Nothing(Ranked):
    """Predicts nothing: demand loads alone."""

    name = "none"

    def _rank(self, trace: RoutingTrace, distance: int) -> Ranking:
        return np.full(trace.expert_ids.shape, -1, dtype=np.int16), np.zeros(trace.expert_ids.shape, dtype=np.float32)


class Oracle(Ranked):
    """Predicts the true set, with confidence 1: the bound of every predictor."""

    name = "oracle"

    def _rank(self, trace: RoutingTrace, distance: int) -> Ranking:
        return trace.expert_ids.copy(), np.ones(trace.expert_ids.shape, dtype=np.float32)


class Popularity(Ranked):
    """Predicts the K experts of a layer that were chosen most often in training (tie: the smaller id).

    Confidence: the share of the layer's training cells that chose the expert.
    """

    name = "popularity"

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__(threshold)
        self._share: NDArray[np.float64] | None = None

    def fit(self, train: RoutingTrace) -> None:
        self._share = popularity(train)

    def _rank(self, trace: RoutingTrace, distance: int) -> Ranking:
        if self._share is None:
            raise unfitted(self.name)
        check_shape(self.name, self._share.shape, trace)
        best = np.argsort(-self._share, axis=1, kind="stable")[:, : trace.top_k]
        confidence = np.take_along_axis(self._share, best, axis=1).astype(np.float32)
        shape = trace.expert_ids.shape
        return np.broadcast_to(best.astype(np.int16), shape).copy(), np.broadcast_to(confidence, shape)


class Previous(Ranked):
    """Predicts what the previous token of the sequence chose in the same layer; nothing for a sequence's first row.

    Confidence: the share of training cells whose choice in that slot is in the next token's set, by layer and slot. Only a threshold
    above 0 asks for training.
    """

    name = "previous"
    source: Source = "previous"

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__(threshold)
        self._stays: NDArray[np.float32] | None = None

    def fit(self, train: RoutingTrace) -> None:
        before = previous_rows(train, train.expert_ids)
        both = (before[:, :, 0] >= 0) & train.present
        self._stays = np.zeros((train.n_layers, train.top_k), dtype=np.float32)
        for layer in range(train.n_layers):
            old, new = before[both[:, layer], layer], train.expert_ids[both[:, layer], layer]
            stays = np.zeros(old.shape, np.bool_)
            for slot in range(new.shape[1]):
                stays |= old == new[:, slot, None]
            self._stays[layer] = stays.sum(axis=0) / max(1, len(old))

    def _rank(self, trace: RoutingTrace, distance: int) -> Ranking:
        experts = previous_rows(trace, trace.expert_ids)
        if self._stays is None:
            if self.threshold > 0:
                raise unfitted(self.name)
            return experts, np.zeros(experts.shape, dtype=np.float32)
        check_shape(self.name, (len(self._stays), trace.n_experts), trace)
        return experts, np.broadcast_to(self._stays, experts.shape)


# Recall of the gate applied to an earlier layer's hidden state, one layer ahead, by model. Qwen: BigMoeOnEdge, expert-prediction and
# route-ahead notes (share of routed slots); GLM-5.2: JustVugg/colibri README; the last: DimitriChrysafis/moe-prefetch, a 512-expert
# model, untrained, recall at 10. Collected in shared/traces/PUBLISHED.md.
GATE_RECALL = {"qwen3-30b-a3b": 0.886, "qwen3.6-35b-a3b": 0.807, "glm-5.2": 0.716, "512 experts": 0.634}
# Each further layer costs Qwen 3.5 to 4 points (the same notes).
GATE_LOSS = 0.0375


class GateLookahead(Ranked):
    """A gate applied to the hidden state of an earlier layer, as a stated recall: a trace holds choices, not hidden states.

    Takes the true set and replaces each member, on its own, with probability 1 - recall(d) by an expert from outside the set, drawn
    by the training popularity of the target layer (each use counted once more, so that none has probability 0) without repeats;
    recall(d) = max(0, recall - loss x (d - 1)). The replacement takes the member's slot. Where fewer experts are outside the set than
    are to be replaced, the last slots keep their members and the recall is higher. Draws depend on the seed, the distance and the
    shape of the trace alone. No prediction where there is no source cell.

    Confidence: recall(d), for every slot alike; a threshold above it switches this distance off.

    Parameters
    ----------
    threshold : float
    recall : float
        Share of members that are predicted one layer ahead; see ``GATE_RECALL``.
    loss : float
        What each further layer costs.
    seed : int
    """

    name = "gate-lookahead"
    source: Source = "router"

    def __init__(
        self, threshold: float = 0.0, recall: float = GATE_RECALL["qwen3-30b-a3b"], loss: float = GATE_LOSS, seed: int = 0
    ) -> None:
        super().__init__(threshold)
        self.recall, self.loss, self.seed = _share("recall", recall), _share("loss", loss), seed
        self._counts: NDArray[np.int64] | None = None

    def fit(self, train: RoutingTrace) -> None:
        self._counts = train.counts()

    def recall_at(self, distance: int) -> float:
        """Return the recall that is stated for a distance in layers."""
        return max(0.0, self.recall - self.loss * (distance - 1))

    def _rank(self, trace: RoutingTrace, distance: int) -> Ranking:
        if self._counts is None:
            raise unfitted(self.name)
        check_shape(self.name, self._counts.shape, trace)
        recall = self.recall_at(distance)
        known = source_cells(trace, distance)[:, :, 0] >= 0
        experts = np.where(known[:, :, None], trace.expert_ids, np.int16(-1))
        rng = np.random.default_rng([self.seed, distance])
        block = max(1, 2**22 // trace.n_experts)
        for layer in range(trace.n_layers):
            weight = np.log(self._counts[layer] + 1.0)
            for start in range(0, trace.n_rows, block):
                cells = experts[start : start + block, layer]  # a view
                wrong = rng.random(cells.shape) >= recall
                # The largest of log weight + Gumbel noise are a draw without repeats (Efraimidis and Spirakis 2006, as Gumbel top-k).
                order = weight + rng.gumbel(size=(len(cells), trace.n_experts))
                _replace(cells, wrong & (cells >= 0), order)
        return experts, np.full(experts.shape, recall, dtype=np.float32)


def _replace(cells: NDArray[np.int16], wrong: NDArray[np.bool_], order: NDArray[np.float64]) -> None:
    """Put the best outsiders of each row, by ``order`` (n, E), into its wrong slots (n, K), in place."""
    rows = np.flatnonzero(wrong.any(axis=1))
    if not rows.size:
        return
    order = order[rows]
    np.put_along_axis(order, cells[rows].astype(np.intp), -np.inf, axis=1)
    most = min(cells.shape[1], order.shape[1] - cells.shape[1])
    if most == 0:
        return
    outsiders = np.argsort(-order, axis=1)[:, :most]
    rank = np.cumsum(wrong[rows], axis=1) - 1  # which outsider a wrong slot gets
    change = wrong[rows] & (rank < most)
    drawn = np.take_along_axis(outsiders, np.clip(rank, 0, most - 1), axis=1)
    cells[rows] = np.where(change, drawn, cells[rows])


def popularity(trace: RoutingTrace) -> NDArray[np.float64]:
    """Return (L, E) float64: share of each layer's recorded cells that chose each expert."""
    shares: NDArray[np.float64] = trace.counts() / np.maximum(1, trace.present.sum(axis=0))[:, None]
    return shares


def source_cells(trace: RoutingTrace, distance: int) -> NDArray[np.int16]:
    """Return (T, L, K) int16: the choices at the source of each target cell, -1 where there is none."""
    check_distance(distance, trace.n_layers)
    out = np.full(trace.expert_ids.shape, -1, dtype=np.int16)
    out[:, distance:] = trace.expert_ids[:, : trace.n_layers - distance]
    out[:, :distance] = previous_rows(trace, trace.expert_ids[:, trace.n_layers - distance :])
    return out


def previous_rows(trace: RoutingTrace, cells: NDArray[np.int16]) -> NDArray[np.int16]:
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


def check_shape(name: str, trained: tuple[Any, ...], trace: RoutingTrace) -> None:
    """Refuse a trace of other layers or experts than those of the training."""
    if trained != (trace.n_layers, trace.n_experts):
        got = f"{trace.n_layers} layers of {trace.n_experts}"
        raise InputError(f"predictor {name}", expected=f"{trained[0]} layers of {trained[1]} experts, as trained", got=got)


def unfitted(name: str) -> InputError:
    """Return the error of a prediction before any training."""
    return InputError(f"predictor {name}", expected="a training trace before the first prediction", got="none", fix="call fit first")


def _share(what: str, value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise InputError(f"predictor {what}", expected="a number from 0 to 1", got=str(value))
    return value
