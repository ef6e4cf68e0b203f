"""Owns what is asked of the model: which rows of a trace each step runs, in which phase and at which context.

Sequences run in lockstep. A batch slot's prompt is routed by prefill rows, its answer by decode rows; how rows may be
chained, repeated or borrowed is stated by the scenario and returned as provenance, never silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.scenario import TraceUse, Workload
from moesim.trace import RoutingTrace

PREFILL, DECODE = 0, 1


@dataclass(slots=True)  # not frozen: frozen ones take several times as long to make
class Step:
    """One forward pass, which nobody may change. ``rows`` (B, N) are trace rows: N new tokens of each of B sequences."""

    index: int
    phase: int
    rows: NDArray[np.int64]
    context: int  # tokens of each sequence in the KV cache before this step
    emits: int  # sequences that get a token from it

    @property
    def tokens(self) -> int:
        return int(self.rows.size)


@dataclass(frozen=True, slots=True)
class MixedStep:
    """One forward pass over prompt chunks of some sequences and decode rows of others.

    ``rows`` (R,) are trace rows, one sequence after another; ``new`` and ``context`` (S,) the new tokens of each sequence, and those it
    has in the KV cache before. ``kv_bytes`` is what the KV cache holds during the step, by tier; ``swaps`` are copies between tiers
    that the step waits for: (source, target, bytes, blocks).
    """

    index: int
    phase: int  # PREFILL if any prompt is in it
    rows: NDArray[np.int64]
    new: tuple[int, ...]
    context: tuple[int, ...]
    emits: int
    kv_bytes: dict[str, int]
    swaps: tuple[tuple[str, str, int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.rows)

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """(sequences, new tokens of each, context that counts them too) of sequences that are alike in this step."""
        return alike(self.new, self.context)


def alike(new: Iterable[int], context: Iterable[int]) -> list[tuple[int, int, int]]:
    """(sequences, new tokens of each, context that counts them too) of sequences by their new tokens and the context before them."""
    counts = Counter(zip(new, context, strict=True))
    return [(count, more, before + more) for (more, before), count in counts.items()]


@dataclass(frozen=True, slots=True)
class Steps:
    """All steps of a run, as rows per slot: prompts (B, P) and answers (B, O)."""

    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    chunk: int
    cached: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        chunks = -(-int(self.prompts.shape[1]) // self.chunk)
        return chunks + int(self.answers.shape[1])

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps in order; the last prefill chunk yields the first token, each decode step one more."""
        batch, n_prompt = self.prompts.shape
        index = 0
        for begin in range(0, n_prompt, self.chunk):
            end = min(begin + self.chunk, n_prompt)
            yield Step(index, PREFILL, self.prompts[:, begin:end], self.cached + begin, batch if end == n_prompt else 0)
            index += 1
        for token in range(self.answers.shape[1]):
            yield Step(index, DECODE, self.answers[:, token : token + 1], self.cached + n_prompt + token, batch)
            index += 1


def make_steps(trace: RoutingTrace, workload: Workload, use: TraceUse) -> Steps:
    """Assign trace rows to the steps of a workload.

    With a prompt the last prefill chunk emits the first token, so ``output_tokens - 1`` decode steps follow; without one
    every token is a decode step.

    Raises
    ------
    InputError
        If the trace has too few rows of a phase and the scenario does not say how to go on.
    """
    batch = workload.batch
    prompts_needed = workload.prompt_tokens
    answers_needed = max(workload.output_tokens - (1 if prompts_needed else 0), 0)
    by_phase: dict[int, list[NDArray[np.int64]]] = {PREFILL: [], DECODE: []}
    for start, stop in trace.sequences:
        rows = np.arange(start, stop)
        for phase, found in by_phase.items():
            found.append(rows[trace.phase[start:stop] == phase])
    notes: list[str] = []
    prompt_phase = PREFILL
    if prompts_needed and not any(len(r) for r in by_phase[PREFILL]):
        if use.prefill != "decode":
            raise InputError("trace.prefill", expected="prefill rows for the prompt", got="a trace of decode rows only",
                             fix='set trace.prefill to "decode" to route prompts by decode rows, or workload.prompt_tokens to 0')  # fmt: skip
        prompt_phase = DECODE
        notes.append("prompts routed by decode rows (the trace has no prompt routing)")
    if prompt_phase == DECODE:  # answers go on where the prompts stopped
        both = _slots(by_phase[DECODE], batch, prompts_needed + answers_needed, use, "output_tokens", notes)
        prompts, answers = both[:, :prompts_needed], both[:, prompts_needed:]
    else:
        if use.sequences == "exact" and prompts_needed:  # a slot's answer is that of its own prompt
            whole = [len(p) >= prompts_needed and len(a) >= answers_needed for p, a in zip(*by_phase.values(), strict=True)]
            if sum(whole) < batch:
                raise InputError("workload.prompt_tokens", expected=f"{batch} sequences of that many prompt rows and {answers_needed} answer rows",
                                 got=f"{sum(whole)} of {len(whole)} in the trace's evaluation part", fix='set trace.sequences to "chain" or "repeat", or ask for less')  # fmt: skip
            by_phase = {phase: [rows for rows, fits in zip(found, whole, strict=True) if fits] for phase, found in by_phase.items()}
        prompts = _slots(by_phase[PREFILL], batch, prompts_needed, use, "prompt_tokens", notes)
        answers = _slots(by_phase[DECODE], batch, answers_needed, use, "output_tokens", notes)
    return Steps(prompts, answers, workload.prefill_chunk, workload.cached_tokens, tuple(dict.fromkeys(notes)))


def _slots(sequences: list[NDArray[np.int64]], batch: int, needed: int, use: TraceUse, field: str, notes: list[str]) -> NDArray[np.int64]:
    """Return (batch, needed) rows: slot i takes sequence i, and where that is too short goes on as the scenario allows."""
    out = np.zeros((batch, needed), np.int64)
    if needed == 0:
        return out
    usable = [s for s in sequences if len(s)]
    if use.sequences == "exact":
        long_enough = [s for s in usable if len(s) >= needed]
        if len(long_enough) < batch:
            longest = max((len(s) for s in usable), default=0)
            raise InputError(f"workload.{field}", expected=f"at most {longest} tokens for {batch} sequences of the trace's evaluation part ({len(usable)} sequences)",
                             got=str(needed), fix='set trace.sequences to "chain" or "repeat", or ask for less')  # fmt: skip
        for i in range(batch):
            out[i] = long_enough[i][:needed]
        return out
    for i in range(batch):
        stream = np.concatenate([s for s in usable[i::batch]] or [np.zeros(0, np.int64)])
        if len(stream) < needed and use.sequences != "repeat" or not len(stream):
            raise InputError(f"workload.{field}", expected=f"at most {len(stream)} tokens for each of {batch} sequences", got=str(needed),
                             fix='set trace.sequences to "repeat", or ask for less')  # fmt: skip
        if len(stream) < needed:
            notes.append(f"rows repeated: {needed} tokens of {field} from {len(stream)} rows of the trace")
        elif len(usable[i]) < needed:
            notes.append(f"{field}: rows of successive sequences chained")
        out[i] = np.resize(stream, needed)
    return out
