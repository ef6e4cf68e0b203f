"""Owns a sizing from needs to a recommendation: which machines are looked at, which meet the needs and for how much, what helps the others.

Machines are screened by price, by the ledger's room and by the closed-form bound (``sizing_run.py``), then simulated from the cheapest upwards
until enough meet the needs. Where none does within the budget, the search goes on above it: the cheapest that would do is the nearest
feasible. Serving with arrivals is not modelled: users decode in lockstep, and a prompt's first token is that of a prompt alone.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moesim.errors import InputError
from moesim.hardware.grammar import read_parts
from moesim.html_table import html_table
from moesim.prices import PriceLine, PriceTable, price_lines, total, upgrade_lines
from moesim.sizing.machines import RULE, Upgrade, candidates, canonical, upgrades
from moesim.sizing.needs import Needs
from moesim.sizing.run import Judge, Verdict, output_tokens

ENOUGH = 4  # machines that meet the needs, after which the search ends
MOST = 18  # machines simulated within the budget
MOST_ABOVE = 8  # and above it, where none within meets the needs
BETTER = 1.02  # of a machine over all cheaper ones, to be worth a line
GROWTH = (2, 4, 8)
SHOWN_MISSES = 5
NEAREST = 6  # machines that are simulated for the nearest, where none meets the needs
MOST_FIXES = 8


@dataclass(frozen=True)
class Load:
    """A load so many times as large, under the same switches: tokens/s of one user (nan where it does not fit), what breaks, and what runs it."""

    times: int
    speed: float
    why: str  # "" where it still meets the needs
    command: str


@dataclass(frozen=True)
class Growth:
    """How far a machine carries more users, or more context: the first of ``GROWTH`` that breaks it, else the last."""

    users: Load
    context: Load


@dataclass(frozen=True)
class Option:
    """A machine that was simulated: what it costs beside what is owned, and what it reaches with each model."""

    machine: str
    owned: bool
    lines: tuple[PriceLine, ...]
    cost: float | None
    verdicts: tuple[Verdict, ...]
    intervals: tuple[tuple[float, float], ...] = ()
    growth: Growth | None = None

    @property
    def reached(self) -> float:
        """The worst of got / needed over models; at 1 or more the needs are met."""
        return min(v.reached for v in self.verdicts)

    @property
    def worst(self) -> Verdict:
        return min(self.verdicts, key=lambda v: v.reached)


@dataclass(frozen=True)
class Fix:
    """An upgrade of a machine: what it costs, and the option that it gives."""

    step: Upgrade
    cost: float | None
    option: Option


@dataclass(frozen=True)
class Miss:
    """A machine within the budget that does not meet the needs, and the cheapest single step that would cure it, if one does."""

    option: Option
    fix: Fix | None


@dataclass(frozen=True)
class Sizing:
    """What was found. ``ranked`` meet the needs within the budget, ``above`` only beyond it; both the cheapest first."""

    needs: Needs
    table: PriceTable
    today: datetime.date
    formats: tuple[str, ...]
    ranked: tuple[Option, ...]
    above: tuple[Option, ...]
    misses: tuple[Miss, ...]
    base: Option | None  # the machine whose upgrades are valued: what is owned, else the recommendation
    values: tuple[Fix, ...]
    counts: dict[str, int]
    rule: str

    @property
    def best(self) -> Option | None:
        """The recommendation: the cheapest that meets the needs, within the budget where one does."""
        return next(iter((*self.ranked, *self.above)), None)

    def __repr__(self) -> str:
        return f"Sizing({self.needs.name}: {len(self.ranked)} within the budget, {len(self.above)} above, {len(self.misses)} misses)"

    def _repr_html_(self) -> str:
        found = [(option, "within" if option in self.ranked else "above") for option in (*self.ranked, *self.above)]
        rows = [
            (option.machine, "" if option.cost is None else f"{option.cost:,.0f} {self.table.currency}", place, f"{option.worst.speed:.3g}")
            for option, place in found
        ]
        return html_table(f"{self.needs.name}: machines that meet the needs", rows, ("machine", "cost", "budget", "tokens/s"))


class _Search:
    """The state of one search: machines judged once, what they cost."""

    def __init__(self, needs: Needs, judge: Judge, table: PriceTable, progress: Callable[[int, int], None] | None) -> None:
        self.needs, self.judge, self.table, self.progress = needs, judge, table, progress
        self.owned = canonical(needs.owned) if needs.owned else ""
        self.owned_lines = price_lines(self.owned, table) if self.owned else []
        self.options: dict[str, Option] = {}
        self.budget = math.inf if needs.budget is None else _in_table(needs, table)

    def lines(self, machine: str) -> list[PriceLine]:
        return upgrade_lines(price_lines(machine, self.table), self.owned_lines)

    def option(self, machine: str) -> Option:
        if machine not in self.options:
            lines = self.lines(machine)
            verdicts = tuple(self.judge.verdict(machine, model) for model in self.needs.models)
            self.options[machine] = Option(machine, machine == self.owned, tuple(lines), total(lines), verdicts)
            if self.progress is not None:
                self.progress(len(self.options), MOST)
        return self.options[machine]

    def could(self, machine: str) -> bool:
        """Whether no bound rules a machine out: its memory holds the weights, and reading them is fast enough."""
        floor = self.judge.formats()[-1]
        need = self.needs.level.decode_tok_s if self.needs.level else 1e-9
        return all(self.judge.bound(machine, model, floor) >= need for model in self.needs.models)

    def nearest(self, machines: list[str]) -> list[Option]:
        """Return the first few of machines by the speed at which they could read a token's weights, judged."""
        floor = self.judge.formats()[-1]
        reads = {m: min(self.judge.read_speed(m, model, floor) for model in self.needs.models) for m in machines}
        return [self.option(m) for m in sorted(machines, key=lambda m: -reads[m])[:NEAREST]]

    def with_owned_card(self, machine: str) -> str:
        """A machine without a card with those that are owned, where they go together; "" elsewhere."""
        owned, parts = read_parts(self.owned) if self.owned else None, read_parts(machine)
        if owned is None or not owned.gpus or parts.gpus or parts.socs:
            return ""
        return canonical(replace(parts, gpus=dict(owned.gpus), slots=[]).text())

    def price_of(self, step: Upgrade, here: list[PriceLine]) -> float | None:
        """What a step from a machine costs beside what is owned and what the machine has."""
        have = {line.what: line for line in sorted([*here, *self.owned_lines], key=lambda line: line.count)}  # the larger number of each
        return total(upgrade_lines(price_lines(step.machine, self.table), list(have.values())))

    def fixes(self, option: Option, most: int = MOST_FIXES) -> list[Fix]:
        """Return the single steps from a machine, judged, the cheapest first."""
        here = price_lines(option.machine, self.table)
        steps = [(self.price_of(s, here), s) for s in upgrades(option.machine)]
        steps.sort(key=lambda pair: (pair[0] is None, pair[0] or 0.0))
        return [Fix(step, cost, self.option(step.machine)) for cost, step in steps[:most]]


def size(needs: Needs, folder: Path, table: PriceTable, today: datetime.date, progress: Callable[[int, int], None] | None = None) -> Sizing:
    """Find the machines that meet needs.

    Parameters
    ----------
    needs : Needs
    folder : Path
        What relative names of models refer to.
    table : PriceTable
    today : date
        Ages of prices are told against it.
    progress : callable, optional
        Called with (machines judged, about how many in all).

    Raises
    ------
    InputError
        If the needs contradict themselves: a model that is not known, a floor that no format meets, a currency without a rate.
    """
    judge = Judge(needs, folder)
    search = _Search(needs, judge, table, progress)
    floor = judge.formats()[-1]
    for model in needs.models:
        if needs.level and not judge.model(model).n_experts:
            raise InputError("models", expected="mixture-of-experts models", got=f'"{model}"')
    pool, rule = _pool(search, judge.weight_bytes(floor))
    fit = [m for m in pool if search.could(m)]
    priced = sorted((cost, m) for m in fit if (cost := total(search.lines(m))) is not None)
    within, beyond = [m for cost, m in priced if cost <= search.budget], [m for cost, m in priced if cost > search.budget]
    met = _first_that_meet(search, within, ENOUGH, MOST)
    above = [] if met else _first_that_meet(search, beyond, 2, MOST_ABOVE)
    tried = [search.options[m] for m in within if m in search.options and search.options[m].reached < 1]
    if search.owned and search.owned not in search.options:
        tried.append(search.option(search.owned))
    if not met and not above:
        tried += [option for machine, option in search.options.items() if machine in beyond and option not in tried]
        tried += [option for option in search.nearest(pool) if option not in tried]
        rule += f"; for the nearest, the {NEAREST} that could read a token's weights fastest, the fastest memory filled first"
    tried = _with_owned_cards(search, pool, sorted(tried, key=lambda o: -o.reached))
    misses = tuple(_miss(search, option, first=i == 0 or option.owned) for i, option in enumerate(tried[:SHOWN_MISSES]))
    ranked, above = [_finished(judge, o) for o in met], [_finished(judge, o) for o in above]
    if not ranked and not above and tried:
        misses = (replace(misses[0], option=_finished(judge, misses[0].option)), *misses[1:])
    chosen = search.owned or next((o.machine for o in (*met, *above, *tried)), "")
    base = search.options[chosen] if chosen else None  # as judged, in the format that its upgrades are judged in
    values = tuple(search.fixes(base)) if base is not None else ()
    counts = {"considered": len(pool), "ruled out by a bound": len(pool) - len(fit), "without a price": len(fit) - len(priced),
              "above the budget": len(beyond), "machines simulated": len(search.options), "runs": judge.n_runs}  # fmt: skip
    return Sizing(needs, table, today, tuple(judge.formats()), tuple(ranked), tuple(above), misses, base, values, counts, rule)


def _pool(search: _Search, weight_bytes: int) -> tuple[list[str], str]:
    """The machines looked at, each once, and the rule in words."""
    usual = [canonical(text) for text in search.needs.consider] or candidates(weight_bytes)
    rule = "those named under consider" if search.needs.consider else RULE
    own = [search.owned] if search.owned else []
    steps = [step.machine for text in own for step in upgrades(text)]
    pairs = [step.machine for text in steps for step in upgrades(text)]
    if own:
        rule += "; what is owned, with one or two upgrades of memory, card and drive, in place of other machines around the same chip"
        usual = [text for text in usual if text and not _hosts(text) & _hosts(search.owned)]
    return list(dict.fromkeys([*own, *steps, *pairs, *(text for text in usual if text)])), rule


def _hosts(machine: str) -> set[str]:
    parts = read_parts(machine)
    return set(parts.cpus) | set(parts.socs)


def _in_table(needs: Needs, table: PriceTable) -> float:
    budget = needs.budget
    assert budget is not None
    if budget.currency == table.currency:
        return budget.amount
    if budget.currency not in table.rates:
        raise InputError(
            "budget.currency", expected=f"{table.currency}, or a rate in the price table", got=budget.currency, fix="add it to rates"
        )
    return budget.amount * table.rates[budget.currency]


def _first_that_meet(search: _Search, machines: list[str], enough: int, most: int) -> list[Option]:
    """Judge machines, the cheapest first, until enough are found that meet the needs, each better than all cheaper ones.

    Where there are more than ``most``, first so many spread over the range of prices, to find where it begins.
    """
    found: list[Option] = []
    order = machines if len(machines) <= most else [machines[round(i * (len(machines) - 1) / (most - 1))] for i in range(most)]
    first = next((i for i, m in enumerate(order) if search.option(m).reached >= 1), None)
    if first is None:
        return []
    begin = machines.index(order[first - 1]) + 1 if first else 0  # something cheaper may meet them between the two
    for machine in machines[begin : begin + most]:
        option = search.option(machine)
        if option.reached >= 1 and all(option.reached > BETTER * cheaper.reached for cheaper in found):
            found.append(option)
        if len(found) >= enough:
            break
    return found


def _with_owned_cards(search: _Search, pool: list[str], misses: list[Option]) -> list[Option]:
    """Return the nearest misses: one that leaves an owned card out gives way to the same with it, where that does no worse."""
    out: list[Option] = []
    for option in misses:
        other = search.with_owned_card(option.machine)
        better = search.option(other) if other in pool else option
        shown = better if better.reached >= option.reached else option
        if shown.reached < 1 and shown not in out and len(out) < SHOWN_MISSES:
            out.append(shown)
    return sorted(out, key=lambda o: -o.reached)


def _miss(search: _Search, option: Option, first: bool) -> Miss:
    """With its cheapest cure, for the nearest miss and what is owned; of the others only cures that were judged already."""
    if first:
        cures = [fix for fix in search.fixes(option) if fix.option.reached >= 1]
    else:
        here = price_lines(option.machine, search.table)
        judged = [(s, search.options[s.machine]) for s in upgrades(option.machine) if s.machine in search.options]
        cures = [Fix(s, search.price_of(s, here), o) for s, o in judged if o.reached >= 1]
    option = replace(option, verdicts=tuple(search.judge.completed(v) for v in option.verdicts))
    return Miss(option, min(cures, key=lambda fix: math.inf if fix.cost is None else fix.cost, default=None))


def _finished(judge: Judge, option: Option) -> Option:
    """With the most precise switches that meet the needs, intervals, and what fails first."""
    verdicts = tuple(judge.refined(v) if v.reached >= 1 else v for v in option.verdicts)
    intervals = tuple(judge.spread(v) if math.isfinite(v.speed) else (math.nan, math.nan) for v in verdicts)
    done = replace(option, verdicts=verdicts, intervals=intervals)
    return replace(done, growth=_growth(judge, done.worst)) if math.isfinite(done.worst.speed) and judge.needs.level else done


def _growth(judge: Judge, verdict: Verdict) -> Growth:
    load, memory = verdict.settings["workload"], verdict.settings["memory"]
    now, users = memory["context_tokens"], load["batch"]

    def larger(batch: int, context: int) -> dict[str, object]:
        tokens = output_tokens(batch)
        more = {**load, "batch": batch, "output_tokens": tokens, "cached_tokens": max(context - tokens, 0)}
        return {"workload": more, "memory": {**memory, "context_tokens": context}}

    by_users = [(larger(users * times, now), times) for times in GROWTH]
    by_context = [(larger(users, now * times), times) for times in GROWTH]
    found = []
    for changes in (by_users, by_context):
        for change, times in changes:
            load = _larger(judge, replace(verdict, settings=verdict.settings | change), times)
            if load.why:
                break
        found.append(load)
    return Growth(*found)


def _larger(judge: Judge, verdict: Verdict, times: int) -> Load:
    """Run a larger load and say why it no longer meets the decode speed, if it does not."""
    speed, level = math.nan, judge.needs.level
    assert level is not None
    try:
        result = judge.run(verdict.settings)[1]
        why = f"memory: {judge.no_room(verdict, result).problem}" if result.oom is not None else ""
        if result.meter is not None and not why:
            data = result.as_dict()
            speed = data["metrics"]["decode_tok_s"]
            lane = data["critical_path"][0]["lane"]
            why = "" if speed >= level.decode_tok_s else f"speed: {speed:.3g} tok/s each, the {lane} limits"
    except InputError as error:
        why = f"memory: {judge.refused(verdict, error).problem}"
    return Load(times, speed, why, verdict.command())
