"""Owns the loops behind the metrics: plain functions over the columns of one fragment, and what they carry to the next one.

A fragment is measured when all its tasks have ended. Steps are gated (docs/decisions/002-step-gates.md): nothing of a step starts
before the step before has ended. So of all that went before, a fragment only needs its *tail*: the tasks that ended no earlier than
the last gate. Whole numbers are summed (bytes are whole too), hence the figures do not depend on how a run is cut.

Plain loops over plain numbers: ``metrics_compiled.py`` compiles this very source, and both give the same bits.
"""

from __future__ import annotations

from typing import Any

from moesim.schedule import COMPUTE_KINDS, Dep, Kind, Outcome
from moesim.sharing import ceil_ps
from moesim.timeline import CAUSE_HEAD_OF_LINE, NO_CAUSE

LOAD, COPY = int(Kind.LOAD), int(Kind.COPY)
DATA, HIT_EARLY, HEAD_OF_LINE = int(Dep.DATA), int(Outcome.PREFETCH), int(CAUSE_HEAD_OF_LINE)
ATTENTION, ROUTER, FFN, COMBINE, HEAD = (int(kind) for kind in COMPUTE_KINDS)
COMPUTE, WEIGHTS, EITHER, CHANNELS = 0, 1, 2, 3  # tracks of busy time; from CHANNELS on one for each channel
MOVED, DEMANDED, EARLY, USED, MOVES = range(5)  # rows of ``moved``: bytes by purpose, and how many transfers there were
TIMES, SPENT, EXTRA = range(3)  # what is summed along a path, by group of tasks: tasks, ps, ps due to contention

Column = Any  # an array, or a list of the same numbers where loops are interpreted


def find(ids: Column, count: int, task: int) -> int:
    """Return where ``task`` stands among the first ``count`` ids, which ascend, or -1."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if ids[middle] < task:
            low = middle + 1
        else:
            high = middle
    return low if low < count and ids[low] == task else -1


def place(
    first: int, begin: int, stop: int, task: Column, start: Column, end: Column, cause: Column, why: Column,
    to_start: Column, to_end: Column, to_cause: Column, to_why: Column,
) -> None:  # fmt: skip
    """Copy the entries ``begin`` to ``stop`` of a timeline to the rows of their tasks."""
    for i in range(begin, stop):
        r = task[i] - first
        to_start[r], to_end[r], to_cause[r], to_why[r] = start[i], end[i], cause[i], why[i]


def waits(
    first: int, begin: int, tail_id: Column, tail_end: Column, tail_load: Column, step_from: Column, step_last: Column,
    kind: Column, lane: Column, dep_start: Column, dep_task: Column, start: Column, end: Column,
    serial: Column, last_end: Column, busy: Column, free: Column,
) -> tuple[int, int]:  # fmt: skip
    """Fill ``free`` of compute tasks: when each could have started but for loads. Add to ``busy`` (lanes,), the ps that lanes were busy.

    Constraints are the end of the step before, dependencies, and the task before on the lane, where the lane is fifo and of one
    server (``serial``); ``last_end`` (lanes,) carries the end of the latter.

    Returns
    -------
    (int, int)
        Picoseconds that loads alone cost, and the last end.
    """
    waited, latest = 0, 0
    n_tail, n_tasks = len(tail_id), len(kind)
    oldest = tail_id[0] if n_tail else first
    s = -1
    until = 0
    for r in range(n_tasks):
        if r == until:  # the next step
            if s >= 0:
                begin = end[step_last[s]]
            s += 1
            until = step_from[s + 1]
        q, k = lane[r], kind[r]
        busy[q] += end[r] - start[r]
        if end[r] > latest:
            latest = end[r]
        if k == ATTENTION or k == ROUTER or k == FFN or k == COMBINE or k == HEAD:
            at = begin
            if serial[q] and last_end[q] > at:
                at = last_end[q]
            for d in range(dep_start[r], dep_start[r + 1]):
                task = dep_task[d]
                if task >= first:
                    row = task - first
                    if end[row] > at and kind[row] != LOAD:
                        at = end[row]
                elif task >= oldest:
                    i = find(tail_id, n_tail, task)
                    if i >= 0 and tail_end[i] > at and not tail_load[i]:
                        at = tail_end[i]
            free[r] = at
            if start[r] > at:
                waited += start[r] - at
        last_end[q] = end[r]
    return waited, latest


def served(first: int, tail_id: Column, tail_end: Column, access: Column, end: Column, free: Column, counts: Column) -> None:
    """Add to ``counts`` (4,): cache hits, prefetch hits, misses, and the prefetch hits that were waited for."""
    n_tail = len(tail_id)
    for a in range(len(access)):
        outcome, load = access[a, 3], access[a, 5]
        counts[outcome] += 1
        if outcome == HIT_EARLY and load >= 0:
            if load >= first:
                came = end[load - first]
            else:
                i = find(tail_id, n_tail, load)
                came = tail_end[i] if i >= 0 else 0  # before this fragment
            if came > free[access[a, 4] - first]:
                counts[3] += 1


def cover(
    step_from: Column, step_last: Column, kind: Column, lane: Column, prefetch: Column, price: Column, volume: Column, shares: Column,
    start: Column, end: Column, moved: Column, drawn: Column, lengths: Column, counts: Column, opened: Column, closed: Column,
    drawn_on: Column, touched: Column,
) -> None:  # fmt: skip
    """Add to the busy time of each track (``lengths``), the units drawn by lane and channel, and the bytes moved by purpose and channel.

    ``opened`` and ``closed`` (tracks, room) hold disjoint, ascending intervals that later tasks may still extend, ``counts`` how many.
    ``drawn_on`` (prices, 1 + channels) is all 0, ``touched`` (tracks,) scratch.
    """
    n_prices, n_channels = shares.shape
    for p in range(n_prices):  # the channels that tasks of each price draw on
        for c in range(n_channels):
            if shares[p, c] > 0.0:
                drawn_on[p, 1 + drawn_on[p, 0]] = c
                drawn_on[p, 0] += 1
    for s in range(len(step_last)):
        for r in range(step_from[s], step_from[s + 1]):
            k, a, b, p = kind[r], start[r], end[r], price[r]
            load = k == LOAD
            moving = load or k == COPY
            n_touched = 0
            if load or k == ATTENTION or k == ROUTER or k == FFN or k == COMBINE or k == HEAD:
                touched[0], touched[1] = EITHER, WEIGHTS if load else COMPUTE
                n_touched = 2
            if volume[p] > 0.0:
                for i in range(1, 1 + drawn_on[p, 0]):
                    c = drawn_on[p, i]
                    amount = shares[p, c] * volume[p]
                    drawn[lane[r], c] += amount
                    if moving:
                        touched[n_touched] = CHANNELS + c
                        n_touched += 1
                        moved[MOVED, c] += amount
                        moved[MOVES, c] += 1.0
                        if load:
                            moved[EARLY if prefetch[r] else DEMANDED, c] += amount
            if b == a:
                continue
            for j in range(n_touched):
                t = touched[j]
                n = counts[t]
                i = n  # intervals from i on start after this one
                while i > 0 and opened[t, i - 1] > a:
                    i -= 1
                if i > 0 and closed[t, i - 1] >= a:
                    i -= 1
                    if b <= closed[t, i]:
                        continue
                    closed[t, i] = b
                else:
                    for m in range(n, i, -1):
                        opened[t, m], closed[t, m] = opened[t, m - 1], closed[t, m - 1]
                    n += 1
                    opened[t, i], closed[t, i] = a, b
                merged = i + 1  # swallow those that it reaches
                while merged < n and opened[t, merged] <= b:
                    if closed[t, merged] > closed[t, i]:
                        closed[t, i] = closed[t, merged]
                    merged += 1
                gone = merged - i - 1
                if gone > 0:
                    for m in range(merged, n):
                        opened[t, m - gone], closed[t, m - gone] = opened[t, m], closed[t, m]
                    n -= gone
                counts[t] = n
        settle(end[step_last[s]], lengths, counts, opened, closed)


def settle(until: int, lengths: Column, counts: Column, opened: Column, closed: Column) -> None:
    """Add the intervals that end by ``until`` to ``lengths``: nothing to come starts before."""
    for t in range(len(lengths)):
        done, n = 0, counts[t]
        while done < n and closed[t, done] <= until:
            lengths[t] += closed[t, done] - opened[t, done]
            done += 1
        if done > 0:
            for j in range(done, n):
                opened[t, j - done], closed[t, j - done] = opened[t, j], closed[t, j]
            counts[t] = n - done


def extra_ps(spent: int, fixed: int, volume: float, cap: float, limit: float) -> int:
    """Return by how much a task took longer than with every channel to itself."""
    alone = fixed
    if volume > 0.0:
        alone += ceil_ps(volume / (cap if cap <= limit else limit))
    return spent - alone if spent > alone else 0


def walk(
    stamp: Column, first: int, known_id: Column, known_from: Column, known_sum: Column,
    late_id: Column, late_part: Column, late_cause: Column, late_why: Column, step_last: Column,
    group: Column, price: Column, latency: Column, volume: Column, cap: Column, limit: Column,
    start: Column, end: Column, cause: Column, why: Column, next_id: Column, next_from: Column, next_sum: Column, stored: Column,
) -> int:  # fmt: skip
    """Sum up the critical path of some tasks: what bound its start, what bound that, and so on back to time 0.

    A walk stops where the sums are known: at a task of an earlier fragment, at the last task of an earlier step.

    Parameters
    ----------
    known_from, known_sum : (n,) and (n, groups, 3)
        Of tasks of earlier fragments that had started by the last gate: the one whose end let it start (-1: none), and the sums.
    late_part : (n, 3)
        Of tasks of earlier fragments that had not: their group, ps, and ps due to contention.
    group : (N,)
        Group of each task: lane and kind, or whatever is to be told apart.
    next_id, next_from, next_sum
        The tasks to be summed up, overwritten with the same as of those known; behind them an entry for each step's last task.
    stored : (N,)
        All 0; overwritten.

    Returns
    -------
    int
        -1, or a task that was bound by one that is nowhere to be found.
    """
    n_known, n_late, n_steps = len(known_id), len(late_id), len(step_last)
    n_next, n_groups = len(next_id) - n_steps, next_sum.shape[1]
    for target in range(n_steps + n_next):
        if target < n_steps:  # the last task of each step, in order, for those that follow to stop at
            put, task = n_next + target, first + step_last[target]
        else:
            put = target - n_steps
            task = next_id[put]
        asked = task
        next_from[put] = NO_CAUSE
        for g in range(n_groups):
            for j in range(3):
                next_sum[put, g, j] = 0
        while task != NO_CAUSE:
            if task < first:
                i = find(known_id, n_known, task)
                if i >= 0:
                    if task == asked:
                        next_from[put] = known_from[i]
                    for g in range(n_groups):
                        for j in range(3):
                            next_sum[put, g, j] += known_sum[i, g, j]
                    break
                i = find(late_id, n_late, task)
                if i < 0:
                    return int(asked)
                mine, spent, extra = late_part[i, 0], late_part[i, 1], late_part[i, 2]
                before, reason = late_cause[i], late_why[i]
            else:
                r = task - first
                at = stored[r] - 1
                if at >= 0:
                    if task == asked:
                        next_from[put] = next_from[at]
                    for g in range(n_groups):
                        for j in range(3):
                            next_sum[put, g, j] += next_sum[at, g, j]
                    break
                mine, spent, p = group[r], end[r] - start[r], price[r]
                extra = extra_ps(spent, latency[p], volume[p], cap[p], limit[p])
                before, reason = cause[r], why[r]
            next_sum[put, mine, TIMES] += 1
            next_sum[put, mine, SPENT] += spent
            next_sum[put, mine, EXTRA] += extra
            while reason == HEAD_OF_LINE and before != NO_CAUSE:  # started at the same instant: what bound that one bound this one
                if before >= first:
                    before, reason = cause[before - first], why[before - first]
                    continue
                i = find(late_id, n_late, before)
                if i >= 0:
                    before, reason = late_cause[i], late_why[i]
                    continue
                i = find(known_id, n_known, before)
                if i < 0:
                    return int(asked)
                before, reason = known_from[i], DATA
            if task == asked:
                next_from[put] = before
            task = before
        if asked >= first:
            stored[asked - first] = put + 1
    return -1


def parts(
    stamp: Column, rows: Column, group: Column, price: Column, latency: Column, volume: Column, cap: Column, limit: Column, start: Column, end: Column, out: Column,
) -> None:  # fmt: skip
    """Fill ``out`` with what ``walk`` needs to know of some tasks once their fragment is gone, see ``late_part``."""
    for i in range(len(rows)):
        r = rows[i]
        p = price[r]
        out[i, 0] = group[r]
        out[i, 1] = end[r] - start[r]
        out[i, 2] = extra_ps(end[r] - start[r], latency[p], volume[p], cap[p], limit[p])


def use(
    first: int, kind: Column, lane: Column, layer: Column, expert: Column, prefetch: Column, price: Column, volume: Column, shares: Column,
    dep_start: Column, dep_task: Column, dep_type: Column, access: Column, n_layers: int, n_experts: int, latest: Column,
    count: int, ids: Column, keys: Column, amounts: Column, used: Column, needs_from: Column, needs: Column, stack: Column, moved: Column,
) -> int:  # fmt: skip
    """Find the prefetches that an access, or a load that an access needed, has used; add their bytes to ``moved``.

    Prefetches that may still be used stand in a table of ``count`` rows, by task: place in ``latest`` (-1: none), bytes by channel,
    whether they have been used, and the prefetches that they in turn need. ``latest`` (lanes x layers x experts) is the last load
    of an expert on a lane.

    Returns
    -------
    int
        The rows of the table, with those used.
    """
    n_channels = shares.shape[1]
    top = 0
    for r in range(len(kind)):
        if kind[r] != LOAD:
            continue
        early = prefetch[r]
        n_needs = needs_from[count]
        for d in range(dep_start[r], dep_start[r + 1]):
            task = dep_task[d]
            if dep_type[d] == DATA and (task < first or kind[task - first] == LOAD):
                i = find(ids, count, task)
                if i >= 0 and early:
                    needs[n_needs] = task
                    n_needs += 1
                elif i >= 0:  # what a demand load needs is used
                    stack[top] = i
                    top += 1
        key = (lane[r] * n_layers + layer[r]) * n_experts + expert[r] if expert[r] >= 0 else -1
        if key >= 0:
            latest[key] = first + r
        if early:
            ids[count], keys[count], used[count] = first + r, key, 0
            for c in range(n_channels):
                amounts[count, c] = shares[price[r], c] * volume[price[r]]
            count += 1
            needs_from[count] = n_needs
    for a in range(len(access)):
        if access[a, 3] == HIT_EARLY and access[a, 5] >= 0:
            i = find(ids, count, access[a, 5])
            if i >= 0:
                stack[top] = i
                top += 1
    while top > 0:
        top -= 1
        i = stack[top]
        if used[i] == 0:
            used[i] = 1
            for c in range(n_channels):
                moved[USED, c] += amounts[i, c]
            for d in range(needs_from[i], needs_from[i + 1]):
                j = find(ids, count, needs[d])
                if j >= 0 and used[j] == 0:
                    stack[top] = j
                    top += 1
    return count


def forget(
    latest: Column, count: int, ids: Column, keys: Column, amounts: Column, used: Column, needs_from: Column, needs: Column, kept: Column
) -> int:
    """Drop from the table of ``use`` what cannot be used any more: those used, and those whose expert has been loaded anew on the lane.

    Those that others need stay. ``kept`` (rows,) is all 0; overwritten. Returns the rows left.
    """
    n_channels = amounts.shape[1]
    for i in range(count - 1, -1, -1):
        if used[i] != 0:
            kept[i] = 0
            continue
        if keys[i] < 0 or latest[keys[i]] == ids[i]:
            kept[i] = 1
        if kept[i] != 0:
            for d in range(needs_from[i], needs_from[i + 1]):
                j = find(ids, count, needs[d])
                if j >= 0:
                    kept[j] = 1
    n = 0
    begin = 0
    n_needs = 0
    for i in range(count):
        end = needs_from[i + 1]
        if kept[i] != 0:
            ids[n], keys[n], used[n] = ids[i], keys[i], 0
            for c in range(n_channels):
                amounts[n, c] = amounts[i, c]
            for d in range(begin, end):
                needs[n_needs] = needs[d]
                n_needs += 1
            n += 1
            needs_from[n] = n_needs
        begin = end
    return n
