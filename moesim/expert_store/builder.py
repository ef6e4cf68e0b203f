"""Owns the building of an expert store: packed experts, given or drawn, into a file and its index, both or neither.

Drawn experts depend on seed, layer and expert only, so a merged and a scattered store of one seed hold the same experts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.expert_store import ExpertStore, SlotPlan, StoreIndex, StoreLayout, index_path, layer_entries, slot_plans
from moesim.model import ModelSpec
from moesim.precision import PrecisionPlan
from moesim.quant.packing import cpu_capability, pack, random_packed

if TYPE_CHECKING:
    from torch import Tensor

Weights = Callable[[int, int, str], "Tensor"]  # layer, expert, matrix -> (N, K) float32, or the packed bytes, uint8


def build_store(
    path: str | Path,
    model: ModelSpec,
    plan: PrecisionPlan,
    *,
    align: int = 4096,
    layout: StoreLayout = "merged",
    scattered_piece: int = 131072,
    weights: Weights | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ExpertStore:
    """Write a store and open it.

    The file and its index are written under other names, flushed to the disk and renamed at the end; whatever goes wrong before, nothing
    is left behind and an older store of that name stays. The page cache keeps none of it.

    Parameters
    ----------
    path : path
        The file; its index is ``path`` with ``.json`` appended.
    model : ModelSpec
        Gives the shapes.
    plan : PrecisionPlan
        Gives the formats, which must have real kernels.
    align : int
        Extents start and end at multiples of it. Direct reads need 4096.
    layout : str
        ``"merged"`` or ``"scattered"``.
    scattered_piece : int
        Bytes of a piece where scattered, a multiple of ``align``.
    weights : callable, optional
        Gives the (N, K) float32 weights of (layer, expert, matrix), or their packed bytes; by default they are drawn in packed form.
    seed : int
        Of drawn weights, and of the order of scattered pieces.
    progress : callable, optional
        Called with the experts written and their total number.

    Raises
    ------
    InputError
        For a model or format that cannot be stored, weights of another shape, a folder that cannot be written, or too little space: then
        the message says how much is needed and how much is free.
    """
    path = Path(path)
    entries = layer_entries(model, plan)
    plans = slot_plans(entries, model.n_experts, layout, align, scattered_piece)
    total = sum(model.n_experts * p.slot_bytes for p in plans.values())
    offsets = _drawn_order(plans, model.n_experts, seed) if layout == "scattered" else []
    _check_space(path, total)
    checksums: list[int] = []
    fingerprints: list[str] = []
    parts = [path.with_name(f".{path.name}.{os.getpid()}.part"), index_path(path).with_name(f".{path.name}.{os.getpid()}.json.part")]
    try:
        with open(parts[0], "xb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, total)
            for layer, slot_plan in plans.items():
                slot = np.zeros(slot_plan.slot_bytes, dtype=np.uint8)
                for expert in range(model.n_experts):
                    _fill(slot, slot_plan, layer, expert, weights, seed)
                    checksums += [zlib.crc32(slot[at : at + size].data) for _, at, size in slot_plan.pieces]
                    fingerprints.append(slot_plan.fingerprint_of(slot).hex())
                    _write_expert(file.fileno(), slot, slot_plan, expert, offsets)
                    if progress is not None:
                        progress(len(fingerprints), len(plans) * model.n_experts)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        index = StoreIndex(
            kind="moesim expert store",
            version=1,
            model=model.name,
            n_experts=model.n_experts,
            layout=layout,
            align=align,
            scattered_piece=scattered_piece,
            weights=f"drawn, seed {seed}" if weights is None else "given",
            vector_unit=cpu_capability(),
            data_bytes=total,
            layers=entries,
            offsets=offsets,
            crc32=checksums,
            fingerprints=fingerprints,
        )
        with open(parts[1], "x", encoding="utf-8") as text:
            text.write(index.model_dump_json(indent=None))
            text.flush()
            os.fsync(text.fileno())
        index_path(path).unlink(missing_ok=True)  # an index never describes another file than the one beside it
        os.replace(parts[0], path)
        os.replace(parts[1], index_path(path))
        _flush_folder(path.parent)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        got = f"{error.strerror or error}; {free:,} bytes free"
        raise InputError(
            "expert store", expected=f"{total:,} bytes of space", got=got, fix="nothing is left behind", where=str(path)
        ) from None
    finally:
        for part in parts:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    return ExpertStore.open(path)


def _check_space(path: Path, total: int) -> None:
    if not path.parent.is_dir():
        raise InputError("expert store", expected="a name in an existing folder", got=str(path.parent), where=str(path))
    free = shutil.disk_usage(path.parent).free
    if free < total:
        fix = "free some, or choose another folder"
        raise InputError("expert store", expected=f"{total:,} bytes of space", got=f"{free:,} bytes free", fix=fix, where=str(path))


def _drawn_order(plans: dict[int, SlotPlan], n_experts: int, seed: int) -> list[int]:
    """Place all pieces in the file in a drawn order; return the offset of each."""
    sizes = np.concatenate([np.tile([size for *_, size in p.pieces], n_experts) for p in plans.values()])
    order = np.random.default_rng(seed).permutation(len(sizes))
    ends = np.cumsum(sizes[order])
    offsets = np.empty_like(ends)
    offsets[order] = ends - sizes[order]
    return [int(offset) for offset in offsets]


def _fill(slot: NDArray[np.uint8], plan: SlotPlan, layer: int, expert: int, weights: Weights | None, seed: int) -> None:
    """Put the matrices of an expert into its slot."""
    rng = np.random.default_rng([seed, layer, expert])
    for name, (at, layout) in plan.matrices.items():
        if weights is None:
            slot[at : at + layout.n_bytes] = random_packed(rng, layout)
            continue
        given = weights(layer, expert, name)
        if given.dtype.itemsize == 1 and tuple(given.shape) == (layout.n_bytes,):
            slot[at : at + layout.n_bytes] = given.numpy()
            continue
        if tuple(given.shape) != (layout.rows, layout.cols):
            what = f"weights of {name}, expert {expert}, layer {layer}"
            raise InputError(what, expected=f"{layout.rows} outputs x {layout.cols} inputs", got=f"shape {tuple(given.shape)}")
        slot[at : at + layout.n_bytes] = pack(given, layout.format).numpy()


def _write_expert(fd: int, slot: NDArray[np.uint8], plan: SlotPlan, expert: int, offsets: list[int]) -> None:
    if not offsets:
        _write(fd, slot, plan.first_byte + expert * plan.slot_bytes)
        return
    first = plan.first_piece + expert * len(plan.pieces)
    for i, (_, at, size) in enumerate(plan.pieces):
        _write(fd, slot[at : at + size], offsets[first + i])


def _write(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    rest = data.data
    while rest:
        done = os.pwrite(fd, rest, offset)
        rest, offset = rest[done:], offset + done


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
