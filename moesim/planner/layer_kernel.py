# mypy: ignore-errors
"""Owns compiled planning of whole layer-sets: one load and one FFN task for all experts of a group (granularity layer).

The tables, and how experts move between pool, slots and passing, are those of ``kernel.py``; only the tasks differ. Nothing is prefetched.
``fast_mixed.py`` says what is covered. A layer-set's work is known by its layer's kind, its experts and their rows; ``sets`` finds the
code of one that has been met in this fragment already.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numba import njit

from moesim.planner import kernel as pk

# ``run``, behind the fields of ``kernel.py``: rows of ``members``; layer-sets met in this fragment, and the code of the first;
# stamps of ``sets`` (one a fragment) and ``seen`` (one a task)
N_MEMBERS, N_SETS, FIRST_SET, SETS_STAMP, SEEN_STAMP = np.arange(pk.RUN_FIELDS, pk.RUN_FIELDS + 5)
RUN_FIELDS = pk.RUN_FIELDS + 5
# ``sets``: open addressing, a row a place; ``met``: a row a layer-set in order of first use
MET_STAMP, MET_KIND, MET_EXPERTS, MET_ROWS, MET_CODE = np.arange(5)

_sources = [Path(pk.__file__), Path(__file__)]
STAMP = np.zeros(
    1, [("sources_" + hashlib.sha256(b"".join(p.read_bytes() for p in _sources)).hexdigest()[:16], np.int8)]
)  # see fast_state.py


@pk.inner
def _code_of(run, sets, met, kind, experts, rows):
    """The work code of a layer-set, or of a load of so many experts (kind: the negative code of a load of one)."""
    mask = sets.shape[0] - 1
    at = ((kind * 1_000_003 + experts) * 1_000_003 + rows) & mask
    while sets[at, MET_STAMP] == run[SETS_STAMP]:
        if sets[at, MET_KIND] == kind and sets[at, MET_EXPERTS] == experts and sets[at, MET_ROWS] == rows:
            return sets[at, MET_CODE]
        at = (at + 1) & mask
    n = run[N_SETS]
    code = run[FIRST_SET] + n
    sets[at, MET_STAMP] = run[SETS_STAMP]
    sets[at, MET_KIND] = met[n, 0] = kind
    sets[at, MET_EXPERTS] = met[n, 1] = experts
    sets[at, MET_ROWS] = met[n, 2] = rows
    sets[at, MET_CODE] = code
    run[N_SETS] = n + 1
    return code


@pk.inner
def _wait_for(run, deps, seen, task, why):
    """Let the next task wait for another one, once."""
    mask = seen.shape[0] - 1
    at = task & mask
    while seen[at, 0] == run[SEEN_STAMP]:
        if seen[at, 1] == task:
            return
        at = (at + 1) & mask
    seen[at, 0] = run[SEEN_STAMP]
    seen[at, 1] = task
    d = run[pk.N_DEPS]
    deps[1][d] = task
    deps[2][d] = why
    run[pk.N_DEPS] = d + 1


@pk.inner
def _member(run, members, task, expert, slot):
    m = run[N_MEMBERS]
    members[m, 0] = task
    members[m, 1] = expert
    members[m, 2] = slot
    run[N_MEMBERS] = m + 1


@pk.inner
def _load(run, pool, home, set_, works, columns, deps, members, sets, met, seen, layer, index, n, router):
    """One load for all of the group that are not in place."""
    count = 0
    grown = 0
    only = pk.NOTHING
    fast = True
    run[SEEN_STAMP] += 1
    _wait_for(run, deps, seen, router, pk.DATA)
    for m in range(n):
        member = set_[m]
        if member.turn == pk.NOW and member.fresh > 0:
            count += 1
            grown += member.grew
            only = member.expert
            fast = fast and pool[pk.MOE] * (home.shape[0] - 1) + only < run[pk.FAST_KEYS]
            if member.wait >= 0:
                _wait_for(run, deps, seen, member.wait, pk.SLOT_DEP)
    if count == 0:
        run[pk.N_DEPS] -= 1  # the router
        return
    code = _code_of(run, sets, met, -pool[pk.FAST_CODE if fast else pk.LOAD_CODE], count, pk.ZERO)
    slot = home[only].slot if count == 1 else pk.NOTHING
    task = pk._task(
        run, works, columns, deps, pk.LOAD_TASK, pool[pk.LOAD_LANE], layer, only if count == 1 else pk.NOTHING, index, index, layer, pk.ZERO,
        pk.ZERO, slot, code, pk.NOTHING, pk.NOTHING, pk.DATA,
    )  # fmt: skip
    columns[10][task - run[pk.BASE]] = grown
    for m in range(n):
        member = set_[m]
        if member.turn == pk.NOW and member.fresh > 0:
            home[member.expert].loaded_by = task
            if count > 1:
                _member(run, members, task, member.expert, home[member.expert].slot)


@pk.inner
def _ffn(run, pool, home, set_, works, columns, deps, access, members, sets, met, seen, layer, index, n, router):
    """One FFN task for all of the group; return it, and how many they are."""
    count = 0
    rows = 0
    run[SEEN_STAMP] += 1
    _wait_for(run, deps, seen, router, pk.DATA)
    for m in range(n):
        if set_[m].turn == pk.NOW:
            e = set_[m].expert
            count += 1
            rows += set_[e].count
            if home[e].loaded_by >= 0:
                _wait_for(run, deps, seen, home[e].loaded_by, pk.DATA)
    code = _code_of(run, sets, met, pool[pk.FFN_CODE], count, rows)
    task = pk._plain(run, works, columns, deps, pk.FFN_TASK, pool[pk.LANE], layer, index, code, pk.NOTHING)
    for m in range(n):
        member = set_[m]
        if member.turn == pk.NOW:
            x = home[member.expert]
            _member(run, members, task, member.expert, x.slot)
            row = access[run[pk.N_ACCESS]]
            row[0] = index
            row[1] = layer
            row[2] = member.expert
            row[3] = pk.MISS if member.fresh > 0 else pk.FROM_CACHE
            row[4] = task
            row[5] = x.loaded_by
            run[pk.N_ACCESS] += 1
            x.used_by = task
            member.turn = pk.SERVED
    return task, count


@njit(cache=True, nogil=True, _nrt=False, no_cfunc_wrapper=True)
def plan_layer_steps(
    stamp, n_steps, run, steps, rows, ids, codes, layers, experts, rings, set_, works, access, members, sets, met, seen,
    kind, step_of, layer_of, expert, lane_of, use_step, use_layer, early, slot, work, grew, dep_start, dep_task, dep_type,
):  # fmt: skip
    """Plan steps into the columns of a fragment; state moves on. See ``kernel.plan_steps`` for what is not said here.

    Parameters
    ----------
    works : (2, C) int64
        With room for the codes of ``met`` from FIRST_SET on.
    members : (M, 3) int64
        Filled with tasks for several experts, the experts and their slots.
    sets, met : (H, 5) and (D, 3) int64
        H is a power of two, larger than D.
    seen : (H, 2) int64
        Scratch; H is a power of two, larger than the experts of a layer and one.
    grew : int16
        Experts that find untouched room, by load.
    """
    n_layers = layers.shape[0]
    columns = kind, step_of, layer_of, expert, lane_of, use_step, use_layer, early, slot, work, grew
    deps = dep_start, dep_task, dep_type
    dep_start[0] = 0
    run[SETS_STAMP] += 1
    for s in range(n_steps):
        step = steps[s]
        index = step[pk.INDEX]
        first = step[pk.FROM]
        step[pk.FIRST_TASK] = run[pk.TASK]
        last = pk.NOTHING
        for layer in range(n_layers):
            pool = layers[layer]
            code = codes[step[pk.VARIANT], layer]
            i = pool[pk.MOE]
            lane = pool[pk.LANE]
            if pool[pk.COPY_LANE] >= 0:
                last = pk._plain(run, works, columns, deps, pk.COPY_TASK, pool[pk.COPY_LANE], layer, index, code[pk.COPY_CODE], last)
            attention = run[pk.ATTENTION_CODE] + s * run[pk.ATTENTION_KINDS] + pool[pk.ATTENTION_KIND]
            last = pk._plain(run, works, columns, deps, pk.ATTENTION_TASK, lane, layer, index, attention, last)
            if i < 0:
                last = pk._plain(run, works, columns, deps, pk.FFN_TASK, lane, layer, index, code[pk.DENSE_CODE], last)
                continue
            router = pk._plain(run, works, columns, deps, pk.ROUTER_TASK, lane, layer, index, code[pk.ROUTER_CODE], last)
            shared = pk.NOTHING
            if pool[pk.SHARED_LANE] >= 0:
                shared = pk._plain(run, works, columns, deps, pk.FFN_TASK, pool[pk.SHARED_LANE], layer, index, code[pk.SHARED_CODE], last)
            home = experts[i]
            n = pk._layer_set(rows, first, first + step[pk.TOKENS], ids, i, set_)
            static = pool[pk.POLICY] == pk.STATIC
            done = 0
            n_ffns = 0
            at = pk.ZERO
            while done < n:
                if static:
                    for m in range(n):
                        member = set_[m]
                        if member.turn == pk.WAITING:
                            pk._stay_or_pass(pool, home, rings, member)
                else:
                    at = pk._wave(run, pool, home, set_, at, n, index)
                _load(run, pool, home, set_, works, columns, deps, members, sets, met, seen, layer, index, n, router)
                task, count = _ffn(run, pool, home, set_, works, columns, deps, access, members, sets, met, seen, layer, index, n, router)
                set_[n_ffns].ffn = task
                n_ffns += 1
                done += count
                if static:
                    pk._let_go(pool, home, rings, set_, pk.ONE)
            for m in range(n):
                set_[set_[m].expert].count = 0
            for m in range(n_ffns):
                dep_task[run[pk.N_DEPS]] = set_[m].ffn
                dep_type[run[pk.N_DEPS]] = pk.DATA
                run[pk.N_DEPS] += 1
            if n == 0 and shared < 0:
                shared = router
            last = pk._plain(run, works, columns, deps, pk.COMBINE_TASK, lane, layer, index, code[pk.COMBINE_CODE], shared)
        if run[pk.HEAD_COPY_LANE] >= 0:
            last = pk._plain(
                run, works, columns, deps, pk.COPY_TASK, run[pk.HEAD_COPY_LANE], n_layers, index, step[pk.HEAD_COPY_CODE], last
            )
        last = pk._plain(run, works, columns, deps, pk.HEAD_TASK, run[pk.HEAD_LANE], n_layers, index, step[pk.HEAD_CODE], last)
        step[pk.LAST_TASK] = run[pk.GATE] = last
