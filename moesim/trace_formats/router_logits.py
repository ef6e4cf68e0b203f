"""Owns router logits as Hugging Face transformers returns them (``output_router_logits=True``): [layers][tokens, experts].

As .npy (L, T, E), as .npz or safetensors with one (T, E) array a layer (numbered names) or one (L, T, E) array. The k highest logits of a
token are its experts, in descending order; ties go to the lower id. weights = softmax over all experts, not renormalised over the
chosen. That is the router of Mixtral, Qwen-MoE, OLMoE, gpt-oss; it is not that of models that add a bias or choose groups first
(DeepSeek-V3, GLM-4.5): their logits do not determine the choice. Rows are one forward pass: prefill.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from moesim.trace import PREFILL, RoutingTrace
from moesim.trace_formats.arrays import NPY_MAGIC, is_safetensors, npz_headers, read_npy, read_npz, read_safetensors, zip_names
from moesim.trace_formats.assemble import MAX_EXPERTS, finish, room
from moesim.trace_formats.source import Options, Source, some

_NPY_SHAPE = re.compile(rb"'descr': '[<|>=]?f\d'.*'shape': \(([\d, ]*)\)", re.S)
_NUMBER = re.compile(r"(\d+)(?!.*\d)")
CHUNK = 1 << 22  # values at a time: sorting takes several times their memory


def sniff(source: Source) -> bool:
    if source.data[:6] == NPY_MAGIC:
        head = _NPY_SHAPE.search(source.head[:512])
        return head is not None and len([n for n in head[1].split(b",") if n.strip()]) == 3
    if is_safetensors(source):
        return True
    headers = npz_headers(source) if zip_names(source) else {}
    return bool(headers) and all(kind == "f" and len(shape) in (2, 3) for shape, kind in headers.values())


def read(source: Source, options: Options) -> RoutingTrace:
    """Read logits and choose the top ``options.top_k``, which must be stated."""
    if options.top_k is None:
        raise source.fail("top_k", "--top-k: logits do not say how many experts a token gets", "none")
    if source.data[:6] == NPY_MAGIC:
        arrays = {"router_logits": read_npy(source.data, "router_logits", source.where)}
    else:
        arrays = read_safetensors(source) if is_safetensors(source) else read_npz(source)
    layers, numbers = _layers(arrays, source)
    n_tokens, n_experts = layers[0].shape
    k = options.top_k
    if not 1 <= k <= n_experts:
        raise source.fail("top_k", f"1 to {n_experts}, the experts of the logits", str(k))
    if n_experts > MAX_EXPERTS or not n_tokens:
        raise source.fail(
            "router_logits", f"at least one token and at most {MAX_EXPERTS} experts", f"{n_tokens} tokens, {n_experts} experts"
        )
    room(n_tokens, len(layers), k, source)
    ids = np.empty((n_tokens, len(layers), k), np.int16)
    weights = np.empty(ids.shape, np.float16)
    step = max(CHUNK // n_experts, 1)
    for column, (logits, number) in enumerate(zip(layers, numbers, strict=True)):
        for at in range(0, n_tokens, step):
            with np.errstate(invalid="ignore"):  # signalling NaN of a damaged file; refused below
                part = logits[at : at + step].astype(np.float64)
            bad = ~np.isfinite(part)
            if bad.any():
                row, expert = (int(n) for n in np.argwhere(bad)[0])
                raise source.fail(
                    f"router_logits of layer {number}", "finite numbers", f"{part[row, expert]} at token {at + row}, expert {expert}"
                )
            chosen = np.argsort(-part, axis=1, kind="stable")[:, :k]
            share = np.exp(part - part.max(axis=1, keepdims=True))
            share /= share.sum(axis=1, keepdims=True)
            ids[at : at + step, column] = chosen
            weights[at : at + step, column] = np.take_along_axis(share, chosen, 1)
    source.note(f"top-{k} of the logits; weights are the softmax over all {n_experts} experts, not renormalised over the chosen")
    source.note("routers that add a bias or choose groups first (DeepSeek-V3, GLM-4.5) choose otherwise than their logits")
    lengths = list(options.prompt_tokens) or [n_tokens]
    if sum(lengths) != n_tokens or min(lengths) < 1:
        raise source.fail("--prompt-tokens", f"lengths that add up to {n_tokens} rows", some(lengths))
    if not options.prompt_tokens:
        source.note("all rows are one sequence: transformers flattens a batch, and padding is not marked; give --prompt-tokens to part it")
    seq = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    meta = {"n_experts": n_experts, "captured_by": "transformers output_router_logits"}
    return finish(ids, weights, seq, position, np.full(n_tokens, PREFILL), numbers, source, options, meta)


def _layers(arrays: dict[str, NDArray[np.floating]], source: Source) -> tuple[list[NDArray[np.floating]], list[int]]:
    """Return (T, E) logits layer by layer, with the layers' numbers."""
    found: list[tuple[int, NDArray[np.floating]]] = []
    if len(arrays) == 1 and next(iter(arrays.values())).ndim == 3:
        found = list(enumerate(next(iter(arrays.values()))))
    else:
        for name, array in arrays.items():
            match = _NUMBER.search(name)
            if match is None or len(match[1]) > 5:
                raise source.fail(name, "names that end in the layer's number, or one array (layers, tokens, experts)", name)
            found.append((int(match[1]), array))
        found.sort(key=lambda item: item[0])
    if not found or len({number for number, _ in found}) != len(found):
        raise source.fail("router_logits", "one array a layer", f"{len(found)} arrays, numbers {some(number for number, _ in found)}")
    for number, array in found:
        if array.ndim != 2 or array.dtype.kind != "f" or array.shape != found[0][1].shape:
            want = f"floats (tokens, experts) = {found[0][1].shape}, as in the first layer"
            raise source.fail(f"router_logits of layer {number}", want, f"{array.dtype} {array.shape}")
    return [array for _, array in found], [number for number, _ in found]
