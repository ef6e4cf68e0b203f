"""Owns how recorded cells become a trace: tokens in order, one column a layer, absent cells found and judged.

It must not know any file format. A cell is one token in one MoE layer. Where a cell is missing:

- the last layer of a prefill pass, but for the last prompt token (of which an answer follows, or others have it): real. Engines that gather the tokens whose logits are asked for before the last FFN (llama.cpp,
  ``inp_out_ids``) route only those there. The cells stay -1 and a note tells how many.
- the last token of the file, in decode: the recorder was stopped within a token. The token is left out, with a note.
- anywhere else: the file is damaged, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import DECODE, MAX_TRACE_BYTES, PREFILL, RoutingTrace
from moesim.trace_formats.source import Options, Source, some

Fail = Callable[[int, str, str, str], InputError]  # (row, what, expected, got) to the error at that row's place
MAX_EXPERTS = 2**15 - 1
NO_PHASE = "the file does not tell prompt from answer: all rows are marked decode; give --prompt-tokens to mark the prompt"
IDS_SEEN = "the number of experts is not stated in the file: {0} = largest id seen + 1 is assumed; give --experts if the model has more"


@dataclass(slots=True)
class Cells:
    """Cells as columns of n rows, in file order; ``place`` gives the (line or byte) error for cell i."""

    seq: NDArray[np.int64]
    position: NDArray[np.int64]
    phase: NDArray[np.int64]
    layer: NDArray[np.int64]
    ids: NDArray[np.int64]  # (n, K)
    weights: NDArray[np.float64] | None  # (n, K)
    fail: Fail


def check_ids(ids: NDArray[np.int64], n_experts: int | None, fail: Fail) -> None:
    """Refuse ids out of range and an expert twice in a cell; ``ids`` is (n, K)."""
    limit = MAX_EXPERTS if n_experts is None else n_experts
    bad = (ids < 0) | (ids >= limit)
    if bad.any():
        i, k = (int(n) for n in np.argwhere(bad)[0])
        raise fail(i, "expert", f"ids from 0 to {limit - 1}", str(int(ids[i, k])))
    if ids.shape[1] > 1:
        ordered = np.sort(ids, axis=1)
        double = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if double.any():
            i = int(np.flatnonzero(double)[0])
            raise fail(i, "experts of a token", "each expert once", str(ids[i].tolist()))


def slots_to_cells(
    keys: Sequence[NDArray[np.int64]], slot: NDArray[np.int64], fail: Fail, top_k: int | None
) -> tuple[NDArray[np.int64], int]:
    """Group rows of one slot each into cells of K slots.

    Parameters
    ----------
    keys : sequence of (n,) int64
        Columns that are equal for the rows of one cell.
    slot : (n,) int64
        Slot of each row: 0 to K - 1 once in each cell.
    fail : callable
        The error for row i.
    top_k : int, optional
        K where it is known; else the largest slot + 1.

    Returns
    -------
    (n / K, K) int64
        Row numbers of each cell by slot, in file order.
    int
        Rows at the end of the file that belong to a cell that is not whole, and are left out.
    """
    k = top_k or int(slot.max()) + 1
    bad = (slot < 0) | (slot >= k)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise fail(i, "slot", f"0 to {k - 1}", str(int(slot[i])))
    number, tail = len(slot), 0
    if number % k == 0 and (slot.reshape(-1, k) == np.arange(k)).all():  # as every recorder writes them: the rows of a cell together
        if all((key.reshape(-1, k) == key.reshape(-1, k)[:, :1]).all() for key in keys):
            return np.arange(number).reshape(-1, k), 0
    order = np.lexsort((*keys[::-1],))
    new = np.zeros(number, bool)
    for key in keys:
        new[1:] |= key[order][1:] != key[order][:-1]
    key = np.empty(number, np.int64)
    key[order] = np.cumsum(new)
    if number % k:  # the recorder stopped within the last cell
        while tail < min(k, number) and key[number - 1 - tail] == key[-1]:
            tail += 1
        number -= tail
    order = np.lexsort((slot[:number], key[:number]))
    rows = key[order]
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]]) if number else np.zeros(1, np.int64)
    wrong = np.flatnonzero(np.diff(np.r_[starts, number]) != k)
    if not wrong.size:
        wrong = np.flatnonzero((slot[order].reshape(-1, k) != np.arange(k)).any(axis=1))
    if wrong.size or not number:
        at = int(order[starts[wrong[0]]]) if number else 0
        raise fail(at, "slots of a token in a layer", f"each of 0 to {k - 1} once", "missing or repeated ones")
    cells = order.reshape(-1, k)
    return cells[np.argsort(cells.max(axis=1), kind="stable")], tail


def cells_to_trace(cells: Cells, source: Source, options: Options, meta: Mapping[str, Any]) -> RoutingTrace:
    """Make a trace of cells in any order: tokens are sorted by (seq, position), sequences by number, layers by number."""
    n = len(cells.layer)
    if not n:
        raise source.fail("rows", "at least one token", "none")
    stated = _agree("n_experts", options.n_experts, meta.get("n_experts"), source)
    check_ids(cells.ids, stated, cells.fail)
    for name, column, high in (("position", cells.position, 2**31), ("sequence", cells.seq, 2**31), ("layer", cells.layer, 2**16)):
        bad = (column < 0) | (column >= high)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise cells.fail(i, name, f"0 to {high - 1}", str(int(column[i])))
    order = np.lexsort((cells.layer, cells.position, cells.seq))  # stable, and quick where little is out of order
    seq, position, layer = cells.seq[order], cells.position[order], cells.layer[order]
    new = np.r_[True, (seq[1:] != seq[:-1]) | (position[1:] != position[:-1])]
    token = np.cumsum(new) - 1
    same = np.flatnonzero(~new[1:] & (layer[1:] == layer[:-1]))
    if same.size:
        i = int(order[same[0] + 1])
        raise cells.fail(
            i, "row", "each (sequence, token, layer) once", f"token {int(cells.position[i])}, layer {int(cells.layer[i])} again"
        )
    first = np.flatnonzero(new)
    phase = cells.phase[order]
    mixed = np.flatnonzero(phase != phase[first][token])
    if mixed.size:
        raise cells.fail(int(order[mixed[0]]), "phase", "one phase for all layers of a token", "both")
    layers, column = np.unique(layer, return_inverse=True)
    n_tokens, top_k = len(first), cells.ids.shape[1]
    room(n_tokens, len(layers), top_k, source)
    ids = np.full((n_tokens, len(layers), top_k), -1, np.int16)
    ids[token, column] = cells.ids[order]
    weights = None
    if cells.weights is not None:
        weights = np.full(ids.shape, np.nan, np.float16)
        weights[token, column] = to_half(cells.weights, cells.fail)[order]
    last_token = int(token[np.flatnonzero(order == n - 1)[0]])
    return finish(ids, weights, seq[first], position[first], phase[first], layers, source, options, meta, last_token)


def to_half(weights: NDArray[np.float64], fail: Fail) -> NDArray[np.float16]:
    """Round weights to float16; refuse what is negative, infinite, or no number."""
    bad = ~((weights >= 0) & (weights <= float(np.finfo(np.float16).max)))
    if bad.any():
        i = int(np.flatnonzero(bad.reshape(len(weights), -1).any(axis=1))[0])
        raise fail(i, "weight", "finite numbers of at least 0", str(weights[i].tolist()))
    return weights.astype(np.float16)


def room(n_tokens: int, n_layers: int, top_k: int, source: Source) -> None:
    """Refuse a table that would not fit the largest trace, before memory is taken."""
    need = 4 * n_tokens * n_layers * top_k
    if need > MAX_TRACE_BYTES:
        raise source.fail(
            "rows",
            f"at most {MAX_TRACE_BYTES} bytes as a trace",
            f"{n_tokens} tokens x {n_layers} layers x {top_k} slots",
            "split the file",
        )


def _agree(name: str, wanted: int | None, stated: Any, source: Source) -> int | None:
    if wanted is not None and stated is not None and wanted != stated:
        raise source.fail(name, f"{stated}, as in the file", f"{wanted} stated by the caller", "leave the option out")
    return wanted if wanted is not None else stated


def finish(
    ids: NDArray[np.int16],
    weights: NDArray[np.float16] | None,
    seq: NDArray[np.int64],
    position: NDArray[np.int64],
    phase: NDArray[np.int64],
    layers: Any,
    source: Source,
    options: Options,
    meta: Mapping[str, Any],
    last_token: int | None = None,
) -> RoutingTrace:
    """Judge absent cells, settle the shape, and build the trace with what is known in its meta.

    Parameters
    ----------
    ids, weights : (T, L, K)
        As in a trace.
    seq, position, phase : (T,)
        As in a trace.
    layers : sequence of int
        The layers' numbers in the source.
    source, options : Source, Options
        The file with its notes, and what the caller states.
    meta : mapping
        Facts of the file; ``n_experts`` where it states it.
    last_token : int, optional
        Row that was recorded last, which may be incomplete.
    """
    missing = ids[:, :, 0] < 0
    if missing.any() and last_token is not None and missing[last_token].any() and phase[last_token] == DECODE:
        source.note(f"the last token recorded has only {int((~missing[last_token]).sum())} of {len(layers)} layers: left out")
        keep = np.arange(len(ids)) != last_token
        ids, seq, position, phase, missing = ids[keep], seq[keep], position[keep], phase[keep], missing[keep]
        weights = None if weights is None else weights[keep]
        if not len(ids):
            raise source.fail("rows", "at least one whole token", "only a part of one")
        _refuse_ghosts(missing, layers, source)
    if missing.any():
        _judge(missing, seq, phase, layers, source, attributed=last_token is not None)
    _, n_layers, top_k = ids.shape
    _agree("top_k", options.top_k, top_k, source)
    _agree("n_layers", options.n_layers, n_layers, source)
    n_experts = _agree("n_experts", options.n_experts, meta.get("n_experts"), source)
    if n_experts is None:
        n_experts = max(int(ids.max()) + 1, top_k)
        source.note(IDS_SEEN.format(n_experts))
    numbers = [int(layer) for layer in layers]
    facts: dict[str, Any] = {**meta, "n_layers": n_layers, "n_experts": n_experts, "top_k": top_k, "source_file": source.path.name}
    if numbers != list(range(n_layers)):
        facts["layer_numbers"] = numbers
        source.note(f"the MoE layers are layers {some(numbers)} of the source; they are columns 0 to {n_layers - 1} here")
    facts["notes"] = list(source.notes)
    try:
        return RoutingTrace(ids, weights, seq.astype(np.int32), position.astype(np.int32), phase.astype(np.uint8), facts)
    except InputError as error:
        raise error.at(source.where) from None


def _refuse_ghosts(missing: NDArray[np.bool_], layers: Any, source: Source) -> None:
    """A layer that only the token left out had is a damaged number."""
    ghost = np.flatnonzero(missing.all(axis=0))
    if ghost.size:
        raise source.fail(
            "layer", "the layers of the other tokens", f"layer {int(layers[ghost[0]])} in the last token alone", "the file is damaged"
        )


def _judge(
    missing: NDArray[np.bool_], seq: NDArray[np.int64], phase: NDArray[np.int64], layers: Any, source: Source, attributed: bool
) -> None:
    """Accept missing cells in the last layer of the prefill, with a note; refuse all others.

    ``attributed``: the source says of each cell which token it belongs to, so that the last token of a prompt that is answered must have all.
    """
    other = missing.copy()
    other[phase == PREFILL, -1] = False
    if other.any():
        t, column = (int(n) for n in np.argwhere(other)[0])
        got = f"layer {int(layers[column])} missing for row {t} ({'prefill' if phase[t] == PREFILL else 'decode'}); {int(other.sum())} cells in all"
        raise source.fail("layers of a token", f"all {len(layers)} layers", got, "the file is cut off, damaged, or was filtered")
    prompt = np.flatnonzero(phase == PREFILL)
    have = ~missing[prompt, -1]
    final = np.r_[seq[prompt][1:] != seq[prompt][:-1], True]  # the last prompt token of each sequence
    number = np.cumsum(np.r_[False, final[:-1]])
    some_rows = np.bincount(number, have) > 0
    answered = attributed & np.isin(seq[prompt][final], seq[phase == DECODE])
    cut = np.flatnonzero((some_rows | answered) & ~have[final])
    if cut.size:
        got = f"no layer {int(layers[-1])} for the last token of a prompt whose answer, or of which other tokens, have it"
        raise source.fail("layers of a token", "the last layer at least for the last prompt token", got, "the file is cut off or damaged")
    source.note(
        f"ragged prefill: layer {int(layers[-1])} routed {int(have.sum())} of {len(prompt)} prompt tokens (the engine routes only tokens "
        "whose logits are asked for in the last layer); the other cells are absent"
    )
