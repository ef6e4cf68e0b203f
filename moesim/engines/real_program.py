"""Owns the step from a schedule to prepared operations: memory for every slot, one callable a task, what each lane waits for.

Everything that takes time in Python (views, index tensors, masks, which rows an expert gets) is done here, before the clock runs. A
program may be run any number of times; ``reset`` brings back the state before the first task. Micro-batches are told apart by the order of
their tasks within a layer. It must not know threads or clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesim.engines.real_inputs import Inputs, Pass
from moesim.engines.real_layers import Network, combine
from moesim.engines.real_slots import Key, Move, Place, TierSlots, at_start, tier_slots, traffic
from moesim.engines.real_tasks import AT_START, NOBODY, ExpertTask, LoadTask, SlotCheck, Tag, Together
from moesim.engines.real_weights import AdaptedMatrix, Matrix, Weights, load_weights
from moesim.engines.real_workers import LaneProgram, Operation
from moesim.errors import InputError, MoesimError
from moesim.expert_store import ExpertStore
from moesim.expert_store.readers import Reader
from moesim.host.arena import Arena, as_array
from moesim.host.links import CopyLink
from moesim.schedule import Fragment, Kind, Schedule
from moesim.simulate import Case


class _Slot:
    """One slot: its memory and its tag."""

    __slots__ = ("array", "matrices", "region", "tag", "tensor")

    def __init__(self, region: memoryview) -> None:
        self.region, self.array = region, as_array(region)
        self.tensor = torch.from_numpy(self.array)
        self.tag = Tag()
        self.matrices: dict[int, tuple[Matrix | None, Matrix, Matrix]] = {}  # by layer


class Program:
    """A schedule, ready to run on real experts.

    Parameters
    ----------
    case : Case
    schedule : Schedule
        All fragments of the run, as planned from ``case``.
    store : ExpertStore
        The experts.
    reader : Reader
        Reads them; all servers of the storage lane share it.
    weights : Weights
        Everything but the routed experts.
    arenas : mapping, optional
        Memory by tier, for slots and KV cache; by default of exactly the size that is needed.
    links : mapping, optional
        Emulated links by lane; by default copies run at memory speed.
    threads : int
        torch threads of each compute worker.

    Raises
    ------
    InputError
        If the case asks for what real runs do not do.
    OutOfMemory
        If an arena is too small.
    """

    def __init__(
        self, case: Case, schedule: Schedule, store: ExpertStore, reader: Reader, weights: Weights,
        arenas: Mapping[str, Arena] | None = None, links: Mapping[str, CopyLink] | None = None, threads: int = 1,
    ) -> None:  # fmt: skip
        check_case(case)
        self.case, self.schedule, self.store, self.reader, self.threads = case, schedule, store, reader, threads
        self.layout, self.model, self._weights = case.layout, case.model, weights
        self.links = dict(links or {})
        self.traffic = traffic(self.layout, schedule.lanes, schedule.fragments, at_start(case.planner()))
        tiers = tier_slots(self.layout, store.slot_bytes)
        self.arenas = dict(arenas) if arenas is not None else self._arenas(tiers)
        self._slots = {tier: self._take(slots) for tier, slots in tiers.items()}
        loaded = load_weights(self.model, case.plan, weights, case.scenario.seed)
        self.network = Network(loaded, case.scenario.workload.batch, self.layout.context_tokens, self._kv_memory)
        for arena in self.arenas.values():
            arena.touch()
        self.expert_tasks: dict[tuple[int, int], ExpertTask] = {}  # by FFN task and expert
        self.load_tasks: dict[int, list[LoadTask]] = {}
        self.inputs = Inputs(case, sum(len(f.steps) for f in schedule.fragments), weights)
        self._reads: dict[tuple[Key, Place], Callable[[], int]] = {}
        self._restore = [(self._slot(place), key, self._read(key, place)) for place, key in self.traffic.at_start.items()]
        self.lanes = self._lanes(list(self._operations()))
        self._fill()

    @property
    def n_tasks(self) -> int:
        return self.schedule.n_tasks

    # ---- memory

    def _arenas(self, tiers: Mapping[str, TierSlots]) -> dict[str, Arena]:
        need = {tier: slots.bytes for tier, slots in tiers.items()}
        for layer in range(self.model.n_layers):
            tier = self.layout.tier_of(self.layout.attention_device[layer])
            size = self.model.kv_bytes_per_token(self.case.plan, layer) * self.layout.context_tokens * self.case.scenario.workload.batch
            need[tier] = need.get(tier, 0) + size + 2 * 64
        return {tier: Arena(tier, size) for tier, size in need.items()}

    def _take(self, slots: TierSlots) -> list[_Slot]:
        if not slots.offsets:
            return []
        region = self.arenas[slots.tier].take(slots.bytes, 4096)
        return [_Slot(region[at : at + size]) for at, size in zip(slots.offsets, slots.sizes, strict=True)]

    def _kv_memory(self, layer: int, n_bytes: int) -> Tensor:
        tier = self.layout.tier_of(self.layout.attention_device[layer])
        return torch.from_numpy(as_array(self.arenas[tier].take(n_bytes, 64)))

    def _slot(self, place: Place) -> _Slot:
        return self._slots[place[0]][place[1]]

    def _read(self, key: Key, place: Place) -> Callable[[], int]:
        """The read of an expert into a slot; it never runs twice at a time, as the slot's dependencies see to that."""
        found = self._reads.get((key, place))
        if found is None:
            region = self._slot(place).region[: self.store.slot_bytes(key[0])]
            found = self._reads[key, place] = self.reader.prepare(*key, region)
        return found

    def _fill(self) -> None:
        """Keys and values of the context that is there before the run."""
        cached = self.case.scenario.workload.cached_tokens
        generator = torch.Generator().manual_seed(self.case.scenario.seed)
        for layer in self.network.attention:
            layer.fill_cache(cached, generator)

    def reset(self) -> None:
        """Bring back the state before the first task: who lies where, and nothing readable in any other slot."""
        kept = set()
        for slot, key, read in self._restore:
            if slot.tag.key != key or slot.tag.task != AT_START:
                read()
            slot.tag.hold(key, AT_START, False)
            kept.add(id(slot))
        for slots in self._slots.values():
            for slot in slots:
                if id(slot) not in kept and slot.tag.key is not NOBODY:
                    slot.array[self.store.plan(slot.tag.key[0]).samples] = 0  # no fingerprint of the run before is left
                    slot.tag.hold(NOBODY, AT_START, False)

    # ---- operations

    def _operations(self) -> Iterator[Operation]:
        """One operation a task, in order of id."""
        row, emitted, number = 0, 0, 0
        for fragment in self.schedule.fragments:
            owner = self.inputs.owners(fragment)
            for index, _, last, *_ in fragment.steps.tolist():
                step = self.inputs.steps[index]
                passes = self.inputs.passes(step, row)
                out = slice(emitted, emitted + step.emits)
                row, emitted = row + step.tokens, emitted + step.emits
                turn: dict[tuple[int, int], int] = defaultdict(int)
                for task in range(number, last + 1):
                    yield self._operation(fragment, task, passes, owner, turn, out)
                number = last + 1

    def _operation(
        self, fragment: Fragment, task: int, passes: list[Pass], owner: dict[int, int], turn: dict[tuple[int, int], int], out: slice
    ) -> Operation:
        row = task - fragment.first_task
        kind, layer = Kind(int(fragment.kind[row])), int(fragment.layer[row])
        network = self.network
        if kind == Kind.LOAD:
            return self._load(task, int(fragment.lane[row]))
        if kind == Kind.HEAD:
            if out.start == out.stop:
                return _nothing
            logits = None if self.inputs.logits is None else self.inputs.logits[out]
            return partial(network.head.run, [p.batch for p in passes], self.inputs.tokens_out[out], logits)
        if kind == Kind.COPY:
            return self._copy(fragment, row, passes)
        if kind in (Kind.PUT, Kind.GET):
            return _nothing
        if task in owner:
            parts = [self._expert(task, key, place, passes[owner[task]]) for key, place in self.traffic.uses[task]]
            return parts[0] if len(parts) == 1 else Together(parts)
        at = passes[turn[kind, layer]]
        turn[kind, layer] += 1
        return self._compute(kind, layer, at)

    def _compute(self, kind: Kind, layer: int, at: Pass) -> Operation:
        """What the attention device does for one micro-batch."""
        network, batch = self.network, at.batch
        if kind == Kind.ATTENTION:
            place = network.place(layer, at.first, batch.sequences, at.past, batch.new_tokens)
            return partial(network.attention[layer].run, batch, at.tokens if layer == 0 else None, place)
        if kind == Kind.ROUTER:
            i, router = self.inputs.moe_index[layer], network.router[layer]
            before = router.before[at.first : at.first + batch.sequences]
            absent = None if at.absent is None else at.absent[i]
            return partial(router.run, batch, before, at.past == 0, at.forced[i], absent, at.own[:, i])
        if kind == Kind.COMBINE:
            return partial(combine, batch)
        if layer in network.router:
            return partial(network.shared[layer].run_shared, batch)
        dense = network.dense.get(layer)
        return _nothing if dense is None else partial(dense.run_dense, batch)

    def _expert(self, task: int, key: Key, place: Place, at: Pass) -> ExpertTask:
        slot, layer = self._slot(place), key[0]
        size = self.store.slot_bytes(layer)
        if layer not in slot.matrices:
            views = self.store.views(layer, slot.tensor[:size])
            slot.matrices[layer] = (views.get("gate"), views["up"], views["down"])
        rows = np.flatnonzero(at.ids[self.inputs.moe_index[layer]].ravel() == key[1])
        n_tokens, top_k = len(at.tokens), self.model.top_k
        if not len(rows):
            raise MoesimError(f"task {task} runs layer {layer}, expert {key[1]}, which no token of its micro-batch chose")
        tokens = None if len(rows) == n_tokens and n_tokens == len(np.unique(rows // top_k)) else torch.from_numpy(rows // top_k)
        target = at.batch.rows[int(rows[0]) : int(rows[0]) + 1] if len(rows) == 1 else torch.from_numpy(rows)
        check = SlotCheck(self.store, key, slot.array[:size])
        matrices = self._adapted(key, slot.matrices[layer])
        found = self.expert_tasks[task, key[1]] = ExpertTask(key, slot.tag, check, matrices, at.batch, tokens, target)
        return found

    def _adapted(self, key: Key, matrices: tuple[Matrix | None, Matrix, Matrix]) -> tuple[Matrix | None, Matrix, Matrix]:
        """The matrices of a slot with the adapters of the expert that it holds."""

        def adapted(matrix: Matrix, name: str) -> Matrix:
            pair = self._weights.adapter(*key, name)
            return matrix if pair is None else AdaptedMatrix(matrix, *pair)

        gate, up, down = matrices
        return None if gate is None else adapted(gate, "gate"), adapted(up, "up"), adapted(down, "down")

    def _load(self, task: int, lane: int) -> Operation:
        loads = self.load_tasks[task] = [self._move(move, lane) for move in self.traffic.moves[task]]
        return loads[0] if len(loads) == 1 else Together(loads)

    def _move(self, move: Move, lane: int) -> LoadTask:
        target = self._slot(move.target)
        if move.source is None:
            return LoadTask(move.task, move.key, target.tag, None, self._read(move.key, move.target), move.prefetch)
        source, size = self._slot(move.source), self.store.slot_bytes(move.key[0])
        copy = self._link(lane).prepare(source.region[:size], target.region[:size])
        return LoadTask(move.task, move.key, target.tag, source.tag, copy, move.prefetch)

    def _copy(self, fragment: Fragment, row: int, passes: list[Pass]) -> Operation:
        """Hidden states to another device: as many bytes are really copied; on one machine readers find them where they were."""
        work = fragment.works[fragment.work[row]]
        size = work.transfer_bytes or work.state_bytes // 2
        held = passes[0].batch.x.view(torch.uint8).view(-1).numpy()
        source: Any = held[:size] if size <= len(held) else np.zeros(size, np.uint8)
        target: Any = np.zeros(size, np.uint8)
        return self._link(int(fragment.lane[row])).prepare(memoryview(source), memoryview(target))

    def _link(self, lane: int) -> CopyLink:
        return self.links.setdefault(self.schedule.lanes[lane].name, CopyLink())

    def _lanes(self, operations: list[Operation]) -> list[LaneProgram]:
        """Sort operations into lanes, with the waits that a lane's order does not imply."""
        lanes = self.schedule.lanes
        out = [LaneProgram(x.name, x.width, [], [], [], partial(_computing, self.threads)) for x in lanes]
        lane_of = np.concatenate([f.lane for f in self.schedule.fragments]).tolist()
        implied: list[dict[int, int]] = [{} for _ in lanes]  # by lane: the last task of each other lane that has been waited for
        for fragment in self.schedule.fragments:
            starts, deps = fragment.dep_start.tolist(), fragment.dep_task.tolist()
            for row in range(fragment.n_tasks):
                task = fragment.first_task + row
                mine = lane_of[task]
                known = implied[mine]
                latest: dict[int, int] = {}
                waits = []
                for before in deps[starts[row] : starts[row + 1]]:
                    other = lane_of[before]
                    if lanes[other].width > 1:
                        waits.append(before)
                    elif other != mine and before > known.get(other, -1):
                        latest[other] = max(before, latest.get(other, -1))
                waits += latest.values()
                known |= latest
                out[mine].tasks.append(task)
                out[mine].operations.append(operations[task])
                out[mine].waits.append(tuple(waits))
        return out


def check_case(case: Case) -> None:
    """Refuse what a real run does not do.

    Raises
    ------
    InputError
        For priority lanes, a KV cache that takes room of experts, KV formats of other than 16 bits, and a granularity of matrices.
    """
    scenario, plan = case.scenario, case.plan

    def refuse(field: str, expected: str, got: str, fix: str = "") -> None:
        where = case.document.where(tuple(field.split(".")))
        raise InputError(field, expected=f"{expected}, to be run for real", got=got, fix=fix, where=where)

    if scenario.lanes != "fifo":
        refuse("lanes", "fifo", scenario.lanes)
    if scenario.granularity == "matrix":
        refuse("granularity", "expert or layer", "matrix")
    if scenario.memory.kv_from_experts:
        refuse("memory.kv_from_experts", "false", "true")
    for matrix in ("k", "v"):
        name = plan.format("kv", 0, matrix).name
        if name not in ("fp16", "bf16"):
            refuse("precision.kv", "fp16 or bf16 (both are kept as bf16)", name)


def _nothing() -> None:
    pass


@contextmanager
def _computing(threads: int) -> Iterator[None]:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        yield
