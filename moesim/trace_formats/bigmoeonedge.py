"""Owns BigMoeOnEdge's ``--route-trace`` CSV, ``# route_trace v1``.

Layout (Helldez/BigMoeOnEdge, docs and src/route_trace.cpp): ``#`` lines with ``model= arch= n_layer= n_expert= n_expert_used=`` and, a
layer each, ``layer= expert_bytes= dense_bytes=``; a header line; one row a routed expert. Columns are read by name, v1 appends some.
(turn, phase, step, layer, slot) is the key; rows are not in token order (prefill is layer-major). ``step`` is the context position,
``weight`` may be nan (not known), ``dropped`` = 1 marks a routing that the engine chose and then skipped.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import DECODE, PREFILL, RoutingTrace
from moesim.trace_formats.assemble import Cells, cells_to_trace, slots_to_cells
from moesim.trace_formats.source import Options, Source
from moesim.trace_formats.tables import Kind, read_table

MAGIC = "# route_trace v"
_KEYS = ("turn", "phase", "step", "layer", "slot", "expert")
_KINDS: dict[str, Kind] = {**dict.fromkeys(_KEYS, "int"), "weight": "float", "residency": "int", "expert_bytes": "int", "dropped": "int"}
_FACT = re.compile(r"(\w+)=(\S+)")
MAX_COLUMNS = 64


def sniff(source: Source) -> bool:
    return source.is_text and source.first_lines(1)[0].startswith(MAGIC)


def read(source: Source, options: Options) -> RoutingTrace:
    """Read a trace; residency and bytes read stay behind (they describe the recording engine's cache), which a note says."""
    facts, layer_facts, header_line = _preamble(source)
    names = [name.strip() for name in source.lines[header_line - 1].decode("utf-8", "replace").split(",")]
    missing = [name for name in _KEYS if name not in names]
    if missing or len(set(names)) != len(names) or len(names) > MAX_COLUMNS:
        raise source.fail_line(header_line, "header", f"the columns {', '.join(_KEYS)}, each once", ",".join(names))
    kinds = {name: kind for name, kind in _KINDS.items() if name in names}
    table = read_table(source, header_line + 1, names, kinds)

    def fail(row: int, what: str, expected: str, got: str) -> InputError:
        return source.fail_line(header_line + 1 + row, what, expected, got)

    for name, (low, high) in {
        "phase": (0, 1),
        "turn": (0, 2**31 - 1),
        "layer": (0, facts.get("n_layer", 2**16) - 1),
        "step": (-(2**31), 2**31 - 1),
    }.items():
        bad = (table[name] < low) | (table[name] > high)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise fail(row, name, f"{low} to {high}", str(int(table[name][row])))
    rows = np.arange(len(table["turn"]))
    lost = table["step"] < 0
    if lost.any():
        source.note(f"{int(lost.sum())} rows with a step below 0 left out: the engine could not attribute them to a position")
        rows = rows[~lost]
        if not rows.size:
            raise source.fail("rows", "at least one with a position", "none")
    keys = [table[name][rows] for name in ("turn", "phase", "step", "layer")]
    members, cut = slots_to_cells(keys, table["slot"][rows], lambda i, *rest: fail(int(rows[i]), *rest), facts.get("n_expert_used"))
    if cut:
        source.note(f"the file ends within a token: {cut} rows at its end left out")
    members = rows[members]
    first = members[:, 0]
    weights = _weights(table, members, source)
    if "residency" in table or "expert_bytes" in table:
        source.note("residency and bytes read describe the recording engine's own cache and are not kept")
    if "dropped" in table and table["dropped"].any():
        source.note(
            f"{int((table['dropped'] != 0).sum())} routings were dropped by the engine after the router chose them; they are kept as chosen"
        )
    meta: dict[str, Any] = {"captured_by": "BigMoeOnEdge --route-trace"}
    if facts.get("model"):
        meta["model"] = re.split(r"[/\\]", facts["model"])[-1]
    if "arch" in facts:
        meta["arch"] = facts["arch"]
    if "n_expert" in facts:
        meta["n_experts"] = facts["n_expert"]
    for name, values in layer_facts.items():
        meta[f"layer_{name}"] = values
    cells = Cells(
        table["turn"][first], table["step"][first], np.where(table["phase"][first] == 0, PREFILL, DECODE), table["layer"][first],
        table["expert"][members], weights, lambda i, *rest: fail(int(first[i]), *rest),
    )  # fmt: skip
    trace = cells_to_trace(cells, source, options, meta)
    if "n_layer" in facts and trace.meta.get("layer_numbers", [trace.n_layers - 1])[-1] < facts["n_layer"] - 1:
        trace.meta["notes"].append(f"the model has {facts['n_layer']} layers, the last one is not in the file: it may be cut off")
    return trace


def _weights(table: dict[str, NDArray[Any]], members: NDArray[np.int64], source: Source) -> NDArray[np.float64] | None:
    if "weight" not in table:
        return None
    weights: NDArray[np.float64] = table["weight"][members]
    unknown = np.isnan(weights)
    if unknown.any():
        source.note("routing weights are not known (nan) in " + ("any row" if unknown.all() else "some rows: all of them left out"))
        return None
    return weights


def _preamble(source: Source) -> tuple[dict[str, Any], dict[str, list[int]], int]:
    """Return the run's facts, per-layer facts, and the number of the header line."""
    facts: dict[str, Any] = {}
    layers: dict[str, list[int]] = {}
    for number, raw in enumerate(source.lines, start=1):
        line = raw.decode("utf-8", "replace")
        if not line.startswith("#"):
            return facts, layers, number
        if number == 1:
            if line.strip() != MAGIC + "1":
                raise source.fail_line(1, "version", f'"{MAGIC}1"', repr(line), "later versions need a newer moesim")
            continue
        found = dict(_FACT.findall(line))
        whole = {key: int(value) for key, value in found.items() if value.isascii() and value.isdigit() and len(value) < 16}
        if "layer" in found:
            if whole.get("layer") != len(layers.get("expert_bytes", [])) or not {"expert_bytes", "dense_bytes"} <= set(whole):
                raise source.fail_line(
                    number, "layer facts", f"layer={len(layers.get('expert_bytes', []))} expert_bytes= dense_bytes=", repr(line)
                )
            for name in ("expert_bytes", "dense_bytes"):
                layers.setdefault(name, []).append(whole[name])
            continue
        for key in ("n_layer", "n_expert", "n_expert_used"):
            if key in found:
                if not 0 < whole.get(key, 0) < 2**15:
                    raise source.fail_line(number, key, "a whole number from 1 to 32767", found[key])
                facts[key] = whole[key]
        for key in ("model", "arch"):
            if key in found:
                facts[key] = found[key]
    raise source.fail("header", "a line with the columns", "only # lines", "the file is cut off")
