"""Owns dumps of SGLang's expert distribution recorder (.pt): modes stat, per_pass and per_token.

Layout (sglang/srt/eplb/expert_distribution.py): ``stat`` is ``{"rank", "logical_count" (steps, L, E), "average_utilization_rate_over_window"}``:
counts, so a profile. The other modes are ``{"records": [...], "last_physical_to_logical_map" (L, P)}``; a record of per_token has
``forward_pass_id``, ``rank``, ``positions``, ``extend_seq_lens``, ``forward_mode``, ``topk_ids_of_layer`` (L, n, 8) with -1 where k is below 8 and in
layers without experts; ids are physical and go through the map, which may have changed while recording. per_pass has counts alone.

Requests are not named (``rids`` is commented out in SGLang). A row continues the sequence whose last position is one lower; where several
sequences are equal in that, batch order decides, and a note says how many rows that touched. Token ids stay behind.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.profile import RoutingProfile
from moesim.trace import DECODE, PREFILL, RoutingTrace
from moesim.trace_formats.arrays import read_torch, zip_names
from moesim.trace_formats.assemble import MAX_EXPERTS, Cells, cells_to_trace
from moesim.trace_formats.counts import counts_to_profile
from moesim.trace_formats.source import Options, Source, is_whole

DECODE_MODE, MIXED = 2, 3  # ForwardMode of sglang/srt/model_executor/forward_batch_info.py


def sniff(source: Source) -> bool:
    return any(name.endswith("data.pkl") for name in zip_names(source))


def read(source: Source, options: Options) -> RoutingTrace | RoutingProfile:
    """Read a dump; needs torch."""
    return convert(read_torch(source), source, options)


def convert(data: Any, source: Source, options: Options) -> RoutingTrace | RoutingProfile:
    """Turn a dump's plain data, with NumPy arrays for tensors, into a trace or a profile."""
    if isinstance(data, dict) and "logical_count" in data:
        counts = _integers(data["logical_count"], "logical_count", (2, 3), source)
        counts = counts.sum(axis=0) if counts.ndim == 3 else counts
        if (counts < 0).any():
            raise source.fail("logical_count", "counts of at least 0", str(int(counts.min())))
        return counts_to_profile(
            counts, list(range(len(counts))), source, options, {"captured_by": "SGLang expert distribution recorder, stat"}
        )
    if not isinstance(data, dict) or not isinstance(data.get("records"), list) or not data["records"]:
        got = ", ".join(str(key) for key in data)[:80] if isinstance(data, dict) else type(data).__name__
        fix = "" if isinstance(data, dict) else "router_logits that torch.save wrote: save them as .npy, .npz or .safetensors"
        raise source.fail("SGLang dump", "logical_count (mode stat), or records (per_pass, per_token)", got, fix)
    records = data["records"]
    if not all(isinstance(record, dict) for record in records):
        raise source.fail("records", "dictionaries", "others")
    mapping = _mapping(data, source, options)
    if all("topk_ids_of_layer" in record for record in records):
        return _trace(records, mapping, source, options)
    return _counts(records, mapping, source, options)


def _integers(value: Any, what: str, dims: tuple[int, ...], source: Source) -> NDArray[np.int64]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.ndim not in dims or not value.size:
        got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise source.fail(what, f"an integer tensor of {' or '.join(map(str, dims))} dimensions", got)
    return value.astype(np.int64)


def _mapping(data: dict[str, Any], source: Source, options: Options) -> NDArray[np.int64] | None:
    """Return the (L, P) logical expert of each physical one: the caller's, else the file's."""
    mapping = options.mapping
    if mapping is None and isinstance(data.get("last_physical_to_logical_map"), np.ndarray):
        mapping = _integers(data["last_physical_to_logical_map"], "last_physical_to_logical_map", (1, 2), source)
        source.note(
            "physical experts are mapped by the file's last_physical_to_logical_map; if experts were rebalanced while recording, earlier passes are wrong"
        )
    if mapping is None:
        source.note("no physical-to-logical map: ids are taken as they are; give --map if experts were replicated or moved")
        return None
    if (mapping < 0).any() or (mapping >= MAX_EXPERTS).any():
        raise source.fail("physical-to-logical map", f"experts from 0 to {MAX_EXPERTS - 1}", str(int(mapping.min())))
    return mapping


def _mapped(ids: NDArray[np.int64], mapping: NDArray[np.int64] | None, what: str, source: Source) -> NDArray[np.int64]:
    """Map (L, n, K) physical ids to logical ones; -1 stays."""
    if mapping is None:
        return ids
    table = mapping if mapping.ndim == 2 else np.broadcast_to(mapping, (len(ids), len(mapping)))
    if len(table) != len(ids):
        raise source.fail("physical-to-logical map", f"{len(ids)} layers, as in {what}", str(len(table)))
    if ids.max() >= table.shape[1]:
        raise source.fail(what, f"physical experts below {table.shape[1]}", str(int(ids.max())))
    return np.where(ids >= 0, table[np.arange(len(ids))[:, None, None], np.maximum(ids, 0)], -1)


def _counts(records: list[dict[str, Any]], mapping: NDArray[np.int64] | None, source: Source, options: Options) -> RoutingProfile:
    total: NDArray[np.int64] | None = None
    for number, record in enumerate(records):
        count = _integers(record.get("global_physical_count"), f"global_physical_count of record {number}", (2,), source)
        if (count < 0).any() or (total is not None and count.shape != total.shape):
            raise source.fail(f"record {number}", "counts of at least 0, all of one shape", str(count.shape))
        total = count if total is None else total + count
    assert total is not None
    if mapping is not None:
        physical = np.broadcast_to(np.arange(total.shape[1])[None, :, None], (len(total), total.shape[1], 1))
        logical = _mapped(physical.astype(np.int64), mapping, "the counts", source)[:, :, 0]
        out = np.zeros((len(total), int(logical.max()) + 1), np.int64)
        np.add.at(out, (np.arange(len(total))[:, None], logical), total)
        total = out
    source.note("mode per_pass: counts of each pass, summed; only mode per_token holds tokens")
    return counts_to_profile(
        total, list(range(len(total))), source, options, {"captured_by": "SGLang expert distribution recorder, per_pass"}
    )


def _trace(records: list[dict[str, Any]], mapping: NDArray[np.int64] | None, source: Source, options: Options) -> RoutingTrace:
    if len({record.get("rank") for record in records}) > 1:
        source.note("records of several ranks: each rank's rows are taken for tokens of their own")
    open_at: dict[int, list[int]] = defaultdict(list)  # next position -> sequences that wait for it
    seq: list[int] = []
    positions: list[NDArray[np.int64]] = []
    phases: list[NDArray[np.int64]] = []
    tables: list[NDArray[np.int64]] = []
    n_sequences = unsure = idle = 0
    for number, record in enumerate(records):
        what = f"topk_ids_of_layer of record {number}"
        if isinstance(record["topk_ids_of_layer"], np.ndarray) and record["topk_ids_of_layer"].shape[1:2] == (0,):
            idle += 1
            continue
        ids = _mapped(_integers(record["topk_ids_of_layer"], what, (3,), source), mapping, what, source)
        if (ids < -1).any() or (tables and (ids.shape[0], ids.shape[2]) != (tables[0].shape[1], tables[0].shape[2])):
            raise source.fail(what, "ids of at least -1, of one shape (layers, tokens, slots)", str(ids.shape))
        n = ids.shape[1]
        position = record.get("positions")
        if not isinstance(position, list) or len(position) != n or not all(is_whole(p) for p in position):
            raise source.fail(f"positions of record {number}", f"{n} whole numbers", repr(position))
        lengths = record.get("extend_seq_lens")
        mode = record.get("forward_mode")
        if mode == DECODE_MODE:
            lengths = [1] * n
        elif lengths is None:  # a request begins where the position does not go on
            borders = np.flatnonzero(np.r_[True, np.diff(position) != 1, True])
            lengths = np.diff(borders).tolist()
        if not isinstance(lengths, list) or not all(is_whole(m) for m in lengths) or sum(lengths) != n:
            raise source.fail(f"extend_seq_lens of record {number}", f"lengths that add up to {n} tokens", repr(lengths))
        at = 0
        taken: list[tuple[int, int]] = []
        for length in lengths:
            if not length:
                continue
            begin = position[at]
            if position[at : at + length] != list(range(begin, begin + length)):
                raise source.fail(f"positions of record {number}", "consecutive ones within a request", repr(position[at : at + length]))
            waiting = open_at.get(begin, []) if begin else []
            goes_on = bool(waiting)
            if goes_on:
                unsure += len(waiting) > 1
                mine = waiting.pop(0)
            else:
                mine, n_sequences = n_sequences, n_sequences + 1
            phases.append(
                np.full(length, DECODE if mode == DECODE_MODE or (mode == MIXED and goes_on and length == 1) else PREFILL, np.int64)
            )
            taken.append((begin + length, mine))
            seq += [mine] * length
            at += length
        for follow, mine in taken:
            open_at[follow].append(mine)
        positions.append(np.array(position, np.int64))
        tables.append(ids.transpose(1, 0, 2))
    if not tables:
        raise source.fail("records", "at least one with tokens", "none")
    if idle:
        source.note(f"{idle} idle passes without tokens left out")
    if unsure:
        source.note(f"{unsure} rows could continue several sequences (equal positions): taken in batch order, the file names no requests")
    return _cells(np.concatenate(tables), np.array(seq, np.int64), np.concatenate(positions), np.concatenate(phases), source, options)


def _cells(
    ids: NDArray[np.int64], seq: NDArray[np.int64], position: NDArray[np.int64], phase: NDArray[np.int64], source: Source, options: Options
) -> RoutingTrace:
    """Drop dense layers and the padding of slots, and assemble."""
    used = (ids >= 0).any(axis=(0, 1))
    top_k = int(np.flatnonzero(used)[-1]) + 1 if used.any() else 0
    moe = np.flatnonzero((ids >= 0).any(axis=(0, 2)))
    if not top_k:
        raise source.fail("topk_ids_of_layer", "at least one expert", "padding (-1) alone")
    if top_k < ids.shape[2]:
        source.note(f"slots {top_k} to {ids.shape[2] - 1} are padding (-1): top_k = {top_k}")
    if len(moe) < ids.shape[1]:
        source.note(f"{ids.shape[1] - len(moe)} layers without any expert left out as dense")
    part = ids[:, moe, :top_k]
    row, column = np.nonzero((part >= 0).any(axis=2))

    def fail(i: int, what: str, expected: str, got: str) -> InputError:
        return source.fail(f"{what}, token {int(row[i])}, layer {int(moe[column[i]])}", expected, got)

    cells = Cells(seq[row], position[row], phase[row], moe[column], part[row, column], None, fail)
    return cells_to_trace(cells, source, options, {"captured_by": "SGLang expert distribution recorder, per_token"})
