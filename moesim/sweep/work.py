"""Owns what one worker does: a chunk of points in, their rows out. Every way of running a sweep goes through ``compute``.

Points of a chunk that share a ``plan_key`` are planned once: the first run's fragments are kept, and the others are timed and measured
on them. Each gives the result of a run of its own, byte for byte. Routing that is drawn is kept for the points that draw the same.
"""

from __future__ import annotations

import ctypes
import gc
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from moesim import config
from moesim.config import Document
from moesim.errors import InputError, MoesimError
from moesim.layout import Layout
from moesim.planner import Planner
from moesim.scenario import Scenario
from moesim.schedule import Fragment
from moesim.simulate import Case, Routing, make_case, simulate
from moesim.sweep.record import record
from moesim.sweep.space import Placed, assemble, code_identity, file_identity, machine
from moesim.sweep.store import Row

MOST_KEPT_TASKS = 8_000_000  # of a schedule that is kept for other points; some 1 GB
MOST_ROUTINGS = 32
MOST_CELLS = 4_000_000  # of a routing that is kept: some 10 MB
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h
MOST_KEPT_BLOCK = 32 << 20  # the most that it takes
_routings: OrderedDict[str, Routing] = OrderedDict()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Points that one worker computes together: a base, and the key of each point with what it sets over the base."""

    base: Document
    folder: str
    code: str  # identity of the program that the keys were made with
    files: tuple[tuple[str, str], ...]  # name and identity of every file that the points name
    points: tuple[tuple[str, tuple[Placed, ...]], ...]

    def __len__(self) -> int:
        return len(self.points)


def compute_apart(chunks: Sequence[Chunk]) -> list[Row]:
    """Return the rows of several chunks, in a process that does nothing else; it is made fit for many small points at the first call."""
    rows = [row for chunk in chunks for row in compute(chunk)]
    _settle()
    return rows


@cache
def _settle() -> None:
    """Keep what costs a short point as much time as itself: collections that walk over all imports, and memory that is mapped anew.

    Workers of Dask are started with a limit to how much freed memory is kept, which stops the C library from learning that large blocks
    recur: each array is then mapped, and its pages are faulted in, every time.
    """
    gc.collect()
    gc.freeze()
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, MOST_KEPT_BLOCK)
        mallopt(TRIM_THRESHOLD, 4 * MOST_KEPT_BLOCK)


def compute(chunk: Chunk) -> list[Row]:
    """Return one row for each point of a chunk, in order.

    Raises
    ------
    InputError
        If this worker runs another version of the code, or finds other files under the same names, than the one that sent the chunk.
    """
    if chunk.code != code_identity():
        raise InputError(
            "worker",
            expected=f"code {chunk.code}",
            got=code_identity(),
            fix="install the same version on every host; run again if it was edited meanwhile",
        )
    for name, identity in chunk.files:
        if file_identity(name, chunk.folder) != identity:
            raise InputError("worker", expected=f"the same file {name} on every host", got="another, or none", fix="share the folder")
    rows: list[Row] = []
    shared: _Shared | None = None
    for key, settings in chunk.points:
        stated = json.dumps({path: value for path, value, _ in settings}, sort_keys=True, separators=(",", ":"))
        try:
            case = _load(chunk.base, settings, Path(chunk.folder), shared)
            kept = _keeping(case) if shared is None and len(chunk) > 1 else None
            result = simulate(kept or case, keep=False)
            if kept is not None and kept.__dict__["recording"].complete:
                shared = kept
            rows.append(Row(key, "fine" if result.oom is None else "oom", stated, record(result)))
        except MemoryError:
            raise
        except MoesimError as error:
            rows.append(Row(key, "failed", stated, None, str(error)))
        except Exception as error:
            rows.append(Row(key, "failed", stated, None, f"internal: {type(error).__name__}: {error}"))
    return rows


class _Recording(Planner):
    """A planner of any kind whose fragments are kept as they are planned, and given again from then on."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.kept: list[Fragment] = []
        self.complete = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.planner, name)

    @property
    def dropped_prefetches(self) -> int:
        return self.planner.dropped_prefetches

    def initial_memory(self) -> list[tuple[int, int, int]]:
        return self.planner.initial_memory()

    def fragments(self, *_: int) -> Iterator[Fragment]:
        if self.complete:
            yield from self.kept
            return
        whole = True
        for fragment in self.planner.fragments():
            whole = whole and fragment.first_task + fragment.n_tasks <= MOST_KEPT_TASKS
            self.kept = [*self.kept, fragment] if whole else []
            yield fragment
        self.complete = whole


class _Shared(Case):
    """A case whose plan is kept for others, or that another one has kept."""

    def planner(self, kind: type[Planner] | None = None) -> Planner:
        return cast(Planner, self.__dict__["recording"])


def _load(base: Document, settings: tuple[Placed, ...], folder: Path, shared: _Shared | None) -> Case:
    """Load a point's case; where another one's plan serves it, without loading what they have in common."""
    document = assemble(base, settings, folder)
    scenario = config.build(Scenario, document)
    if shared is None:
        case = make_case(scenario, document, folder)
        case.__dict__["routing"] = routing_of(case)
        return case
    hardware = machine(document, folder)
    layout = Layout(scenario, shared.model, shared.plan, hardware)
    parts = (scenario, shared.model, shared.plan, hardware, layout, document, folder)
    same = _same(layout, shared.layout)
    case = _Shared(*parts) if same else Case(*parts)
    case.__dict__["routing"] = shared.routing
    if same:
        case.__dict__["recording"] = shared.__dict__["recording"]
    return case


def _keeping(case: Case) -> _Shared:
    """Return the case with its plan kept."""
    out = _Shared(case.scenario, case.model, case.plan, case.hardware, case.layout, case.document, case.base)
    out.__dict__.update(routing=case.routing, recording=_Recording(case.planner()))
    return out


def _same(a: Layout, b: Layout) -> bool:
    """Whether two layouts give the same plan: the same memory, pools, devices, sizes and lanes, and no part of it that costs decide."""
    return (
        a.depends_on == b.depends_on == {"trace"}
        and a.ledger == b.ledger
        and a.pools == b.pools
        and a.line_names == b.line_names
        and a.matrix_bytes == b.matrix_bytes
        and (a.attention_device, a.shared_device, a.owners) == (b.attention_device, b.shared_device, b.owners)
        and a.lanes == b.lanes
    )


def routing_of(case: Case) -> Routing:
    """The routing of a case, from the few that were used last if it is among them."""
    scenario = case.scenario
    prefetch = (scenario.prefetch.on, scenario.prefetch.predictor, scenario.prefetch.recall)
    pools = [(tier, plan.spec.policy, plan.spec.warm) for tier, plan in case.layout.pools.items()]
    read = [scenario.trace.model_dump(), scenario.workload.model_dump(), scenario.seed, prefetch, pools, str(case.base), case.model.name]
    key = json.dumps([*read, config.content_hash(case.model)], sort_keys=True)
    found = _routings.pop(key, None)
    if found is None:
        found = case.routing
        while len(_routings) >= MOST_ROUTINGS:
            _routings.popitem(last=False)
    if found.train.expert_ids.size <= MOST_CELLS:
        _routings[key] = found
    return found
