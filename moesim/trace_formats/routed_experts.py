"""Owns ``routed_experts``: ids (tokens, layers, top-k) that vLLM and SGLang return with an answer, as .npy / .npz or in JSON.

vLLM (docs, routed experts replay; CompletionResponseChoice): an integer array, or base64 of a .npy file, or nested lists; some
versions keep the prompt apart as ``prompt_routed_experts``. The last sampled token has no row. SGLang (``meta_info`` of /generate,
``sgl_ext`` or ``sglext`` of a choice or of the whole answer): base64 of flat little-endian int32, so --layers and --top-k are needed; -1 where a layer has no experts. LightLLM:
``{"shape": [...], "data": base64 int32}``. Dense layers are all 0 in vLLM's arrays: with top-2 or more that is no choice, and they are left
out. Each array is one sequence from position 0.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import DECODE, PREFILL, RoutingTrace
from moesim.trace_formats.arrays import NPY_MAGIC, npz_headers, read_npy, read_npz, zip_names
from moesim.trace_formats.assemble import IDS_SEEN, NO_PHASE, check_ids, finish, room
from moesim.trace_formats.source import Options, Source, is_whole, some

EXTENSIONS = ("meta_info", "sgl_ext", "sglext")  # of SGLang, by version
_KEYS = {"routed_experts", "prompt_routed_experts", "choices", *EXTENSIONS}
_NPY_SHAPE = re.compile(rb"'descr': '[<|>=]?([a-z])\d*'.*'shape': \(([\d, ]*)\)", re.S)
MAX_JSON_DEPTH = 4


def sniff_array(source: Source) -> bool:
    """Whether a .npy is a table (T, L, K) of integers, or an .npz holds such tables alone."""
    if source.data[:6] == NPY_MAGIC:
        head = _NPY_SHAPE.search(source.head[:512])
        return head is not None and head[1] in (b"i", b"u") and len([n for n in head[2].split(b",") if n.strip()]) == 3
    if not zip_names(source):
        return False
    headers = npz_headers(source)
    if {"expert_ids", "seq_id"} <= set(headers):
        return False
    return bool(headers) and (
        any("routed_experts" in name for name in headers) or all(len(s) == 3 and kind in "iu" for s, kind in headers.values())
    )


def sniff_json(source: Source) -> bool:
    return source.is_json and bool(source.keys & _KEYS) and b"routed_experts" in source.data


def read_array(source: Source, options: Options) -> RoutingTrace:
    """Read a .npy, or an .npz: ``prompt_routed_experts`` and ``routed_experts`` are one sequence, any other array one each."""
    if source.data[:6] == NPY_MAGIC:
        return _trace([(None, read_npy(source.data, "routed_experts", source.where))], source, options, {})
    arrays = read_npz(source)
    sequences: list[tuple[Any, NDArray[Any]]] = []
    prompt = arrays.pop("prompt_routed_experts", None)
    for name, array in arrays.items():
        if "routed_experts" not in name and any("routed_experts" in other for other in arrays):
            source.note(f"array {name} is not read")
            continue
        sequences.append((prompt if name == "routed_experts" else None, array))
    if prompt is not None and "routed_experts" not in arrays:
        raise source.fail("arrays", "routed_experts beside prompt_routed_experts", some(arrays) or "none")
    return _trace(sequences, source, options, {})


def read_json(source: Source, options: Options) -> RoutingTrace:
    """Read responses: one JSON object, a list of them, or one a line; every choice with ``routed_experts`` is a sequence."""
    if source.is_jsonl:
        responses: list[Any] = list(source.json_lines())
    else:
        document = source.document
        responses = document if isinstance(document, list) else [document]
    sequences: list[tuple[Any, NDArray[Any]]] = []
    meta: dict[str, Any] = {}
    skipped = 0
    for number, response in enumerate(responses, start=1):
        if not isinstance(response, dict):
            raise source.fail(f"response {number}", "a JSON object", type(response).__name__)
        if isinstance(response.get("model"), str):
            meta.setdefault("model", response["model"])
        found = _find(response, number, source, options)
        skipped += not found
        sequences += found
    if skipped:
        source.note(f"{skipped} responses have no routed_experts and are left out")
    if not sequences:
        raise source.fail(
            "routed_experts", "at least one", "none", "start the server with --enable-return-routed-experts, and ask for them"
        )
    return _trace(sequences, source, options, meta)


def _find(response: dict[str, Any], number: int, source: Source, options: Options) -> list[tuple[Any, NDArray[Any]]]:
    out: list[tuple[Any, NDArray[Any]]] = []
    usage = response.get("usage")
    length = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    shared = response.get("prompt_routed_experts")
    choices = response.get("choices")
    holders = [response, *(choices if isinstance(choices, list) else [])]
    for holder in holders:
        if not isinstance(holder, dict):
            continue
        for place in (holder, *(holder.get(name) for name in EXTENSIONS)):
            value = place.get("routed_experts") if isinstance(place, dict) else None
            if value is None:
                continue
            what = f"routed_experts of response {number}"
            array = _decode(value, what, source, options)
            assert isinstance(place, dict)
            prompt: Any = place.get("prompt_tokens", length)
            if isinstance(place.get("routed_experts_start_len"), int) and place["routed_experts_start_len"]:
                source.note("routed_experts_start_len: earlier rows were not returned; positions count from the first row returned")
                prompt = max(prompt - place["routed_experts_start_len"], 0) if is_whole(prompt) else None
            if shared is not None:
                prompt = _decode(shared, f"prompt_routed_experts of response {number}", source, options)
            out.append((prompt if isinstance(prompt, np.ndarray) or is_whole(prompt) else None, array))
    return out


def _decode(value: Any, what: str, source: Source, options: Options) -> NDArray[Any]:
    """Return the array of nested lists, base64 of .npy, base64 of int32, or shape and data."""
    if isinstance(value, list):
        try:
            array = np.array(value)
        except (ValueError, OverflowError):
            raise source.fail(what, "lists [tokens][layers][top_k] of equal lengths", "uneven ones") from None
        return array
    shape = None
    if isinstance(value, dict):
        shape, value = value.get("shape"), value.get("data")
        if not isinstance(shape, list) or len(shape) != 3 or not all(is_whole(n) for n in shape):
            raise source.fail(what, "a shape of three numbers", repr(shape))
    if not isinstance(value, str):
        raise source.fail(what, "base64 text or nested lists", type(value).__name__)
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise source.fail(what, "base64", str(error), "the file is cut off or damaged") from None
    if data[:6] == NPY_MAGIC:
        return read_npy(data, what, source.where)
    if len(data) % 4:
        raise source.fail(what, "whole int32 numbers", f"{len(data)} bytes", "the file is cut off or damaged")
    flat = np.frombuffer(data, "<i4")
    if shape is None:
        if options.n_layers is None or options.top_k is None:
            raise source.fail(
                what,
                "--layers and --top-k: flat int32 does not say its shape",
                "only " + ("one of them" if options.n_layers or options.top_k else "the numbers"),
            )
        shape = [len(flat) // max(options.n_layers * options.top_k, 1), options.n_layers, options.top_k]
    if shape[0] * shape[1] * shape[2] != len(flat):
        raise source.fail(what, f"a multiple of {shape[1]} layers x {shape[2]} slots", f"{len(flat)} numbers")
    return flat.reshape(shape)


def _trace(sequences: list[tuple[Any, NDArray[Any]]], source: Source, options: Options, meta: dict[str, Any]) -> RoutingTrace:
    parts: list[NDArray[Any]] = []
    phases: list[NDArray[np.int64]] = []
    unknown = False
    if options.prompt_tokens and len(options.prompt_tokens) != len(sequences):
        raise source.fail("--prompt-tokens", f"{len(sequences)} lengths, one a sequence", str(len(options.prompt_tokens)))
    for number, (prompt, array) in enumerate(sequences):
        pieces = [array] if not isinstance(prompt, np.ndarray) else [prompt, array]
        for piece in pieces:
            if piece.ndim != 3 or piece.dtype.kind not in "iu":
                raise source.fail("routed_experts", "integers (tokens, layers, top_k)", f"{piece.dtype} {piece.shape}")
            if parts and piece.shape[1:] != parts[0].shape[1:]:
                raise source.fail(
                    f"sequence {number}", f"{parts[0].shape[1]} layers and top-{parts[0].shape[2]}, as in the first", str(piece.shape)
                )
            parts.append(piece.astype(np.int64))
        n = sum(len(piece) for piece in pieces)
        length = len(prompt) if isinstance(prompt, np.ndarray) else prompt
        if options.prompt_tokens:
            length = options.prompt_tokens[number]
        if length is not None and length > n + 1:
            raise source.fail(f"prompt of sequence {number}", f"at most {n} tokens, as there are rows", str(length))
        unknown |= length is None
        phases.append(np.where(np.arange(n) < (length or 0), PREFILL, DECODE))
    if unknown:
        source.note(NO_PHASE)
    ids = np.concatenate(parts)
    if not ids.size:
        raise source.fail("routed_experts", "at least one token, layer and slot", str(ids.shape))
    room(len(ids), ids.shape[1], ids.shape[2], source)
    lengths = [len(phase) for phase in phases]
    seq = np.repeat(np.arange(len(lengths)), lengths)
    layers = np.arange(ids.shape[1])
    dense = (ids == -1).all(axis=(0, 2)) | ((ids == 0).all(axis=(0, 2)) & (ids.shape[2] > 1))
    if dense.any():
        if dense.all():
            raise source.fail("routed_experts", "a layer that chose experts", "placeholders (0 or -1) in all layers")
        source.note(f"{int(dense.sum())} layers hold placeholders alone (0 or -1) and are left out as dense: {some(np.flatnonzero(dense))}")
        ids, layers = ids[:, ~dense], layers[~dense]
    if not options.n_layers or options.n_layers != len(dense):
        known = options
    else:  # the caller counts dense layers too
        known = Options(options.top_k, None, options.n_experts, options.prompt_tokens)
    present = np.argwhere((ids >= 0).any(axis=2) | (ids < -1).any(axis=2))

    def fail(i: int, what: str, expected: str, got: str) -> InputError:
        return source.fail(f"{what} of row {present[i][0]}, layer {layers[present[i][1]]}", expected, got)

    check_ids(ids[present[:, 0], present[:, 1]], options.n_experts, fail)
    meta = {**meta, "captured_by": "routed_experts of an inference server"}
    position = np.arange(len(seq)) - np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    if options.n_experts is None:
        source.note(IDS_SEEN.format(int(ids.max()) + 1))
    return finish(ids.astype(np.int16), None, seq, position, np.concatenate(phases), layers, source, known, meta)
