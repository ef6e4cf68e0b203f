"""Owns the search for a mixed plan: measure how sensitive each unit is, then take bits away where that costs least a byte (claim Q6).

A unit is one part of one layer (attention, experts, ...), the embeddings or the head. Each is degraded alone to each level on choosing text; costs
are taken to add up, which the result shows right or wrong. Of a unit's levels those on the lower convex hull of (bytes saved, loss) count, so the
cheapest step is always the next one of its unit, and greedy is optimal for additive costs along the path. The path of plans runs from everything in
16 bits to everything in two; a budget is a point on it. Two orders stand against it: bits first (a uniform plan, then 8 bits where that
helps most while the budget lasts), and the same units the other way round (the most sensitive lowered first).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from moesim.errors import InputError
from moesim.precision import PrecisionPlan, plan_from
from moesim.quality.plans import four_bits
from moesim.quality.quantise import quantise, stated_bytes
from moesim.quality.study import Measured, Study
from moesim.quality.tune import weights_of
from moesim.scenario import load_scenario
from moesim.simulate import make_case, simulate

TOKENS = 6_000  # of choosing text; each unit and level is a pass over it
KEPT = ("norms", "router")  # what no unit holds

Unit = tuple[int, str]
"""Layer (-1: none) and part."""


@dataclass(frozen=True, slots=True)
class Step:
    """One unit lowered: the level it gets, what that saves and costs (nats per token of choosing text)."""

    unit: Unit
    level: str
    saved_bytes: int
    cost: float

    @property
    def slope(self) -> float:
        return self.cost / self.saved_bytes


@dataclass(frozen=True)
class Costs:
    """Loss and bytes of each unit at each level; levels fall."""

    levels: tuple[str, ...]
    bytes: dict[Unit, dict[str, int]]
    loss: dict[Unit, dict[str, float]]

    @property
    def units(self) -> list[Unit]:
        return list(self.bytes)


def levels_of(study: Study) -> tuple[str, ...]:
    """Return the formats that a search assigns, the most precise first."""
    return "fp16", "int8", four_bits(study.subject.spec), "int3-g64", "int2-g64"


def plan_of(assigned: dict[Unit, str], rounding: str = "clip") -> PrecisionPlan:
    """Return a plan that gives each unit its format: the commonest is the default, others are overrides by part and layers."""
    names = list(assigned.values())
    default = max(dict.fromkeys(names), key=names.count)
    data: dict[str, Any] = {"default": default, "rounding": rounding, "norms": "bf16", "router": "fp32"}
    layers: dict[tuple[str, str], list[int]] = {}
    for (layer, part), name in assigned.items():
        if layer < 0:
            data[part] = name
        elif name != default:
            layers.setdefault((part, name), []).append(layer)
    data["overrides"] = [{"part": part, "layers": found, "format": name} for (part, name), found in layers.items()]
    return plan_from(data)


def measure_costs(study: Study) -> Costs:
    """Degrade each unit alone to each level; what was measured before is taken from the study's results."""
    spec, levels = study.subject.spec, levels_of(study)
    places = dict.fromkeys((site.layer, site.part) for site in study.subject.sites if site.part not in KEPT)
    loss: dict[Unit, dict[str, float]] = {}
    base = _whole_loss(study)
    for i, unit in enumerate(places):
        loss[unit] = {levels[0]: 0.0}
        for level in levels[1:]:
            facts = {"layer": unit[0], "part": unit[1], "level": level}
            loss[unit][level] = _kept(study, "unit", facts, partial(_loss_with, study, unit, level, {})) - base
        study.tick("units alone", i + 1, len(places))
    sizes = {unit: {level: spec.part_bytes(plan_from(level), unit[1], unit[0]) for level in levels} for unit in places}
    return Costs(levels, sizes, loss)


def _kept(study: Study, what: str, facts: dict[str, Any], measure: Callable[[], float]) -> float:
    """Return a number that was measured before, or measure and keep it."""
    key = study.key(what, tokens=TOKENS, **facts)
    if study.results.get(key) is None:
        study.results.add(key, measure())
    return float(study.results.get(key))


def _whole_loss(study: Study) -> float:
    """Loss of the unquantised model on choosing text."""
    return _kept(study, "whole", {}, lambda: study.choosing_loss({}, study.choosing.head(TOKENS)).mean_loss)


def _lost_percent(study: Study, plan: PrecisionPlan) -> float:
    """What a plan loses on choosing text, percent."""

    def measure() -> float:
        weights = weights_of(study.subject, quantise(study.subject, plan, study.heard))
        return study.choosing_loss(weights, study.choosing.head(TOKENS)).mean_loss

    return 100 * (_kept(study, "all at once", {"of": plan.hash}, measure) / _whole_loss(study) - 1)


def _loss_with(study: Study, unit: Unit, level: str, rest: dict[str, Tensor]) -> float:
    """Loss on choosing text with one unit at a level, and all else as in ``rest`` or unquantised."""
    sites = tuple(site for site in study.subject.sites if (site.layer, site.part) == unit)
    found = quantise(study.subject, plan_from({"default": level, "rounding": "clip"}), study.heard, sites)
    return study.choosing_loss(rest | {site.key: found.weight(site) for site in sites}, study.choosing.head(TOKENS)).mean_loss


def steps_of(costs: Costs, unit: Unit) -> list[Step]:
    """Return a unit's steps along the lower convex hull of (bytes saved, loss): each costs more a byte than the one before."""
    sizes, losses = costs.bytes[unit], costs.loss[unit]
    out: list[Step] = []
    here = costs.levels[0]
    while True:
        options = [
            Step(unit, level, sizes[here] - sizes[level], max(losses[level] - losses[here], 0.0))
            for level in costs.levels[costs.levels.index(here) + 1 :]
            if sizes[level] < sizes[here]
        ]
        if not options:
            return out
        best = min(options, key=lambda step: (step.slope, -step.saved_bytes))
        out.append(best)
        here = best.level


def path_of(costs: Costs) -> list[Step]:
    """Return all units' steps, the cheapest a byte first."""
    return sorted((step for unit in costs.units for step in steps_of(costs, unit)), key=lambda step: step.slope)


def assign(costs: Costs, steps: Iterable[Step]) -> dict[Unit, str]:
    """Return the level of each unit after some steps."""
    out = dict.fromkeys(costs.units, costs.levels[0])
    return out | {step.unit: step.level for step in steps}


# ---- where on the path to stop


def within_bytes(study: Study, costs: Costs, budget_bytes: int) -> PrecisionPlan:
    """Return the plan that fits a budget with the fewest steps along the path; then steps that became needless are undone, dearest first.

    Raises
    ------
    InputError
        If not even everything at the lowest level fits.
    """
    path = path_of(costs)
    n = next((n for n in range(len(path) + 1) if _size(study, costs, path[:n]) <= budget_bytes), None)
    if n is None:
        least = _size(study, costs, path)
        raise InputError("--budget", expected=f"at least {least:,} bytes, everything in {costs.levels[-1]}", got=f"{budget_bytes:,}")
    return plan_of(assign(costs, _without_needless(study, costs, path[:n], budget_bytes)))


def _without_needless(study: Study, costs: Costs, taken: list[Step], budget_bytes: int) -> list[Step]:
    """Undo the last step of a unit where what is left still fits."""
    left = list(taken)
    for step in sorted(taken, key=lambda s: -s.cost):
        last = next(s for s in reversed(left) if s.unit == step.unit)
        if last is step:
            fewer = [s for s in left if s is not step]
            if _size(study, costs, fewer) <= budget_bytes:
                left = fewer
    return left


def within_loss(study: Study, costs: Costs, most_percent: float) -> PrecisionPlan:
    """Return the smallest plan of the path whose loss on choosing text, measured, is at most so many percent.

    The path's losses rise but for noise, so it is searched by halving.
    """
    path = path_of(costs)

    def holds(n: int) -> bool:
        return _lost_percent(study, plan_of(assign(costs, path[:n]))) <= most_percent

    return plan_of(assign(costs, path[: _last(holds, len(path))]))


def within_speed(costs: Costs, least_tok_s: float, speed: Callable[[PrecisionPlan], float]) -> PrecisionPlan:
    """Return the plan of the path with the fewest steps that decodes so fast, by a simulation of each plan that is tried.

    Raises
    ------
    InputError
        If not even everything at the lowest level is so fast.
    """
    path = path_of(costs)

    def slow(n: int) -> bool:
        return speed(plan_of(assign(costs, path[:n]))) < least_tok_s

    if slow(len(path)):
        got = f"{speed(plan_of(assign(costs, path))):.3g} tok/s with everything in {costs.levels[-1]}"
        raise InputError("--budget", expected=f"{least_tok_s:g} tok/s", got=got, fix="another machine, or a lower speed")
    return plan_of(assign(costs, path[: _last(slow, len(path)) + 1] if slow(0) else []))


def _last(holds: Callable[[int], bool], n: int) -> int:
    """Return the largest number of steps for which something holds that holds for few and fails for many; 0 if for none."""
    low, high = 0, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _size(study: Study, costs: Costs, steps: Sequence[Step]) -> int:
    return stated_bytes(study.subject.spec, plan_of(assign(costs, steps)))


# ---- what it is compared with


def uniform(study: Study, costs: Costs, budget_bytes: int) -> PrecisionPlan | None:
    """Return the most precise plan of one format for all units that fits, or None."""
    plans = [plan_of(dict.fromkeys(costs.units, level)) for level in costs.levels]
    return next((plan for plan in plans if stated_bytes(study.subject.spec, plan) <= budget_bytes), None)


def bits_first(study: Study, costs: Costs, budget_bytes: int) -> PrecisionPlan | None:
    """Return the other order: one format for all one step below the budget, then 8 bits for the units that gain most by it, while it lasts."""
    spec, text = study.subject.spec, study.choosing.head(TOKENS)
    flat = [dict.fromkeys(costs.units, level) for level in costs.levels]
    start = next((f for f in flat if stated_bytes(spec, plan_of(f)) < 0.97 * budget_bytes), None)
    if start is None:
        return None
    low = plan_of(start)
    weights = weights_of(study.subject, quantise(study.subject, low, study.heard))
    whole = _kept(study, "all low", {"start": low.hash}, lambda: study.choosing_loss(weights, text).mean_loss)
    gain: dict[Unit, float] = {}
    for i, unit in enumerate(costs.units):
        facts = {"start": low.hash, "layer": unit[0], "part": unit[1]}
        gain[unit] = whole - _kept(study, "restored", facts, partial(_loss_with, study, unit, "int8", weights))
        study.tick("units restored", i + 1, len(costs.units))
    chosen = dict(start)
    dear = {unit: costs.bytes[unit]["int8"] - costs.bytes[unit][start[unit]] for unit in costs.units}
    for unit in sorted(costs.units, key=lambda u: -gain[u] / max(dear[u], 1)):
        with_it = chosen | {unit: "int8"}
        if dear[unit] > 0 and stated_bytes(spec, plan_of(with_it)) <= budget_bytes:
            chosen = with_it
    return plan_of(chosen)


def reverse(study: Study, costs: Costs, budget_bytes: int) -> PrecisionPlan:
    """Return the plan of the ranking turned round: the unit that costs most a byte is lowered first, all the way."""
    lowest = costs.levels[-1]
    saved = {unit: costs.bytes[unit][costs.levels[0]] - costs.bytes[unit][lowest] for unit in costs.units}
    chosen = dict.fromkeys(costs.units, costs.levels[0])
    for unit in sorted(costs.units, key=lambda u: -costs.loss[u][lowest] / max(saved[u], 1)):
        if stated_bytes(study.subject.spec, plan_of(chosen)) <= budget_bytes:
            break
        chosen[unit] = lowest
    return plan_of(chosen)


# ---- a whole search


@dataclass(frozen=True)
class Found:
    """A search: what was asked, the plans by the order that made them (the search's own first), and what they lose on choosing text, percent."""

    goal: str
    value: float
    scenario: str
    costs: Costs
    plans: dict[str, PrecisionPlan]
    measured: dict[str, Measured]
    choosing_percent: dict[str, float]


def search(study: Study, goal: str, value: float, scenario: str = "") -> Found:
    """Search a plan and measure it, and the other orders at its bytes, on held-out text.

    Parameters
    ----------
    study : Study
    goal : str
        ``bytes``: at most ``value``; ``loss``: the fewest bytes that lose at most ``value`` percent on choosing text; ``speed``: the least
        loss that decodes ``value`` tokens/s in ``scenario``.
    """
    costs = measure_costs(study)
    if goal == "bytes":
        budget_bytes = int(value)
        best = within_bytes(study, costs, budget_bytes)
    else:
        best = within_loss(study, costs, value) if goal == "loss" else within_speed(costs, value, lambda plan: decode_tok_s(scenario, plan))
        budget_bytes = stated_bytes(study.subject.spec, best)
    others = {"uniform": uniform(study, costs, budget_bytes), "bits first": bits_first(study, costs, budget_bytes),
              "reverse ranking": reverse(study, costs, budget_bytes)}  # fmt: skip
    plans = {"search": best} | {name: plan for name, plan in others.items() if plan is not None}
    lost = {name: _lost_percent(study, plan) for name, plan in plans.items()}
    return Found(goal, value, scenario, costs, plans, {name: study.measure(name, plan) for name, plan in plans.items()}, lost)


def decode_tok_s(scenario: str, plan: PrecisionPlan) -> float:
    """Return the decode speed that a scenario reaches under a plan."""
    spec, document, base = load_scenario(scenario)
    changed = spec.model_copy(update={"precision": plan.model_dump(mode="json", exclude_none=True, exclude={"quality"})})
    found = simulate(make_case(changed, document, base), keep=False).as_dict()["metrics"]
    return float(found["decode_tok_s"] or 0.0) if found is not None else 0.0
