"""Owns the figures of a text and their intervals: documents are drawn anew within each domain (bootstrap), the same draws for every plan.

Bits per byte of a domain are its loss over its bytes (bits per token where bytes are not known); the figure of a text is the unweighted mean over
its domains. A change is relative to another evaluation of the same documents, draw by draw, so that what makes a document hard cancels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesim.quality.evaluate import Evaluation
from moesim.quality.text import Text

DRAWS = 2000
LEVEL = 0.95
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with a 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: Floats) -> Figure:
        low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
        return cls(float(value), low, high)


class Bootstrap:
    """Draws of a text's documents.

    Parameters
    ----------
    text : Text
    seed : int
    """

    def __init__(self, text: Text, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, 3])
        domains = np.array(text.domains)
        self.names = list(dict.fromkeys(text.domains))
        self._bytes = np.array(text.byte_counts, np.float64) if text.has_bytes else None
        # (draws + 1, D) how often each document is drawn; row 0 is the text as it is
        self._times = np.zeros((DRAWS + 1, len(domains)))
        self._times[0] = 1
        self._of = {name: np.flatnonzero(domains == name) for name in self.names}
        for members in self._of.values():
            drawn = rng.integers(len(members), size=(DRAWS, len(members)))
            for place, document in enumerate(members):
                self._times[1:, document] = (drawn == place).sum(1)

    def bits(self, it: Evaluation) -> dict[str, Floats]:
        """Bits per byte (or token) of each domain and their ``mean``, (draws + 1,); the first is the text's own."""
        per = it.tokens.sum(1).astype(np.float64) if self._bytes is None else self._bytes
        loss = it.loss.sum(1) / np.log(2)
        out = {name: self._times[:, m] @ loss[m] / (self._times[:, m] @ per[m]) for name, m in self._of.items()}
        return out | {"mean": np.mean(list(out.values()), axis=0)}

    def figure(self, it: Evaluation) -> Figure:
        """Bits per byte of the text."""
        found = self.bits(it)["mean"]
        return Figure.of(found[0], found[1:])

    def change(self, it: Evaluation, base: Evaluation) -> Figure:
        """Relative change of bits per byte against another evaluation, in percent."""
        found = 100 * (self.bits(it)["mean"] / self.bits(base)["mean"] - 1)
        return Figure.of(found[0], found[1:])

    def difference(self, it: Evaluation, other: Evaluation, base: Evaluation) -> Figure:
        """How much more one loses than another, both against a base, in percentage points."""
        found = 100 * (self.bits(it)["mean"] - self.bits(other)["mean"]) / self.bits(base)["mean"]
        return Figure.of(found[0], found[1:])

    def recovered(self, it: Evaluation, low: Evaluation, base: Evaluation) -> Figure:
        """Share of the loss of ``low`` that ``it`` does not have, in percent."""
        lost = self.bits(low)["mean"] - self.bits(base)["mean"]
        found = 100 * (self.bits(low)["mean"] - self.bits(it)["mean"]) / lost
        return Figure.of(found[0], found[1:])
