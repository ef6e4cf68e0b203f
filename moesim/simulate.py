"""Owns one run from scenario to result: load what it names, lay out, plan, price, simulate, measure.

The spine in one place: trace -> planner -> schedule -> engine -> timeline -> metrics. Equal inputs give equal results, byte
for byte; nothing here reads a clock or the machine it runs on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moesim import __version__, config, metrics, resources
from moesim.conditions import Conditions, check_background
from moesim.config import Document
from moesim.cost import Costs
from moesim.energy import PowerMeter
from moesim.energy import summary as energy_summary
from moesim.errors import InputError
from moesim.generate import from_popularity, popularity_from_counts_csv, uniform, zipf_popularity
from moesim.generate.bundled import find_like
from moesim.generate.like import generate as draw_like
from moesim.hardware import HardwareProfile, assumed_figures
from moesim.hardware.compose import find_hardware
from moesim.host import collector
from moesim.layout import Layout
from moesim.metrics import kernel as metrics_kernel
from moesim.metrics.stream import Meter
from moesim.model import ModelSpec
from moesim.model_files import load_model_with_plan
from moesim.planner import Planner
from moesim.policies.prefetch import make_predictor, source_of
from moesim.precision import PrecisionPlan, plan_from
from moesim.result_table import result_table
from moesim.runtime_rates import as_found
from moesim.scenario import Scenario, load_scenario
from moesim.schedule import Fragment, Lane, Schedule
from moesim.tasks import Tasks, Watermark, join, watermark
from moesim.timeline import Timeline
from moesim.trace import RoutingTrace, adapt_trace, load_trace
from moesim.workload import Steps, make_steps

ENGINES = {"des": "moesim.engines.des:DesEngine", "fast": "moesim.engines.fast:FastEngine"}
LONG_RUN_TASKS = (
    50_000  # from here on ``auto`` takes compiled code: the reference needs some five seconds for as many, compiling some twenty, once
)
ROWS_PER_PHASE = 256  # of a generated sequence that requests repeat: a few times as many as there are experts


class Engine(Protocol):
    """What gives a schedule its times: fragments in order, then the rest."""

    @property
    def now_ps(self) -> int: ...

    def advance(self, fragment: Fragment, costs: Costs) -> Timeline: ...

    def wait(self, until_ps: int) -> Timeline: ...

    def finish(self) -> Timeline: ...


@dataclass(frozen=True)
class Case:
    """A scenario with everything it names loaded and laid out, ready to plan."""

    scenario: Scenario
    model: ModelSpec
    plan: PrecisionPlan
    hardware: HardwareProfile
    layout: Layout
    document: Document
    base: Path

    @cached_property
    def routing(self) -> Routing:
        """The routing that the run uses; loaded when first asked for (a budget needs none)."""
        return load_routing(self)

    @cached_property
    def engine(self) -> str:
        """The engine of the run: ``auto`` means fast for long runs and des for short ones. The result is the same."""
        if self.scenario.engine != "auto":
            return self.scenario.engine
        return "fast" if self._expected_tasks >= LONG_RUN_TASKS else "des"

    @property
    def _expected_tasks(self) -> int:
        """Tasks of the run, but for loads and copies."""
        work, model, n_moe = self.scenario.workload, self.model, len(self.layout.moe_layers)
        chunks, rest = divmod(work.prompt_tokens, work.prefill_chunk)
        steps = [(work.prefill_chunk, chunks), (rest, int(rest > 0)), (1, work.output_tokens)]  # new tokens of a sequence, times
        ffns = sum(times * n_moe * min(model.n_experts, model.top_k * work.batch * tokens) for tokens, times in steps)
        return ffns + 3 * model.n_layers * sum(times for _, times in steps)

    def planner(self, kind: type[Planner] | None = None) -> Planner:
        """Return a fresh planner, of some kind if one is named; it is compiled where the engine is, and plans the same."""
        routing, prefetch = self.routing, self.scenario.prefetch
        predicted, source = None, "none"
        if prefetch.on:
            if prefetch.distance > len(self.layout.moe_layers):
                most, where = len(self.layout.moe_layers), self.document.where(("prefetch", "distance"))
                raise InputError(
                    "prefetch.distance", expected=f"at most {most}, the model's MoE layers", got=str(prefetch.distance), where=where
                )
            options: dict[str, Any] = {"threshold": prefetch.threshold}
            if prefetch.predictor == "gate-lookahead":
                options |= {"recall": prefetch.recall, "loss": prefetch.recall_loss, "seed": self.scenario.content_seed}
            predictor = make_predictor(prefetch.predictor, **options)
            predictor.compiled = self.engine == "fast"
            predictor.fit(routing.train)
            predicted, source = predictor.predict(routing.used, prefetch.distance), source_of(prefetch.predictor)
        if kind is None:
            kind = import_module("moesim.planner.fast").CompiledPlanner if self.engine == "fast" else Planner
        return kind(self.layout, routing.used, routing.steps, routing.popularity, predicted, source)


@dataclass(frozen=True)
class Routing:
    """The trace of a run: what is learned from, what is used, and how it was adapted."""

    train: RoutingTrace
    used: RoutingTrace
    steps: Steps
    popularity: NDArray[np.int64]
    source: str
    source_hash: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """Everything about every task of a run: what plots, exports and re-timing need."""

    schedule: Schedule
    timeline: Timeline
    tasks: Tasks
    memory: Watermark


@dataclass(frozen=True)
class Result:
    """What a run gave: its sums, and every task where that was asked for. ``meter`` is None where nothing ran."""

    case: Case
    meter: Meter | None
    kept: Kept | None
    oom: dict[str, Any] | None
    dropped_prefetches: int
    power: PowerMeter | None = None

    @property
    def n_tasks(self) -> int:
        return self.meter.n_tasks if self.meter is not None else 0

    @property
    def every(self) -> Kept:
        """Every task of the run; an InputError where there is none, or the run did not keep them."""
        if self.kept is None:
            ran = "sums alone" if self.meter is not None else "none: memory ran out before the first step"
            raise InputError("tasks of a run", expected="a run that kept them", got=ran, fix="call simulate(case, keep=True)")
        return self.kept

    @property
    def schedule(self) -> Schedule:
        return self.every.schedule

    @property
    def timeline(self) -> Timeline:
        return self.every.timeline

    @property
    def tasks(self) -> Tasks:
        return self.every.tasks

    @property
    def memory(self) -> Watermark:
        return self.every.memory

    def as_dict(self) -> dict[str, Any]:
        """Return the result in the stable shape of ``moesim run -o json``; computed once, each caller gets a copy."""
        return copy.deepcopy(self._data)

    @cached_property
    def _data(self) -> dict[str, Any]:
        layout = self.case.layout
        tiers = layout.ledger.tiers()
        for i, tier in enumerate(tiers):
            tiers[tier]["peak_bytes"] = int(self.meter.peak_bytes[i]) if self.meter is not None else None
        out: dict[str, Any] = {
            "provenance": provenance(self.case),
            "memory": tiers,
            "oom": self.oom,
            "quality": quality_of(self.case.model, self.case.plan),
        }
        out["metrics"] = out["transfers"] = out["lanes"] = out["critical_path"] = out["energy"] = None
        if self.meter is not None:
            mapped = self.case.scenario.io.engine == "mmap"
            out["metrics"] = metrics.summary(self.meter, mapped) | {"dropped_prefetches": self.dropped_prefetches}
            out["transfers"] = metrics.transfers(self.meter)
            out["lanes"] = metrics.lane_use(self.meter)
            out["critical_path"] = metrics.critical_shares(self.meter)
            if self.power is not None:
                tokens, requests = int(self.meter.steps[:, 5].sum()), self.case.scenario.workload.batch
                out["energy"] = energy_summary(self.power, out["metrics"]["makespan_s"], tokens, requests)
        return out

    def __repr__(self) -> str:
        return f"Result({self.case.scenario.name}: {self.n_tasks} tasks{', out of memory' if self.oom else ''})"

    def _repr_html_(self) -> str:
        return result_table(f"{self.case.scenario.name}: {self.case.model.name} on {self.case.hardware.name}", self._data)


def load_case(name: str | Path, assignments: tuple[str, ...] = ()) -> Case:
    """Load a scenario by name or path, with ``path=value`` assignments, and everything it names.

    Raises
    ------
    InputError
        If anything about it is wrong; the message names file, field and fix.
    """
    scenario, document, base = load_scenario(name, assignments)
    if scenario.serving is not None:
        raise InputError("serving", expected="a workload in lockstep", got="requests that arrive", fix="run it with moesim serve-sim",
                         where=document.where(("serving",)))  # fmt: skip
    return make_case(scenario, document, base)


def make_case(scenario: Scenario, document: Document | None = None, base: Path | None = None) -> Case:
    """Load what a scenario names and lay it out. Errors of a part are reported at the line that chose it."""
    document = document or Document(None, scenario.name or "scenario")
    base = base or Path()

    def at(field: str) -> str:
        return document.where(tuple(field.split(".")))

    model, own_plan = load_model_with_plan(scenario.model, base, at("model"))
    try:
        plan = stated_plan(scenario.precision, own_plan, at("precision"), base)
        plan.check_layers(model.n_layers)
    except InputError as error:
        raise error.under("precision").at(at("precision")) from None
    hardware = machine_of(scenario, base, at)
    try:
        layout = Layout(scenario, model, plan, hardware)
        check_background(scenario.timing.background, hardware)
    except InputError as error:
        raise error.at(at(error.what)) from None
    return Case(scenario, model, plan, hardware, layout, document, base)


def stated_plan(precision: str | dict[str, Any], own: PrecisionPlan | None, where: str, base: Path | None = None) -> PrecisionPlan:
    """Return a scenario's precision: as stated, or where its default is ``file`` that of the model's file, with what is stated beside it."""
    stated = precision if isinstance(precision, dict) else {"default": precision}
    if stated.get("default") != "file":
        return plan_from(precision, where, base)
    if own is None:
        raise InputError("precision", expected='"file" only with a GGUF model', got='"file"', fix="name a format or a plan")
    changes = {key: value for key, value in stated.items() if key != "default"}
    kept = own.model_dump(mode="json", exclude_none=True)
    overrides = [*kept["overrides"], *changes.pop("overrides", [])]
    return plan_from(kept | changes | {"overrides": overrides}, where)


def quality_of(model: ModelSpec, plan: PrecisionPlan) -> dict[str, Any]:
    """Return what is known of the quality that a precision leaves of a model: ``basis`` and the loss in percent, None where it is unknown.

    ``reference``: no matrix has fewer than 16 bits, so nothing is lost; ``measured`` and ``published`` are the plan's or the bundled table's.
    """
    out: dict[str, Any] = dict.fromkeys(("loss_percent", "low_percent", "high_percent", "benchmark", "source"))
    stated = plan.known_quality(model.name)
    if stated is not None:
        return out | stated.model_dump(mode="json", exclude={"model", "plan_hash"})
    lossless = not any(plan.format(t.part, t.layer, t.matrix).quantised for t in model.all_tensors)
    return out | ({"basis": "reference", "loss_percent": 0.0} if lossless else {"basis": "unknown"})


def machine_of(scenario: Scenario, base: Path, at: Callable[[str], str]) -> HardwareProfile:
    hardware = as_found(find_hardware(scenario.hardware, base, at("hardware")), scenario, at("runtime"))
    if scenario.hardware_set:
        data = _overlay(hardware.model_dump(mode="json"), scenario.hardware_set)
        hardware = config.build(HardwareProfile, Document(data, at("hardware_set")))
    for channel, factor in scenario.hardware_scale.items():
        try:
            hardware = hardware.scaled(channel, factor)
        except InputError as error:
            path = f"hardware_scale.{channel}"
            raise InputError(path, expected=error.expected, got=error.got, fix=error.fix, where=at(path)) from None
    return hardware.derated(scenario.derate)


def _overlay(data: Any, changes: Any) -> Any:
    """Return nested data with nested changes laid over it."""
    if isinstance(data, dict) and isinstance(changes, dict):
        return data | {key: _overlay(data.get(key), value) for key, value in changes.items()}
    if isinstance(data, list) and isinstance(changes, dict) and all(str(k).isdigit() and int(k) < len(data) for k in changes):
        return [_overlay(item, changes[str(i)]) if str(i) in changes else item for i, item in enumerate(data)]
    return changes


def load_routing(case: Case) -> Routing:
    """Load or generate the trace of a case, adapt it to the model, split it, and assign its rows to steps."""
    try:
        return _routing(case)
    except InputError as error:
        field = error.what.split(" ")[0]
        raise error.at(case.document.where(tuple(field.split(".")) if "." in field else ("trace",))) from None


def _routing(case: Case) -> Routing:
    scenario, model, use = case.scenario, case.model, case.scenario.trace
    n_layers, n_experts, top_k = len(case.layout.moe_layers), model.n_experts, model.top_k
    notes: list[str] = []
    path = _source(case)
    if path is not None:
        trace = load_trace(path)
        name, identity = use.source, trace.hash
        trace, adapted = adapt_trace(trace, n_layers, n_experts, top_k, layers=use.layers, slots=use.top_k)
        notes += adapted
    else:
        how = use.generate or use.if_absent
        trace, name = _generate(case, how, n_layers, n_experts, top_k)
        identity = trace.hash
        if use.source:
            notes.append(f"the trace {use.source} is absent: generated instead")
        notes += [f"generated: {how}", *trace.meta["caveats"]]
    if use.train_fraction > 0:
        train, rest = trace.split(use.train_fraction)
    else:
        train = rest = trace
        if any(p.spec.policy == "static" or p.spec.warm for p in case.layout.pools.values()) or scenario.prefetch.on:
            notes.append("placement and prediction learned from the very rows that are run (train_fraction 0)")
    if scenario.prefetch.on and scenario.prefetch.predictor == "gate-lookahead":
        notes.append(f"gate-lookahead: a recall of {scenario.prefetch.recall:g} one layer ahead is stated, not measured on this trace")
    if scenario.serving is not None:  # the batcher takes rows as requests come
        nothing = np.zeros((0, 0), np.int64)
        return Routing(train, rest, Steps(nothing, nothing, 1, 0, ()), train.counts(), name, identity, tuple(notes))
    steps = make_steps(rest, scenario.workload, use)
    notes += steps.notes
    last = int(max(steps.prompts.max(initial=0), steps.answers.max(initial=0))) + 1
    return Routing(train, rest.slice_rows(0, last), steps, train.counts(), name, identity, tuple(notes))


def _source(case: Case) -> Path | None:
    """The file of the trace, or None where one is to be generated."""
    use = case.scenario.trace
    if not use.source:
        return None
    try:
        return resources.find("traces", use.source, base=case.base, where=case.document.where(("trace", "source")))
    except InputError:
        if use.if_absent:
            return None
        raise


def _generate(case: Case, how: str, n_layers: int, n_experts: int, top_k: int) -> tuple[RoutingTrace, str]:
    """Draw a trace that is long enough for the workload and its training part."""
    use, work = case.scenario.trace, case.scenario.workload
    rng = np.random.default_rng(case.scenario.content_seed)
    if case.scenario.serving is not None and use.sequences == "repeat":  # requests of any length go round in these rows
        few = {name: min(getattr(work, name), ROWS_PER_PHASE) for name in ("prompt_tokens", "output_tokens")}
        work = work.model_copy(update=few)
    shape = {"n_sequences": 2 * work.batch, "prefill_rows": work.prompt_tokens}
    n_rows = 2 * work.batch * (work.prompt_tokens + work.output_tokens)
    if how == "uniform":
        return uniform(n_rows, n_layers, n_experts, top_k, rng, **shape), "uniform"
    if how == "like":
        profile = find_like(use.profile, case.base, case.document.where(("trace", "profile")))
        got = (profile.n_layers, profile.n_experts, profile.top_k)
        if got != (n_layers, n_experts, top_k):
            want = f"a profile of {n_layers} layers x {n_experts} experts, top-{top_k}"
            raise InputError("trace.profile", expected=want, got=f"{got[0]} x {got[1]}, top-{got[2]}", fix="choose the model's own profile")
        return draw_like(profile, n_rows, rng, n_sequences=2 * work.batch, prefill_rows=work.prompt_tokens), f"like {use.profile}"
    if how == "zipf":
        popularity: NDArray[Any] = zipf_popularity(n_layers, n_experts, use.zipf_exponent, rng)
        return from_popularity(popularity, top_k, n_rows, rng, **shape), f"zipf, exponent {use.zipf_exponent:g}"
    path = resources.find("traces", use.counts, base=case.base, where=case.document.where(("trace", "counts")))
    if path.suffix == ".npz":
        popularity = load_trace(path).counts()
    else:
        popularity = popularity_from_counts_csv(path, use.counts_model)
    if popularity.shape != (n_layers, n_experts):
        raise InputError(
            "trace.counts", expected=f"{n_layers} layers x {n_experts} experts", got=f"{popularity.shape[0]} x {popularity.shape[1]}"
        )
    return from_popularity(popularity, top_k, n_rows, rng, **shape), f"popularity of {use.counts}"


def load_engine(name: str) -> Callable[[tuple[Lane, ...]], Engine]:
    """Return the class of an engine; it is imported when asked for, as compiled engines take a while to load."""
    module, _, attribute = ENGINES[name].partition(":")
    found: Callable[[tuple[Lane, ...]], Engine] = getattr(import_module(module), attribute)
    return found


def simulate(case: Case, progress: Callable[[int, int], None] | None = None, keep: bool = True) -> Result:
    """Plan and simulate a case.

    Parameters
    ----------
    case : Case
    progress : callable, optional
        Called with (steps done, steps in all) after each fragment.
    keep : bool
        Keep every task, for plots and exports; a run of millions of tasks takes gigabytes then, and flat memory without.

    Raises
    ------
    InputError
        If the run would last longer than its clock of int64 picoseconds can count.
    """
    try:
        with collector.paused():
            return _simulate(case, progress, keep)
    except OverflowError:
        where = case.document.where(("hardware",))
        raise InputError(
            "hardware", expected="a run of less than 106 days (2**63 ps)", got="a longer one", fix="check rates and latencies", where=where
        ) from None


def _simulate(case: Case, progress: Callable[[int, int], None] | None, keep: bool) -> Result:
    planner = case.planner()
    scenario = case.scenario
    jitter = np.random.default_rng([scenario.seed, 1]) if scenario.timing.jitter else None
    power = PowerMeter(case.hardware, planner.lanes)
    conditions = Conditions(case.hardware, scenario.timing.background, power, scenario.timing.jitter, jitter)
    engine = load_engine(case.engine)(planner.lanes)
    meter = load_meter(case, planner, keep)
    parts: list[tuple[Fragment, Costs]] = []
    ended: list[Timeline] = []
    done = 0
    for fragment in planner.fragments(1) if "time" in case.layout.depends_on else planner.fragments():
        costs = conditions.prices(engine.now_ps * metrics.PS).costs(fragment)
        times = engine.advance(fragment, costs)
        power.add(fragment, times, engine.now_ps, conditions.clocks)
        meter.add(fragment, costs, times)
        if keep:
            parts.append((fragment, costs))
            ended.append(times)
        done += len(fragment.steps)
        if progress is not None:
            progress(done, len(case.routing.steps))
    times = engine.finish()
    meter.finish(times)
    oom = None
    if planner.out_of_memory is not None:
        oom = planner.out_of_memory.as_dict() | {"max_context_tokens": case.layout.max_context_tokens}
    if not meter.n_tasks:
        return Result(case, None, None, oom, 0)
    kept = None
    if keep:
        timeline = Timeline.concat([*ended, times])
        tasks = join(parts, timeline, meter)
        schedule = Schedule(planner.lanes, planner.tiers, planner.lines, case.layout.depends_on, [fragment for fragment, _ in parts])
        kept = Kept(schedule, timeline, tasks, watermark(tasks, planner.tiers, planner.lines, planner.initial_memory()))
    return Result(case, meter, kept, oom, planner.dropped_prefetches, power)


def load_meter(case: Case, planner: Planner, keep: bool = False) -> Meter:
    """Return a meter for a run of a case; its loops are compiled where the engine is."""
    kernels = import_module("moesim.metrics.compiled") if case.engine == "fast" else metrics_kernel
    model = case.model
    return Meter(planner.lanes, model.n_layers, model.n_experts, len(planner.tiers), planner.initial_memory(), kernels, keep)


def provenance(case: Case) -> dict[str, Any]:
    """Return what a result was made from."""
    scenario, routing = case.scenario, case.routing
    resolved = {
        "scenario": scenario.model_dump(mode="json", exclude={"name", "description", "engine"}),
        "model": case.model.model_dump(mode="json"),
        "plan": case.plan.model_dump(mode="json"),
        "hardware": case.hardware.model_dump(mode="json"),
    }
    return {
        "version": __version__,
        "scenario": scenario.name,
        "set": [it for it in case.document.assignments if not it.startswith("engine=")],  # the engine changes no result
        "scenario_hash": config.content_hash(resolved),
        "model": case.model.name,
        "hardware": case.hardware.name,
        "trace": routing.source,
        "trace_hash": routing.source_hash,
        "seed": scenario.seed,
        "engine": case.engine,
        "adaptations": list(routing.notes),
        "assumed": [f"hardware: {name}" for name in assumed_figures(case.hardware)]
        + [f"memory: {line.name} ({line.tier})" for line in case.layout.ledger.lines if line.basis == "assumed"]
        + ["cost: kernels per task"],
    }
