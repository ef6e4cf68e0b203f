"""Owns reading a result that ``moesim run -o json`` wrote: what a page shows of it is checked, the rest is kept as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from moesim.errors import InputError

MOST_BYTES = 64 << 20  # a result takes some 20 kB


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Line(_Part):
    name: str
    bytes: int
    basis: str


class _Tier(_Part):
    capacity_bytes: int
    reserved_bytes: int
    planned_bytes: int
    left_bytes: int
    peak_bytes: int | None
    lines: list[_Line]


class _OutOfMemory(_Part):
    tier: str
    step: int
    needed_bytes: int
    usable_bytes: int
    asked_by: str


class _Spread(_Part):
    mean: float
    median: float
    p95: float
    p99: float


class _Accesses(_Part):
    cache: int
    prefetch: int
    late: int
    miss: int


class _Metrics(_Part):
    decode_tok_s: float | None
    prefill_tok_s: float | None
    output_throughput_tok_s: float | None
    ttft_ms: _Spread | None
    tpot_ms: _Spread | None
    itl_ms: _Spread | None
    accesses: _Accesses
    dropped_prefetches: int
    expert_hit_rate: float | None
    overlap_coverage: float | None
    io_wait_ms_per_token: float
    makespan_s: float


class _Moved(_Part):
    bytes: int
    demand_bytes: int
    prefetch_useful_bytes: int
    prefetch_wasted_bytes: int
    busy_s: float


class _Lane(_Part):
    utilisation: float


class _Share(_Part):
    lane: str
    kind: str
    share: float
    contention: float


class _Provenance(_Part):
    version: str
    scenario: str
    set: list[str] = []
    scenario_hash: str
    model: str
    hardware: str
    trace: str
    adaptations: list[str]
    assumed: list[str]


class _ResultFile(_Part):
    provenance: _Provenance
    memory: dict[str, _Tier]
    oom: _OutOfMemory | None
    metrics: _Metrics | None
    transfers: dict[str, _Moved] | None
    lanes: dict[str, _Lane] | None
    critical_path: list[_Share] | None


def read_result(path: Path) -> dict[str, Any]:
    """Return a result in the shape of ``Result.as_dict``.

    Raises
    ------
    InputError
        If the file cannot be read, is no JSON, or is not what ``moesim run -o json`` writes.
    """
    fix = "write one with moesim run SCENARIO -o json"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError("result", expected="a file of less than 64 MiB", got="a larger one", fix=fix, where=str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("result", expected="a file that can be read", got=error.strerror or str(error), where=str(path)) from None
    except (ValueError, RecursionError):
        raise InputError("result", expected="JSON", got="something else", fix=fix, where=str(path)) from None
    try:
        checked = _ResultFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"])) or "result"
        raise InputError(what, expected="a result of moesim run -o json", got=first["msg"].lower(), fix=fix, where=str(path)) from None
    ran = [checked.metrics, checked.transfers, checked.lanes, checked.critical_path]
    if any(part is None for part in ran) and any(part is not None for part in ran):
        raise InputError("result", expected="metrics, transfers, lanes and critical_path together", got="some", fix=fix, where=str(path))
    if checked.metrics is None and checked.oom is None:
        raise InputError("result", expected="metrics, or why there are none (oom)", got="neither", fix=fix, where=str(path))
    return checked.model_dump()
