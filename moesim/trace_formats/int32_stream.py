"""Owns the two binary streams of int32 that llama.cpp patches write: mbolt's, and that of moe-routing-lab's llama-moe-trace.

mbolt (doramirdor/mbolt, llama.cpp-mbolt-trace.patch): ``MBLT`` (0x544C424D), version 1, n_expert; then records of layer, k, n_tokens and
n_tokens * k ids, token-major. One run of a single-user engine: prompt passes, then decode passes of one token.

llama-moe-trace (moe-routing-lab): no header; records of layer, n_tokens, k and the ids. Each pass is a chunk of a corpus with a context of
its own, and logits are asked for every token. A relative (memex) writes layer, k, n_tokens: the order that fits all records is taken,
and if both fit the caller must state --top-k. Little-endian both. A record that the file's end cuts is refused with its offset.
There is no checksum: a byte flipped into another valid id cannot be seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import RoutingTrace
from moesim.trace_formats.passes import RARE, Records, log_distinct, passes_to_trace
from moesim.trace_formats.source import Options, Source

MBOLT_MAGIC = 0x544C424D
MAX_LAYER, MAX_K, MAX_IDS = 2**12, 2**10, 2**26  # beyond every model (DeepSeek-V3: 61 layers, top-8) and every batch


def sniff_mbolt(source: Source) -> bool:
    return source.data[:4] == MBOLT_MAGIC.to_bytes(4, "little")


def sniff_stream(source: Source) -> bool:
    """Whether the first records parse with plausible numbers; there is no magic."""
    if source.size % 4 or source.is_text or sniff_mbolt(source):
        return False
    words = np.frombuffer(source.data[: 1 << 14], "<i4")
    at = records = 0
    while at + 3 <= len(words):
        layer, n, k = (int(word) for word in words[at : at + 3])
        if not (0 <= layer < MAX_LAYER and 0 <= n <= MAX_IDS and 0 <= k <= MAX_IDS and min(n, k) <= MAX_K and n * k <= MAX_IDS):
            break
        ids = words[at + 3 : at + 3 + n * k]
        if len(ids) and (ids.min() < 0 or ids.max() >= 2**15):
            break
        at, records = at + 3 + n * k, records + 1
    return records > 0 and (at >= len(words) or records >= 8)


def read_mbolt(source: Source, options: Options) -> RoutingTrace:
    """Read an mbolt stream."""
    words = _words(source)
    if len(words) < 3 or int(words[0]) != MBOLT_MAGIC:
        raise source.fail_byte(0, "header", "MBLT, version, n_expert", f"{len(words)} numbers")
    if words[1] != 1:
        raise source.fail_byte(4, "version", "1", str(int(words[1])), "later versions need a newer moesim")
    if not 0 < words[2] < 2**15:
        raise source.fail_byte(8, "n_expert", "1 to 32767", str(int(words[2])))
    layer, k, n, start = _frames(words, 3, source)
    records = _records(words, layer, n, k, start, source)
    return passes_to_trace(records, source, options, {"n_experts": int(words[2]), "captured_by": "llama.cpp with the mbolt trace patch"})


def read_stream(source: Source, options: Options) -> RoutingTrace:
    """Read a headerless stream, in whichever order of n_tokens and k fits."""
    words = _words(source)
    layer, a, b, start = _frames(words, 0, source)
    right = _fits(words, a, b, start, options.top_k)
    swapped = _fits(words, b, a, start, options.top_k)
    if not right and not swapped:
        same = options.top_k if options.top_k is not None else "the same number"
        fix = "another --top-k, or the file is damaged"
        raise source.fail_byte(0, "records", f"top_k {same} in all records, and each expert once per token", "others", fix)
    if right and swapped and not (a == b).all():
        fix = "give --top-k"
        raise source.fail("records", "one order of n_tokens and k that fits", f"both: top_k = {int(b[0])} and top_k = {int(a[0])}", fix)
    n, k = (a, b) if right else (b, a)
    if not right:
        source.note("records are layer, k, n_tokens (as memex writes them), not layer, n_tokens, k")
    records = _records(words, layer, n, k, start, source)
    own = bool((n != 1).all())
    if own:
        source.note(
            "no pass of one token: each pass is taken for a text of its own that begins at position 0 (moe-routing-lab clears the context)"
        )
    return passes_to_trace(records, source, options, {"captured_by": "llama-moe-trace"}, own_context=own)


def _words(source: Source) -> NDArray[np.int32]:
    if source.size % 4:
        raise source.fail_byte(source.size - source.size % 4, "int32", "4 bytes", f"{source.size % 4}")
    return np.frombuffer(source.data, "<i4")


def _frames(
    words: NDArray[np.int32], at: int, source: Source
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Walk the records: layer, the two sizes in file order, and the word where the ids begin."""
    out: list[tuple[int, int, int, int]] = []
    total, view = len(words), words.data
    while at < total:
        if at + 3 > total:
            raise source.fail_byte(4 * at, "record", "3 numbers", f"{total - at}")
        layer, a, b = view[at], view[at + 1], view[at + 2]
        if not 0 <= layer < MAX_LAYER:
            fix = "negative layers are other tensors of a memex trace" if layer < 0 else "the file is damaged"
            raise source.fail_byte(4 * at, "layer", f"0 to {MAX_LAYER - 1}", str(layer), fix)
        if a < 0 or b < 0 or min(a, b) > MAX_K or a * b > MAX_IDS:
            raise source.fail_byte(
                4 * at + 4, "record sizes", f"a top_k of at most {MAX_K} and at most {MAX_IDS} ids", f"{a} and {b}", "the file is damaged"
            )
        if at + 3 + a * b > total:
            raise source.fail_byte(4 * at + 12, "ids", f"{a * b} numbers", f"{total - at - 3} to the end of the file")
        out.append((layer, a, b, at + 3))
        at += 3 + a * b
    if not out:
        raise source.fail_byte(4 * at, "records", "at least one", "none")
    table = np.array(out, dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _ids(words: NDArray[np.int32], n: NDArray[np.int64], k: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all ids one after another, without the records' heads."""
    keep = np.ones(len(words), bool)
    keep[: start[0]] = False
    for i in range(1, 4):
        keep[start - i] = False
    return words[keep].astype(np.int64)


def _fits(words: NDArray[np.int32], n: NDArray[np.int64], k: NDArray[np.int64], start: NDArray[np.int64], top_k: int | None) -> bool:
    """Whether one K holds for all records, each token's experts differ, and tokens share experts as often as chance demands."""
    size = int(k[n > 0][0]) if (n > 0).any() else 0
    if not 1 <= size <= MAX_K or (k[n > 0] != size).any() or (top_k is not None and size != top_k):
        return False
    ids = _ids(words, n, k, start)
    ordered = np.sort(ids.reshape(-1, size), axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return False
    if top_k is not None or not (n == n[0]).all() or n[0] < 2:
        return True
    flat = np.sort(ids.reshape(-1, int(n[0]) * size), axis=1)  # tokens that never share an expert are one token's ids, read the wrong way
    if (flat[:, 1:] == flat[:, :-1]).any():
        return True
    return len(n) * log_distinct(int(n[0]), size, int(ids.max(initial=0)) + 1) > RARE


def _records(
    words: NDArray[np.int32], layer: NDArray[np.int64], n: NDArray[np.int64], k: NDArray[np.int64], start: NDArray[np.int64], source: Source
) -> Records:
    some = np.flatnonzero(n > 0)
    if not some.size:
        raise source.fail("records", "at least one token", "none")
    size = int(k[some[0]])
    other = np.flatnonzero((k != size) & (n > 0))
    if other.size:
        at = 4 * (int(start[other[0]]) - 2)
        raise source.fail_byte(at, "k", f"{size}, as in the records before", str(int(k[other[0]])), "the file is damaged")
    if not 1 <= size <= MAX_K:
        raise source.fail_byte(4 * (int(start[some[0]]) - 2), "k", f"1 to {MAX_K}", str(size), "the file is damaged")

    def fail(record: int, what: str, expected: str, got: str) -> InputError:
        return source.fail_byte(4 * (int(start[record]) - 3), what, expected, got, "the file is damaged")

    return Records(layer, n, _ids(words, n, k, start).reshape(-1, size), fail)
