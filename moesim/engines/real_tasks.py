"""Owns the operations of a real run that touch slots: loading an expert, running one. Each checks that the right expert lies there.

A slot's tag says which expert was really loaded into it, by which task, and whether it has been used; only loads that ran set it. An FFN
compares the tag with the expert that the schedule means, then the bytes with the expert's fingerprint. So a wrong slot, a load that was
skipped and one that read too little all stop the run. Everything is looked up beforehand; a call does nothing but the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moesim.engines.real_layers import Batch, ffn
from moesim.engines.real_slots import Key
from moesim.engines.real_weights import Matrix
from moesim.errors import MoesimError
from moesim.expert_store import ExpertStore
from moesim.schedule import Outcome

NOBODY: Key = (-1, -1)
AT_START = -1


class WrongExpert(MoesimError):
    """A slot does not hold the expert that a task means."""


class Tag:
    """What lies in a slot."""

    __slots__ = ("key", "prefetched", "task", "used")

    def __init__(self) -> None:
        self.hold(NOBODY, AT_START, False)

    def hold(self, key: Key, task: int, prefetched: bool) -> None:
        """Note that ``task`` has brought an expert."""
        self.key, self.task, self.prefetched, self.used = key, task, prefetched, False


class SlotCheck:
    """Compares a slot's bytes with an expert's fingerprint; raises an InputError that names what is there instead."""

    __slots__ = ("bytes", "expected", "fingerprint", "key", "store")

    def __init__(self, store: ExpertStore, key: Key, slot: NDArray[np.uint8]) -> None:
        self.store, self.key, self.bytes = store, key, slot
        self.fingerprint, self.expected = store.plan(key[0]).fingerprint_of, store.fingerprint(*key)

    def __call__(self) -> None:
        if self.fingerprint(self.bytes) != self.expected:
            self.store.check(*self.key, self.bytes)


class LoadTask:
    """Brings one expert into a slot: ``move`` does, and returns the bytes that it moved."""

    __slots__ = ("evicted", "key", "move", "prefetch", "source", "tag", "task")

    def __init__(self, task: int, key: Key, tag: Tag, source: Tag | None, move: Callable[[], int], prefetch: bool) -> None:
        self.task, self.key, self.tag, self.source, self.move, self.prefetch = task, key, tag, source, move, prefetch
        self.evicted = False

    def __call__(self) -> int:
        tag, source = self.tag, self.source
        if source is not None and source.key != self.key:
            raise WrongExpert(f"expected {_expert(self.key)} in the slot that is copied, found {_expert(source.key)}")
        self.evicted = tag.key is not NOBODY and tag.key != self.key
        tag.key = NOBODY
        moved = self.move()
        tag.hold(self.key, self.task, self.prefetch)
        return moved


class ExpertTask:
    """Runs one expert on the tokens that chose it.

    Parameters
    ----------
    key : (int, int)
    tag : Tag
        Of the slot it lies in.
    check : callable
        Raises unless the slot's bytes are the expert's.
    matrices : tuple
        Gate (or None), up, down: views of the slot.
    batch : Batch
    tokens : Tensor, optional
        (n,) rows of the batch that chose it; None: all of them.
    target : Tensor
        (n,) rows of ``Batch.rows`` that receive the result; of a single token the row itself, (1, D).
    """

    __slots__ = ("batch", "check", "down", "gate", "key", "outcome", "single", "tag", "target", "tokens", "up")

    def __init__(
        self, key: Key, tag: Tag, check: Callable[[], None], matrices: tuple[Matrix | None, Matrix, Matrix], batch: Batch,
        tokens: Tensor | None, target: Tensor,
    ) -> None:  # fmt: skip
        self.key, self.tag, self.check, self.batch = key, tag, check, batch
        self.gate, self.up, self.down = matrices
        self.tokens, self.target, self.single = tokens, target, target.dim() == 2
        self.outcome = Outcome.MISS

    def __call__(self) -> None:
        tag, batch = self.tag, self.batch
        if tag.key != self.key:
            raise WrongExpert(f"expected {_expert(self.key)} in its slot, found {_expert(tag.key)}")
        self.check()
        if tag.used or tag.task == AT_START:
            self.outcome = Outcome.CACHE
        else:
            self.outcome = Outcome.PREFETCH if tag.prefetched else Outcome.MISS
        tag.used = True
        h = batch.h if self.tokens is None else batch.h.index_select(0, self.tokens)
        done = ffn(self.gate, self.up, self.down, h)
        if self.single:
            self.target.copy_(done)
        else:
            batch.rows.index_copy_(0, self.target, done)


class Together:
    """Several loads, or several experts, in one task."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[LoadTask | ExpertTask]) -> None:
        self.parts = tuple(parts)

    def __call__(self) -> int:
        return sum(part() or 0 for part in self.parts)


def _expert(key: Key) -> str:
    return f"layer {key[0]}, expert {key[1]}" if key != NOBODY else "no expert"
