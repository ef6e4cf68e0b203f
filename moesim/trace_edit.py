"""Owns joining traces, cutting them by what a command line says, and writing them in text formats.

It must not know readers. Cutting itself is the trace's own (``slice_rows``, ``select_sequences``, ``decode_rows``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moesim.errors import InputError
from moesim.profile import RoutingProfile
from moesim.trace import DECODE, RoutingTrace

FILE_FACTS = ("n_tokens", "n_sequences", "missing_cells", "sequences")  # facts of a whole file that are wrong for a part


def merge_traces(traces: Sequence[RoutingTrace], names: Sequence[str]) -> RoutingTrace:
    """Join traces of one model shape, one after another; sequences are numbered anew.

    Weights are kept if all have them. Facts on which the traces differ are left out of the meta; ``merged_from`` names the parts.

    Raises
    ------
    InputError
        If layers, experts or top-k differ, or fewer than two traces are given.
    """
    if len(traces) < 2:
        raise InputError("traces", expected="at least two", got=str(len(traces)))
    first = traces[0]
    for trace, name in zip(traces[1:], names[1:], strict=True):
        for what in ("n_layers", "n_experts", "top_k"):
            if getattr(trace, what) != getattr(first, what):
                want = f"{getattr(first, what)}, as in {names[0]}"
                raise InputError(
                    what, expected=want, got=str(getattr(trace, what)), fix="only traces of one model's shape can be joined", where=name
                )
    starts = np.cumsum([0, *(len(trace.sequences) for trace in traces)])
    seq = [
        np.repeat(int(start) + np.arange(len(trace.sequences)), [stop - begin for begin, stop in trace.sequences])
        for start, trace in zip(starts, traces, strict=False)
    ]
    notes: list[str] = []
    weights = None
    if all(trace.weights is not None for trace in traces):
        weights = np.concatenate([trace.weights for trace in traces if trace.weights is not None])
    elif any(trace.weights is not None for trace in traces):
        notes.append("weights left out: not all parts have them")
    meta = {key: value for key, value in first.meta.items() if all(key in t.meta and t.meta[key] == value for t in traces)}
    meta = {key: value for key, value in meta.items() if key not in (*FILE_FACTS, "notes", "source_file")}
    for trace, name in zip(traces, names, strict=True):
        own = trace.meta.get("notes", [])
        notes += [f"{name}: {note}" for note in own] if isinstance(own, list) else []
    return RoutingTrace(
        np.concatenate([trace.expert_ids for trace in traces]),
        weights,
        np.concatenate(seq).astype(np.int32),
        np.concatenate([trace.position for trace in traces]),
        np.concatenate([trace.phase for trace in traces]),
        {**meta, "n_experts": first.n_experts, "merged_from": [Path(name).name for name in names], "notes": notes},
    )


def phase_rows(trace: RoutingTrace, phase: int) -> RoutingTrace:
    """Return the rows of one phase.

    Raises
    ------
    InputError
        If there is none.
    """
    rows = trace.phase == phase
    if not rows.any():
        name = "decode" if phase == DECODE else "prefill"
        raise InputError("phase", expected=f"a trace with {name} rows", got="none")
    if phase == DECODE:
        return trace.decode_rows()
    meta = {key: value for key, value in trace.meta.items() if key not in FILE_FACTS}
    weights = None if trace.weights is None else trace.weights[rows]
    arrays = (trace.expert_ids[rows], weights, trace.seq_id[rows], trace.position[rows], trace.phase[rows])
    return RoutingTrace(*arrays, {**meta, "n_experts": trace.n_experts}, validate=False)


def parse_span(text: str, length: int, option: str) -> tuple[int, int]:
    """Read ``A:B`` (B excluded, either may be left out) within ``length`` rows."""
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})", text.strip())
    start, stop = (int(match[1] or 0), int(match[2] or length)) if match else (0, 0)
    if not match or not 0 <= start < stop <= length:
        raise InputError(option, expected=f"A:B with 0 <= A < B <= {length}", got=f'"{text}"')
    return start, stop


def parse_numbers(text: str, option: str, *, ranges: bool = True) -> list[int]:
    """Read numbers and ranges, as in ``0,2,5-7``; numbers alone, if ``ranges`` is off."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or last < first or last - first > 10**6 or (match[2] and not ranges):
            want = "numbers and ranges, as in 0,2,5-7" if ranges else "numbers, as in 20,35"
            raise InputError(option, expected=want, got=f'"{text}"')
        out += range(first, last + 1)
    return out


def to_profile(trace: RoutingTrace, source: str) -> RoutingProfile:
    """Return a trace's popularity as a profile."""
    layers = trace.meta.get("layer_numbers", list(range(trace.n_layers)))
    notes = trace.meta.get("notes", [])
    meta: dict[str, Any] = {key: trace.meta[key] for key in ("model", "dataset", "licence") if key in trace.meta}
    texts = [str(note) for note in notes] if isinstance(notes, list) else []
    return RoutingProfile.from_counts(trace.counts(), layers, source, texts, {**meta, "top_k": trace.top_k})


def counts_csv(trace: RoutingTrace) -> str:
    """Return ``layer,expert,count`` of every expert of every layer."""
    layers = trace.meta.get("layer_numbers", list(range(trace.n_layers)))
    lines = [f"{layers[i]},{expert},{count}" for i, row in enumerate(trace.counts().tolist()) for expert, count in enumerate(row)]
    return "\n".join(["layer,expert,count", *lines]) + "\n"


def route_trace_csv(trace: RoutingTrace) -> str:
    """Return BigMoeOnEdge's ``# route_trace v1``: a sequence is a turn, absent cells have no rows; reading it back gives an equal trace.

    ``residency`` and ``expert_bytes`` are left out: no engine ran.
    """
    layers = trace.meta.get("layer_numbers", list(range(trace.n_layers)))
    model = re.sub(r"\s", "_", str(trace.meta.get("model", "unknown")))
    t, column = np.nonzero(trace.present)
    k = trace.top_k
    seq_number = np.repeat(np.arange(len(trace.sequences)), [stop - start for start, stop in trace.sequences])
    phase = np.where(trace.phase == DECODE, 1, 0)
    fields = [seq_number[t], phase[t], trace.position[t], np.asarray(layers)[column]]
    numbers = np.concatenate([np.repeat(np.stack(fields, 1), k, 0), np.tile(np.arange(k), len(t))[:, None]], axis=1)
    rows = np.column_stack([numbers, trace.expert_ids[t, column].reshape(-1)]).tolist()
    if trace.weights is None:
        lines = [f"{a},{b},{c},{d},{e},{f},nan" for a, b, c, d, e, f in rows]
    else:
        weights = trace.weights[t, column].reshape(-1).astype(float).tolist()
        lines = [f"{a},{b},{c},{d},{e},{f},{w:.6g}" for (a, b, c, d, e, f), w in zip(rows, weights, strict=True)]
    head = f"# model={model} arch=unknown n_layer={int(max(layers)) + 1} n_expert={trace.n_experts} n_expert_used={k}"
    return "\n".join(["# route_trace v1", head, "turn,phase,step,layer,slot,expert,weight", *lines]) + "\n"
