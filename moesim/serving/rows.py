"""Owns which trace rows a request follows: rows of one sequence, in order. How they are chained or repeated is said, never silent.

Request r follows sequence r modulo their number: its prompt the sequence's prefill rows, its answer the decode rows. Requests of a group
with a shared prefix follow the group's sequence in the prefix and their own one from there on. Rows of several requests meet in a step, but
the order within each is the trace's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.scenario import TraceUse
from moesim.serving.requests import Requests
from moesim.trace import RoutingTrace
from moesim.workload import DECODE, PREFILL

Rows = NDArray[np.int64]


class RowSource:
    """Rows of each request of a run.

    Parameters
    ----------
    trace : RoutingTrace
        The part of the trace that runs use.
    use : TraceUse
        How it may be adapted.
    requests : Requests
    prefix_tokens : int
        Tokens at the front of the prompts of a group that are routed alike.

    Raises
    ------
    InputError
        If the trace has too few rows of a phase and the scenario does not say how to go on.
    """

    def __init__(self, trace: RoutingTrace, use: TraceUse, requests: Requests, prefix_tokens: int) -> None:
        self.requests, self.prefix_tokens = requests, prefix_tokens
        by_phase: dict[int, list[Rows]] = {PREFILL: [], DECODE: []}
        for start, stop in trace.sequences:
            rows = np.arange(start, stop)
            for phase, found in by_phase.items():
                found.append(rows[trace.phase[start:stop] == phase])
        self.notes: list[str] = ["each request follows the rows of one sequence in order; request r takes sequence r modulo their number"]
        if not any(len(rows) for rows in by_phase[PREFILL]):
            if use.prefill != "decode":
                raise InputError("trace.prefill", expected="prefill rows for the prompts", got="a trace of decode rows only",
                                 fix='set trace.prefill to "decode" to route prompts by decode rows')  # fmt: skip
            self.notes.append("prompts routed by decode rows (the trace has no prompt routing)")
            by_phase[PREFILL] = by_phase[DECODE]
        pairs = [(p, a) for p, a in zip(by_phase[PREFILL], by_phase[DECODE], strict=True) if len(p) and len(a)]
        if not pairs:
            raise InputError("trace", expected="sequences with rows of prompts and of answers", got="none")
        if use.sequences == "chain":
            self.notes.append("rows of successive sequences chained where a request is longer than its own")
        self._pairs, self._use = pairs, use
        self._check(requests)

    def _check(self, requests: Requests) -> None:
        for what, needed, which in (("prompt", requests.prompt, 0), ("output", np.maximum(requests.output - 1, 0), 1)):
            have = np.array([len(pair[which]) for pair in self._pairs])
            if self._use.sequences == "chain":
                have = np.full(len(have), have.sum())
            short = needed > have[np.arange(len(requests)) % len(have)]
            if short.any() and self._use.sequences != "repeat":
                r = int(np.argmax(short))
                raise InputError(f"serving.{what}", expected=f"at most {have[r % len(have)]} tokens, the rows that request {r} finds in the trace",
                                 got=str(int(needed[r])), fix='set trace.sequences to "repeat", or ask for less')  # fmt: skip
            if short.any():
                self.notes.append(
                    f"rows repeated: {what}s of {int(short.sum())} of {len(requests)} requests are longer than their sequence"
                )

    def rows(self, request: int) -> Rows:
        """Rows of the tokens that a request computes: its prompt, and all of its answer but the last token."""
        prompt, output = int(self.requests.prompt[request]), int(self.requests.output[request]) - 1
        own, group = request % len(self._pairs), int(self.requests.group[request])
        parts = [self._phase(own, 0, prompt), self._phase(own, 1, output)]
        if group >= 0:
            parts[0] = np.concatenate([self._phase(group % len(self._pairs), 0, self.prefix_tokens), parts[0][self.prefix_tokens :]])
        return np.concatenate(parts)

    def _phase(self, sequence: int, which: int, needed: int) -> Rows:
        rows = self._pairs[sequence][which]
        if needed > len(rows) and self._use.sequences == "chain":
            turn = [*range(sequence, len(self._pairs)), *range(sequence)]
            rows = np.concatenate([self._pairs[i][which] for i in turn])
        return np.resize(rows, needed) if needed else rows[:0]
