"""Owns recordings by forward pass: one record per (pass, layer) with its n tokens, as callbacks in an engine's graph write them.

It must not know any file format. Layers ascend within a pass, so a layer that does not exceed the one before begins a new pass.
Passes of several tokens are prefill and those of one token decode (that is how a single-user engine runs; a batch server's decode
would look like prefill). A prefill pass after decode begins a new sequence; consecutive prefill passes are chunks of one prompt.
In the last layer a record of one token belongs to the pass's last token (llama.cpp asks for its logits alone); a number between one and
all cannot be attributed, and those cells stay absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lgamma
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.trace import DECODE, PREFILL, RoutingTrace
from moesim.trace_formats.assemble import Fail, check_ids, finish, room, to_half
from moesim.trace_formats.source import Options, Source

RARE = -14.0  # ln of about 1e-6: what chance alone would not do


@dataclass(slots=True)
class Records:
    """Records as columns, in file order: layer and tokens of each, and the cells of all of them one after another."""

    layer: NDArray[np.int64]  # (R,)
    n_tokens: NDArray[np.int64]  # (R,)
    ids: NDArray[np.int64]  # (sum of n_tokens, K)
    fail: Fail  # the error for record r
    weights: NDArray[np.float64] | None = None


@dataclass(slots=True)
class Table:
    """Passes laid out as a trace's columns: ``size`` tokens of each pass, and the rows (T, L, K) of all of them."""

    size: NDArray[np.int64]  # (P,)
    ids: NDArray[np.int16]
    weights: NDArray[np.float16] | None
    layers: NDArray[np.int64]


def lay_out(records: Records, source: Source, *, ragged: bool = True) -> Table:
    """Group records into passes and place their cells; an incomplete pass at the end is left out.

    ``ragged``: the engine may route fewer tokens in the last layer of a pass.
    """
    layer, count = records.layer, records.n_tokens
    if not len(layer):
        raise source.fail("records", "at least one", "none")
    cell_record = np.repeat(np.arange(len(layer)), count)
    check_ids(records.ids, None, lambda i, *rest: records.fail(int(cell_record[i]), *rest))
    number = np.cumsum(np.r_[True, layer[1:] <= layer[:-1]]) - 1  # pass of each record
    layers, column = np.unique(layer, return_inverse=True)
    n_passes = int(number[-1]) + 1
    size = np.zeros(n_passes, np.int64)
    np.maximum.at(size, number, count)
    have = np.bincount(number, minlength=n_passes)
    complete = have == len(layers)
    if not ragged:
        complete &= np.bincount(number, count != size[number], minlength=n_passes) == 0
    # the last layer's record may be left out where no token of the pass asks for logits
    without_last = np.zeros(n_passes, bool)
    if len(layers) > 1 and ragged:
        last_column = np.zeros(n_passes, np.int64)
        np.maximum.at(last_column, number, column)
        without_last = (have == len(layers) - 1) & (last_column == len(layers) - 2) & (size > 1)
    keep_passes = n_passes
    bad = np.flatnonzero(~(complete | without_last))
    if bad.size and bad[0] == n_passes - 1 and n_passes > 1:
        what = f"has only {int(have[-1])} of {len(layers)} layers" if have[-1] < len(layers) else "is not whole in its last layer"
        source.note(f"the last pass {what}: left out")
        keep_passes -= 1
    elif bad.size:
        r = int(np.flatnonzero(number == bad[0])[-1])
        if have[bad[0]] == len(layers):
            raise records.fail(r, "tokens of a layer", f"{int(size[bad[0]])}, as in the pass's other layers", str(int(count[r])))
        raise records.fail(r, "layers of a pass", f"the {len(layers)} layers of the others", f"{int(have[bad[0]])} in pass {int(bad[0])}")
    if keep_passes < n_passes and len(np.unique(layer[number < keep_passes])) < len(layers):
        raise records.fail(len(layer) - 1, "layer", "the layers of the passes before", "another one in the last pass")
    is_last = column == len(layers) - 1
    odd = (count != size[number]) & (number < keep_passes)
    wrong = odd & (~is_last | (len(layers) == 1))
    if wrong.any():
        r = int(np.flatnonzero(wrong)[0])
        raise records.fail(r, "tokens of a record", f"{int(size[number[r]])}, as in the pass's other layers", str(int(count[r])))
    between = odd & (count > 1)
    if between.any():
        source.note(f"{int(between.sum())} records of the last layer hold some of the pass's tokens and do not say which: left absent")
    start = np.r_[0, np.cumsum(size[:keep_passes])]
    n_tokens, top_k = int(start[-1]), records.ids.shape[1]
    room(n_tokens, len(layers), top_k, source)
    offset = np.r_[0, np.cumsum(count)[:-1]]
    within = np.arange(len(records.ids)) - offset[cell_record]
    within = np.where((odd & (count == 1))[cell_record], size[number[cell_record]] - 1, within)
    use = (number < keep_passes)[cell_record] & ~between[cell_record]
    token = start[number[cell_record[use]]] + within[use]
    ids = np.full((n_tokens, len(layers), top_k), -1, np.int16)
    ids[token, column[cell_record[use]]] = records.ids[use]
    weights = None
    if records.weights is not None:
        half = to_half(records.weights, lambda i, *rest: records.fail(int(cell_record[i]), *rest))
        weights = np.full(ids.shape, np.nan, np.float16)
        weights[token, column[cell_record[use]]] = half[use]
    return Table(size[:keep_passes], ids, weights, layers)


def passes_to_trace(
    records: Records, source: Source, options: Options, meta: Mapping[str, Any], *, own_context: bool = False
) -> RoutingTrace:
    """Make a trace of records; ``own_context``: each pass is a sequence of its own that begins at position 0."""
    table = lay_out(records, source)
    size = table.size
    prefill = np.ones(len(size), bool) if own_context else size > 1
    new = np.ones(len(size), bool) if own_context else np.r_[True, prefill[1:] & ~prefill[:-1]]
    seq = np.repeat(np.cumsum(new) - 1, size)
    first = np.flatnonzero(np.r_[True, seq[1:] != seq[:-1]])
    position = np.arange(len(seq)) - first[seq]
    phase = np.repeat(np.where(prefill, PREFILL, DECODE), size)
    if not own_context:
        source.note(
            "a pass of several tokens is taken for (a part of) a prompt, a pass of one token for decode, a prompt after decode for a new sequence"
        )
        if not prefill.any():
            source.note("no pass has several tokens: borders of sequences cannot be seen, all rows are one sequence")
    return finish(table.ids, table.weights, seq, position, phase, table.layers, source, options, meta)


def log_distinct(n: int, k: int, n_experts: int) -> float:
    """Logarithm of the chance that n tokens choose k experts each, at random, and share none."""
    if n * k > n_experts:
        return -np.inf
    choose = lgamma(n_experts + 1) - lgamma(k + 1) - lgamma(n_experts - k + 1)
    total = 0.0
    for i in range(n):
        left = n_experts - i * k
        total += lgamma(left + 1) - lgamma(k + 1) - lgamma(left - k + 1) - choose
    return total


def is_strided_copy(records: Records) -> bool:
    """Whether the ids look like a flat copy of whole argsort rows instead of the k chosen of each token.

    ``ffn_moe_topk`` is a view with the stride of all E experts. Recorders that copy n * k values flat write the first token's full
    ranking, then the second's: the first min(E, n * k) ids of a record are all different, which chance does not do for long.
    """
    k, n_experts = records.ids.shape[1], int(records.ids.max()) + 1
    offset = np.r_[0, np.cumsum(records.n_tokens)]
    chance = 0.0
    several = np.flatnonzero(records.n_tokens > 1)
    for r in several.tolist():
        flat = records.ids[offset[r] : offset[r + 1]].reshape(-1)[:n_experts]
        if len(np.unique(flat)) < len(flat):
            return False
        chance += max(log_distinct(min(int(records.n_tokens[r]), n_experts // k), k, n_experts), -1e6)
    return bool(several.size) and chance < RARE
