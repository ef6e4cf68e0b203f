"""Owns judging one machine for one model of a sizing: the switches searched, what it reaches, and the bounds that spare most simulations.

Each figure is a run of the bundled scenario ``sizing`` with settings; ``commands`` are what runs it again. Decoding is simulated with the cache
at the full context; the first token of a prompt as one chunk in the middle of it, times the number of chunks (attention grows linearly
with the context, so the middle chunk is the mean one). Experts that lie outside a card are fetched for prefill, as runtimes do for large
batches. The closed-form bound: no token is faster than reading its weights once from the machine's fastest memory.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moesim import config, resources
from moesim.config import assignment, command
from moesim.errors import InputError
from moesim.generate.bundled import find_like
from moesim.hardware import HardwareProfile, kind
from moesim.hardware.compose import compose
from moesim.layout import Layout
from moesim.model import ModelSpec
from moesim.model_files import load_model
from moesim.precision import FORMATS, PrecisionPlan, plan_from
from moesim.scenario import Scenario
from moesim.simulate import Case, Result, Routing, quality_of, simulate
from moesim.sizing.needs import Needs
from moesim.sweep.space import lay
from moesim.whatif import DRAWS
from moesim.whatif.replay import Replay, speed_of
from moesim.whatif.uncertainty import effects, interval

SCENARIO = "sizing"
FEW_USERS, OUTPUT, OUTPUT_OF_MANY = 8, 12, 4  # tokens decoded per run, and from so many users on: each layer so many times
CHUNK = 1024  # tokens of a prefill chunk
NO_ROOM = 1e-3  # what a machine reaches at most that does not hold the plan: less than any that runs
NEAR = 0.7  # of what is needed: from here on a machine that misses is also tried with experts computed or fetched, whichever is sooner
BATCHES = (8, 32)  # sequences at a time that are tried for a batch of requests
PLANS = ("bf16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")  # formats of the experts that are tried, the most precise first
OTHERS = {"bf16": "bf16", "mxfp4": "bf16"}  # format of all but the experts beside these; Q8_0 beside the others
Settings = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What one machine reaches with one model.

    ``reached`` is the worst of got / needed over all that is asked: at 1 or more the needs are met. ``speed`` is tokens/s of one user;
    ``requests_per_h`` of a batch. ``problem`` says why there is no figure.
    """

    machine: str
    model: str
    experts: str = ""
    switches: str = ""
    settings: Settings = field(default_factory=dict)
    users: int = 1
    prompt: int = 1
    speed: float = math.nan
    ttft_s: float = math.nan
    requests_per_h: float = math.nan
    reached: float = 0.0
    left_bytes: dict[str, int] = field(default_factory=dict)
    most_context: int = 0
    watts: float | None = None
    quality: dict[str, Any] = field(default_factory=dict)
    lane: str = ""
    lanes: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    def command(self, what: str = "decode") -> str:
        """Return the command behind the speed, the first token (``ttft``) or the interval (``interval``)."""
        settings = self.settings if what != "ttft" else prefill_settings(self.settings, self.prompt)
        texts = [assignment(path, value) for path, value in settings.items()]
        return command(SCENARIO, texts, "whatif --quick" if what == "interval" else "run")


class Judge:
    """Judges machines for the needs; routing is drawn once per model and load."""

    def __init__(self, needs: Needs, folder: Path) -> None:
        self.needs, self.folder = needs, folder
        path = resources.find("scenarios", SCENARIO)
        self._document, self._base = config.read_yaml(path), path.parent
        self._routings: dict[str, Routing] = {}
        self._machines: dict[str, HardwareProfile] = {}
        self._likes: dict[str, str] = {}
        self._done: dict[str, tuple[Case, Result]] = {}
        self._models = {name: load_model(name, folder) for name in needs.models}
        self.n_runs = 0

    def model(self, name: str) -> ModelSpec:
        return self._models[name]

    def machine(self, text: str) -> HardwareProfile:
        if text not in self._machines:
            self._machines[text] = compose(text)
        return self._machines[text]

    def formats(self) -> list[str]:
        """Return the formats of experts that the quality floor allows, the most precise first."""
        quality = self.needs.quality
        if quality.formats:
            return sorted(quality.formats, key=lambda name: -FORMATS[name].bits_per_weight)
        if quality.max_loss_percent is not None:
            return [name for name in PLANS if (loss := self.known_loss(name)) is not None and loss <= quality.max_loss_percent]
        out = [name for name in PLANS if FORMATS[name].bits_per_weight >= (quality.floor_bits or 0.0)]
        if not out:
            most = max(FORMATS[name].bits_per_weight for name in PLANS)
            raise InputError("quality.floor_bits", expected=f"at most {most:g}", got=f"{quality.floor_bits:g}")
        return out

    def known_loss(self, experts: str) -> float | None:
        """Return the largest loss over models, in percent, that is measured or published of a format; None where one is unknown."""
        plan = plan_from(self.precision(experts))
        losses = [quality_of(model, plan)["loss_percent"] for model in self._models.values()]
        return None if None in losses else max(losses)

    def precision(self, experts: str) -> dict[str, str]:
        """Return the precision plan of a format of the experts; a loss is known only of plans that have one format throughout."""
        others = OTHERS.get(experts, "Q8_0") if self.needs.quality.max_loss_percent is None else experts
        return {"default": others, "routed_experts": experts, "kv": "fp16"}

    def weight_bytes(self, experts: str) -> int:
        """Return the bytes of the largest model under a format of the experts."""
        return max(model.weight_bytes(plan_from(self.precision(experts))) for model in self._models.values())

    # ---- bounds

    def bound(self, machine: str, model: str, experts: str) -> float:
        """Return tokens/s of one user that no arrangement can pass on this machine; 0 where the weights have no place at all."""
        hw, spec, plan = self.machine(machine), self.model(model), plan_from(self.precision(experts))
        room = sum(tier.usable_bytes for name, tier in hw.tiers.items() if kind(name) != "ssd")
        drive = sum(tier.usable_bytes for name, tier in hw.tiers.items() if kind(name) == "ssd")
        weights = spec.weight_bytes(plan)
        if weights > max(room, drive):
            return 0.0
        return max(hw.stream_cap(name) for name in hw.devices) / active_bytes(spec, plan)

    def read_speed(self, machine: str, model: str, experts: str) -> float:
        """Return the tokens/s at which a step's weights are read, the fastest memory filled first and all experts as likely; 0 as in ``bound``.

        An estimate to rank machines by, no bound: hot experts may lie where reading is fast.
        """
        if not self.bound(machine, model, experts):
            return 0.0
        hw, spec, plan = self.machine(machine), self.model(model), plan_from(self.precision(experts))
        rates = {name: hw.channels[tier.channel].bandwidth.value for name, tier in hw.tiers.items() if kind(name) == "ssd"}
        rates |= {
            tier: max(hw.stream_cap(n) for n, d in hw.devices.items() if d.tier == tier) for tier in {d.tier for d in hw.devices.values()}
        }
        routed = float(spec.part_bytes(plan, "routed_experts"))
        always = active_bytes(spec, plan) - routed * (share := spec.top_k / max(spec.n_experts, 1))
        read = 1 - (1 - share) ** self.needs.users
        time_s = 0.0
        for tier in sorted(rates, key=lambda t: -rates[t]):
            room = hw.tiers[tier].usable_bytes
            first, then = min(always, room), min(routed, max(room - always, 0))
            always, routed, time_s = always - first, routed - then, time_s + (first + read * then) / rates[tier]
        return 1 / time_s

    # ---- settings

    def settings(self, machine: str, model: str, experts: str, users: int, context: int) -> Settings:
        """Return what every run of a machine and model sets, switches aside."""
        spec = self.model(model)
        workspace = CHUNK * (spec.vocab_size + 2 * spec.hidden_size) * 4 if spec.vocab_size else 0
        tokens = output_tokens(users)
        out: Settings = {
            "model": model,
            "hardware": machine,
            "precision": self.precision(experts),
            "workload": {"prompt_tokens": 0, "output_tokens": tokens, "batch": users, "cached_tokens": max(context - tokens, 0)},
            "memory": {"runtime": "0.8 GB", "context_tokens": context, "workspace": f"{workspace} B"},
        }
        if model not in self._likes:
            self._likes[model] = like_name(spec, model)
        if profile := self._likes[model]:
            out["trace"] = {"generate": "like", "profile": profile, "train_fraction": 0.5}
        return out

    def arrangements(self, machine: str, settings: Settings) -> list[tuple[str, Settings]]:
        """Return the sets of switches that are searched on a machine: placement, cache policy, prefetch."""
        hw = self.machine(machine)
        cards = [name for name in hw.devices if kind(name) == "gpu" and kind(hw.devices[name].tier) == "vram"]
        if not cards:
            main = next(t for t in hw.tiers if kind(t) in ("ram", "unified"))
            static = {f"placement.pools.{main}": {"hold": "fit", "policy": "static"}}
            if self._layout(settings | static, all_held=True):
                return [("all in memory", static)]
            lru = {f"placement.pools.{main}": {"hold": "fit", "policy": "lru", "warm": True}}
            ahead = {"prefetch": {"predictor": "cooccurrence", "distance": 1}}
            return [("hottest experts static", static), ("LRU cache", lru), ("LRU cache, prefetch", lru | ahead)]
        split: Settings = {}
        if len(cards) > 1:
            n = self.model(settings["model"]).n_layers
            cuts = [round(i * n / len(cards)) for i in range(len(cards) + 1)]
            split["placement.layers"] = [
                {"layers": f"{a}-{b - 1}", "part": part, "device": card}
                for card, a, b in zip(cards[1:], cuts[1:], cuts[2:], strict=False)
                for part in ("attention", "routed_experts")
            ]
        static = split | {"placement.pools.vram": {"hold": "fit", "policy": "static"}}
        if self._layout(settings | static, all_held=True):
            return [("all in VRAM" if len(cards) == 1 else f"all in VRAM, layers over {len(cards)} cards", static)]
        below: Settings = {"placement.pools.ram": {"hold": "fit", "policy": "static"}}
        out: list[tuple[str, Settings]] = [
            ("hottest experts in VRAM, the CPU computes the others", static | below | {"placement.site": "in-place"}),
        ]
        if len(cards) == 1:
            lru = {
                "placement.pools.vram": {"hold": "fit", "policy": "lru", "warm": True},
                "prefetch": {"predictor": "cooccurrence", "distance": 1},
            }
            out.append(("LRU cache in VRAM over RAM, prefetch", lru | below))
        return out

    def _layout(self, settings: Settings, all_held: bool) -> bool:
        """Whether a plan fits; with ``all_held`` also whether the nearest memory holds every expert."""
        try:
            layout = self.case(settings).layout
        except InputError:
            return False
        near = {layout.tier_of(device) for device in layout.expert_device}
        held = all(min(pool.counts) >= layout.model.n_experts for tier, pool in layout.pools.items() if tier in near)
        return layout.ledger.fits and (held or not all_held)

    def case(self, settings: Settings) -> Case:
        """Return the case that ``moesim run sizing --set ...`` loads, without loading anything twice."""
        document = lay(self._document, [(path, value, SCENARIO) for path, value in settings.items()])
        scenario = config.build(Scenario, document)
        spec, plan, hw = self.model(scenario.model), plan_from(scenario.precision), self.machine(scenario.hardware)
        out = Case(scenario, spec, plan, hw, Layout(scenario, spec, plan, hw), document, self._base)
        key = _routed_alike(scenario)
        if key in self._routings:
            out.__dict__["routing"] = self._routings[key]
        return out

    def run(self, settings: Settings) -> tuple[Case, Result]:
        """Simulate settings, once."""
        key = json.dumps(settings, sort_keys=True)
        if key not in self._done:
            case = self.case(settings)
            result = simulate(case, keep=False)
            self.n_runs += 1
            self._routings[_routed_alike(case.scenario)] = case.routing
            self._done[key] = case, result
        return self._done[key]

    # ---- verdicts

    def verdict(self, machine: str, model: str) -> Verdict:
        """Return the fastest arrangement of a machine in the least precise format that is allowed."""
        found = self._fastest(machine, model, self.formats()[-1])
        return self.hybrid(found) if NEAR <= found.reached < 1 else found

    def refined(self, verdict: Verdict) -> Verdict:
        """Return the most precise arrangement that still meets the needs, found from the least precise upwards."""
        for experts in reversed(self.formats()[:-1]):
            found = self._fastest(verdict.machine, verdict.model, experts, (verdict.users,))
            if found.reached < 1:
                break
            verdict = found
        return verdict

    def hybrid(self, verdict: Verdict) -> Verdict:
        """Return the better of a verdict in which the CPU computes experts, and the same with those fetched that are then done sooner."""
        if verdict.settings.get("placement.site") != "in-place":
            return verdict
        other = self.judged(
            verdict.settings | {"placement.site": "hybrid"}, "hottest experts in VRAM, others computed by the CPU or fetched"
        )
        return max(verdict, other, key=lambda v: v.reached)

    def _fastest(self, machine: str, model: str, experts: str, loads: tuple[int, ...] = ()) -> Verdict:
        needs, found = self.needs, []
        for users in loads or (BATCHES if needs.batch else (needs.users,)):
            settings = self.settings(machine, model, experts, users, needs.context)
            try:
                found += [self.judged(settings | extra, label) for label, extra in self.arrangements(machine, settings)]
            except InputError as error:
                found.append(self.refused(Verdict(machine, model, experts, users=users, settings=settings), error))
        return max(found, key=lambda v: v.reached)

    def judged(self, settings: Settings, label: str, whole: bool = False) -> Verdict:
        """Return what one arrangement reaches; the first token is left out (nan) where decoding alone misses the level, but for ``whole``."""
        needs, machine, model = self.needs, settings["hardware"], settings["model"]
        users, experts = settings["workload"]["batch"], settings["precision"]["routed_experts"]
        plain = Verdict(machine, model, experts, label, settings, users, needs.prompt)
        try:
            case, result = self.run(settings)
            if result.oom or result.meter is None:
                return self.no_room(plain, result)
            speed, ttft = speed_of(result), math.nan
            reached = math.inf if needs.level is None else speed / needs.level.decode_tok_s
            if whole or reached >= 1:
                first = self.run(prefill_settings(settings, needs.prompt))[1]
                if first.oom or first.meter is None:
                    return self.no_room(plain, first)
                ttft = float(first.as_dict()["metrics"]["ttft_ms"]["mean"]) / 1e3 * needs.prompt / min(CHUNK, needs.prompt)
        except InputError as error:
            return self.refused(plain, error)
        per_h = math.nan
        if needs.batch is not None:
            per_h = 3600 / (ttft + needs.batch.output_tokens / (users * speed))
            reached = per_h / (needs.batch.requests / needs.batch.within * 3600)
        elif needs.level is not None and needs.level.ttft and math.isfinite(ttft):
            reached = min(reached, needs.level.ttft / ttft)
        data, layout = result.as_dict(), case.layout
        lanes = {name: it["utilisation"] for name, it in data["lanes"].items()}
        left = {tier: layout.ledger.left_bytes(tier) for tier in layout.capacities}
        return replace(
            plain, speed=speed, ttft_s=ttft, requests_per_h=per_h, reached=reached, left_bytes=left, most_context=layout.max_context_tokens,
            watts=None if data["energy"]["devices_only"] else data["energy"]["average_w"], quality=data["quality"], lane=data["critical_path"][0]["lane"], lanes=lanes,
        )  # fmt: skip

    def no_room(self, verdict: Verdict, result: Result) -> Verdict:
        """A verdict of a run that does not fit; of two the one that lacks less reaches more."""
        oom = result.oom or {"needed_bytes": 1, "usable_bytes": 0, "tier": "memory"}
        return _short_of(verdict, oom["tier"], oom["needed_bytes"], oom["usable_bytes"])

    def refused(self, verdict: Verdict, error: InputError) -> Verdict:
        """A verdict of settings that make no run: what is lacking in which tier, where a pool cannot hold what it must."""
        if error.what.startswith("placement.pools."):
            tier = error.what.split(".")[2]
            with suppress(InputError):
                layout = self.case(verdict.settings | {f"placement.pools.{tier}": {"hold": "all", "policy": "static"}}).layout
                usable = layout.capacities[tier].usable_bytes
                if layout.ledger.left_bytes(tier) < 0:
                    return _short_of(verdict, tier, layout.ledger.planned_bytes(tier), usable)
        return replace(verdict, problem=f"cannot be: {error.expected}" if error.expected else str(error))

    def completed(self, verdict: Verdict) -> Verdict:
        """Return a verdict with its first token."""
        missing = math.isfinite(verdict.speed) and math.isnan(verdict.ttft_s)
        return self.judged(verdict.settings, verdict.switches, whole=True) if missing else verdict

    def spread(self, verdict: Verdict) -> tuple[float, float]:
        """Return the 80 % interval of a verdict's decode speed, as ``moesim whatif --quick`` gives it."""
        replay = Replay(self.case(verdict.settings))
        found = interval(replay, effects(replay, sizes=False), DRAWS, replay.case.scenario.seed)
        return found.low, found.high


def _routed_alike(scenario: Scenario) -> str:
    """What runs of a sizing have in common that use the same routing."""
    return json.dumps([scenario.model, scenario.trace.model_dump(), scenario.workload.model_dump()])


def _short_of(verdict: Verdict, tier: str, needed: int, usable: int) -> Verdict:
    """A verdict of what a tier has no room for."""
    return replace(verdict, problem=f"{(needed - usable) / 1e9:.3g} GB too many in {tier}", reached=NO_ROOM * usable / needed)


def output_tokens(users: int) -> int:
    """Return how many tokens a run decodes for so many users."""
    return OUTPUT if users < FEW_USERS else OUTPUT_OF_MANY


def prefill_settings(settings: Settings, prompt: int) -> Settings:
    """Return the settings of the run that gives the first token: one chunk in the middle of the prompt, of one user."""
    chunk = min(CHUNK, prompt)
    out = {path: value for path, value in settings.items() if path not in ("placement.site", "prefetch")}
    load = {"prompt_tokens": chunk, "output_tokens": 1, "batch": 1, "prefill_chunk": CHUNK, "cached_tokens": (prompt - chunk) // 2}
    return out | {"workload": load}


def active_bytes(spec: ModelSpec, plan: PrecisionPlan) -> float:
    """Bytes of weights that one token reads: all that is not routed or looked up, and top_k experts of each layer."""
    routed = spec.part_bytes(plan, "routed_experts")
    always = sum(spec.part_bytes(plan, part) for part in ("attention", "router", "norms", "dense_ffn", "shared_expert"))
    return always + spec.head_bytes(plan) + routed * spec.top_k / max(spec.n_experts, 1)


def like_name(spec: ModelSpec, name: str) -> str:
    """The bundled routing profile of a model, or "" where there is none of its shape."""
    try:
        profile = find_like(name)
    except InputError:
        return ""
    fits = (profile.n_layers, profile.n_experts, profile.top_k) == (len(spec.moe_layers), spec.n_experts, spec.top_k)
    return name if fits else ""
