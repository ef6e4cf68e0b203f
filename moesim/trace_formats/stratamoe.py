"""Owns StrataMoE Lab's RouterTrace JSON (versions 1 and 2) and the capture metadata beside it.

Layout (Labeeb2339/stratamoe-lab, docs/ROUTER_TRACE_SCHEMA.md): ``version``, ``source``, ``scenario``, ``seed``, ``tokens``, ``layers``,
``expertsPerLayer``, ``topK`` and ``selections[token][layer][rank]``. Metadata: ``prompt_spans`` (token_start, token_end_exclusive), ``scope``,
``trace_sha256``, ``sparse_encoder_block_indices``. It is used where the caller names it, or where a file beside the trace states the
trace's SHA-256. A capture is a forward pass over prompts: prefill; an encoder has no decode at all.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import PREFILL, RoutingTrace
from moesim.trace_formats.assemble import check_ids, finish, room
from moesim.trace_formats.source import Options, Source, is_whole

_SIZES = ("tokens", "layers", "expertsPerLayer", "topK")
MAX_METADATA_BYTES = 16 * 2**20


def sniff(source: Source) -> bool:
    return source.is_json and not source.is_jsonl and {"selections", "expertsPerLayer"} <= source.keys


def read(source: Source, options: Options) -> RoutingTrace:
    """Read a trace, and its prompts where the metadata is at hand."""
    data = source.document
    if not isinstance(data, dict):
        raise source.fail("trace", "a JSON object", type(data).__name__)
    if data.get("version") not in (1, 2):
        raise source.fail("version", "1 or 2", repr(data.get("version")))
    for name in _SIZES:
        if not is_whole(data.get(name), 1, 2**31 - 1 if name == "tokens" else 2**15 - 1):
            raise source.fail(name, "a whole number of at least 1", repr(data.get(name)))
    n_tokens, n_layers, n_experts, top_k = (data[name] for name in _SIZES)
    room(n_tokens, n_layers, top_k, source)
    ids = _selections(data.get("selections"), (n_tokens, n_layers, top_k), source)

    def fail(i: int, what: str, expected: str, got: str) -> InputError:
        return source.fail(f"{what}, selections[{i // n_layers}][{i % n_layers}]", expected, got)

    check_ids(ids.reshape(-1, top_k), n_experts, fail)
    meta: dict[str, Any] = {"n_experts": n_experts, "captured_by": "StrataMoE Lab"}
    origin = data.get("source")
    if isinstance(origin, dict) and isinstance(origin.get("model"), dict) and isinstance(origin["model"].get("id"), str):
        meta["model"] = origin["model"]["id"]
    if data["version"] == 1 or not isinstance(origin, dict) or origin.get("kind") != "captured":
        source.note("the trace is generated, not captured from a model (or does not say)")
    if isinstance(data.get("scenario"), str):
        meta["dataset"] = data["scenario"]
    seq, layers = _prompts(source, options, n_tokens, n_layers, meta)
    starts = np.flatnonzero(np.r_[True, seq[1:] != seq[:-1]])
    position = np.arange(n_tokens) - starts[seq]
    return finish(ids.astype(np.int16), None, seq, position, np.full(n_tokens, PREFILL), layers, source, options, meta)


def _selections(value: Any, shape: tuple[int, int, int], source: Source) -> NDArray[np.int64]:
    array = None
    try:
        array = np.array(value)
        if array.shape != shape or array.dtype.kind != "i":
            raise ValueError("another shape")
        array = array.astype(np.int64)
        if b"true" not in source.data and b"false" not in source.data:  # which NumPy counts as 1 and 0
            return array
    except (ValueError, TypeError, OverflowError):
        array = None
    what, part = "selections", value
    if not isinstance(part, list) or len(part) != shape[0]:
        raise source.fail(what, f"a list of {shape[0]} tokens", f"{len(part)}" if isinstance(part, list) else type(part).__name__)
    for t, token in enumerate(part):
        if not isinstance(token, list) or len(token) != shape[1]:
            raise source.fail(
                f"{what}[{t}]", f"a list of {shape[1]} layers", f"{len(token)}" if isinstance(token, list) else type(token).__name__
            )
        for layer, cell in enumerate(token):
            if not isinstance(cell, list) or len(cell) != shape[2] or not all(is_whole(n) for n in cell):
                raise source.fail(f"{what}[{t}][{layer}]", f"{shape[2]} expert ids", repr(cell))
    if array is None:
        raise source.fail(what, f"whole numbers {shape}", "others")
    return array


def _prompts(source: Source, options: Options, n_tokens: int, n_layers: int, meta: dict[str, Any]) -> tuple[NDArray[np.int64], list[int]]:
    """Return the sequence of each token, and the layers' numbers."""
    path = options.metadata or _beside(source)
    if path is None:
        source.note("no capture metadata: all tokens are one sequence, borders of prompts are not known")
        return np.zeros(n_tokens, np.int64), list(range(n_layers))
    data = _metadata(path)
    where = str(path)
    digest = data.get("trace_sha256")
    if digest is not None and digest != hashlib.sha256(source.data).hexdigest():
        raise InputError(
            "trace_sha256",
            expected=f"that of {source.path.name}",
            got=repr(digest)[:80],
            fix="the metadata belongs to another trace",
            where=where,
        )
    spans = data.get("prompt_spans")
    if not isinstance(spans, list) or not spans:
        raise InputError("prompt_spans", expected="a list of spans", got=repr(spans)[:80], where=where)
    seq = np.zeros(n_tokens, np.int64)
    names: list[str] = []
    at = 0
    for number, span in enumerate(spans):
        span = dict(span) if isinstance(span, dict) else {}
        begin: Any = span.get("token_start")
        end: Any = span.get("token_end_exclusive", -1)
        if begin != at or not is_whole(end, at + 1, n_tokens):
            got = f"{begin} to {end}"
            raise InputError(f"prompt_spans[{number}]", expected=f"a span from {at} on, within {n_tokens} tokens", got=got, where=where)
        seq[at:end] = number
        names.append(str(span.get("id", number)))
        at = end
    if at != n_tokens:
        raise InputError("prompt_spans", expected=f"spans of all {n_tokens} tokens", got=f"{at}", where=where)
    meta["sequences"] = [{"seq_id": number, "id": name} for number, name in enumerate(names)]
    if "encoder" in str(data.get("scope", "")):
        source.note("encoder layers: all tokens of a prompt at once, no decode phase")
    layers = data.get("sparse_encoder_block_indices")
    if isinstance(layers, list) and len(layers) == n_layers and all(is_whole(n) for n in layers) and sorted(set(layers)) == layers:
        return seq, layers
    return seq, list(range(n_layers))


def _beside(source: Source) -> Path | None:
    """Return the metadata file in the same folder that states the trace's SHA-256."""
    digest = hashlib.sha256(source.data).hexdigest().encode()
    try:
        for path in sorted(source.path.parent.glob("*capture-metadata*.json")):
            if path.is_file() and path.stat().st_size <= MAX_METADATA_BYTES and digest in path.read_bytes():
                return path
    except OSError:
        return None
    return None


def _metadata(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise InputError("metadata", expected=f"at most {MAX_METADATA_BYTES} bytes", got=str(path.stat().st_size), where=str(path))
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError("metadata", expected="a readable file", got=error.strerror or str(error), where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise InputError("metadata", expected="JSON", got=str(error)[:120], where=str(path)) from None
    if not isinstance(data, dict):
        raise InputError("metadata", expected="a JSON object", got=type(data).__name__, where=str(path))
    return data
