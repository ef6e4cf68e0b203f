"""Owns compiled planning of steps that are formed as requests come: ``MixedPlanner``'s fragments, array for array, at compiled speed.

Tables and kernels are those of the compiled planner (``fast.py``, ``kernel.py``); whole layer-sets have a kernel of their own
(``layer_kernel.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moesim.planner import kernel as pk
from moesim.planner import layer_kernel as lk
from moesim.planner.fast import TYPES, CompiledPlanner, merged, uncovered
from moesim.planner.mixed import MOST_STEPS, MixedPlanner
from moesim.schedule import Fragment, Work
from moesim.workload import MixedStep


class CompiledMixedPlanner(CompiledPlanner, MixedPlanner):
    """A planner of formed steps that is compiled where ``uncovered`` is empty, and the reference elsewhere; see ``Planner``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uncovered = uncovered(self, ("expert", "layer"))
        if self.predicted is not None:
            self.uncovered = "prefetching"
        if self.scenario.serving is not None and self.scenario.serving.swap:
            self.uncovered = "sequences that are swapped out"
        self._run = np.zeros(lk.RUN_FIELDS, np.int64)
        self._run[pk.GATE] = -1
        if not self.uncovered:
            self._tables(MOST_STEPS)

    def plan(self, steps: Sequence[MixedStep]) -> Fragment:
        """Plan some steps, at most ``MOST_STEPS``, as one fragment."""
        return MixedPlanner.plan(self, steps) if self.uncovered else self._plan_mixed(steps)

    def _tables(self, most_steps: int) -> None:
        super()._tables(most_steps)
        layout = self.layout
        self._hops: dict[int, tuple[str, int, bool]] = {}  # by code of a load of one expert
        for layer in self.moe:
            tier = layout.tier_of(layout.expert_device[layer])
            hop = layout.disk if tier == layout.main_tier else layout.link(layout.main_tier, tier)
            for field, fast in ((pk.LOAD_CODE, False), (pk.FAST_CODE, True)):
                self._hops.setdefault(int(self._layers[layer, field]), (hop, layer, fast))
        self._sets_of: dict[tuple[int, int, int], Work] = {}
        self._sets = np.zeros((0, 5), np.int64)
        self._seen = np.zeros((2 << int(self.n_experts + 1).bit_length(), 2), np.int64)

    # ---- works

    def _work(
        self, code: int, constant: Sequence[Work], met: Sequence[tuple[int, int, int]], parts: Sequence[list[tuple[int, int, int]]]
    ) -> Work:
        first_set = self._first_constant + len(constant)
        if code >= first_set:
            return self._layer_set_work(met[code - first_set])
        if code >= self._first_constant:
            return constant[code - self._first_constant]
        if code >= self._first_attention:
            place, which = divmod(code - self._first_attention, len(self._attention))
            return self.works.attention_of(self._attention[which], parts[place])
        which, tokens = divmod(code, self.layout.most_tokens + 1)
        layer = self._ffn[which]
        return self.works.expert_pieces(self.layout.expert_device[layer], layer, tokens)[0]

    def _layer_set_work(self, key: tuple[int, int, int]) -> Work:
        """The FFN of a layer-set by (code of its layer's kind, experts, rows), or a load by (negative code of one, experts, 0)."""
        found = self._sets_of.get(key)
        if found is None:
            kind, experts, rows = key
            if rows:
                layer = self._ffn[kind // (self.layout.most_tokens + 1)]
                found = self.works.experts(self.layout.expert_device[layer], layer, [rows - experts + 1, *[1] * (experts - 1)])
            else:
                hop, layer, fast = self._hops[-kind]
                found = self.works.hop(hop, layer, experts, fast)[0]
            self._sets_of[key] = found
        return found

    # ---- a fragment

    def _plan_mixed(self, steps: Sequence[MixedStep]) -> Fragment:
        run, whole = self._run, self.scenario.granularity == "layer"
        changes: list[tuple[int, int, int, int]] = []
        rows: list[tuple[int, ...]] = []
        first_row = 0
        for place, step in enumerate(steps):
            for tier, line, delta in self.kv_changes(step):
                if delta:
                    changes.append((place, self.tiers.index(tier), self.lines.index(line), delta))
            ends = self._ends(step.emits, len(step.new))
            rows.append((step.index, step.tokens, first_row, 1, self._variant(step.tokens), *ends, -1, -1))
            first_row += step.tokens
        table = np.array(rows, np.int64)
        most, most_used = self._room_for(table, len(steps))
        taken: list[Any] = [np.empty(most, dtype) for dtype in (*TYPES[:-1], np.int16 if whole else np.bool_)]
        n_deps = most * 3 + (2 * most_used if whole else 0)
        deps: list[Any] = [np.empty(most + 1, np.int64), np.empty(n_deps, np.int64), np.empty(n_deps, np.int8)]
        access = np.empty((most_used, 6), np.int64)
        n_members = 2 * most_used if whole else 0
        members, met = np.empty((n_members, 3), np.int64), np.empty((n_members, 3), np.int64)
        first = run[pk.BASE] = run[pk.TASK]
        first_set = run[lk.FIRST_SET] = self._first_constant + len(self._constant)
        works = np.full((2, first_set + n_members), -1, np.int64)
        run[[pk.N_DEPS, pk.N_WORKS, pk.N_ACCESS, lk.N_MEMBERS, lk.N_SETS]] = 0
        row_of = np.concatenate([step.rows for step in steps])
        state = self._codes, self._layers, self._experts_of, self._rings, self._set, works, access
        if whole:
            if len(self._sets) < 2 * n_members:
                self._sets = np.zeros((2 << int(n_members).bit_length(), 5), np.int64)
            tables = members, self._sets, met, self._seen
            lk.plan_layer_steps(lk.STAMP, len(steps), run, table, row_of, self._ids, *state, *tables, *taken, *deps)
        else:
            pk.plan_steps(len(steps), run, table, row_of, self._ids, self._ahead, *state, *taken, *deps)
        n, used = int(run[pk.TASK] - first), int(run[pk.N_DEPS])
        *columns, work, grew = (column[:n] for column in taken)
        sets = [(int(a), int(b), int(c)) for a, b, c in met[: run[lk.N_SETS]].tolist()]
        constant = list(self._constant)
        parts = [step.parts for step in steps]
        distinct, work = merged((self._work(code, constant, sets, parts) for code in works[1, : run[pk.N_WORKS]].tolist()), work)
        facts = np.array([(step.phase, step.tokens, step.emits) for step in steps], np.int64)
        memory = self._memory(table, changes, grew, columns[2], int(first))
        ends_of = np.column_stack([table[:, [pk.INDEX, pk.FIRST_TASK, pk.LAST_TASK]], facts])
        rest = memory, access[: run[pk.N_ACCESS]], ends_of, members[: run[lk.N_MEMBERS]]
        return Fragment(int(first), *[*columns, work, distinct, deps[0][: n + 1], deps[1][:used], deps[2][:used], *rest])
