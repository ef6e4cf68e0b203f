"""Owns the list of trace formats, and the choice among them: by content, never by a file's name.

It must not know any layout; the readers are in ``trace_formats``. What an engine recorded as counts becomes a RoutingProfile, all else a
RoutingTrace whose meta says what was dropped, reordered or assumed, and what stays unknown (``notes``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError, did_you_mean
from moesim.profile import RoutingProfile
from moesim.trace import ARRAYS, RoutingTrace, load_trace
from moesim.trace_formats import (
    bigmoeonedge,
    counts,
    eval_callback,
    imatrix,
    int32_stream,
    llama_csv,
    policylang,
    routed_experts,
    router_logits,
    sglang,
    stratamoe,
    vllm_jsonl,
)
from moesim.trace_formats.arrays import NPY_MAGIC, read_npy, zip_names
from moesim.trace_formats.source import Options, Source, is_whole, some


@dataclass(frozen=True, slots=True)
class Format:
    """One format: what it is called, what it comes from, and how it is recognised and read."""

    about: str
    sniff: Callable[[Source], bool]
    read: Callable[[Source, Options], RoutingTrace | RoutingProfile]


def _is_moesim(source: Source) -> bool:
    return {"expert_ids.npy", "seq_id.npy"} <= set(zip_names(source)) or (
        "expert_ids.npy" in zip_names(source) and "meta.npy" in zip_names(source)
    )


def _read_moesim(source: Source, options: Options) -> RoutingTrace:
    trace = load_trace(source.path)
    other = sorted({name.removesuffix(".npy") for name in zip_names(source)} - {*ARRAYS, "meta"})
    if other:
        trace.meta["notes"] = [*notes_of(trace), f"arrays that a trace does not keep are left out: {some(other)}"]
    return trace


FORMATS = {
    "moesim": Format("this project's .npz", _is_moesim, _read_moesim),
    "profile": Format("a profile that moesim saved (JSON)", counts.sniff_profile, counts.read_profile),
    "bigmoeonedge": Format("BigMoeOnEdge --route-trace CSV, # route_trace v1", bigmoeonedge.sniff, bigmoeonedge.read),
    "llama-csv": Format("llama-moe-trace CSV, four dialects", llama_csv.sniff, llama_csv.read),
    "llama-bin": Format("llama-moe-trace int32 stream without a header", int32_stream.sniff_stream, int32_stream.read_stream),
    "mbolt": Format("mbolt's int32 stream (llama.cpp patch)", int32_stream.sniff_mbolt, int32_stream.read_mbolt),
    "eval-callback": Format("llama-eval-callback text dump, untruncated", eval_callback.sniff, eval_callback.read),
    "imatrix": Format("llama-imatrix GGUF: counts", imatrix.sniff, imatrix.read),
    "routed-experts": Format("routed_experts arrays (vLLM), .npy or .npz", routed_experts.sniff_array, routed_experts.read_array),
    "routed-experts-json": Format(
        "server responses with routed_experts (vLLM, SGLang)", routed_experts.sniff_json, routed_experts.read_json
    ),
    "vllm-jsonl": Format("route log of the vLLM patches (VLLM_LOG_MOE)", vllm_jsonl.sniff, vllm_jsonl.read),
    "sglang": Format("SGLang expert distribution recorder .pt; needs torch", sglang.sniff, sglang.read),
    "router-logits": Format("transformers router_logits, .npy .npz .safetensors; needs --top-k", router_logits.sniff, router_logits.read),
    "stratamoe": Format("StrataMoE RouterTrace v1, v2 JSON", stratamoe.sniff, stratamoe.read),
    "policylang": Format("MoE-PolicyLang JSONL", policylang.sniff, policylang.read),
    "counts-csv": Format("table layer, expert, count: a profile", counts.sniff_csv, counts.read_csv),
    "counts-json": Format("counts by layer: a profile", counts.sniff_json, counts.read_json),
}


def sniff(source: Source) -> str:
    """Return the name of the one format that a file's content shows.

    Raises
    ------
    InputError
        If no format fits, or several do.
    """
    found = [name for name, entry in FORMATS.items() if entry.sniff(source)]
    if len(found) == 1:
        return found[0]
    if not found and source.data[:4] == b"PK\x03\x04" and not zip_names(source):
        got = f"a zip archive without its list of members, which stands at the end: cut off at byte {source.size}, or damaged there"
        raise source.fail("file", "a whole .npz or .pt", got, "fetch or write it again")
    if not found:
        shown = repr(source.head[:40].decode("utf-8", "replace") if source.is_text else source.head[:16])
        raise source.fail(
            "format",
            "one of " + ", ".join(FORMATS),
            f"a file that begins with {shown}",
            "name it with --format if the file is damaged at its start",
        )
    raise source.fail("format", "one that fits", " and ".join(found), "say which with --format")


def import_trace(path: str | Path, format: str = "auto", options: Options | None = None) -> RoutingTrace | RoutingProfile:
    """Read a trace of any known format.

    Parameters
    ----------
    path : path
        The file.
    format : str
        A name of ``FORMATS``, or ``auto``: by content.
    options : Options, optional
        What the caller states that the file does not.

    Returns
    -------
    RoutingTrace or RoutingProfile
        A profile where the source holds counts alone. ``notes`` (in the trace's meta) say what was dropped, reordered or assumed.

    Raises
    ------
    InputError
        With file and line or byte: unknown, ambiguous, damaged or cut files, and choices that the caller must make.
    """
    if format != "auto" and format not in FORMATS:
        raise InputError("--format", expected="auto or a known format", got=f'"{format}"', fix=did_you_mean(format, FORMATS))
    source = Source(path)
    name = sniff(source) if format == "auto" else format
    try:
        found = FORMATS[name].read(source, options or Options())
    except MemoryError:
        raise source.fail("trace", "a file that fits in memory", f"{source.size} bytes") from None
    if isinstance(found, RoutingTrace) and name != "moesim":
        found.meta["format"] = f"imported from {name}"
    return found


def notes_of(found: RoutingTrace | RoutingProfile) -> list[str]:
    """Return the notes of an import."""
    if isinstance(found, RoutingProfile):
        return [*found.notes, *(f"cannot be known from counts: {what}" for what in found.unknown)]
    notes = found.meta.get("notes", [])
    return [str(note) for note in notes] if isinstance(notes, list) else []


def load_map(path: str | Path) -> NDArray[np.int64]:
    """Load a physical-to-logical map, (P,) or (L, P): .npy, or JSON (a list, or ``{"physical_to_logical_map": ...}``)."""
    source = Source(path)
    if source.data[:6] == NPY_MAGIC:
        array = read_npy(source.data, "map", source.where)
    else:
        data: Any = source.document
        data = data.get("physical_to_logical_map") if isinstance(data, dict) else data
        rows = data if isinstance(data, list) and data and isinstance(data[0], list) else [data]
        if not all(isinstance(row, list) and len(row) == len(rows[0]) and all(is_whole(n, 0, 2**15 - 1) for n in row) for row in rows):
            raise source.fail("map", "a list of logical experts, or one list a layer", "others")
        array = np.array(data)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
        raise source.fail("map", "integers (P,) or (L, P)", f"{array.dtype} {array.shape}")
    return array.astype(np.int64)
