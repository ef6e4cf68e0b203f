"""Owns fitted routing profiles: the numbers from which ``generate_like`` draws routing, and their JSON file.

It must not know how the numbers were found (``fit_like``, ``profile_facts``) nor how they are drawn from. A profile holds derived
figures only; no row of a trace can be read back from it. In the file an array is a list of whole numbers in a stated unit, so a
profile of 24 layers x 32 experts takes about 200 KB. Counts without order are another thing: ``profile.RoutingProfile``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError

FORMAT = "moesim-like v1"
MAX_FILE_BYTES = 64 * 2**20  # 61 layers x 256 experts at rank 48 take 3 MB
# Correlation of one row with the next, of each part of the latent process; 1 = constant over the sequence, 0 = new in each row.
FACTOR_PERSISTENCE = (1.0, 0.97, 0.8, 0.45, 0.0)
CLASS_PERSISTENCE = (1.0, 0.97, 0.8)
BASES = ("measured", "published", "assumed")
_UNITS = {
    "bias": 1e-3,
    "loadings": 1e-2,
    "class_share": 1e-5,
    "class_step": 1e-2,
    "class_mean": 1e-2,
    "class_drift": 1e-3,
    "drift": 1e-4,
    "repeat": 1e-3,
    "prefill_shift": 1e-2,
}
_MOST = 1_000  # above any logit or variance that a fit can give: a larger value is damage


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a profile stands on.

    Parameters
    ----------
    name : str
        What it is, e.g. ``"reuse at lag 1"``.
    value : float
        In the unit that the name implies; shares are between 0 and 1.
    basis : str
        ``measured`` (by moesim, from a trace or counts), ``published`` or ``assumed``.
    source : str
        Where it comes from.
    """

    name: str
    value: float
    basis: str
    source: str

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise InputError("figures.basis", expected=" or ".join(BASES), got=repr(self.basis)[:40])
        if not _number(self.value):
            raise InputError("figures.value", expected="a finite number", got=repr(self.value)[:40])
        if not (isinstance(self.name, str) and self.name and isinstance(self.source, str) and self.source):
            raise InputError("figures", expected="a name and a source", got=f"{self.name!r}, {self.source!r}"[:80])


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class LikeProfile:
    """What a generator needs to route like a model; immutable, compared by content. R factors, M token classes.

    Parameters
    ----------
    model, source : str
        Whose routing it is, and where the figures come from.
    top_k : int
        Experts per cell K.
    bias : (L, E) float64
        Log rate of each expert.
    loadings : (L, E, R) float64
        How the factors of a token change the log rates.
    class_share : (M,) float64
        Probability of each token class at the start of a sequence; sums to 1.
    class_step : (M, M) float64
        Log weight of the next class, given the present one.
    class_mean : (M, R) float64
        Mean of the factors in each class.
    class_drift : (3, M, M) float64
        Covariance of the slow tilts of the classes' log weights, one for each of CLASS_PERSISTENCE.
    drift : (5, R, R) float64
        Covariance of the factors around their class mean, one for each of FACTOR_PERSISTENCE.
    repeat : (L,) float64
        Probability that a cell keeps the noise of the row before; below 1.
    prefill_shift : (L, E) float64, optional
        Added to ``bias`` in prefill rows; None: prefill is not known, and drawn like decode.
    figures : tuple of Figure
        The numbers behind it, each with basis and source.
    notes : tuple of str
        What is not known or assumed.

    Raises
    ------
    InputError
        If a shape or value is impossible.
    """

    model: str
    source: str
    top_k: int
    bias: NDArray[np.float64]
    loadings: NDArray[np.float64]
    class_share: NDArray[np.float64]
    class_step: NDArray[np.float64]
    class_mean: NDArray[np.float64]
    class_drift: NDArray[np.float64]
    drift: NDArray[np.float64]
    repeat: NDArray[np.float64]
    prefill_shift: NDArray[np.float64] | None = None
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if np.ndim(self.bias) != 2 or np.ndim(self.loadings) != 3 or np.ndim(self.class_share) != 1:
            raise InputError("bias, loadings, class_share", expected="2, 3 and 1 axes", got="other shapes")
        (layers, experts), rank, classes = self.bias.shape, self.loadings.shape[2], len(self.class_share)
        shapes: dict[str, tuple[int, ...]] = {
            "bias": (layers, experts),
            "loadings": (layers, experts, rank),
            "class_share": (classes,),
            "class_step": (classes, classes),
            "class_mean": (classes, rank),
            "class_drift": (len(CLASS_PERSISTENCE), classes, classes),
            "drift": (len(FACTOR_PERSISTENCE), rank, rank),
            "repeat": (layers,),
            "prefill_shift": (layers, experts),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value is None and name == "prefill_shift":
                continue
            array = np.array(value, dtype=np.float64)
            if array.shape != shape or not array.size:
                raise InputError(name, expected=f"shape {shape}, not empty", got=f"shape {array.shape}")
            if not (np.abs(array) < _MOST).all():  # False for NaN
                raise InputError(name, expected=f"finite numbers below {_MOST}", got="others")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or not 1 <= self.top_k <= experts < 2**15:
            raise InputError("top_k", expected=f"1 to the {experts} experts of a layer, and those below 2**15", got=str(self.top_k))
        if (self.class_share < 0).any() or abs(self.class_share.sum() - 1) > 1e-3:
            raise InputError("class_share", expected="shares that sum to 1", got=f"a sum of {self.class_share.sum():.4g}")
        if (self.repeat < 0).any() or (self.repeat > 0.999).any():
            raise InputError("repeat", expected="probabilities from 0 to 0.999", got=f"{self.repeat.min():.4g} to {self.repeat.max():.4g}")
        for name in ("class_drift", "drift"):
            _check_covariances(name, getattr(self, name))

    @property
    def n_layers(self) -> int:
        """Number of MoE layers L."""
        return int(self.bias.shape[0])

    @property
    def n_experts(self) -> int:
        """Number of experts E per layer."""
        return int(self.bias.shape[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LikeProfile) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.model, self.source, self.bias.tobytes()))

    def __repr__(self) -> str:
        shape = f"L={self.n_layers}, E={self.n_experts}, K={self.top_k}"
        return f"LikeProfile({self.model}, {shape}, {self.loadings.shape[2]} factors, {len(self.class_share)} token classes)"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as ``save_like`` writes it; arrays are rounded to their unit."""
        arrays = {}
        for name, unit in _UNITS.items():
            value = getattr(self, name)
            if value is not None:
                whole = np.rint(value / unit).astype(np.int64)
                arrays[name] = {"unit": unit, "shape": list(whole.shape), "values": whole.ravel().tolist()}
        figures = [{field.name: getattr(figure, field.name) for field in fields(Figure)} for figure in self.figures]
        return {
            "format": FORMAT,
            "model": self.model,
            "source": self.source,
            "top_k": self.top_k,
            "figures": figures,
            "notes": list(self.notes),
            "arrays": arrays,
        }

    def rounded(self) -> LikeProfile:
        """Return the profile as a file would give it back, so that both draw the same trace."""
        return parse_like(self.as_dict(), self.model)


def _check_covariances(name: str, stack: NDArray[np.float64]) -> None:
    if np.abs(stack - stack.transpose(0, 2, 1)).max() > 1e-9:
        raise InputError(name, expected="symmetric covariances", got="others")
    size = stack.shape[1]
    lowest, highest = np.linalg.eigvalsh(stack)[:, 0].min(), np.abs(stack).max()
    if lowest < -(_UNITS[name] * size + 1e-6 * highest):  # what rounding can do
        raise InputError(name, expected="covariances without negative directions", got=f"an eigenvalue of {lowest:.3g}")


def save_like(profile: LikeProfile, path: str | Path) -> None:
    """Save a profile as JSON; ``like_profiles.read_like`` gives ``profile.rounded()``."""
    try:
        Path(path).write_text(json.dumps(profile.as_dict(), separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError("profile", expected="a writable file", got=error.strerror or str(error), where=str(path)) from None


def parse_like(data: Any, where: str) -> LikeProfile:
    """Make a profile of the plain data of ``as_dict``, or raise an InputError at ``where``."""
    try:
        return _parse(data)
    except InputError as error:
        raise error.at(where) from None


def _parse(data: Any) -> LikeProfile:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else data
        fix = (
            "make one with: moesim trace fit"
            if not isinstance(got, str) or "profile" not in got
            else "counts without order: use trace.counts"
        )
        raise InputError("format", expected=f'"{FORMAT}"', got=repr(got)[:80], fix=fix)
    kinds = {"model": str, "source": str, "top_k": int, "figures": list, "notes": list, "arrays": dict}
    for name, kind in kinds.items():
        if not isinstance(data.get(name), kind):
            raise InputError(name, expected=f"a {kind.__name__}", got=repr(data.get(name))[:80])
    extra = sorted(set(data) - {"format", *kinds})
    if extra:
        raise InputError(extra[0], expected="no such field", got="one")
    unknown = sorted(set(data["arrays"]) - set(_UNITS))
    if unknown:
        raise InputError(f"arrays.{unknown[0]}", expected=f"only {', '.join(_UNITS)}", got="another")
    missing = [name for name in _UNITS if name not in data["arrays"] and name != "prefill_shift"]
    if missing:
        raise InputError(f"arrays.{missing[0]}", expected="an array of that name", got="none")
    if not all(isinstance(text, str) for text in data["notes"]):
        raise InputError("notes", expected="texts", got="others")
    names = {field.name for field in fields(Figure)}
    for figure in data["figures"]:
        if not isinstance(figure, dict) or set(figure) != names:
            raise InputError("figures", expected=f"objects with {', '.join(sorted(names))}", got=repr(figure)[:80])
    arrays = {name: _array(name, value) for name, value in data["arrays"].items()}
    share = arrays["class_share"]
    if share.sum() > 0:
        arrays["class_share"] = share / share.sum() if abs(share.sum() - 1) < 1e-2 else share
    return LikeProfile(
        data["model"],
        data["source"],
        data["top_k"],
        **arrays,
        figures=tuple(Figure(**f) for f in data["figures"]),
        notes=tuple(data["notes"]),
    )


def _array(name: str, value: Any) -> NDArray[np.float64]:
    """Read one array; the unit is fixed by the format, so that a file cannot say one thing and mean another."""
    if not isinstance(value, dict) or set(value) != {"unit", "shape", "values"}:
        raise InputError(f"arrays.{name}", expected="an object with unit, shape and values", got=repr(value)[:60])
    shape, values, unit = value["shape"], value["values"], _UNITS[name]
    if value["unit"] != unit:
        raise InputError(f"arrays.{name}.unit", expected=str(unit), got=repr(value["unit"])[:40])
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**20 for n in shape):
        raise InputError(f"arrays.{name}.shape", expected="whole numbers of at least 1", got=repr(shape)[:60])
    if not isinstance(values, list) or len(values) != math.prod(shape):
        got = len(values) if isinstance(values, list) else repr(values)[:40]
        raise InputError(f"arrays.{name}.values", expected=f"{math.prod(shape)} numbers, as shape {shape} says", got=str(got))
    if not all(type(n) is int and abs(n) < 2**40 for n in values):
        raise InputError(f"arrays.{name}.values", expected="whole numbers below 2**40", got="others")
    return np.array(values, dtype=np.float64).reshape(shape) * unit


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
