"""Owns llama.cpp's importance matrices (GGUF, general.type = imatrix), as far as they count selections: no order, so a profile.

Layout (llama.cpp, tools/imatrix/imatrix.cpp): for each weight ``NAME.in_sum2`` and ``NAME.counts``, float32; of an expert tensor
``blk.N.ffn_down_exps.weight`` counts has one number an expert, the tokens routed to it. Counts are float32: whole up to 2**24. The old .dat
format has one count for all experts of a tensor, so it says nothing here.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from moesim.model_files.gguf_header import MAGIC, GgufTensor, read_header
from moesim.profile import MAX_EXPERTS, RoutingProfile
from moesim.trace_formats.counts import counts_to_profile
from moesim.trace_formats.source import Options, Source

_COUNTS = re.compile(r"blk\.(\d{1,4})\.ffn_(down|gate_up|gate|up)_exps\.weight\.counts")
_PREFERRED = ("down", "gate_up", "gate", "up")


def sniff(source: Source) -> bool:
    return source.data[:4] == MAGIC


def read(source: Source, options: Options) -> RoutingProfile:
    """Read the counts of the down projections, or of another expert matrix where they are missing."""
    header = read_header(source.path)
    alignment = int(header.metadata.get("general.alignment", 32))
    base = -(-header.header_bytes // alignment) * alignment
    found: dict[int, dict[str, GgufTensor]] = {}
    for tensor in header.tensors:
        match = _COUNTS.fullmatch(tensor.name)
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = tensor
    if not found:
        fix = (
            "this is a model, not an importance matrix"
            if not any(t.name.endswith(".counts") for t in header.tensors)
            else "the model is not MoE"
        )
        raise source.fail("imatrix", "tensors blk.N.ffn_down_exps.weight.counts", f"{len(header.tensors)} other tensors", fix)
    layers = sorted(found)
    rows: list[NDArray[np.int64]] = []
    for layer in layers:
        parts = {name: _counts(source, tensor, base) for name, tensor in found[layer].items()}
        name = next(name for name in _PREFERRED if name in parts)
        if any(not np.array_equal(part, parts[name]) for part in parts.values()):
            source.note(f"the expert matrices of a layer count differently (layer {layer}); ffn_{name}_exps is taken")
        rows.append(parts[name])
        if len(rows[-1]) != len(rows[0]):
            raise source.fail(f"layer {layer}", f"{len(rows[0])} experts, as in the first layer", str(len(rows[-1])))
    if max(int(row.max()) for row in rows) >= 2**24:
        source.note("counts are float32 and rounded above 2**24")
    meta = {"n_tokens_counted": int(max(int(row.sum()) for row in rows)), "captured_by": "llama-imatrix"}
    for key in ("imatrix.chunk_count", "imatrix.chunk_size"):
        if isinstance(header.metadata.get(key), int):
            meta[key.partition(".")[2]] = header.metadata[key]
    return counts_to_profile(np.stack(rows), layers, source, options, meta)


def _counts(source: Source, tensor: GgufTensor, base: int) -> NDArray[np.int64]:
    if tensor.format.name.lower() not in ("f32", "fp32"):
        raise source.fail(tensor.name, "float32", tensor.format.name)
    number, at = tensor.bytes // 4, base + tensor.offset
    if number > MAX_EXPERTS or (len(tensor.shape) > 1 and tensor.shape[0] != 1 and number != tensor.shape[0]):
        raise source.fail_byte(
            at, tensor.name, f"one number an expert, at most {MAX_EXPERTS}", str(list(tensor.shape)), "the file is damaged"
        )
    if number < 2:
        raise source.fail_byte(
            at,
            tensor.name,
            "one number an expert",
            "one number for all",
            "it stems from the old .dat format, which does not tell experts apart",
        )
    if at + tensor.bytes > source.size:
        raise source.fail_byte(at, tensor.name, f"{tensor.bytes} bytes", f"{max(source.size - at, 0)} to the end of the file")
    values = np.frombuffer(source.data, "<f4", number, at).astype(np.float64)
    bad = ~(np.isfinite(values) & (values >= 0) & (values < 2**53) & (values == np.floor(values)))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise source.fail_byte(at + 4 * i, tensor.name, "whole numbers of at least 0", str(values[i]), "the file is damaged")
    return values.astype(np.int64)
