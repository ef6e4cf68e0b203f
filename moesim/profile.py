"""Owns routing profiles: how often each expert was chosen, layer by layer, without any order.

A profile is what a counts-only source (imatrix, recorder statistics, count tables) can honestly become. It must not know about
files of other tools, caches or engines. popularity[l, e] = selections of expert e in layer l / all selections of layer l, so every
row sums to 1. Nothing about reuse, sequences or the dependence between layers follows from it, and ``unknown`` says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError

FORMAT = "moesim-profile v1"
MAX_FILE_BYTES = 256 * 2**20  # the largest counts table seen is 8 MB
MAX_EXPERTS = 2**15 - 1  # expert ids are int16 in a trace

ORDER_UNKNOWN = (
    "the order of tokens: reuse, cache hit rates, working sets",
    "which experts are chosen together, and how one layer's choice depends on the layer before",
    "prefill and decode apart, and sequences",
)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class RoutingProfile:
    """Expert popularity by layer; immutable, compared by content.

    Parameters
    ----------
    popularity : (L, E) float64
        Share of each expert in its layer's selections; rows sum to 1.
    selections : (L,) int64
        Selections counted in each layer, which bound the sampling noise.
    layers : tuple of int
        The layers' numbers in the source.
    source : str
        Where the counts come from.
    notes, unknown : tuple of str
        What was dropped or assumed, and what cannot be known from counts.
    meta : dict
        ``model``, ``top_k`` and the like, where known.

    Raises
    ------
    InputError
        If shapes or values are impossible.
    """

    popularity: NDArray[np.float64]
    selections: NDArray[np.int64]
    layers: tuple[int, ...]
    source: str
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ORDER_UNKNOWN
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shares, totals = np.asarray(self.popularity, dtype=np.float64), np.asarray(self.selections, dtype=np.int64)
        if shares.ndim != 2 or not shares.size or shares.shape[1] > MAX_EXPERTS:
            raise InputError(
                "popularity", expected=f"a table (layers, experts) of at most {MAX_EXPERTS} experts", got=f"shape {shares.shape}"
            )
        if totals.shape != shares.shape[:1] or (totals < 1).any():
            raise InputError("selections", expected=f"{shares.shape[0]} numbers of at least 1", got=str(totals.tolist())[:80])
        if len(self.layers) != shares.shape[0] or len(set(self.layers)) != len(self.layers):
            raise InputError("layers", expected=f"{shares.shape[0]} different layer numbers", got=str(self.layers)[:80])
        if not np.isfinite(shares).all() or (shares < 0).any():
            raise InputError("popularity", expected="finite shares of at least 0", got="others")
        sums = shares.sum(axis=1)
        if (np.abs(sums - 1) > 1e-9).any():
            worst = int(np.abs(sums - 1).argmax())
            raise InputError(
                "popularity", expected="shares that sum to 1 in each layer", got=f"{sums[worst]} in layer {self.layers[worst]}"
            )
        for name, array in (("popularity", shares), ("selections", totals)):
            array = array.copy()
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def from_counts(
        cls,
        counts: NDArray[Any],
        layers: Sequence[int],
        source: str,
        notes: Sequence[str] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> RoutingProfile:
        """Make a profile of (L, E) counts; layers without any selection are left out, with a note."""
        totals = counts.sum(axis=1)
        if not (totals > 0).any():
            raise InputError("counts", expected="at least one selection", got="none")
        kept = np.flatnonzero(totals > 0).tolist()
        said = list(notes)
        if len(kept) < len(totals):
            empty = [layers[i] for i in np.flatnonzero(totals == 0).tolist()]
            said.append(f"{len(empty)} layers without selections left out (dense, or not recorded): {_some(empty)}")
        shares = counts[kept] / totals[kept, None]
        return cls(shares, totals[kept].astype(np.int64), tuple(int(layers[i]) for i in kept), source, tuple(said), meta=dict(meta or {}))

    @property
    def n_layers(self) -> int:
        """Number of layers L."""
        return int(self.popularity.shape[0])

    @property
    def n_experts(self) -> int:
        """Number of experts E per layer."""
        return int(self.popularity.shape[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutingProfile) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.source, self.layers, self.popularity.tobytes()))

    def __repr__(self) -> str:
        name = self.meta.get("model", "unknown model")
        return f"RoutingProfile({name}, L={self.n_layers}, E={self.n_experts}, {int(self.selections.sum()):,} selections, no order)"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as ``save_profile`` writes it."""
        return {
            "format": FORMAT,
            "source": self.source,
            "layers": list(self.layers),
            "selections": self.selections.tolist(),
            "popularity": self.popularity.tolist(),
            "notes": list(self.notes),
            "unknown": list(self.unknown),
            "meta": self.meta,
        }


def save_profile(profile: RoutingProfile, path: str | Path) -> None:
    """Save a profile as JSON; ``load_profile`` gives an equal one."""
    try:
        Path(path).write_text(json.dumps(profile.as_dict(), sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    except (TypeError, ValueError) as error:
        raise InputError("meta", expected="values that JSON can hold", got=str(error), where=str(path)) from None
    except OSError as error:
        raise InputError("profile", expected="a writable file", got=error.strerror or str(error), where=str(path)) from None


def load_profile(path: str | Path) -> RoutingProfile:
    """Load and validate a profile.

    Raises
    ------
    InputError
        With the file and the field.
    """
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise InputError("profile", expected=f"at most {MAX_FILE_BYTES} bytes", got=f"{Path(path).stat().st_size}", where=str(path))
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise InputError("profile", expected="a readable file", got=error.strerror or str(error), where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise InputError("profile", expected="JSON", got=str(error)[:120], where=str(path)) from None
    return parse_profile(data, str(path))


def parse_profile(data: Any, where: str) -> RoutingProfile:
    """Make a profile of the plain data of ``as_dict``, or raise an InputError at ``where``."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(
            "format", expected=f'"{FORMAT}"', got=repr(data.get("format") if isinstance(data, dict) else data)[:80], where=where
        )
    for name, kind in (
        ("source", str),
        ("layers", list),
        ("selections", list),
        ("popularity", list),
        ("notes", list),
        ("unknown", list),
        ("meta", dict),
    ):
        if not isinstance(data.get(name), kind):
            raise InputError(name, expected=f"a {kind.__name__}", got=repr(data.get(name))[:80], where=where)
    if not all(_whole(value) for name in ("layers", "selections") for value in data[name]):
        raise InputError("layers and selections", expected="whole numbers below 2**53", got="others", where=where)
    if not all(isinstance(text, str) for name in ("notes", "unknown") for text in data[name]):
        raise InputError("notes and unknown", expected="texts", got="others", where=where)
    rows = data["popularity"]
    if not all(isinstance(row, list) and len(row) == len(rows[0]) and all(_number(value) for value in row) for row in rows):
        raise InputError("popularity", expected="rows of finite numbers, all of one length", got="others", where=where)
    try:
        return RoutingProfile(
            np.array(rows, dtype=np.float64).reshape(len(rows), -1),
            np.array(data["selections"], dtype=np.int64),
            tuple(data["layers"]),
            data["source"],
            tuple(data["notes"]),
            tuple(data["unknown"]),
            data["meta"],
        )
    except InputError as error:
        raise error.at(where) from None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)


def _some(values: Sequence[Any], most: int = 8) -> str:
    return ", ".join(str(value) for value in values[:most]) + (", ..." if len(values) > most else "")
