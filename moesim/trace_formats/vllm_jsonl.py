"""Owns the route log that several small vLLM patches write (VLLM_LOG_MOE): JSON lines of one token in one layer each.

Layout: a line ``{"type": "meta", "model_id", ..., "layers_logged", "top_k"}``, then ``{"type": "route", "req_id", "token_idx", "layer",
"topk_ids", "topk_weights"}``. ``token_idx`` is the row in the batch of one forward pass and starts over with each; ``req_id`` is a constant.

What the log does not say, and what is done about it:

- Dummy passes (memory profiling, graph capture) come first; all their rows are equal. Leading passes of at least 8 equal rows are left
  out, and leading ones of 2 to 7 rows equal to those. Never by weights, which look ordinary in some logs, and never a pass of one row.
- Prompts of one prefill pass follow one another without borders: one sequence, unless the caller states the lengths.
- A pass with more rows than the one before holds prompts; others are decode (a smaller second pass of prompts would be mistaken for it,
  unless the lengths are stated).
- Decode rows have no request. While the number of rows stays the same, row i is one request; when it shrinks nothing says which request
  ended, so each row begins a new sequence there, with positions from 0.
- A file cut between two lines of the last pass looks like a smaller last pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import DECODE, PREFILL, RoutingTrace
from moesim.trace_formats.assemble import MAX_EXPERTS, finish
from moesim.trace_formats.passes import Records, Table, lay_out
from moesim.trace_formats.source import Options, Source, is_whole, some

MANY = 8  # rows of a pass that do not all agree by chance
_FIELDS = ("token_idx", "layer", "topk_ids")


def sniff(source: Source) -> bool:
    if not source.is_jsonl:
        return False
    return (
        set(_FIELDS) <= source.keys or {"layers_logged", "top_k"} <= source.keys or ("type" in source.keys and b'"topk_ids"' in source.head)
    )


def read(source: Source, options: Options) -> RoutingTrace:
    """Read a route log."""
    head = next(source.json_chunks(0, 1))[1][0]
    meta: dict[str, Any] = head if head.get("type") == "meta" else {}
    top_k = meta.get("top_k", options.top_k)
    if "top_k" in meta and not is_whole(top_k, 1, 1024):
        raise source.fail_line(1, "top_k", "a whole number from 1 to 1024", repr(top_k))
    parts, other = [], 0
    for start, rows in source.json_chunks(1 if meta else 0):
        numbers = [i for i, row in enumerate(rows) if row.get("type", "route") == "route"]
        other += len(rows) - len(numbers)
        if numbers:
            routes = rows if len(numbers) == len(rows) else [rows[i] for i in numbers]
            parts.append(_columns(source, start + np.array(numbers, np.int64), routes, top_k))
            top_k = parts[0][3].shape[1]
    if not parts:
        raise source.fail("lines", "at least one route", "none", "the file is cut off")
    if other:
        source.note(f"{other} lines of other types left out")
    line, token, layer, ids = (np.concatenate([part[i] for part in parts]) for i in range(4))
    known = [part[4] for part in parts if part[4] is not None]
    weights = np.concatenate(known) if len(known) == len(parts) else None
    if weights is None and (known or any(part[5] for part in parts)):
        source.note("some lines have no weights: all of them left out")
    logged = meta.get("layers_logged")
    if isinstance(logged, list) and not set(np.unique(layer).tolist()) <= {n for n in logged if is_whole(n)}:
        i = int(np.flatnonzero(~np.isin(layer, [n for n in logged if is_whole(n)]))[0])
        raise source.fail_line(int(line[i]) + 1, "layer", f"one of layers_logged {some(logged)}", str(int(layer[i])))
    if isinstance(logged, list) and (absent := sorted({n for n in logged if is_whole(n)} - set(np.unique(layer).tolist()))):
        raise source.fail("lines", f"routes of all layers_logged {some(logged)}", f"none of layer {some(absent)}", "the file is cut off")
    begin = np.flatnonzero(np.r_[True, (token[1:] == 0) | (layer[1:] != layer[:-1])])
    count = np.diff(np.r_[begin, len(token)])
    expected = np.arange(len(token)) - np.repeat(begin, count)
    wrong = np.flatnonzero(token != expected)
    if wrong.size:
        i = int(wrong[0])
        fix = "lines are missing or out of order"
        raise source.fail_line(int(line[i]) + 1, "token_idx", f"{int(expected[i])}, the next row of the pass", str(int(token[i])), fix)

    def fail(record: int, what: str, expected: str, got: str) -> InputError:
        return source.fail_line(int(line[begin[record]]) + 1, what, expected, got)

    table = lay_out(Records(layer[begin], count, ids, fail, weights), source, ragged=False)
    facts: dict[str, Any] = {"captured_by": "vLLM route log"}
    if isinstance(meta.get("model_id"), str):
        facts["model"] = meta["model_id"]
    return _sequences(table, _drop_dummies(table, source), source, options, facts)


Ints = NDArray[np.int64]


def _columns(
    source: Source, line: Ints, rows: list[Any], top_k: int | None
) -> tuple[Ints, Ints, Ints, Ints, NDArray[np.float64] | None, bool]:
    """Return line numbers from 0, token_idx, layer, ids, weights where all lines have them, and whether any line has."""
    try:
        token, layer = np.array([row["token_idx"] for row in rows]), np.array([row["layer"] for row in rows])
        ids = np.array([row["topk_ids"] for row in rows])
        good = token.dtype.kind == layer.dtype.kind == ids.dtype.kind == "i" and token.ndim == layer.ndim == 1 and ids.ndim == 2
        if not good or not ids.shape[1] or (top_k is not None and ids.shape[1] != top_k) or (layer < 0).any() or (layer >= 2**16).any():
            raise ValueError("values of another kind")
        if (ids < 0).any() or (ids >= MAX_EXPERTS).any():
            raise ValueError("ids out of range")
        have = [row.get("topk_weights") for row in rows]
        weights = None
        if all(one is not None for one in have):
            weights = np.array(have, dtype=np.float64)
            if weights.shape != ids.shape or not np.isfinite(weights).all() or (weights < 0).any():
                raise ValueError("weights of another kind")
        some_weights = any(one is not None for one in have)
        return line, token.astype(np.int64), layer.astype(np.int64), ids.astype(np.int64), weights, some_weights
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise _first_bad(source, line, rows, top_k, str(error)) from None


def _first_bad(source: Source, line: Ints, rows: list[Any], top_k: int | None, why: str) -> InputError:
    k = top_k
    for number, row in zip((line + 1).tolist(), rows, strict=True):
        for name, high in (("token_idx", 2**31 - 1), ("layer", 2**16 - 1)):
            if not is_whole(row.get(name), 0, high):
                return source.fail_line(number, name, f"a whole number from 0 to {high}", repr(row.get(name)))
        ids, weights = row.get("topk_ids"), row.get("topk_weights")
        k = k if k is not None else len(ids) if isinstance(ids, list) and ids else None
        if not isinstance(ids, list) or len(ids) != k or not all(is_whole(n, 0, MAX_EXPERTS - 1) for n in ids):
            return source.fail_line(number, "topk_ids", f"{k or 'some'} expert ids", repr(ids))
        right = isinstance(weights, list) and len(weights) == k and all(isinstance(w, (int, float)) and 0 <= w < 65504 for w in weights)
        if weights is not None and not right:
            return source.fail_line(number, "topk_weights", f"{k} numbers of at least 0", repr(weights))
    return source.fail("lines", "routes of one kind", why)


def _drop_dummies(table: Table, source: Source) -> int:
    """Return the number of leading passes that are dummies."""
    stop = np.cumsum(table.size)
    dummy: NDArray[np.int16] | None = None
    dropped: list[int] = []
    for p, n in enumerate(table.size.tolist()):
        rows = table.ids[stop[p] - n : stop[p]]
        equal = n > 1 and (rows == rows[:1]).all()
        if not equal or (n < MANY and (dummy is None or not (rows[0] == dummy).all())):
            alike = int((rows.reshape(n, -1) == rows[n // 2].reshape(-1)).all(axis=1).sum())
            if n >= MANY and not equal and alike > 0.8 * n:
                source.note(f"{alike} of {n} rows of a leading pass are equal: kept, but it may be a dummy pass with damaged lines")
            break
        dummy = rows[0] if dummy is None else dummy
        dropped.append(n)
    if dropped:
        source.note(f"{len(dropped)} dummy passes of {some(dropped)} equal rows at the start left out (memory profiling, graph capture)")
        if len(dropped) == len(table.size):
            raise source.fail("passes", "at least one that is not a dummy", "only passes of equal rows")
        p = len(dropped)
        if table.size[p] == 1 and (table.ids[stop[p] - 1] == dummy).all():
            source.note("the first pass kept has one row, equal to the dummy rows: it may be one of them")
    return len(dropped)


def _sequences(table: Table, dropped: int, source: Source, options: Options, facts: dict[str, Any]) -> RoutingTrace:
    """Give every row a sequence and a position, as far as the log allows, and say how far that is."""
    base = int(table.size[:dropped].sum())
    size = table.size[dropped:].tolist()
    seq: list[NDArray[np.int64]] = []
    position: list[NDArray[np.int64]] = []
    phase: list[NDArray[np.int64]] = []
    prompts = list(options.prompt_tokens)
    live: list[tuple[int, int]] = []  # sequence and next position of each row of the running batch
    n_sequences = running = borders = lost = stated = 0
    for p, n in enumerate(size):
        if p == 0 or n > running:  # more rows than requests run: prompts are among them
            lengths = [n]
            if prompts and sum(prompts[: _fit(prompts, n)]) == n:
                lengths, prompts = prompts[: _fit(prompts, n)], prompts[_fit(prompts, n) :]
                stated += len(lengths)
            else:
                borders += 1
            seq.append(np.repeat(n_sequences + np.arange(len(lengths)), lengths))
            position.append(np.concatenate([np.arange(length) for length in lengths]))
            phase.append(np.full(n, PREFILL, np.int64))
            live = [(n_sequences + i, length) for i, length in enumerate(lengths)]
            n_sequences += len(lengths)
            running = len(lengths) if len(lengths) > 1 or stated else n  # how many requests one pass holds is not written
            continue
        if n != len(live):
            lost += len(live) > n or p > 1
            live = [(n_sequences + i, 0) for i in range(n)]
            n_sequences += n
        seq.append(np.array([s for s, _ in live], np.int64))
        position.append(np.array([at for _, at in live], np.int64))
        phase.append(np.full(n, DECODE, np.int64))
        live = [(s, at + 1) for s, at in live]
        running = n
    if options.prompt_tokens and (prompts or not stated):
        raise source.fail(
            "--prompt-tokens",
            f"lengths that add up to the rows of the prefill passes, {some(_prefill_sizes(size))}",
            some(options.prompt_tokens),
        )
    if borders:
        source.note(
            f"{borders} prefill passes: the prompts in each follow one another without borders and are one sequence here; give --prompt-tokens to part them"
        )
    if len(size) > 1 and any(n > 1 for n in size[1:]):
        source.note("row i of consecutive decode passes of the same size is taken for one request, in the order of the prompts")
    if lost:
        source.note(
            f"the number of decode rows changes {lost} times and nothing says which request ended: each row begins a new sequence there, at position 0"
        )
    all_seq = np.concatenate(seq)
    order = np.argsort(all_seq, kind="stable")
    weights = None if table.weights is None else table.weights[base:][order]
    where = np.concatenate(position)[order], np.concatenate(phase)[order]
    return finish(table.ids[base:][order], weights, all_seq[order], *where, table.layers, source, options, facts)


def _fit(prompts: list[int], n: int) -> int:
    """Return how many of the lengths are needed to reach n."""
    total = 0
    for i, length in enumerate(prompts, start=1):
        total += length
        if total >= n:
            return i
    return len(prompts)


def _prefill_sizes(size: list[int]) -> list[int]:
    return [n for i, n in enumerate(size) if i == 0 or n > size[i - 1]]
