"""Owns text dumps of llama.cpp's graph (llama-eval-callback, llama-debug), as far as they show the chosen experts in full.

Layout (llama.cpp, common/debug.cpp): a line ``NAME: ffn_moe_topk-L = (i32) OP(...) = {k, n_tokens, 1, 1}``, the values in brackets, one
line a token, and ``sum = S``, which is checked. The tool prints 3 + 3 of every axis longer than 6 and ``...`` between: such a dump does
not hold the routing and is refused. So only top-6 or less, with prompts of at most 6 tokens, comes out of an unpatched build.
"""

from __future__ import annotations

import re

import numpy as np

from moesim.errors import InputError
from moesim.trace import RoutingTrace
from moesim.trace_formats.passes import Records, passes_to_trace
from moesim.trace_formats.source import Options, Source

_NODE = re.compile(
    rb"ffn_moe_topk-(\d{1,4}) = \((\w+)\)[^\n]* = \{(\d{1,9}), (\d{1,9}), (\d{1,9}), (\d{1,9})\}[ \r]*\n"
    rb"((?:[ \t]*[\[\]][^\n]*\n|[ \t]*\.\.\.[^\n]*\n)*)(?:[ \t]*sum = *([-+.\deE]+)[ \r]*\n)?"
)
_LINE = re.compile(rb"^[ \t]*\[[ \t]*([-+\d.eE, \t]+?)[ \t]*\],?[ \t\r]*$", re.M)
_PREFIX = b"ffn_moe_topk-"
_NAME = re.compile(rb"ffn_moe_topk-\d+ = \(")
_ANY_NODE = re.compile(rb"^[^\n]{0,80}: +\S[^\n]{0,80} = \(\w+\) +\w+\(", re.M)
MAX_SIZE = 2**20
TRUNCATED = "record with llama-moe-trace, or a build that prints whole tensors: llama-eval-callback shows 3 + 3 of each axis longer than 6"


def sniff(source: Source) -> bool:
    if not source.is_text or not (_NAME.search(source.head) or _ANY_NODE.search(source.head)):
        return False
    at = -1
    while (at := source.data.find(_PREFIX, at + 1)) >= 0:
        if _NAME.match(source.data, at):
            return True
    return False


def read(source: Source, options: Options) -> RoutingTrace:
    """Read the ``ffn_moe_topk`` tensors of a dump."""
    layers: list[int] = []
    counts: list[int] = []
    places: list[int] = []
    numbers: list[bytes] = []
    sums: list[float] = []
    checked: list[int] = []
    k = 0
    at = -1
    while (at := source.data.find(_PREFIX, at + 1)) >= 0:
        if not _NAME.match(source.data, at):  # named as an operand of another tensor
            continue
        found = _NODE.match(source.data, at)
        if found is None:
            want = "a line of name, type, operation and {sizes}, then its values"
            raise source.fail_line(source.line_at(at), "tensor", want, "another line", "the dump is damaged")
        kind, body = found[2], found[7]
        width, n, rest2, rest3 = (int(found[i]) for i in (3, 4, 5, 6))
        if b"..." in body:
            raise source.fail_line(
                source.line_at(at), "tensor values", f"all {width} x {n} ids", 'a dump that was shortened with "..."', TRUNCATED
            )
        if kind != b"i32" or rest2 != 1 or rest3 != 1 or not 0 < width <= 1024 or not n <= MAX_SIZE:
            raise source.fail_line(
                source.line_at(at), "tensor", "(i32) and {k, n_tokens, 1, 1}", f"({kind.decode()}) {{{width}, {n}, {rest2}, {rest3}}}"
            )
        if k and width != k:
            raise source.fail_line(source.line_at(at), "k", f"{k}, as in the tensors before", str(width))
        rows = _LINE.findall(body)
        if len(rows) != n or any(row.count(b",") != width - 1 for row in rows):
            got = f"{len(rows)} rows, or rows of another length"
            raise source.fail_line(source.line_at(at), "tensor values", f"{n} rows of {width} ids", got, "the dump is cut off or damaged")
        k = width
        if found[8] is not None:
            try:
                sums.append(float(found[8]))
            except ValueError:
                raise source.fail_line(source.line_at(found.start(8)), "sum", "a number", found[8].decode()) from None
            checked.append(len(layers))
        layers.append(int(found[1]))
        counts.append(n)
        places.append(at)
        numbers += rows
    if not layers:
        raise source.fail("tensors", "ffn_moe_topk-L of type i32", "none: no MoE model, or the dump was filtered")

    def fail(record: int, what: str, expected: str, got: str) -> InputError:
        return source.fail_line(source.line_at(places[record]), what, expected, got)

    try:
        flat = np.array(b",".join(numbers).replace(b",", b" ").split(), dtype=np.float64)
    except ValueError:
        record = next(r for r, rows in _by_record(numbers, counts) if any(not _is_number(cell) for row in rows for cell in row.split(b",")))
        raise fail(record, "ids", "numbers", "others") from None
    of_cell = np.repeat(np.arange(len(layers)), counts)
    if len(flat) != len(of_cell) * k:
        raise source.fail("ids", f"{len(of_cell) * k} numbers", str(len(flat)), "the dump is damaged")
    values = flat.reshape(-1, k)
    odd = (values != np.floor(values)) | (np.abs(values) > 2**31)
    if odd.any():
        i, j = (int(n) for n in np.argwhere(odd)[0])
        raise fail(int(of_cell[i]), "ids", "whole numbers", str(values[i, j]))
    totals = np.bincount(of_cell, weights=values.sum(axis=1), minlength=len(layers))
    wrong = np.abs(totals[checked] - np.array(sums)) > 0.5 + 1e-6 * np.abs(totals[checked])  # printed as float32
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise fail(checked[i], "sum", f"{totals[checked[i]]:g}, the sum of the ids", f"{sums[i]:g}")
    if len(checked) < len(layers):
        source.note("some tensors have no sum line to check against")
    source.note("routing weights of the dump are not read")
    records = Records(np.array(layers, np.int64), np.array(counts, np.int64), values.astype(np.int64), fail)
    return passes_to_trace(records, source, options, {"captured_by": "llama-eval-callback"})


def _by_record(numbers: list[bytes], counts: list[int]) -> list[tuple[int, list[bytes]]]:
    out, at = [], 0
    for record, n in enumerate(counts):
        out.append((record, numbers[at : at + n]))
        at += n
    return out


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
