"""Owns what-if: everything that one scenario's speed depends on, as one answer with its evidence.

The ceiling of a lane is the speed with that lane infinitely fast: its channel, peak and waiting a million times better, all else as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moesim import bottleneck
from moesim.bottleneck import Bottleneck
from moesim.config import command
from moesim.hardware import HardwareProfile
from moesim.html_table import html_table
from moesim.simulate import Case, Result
from moesim.whatif.curves import Curve, curve
from moesim.whatif.figures import RANGES, Knob, knobs, turn
from moesim.whatif.replay import Replay
from moesim.whatif.uncertainty import INTERVAL, Effect, Interval, effects, interval
from moesim.whatif.upgrades import Outcome, attempt, changes

INFINITE = 1e6
NO_LIMIT = 1e3  # times the speed now: beyond it a ceiling says only that no other lane is on the path
DRAWS = 128
POINTS = 13
SHOWN = 10  # changes in a notebook


@dataclass(frozen=True)
class Ceiling:
    """The speed with one lane infinitely fast (nan where nothing else that is modelled would limit it), and its share of the critical path now."""

    lane: str
    share: float
    speed: float


@dataclass(frozen=True)
class WhatIf:
    """What one scenario's speed depends on. Without a run (out of memory) only the changes say something."""

    name: str
    assignments: tuple[str, ...]
    result: Result
    data: dict[str, Any]
    speed: float
    found: Bottleneck | None
    ceilings: tuple[Ceiling, ...]
    effects: tuple[Effect, ...]
    interval: Interval | None
    outcomes: tuple[Outcome, ...]
    curves: tuple[Curve, ...]

    @property
    def metric(self) -> str:
        """The name of the speed: decode, or prefill where nothing is decoded."""
        metrics = self.data["metrics"]
        return "prefill_tok_s" if metrics and metrics["decode_tok_s"] is None else "decode_tok_s"

    def gain(self, outcome: Outcome) -> float:
        """tokens/s that a change brings; nan where it cannot be."""
        return outcome.speed - self.speed if math.isfinite(self.speed) else outcome.speed

    def as_dict(self) -> dict[str, Any]:
        """Return the answer in the stable shape of ``moesim whatif -o json``; its keys are in docs/deciding.md."""
        shares = self.interval.shares if self.interval else {}
        ranks = self.interval.ranks if self.interval else {}
        return {
            "metric": self.metric,
            "speed_tok_s": self.speed,
            "oom": self.data["oom"],
            "bottleneck": None if self.found is None else {
                "lane": self.found.lane, "share": self.found.share, "busy": self.found.busy, "finding": self.found.finding,
                "advice": self.found.advice,
            },
            "ceilings": [{"lane": c.lane, "share": c.share, "speed_tok_s": c.speed} for c in self.ceilings],
            "elasticities": [
                {
                    "name": e.knob.name, "value": e.knob.value, "unit": e.knob.unit, "basis": e.knob.basis, "elasticity": e.elasticity,
                    "step": e.step, "replanned": e.knob.replans, "low": e.knob.low * e.knob.value, "high": e.knob.high * e.knob.value,
                    "at_low_tok_s": e.at_low, "at_high_tok_s": e.at_high, "variance_share": shares.get(e.knob.name, 0.0),
                    "rank_correlation": ranks.get(e.knob.name, 0.0),
                }
                for e in self.effects
            ],
            "interval": None if self.interval is None else {
                "level": INTERVAL, "low_tok_s": self.interval.low, "median_tok_s": self.interval.median, "high_tok_s": self.interval.high,
                "draws": self.interval.draws, "explained": self.interval.explained, "default_ranges": RANGES,
            },
            "changes": [
                {
                    "name": o.change.name, "group": o.change.group, "speed_tok_s": o.speed, "gain_tok_s": self.gain(o), "ttft_ms": o.ttft_ms,
                    "problem": o.problem, "remark": o.change.remark,
                    "command": command(self.name, (*self.assignments, *o.assignments)) if o.assignments else None,
                }
                for o in self.outcomes
            ],
            "curves": [
                {
                    "path": c.path, "unit": c.unit, "now": c.now, "grid": "log" if c.log else "linear",
                    "points": [{"value": p.value, "speed_tok_s": p.speed, "lane": p.lane} for p in c.points],
                    "knees": [{"value": k.value, "why": k.why} for k in c.knees],
                }
                for c in self.curves
            ],
            "provenance": self.data["provenance"],
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"WhatIf({self.name}: {self.speed:.3g} tok/s, {len(self.effects)} figures, {len(self.outcomes)} changes)"

    def _repr_html_(self) -> str:
        best = sorted((o for o in self.outcomes if math.isfinite(o.speed)), key=lambda o: -o.speed)[:SHOWN]
        rows = [(o.change.name, o.change.group, f"{o.speed:.3g}", f"{self.gain(o):+.3g}") for o in best]
        finding = "out of memory" if self.found is None else f"{self.speed:.3g} tokens/s; {self.found.finding}"
        return html_table(f"{self.name}: {finding}", rows, ("change", "kind", "tokens/s", "gain"))


def whatif(
    case: Case,
    name: str,
    assignments: tuple[str, ...] = (),
    vary: tuple[str, ...] = (),
    draws: int = DRAWS,
    points: int = POINTS,
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
    result: Result | None = None,
) -> WhatIf:
    """Ask everything of one case.

    Parameters
    ----------
    case : Case
        Of ``load_case(name, assignments)``.
    name, assignments
        What it was loaded by, for the commands that the answer prints.
    vary : tuple of str
        Curves, ``PATH=FROM..TO`` each.
    draws : int
        Of the interval; 0 for none.
    points : int
        Of each curve.
    quick : bool
        Leave out what needs a run of its own: changes, and figures that decide what fits.
    progress : callable, optional
        Called with (runs done, runs in all).
    result : Result, optional
        Of the case, where it ran already: it is not run again then.

    Raises
    ------
    InputError
        If a curve's path or range is wrong.
    """
    replay = Replay(case, result)
    curves = tuple(curve(replay, text, points) for text in vary)
    data = replay.result.as_dict()
    tries = [] if quick else changes(replay.case)
    ran = replay.result.meter is not None and replay.result.oom is None
    outcomes: list[Outcome] = []
    for change in tries:
        outcomes.append(attempt(replay.case, change))
        if progress is not None:
            progress(len(outcomes), len(tries))
    outcomes = [
        o for group in ("buy", "switch", "bound") for o in sorted((x for x in outcomes if x.change.group == group), key=_worst_last)
    ]
    if not ran:
        return WhatIf(name, assignments, replay.result, data, math.nan, None, (), (), None, tuple(outcomes), curves)
    found = effects(replay, not quick)
    spread = interval(replay, found, draws, case.scenario.seed) if draws else None
    return WhatIf(
        name, assignments, replay.result, data, replay.speed, bottleneck.find(replay.result, data), tuple(ceilings(replay, data)), found, spread,
        tuple(outcomes), curves,
    )  # fmt: skip


def _worst_last(outcome: Outcome) -> float:
    return -outcome.speed if math.isfinite(outcome.speed) else math.inf


def ceilings(replay: Replay, data: dict[str, Any]) -> list[Ceiling]:
    """Return the speed with each lane of the critical path infinitely fast, the largest share first."""
    shares = {lane: share for lane, share in bottleneck.lane_shares(data["critical_path"]).items() if share > 0}
    every = [knob for knob in knobs(replay.case) if not knob.replans]
    machines = [_without(replay, lane, every) for lane in shares]
    found = [got if got <= NO_LIMIT * replay.speed else math.nan for got in replay.speeds(machines)]
    return [Ceiling(lane, share, got) for (lane, share), got in zip(shares.items(), found, strict=True)]


def _without(replay: Replay, lane: str, every: list[Knob]) -> HardwareProfile:
    """The machine with one lane infinitely fast; other devices on the same memory keep the rate that they could stream at."""
    now = replay.case.hardware
    channel = bottleneck.channel_of(replay.result, lane)
    names = {f"channels.{channel}.bandwidth"}
    for part in ("devices", "links", "storage"):
        names |= {knob.name for knob in every if knob.name.startswith(f"{part}.{lane}.") and knob.unit != "share"}
    machine = now
    for knob in every:
        if knob.name in names:
            machine = turn(machine, knob, 1 / INFINITE if knob.unit == "s" else INFINITE)
    devices = dict(machine.devices)
    for name, device in now.devices.items():
        if name != lane and now.tiers[device.tier].channel == channel:
            port = now.channels[channel].bandwidth.model_copy(update={"value": now.stream_cap(name)})
            devices[name] = device.model_copy(update={"bandwidth": port})
    return machine.model_copy(update={"devices": devices})
