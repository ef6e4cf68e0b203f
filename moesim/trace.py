"""Owns routing traces: which experts each token chose in each layer, their file format, and their adaptation to a model's shape.

It must not know about caches, costs or engines. A row is one token; rows of a sequence are contiguous and in token order; -1 in all
slots of a cell (row, layer) means that the cell was not recorded. Files are ``.npz`` without pickle, and are never trusted: the
arrays are read by hand, so that a declared size is checked before memory is taken.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.html_table import html_table

MAX_TRACE_BYTES = 4 * 2**30  # declared, uncompressed; a million rows of 60 layers with top-8 and weights are half of it
PREFILL, DECODE = 0, 1
_INT16_MAX = 2**15 - 1
ARRAYS = ("expert_ids", "weights", "seq_id", "position", "phase")
# Facts of a whole file that are wrong for a part of it.
_FILE_FACTS = ("n_tokens", "n_sequences", "missing_cells", "sequences")


@dataclass(frozen=True, eq=False, repr=False)
class RoutingTrace:
    """A recorded or generated routing trace; immutable, compared by content.

    Parameters
    ----------
    expert_ids : (T, L, K) int16
        Chosen experts in the router's order (slot 0 = first choice); -1 in all slots of a cell: not recorded.
    weights : (T, L, K) float16, optional
        Routing weight of each slot; NaN where the cell is absent.
    seq_id : (T,) int32
        Number of the sequence; rows of one sequence are contiguous.
    position : (T,) int32
        Position of the token in its context, growing within a sequence.
    phase : (T,) uint8
        0 prefill, 1 decode.
    meta : dict
        Facts about the trace (JSON); ``n_experts`` where known.
    validate : bool
        Leave it True; parts of a valid trace need no second look.

    Raises
    ------
    InputError
        If an array has another shape or type, or holds an impossible value; the field, row and layer are named.
    """

    expert_ids: NDArray[np.int16]
    weights: NDArray[np.float16] | None
    seq_id: NDArray[np.int32]
    position: NDArray[np.int32]
    phase: NDArray[np.uint8]
    meta: dict[str, Any] = field(default_factory=dict)
    validate: InitVar[bool] = True

    def __post_init__(self, validate: bool) -> None:
        arrays = {name: getattr(self, name) for name in ARRAYS}
        if validate:
            arrays = _validated(arrays, self.meta)
        for name, array in arrays.items():
            if array is not None:
                array = array.view()
                array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def n_rows(self) -> int:
        """Number of rows T."""
        return int(self.expert_ids.shape[0])

    @property
    def n_layers(self) -> int:
        """Number of MoE layers L."""
        return int(self.expert_ids.shape[1])

    @property
    def top_k(self) -> int:
        """Experts per cell K."""
        return int(self.expert_ids.shape[2])

    @cached_property
    def n_experts(self) -> int:
        """Number of experts E per layer: what the meta says, or the largest id seen plus one."""
        known = self.meta.get("n_experts")
        return int(known) if known is not None else int(self.expert_ids.max(initial=0)) + 1

    @cached_property
    def sequences(self) -> list[tuple[int, int]]:
        """(start, stop) rows of each sequence, in file order."""
        if not self.n_rows:
            return []
        starts = [0, *(np.flatnonzero(np.diff(self.seq_id)) + 1).tolist()]
        return list(zip(starts, [*starts[1:], self.n_rows], strict=True))

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """(T, L) bool: whether the cell was recorded."""
        return np.asarray(self.expert_ids[:, :, 0] >= 0)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (16 hex digits) over the arrays and the number of experts; descriptive meta does not enter."""
        digest = hashlib.sha256(json.dumps([*self.expert_ids.shape, self.n_experts, self.weights is not None]).encode())
        kinds = {"expert_ids": "<i2", "seq_id": "<i4", "position": "<i4", "phase": "u1"}
        for name, kind in kinds.items():
            digest.update(np.ascontiguousarray(getattr(self, name), dtype=kind).tobytes())
        if self.weights is not None:
            one_nan = np.where(np.isnan(self.weights), np.float16("nan"), self.weights)
            digest.update(np.ascontiguousarray(one_nan, dtype="<f2").tobytes())
        return digest.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingTrace):
            return NotImplemented
        return self.hash == other.hash and self.meta == other.meta

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        name, weights = self.meta.get("model", "unknown model"), "no weights" if self.weights is None else "weights"
        shape = f"T={self.n_rows} rows in {len(self.sequences)} sequences, L={self.n_layers}, E={self.n_experts}, K={self.top_k}"
        return f"RoutingTrace({name}, {shape}, {int((self.phase == DECODE).sum())} decode, {weights}, {self.hash})"

    def _repr_html_(self) -> str:
        return html_table("routing trace", [(fact,) for fact in repr(self)[len("RoutingTrace(") : -1].split(", ")])

    def sets(self, t: int, layer: int) -> tuple[int, ...]:
        """Return the experts of row ``t`` at ``layer`` in ascending order; empty where the cell is absent."""
        return tuple(sorted(e for e in self.expert_ids[t, layer].tolist() if e >= 0))

    def counts(self) -> NDArray[np.int64]:
        """Return (L, E) int64: rows in which each expert of each layer was chosen."""
        ids = (self.expert_ids[:, layer].reshape(-1) for layer in range(self.n_layers))
        return np.array([np.bincount(of_layer + 1, minlength=self.n_experts + 1)[1:] for of_layer in ids], np.int64)

    def slice_rows(self, start: int, stop: int) -> RoutingTrace:
        """Return rows ``start`` to ``stop`` (exclusive)."""
        return self._take(slice(start, stop))

    def decode_rows(self) -> RoutingTrace:
        """Return the decode rows alone, as if the prefill did not exist."""
        return self._take(np.flatnonzero(self.phase == DECODE))

    def select_sequences(self, indices: Sequence[int]) -> RoutingTrace:
        """Return whole sequences by their number in file order, renumbered from 0; a sequence may be taken twice.

        Raises
        ------
        InputError
            If an index does not exist.
        """
        spans = self.sequences
        bad = [i for i in indices if not 0 <= i < len(spans)]
        if bad:
            raise InputError("trace sequences", expected=f"indices from 0 to {len(spans) - 1}", got=str(bad[0]), fix="see trace.sequences")
        rows = np.concatenate([np.arange(*spans[i]) for i in indices]) if len(indices) else np.arange(0)
        seq_id = np.repeat(np.arange(len(indices), dtype=np.int32), [spans[i][1] - spans[i][0] for i in indices])
        facts = self.meta.get("sequences")
        meta: dict[str, Any] = {}
        if isinstance(facts, list) and len(facts) == len(spans) and all(isinstance(fact, dict) for fact in facts):
            meta["sequences"] = [{**facts[i], "seq_id": new} for new, i in enumerate(indices)]
        return self._take(rows, seq_id=seq_id, meta=meta)

    def split(self, train_fraction: float) -> tuple[RoutingTrace, RoutingTrace]:
        """Split into a training and a test part by whole sequences: the first floor(fraction * number) train.

        A trace of one sequence is split by rows.

        Raises
        ------
        InputError
            If either part would be empty.
        """
        if not 0.0 < train_fraction < 1.0:
            raise InputError("train_fraction", expected="a share between 0 and 1, both excluded", got=str(train_fraction))
        spans = self.sequences
        number = len(spans) if len(spans) > 1 else self.n_rows
        # 0.3 * 10 is 2.9999999999999996: a share that means a whole number must give it
        first = math.floor(train_fraction * number + 1e-9)
        if not 0 < first < number:
            unit = "sequences" if len(spans) > 1 else "rows"
            got = f"{first} of {number} {unit} for training"
            raise InputError("train_fraction", expected="a training and a test part", got=got, fix="choose another fraction")
        border = spans[first][0] if len(spans) > 1 else first
        return self.slice_rows(0, border), self.slice_rows(border, self.n_rows)

    def _take(self, rows: Any, *, seq_id: NDArray[np.int32] | None = None, meta: Mapping[str, Any] | None = None) -> RoutingTrace:
        kept = {key: value for key, value in self.meta.items() if key not in _FILE_FACTS}
        return RoutingTrace(
            self.expert_ids[rows],
            None if self.weights is None else self.weights[rows],
            self.seq_id[rows] if seq_id is None else seq_id,
            self.position[rows],
            self.phase[rows],
            {**kept, "n_experts": self.n_experts, **(meta or {})},
            validate=False,
        )


def _validated(arrays: Mapping[str, Any], meta: Any) -> dict[str, Any]:
    """Return the arrays with the types of the contract, or raise an InputError that names field, row and layer."""
    if not isinstance(meta, dict):
        raise InputError("meta", expected="a JSON object", got=type(meta).__name__)
    ids = _typed(arrays["expert_ids"], "expert_ids", "i", 3, "signed integers (T, L, K), -1 where absent")
    n_rows, n_layers, top_k = ids.shape
    if not ids.size:
        raise InputError("expert_ids", expected="at least one row, layer and slot", got=f"shape {ids.shape}")
    n_experts = meta.get("n_experts")
    for name, have in (("n_layers", n_layers), ("top_k", top_k)):
        if meta.get(name, have) != have:
            raise InputError(f"meta.{name}", expected=f"{have}, as in expert_ids {ids.shape}", got=str(meta[name]))
    if n_experts is not None and (not isinstance(n_experts, int) or isinstance(n_experts, bool) or not top_k <= n_experts <= _INT16_MAX):
        raise InputError("meta.n_experts", expected=f"an integer from top_k = {top_k} to {_INT16_MAX}", got=repr(n_experts))
    limit = _INT16_MAX if n_experts is None else n_experts
    _refuse((ids < -1) | (ids >= limit), "expert_ids", f"ids from -1 to {limit - 1}", ids)
    absent = ids < 0
    partly = absent.any(2) & ~absent.all(2)
    _refuse(partly, "expert_ids", "all slots of a cell absent (-1) or none", ids)
    ordered = np.sort(ids, axis=2)
    _refuse(((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(2), "expert_ids", "each expert once in a cell", ids)
    out: dict[str, Any] = {"expert_ids": ids.astype(np.int16), "weights": None}
    if arrays["weights"] is not None:
        weights = _typed(arrays["weights"], "weights", "f", 3, "floats (T, L, K)")
        if weights.shape != ids.shape:
            raise InputError("weights", expected=f"shape {ids.shape} of expert_ids", got=f"shape {weights.shape}")
        right = (weights >= 0) & (weights <= np.finfo(np.float16).max)  # False for NaN
        _refuse(~absent & ~right, "weights", "finite weights of at least 0 in present cells", weights)
        out["weights"] = np.where(absent, np.float16("nan"), weights).astype(np.float16)
    for name, kinds, dtype in (("seq_id", "i", np.int32), ("position", "i", np.int32), ("phase", "iu", np.uint8)):
        column = _typed(arrays[name], name, kinds, 1, "integers (T,)")
        if column.shape != (n_rows,):
            raise InputError(name, expected=f"{n_rows} rows as in expert_ids", got=f"{column.shape[0]}")
        if name == "phase":
            _refuse((column != PREFILL) & (column != DECODE), name, "0 (prefill) or 1 (decode)", column)
        else:
            lowest, highest = 0 if name == "position" else -(2**31), 2**31 - 1
            _refuse((column < lowest) | (column > highest), name, f"values from {lowest} to {highest}", column)
        out[name] = column.astype(dtype)
    seq, position = out["seq_id"], out["position"].astype(np.int64)
    starts = np.r_[0, np.flatnonzero(seq[1:] != seq[:-1]) + 1]
    _, first = np.unique(seq[starts], return_index=True)
    if first.size < starts.size:
        row = int(starts[np.setdiff1d(np.arange(starts.size), first)[0]])
        raise InputError("seq_id", expected="contiguous rows of each sequence", got=f"sequence {int(seq[row])} again at row {row}")
    stalled = (position[1:] <= position[:-1]) & (seq[1:] == seq[:-1])
    _refuse(np.r_[False, stalled], "position", "positions that grow within a sequence", position)
    return out


def _typed(array: Any, name: str, kinds: str, ndim: int, want: str) -> NDArray[Any]:
    if not isinstance(array, np.ndarray):
        raise InputError(name, expected=want, got="nothing" if array is None else type(array).__name__)
    if array.dtype.kind not in kinds or array.ndim != ndim:
        raise InputError(name, expected=want, got=f"{array.dtype} {array.shape}", fix="convert it with astype / reshape before saving")
    return array


def _refuse(bad: Any, name: str, want: str, values: NDArray[Any]) -> None:
    """Raise with the first offending place, if there is one."""
    if not bad.any():
        return
    at = [int(i) for i in np.argwhere(bad)[0]]
    place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "layer", "slot"), at, strict=False))
    raise InputError(name, expected=want, got=f"{values[tuple(at)].tolist()} at {place}")


def load_trace(path: str | Path) -> RoutingTrace:
    """Load and validate a trace file.

    Raises
    ------
    InputError
        With the file and the field: missing or damaged file, pickled or oversized arrays, wrong types, shapes or values.
    """
    where = str(path)
    try:
        if Path(path).is_dir():
            raise InputError("trace", expected="a file", got="a folder", where=where)
        with zipfile.ZipFile(path) as archive:
            declared = sum(info.file_size for info in archive.infolist())
            if declared > MAX_TRACE_BYTES:
                raise InputError("trace", expected=f"at most {MAX_TRACE_BYTES} bytes uncompressed", got=f"{declared} bytes declared")
            for info in archive.infolist():
                archive.open(info).close()  # a name that is damaged in the directory would drop an optional array in silence
            known = {info.filename.removesuffix(".npy") for info in archive.infolist()}
            if missing := [name for name in ("expert_ids", "seq_id", "position", "phase", "meta") if name not in known]:
                raise InputError(missing[0], expected="an array of that name", got=f"only {', '.join(sorted(known))[:120]}")
            names = ["expert_ids", "seq_id", "position", "phase", *(["weights"] if "weights" in known else [])]
            arrays: dict[str, Any] = {"weights": None} | {name: _read_array(archive, name) for name in names}
            text = _read_array(archive, "meta")
        if text.dtype.kind != "U" or text.ndim != 0:
            raise InputError("meta", expected="JSON text in a 0-d string array", got=f"{text.dtype} {text.shape}")
        try:
            meta = json.loads(str(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError("meta", expected="JSON text", got=str(error)[:120]) from None
        return RoutingTrace(meta=meta, **arrays)
    except InputError as error:
        raise error.at(where) from None
    except FileNotFoundError:
        raise InputError("trace", expected="an existing file", got="none", fix="check the path", where=where) from None
    except zipfile.BadZipFile as error:
        fix = "if it was one, it is cut off or damaged; import what other tools wrote: moesim trace import"
        raise InputError("trace", expected="an .npz file", got=str(error) or "a damaged zip", fix=fix, where=where) from None
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError, MemoryError) as error:
        raise InputError("trace", expected="a readable, undamaged .npz file", got=str(error) or type(error).__name__, where=where) from None


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read one ``.npy`` member; its declared shape must agree with its size before any memory is taken."""
    info = archive.getinfo(f"{name}.npy" if f"{name}.npy" in archive.NameToInfo else name)
    with archive.open(info) as file:
        try:
            version = np.lib.format.read_magic(file)
            reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = reader(file)
        except Exception as error:  # numpy parses the header as Python text: a damaged one can raise nearly anything
            raise InputError(name, expected="an array in .npy format 1.0 or 2.0", got=str(error)[:120] or type(error).__name__) from None
        if dtype.hasobject:
            raise InputError(name, expected="plain numbers or text", got="pickled Python objects", fix="save it without pickle")
        size = math.prod(shape) * dtype.itemsize
        if file.tell() + size != info.file_size:
            raise InputError(name, expected=f"{size} bytes for {dtype} {shape}", got=f"{info.file_size - file.tell()} bytes")
        data = file.read()
        if len(data) != size:
            raise InputError(name, expected=f"{size} bytes", got=f"{len(data)} bytes", fix="the file is cut short")
        return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if fortran else "C") if size else np.zeros(shape, dtype)


def save_trace(trace: RoutingTrace, path: str | Path) -> None:
    """Save a trace as a compressed ``.npz`` without pickle; ``load_trace`` gives an equal one."""
    arrays: dict[str, Any] = {name: getattr(trace, name) for name in ARRAYS if getattr(trace, name) is not None}
    try:
        arrays["meta"] = np.array(json.dumps(trace.meta, sort_keys=True))
        with open(path, "wb") as file:  # an open file: savez appends .npz to a bare name
            np.savez_compressed(file, **arrays)
    except TypeError as error:
        raise InputError("meta", expected="values that JSON can hold", got=str(error), where=str(path)) from None
    except OSError as error:
        raise InputError("trace", expected="a writable file", got=error.strerror or str(error), where=str(path)) from None


def adapt_trace(
    trace: RoutingTrace,
    n_layers: int,
    n_experts: int,
    top_k: int,
    *,
    layers: Literal["exact", "tile"] = "exact",
    slots: Literal["exact", "truncate"] = "exact",
    sequences: Literal["exact", "repeat"] = "exact",
    n_sequences: int | None = None,
    rows_per_sequence: int | None = None,
) -> tuple[RoutingTrace, list[str]]:
    """Fit a trace to a model's shape, where and only where the scenario says how.

    ``layers="tile"`` gives layer i the choices of trace layer i mod Lt. Each further tile k renames the experts by a fixed permutation
    of its own, so popularity curves, reuse and Belady's hits are those of the source layer (LRU and LFU break ties by id, so theirs
    may move a little), and layers share no hot id by construction. Not preserved: independence across tiles. Layer i and layer
    i - Lt carry the same information, so a co-occurrence predictor learns the renaming and is perfect at distance Lt, distances that
    cross a tile border mean nothing, and global caches see correlated layers. Judge predictors on traces that need no tiling.

    ``slots="truncate"`` keeps the strongest K of each cell (by weight where known, by router order otherwise), weights as they are.

    Parameters
    ----------
    trace : RoutingTrace
        The source.
    n_layers, n_experts, top_k : int
        Shape of the model: MoE layers, routed experts per layer, experts per token.
    layers, slots, sequences : str
        ``"exact"`` refuses a mismatch; the other word says how to adapt.
    n_sequences : int, optional
        Sequences wanted: the first ones; with ``sequences="repeat"`` the trace starts over as often as needed.
    rows_per_sequence : int, optional
        Rows wanted in each sequence: longer ones are cut; with ``sequences="repeat"`` the decode rows (all rows, where there is no
        decode) of shorter ones start over, with growing positions.

    Returns
    -------
    trace : RoutingTrace
        The adapted trace; the same object if nothing was to do.
    provenance : list of str
        One line per adaptation, for the result's provenance.

    Raises
    ------
    InputError
        If the shapes differ and the scenario does not say how to adapt, or there is no honest way (experts, too few slots).
    """
    for what, value, other in (("layers", layers, "tile"), ("slots", slots, "truncate"), ("sequences", sequences, "repeat")):
        if value not in ("exact", other):
            raise InputError(f"trace.{what}", expected=f"exact or {other}", got=f'"{value}"')
    for what, number in (("n_sequences", n_sequences), ("rows_per_sequence", rows_per_sequence)):
        if number is not None and number < 1:
            raise InputError(f"trace.{what}", expected="at least 1", got=str(number))
    notes: list[str] = []
    if trace.n_experts != n_experts:
        fix = "ids of one model mean nothing in another: generate a trace from its popularity instead"
        raise InputError("trace n_experts", expected=f"{n_experts}, the model's experts per layer", got=str(trace.n_experts), fix=fix)
    if trace.top_k != top_k:
        if trace.top_k < top_k or slots != "truncate":
            fix = "say slots: truncate to keep the strongest"
            if trace.top_k < top_k:
                fix = f"the weaker choices were not recorded: set the model's top_k to {trace.top_k}, or generate a trace"
            raise InputError("trace top_k", expected=f"{top_k}, the model's experts per token", got=str(trace.top_k), fix=fix)
        notes.append(f"top-{trace.top_k} cut to the strongest {top_k} of each cell, weights not renormalised")
        trace = _truncate(trace, top_k)
    if trace.n_layers != n_layers:
        if layers != "tile":
            fix = "say layers: tile to repeat the trace's layers"
            raise InputError("trace n_layers", expected=f"{n_layers}, the model's MoE layers", got=str(trace.n_layers), fix=fix)
        renaming = f"tile k renames experts by numpy.random.default_rng(k).permutation({n_experts})"
        tiled = f"{trace.n_layers} layers tiled to {n_layers}; {renaming}"
        notes.append(tiled if n_layers > trace.n_layers else f"first {n_layers} of {trace.n_layers} layers used")
        trace = _tile(trace, n_layers)
    return _fit_sequences(trace, sequences, n_sequences, rows_per_sequence, notes), notes


def _truncate(trace: RoutingTrace, top_k: int) -> RoutingTrace:
    if trace.weights is None:
        order = np.broadcast_to(np.arange(top_k), (trace.n_rows, trace.n_layers, top_k))
    else:
        strongest = np.argsort(-trace.weights.astype(np.float32), axis=2, kind="stable")[:, :, :top_k]
        order = np.sort(strongest, axis=2)  # router order is kept
    weights = None if trace.weights is None else np.take_along_axis(trace.weights, order, 2)
    return _with(trace, expert_ids=np.take_along_axis(trace.expert_ids, order, 2), weights=weights)


def _tile(trace: RoutingTrace, n_layers: int) -> RoutingTrace:
    source = np.arange(n_layers) % trace.n_layers
    ids = trace.expert_ids[:, source]
    for tile in range(1, -(-n_layers // trace.n_layers)):
        rename = np.random.default_rng(tile).permutation(trace.n_experts).astype(np.int16)
        part = ids[:, tile * trace.n_layers : (tile + 1) * trace.n_layers]
        part[:] = np.where(part >= 0, rename[part], np.int16(-1))
    return _with(trace, expert_ids=ids, weights=None if trace.weights is None else trace.weights[:, source])


def _fit_sequences(trace: RoutingTrace, mode: str, number: int | None, n_rows: int | None, notes: list[str]) -> RoutingTrace:
    have = len(trace.sequences)
    if number is not None and number != have:
        if number > have and mode != "repeat":
            raise InputError("trace sequences", expected=f"at least {number}", got=str(have), fix="say sequences: repeat to start over")
        notes.append(f"{have} sequences repeated to {number}" if number > have else f"first {number} of {have} sequences used")
        trace = trace.select_sequences([i % have for i in range(number)])
    if n_rows is not None and any(stop - start != n_rows for start, stop in trace.sequences):
        trace = _resize_sequences(trace, n_rows, mode, notes)
    return trace


def _resize_sequences(trace: RoutingTrace, n_rows: int, mode: str, notes: list[str]) -> RoutingTrace:
    rows, positions = [], []
    cut = repeated = 0
    for i, (start, stop) in enumerate(trace.sequences):
        span = np.arange(start, min(stop, start + n_rows))
        position = trace.position[span]
        if span.size < n_rows:
            if mode != "repeat":
                want, got = f"at least {n_rows} in each sequence", f"{span.size} in sequence {i}"
                raise InputError("trace rows", expected=want, got=got, fix="say sequences: repeat to start over")
            again = span[trace.phase[span] == DECODE]
            again = again if again.size else span
            more = n_rows - span.size
            span = np.r_[span, np.resize(again, more)]
            position = np.r_[position, position[-1] + 1 + np.arange(more)]
            repeated += 1
        else:
            cut += stop - start > n_rows
        rows.append(span)
        positions.append(position)
    notes.append(f"sequences brought to {n_rows} rows: {cut} cut, {repeated} started over")
    number = np.repeat(np.arange(len(rows), dtype=np.int32), n_rows)
    resized = trace._take(np.concatenate(rows), seq_id=number)
    return _with(resized, position=np.concatenate(positions).astype(np.int32))


def _with(trace: RoutingTrace, **changes: Any) -> RoutingTrace:
    """Return a copy with some arrays replaced and the shape in its meta brought up to date."""
    arrays = {name: getattr(trace, name) for name in ARRAYS} | changes
    meta = {key: value for key, value in trace.meta.items() if not key.startswith("layer_")}  # per-layer facts fit the old shape only
    _, n_layers, top_k = arrays["expert_ids"].shape
    shape = {name: value for name, value in (("n_layers", n_layers), ("top_k", top_k)) if name in meta}
    return RoutingTrace(**arrays, meta={**meta, "n_experts": trace.n_experts, **shape}, validate=False)
