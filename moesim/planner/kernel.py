# mypy: ignore-errors
"""Owns compiled planning: the tasks of whole steps for the common case, equal to the reference planner's column for column.

The readable truth is ``planner.py``, ``loads.py`` and ``residency.py``, whose words are used here. What is covered, and how a run
becomes the tables below, ``planner_fast.py`` says. Slots of a layer's pool are alike, so room is counted in slots; an expert has at
most one layer use ahead of it, so a pin is a flag, and what is pinned for a layer's next use, or passes through for it, is one list.

Functions are compiled without reference counts and inner ones without wrappers for Python: arrays come in from outside, none is made
here. Constants are NumPy's: a Python integer, as an argument, would compile its function once for every value.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.cpython.unsafe.numbers import trailing_zeros

from moesim.schedule import Dep, Kind, Outcome

# ``run``: what never changes, then what goes on from step to step, then what each fragment begins anew
DISTANCE, SOURCE, FAST_KEYS, ATTENTION_CODE, ATTENTION_KINDS, HEAD_LANE, HEAD_COPY_LANE, KEEP, N_MOE = np.arange(9)
TASK, GATE, DROPPED, STAMP = np.arange(9, 13)
BASE, N_DEPS, N_WORKS, N_ACCESS = np.arange(13, 17)
RUN_FIELDS = 17
NONE, ROUTER, PREVIOUS, BOTH = np.arange(4)  # SOURCE
# ``steps``: FROM is a step's first place among the rows
INDEX, TOKENS, FROM, NEW, VARIANT, HEAD_CODE, HEAD_COPY_CODE, FIRST_TASK, LAST_TASK = np.arange(9)
STEP_FIELDS = 9
# ``layers``, one row a layer; LAYER is the i-th MoE layer in row i
MOE, LAYER, LANE, COPY_LANE, SHARED_LANE, LOAD_LANE, ATTENTION_KIND, FFN_CODE, LOAD_CODE, FAST_CODE, LAST_ROUTER = np.arange(11)
POLICY, CAPACITY, SIZE, UNTOUCHED, NEXT_SLOT, PINS, RING, N_HELD = np.arange(11, 19)  # of its pool
HELD = np.int64(19)  # from here on: experts that are pinned for the layer's next use, or pass through for it
STATIC, LRU, LFU = np.arange(3)  # POLICY
ROUTER_CODE, SHARED_CODE, DENSE_CODE, COMBINE_CODE, COPY_CODE = np.arange(5)  # of a layer in ``codes``
# ``experts``, a record an expert of each layer, small for the cache's sake; the one past the last closes the ring of residents, oldest first
_TASKS, _COUNTS, _PLACES = ("loaded_by", "used_by"), ("slot", "uses", "touched"), ("newer", "older", "early")  # ``touched``: in which step
EXPERT = np.dtype([(x, np.int64) for x in _TASKS] + [(x, np.int32) for x in _COUNTS] + [(x, np.int16) for x in _PLACES], align=True)
ABSENT = np.int64(-1)  # slot
UNUSED, PINNED = np.arange(1, 3)  # early: prefetched and not used since; kept from leaving besides. Not prefetched: 0
# ``rings``, one row a tier: its transient slots; those given back follow, (slot, what it waits for), oldest first
FREE, HEAD, N_FREED, FRESH_SLOTS, FRESH_SLOT, FREED = np.arange(6)
# ``set_``, a record a place: of a member of the layer-set, of an expert, of room that a victim gave back, of 64 experts
_SMALL, _LARGE = ("expert", "turn", "fresh", "grew", "count", "room_slot"), ("wait", "ffn", "mark", "room_wait", "chosen")
PLACE = np.dtype([(name, np.int32) for name in _SMALL] + [(name, np.int64) for name in _LARGE])
WAITING, NOW, SERVED = np.arange(3)  # turn
ROW_OF_CODE, CODE_OF_ROW = np.arange(2)  # rows of ``works``

ATTENTION_TASK, ROUTER_TASK, FFN_TASK, LOAD_TASK = (np.int64(x) for x in (Kind.ATTENTION, Kind.ROUTER, Kind.FFN, Kind.LOAD))
COPY_TASK, COMBINE_TASK, HEAD_TASK = (np.int64(x) for x in (Kind.COPY, Kind.COMBINE, Kind.HEAD))
DATA, SLOT_DEP = np.int64(Dep.DATA), np.int64(Dep.SLOT)
FROM_CACHE, FROM_PREFETCH, MISS = np.int64(Outcome.CACHE), np.int64(Outcome.PREFETCH), np.int64(Outcome.MISS)
NOTHING, ZERO, ONE = np.arange(-1, 2)
U = np.uint64  # a place that is unsigned cannot count from the end, which spares the question
U_ONE = U(1)

inner = njit(_nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


@inner
def _task(run, works, columns, deps, kind, lane, layer, expert, step, use_step, use_layer, early, grew, slot, code, after, after_too, why):
    """Append a task that waits for up to two tasks (-1: none) beside those that were written for it already; return its id."""
    kinds, steps_of, layers_of, experts_of, lanes_of, use_steps, use_layers, earlies, slots, rows_of, grown = columns
    dep_start, dep_task, dep_type = deps
    task = run[TASK]
    begin = run[N_DEPS]
    d = np.uint64(begin)
    row = np.uint64(task - run[BASE])
    place = np.uint64(code)
    gate = run[GATE]
    gated = gate >= 0 and begin == dep_start[row] and after <= gate and after_too <= gate
    if after >= 0:
        dep_task[d] = after
        dep_type[d] = DATA
        d += U_ONE
    if after_too >= 0:
        dep_task[d] = after_too
        dep_type[d] = why
        d += U_ONE
    if gated:
        dep_task[d] = gate
        dep_type[d] = DATA
        d += U_ONE
    dep_start[row + U_ONE] = np.int64(d)
    work = works[ROW_OF_CODE, place]
    if work < 0:
        work = works[ROW_OF_CODE, place] = run[N_WORKS]
        works[CODE_OF_ROW, work] = code
        run[N_WORKS] = work + 1
    kinds[row] = kind
    steps_of[row] = step
    layers_of[row] = layer
    experts_of[row] = expert
    lanes_of[row] = lane
    use_steps[row] = use_step
    use_layers[row] = use_layer
    earlies[row] = early > 0
    slots[row] = slot
    rows_of[row] = work
    grown[row] = grew > 0
    run[N_DEPS] = np.int64(d)
    run[TASK] = task + 1
    return task


@inner
def _plain(run, works, columns, deps, kind, lane, layer, step, code, after):
    """Append a task that is needed where it runs and knows no expert."""
    return _task(run, works, columns, deps, kind, lane, layer, NOTHING, step, step, layer, ZERO, ZERO, NOTHING, code, after, NOTHING, DATA)


@inner
def _layer_set(rows, first, past, ids, i, set_):
    """Set down the experts that some rows choose in a layer, ascending, and the tokens of each; return how many there are."""
    for r in range(first, past):
        for k in range(ids.shape[2]):
            e = np.int64(ids[rows[r], i, k])
            if e >= 0:
                set_[U(e)].count += 1
                set_[U(e >> 6)].chosen |= ONE << (e & 63)
    n = 0
    for word in range((set_.shape[0] + 63) >> 6):
        left = np.uint64(set_[U(word)].chosen)
        set_[U(word)].chosen = 0
        while left > 0:
            set_[U(n)].expert = (word << 6) + np.int64(trailing_zeros(left))
            set_[U(n)].turn = WAITING
            left &= left - U_ONE
            n += 1
    return n


@inner
def _make_room(pool, home, set_, stamp, missing):
    """Make residents of a layer leave that are neither pinned nor marked until there is room; False where none may."""
    end = home.shape[0] - 1
    n_room = 0
    while pool[SIZE] + missing > pool[CAPACITY]:
        found = end
        e = home[U(end)].newer
        while e != end:
            x = home[U(e)]
            if x.early != PINNED and set_[U(e)].mark != stamp:
                if found == end:
                    found = e
                    if pool[POLICY] == LRU:
                        break
                else:  # the fewest uses, then the oldest touch, then the smaller id
                    more = x.uses - home[U(found)].uses
                    later = x.touched - home[U(found)].touched
                    if more < 0 or more == 0 and (later < 0 or later == 0 and e < found):
                        found = e
            e = x.newer
        if found == end:
            return False
        x = home[U(found)]
        room = set_[U(n_room)]
        home[U(x.older)].newer = x.newer
        home[U(x.newer)].older = x.older
        room.room_slot = x.slot
        room.room_wait = x.used_by if x.used_by >= 0 else x.loaded_by
        x.slot = ABSENT
        n_room += 1
        pool[SIZE] -= 1
    return True


@inner
def _enter(x, slot):
    x.slot = slot
    x.loaded_by = -1
    x.used_by = -1
    x.early = 0


@inner
def _admit(pool, x, room):
    """Let an expert into its pool, into untouched room if there is any; return (whether that grew, what the room waits for)."""
    pool[SIZE] += 1
    if pool[UNTOUCHED] > 0:
        _enter(x, pool[NEXT_SLOT])
        pool[UNTOUCHED] -= 1
        pool[NEXT_SLOT] += 1
        return ONE, NOTHING
    _enter(x, room.room_slot)
    return ZERO, room.room_wait


@inner
def _touch(home, x, e, now):
    """Make a resident the one touched last."""
    end = home.shape[0] - 1
    last = home[U(end)].older
    home[U(last)].newer = home[U(end)].older = e
    x.older = last
    x.newer = end
    x.touched = now


@inner
def _make_way(run, pool, home, set_, at, n):
    """Make room for as many members of the set from place ``at`` on as the pool holds beside what is pinned; return the place after them."""
    run[STAMP] += 1
    left = pool[CAPACITY] - pool[PINS]
    missing = 0
    stop = at
    while stop < n:
        e = set_[U(stop)].expert
        need = 0 if home[U(e)].early == PINNED else 1
        if need > left and stop > at:
            break
        left -= need
        set_[U(e)].mark = run[STAMP]
        if home[U(e)].slot == ABSENT:
            missing += 1
        stop += 1
    _make_room(pool, home, set_, run[STAMP], missing)
    return stop


@inner
def _come(pool, home, member, room, now):
    """Let a member of the set be in its pool, and the one touched last; where it was absent it takes ``room``, if no other."""
    e = member.expert
    x = home[U(e)]
    member.turn = NOW
    member.fresh = 0
    member.grew = 0
    if x.slot == ABSENT:
        member.fresh = 1
        member.grew, member.wait = _admit(pool, x, room)
    else:
        home[U(x.older)].newer = x.newer
        home[U(x.newer)].older = x.older
    _touch(home, x, e, now)
    x.uses += 1


@inner
def _wave(run, pool, home, set_, at, n, now):
    """Bring in as many members of the set from place ``at`` on as the pool holds beside what is pinned; return the place after them."""
    stop = _make_way(run, pool, home, set_, at, n)
    room = 0
    for m in range(at, stop):
        _come(pool, home, set_[U(m)], set_[U(room)], now)
        room += set_[U(m)].fresh - set_[U(m)].grew
    return stop


@inner
def _pass_in(pool, home, rings, e):
    """Give an absent expert a transient slot; return what that waits for."""
    ring = rings[pool[RING]]
    wait = NOTHING
    ring[FREE] -= 1
    if ring[FRESH_SLOTS] > 0:
        _enter(home[U(e)], ring[FRESH_SLOT])
        ring[FRESH_SLOTS] -= 1
        ring[FRESH_SLOT] += 1
    else:
        at = FREED + 2 * ring[HEAD]
        _enter(home[U(e)], ring[at])
        wait = ring[at + 1]
        ring[HEAD] = (ring[HEAD] + 1) % ((ring.shape[0] - FREED) // 2)
        ring[N_FREED] -= 1
    pool[HELD + pool[N_HELD]] = e
    pool[N_HELD] += 1
    return wait


@inner
def _stay_or_pass(pool, home, rings, member):
    """Let a member of the set be served now that is in its static pool, or for which there is a slot to pass through."""
    e = member.expert
    member.grew = 0
    member.fresh = home[U(e)].slot == ABSENT
    if member.fresh == 0:
        member.turn = NOW
    elif rings[pool[RING], FREE] > 0:
        member.turn = NOW
        member.wait = _pass_in(pool, home, rings, e)


@inner
def _let_go(pool, home, rings, set_, all_):
    """Take back pins and transient slots of a layer use: of all, or of all but the layer-set; in the order in which they came."""
    kept = 0
    ring = rings[pool[RING]]
    for j in range(pool[N_HELD]):
        e = pool[HELD + j]
        x = home[U(e)]
        if all_ == ZERO and set_[U(e)].count > 0:
            pool[HELD + kept] = e
            kept += 1
        elif pool[POLICY] == STATIC:
            at = FREED + 2 * ((ring[HEAD] + ring[N_FREED]) % ((ring.shape[0] - FREED) // 2))
            ring[at] = x.slot
            ring[at + 1] = x.used_by if x.used_by >= 0 else x.loaded_by
            ring[N_FREED] += 1
            ring[FREE] += 1
            x.slot = ABSENT
        elif x.early == PINNED:
            x.early = UNUSED
            pool[PINS] -= 1
    pool[N_HELD] = kept


@inner
def _experts(run, pool, home, rings, set_, works, columns, deps, access, layer, index, n, router):
    """Loads and FFN tasks of a layer-set, group by group as its members come into place."""
    i = pool[MOE]
    lane = pool[LANE]
    static = pool[POLICY] == STATIC
    done = 0
    at = ZERO
    while done < n:
        past = n if static else _make_way(run, pool, home, set_, at, n)
        room = 0
        for m in range(at, past):
            member = set_[U(m)]
            e = member.expert
            x = home[U(e)]
            if not static:
                _come(pool, home, member, set_[U(room)], index)
                room += member.fresh - member.grew
            elif member.turn == WAITING:
                _stay_or_pass(pool, home, rings, member)
            if member.turn == NOW and member.fresh > 0:
                fast = i * (home.shape[0] - 1) + e < run[FAST_KEYS]
                x.loaded_by = _task(
                    run, works, columns, deps, LOAD_TASK, pool[LOAD_LANE], layer, e, index, index, layer, ZERO, member.grew,
                    x.slot, pool[FAST_CODE if fast else LOAD_CODE], router, member.wait, SLOT_DEP,
                )  # fmt: skip
        for m in range(at, past):
            member = set_[U(m)]
            if member.turn == NOW:
                e = member.expert
                x = home[U(e)]
                row = access[run[N_ACCESS]]
                load = x.loaded_by
                code = pool[FFN_CODE] + set_[U(e)].count
                ffn = _task(
                    run, works, columns, deps, FFN_TASK, lane, layer, e, index, index, layer, ZERO, ZERO, x.slot, code, router, load, DATA
                )
                outcome = MISS if member.fresh > 0 else (FROM_PREFETCH if x.early > 0 else FROM_CACHE)
                row[0] = index
                row[1] = layer
                row[2] = e
                row[3] = outcome
                row[4] = ffn
                row[5] = load
                run[N_ACCESS] += 1
                if x.early == PINNED:
                    pool[PINS] -= 1
                x.used_by = ffn
                x.early = 0
                member.turn = SERVED
                set_[U(done)].ffn = ffn
                done += 1
        if static:
            _let_go(pool, home, rings, set_, ONE)
        else:
            at = past


@inner
def _prefetch(run, steps, rows, predicted, layers, experts, rings, set_, works, columns, deps, s, i, router):
    """Issue what is predicted for the layer at prefetch distance; it may lie in the next step."""
    target = i + run[DISTANCE]
    u = s
    crosses = False
    source = run[SOURCE]
    if target >= run[N_MOE]:
        target = target - run[N_MOE]
        u = s + 1
        crosses = True
    if target >= run[N_MOE] or u >= steps.shape[0]:
        return
    layer = layers[target, LAYER]
    issue = router
    pool = layers[layer]
    home = experts[target]
    step = steps[u]
    if source == NONE:
        issue = NOTHING
    elif source == PREVIOUS:
        issue = pool[LAST_ROUTER]  # of this step where it has run, else of the step before
        if issue < 0:
            return
    every = step[NEW] if source == PREVIOUS or source == BOTH or crosses and source == ROUTER else 1
    run[STAMP] += 1
    n = 0
    for k in range(predicted.shape[2]):  # the likeliest of every token first
        for r in range(step[FROM], step[FROM] + step[TOKENS], every):
            e = predicted[rows[r], target, k]
            if e >= 0 and set_[U(e)].mark != run[STAMP]:
                set_[U(e)].mark = run[STAMP]
                set_[U(n)].expert = e
                n += 1
    for m in range(n):
        e = set_[U(m)].expert
        x = home[U(e)]
        if x.slot != ABSENT:
            continue
        grew = ZERO
        wait = NOTHING
        early = UNUSED
        if pool[POLICY] == STATIC:
            if rings[pool[RING], FREE] <= run[KEEP]:
                run[DROPPED] += 1
                continue
            wait = _pass_in(pool, home, rings, e)
        else:
            if pool[PINS] + 2 > pool[CAPACITY] or not _make_room(pool, home, set_, run[STAMP], ONE):
                run[DROPPED] += 1
                continue
            grew, wait = _admit(pool, x, set_[0])
            _touch(home, x, e, step[INDEX])
            early = PINNED
            pool[PINS] += 1
            pool[HELD + pool[N_HELD]] = e
            pool[N_HELD] += 1
        fast = target * (home.shape[0] - 1) + e < run[FAST_KEYS]
        x.early = early
        x.loaded_by = _task(
            run, works, columns, deps, LOAD_TASK, pool[LOAD_LANE], layer, e, steps[s, INDEX], step[INDEX], layer, ONE, grew,
            x.slot, pool[FAST_CODE if fast else LOAD_CODE], issue, wait, SLOT_DEP,
        )  # fmt: skip


@njit(cache=True, nogil=True, _nrt=False, no_cfunc_wrapper=True)
def plan_steps(
    n_steps, run, steps, rows, ids, predicted, codes, layers, experts, rings, set_, works, access,
    kind, step_of, layer_of, expert, lane_of, use_step, use_layer, early, slot, work, grew, dep_start, dep_task, dep_type,
):  # fmt: skip
    """Plan the first ``n_steps`` of ``steps`` (the one after them is there for its prefetches) into the columns; state moves on.

    Parameters
    ----------
    run : (RUN_FIELDS,) int64
    steps : (S, STEP_FIELDS) int64
    rows : (R,) int64
        Trace rows of the steps, one after another.
    ids, predicted : (T, L, K) int16
    codes : (V, layers, 5) int64
        Work codes of each layer's parts in steps of each variant (number of tokens).
    layers, experts, rings, set_ : int64
        See the names above.
    works : (2, C) int64
        Row of each work code in the fragment (-1 before its first use), and the codes in order of first use.
    access : (A, 6) int64
    kind to dep_type
        Columns of the fragment, at least as long as it needs; ``grew`` marks loads that find untouched room.

    """
    n_layers = layers.shape[0]
    columns = kind, step_of, layer_of, expert, lane_of, use_step, use_layer, early, slot, work, grew
    deps = dep_start, dep_task, dep_type
    dep_start[0] = 0
    for s in range(n_steps):
        step = steps[s]
        index = step[INDEX]
        first = step[FROM]
        step[FIRST_TASK] = run[TASK]
        last = NOTHING  # what the next task waits for
        for layer in range(n_layers):
            pool = layers[layer]
            code = codes[step[VARIANT], layer]
            i = pool[MOE]
            lane = pool[LANE]
            if pool[COPY_LANE] >= 0:
                last = _plain(run, works, columns, deps, COPY_TASK, pool[COPY_LANE], layer, index, code[COPY_CODE], last)
            attention = run[ATTENTION_CODE] + s * run[ATTENTION_KINDS] + pool[ATTENTION_KIND]
            last = _plain(run, works, columns, deps, ATTENTION_TASK, lane, layer, index, attention, last)
            if i < 0:
                last = _plain(run, works, columns, deps, FFN_TASK, lane, layer, index, code[DENSE_CODE], last)
                continue
            router = _plain(run, works, columns, deps, ROUTER_TASK, lane, layer, index, code[ROUTER_CODE], last)
            pool[LAST_ROUTER] = router
            shared = NOTHING
            if pool[SHARED_LANE] >= 0:
                shared = _plain(run, works, columns, deps, FFN_TASK, pool[SHARED_LANE], layer, index, code[SHARED_CODE], last)
            home = experts[i]
            n = _layer_set(rows, first, first + step[TOKENS], ids, i, set_)
            _let_go(pool, home, rings, set_, ZERO)  # the set is known: mispredicted experts may leave
            _experts(run, pool, home, rings, set_, works, columns, deps, access, layer, index, n, router)
            _let_go(pool, home, rings, set_, ONE)
            for m in range(n):
                set_[U(set_[U(m)].expert)].count = 0
                dep_task[run[N_DEPS]] = set_[U(m)].ffn
                dep_type[run[N_DEPS]] = DATA
                run[N_DEPS] += 1
            if n == 0 and shared < 0:
                shared = router
            last = _plain(run, works, columns, deps, COMBINE_TASK, lane, layer, index, code[COMBINE_CODE], shared)
            if run[DISTANCE] > 0:
                _prefetch(run, steps, rows, predicted, layers, experts, rings, set_, works, columns, deps, s, i, router)
        if run[HEAD_COPY_LANE] >= 0:
            last = _plain(run, works, columns, deps, COPY_TASK, run[HEAD_COPY_LANE], n_layers, index, step[HEAD_COPY_CODE], last)
        last = _plain(run, works, columns, deps, HEAD_TASK, run[HEAD_LANE], n_layers, index, step[HEAD_CODE], last)
        step[LAST_TASK] = run[GATE] = last
