"""Owns MoE-PolicyLang's trace recordings: JSON lines, a header and one line a token and layer.

Layout (moe_policylang/integrations/trace_recorder.py, TraceRecording.save): ``{"model_name", "num_layers", "num_experts", "top_k",
"num_entries"}``, then ``{"t": token, "l": layer, "e": experts, "s": scores or null}``. ``num_entries`` is checked, so a file that lost lines is
refused. The token number starting over is a new sequence. Phases are not recorded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import DECODE, PREFILL, RoutingTrace
from moesim.trace_formats.assemble import NO_PHASE, Cells, cells_to_trace
from moesim.trace_formats.source import Options, Source, is_whole

_HEADER = ("num_layers", "num_experts", "top_k", "num_entries")


def sniff(source: Source) -> bool:
    return source.is_jsonl and ({"num_layers", "num_experts", "top_k"} <= source.keys or {"t", "l", "e"} <= source.keys)


def read(source: Source, options: Options) -> RoutingTrace:
    """Read a recording."""
    header = next(source.json_chunks(0, 1))[1][0]
    for name in _HEADER:
        if not is_whole(header.get(name), 1, 2**31 - 1 if name == "num_entries" else 2**15 - 1):
            raise source.fail_line(1, name, "a whole number of at least 1", repr(header.get(name)))
    n_layers, n_experts, top_k, n_entries = (header[name] for name in _HEADER)
    if n_entries != len(source.lines) - 1:
        raise source.fail(
            "num_entries", f"{n_entries} lines after the header", str(len(source.lines) - 1), "the file is cut off or damaged"
        )
    parts = [_columns(source, start, rows, n_layers, top_k) for start, rows in source.json_chunks(1)]
    token, layer, ids = (np.concatenate([part[i] for part in parts]) for i in range(3))
    scores = [part[3] for part in parts if part[3] is not None]
    weights = np.concatenate(scores) if len(scores) == len(parts) else None
    if weights is None and any(part[4] for part in parts):
        source.note("scores are not one number a chosen expert in all lines: left out")
    seq = _sequences(source, token, layer)
    phase = np.full(len(token), DECODE, np.int64)
    if options.prompt_tokens:
        if len(options.prompt_tokens) != int(seq[-1]) + 1:
            raise source.fail("--prompt-tokens", f"{int(seq[-1]) + 1} lengths, one a sequence", str(len(options.prompt_tokens)))
        begin = np.full(int(seq[-1]) + 1, 2**31)
        np.minimum.at(begin, seq, token)
        phase[token - begin[seq] < np.array(options.prompt_tokens)[seq]] = PREFILL
    else:
        source.note(NO_PHASE)
    meta: dict[str, Any] = {"n_experts": n_experts, "captured_by": "MoE-PolicyLang"}
    if isinstance(header.get("model_name"), str):
        meta["model"] = header["model_name"]
    trace = cells_to_trace(
        Cells(seq, token, phase, layer, ids, weights, lambda i, *rest: source.fail_line(i + 2, *rest)), source, options, meta
    )
    if trace.n_layers != n_layers:
        trace.meta["notes"].append(f"the header states {n_layers} layers, {trace.n_layers} of them have entries")
    return trace


Part = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64] | None, bool]


def _columns(source: Source, start: int, rows: list[Any], n_layers: int, top_k: int) -> Part:
    """Return tokens, layers, ids, scores where all lines have K of them, and whether any line has scores."""
    try:
        token, layer = np.array([row["t"] for row in rows]), np.array([row["l"] for row in rows])
        ids = np.array([row["e"] for row in rows])
        right = token.dtype.kind == layer.dtype.kind == ids.dtype.kind == "i" and token.ndim == layer.ndim == 1
        if not right or ids.shape != (len(rows), top_k):
            raise ValueError("values of another kind")
        if (token < 0).any() or (token >= 2**31).any() or (layer < 0).any() or (layer >= n_layers).any():
            raise ValueError("values out of range")
        scores = [row.get("s") for row in rows]
        weights = None
        if all(isinstance(score, list) and len(score) == top_k for score in scores):
            weights = np.array(scores, dtype=np.float64)
        some_scores = any(score is not None for score in scores)
        return token.astype(np.int64), layer.astype(np.int64), ids.astype(np.int64), weights, some_scores
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise _first_bad(source, start, rows, n_layers, top_k, str(error)) from None


def _first_bad(source: Source, start: int, rows: list[Any], n_layers: int, top_k: int, why: str) -> InputError:
    for number, row in enumerate(rows, start=start + 1):
        for name, high in (("t", 2**31 - 1), ("l", n_layers - 1)):
            if not is_whole(row.get(name), 0, high):
                return source.fail_line(number, name, f"a whole number from 0 to {high}", repr(row.get(name)))
        ids = row.get("e")
        if not isinstance(ids, list) or len(ids) != top_k or not all(is_whole(n) for n in ids):
            return source.fail_line(number, "e", f"{top_k} expert ids", repr(ids))
        if isinstance(row.get("s"), list) and not all(isinstance(s, (int, float)) for s in row["s"]):
            return source.fail_line(number, "s", "numbers", repr(row["s"]))
    return source.fail("lines", "entries of one kind", why)


def _sequences(source: Source, token: NDArray[np.int64], layer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the sequences: a new one begins where (token, layer) comes again, which must be the first pair of the file."""
    order = np.lexsort((np.arange(len(token)), layer, token))
    new = np.r_[True, (token[order][1:] != token[order][:-1]) | (layer[order][1:] != layer[order][:-1])]
    first = np.flatnonzero(new)
    times = np.empty(len(token), np.int64)
    times[order] = np.arange(len(token)) - first[np.cumsum(new) - 1]
    seq = np.maximum.accumulate(times)
    begins = np.flatnonzero(np.r_[False, seq[1:] != seq[:-1]])
    odd = [int(i) for i in begins if (token[i], layer[i]) != (token[0], layer[0])]
    if odd:
        got = f"token {int(token[odd[0]])}, layer {int(layer[odd[0]])} again"
        raise source.fail_line(odd[0] + 2, "entry", "each token and layer once, or a new sequence from its first token on", got)
    return seq
