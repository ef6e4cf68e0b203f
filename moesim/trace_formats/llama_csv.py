"""Owns the CSV dialects of tools called llama-moe-trace: routed ids of every MoE layer, taken from llama.cpp's graph callback.

Four dialects are known, told apart by their first line:

``layer,expert`` (ggml-org/llama.cpp pull request 28544)
    No header line in the original; one row a selection, in graph order: per pass, per layer, per token, per rank. Tokens per pass and K
    are not written, so K is the greatest common divisor of the lengths of all (pass, layer) runs, or what the caller says.
``phase,token,layer,rank,expert`` (Vulkan fork)
    A header line; token is the position in the one sequence, phase is prefill or decode.
``pos,layer,id0,id1,...`` (expert-cache forks)
    No header. Prefill positions are negative, ``-(chunk start + chunk size - j)``, so they are put back in order of appearance.
``prompt step layer e0 ...`` with blanks (ArifiLabs)
    No header; decode steps only.

The first and the third copy n * k ids flat from a view that is strided in builds where top-k is a view of argsort: the ids of all but
the first token of a pass are then wrong. Such passes are recognised (passes.is_strided_copy) and left out, with a note.
"""

from __future__ import annotations

import re
from math import gcd

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import DECODE, PREFILL, RoutingTrace
from moesim.trace_formats.assemble import Cells, cells_to_trace, slots_to_cells
from moesim.trace_formats.passes import Records, is_strided_copy, passes_to_trace
from moesim.trace_formats.source import Options, Source, some
from moesim.trace_formats.tables import Kind, read_table

_LONG = "phase,token,layer,rank,expert"
_PAIRS = re.compile(r"\d{1,9},\d{1,9}")
_ROWS = re.compile(r"-?\d{1,9},\d{1,9}(,\d{1,9})+")
_STEPS = re.compile(r"\d{1,9} -?\d{1,9} \d{1,9}( \d{1,9})+")
MAX_TOP_K = 256
STRIDED = (
    "{0} prefill passes left out: their ids are a flat copy of the whole argsort rows (an error of the recorder with builds whose top-k is "
    "a strided view), wrong for all tokens but the first"
)


def sniff(source: Source) -> bool:
    return source.is_text and _dialect(source) is not None


def _dialect(source: Source) -> str | None:
    first = source.first_lines(1)[0].strip()
    if first == _LONG:
        return "long"
    if first == "layer,expert" or _PAIRS.fullmatch(first):
        return "pairs"
    if _STEPS.fullmatch(first):
        return "steps"
    return "rows" if _ROWS.fullmatch(first) else None


def read(source: Source, options: Options) -> RoutingTrace:
    """Read a file of any of the four dialects."""
    reader = {"long": _read_long, "pairs": _read_pairs, "rows": _read_rows, "steps": _read_steps}
    dialect = _dialect(source)
    if dialect is None:
        got = repr(source.first_lines(1)[0])
        raise source.fail_line(1, "first line", f"{_LONG}, layer,expert, numbers pos,layer,id0,id1,... or prompt step layer id0 ...", got)
    return reader[dialect](source, options)


def _read_long(source: Source, options: Options) -> RoutingTrace:
    kinds: dict[str, Kind] = {"phase": "text", "token": "int", "layer": "int", "rank": "int", "expert": "int"}
    table = read_table(source, 2, list(kinds), kinds)

    def fail(row: int, what: str, expected: str, got: str) -> InputError:
        return source.fail_line(2 + row, what, expected, got)

    phase = np.where(table["phase"] == "prefill", PREFILL, DECODE)
    odd = (table["phase"] != "prefill") & (table["phase"] != "decode")
    if odd.any():
        row = int(np.flatnonzero(odd)[0])
        raise fail(row, "phase", "prefill or decode", repr(str(table["phase"][row])))
    for name in ("token", "layer"):
        bad = (table[name] < 0) | (table[name] >= 2**31)
        if bad.any():
            raise fail(int(np.flatnonzero(bad)[0]), name, "0 to 2147483647", str(int(table[name][np.flatnonzero(bad)[0]])))
    members, cut = slots_to_cells([table["token"], phase, table["layer"]], table["rank"], fail, options.top_k)
    if cut:
        source.note(f"the file ends within a token: {cut} rows at its end left out")
    first = members[:, 0]
    cells = Cells(
        np.zeros(len(first), np.int64), table["token"][first], phase[first], table["layer"][first], table["expert"][members], None,
        lambda i, *rest: fail(int(first[i]), *rest),
    )  # fmt: skip
    trace = cells_to_trace(cells, source, options, {"captured_by": "llama-moe-trace"})
    late = np.flatnonzero((trace.phase[1:] == PREFILL) & (trace.phase[:-1] == DECODE))
    if late.size:
        raise source.fail(
            "phase", "the prompt before the answer", f"prefill again at token {int(trace.position[late[0] + 1])}", "one sequence a file"
        )
    return trace


def _read_pairs(source: Source, options: Options) -> RoutingTrace:
    first_line = 2 if source.first_lines(1)[0].strip() == "layer,expert" else 1
    table = read_table(source, first_line, ["layer", "expert"], {"layer": "int", "expert": "int"})
    layer, expert = table["layer"], table["expert"]

    def fail_row(row: int, what: str, expected: str, got: str) -> InputError:
        return source.fail_line(first_line + row, what, expected, got)

    start = np.flatnonzero(np.r_[True, layer[1:] != layer[:-1]])
    length = np.diff(np.r_[start, len(layer)])
    run_layer = layer[start]
    if len(start) == 1 and options.top_k is None:
        raise source.fail("top_k", "--top-k: with one MoE layer the rows do not show where a token ends", "no number")
    begins = np.flatnonzero(np.r_[True, run_layer[1:] < run_layer[:-1]])  # runs that begin a pass
    k = options.top_k or _infer_top_k(expert, start, length, source)
    if length[-1] % k:
        source.note(f"the file ends within a token: {int(length[-1] % k)} rows at its end left out")
        length[-1] -= length[-1] % k
    uneven = np.flatnonzero(length % k)
    if uneven.size:
        raise fail_row(int(start[uneven[0]]), "rows of a layer in a pass", f"a multiple of top_k = {k}", str(int(length[uneven[0]])))
    if not length[-1]:
        start, length, run_layer = start[:-1], length[:-1], run_layer[:-1]
    if not 1 <= k <= MAX_TOP_K:
        raise source.fail("top_k", f"1 to {MAX_TOP_K}", f"{k}, the common divisor of the rows of each layer in each pass", "give --top-k")
    if options.top_k is None:
        source.note(f"top_k = {k} is inferred from the rows of each layer in each pass; give --top-k if the model's is smaller")
    if len(start) == 1:  # one MoE layer: each token its own pass, there is nothing that parts them
        start, run_layer = start[0] + np.arange(0, length[0], k), np.repeat(run_layer, length[0] // k)
        length = np.full(len(start), k)
    number = len(expert[: int(start[-1] + length[-1])]) // k
    ids = expert[: number * k].reshape(number, k)
    records = Records(run_layer, length // k, ids, lambda r, *rest: fail_row(int(start[r]), *rest))
    return passes_to_trace(_without_strided(records, begins, source), source, options, {"captured_by": "llama-moe-trace"})


def _infer_top_k(expert: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64], source: Source) -> int:
    """Return the common divisor of all runs, or of all but the last if that one is cut; it must be the length of a run itself.

    A run of that length is one token in one layer. Where only the last run is so short, it may as well be a cut piece of a longer one.
    """
    whole, rest = (gcd(*np.unique(part).tolist()) if len(part) else 0 for part in (length, length[:-1]))
    if rest != whole and 1 <= rest <= MAX_TOP_K and rest == length[:-1].min():
        ordered = np.sort(expert[: int(start[-1])].reshape(-1, rest), axis=1)
        if (ordered[:, 1:] != ordered[:, :-1]).all():
            return rest
    if rest != whole or whole != length.min():
        got = f"runs of {some(np.unique(length))} rows, none of which is sure to be one token"
        raise source.fail("top_k", "--top-k: the rows do not show where a token ends", got)
    return whole


def _without_strided(records: Records, begins: NDArray[np.int64], source: Source) -> Records:
    """Leave out the passes of several tokens if they are flat copies of strided rows."""
    if not is_strided_copy(records):
        if (records.n_tokens > 1).any():
            source.note(
                "some builds write wrong ids for all but the first token of a prompt pass here; there is no sign of it in this file"
            )
        return records
    number = np.zeros(len(records.layer), np.int64)
    number[begins[begins > 0]] = 1
    number = np.cumsum(number)
    size = np.zeros(int(number[-1]) + 1, np.int64)
    np.maximum.at(size, number, records.n_tokens)
    keep = size[number] == 1
    source.note(STRIDED.format(int((size > 1).sum())))
    if not keep.any():
        raise source.fail(
            "passes",
            "at least one of a single token",
            "only flat copies of strided argsort rows",
            "record with a build that copies row by row",
        )
    kept = np.flatnonzero(keep)
    ids = records.ids[np.repeat(keep, records.n_tokens)]
    return Records(records.layer[keep], records.n_tokens[keep], ids, lambda r, *rest: records.fail(int(kept[r]), *rest))


def _read_rows(source: Source, options: Options) -> RoutingTrace:
    k = source.first_lines(1)[0].count(",") - 1
    names = ["pos", "layer", *(f"id{i}" for i in range(k))]
    table = read_table(source, 1, names, dict.fromkeys(names, "int"))

    def fail(row: int, what: str, expected: str, got: str) -> InputError:
        return source.fail_line(1 + row, what, expected, got)

    pos, layer = table["pos"], table["layer"]
    ids = np.stack([table[name] for name in names[2:]], axis=1)
    prompt = pos < 0
    if prompt.any():
        if prompt.argmin() and prompt[prompt.argmin() :].any() and not prompt.all():
            row = int(prompt.argmin() + np.flatnonzero(prompt[prompt.argmin() :])[0])
            raise fail(row, "pos", "the prompt (negative) before the answer", str(int(pos[row])))
        rows = np.flatnonzero(prompt)
        change = np.flatnonzero(np.r_[True, layer[rows][1:] != layer[rows][:-1]])
        records = Records(
            layer[rows][change], np.diff(np.r_[change, len(rows)]), ids[rows], lambda r, *rest: fail(int(rows[change[r]]), *rest)
        )
        if is_strided_copy(records):
            source.note(STRIDED.format("all"))
            if prompt.all():
                raise source.fail("passes", "at least one of a single token", "only flat copies of strided argsort rows")
            keep = ~prompt
            pos, layer, ids, origin = pos[keep], layer[keep], ids[keep], np.flatnonzero(keep)
            position = pos
        else:
            first_layer = prompt & (layer == layer[rows[0]])
            order = pos[first_layer]  # the order of appearance is that of the prompt
            sort = np.argsort(order)
            found = np.minimum(np.searchsorted(order[sort], pos), len(order) - 1)
            known = order[sort][found] == pos
            if (prompt & ~known).any() or len(np.unique(order)) < len(order):
                row = int(np.flatnonzero(prompt & ~known)[0]) if (prompt & ~known).any() else int(np.flatnonzero(first_layer)[0])
                raise fail(row, "pos", "prompt positions that the first layer has, each once", str(int(pos[row])))
            position, origin = np.where(prompt, sort[found], pos + len(order)), np.arange(len(pos))
    else:
        source.note("no prompt rows: positions count from the first decoded token")
        position, origin = pos, np.arange(len(pos))
    phase = np.where(pos < 0, PREFILL, DECODE)
    cells = Cells(np.zeros(len(pos), np.int64), position, phase, layer, ids, None, lambda i, *rest: fail(int(origin[i]), *rest))
    return cells_to_trace(cells, source, options, {"captured_by": "llama-moe-trace"})


def _read_steps(source: Source, options: Options) -> RoutingTrace:
    k = source.first_lines(1)[0].strip().count(" ") - 2
    names = ["prompt", "step", "layer", *(f"e{i}" for i in range(k))]
    table = read_table(source, 1, names, dict.fromkeys(names, "int"), separator=" ")
    early = table["step"] < 0
    keep = np.flatnonzero(~early)
    if early.any():
        source.note(f"{int(early.sum())} rows of step -1 (prompts of one token) left out")
    if not keep.size:
        raise source.fail("rows", "at least one decode step", "none")
    source.note("decode steps only: positions count from the first decoded token of each prompt")
    cells = Cells(
        table["prompt"][keep], table["step"][keep], np.full(len(keep), DECODE), table["layer"][keep],
        np.stack([table[name][keep] for name in names[3:]], axis=1), None, lambda i, *rest: source.fail_line(1 + int(keep[i]), *rest),
    )  # fmt: skip
    return cells_to_trace(cells, source, options, {"captured_by": "llama-moe-trace"})
