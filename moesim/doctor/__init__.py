"""Owns the doctor: checks of a scenario, each simulated with the fault cured, so that every finding says what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moesim.config import command
from moesim.doctor.checks import Suspicion, suspicions
from moesim.html_table import html_table
from moesim.simulate import Case, Result, load_case, simulate
from moesim.units import show
from moesim.whatif.figures import on
from moesim.whatif.replay import speed_of
from moesim.whatif.upgrades import Change, attempt


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. ``speed`` and ``gain`` are tokens/s with the change and over now; None where there is nothing to simulate."""

    suspicion: Suspicion
    speed: float | None
    gain: float | None
    problem: str
    assignments: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says of one scenario, the costliest finding first."""

    name: str
    assignments: tuple[str, ...]
    result: Result
    speed: float
    findings: tuple[Finding, ...]

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the findings in the stable shape of ``moesim doctor -o json``; its keys are in docs/deciding.md."""
        return [
            {
                "code": f.suspicion.code, "claims": f.suspicion.claims, "what": f.suspicion.what, "evidence": f.suspicion.evidence,
                "speed_now_tok_s": self.speed, "speed_changed_tok_s": f.speed, "gain_tok_s": f.gain, "problem": f.problem,
                "set": list(f.assignments), "advice": f.suspicion.advice,
                "command": command(self.name, (*self.assignments, *f.assignments)) if f.assignments else None,
            }
            for f in self.findings
        ]  # fmt: skip

    def __repr__(self) -> str:
        return f"Diagnosis({self.name}: {len(self.findings)} findings)"

    def _repr_html_(self) -> str:
        gains = ["" if f.gain is None else f"{f.gain:+.3g} tokens/s" for f in self.findings]
        rows = [(f.suspicion.code, f.suspicion.what, gain, f.suspicion.advice) for f, gain in zip(self.findings, gains, strict=True)]
        return html_table(f"{self.name}: {len(rows)} findings", rows, ("code", "what", "gain", "advice"))


def doctor(
    name: str, assignments: tuple[str, ...] = (), profile: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Diagnosis:
    """Check a scenario.

    Parameters
    ----------
    name, assignments
        As ``load_case`` takes them.
    profile : str, optional
        A measured profile that takes the place of the scenario's machine; the difference is a finding.
    progress : callable, optional
        Called with (runs done, runs in all).
    """
    stated = None
    if profile is not None:
        stated = _fast(load_case(name, assignments))
        assignments = (*assignments, f'hardware="{profile}"')
    case = _fast(load_case(name, assignments))
    result = simulate(case, keep=False)
    speed, data = speed_of(result), result.as_dict()
    found: list[Finding] = [] if stated is None else [_against(stated, case, speed)]
    if result.oom is not None:
        found.append(_out_of_memory(result))
    doubts = suspicions(case, result, data)
    for i, doubt in enumerate(doubts):
        found += _tried(case, doubt, speed)
        if progress is not None:
            progress(i + 1, len(doubts))
    return Diagnosis(name, assignments, result, speed, tuple(sorted(_best_of_each(found), key=_cost)))


def _fast(case: Case) -> Case:
    return on(case, case.hardware, case.scenario.model_copy(update={"engine": "fast"}))


def _tried(case: Case, doubt: Suspicion, speed: float) -> list[Finding]:
    if not doubt.settings:
        return [Finding(doubt, None, None, "", ())]
    outcome = attempt(case, Change(doubt.what, "switch", doubt.settings))
    if not math.isfinite(outcome.speed):
        return [] if doubt.least is not None else [Finding(doubt, None, None, outcome.problem, outcome.assignments)]
    gain = outcome.speed - speed if math.isfinite(speed) else outcome.speed
    if doubt.least is not None and math.isfinite(speed) and gain < doubt.least * speed:
        return []
    return [Finding(doubt, outcome.speed, gain, "", outcome.assignments)]


def _best_of_each(found: list[Finding]) -> list[Finding]:
    """Of several cures of one fault the one that gains most."""
    out: dict[str, Finding] = {}
    for finding in found:
        code = finding.suspicion.code
        if code not in out or (finding.gain or 0.0) > (out[code].gain or 0.0):
            out[code] = finding
    return list(out.values())


def _cost(finding: Finding) -> float:
    return -finding.gain if finding.gain is not None else -math.inf if finding.suspicion.code == "out-of-memory" else 0.0


def _out_of_memory(result: Result) -> Finding:
    oom = result.oom or {}
    over, usable = show(oom["needed_bytes"] - oom["usable_bytes"], "bytes"), show(oom["usable_bytes"], "bytes")
    evidence = f"{oom['asked_by']} needs {over} more than the {usable} usable in {oom['tier']}"
    advice = (
        f"a context of at most {oom['max_context_tokens']:,} tokens would fit" if oom["max_context_tokens"] >= 0 else "hold fewer experts"
    )
    return Finding(Suspicion("out-of-memory", "M5, M8", "the run does not fit", evidence, (), None, advice), None, None, "", ())


def _against(stated: Case, measured: Case, speed: float) -> Finding:
    """What the measured machine says against the one that the scenario names."""
    before = speed_of(simulate(stated, keep=False))
    rates = {name: channel.bandwidth.value for name, channel in stated.hardware.channels.items()}
    parts = [
        f"{name} {show(channel.bandwidth.value, 'bytes_per_s')} for {show(rates[name], 'bytes_per_s')}"
        for name, channel in measured.hardware.channels.items()
        if name in rates
    ]
    evidence = f"{stated.hardware.name} was counted with {before:.3g} tok/s, measured it is {speed:.3g}; {', '.join(parts)}"
    doubt = Suspicion(
        "not-as-stated", "B1, W3", "the measured machine differs from the stated one", evidence, (), None, "plan with the measured one"
    )
    return Finding(doubt, None, None, "", ())
