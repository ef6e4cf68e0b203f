"""Owns one study of a model: its texts, what was measured of each plan, and where that is kept.

Three texts, never mixed: calibration text gives scales, clips and adapters; choosing text decides whether a tuned adapter is kept, how sensitive a
unit is and what a search assigns; held-out text is only measured on, and nothing that is measured on it changes a plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesim import config
from moesim.precision import PrecisionPlan
from moesim.quality.calibration import Calibration, calibrate
from moesim.quality.evaluate import Evaluation, agreement, evaluate
from moesim.quality.interval import Bootstrap
from moesim.quality.quantise import Quantised, originals, quantise, restore, stated_bytes
from moesim.quality.real_weights import run_real
from moesim.quality.store import Results
from moesim.quality.subject import Subject, TinyMoe
from moesim.quality.text import Text, windows_of
from moesim.quality.tune import tune, weights_of
from moesim.trace import RoutingTrace
from moesim.trace_stats import lru_hits

VERSION = 1  # of what is measured; a change makes kept results invalid
REAL_WINDOWS = 8
CACHE_SHARES = (0.25, 0.5, 0.75)  # of the experts of a layer

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Measured:
    """What was measured of one plan on held-out text."""

    name: str
    plan: PrecisionPlan
    key: str
    stored_bytes: int
    ledger_bytes: int
    evaluation: Evaluation
    router_agreement: float
    hit_rates: dict[str, float]
    real: dict[str, Any] | None
    cpu_s: float


class Study:
    """A model and its texts.

    Parameters
    ----------
    subject : Subject
    held_out : Text
        Only measured on.
    calibration : Text
        Split by document into calibration and choosing text.
    results : Results
    tick : callable, optional
        Told (what, done, all).
    seed : int
        Of tuning and of draws.
    """

    def __init__(
        self, subject: Subject, held_out: Text, calibration: Text, results: Results, tick: Tick | None = None, seed: int = 0
    ) -> None:
        self.subject, self.held_out, self.results, self.seed = subject, held_out, results, seed
        self.calibration, self.choosing = calibration.split()
        self.tick: Tick = tick or (lambda _what, _done, _total: None)
        self.bootstrap = Bootstrap(held_out, seed)
        self.own = originals(subject)  # before anything can be put into the model

    @cached_property
    def identity(self) -> str:
        """What tells models apart: shapes and samples of all weights."""
        facts = {n: [list(p.shape), p.reshape(-1)[:: max(p.numel() // 64, 1)].tolist()] for n, p in self.subject.module.named_parameters()}
        return config.content_hash(facts)

    @cached_property
    def heard(self) -> Calibration:
        """What calibration text tells of the model."""
        return calibrate(self.subject, self.calibration, lambda done, total: self.tick("calibration", done, total))

    def key(self, what: str, plan: PrecisionPlan | None = None, **more: Any) -> str:
        """Return the key of a measurement."""
        texts = [self.held_out.hash, self.calibration.hash, self.choosing.hash]
        facts = {"version": VERSION, "what": what, "model": self.identity, "texts": texts, "seed": self.seed, **more}
        return config.content_hash(facts | {"plan": plan.hash if plan is not None else ""})

    # ---- held-out text

    @cached_property
    def reference(self) -> tuple[Evaluation, RoutingTrace]:
        """The unquantised model on held-out text."""
        key = self.key("reference")
        if self.results.get(key) is None:
            found, trace = evaluate(self.subject, self.held_out, lambda done, total: self.tick("unquantised", done, total))
            self.results.add(key, found.as_dict(), trace)
        return Evaluation.from_dict(self.results.get(key)), self.results.trace(key)

    def quantised(self, plan: PrecisionPlan) -> Quantised:
        """Quantise under a plan; its adapters are tuned."""
        found = quantise(self.subject, plan, self.heard)
        if found.adapters:
            found = tune(
                self.subject, found, self.calibration, self.choosing, self.seed, lambda done, total: self.tick("adapters", done, total)
            )
        return found

    def measure(self, name: str, plan: PrecisionPlan, real: bool = False) -> Measured:
        """Quantise, run over held-out text and count; or return what was kept of that.

        Parameters
        ----------
        name : str
            What to call the plan.
        plan : PrecisionPlan
        real : bool
            Run some of the text in the real engine too (the bundled model only).
        """
        key = self.key("plan", plan, real=real)
        record = self.results.get(key)
        if record is None:
            base, base_trace = self.reference
            began = time.process_time()
            found = self.quantised(plan)
            weights = weights_of(self.subject, found)
            evaluation, trace = base, base_trace
            try:
                if any(not torch.equal(weights[key_], w) for key_, w in self.own.items()):
                    restore(self.subject, weights)
                    evaluation, own_trace = evaluate(self.subject, self.held_out, lambda done, total: self.tick(name, done, total))
                    trace = own_trace or base_trace
                check = self._real(found) if real else None
            finally:
                restore(self.subject, self.own)
            record = {
                "evaluation": evaluation.as_dict(), "stored_bytes": found.stored_bytes, "router_agreement": agreement(trace, base_trace),
                "hit_rates": hit_rates(trace), "real": check, "cpu_s": time.process_time() - began,
            }  # fmt: skip
            self.results.add(key, record, trace)
        evaluation = Evaluation.from_dict(record["evaluation"])
        figures = {k: record[k] for k in ("stored_bytes", "router_agreement", "hit_rates", "real", "cpu_s")}
        return Measured(name=name, plan=plan, key=key, ledger_bytes=stated_bytes(self.subject.spec, plan), evaluation=evaluation, **figures)

    def _real(self, found: Quantised) -> dict[str, Any] | None:
        if not isinstance(self.subject, TinyMoe):
            return None
        batch = windows_of(self.held_out, self.subject.window, self.subject.first_token, REAL_WINDOWS)[0]
        check = run_real(self.subject, found, batch)
        return {
            "real_loss": check.real_loss, "reference_loss": check.reference_loss, "relative": check.relative, "tokens": check.tokens,
            "router_agreement": check.router_agreement, "differences": check.differences,
        }  # fmt: skip

    # ---- choosing text

    def choosing_loss(self, weights: Mapping[str, Tensor], text: Text) -> Evaluation:
        """Run the model with some weights exchanged over choosing text."""
        try:
            restore(self.subject, weights)
            return evaluate(self.subject, text, routing=False)[0]
        finally:
            restore(self.subject, {key: self.own[key] for key in weights})


def hit_rates(trace: RoutingTrace) -> dict[str, float]:
    """Hit rates of an LRU cache a layer, with room for shares of its experts, over a whole trace; by the share in percent."""
    sizes = {share: max(int(trace.n_experts * share), trace.top_k) for share in CACHE_SHARES}
    hits = lru_hits(trace, sorted(set(sizes.values())))
    accesses = trace.n_rows * trace.n_layers * trace.top_k
    return {f"{share:.0%}": float(np.sum(hits[size]) / accesses) for share, size in sizes.items()}
