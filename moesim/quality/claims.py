"""Owns the verdicts on the field's claims about quantisation (Q0 to Q9) that a set of measured plans allows, for the model it was measured on.

A verdict is one of: holds, does not hold, cannot be told (the interval has room for both). It must not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesim.model import ModelSpec
from moesim.quality.dequant import Dequant
from moesim.quality.evaluate import Evaluation
from moesim.quality.interval import Bootstrap, Figure
from moesim.quality.sensitivity import Sensitivity
from moesim.quality.study import Measured

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, its verdict, and the figures that it rests on."""

    name: str
    statement: str
    verdict: str
    evidence: str


class Judge:
    """Judges claims by measured plans.

    Parameters
    ----------
    spec : ModelSpec
    draws : Bootstrap
        Of the held-out text.
    base : Evaluation
        The unquantised model.
    plans : sequence of Measured
    """

    def __init__(self, spec: ModelSpec, draws: Bootstrap, base: Evaluation, plans: Sequence[Measured]) -> None:
        self.spec, self.draws, self.base = spec, draws, base
        self.plans: Mapping[str, Measured] = {it.name: it for it in plans}

    def loss(self, name: str) -> Figure:
        """Loss of a plan in percent."""
        return self.draws.change(self.plans[name].evaluation, self.base)

    def more(self, one: str, other: str) -> Figure:
        """How much more one plan loses than another, in percentage points."""
        return self.draws.difference(self.plans[one].evaluation, self.plans[other].evaluation, self.base)

    def _has(self, *names: str) -> bool:
        return all(name in self.plans for name in names)

    def claims(self, units: Sensitivity | None, dequant: Sequence[Dequant]) -> list[Claim]:
        """Return every claim that the plans allow to judge."""
        found = [self._size(), self._formats(), self._mixed(), self._causes(units), *self._compensations(), self._edges(units)]
        found += [self._reports(units), self._attention(), _dequantisation(dequant)]
        return [claim for claim in found if claim is not None]

    def _size(self) -> Claim | None:
        if not self._has("fp16", "int8", "int4"):
            return None
        whole = self.plans["fp16"].stored_bytes
        int8, int4 = whole / self.plans["int8"].stored_bytes, whole / self.plans["int4"].stored_bytes
        right = int4 > 3.9 and int8 > 1.95
        text = f"int8 is 1/{int8:.2f} of fp16 and int4 1/{int4:.2f}, scales, norms and routers counted; never 1/4 and 1/8, without scales 1/2 and 1/4"
        return Claim("Q0", "INT8 and INT4 shrink a model to 1/2 and 1/4 of FP16", HOLDS if right else FAILS, text)

    def _formats(self) -> Claim | None:
        if not self._has("int8", "int4"):
            return None
        int8, int4 = self.loss("int8"), self.loss("int4")
        text = f"int8 loses {show(int8)}, int4 (to nearest) {show(int4)} of bits per byte"
        within = int8.high < 1 and 1.5 <= int4.value <= 3
        milder = int8.high < 1 and int4.high < 1.5
        verdict = HOLDS if within else f"{FAILS}: int4 costs less here" if milder else FAILS if int8.low > 1 or int4.low > 3 else OPEN
        return Claim("Q1", "INT4 costs about 1.5 to 3 %, INT8 under 1 %", verdict, text)

    def _mixed(self) -> Claim | None:
        if not self._has("mixed", "int4"):
            return None
        mixed, int4, gap = self.loss("mixed"), self.loss("int4"), self.more("int4", "mixed")
        size = self.plans["mixed"].stored_bytes / self.plans["int4"].stored_bytes - 1
        text = f"mixed loses {show(mixed)}, int4 everywhere {show(int4)}; the gap is {points(gap)} for {size:+.1%} bytes"
        better = gap.low > 0
        levels = 1 <= mixed.value <= 2 and int4.value > 4
        verdict = HOLDS if better and levels else f"{'its order holds' if better else 'its order does not show'}, its sizes do not hold"
        return Claim("Q2", "mixed (shared INT8, experts INT4) loses 1 to 2 points, INT4 everywhere over 4", verdict, text)

    def _causes(self, units: Sensitivity | None) -> Claim | None:
        if units is None:
            return None
        by = {unit.unit: unit for unit in units.units}
        parts = [name for name in ("attention", "router", "shared_expert", "routed_experts", "embeddings", "head") if name in by]
        lost = ", ".join(f"{name.replace('_', ' ')} {show(by[name].degraded)}" for name in parts)
        kept = ", ".join(
            f"{it.name} {100 * it.router_agreement:.1f} %" for it in self.plans.values() if it.name in ("int8", "int4", "int3", "int2")
        )
        text = f"in {units.plan}, quantised alone: {lost}; tokens and layers whose set of experts is unchanged: {kept}"
        return Claim("Q3", "weights, activations that differ by expert, and the router all cause loss", OPEN, text)

    def _compensations(self) -> list[Claim]:
        out = []
        for bits in ("int3", "int2"):
            for name, before in (("clip", ""), ("aware", "+clip"), ("lowrank", "+aware")):
                one, other = f"{bits}+{name}", f"{bits}{before}"
                if self._has(one, other):
                    gain = self.more(other, one)
                    verdict = HOLDS if gain.low > 0 else FAILS if gain.high < 0 else OPEN
                    size = self.plans[one].stored_bytes / self.plans[other].stored_bytes - 1
                    text = f"{other} {show(self.loss(other))}, {one} {show(self.loss(one))}; gain {points(gain)}, {size:+.1%} bytes"
                    out.append(Claim("Q4", f"{_WORDS[name]} lowers the loss at {bits}", verdict, text))
        return out

    def _edges(self, units: Sensitivity | None) -> Claim | None:
        if not self._has("int3", "int3-edges8", "int3-middle8"):
            return None
        evaluation = {name: self.plans[name].evaluation for name in ("int3", "int3-edges8", "int3-middle8")}
        edges = self.draws.recovered(evaluation["int3-edges8"], evaluation["int3"], self.base)
        middle = self.draws.recovered(evaluation["int3-middle8"], evaluation["int3"], self.base)
        gap = self.more("int3-middle8", "int3-edges8")
        text = f"of the loss of int3, 8 bits in the outer layers recover {show(edges)}, in as many middle layers {show(middle)}; the outer ones gain {points(gap)} more"
        if units is not None:
            layers = sorted((u for u in units.units if u.unit.startswith("layer ")), key=lambda u: -u.degraded.value)
            text += "; layers by their loss alone: " + ", ".join(u.unit.removeprefix("layer ") for u in layers)
        verdict = HOLDS if edges.low > 50 and gap.low > 0 else FAILS if edges.high < 50 or gap.high < 0 else OPEN
        return Claim("Q5", "the first and last layers are the sensitive ones; INT8 there recovers over half of the loss", verdict, text)

    def _reports(self, units: Sensitivity | None) -> Claim | None:
        name = next((n for n in ("int3", "int4", "int2") if n in self.plans), None)
        if name is None:
            return None
        it, both = self.plans[name].evaluation, [self.draws.bits(e) for e in (self.plans[name].evaluation, self.base)]
        by_domain = {d: 100 * float(both[0][d][0] / both[1][d][0] - 1) for d in self.draws.names}
        by_place = 100 * (it.loss.sum(0) / self.base.loss.sum(0) - 1)
        text = f"{name} loses {min(by_domain.values()):.2f} to {max(by_domain.values()):.2f} % by domain, {by_place.min():.2f} to {by_place.max():.2f} % by position"
        if units is not None:
            alone = [u.degraded.value for u in units.units if u.unit.startswith("layer ")]
            text += f", {min(alone):.2f} to {max(alone):.2f} % by layer alone"
        spread = max(by_domain.values()) > 1.5 * max(min(by_domain.values()), 0)
        return Claim("Q7", "one average hides what matters", HOLDS if spread else FAILS, text)

    def _attention(self) -> Claim | None:
        if not self._has("attention16", "int4"):
            return None
        more = self.plans["attention16"].stored_bytes - self.plans["int4"].stored_bytes
        text = f"{more:,} bytes on this model; it gains {points(self.more('int4', 'attention16'))}"
        return Claim("Q8", "returning attention alone to FP16 costs less than 1 GB", HOLDS if more < 1e9 else FAILS, text)


_WORDS = {"clip": "the clip search", "aware": "activation-aware scaling", "lowrank": "low-rank compensation"}


def _dequantisation(measured: Sequence[Dequant]) -> Claim | None:
    plain = next((it for it in measured if it.format == "bf16"), None)
    others = [it for it in measured if it is not plain]
    if plain is None or not others:
        return None
    text = "; ".join(
        f"{it.format} ({it.how}): {it.bytes / plain.bytes:.0%} of the bytes of bf16, {it.time_s / plain.time_s:.1f} times its product's time"
        for it in others
    )
    slower = [it for it in others if it.time_s > plain.time_s]
    verdict = HOLDS if len(slower) == len(others) else f"holds for {', '.join(it.format for it in slower)}" if slower else FAILS
    return Claim("Q9", "low-bit weights shrink the transfer but add dequantisation time", verdict, text)


def order_claims(more: Mapping[str, Figure]) -> list[Claim]:
    """Judge claim Q6 by how much more (percentage points) other orders lose than the search, at its bytes."""
    if "bits first" not in more:
        return []
    gap = more["bits first"]
    text = "; ".join(f"{name} loses {points(it)} more than the search" for name, it in more.items())
    verdict = _gains(gap)
    return [Claim("Q6", "finding the sensitive parts first and then assigning bits gains more than the reverse", verdict, text)]


def _gains(gap: Figure) -> str:
    """The verdict on a claim that something gains: by the interval of the gain."""
    return HOLDS if gap.low > 0 else FAILS if gap.high < 0 else OPEN


def show(it: Figure) -> str:
    """Print a percentage with its interval."""
    return f"{it.value:.2f} % ({it.low:.2f} to {it.high:.2f})"


def points(it: Figure) -> str:
    """Print percentage points with their interval."""
    return f"{it.value:.2f} points ({it.low:.2f} to {it.high:.2f})"
