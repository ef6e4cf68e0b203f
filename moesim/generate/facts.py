"""Owns routing profiles made of a few published figures, where no trace of a model is at hand.

It must not know where the figures lie. A facts file holds, per layer, the experts' shares by rank, and five numbers that say how rows
depend on each other. ``expand`` turns them into a ``LikeProfile``: random loadings on a few factors that all layers share (one class),

    log rate u = bias + signal * (z . f) / sqrt(R),   z ~ N(0, 1) from the file's seed,   f = drifting factors of total variance 1,

ranks dealt to experts at random, and biases solved so that the mean of 1 - exp(-exp(u)) over f is K times the share of the expert
(Gauss-Hermite quadrature), then corrected by a few draws, because a cell has exactly K places. Which expert is hot, and which experts go together, is invented: only the curves and the figures are facts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.generate.like import draw_experts
from moesim.generate.routing_profile import CLASS_PERSISTENCE, FACTOR_PERSISTENCE, Figure, LikeProfile

FORMAT = "moesim-like-facts v1"
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
_NUMBERS = ("signal", "repeat")
_CORRECTIONS, _CORRECTION_ROWS = 6, 1500


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of a facts file.

    Parameters
    ----------
    model, source : str
        Whose routing it is, and where the figures come from.
    n_layers, top_k, rank, seed : int
        L, K, the factors R, and the seed of what is invented.
    shares : tuple of tuple of float
        Share of a layer's selections by rank, falling, E numbers; one curve for each layer, or fewer: layer l takes curve
        floor(l * curves / L).
    signal, repeat : float
        Strength of the factors; probability that a cell keeps its noise.
    mix : tuple of float
        Variance share of each of FACTOR_PERSISTENCE; they sum to 1.
    figures, notes : tuple
        As in ``LikeProfile``.
    """

    model: str
    source: str
    n_layers: int
    top_k: int
    rank: int
    seed: int
    shares: tuple[tuple[float, ...], ...]
    signal: float
    repeat: float
    mix: tuple[float, ...]
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, most in (("n_layers", 1024), ("top_k", 1024), ("rank", 512), ("seed", 2**31)):
            value = getattr(self, name)
            least = 0 if name == "seed" else 1
            if type(value) is not int or not least <= value <= most:
                raise InputError(name, expected=f"a whole number from {least} to {most}", got=repr(value)[:40])
        if (
            not self.shares
            or not all(len(curve) == len(self.shares[0]) >= self.top_k for curve in self.shares)
            or len(self.shares) > self.n_layers
        ):
            raise InputError("shares", expected=f"1 to {self.n_layers} curves of one length, at least top_k = {self.top_k}", got="others")
        for curve in self.shares:
            if (
                not all(_number(x) and 0 <= x <= 1 for x in curve)
                or abs(sum(curve) - 1) > 0.01
                or list(curve) != sorted(curve, reverse=True)
            ):
                raise InputError("shares", expected="falling shares that sum to 1", got=f"{str(curve)[:60]}")
        if not all(_number(getattr(self, name)) for name in _NUMBERS) or not 0 <= self.repeat < 1 or not 0 <= self.signal <= 50:
            raise InputError(
                "signal, repeat", expected="numbers from 0 to 50, and from 0 to below 1", got=f"{self.signal}, {self.repeat}"[:60]
            )
        good = len(self.mix) == len(FACTOR_PERSISTENCE) and all(_number(x) and x >= 0 for x in self.mix)
        if not good or abs(sum(self.mix) - 1) > 1e-3:
            raise InputError("mix", expected=f"{len(FACTOR_PERSISTENCE)} shares that sum to 1", got=str(self.mix)[:60])

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as the file holds it."""
        figures = [{"name": f.name, "value": f.value, "basis": f.basis, "source": f.source} for f in self.figures]
        own = {name: getattr(self, name) for name in ("model", "source", "n_layers", "top_k", "rank", "seed", *_NUMBERS)}
        tables = {"shares": [list(curve) for curve in self.shares], "mix": list(self.mix), "figures": figures, "notes": list(self.notes)}
        return {"format": FORMAT, **own, **tables}


def parse_facts(data: dict[str, Any], where: str) -> Facts:
    """Make facts of plain data, or raise an InputError at ``where``."""
    kinds = {
        "model": str,
        "source": str,
        "n_layers": int,
        "top_k": int,
        "rank": int,
        "seed": int,
        "shares": list,
        "mix": list,
        "figures": list,
        "notes": list,
    }
    for name, kind in kinds.items():
        if not isinstance(data.get(name), kind):
            raise InputError(name, expected=f"a {kind.__name__}", got=repr(data.get(name))[:60], where=where)
    extra = sorted(set(data) ^ {"format", *kinds, *_NUMBERS})
    if extra:
        raise InputError(extra[0], expected=f"just {', '.join((*kinds, *_NUMBERS))}", got="another set of fields", where=where)
    if not all(isinstance(curve, list) for curve in data["shares"]) or not all(isinstance(note, str) for note in data["notes"]):
        raise InputError("shares, notes", expected="lists of numbers, and texts", got="others", where=where)
    try:
        figures = tuple(Figure(**figure) for figure in data["figures"])
        fields = {name: data[name] for name in kinds if name not in ("shares", "mix", "figures", "notes")} | {
            name: data[name] for name in _NUMBERS
        }
        shares = tuple(tuple(curve) for curve in data["shares"])
        return Facts(**fields, shares=shares, mix=tuple(data["mix"]), figures=figures, notes=tuple(data["notes"]))
    except TypeError as error:
        raise InputError("figures", expected="objects with name, value, basis, source", got=str(error)[:80], where=where) from None
    except InputError as error:
        raise error.at(where) from None


def expand(facts: Facts) -> LikeProfile:
    """Invent what the facts leave open, always the same for one file."""
    n_layers, n_experts, rank = facts.n_layers, len(facts.shares[0]), facts.rank
    rng = np.random.default_rng(facts.seed)
    loadings = facts.signal * rng.standard_normal((n_layers, n_experts, rank)) / math.sqrt(rank)
    curves = np.array(facts.shares)[np.arange(n_layers) * len(facts.shares) // n_layers]
    share = np.stack([rng.permutation(curve) for curve in curves])
    bias = _bias(np.clip(facts.top_k * share, 1e-5, 0.98), np.sqrt((loadings**2).sum(axis=2)))
    profile = LikeProfile(
        model=facts.model,
        source=facts.source,
        top_k=facts.top_k,
        bias=bias,
        loadings=loadings,
        class_share=np.ones(1),
        class_step=np.zeros((1, 1)),
        class_mean=np.zeros((1, rank)),
        class_drift=np.zeros((len(CLASS_PERSISTENCE), 1, 1)),
        drift=np.array(facts.mix)[:, None, None] * np.eye(rank),
        repeat=np.full(n_layers, facts.repeat),
        figures=facts.figures,
        notes=facts.notes,
    )
    for _ in range(_CORRECTIONS):
        factors = rng.standard_normal((_CORRECTION_ROWS, rank))
        ids = draw_experts(profile, factors, rng, np.zeros(_CORRECTION_ROWS, dtype=np.int64)).astype(np.int64)
        keys = ids + np.arange(n_layers)[:, None] * n_experts
        seen = np.bincount(keys.ravel(), minlength=n_layers * n_experts).reshape(n_layers, n_experts) / _CORRECTION_ROWS
        wanted = facts.top_k * share
        profile = replace(profile, bias=profile.bias + facts.signal * 0.5 * np.clip(np.log((wanted + 0.005) / (seen + 0.005)), -1, 1))
    return profile


def _bias(chance: NDArray[np.float64], spread: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log rate whose mean chance of arrival before time 1 is ``chance``, by bisection; all (L, E)."""
    low, high = np.full_like(chance, -200.0), np.full_like(chance, 200.0)
    for _ in range(48):
        middle = (low + high) / 2
        mean = sum(w * -np.expm1(-np.exp(np.minimum(middle + spread * x, 50.0))) for x, w in zip(_NODES, _WEIGHTS, strict=True))
        low, high = np.where(mean < chance, middle, low), np.where(mean < chance, high, middle)
    return np.asarray((low + high) / 2)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
