"""Owns tables of selections per (layer, expert), as CSV or JSON. Counts hold no order: they become a profile, not a trace.

CSV: a header with ``layer``, ``expert`` and ``count`` (or ``selections``), any further columns (model, dataset, source, ...) tell
groups apart. JSON: a list of rows of counts, or layer number to row (a list, or expert number to count), by itself or under ``counts``,
``expert_counts`` or ``layers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.profile import MAX_EXPERTS, RoutingProfile, parse_profile
from moesim.trace_formats.source import Options, Source, is_whole, some
from moesim.trace_formats.tables import Kind, read_table

_COUNT = ("count", "selections")
_HOLDERS = ("counts", "expert_counts", "layers")
MAX_LAYERS = 2**12
MAX_COUNT = 2**53


def sniff_csv(source: Source) -> bool:
    if not source.is_text or source.is_json:
        return False
    names = {name.strip() for name in source.first_lines(1)[0].split(",")}
    return {"layer", "expert"} <= names and bool(names & set(_COUNT))


def sniff_json(source: Source) -> bool:
    if not source.is_json or source.is_jsonl:
        return False
    if source.keys & {"selections", "routed_experts", "choices", "meta_info", "popularity"}:
        return False
    if source.keys & set(_HOLDERS):
        return True
    try:
        data = source.document
    except InputError:
        return False
    rows = list(data.values()) if isinstance(data, dict) else data if isinstance(data, list) else []
    return bool(rows) and all(isinstance(row, (list, dict)) for row in rows) and not source.keys & {"t", "l", "e", "topk_ids"}


def sniff_profile(source: Source) -> bool:
    return source.is_json and "popularity" in source.keys


def read_profile(source: Source, options: Options) -> RoutingProfile:
    """Read a profile that moesim saved."""
    return parse_profile(source.document, source.where)


def read_csv(source: Source, options: Options) -> RoutingProfile:
    """Read a table of counts; of several models or data sets, those that ``options.select`` names."""
    names = [name.strip() for name in source.first_lines(1)[0].split(",")]
    count_name = next((name for name in _COUNT if name in names), None)
    if count_name is None or not {"layer", "expert"} <= set(names) or len(set(names)) != len(names):
        raise source.fail_line(1, "header", "the columns layer, expert and count, each once", ",".join(names))
    kinds: dict[str, Kind] = {name: "text" for name in names}
    kinds |= {"layer": "int", "expert": "int", count_name: "int"}
    table = read_table(source, 2, names, kinds)
    chosen = np.ones(len(table["layer"]), bool)
    for name, value in options.select.items():
        if name not in names or kinds[name] != "text":
            others = ", ".join(name for name in names if kinds[name] == "text") or "none"
            raise source.fail("--select", f"a column of the file: {others}", name)
        chosen &= table[name] == value
        if not chosen.any():
            raise source.fail("--select", f"{name} one of {some(dict.fromkeys(table[name].tolist()))}", value)
    rows = np.flatnonzero(chosen)
    meta: dict[str, Any] = {}
    for name in names:
        if kinds[name] != "text":
            continue
        values = list(dict.fromkeys(table[name][rows].tolist()))
        if len(values) == 1:
            meta[name] = values[0]
        elif name == "model":
            raise source.fail("model", "one model", some(values), 'say --select model="..."')
        else:
            source.note(f"summed over {len(values)} values of {name}: {some(values, 4)}")
    layer, expert, count = table["layer"][rows], table["expert"][rows], table[count_name][rows]
    for what, column, high in (("layer", layer, MAX_LAYERS), ("expert", expert, MAX_EXPERTS), (count_name, count, MAX_COUNT)):
        bad = (column < 0) | (column >= high)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise source.fail_line(2 + int(rows[i]), what, f"0 to {high - 1}", str(int(column[i])))
    texts = [name for name in names if kinds[name] == "text"]
    labels = (
        np.stack([np.unique(table[name][rows].astype(str), return_inverse=True)[1] for name in texts], axis=1)
        if texts
        else np.zeros((len(rows), 0), int)
    )
    keys = np.column_stack([labels, layer, expert])
    order = np.lexsort(keys.T[::-1])
    again = np.flatnonzero((keys[order][1:] == keys[order][:-1]).all(axis=1))
    if again.size:
        i = int(order[again[0] + 1])
        raise source.fail_line(
            2 + int(rows[i]), "row", "each (layer, expert) once", f"layer {int(layer[i])}, expert {int(expert[i])} again"
        )
    layers, column = np.unique(layer, return_inverse=True)
    counts = np.zeros((len(layers), int(expert.max()) + 1), np.int64)
    np.add.at(counts, (column, expert), count)
    named = len(np.unique(layer * MAX_EXPERTS + expert))
    if named < counts.size:
        source.note(f"{counts.size - named} of {counts.size} pairs (layer, expert) have no row: counted as 0")
    return counts_to_profile(counts, [int(number) for number in layers], source, options, meta)


def read_json(source: Source, options: Options) -> RoutingProfile:
    """Read counts from JSON."""
    data = source.document
    meta: dict[str, Any] = {}
    if isinstance(data, dict):
        meta = {
            key: value
            for key, value in data.items()
            if isinstance(value, (str, int)) and key in ("model", "dataset", "unit", "source", "top_k")
        }
        data = next((data[name] for name in _HOLDERS if name in data), data)
    if isinstance(data, Mapping):
        rows: list[tuple[Any, Any]] = list(data.items())
    elif isinstance(data, list):
        rows = list(enumerate(data))
    else:
        raise source.fail("counts", "layers with a row of counts each", type(data).__name__)
    found: dict[int, dict[int, int]] = {}
    lengths: list[int] = []
    for key, row in rows:
        number = _number(key, MAX_LAYERS)
        if number is None or number in found:
            raise source.fail("layer", f"different numbers from 0 to {MAX_LAYERS - 1}", repr(key))
        if isinstance(row, Mapping) and "counts" in row:
            row = row["counts"]
        items = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, list) else None
        if items is None:
            raise source.fail(f"layer {number}", "a list of counts, or expert number to count", type(row).__name__)
        found[number] = {}
        for name, value in items:
            expert = _number(name, MAX_EXPERTS)
            if expert is None or not is_whole(value, 0, MAX_COUNT):
                raise source.fail(f"layer {number}, expert {name}", "a count: a whole number of at least 0", repr(value))
            found[number][expert] = value
        if isinstance(row, list):
            lengths.append(len(row))
            if lengths[-1] != lengths[0]:
                raise source.fail(f"layer {number}", f"{lengths[0]} counts, as in the first layer", str(lengths[-1]))
    width = max((max(row, default=-1) for row in found.values()), default=-1) + 1
    if not width:
        raise source.fail("counts", "at least one", "none")
    layers = sorted(found)
    counts = np.zeros((len(layers), width), np.int64)
    for i, number in enumerate(layers):
        for expert, value in found[number].items():
            counts[i, expert] = value
    return counts_to_profile(counts, layers, source, options, meta)


def _number(key: Any, high: int) -> int | None:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
        key = int(key)
    return key if is_whole(key, 0, high - 1) else None


def counts_to_profile(
    counts: NDArray[np.int64], layers: list[int], source: Source, options: Options, meta: dict[str, Any]
) -> RoutingProfile:
    """Make a profile of (L, E) counts with the caller's number of experts."""
    if options.n_experts is not None:
        if options.n_experts < counts.shape[1]:
            raise source.fail("n_experts", f"at least {counts.shape[1]}, as in the file", str(options.n_experts))
        counts = np.pad(counts, ((0, 0), (0, options.n_experts - counts.shape[1])))
    if options.top_k is not None:
        meta = {**meta, "top_k": options.top_k}
    try:
        return RoutingProfile.from_counts(counts, layers, source.path.name, source.notes, meta)
    except InputError as error:
        raise error.at(source.where) from None
