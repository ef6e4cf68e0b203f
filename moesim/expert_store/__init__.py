"""Owns the file of packed experts: where each matrix lies, the index beside it, and whether its bytes are right.

- *merged*: an expert is one extent, its matrices back to back in the order gate, up, down, and padding at its end up to ``align``.
- *scattered* (claim P5): each matrix is cut into pieces of ``scattered_piece`` bytes, padded to ``align``, and the pieces of all experts lie in
  a drawn order. In memory both are a slot: one expert, its matrices in order.

A *piece* is what has a checksum of its own: a matrix with its padding where merged. Beside ``experts.bin`` lies ``experts.bin.json``, the
index. It must not know how the file is read in a run (``expert_readers``) or what is computed with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moesim.config import Document, Spec, build, read_text
from moesim.errors import InputError
from moesim.model import ModelSpec
from moesim.precision import PrecisionPlan, get_format
from moesim.quant.packing import Packed, PackedLayout, cpu_capability, packed_layout, view

if TYPE_CHECKING:
    from torch import Tensor

StoreLayout = Literal["merged", "scattered"]
MATRICES = ("gate", "up", "down")

_MAX_INDEX_BYTES = 1 << 28  # a TB in pieces of 128 KiB has an index of 200 MB
_SAMPLE_BYTES = 8
_SAMPLE_STEP = 1 << 16  # half of the smallest request in use, so that a request that was never read is seen
_MOST_SAMPLES = 256  # a slot; checking one takes microseconds
_VERIFY_BYTES = 1 << 24

Extent = tuple[int, int, int]  # offset in the file, offset in the slot, bytes


class MatrixEntry(Spec):
    """One matrix of each expert of a layer: N output rows by K input columns."""

    matrix: str
    format: str
    rows: int = Field(ge=1)
    cols: int = Field(ge=1)


class LayerEntry(Spec):
    """The matrices of one layer's experts, in file order."""

    layer: int = Field(ge=0)
    matrices: list[MatrixEntry] = Field(min_length=1)


class StoreIndex(Spec):
    """What the JSON file beside a store holds.

    ``offsets`` are the places in the file of all pieces, by layer, expert, matrix and place in it; empty where merged. ``crc32`` are the
    checksums of the same pieces, ``fingerprints`` are by layer and expert. ``vector_unit`` is what packed int4 values depend on.
    """

    kind: Literal["moesim expert store"]
    version: Literal[1]
    model: str
    n_experts: int = Field(ge=1)
    layout: StoreLayout
    align: int = Field(ge=1)
    scattered_piece: int = Field(ge=1)
    weights: str
    vector_unit: str
    data_bytes: int = Field(ge=1)
    layers: list[LayerEntry] = Field(min_length=1)
    offsets: list[int]
    crc32: list[int]
    fingerprints: list[str]


@dataclass(frozen=True)
class SlotPlan:
    """How one expert of a layer lies in a slot, and which of the store's pieces it has.

    Parameters
    ----------
    matrices : dict of str to (int, PackedLayout)
        Offset in the slot and layout of each matrix.
    pieces : tuple of (str, int, int)
        Matrix, offset in the slot and bytes of each piece.
    slot_bytes : int
        Size of the slot, padding included.
    first_piece : int
        Number of the first piece of expert 0.
    first_byte : int
        Bytes of the layers before, which is where the layer begins in a merged file.
    """

    matrices: dict[str, tuple[int, PackedLayout]]
    pieces: tuple[tuple[str, int, int], ...]
    slot_bytes: int
    first_piece: int
    first_byte: int

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        """Positions in the slot that a fingerprint covers: 8 bytes every 64 KiB (more in large slots) and the last 8 of each matrix."""
        step = max(_SAMPLE_STEP, self.slot_bytes // _MOST_SAMPLES)
        starts = [
            offset + at
            for offset, layout in self.matrices.values()
            for at in (*range(0, layout.n_bytes - _SAMPLE_BYTES, step), layout.n_bytes - _SAMPLE_BYTES)
        ]
        return (np.array(starts)[:, None] + np.arange(_SAMPLE_BYTES)).ravel()

    def fingerprint_of(self, slot: Any) -> bytes:
        """Return the fingerprint of what a slot holds."""
        return hashlib.blake2b(np.asarray(slot)[self.samples].tobytes(), digest_size=8).digest()


def layer_entries(model: ModelSpec, plan: PrecisionPlan) -> list[LayerEntry]:
    """Return the matrices that a store of a model holds under a plan.

    Raises
    ------
    InputError
        If the model has no experts, or experts of other parts than the matrices gate, up and down.
    """
    if model.declared is not None:
        raise InputError("model", expected="one with shapes", got=f"{model.name}, which declares totals only")
    out = []
    for layer in model.moe_layers:
        found = {t.matrix: t for t in model.tensors_by_place.get((layer, "routed_experts"), ())}
        if not found or not set(found) <= set(MATRICES):
            got = f"{', '.join(found) or 'none'} in layer {layer} of {model.name}"
            raise InputError(
                "model", expected=f"experts of the matrices {', '.join(MATRICES)}", got=got, fix="it can be simulated, not run"
            )
        formats = {name: plan.format("routed_experts", layer, name).name for name in found}
        out.append(
            LayerEntry(
                layer=layer,
                matrices=[
                    MatrixEntry(matrix=name, format=formats[name], rows=found[name].rows, cols=found[name].cols)
                    for name in MATRICES
                    if name in found
                ],
            )
        )
    if not out:
        raise InputError("model", expected="one with experts", got=model.name)
    return out


def slot_plans(layers: Iterable[LayerEntry], n_experts: int, layout: StoreLayout, align: int, piece: int) -> dict[int, SlotPlan]:
    """Return the slot of each layer's experts.

    Raises
    ------
    InputError
        If a matrix has no real kernel, or pieces are no multiple of ``align``.
    """
    if layout == "scattered" and piece % align:
        raise InputError("scattered_piece", expected=f"a multiple of align, {align}", got=str(piece))
    out: dict[int, SlotPlan] = {}
    first_piece = first_byte = 0
    for entry in layers:
        matrices: dict[str, tuple[int, PackedLayout]] = {}
        pieces: list[tuple[str, int, int]] = []
        at = 0
        for m in entry.matrices:
            packed = packed_layout(get_format(m.format), m.rows, m.cols)
            matrices[m.matrix] = (at, packed)
            size = packed.n_bytes
            if layout == "scattered" or m is entry.matrices[-1]:
                size += -(at + size) % align
            step = piece if layout == "scattered" else size
            pieces += [(m.matrix, at + done, min(step, size - done)) for done in range(0, size, step)]
            at += size
        out[entry.layer] = SlotPlan(matrices, tuple(pieces), at, first_piece, first_byte)
        first_piece += n_experts * len(pieces)
        first_byte += n_experts * at
    return out


def index_path(path: str | Path) -> Path:
    """Return where the index of a store lies."""
    return Path(f"{path}.json")


class ExpertStore:
    """An opened store; see ``open``. It keeps no file open."""

    def __init__(self, path: Path, index: StoreIndex, plans: dict[int, SlotPlan]) -> None:
        self.path, self.index, self.plans = path, index, plans

    @classmethod
    def open(cls, path: str | Path) -> ExpertStore:
        """Open a store and check its index and its size; ``verify`` checks every byte.

        Raises
        ------
        InputError
            If the store or its index is missing, short or contradicts itself, or int4 values were packed for another vector unit.
        """
        path = Path(path)
        where = str(index_path(path))
        try:
            data = json.loads(read_text(where, _MAX_INDEX_BYTES))
        except (ValueError, RecursionError) as error:
            raise InputError("index", expected="JSON", got=str(error)[:120], fix="build the store again", where=where) from None
        index = build(StoreIndex, Document(data, where))
        try:
            plans = slot_plans(index.layers, index.n_experts, index.layout, index.align, index.scattered_piece)
        except InputError as error:
            raise error.at(where) from None
        store = cls(path, index, plans)
        store._check_index(where)
        store._check_size()
        return store

    def _check_index(self, where: str) -> None:
        def need(what: str, expected: object, got: object) -> None:
            if expected != got:
                raise InputError(what, expected=str(expected), got=str(got), fix="build the store again", where=where)

        n = self.index.n_experts
        need("layers", len(self.index.layers), len(self.plans))
        need("data_bytes", sum(n * p.slot_bytes for p in self.plans.values()), self.index.data_bytes)
        sizes = np.concatenate([np.tile([size for *_, size in p.pieces], n) for p in self.plans.values()])
        need("crc32", f"{len(sizes)} checksums", f"{len(self.index.crc32)} checksums")
        need("fingerprints", f"{n * len(self.plans)} texts", f"{len(self.index.fingerprints)} texts")
        for i, text in enumerate(self.index.fingerprints):
            need(f"fingerprints.{i}", "16 hexadecimal digits", "16 hexadecimal digits" if _is_hex(text) else text[:20])
        if self.index.layout == "scattered":
            need("offsets", f"{len(sizes)} numbers", f"{len(self.index.offsets)} numbers")
            order = np.argsort(np.array(self.index.offsets))
            ends = np.cumsum(sizes[order])
            if not np.array_equal(np.array(self.index.offsets)[order], ends - sizes[order]):
                got = "pieces that overlap or leave gaps"
                raise InputError("offsets", expected="pieces side by side", got=got, fix="build the store again", where=where)
        if self.index.vector_unit != cpu_capability() and any(m.format.startswith("int4") for e in self.index.layers for m in e.matrices):
            got = f"{cpu_capability()} here"
            fix = "build the store on this machine"
            raise InputError("vector_unit", expected=f"{self.index.vector_unit}, which int4 was packed for", got=got, fix=fix, where=where)

    def _check_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except OSError as error:
            got = error.strerror or str(error)
            raise InputError("expert store", expected="a readable file", got=got, where=str(self.path)) from None
        if size != self.index.data_bytes:
            raise InputError(
                "expert store",
                expected=f"{self.index.data_bytes:,} bytes",
                got=f"{size:,}",
                fix=f"{self._missing(size)}; build the store again" if size < self.index.data_bytes else "build the store again",
                where=str(self.path),
            )

    def _missing(self, size: int) -> str:
        """Name what lies beyond the end of a short file."""
        cut = [
            (layer, e)
            for layer in self.plans
            for e in range(self.index.n_experts)
            if any(a + n > size for a, _, n in self.extents(layer, e))
        ]
        first = "expert {1} of layer {0}".format(*cut[0])
        return (
            f"{first} is missing or incomplete" if len(cut) == 1 else f"{len(cut)} experts are missing or incomplete, the first is {first}"
        )

    # ---- where things lie

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        return tuple(self.plans)

    @property
    def n_experts(self) -> int:
        """Experts a layer."""
        return self.index.n_experts

    def plan(self, layer: int, expert: int = 0) -> SlotPlan:
        """Return how an expert of a layer lies in its slot, or raise an InputError for a layer or expert that the store does not have."""
        found = self.plans.get(layer)
        if found is None or not 0 <= expert < self.n_experts:
            expected = f"layers {', '.join(map(str, self.plans))[:80]} and experts 0 to {self.n_experts - 1}"
            raise InputError("expert", expected=expected, got=f"expert {expert} of layer {layer}", where=str(self.path))
        return found

    def slot_bytes(self, layer: int) -> int:
        """Bytes of one expert of a layer, padding included: what a load reads and a slot holds."""
        return self.plan(layer).slot_bytes

    def extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Return the runs of an expert in the file, in the order of the slot: offset in the file, offset in the slot, bytes."""
        plan = self.plan(layer, expert)
        if self.index.layout == "merged":
            return ((plan.first_byte + expert * plan.slot_bytes, 0, plan.slot_bytes),)
        return tuple((self._piece_offset(plan, expert, i), at, size) for i, (_, at, size) in enumerate(plan.pieces))

    def _piece_offset(self, plan: SlotPlan, expert: int, piece: int) -> int:
        if self.index.layout == "merged":
            return plan.first_byte + expert * plan.slot_bytes + plan.pieces[piece][1]
        return self.index.offsets[plan.first_piece + expert * len(plan.pieces) + piece]

    def views(self, layer: int, buffer: Tensor) -> dict[str, Packed]:
        """See a slot, (slot_bytes,) uint8, as the packed matrices of an expert, without a copy."""
        plan = self.plan(layer)
        return {name: view(buffer[at : at + packed.n_bytes], packed) for name, (at, packed) in plan.matrices.items()}

    # ---- whether they are right

    def fingerprint(self, layer: int, expert: int) -> bytes:
        """Return the 8 bytes that stand for an expert; see ``check``."""
        self.plan(layer, expert)
        return bytes.fromhex(self.index.fingerprints[list(self.plans).index(layer) * self.n_experts + expert])

    def check(self, layer: int, expert: int, buffer: Any) -> None:
        """Check in microseconds that a slot holds an expert: samples over all of it, the very start and end of each matrix among them.

        Parameters
        ----------
        layer, expert : int
            Which expert the slot should hold.
        buffer : (slot_bytes,) uint8, memoryview, array or Tensor
            The slot.

        Raises
        ------
        InputError
            If it holds anything else; another expert of the layer is named.
        """
        found = self.plan(layer, expert).fingerprint_of(buffer)
        if found != self.fingerprint(layer, expert):
            known = [e for e in range(self.n_experts) if self.fingerprint(layer, e) == found]
            got = f"expert {known[0]}" if known else "other bytes"
            raise InputError("slot", expected=f"expert {expert} of layer {layer}", got=got, fix="a load was skipped, partial or wrong")

    def verify(self) -> None:
        """Read the whole file from the disk and compare every checksum.

        Raises
        ------
        InputError
            For the first piece that is wrong: its layer, expert, matrix and place in the file.
        """
        with open(self.path, "rb") as file:
            self._check_size()
            # what was just written must be read from the disk, not from the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for layer, plan in self.plans.items():
                for expert in range(self.n_experts):
                    for i, (matrix, _, size) in enumerate(plan.pieces):
                        offset = self._piece_offset(plan, expert, i)
                        if _crc32(file.fileno(), offset, size) != self.index.crc32[plan.first_piece + expert * len(plan.pieces) + i]:
                            expected = f"matrix {matrix} of expert {expert} in layer {layer}"
                            got = f"other bytes in {size:,} bytes from offset {offset:,}"
                            raise InputError("checksum", expected=expected, got=got, fix="build the store again", where=str(self.path))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def __repr__(self) -> str:
        i = self.index
        return f"<ExpertStore {i.model}: {len(self.plans)} layers of {i.n_experts} experts, {i.data_bytes:,} B, {i.layout}>"


def _crc32(fd: int, offset: int, size: int) -> int:
    """Checksum of a run of a file; a run that ends early has another one."""
    crc = 0
    while size > 0:
        data = os.pread(fd, min(size, _VERIFY_BYTES), offset)
        if not data:
            return -1
        crc = zlib.crc32(data, crc)
        offset, size = offset + len(data), size - len(data)
    return crc


def _is_hex(text: str) -> bool:
    return len(text) == 16 and all(c in "0123456789abcdef" for c in text)
