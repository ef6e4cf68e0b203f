"""Owns what flows into a real run: the tokens of each step, the experts that the trace forces, and room for what comes out.

Micro-batches are told apart as the planner made them: an equal split of the sequences. It must not know slots, threads or clocks.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesim.engines.real_layers import Batch
from moesim.engines.real_weights import Weights
from moesim.schedule import Fragment
from moesim.simulate import Case
from moesim.workload import Step

Ints = NDArray[np.int64]


class Pass:
    """One step of one micro-batch.

    Parameters
    ----------
    batch : Batch
        Its activations.
    first, past : int
        Its first sequence, and the tokens of each sequence that came before.
    tokens : (T,) Tensor
    ids : (L, T, K) array
        Forced experts, -1 where absent.
    own : (T, L, K) Tensor
        Receives the router's choice.
    """

    def __init__(self, batch: Batch, first: int, past: int, tokens: Tensor, ids: Ints, own: Tensor) -> None:
        self.batch, self.first, self.past, self.tokens, self.ids, self.own = batch, first, past, tokens, ids, own
        missing = ids < 0
        self.absent = torch.from_numpy(missing) if missing.any() else None
        self.forced = torch.from_numpy(np.where(missing, 0, ids))


class Inputs:
    """Inputs and outputs of a whole run.

    Parameters
    ----------
    case : Case
    n_steps : int
        Steps that were planned: less than the workload's where memory runs out.
    weights : Weights
        Knows the text, if there is one; else tokens are drawn.

    Attributes
    ----------
    forced, own : (T, L, K)
        The trace's experts (array) and the router's own (Tensor), token by token of the run.
    tokens_out : (N,) Tensor
        The likeliest token wherever a sequence gets one.
    logits : (N, V) Tensor or None
        Kept where the text is known.
    targets : (N,) array
        The text's next token, -1 where it is not known.
    """

    def __init__(self, case: Case, n_steps: int, weights: Weights) -> None:
        model, routing, seed, batch = case.model, case.routing, case.scenario.seed, case.scenario.workload.batch
        self.steps = list(islice(routing.steps, n_steps))
        self.moe_index = {layer: i for i, layer in enumerate(model.moe_layers)}
        self._ids, self._model = routing.used.expert_ids, model
        self._parts = np.array_split(np.arange(batch), min(case.scenario.pipeline.micro_batches, batch))
        self.forced = np.zeros((sum(step.tokens for step in self.steps), len(self.moe_index), model.top_k), np.int64)
        self.own = torch.zeros(self.forced.shape, dtype=torch.int64)
        n_out = sum(step.emits for step in self.steps)
        self.tokens_out = torch.zeros(n_out, dtype=torch.int64)
        text = weights.text(routing.used)
        self.logits = None if text is None else torch.zeros(n_out, model.vocab_size)
        self.targets = np.full(n_out, -1, np.int64)
        if text is None:
            self._tokens = np.random.default_rng([seed, 2]).integers(0, model.vocab_size, routing.used.n_rows)
        else:
            self._tokens = text[:, 0]
            if n_out and not case.scenario.workload.cached_tokens:  # after random context no text is likely
                self.targets = np.concatenate([text[step.rows[:, -1], 1] for step in self.steps if step.emits])
        self._batches: dict[tuple[int, int, int], Batch] = {}

    def passes(self, step: Step, row: int) -> list[Pass]:
        """Return the micro-batches of a step; ``row`` is the number of its first token in the run."""
        out, first = [], 0
        for number, part in enumerate(self._parts):
            rows = step.rows[part].ravel()
            shape = (number, len(part), step.rows.shape[1])
            batch = self._batches.get(shape)
            if batch is None:
                batch = self._batches[shape] = Batch(*shape[1:], self._model.hidden_size, self._model.top_k)
            mine = slice(row, row + len(rows))
            self.forced[mine] = self._ids[rows]
            ids = np.ascontiguousarray(self.forced[mine].transpose(1, 0, 2))
            out.append(Pass(batch, first, step.context, torch.from_numpy(self._tokens[rows]), ids, self.own[mine]))
            first, row = first + len(part), row + len(rows)
        return out

    def owners(self, fragment: Fragment) -> dict[int, int]:
        """Return the micro-batch of each expert FFN: the accesses of a layer come micro-batch by micro-batch."""
        out: dict[int, int] = {}
        seen: dict[tuple[int, int], int] = defaultdict(int)
        borders: dict[tuple[int, int], Ints] = {}
        for step, layer, _, _, task, _ in fragment.access.tolist():
            place = (step, layer)
            if place not in borders:
                chosen = [self._ids[self.steps[step].rows[part], self.moe_index[layer]] for part in self._parts]
                borders[place] = np.cumsum([len(np.unique(ids[ids >= 0])) for ids in chosen])
            out[task] = int(np.searchsorted(borders[place], seen[place], side="right"))
            seen[place] += 1
        return out
