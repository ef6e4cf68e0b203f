"""Owns what somebody measured of an engine's CPU kernels on a machine: products by format and threads, operators, attention by cache.

A record states it as ``cpu.kernels``:

    products:   [{weights: Q4_0, repacked: true, threads: 1, decode_gmac_s: 32.0, prompt_gmac_s: 41.0}]
    operators:  [{threads: 1, us: 0.4}]
    attention:  [{cache: f16, flash: true, token_ns: 8.0, element_ns: 0.13, page_ns: 25.0}]

Products are multiply-adds per second of matrices that no cache holds, one row or many at a time. Attention of one query takes, for each
head and cached token, ``token_ns + width x element_ns + pages x page_ns``: the cache holds all heads of a token side by side, so that a
head steps from token to token by the width of all of them, and touches ``2 x step / page size`` new pages each time (keys and values).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moesim.backtest.data import Facts

PAGE_BYTES = 4096
PATH = ("cpu", "kernels")


@dataclass(frozen=True)
class CpuKernels:
    """Measured rates, in multiply-adds per second and seconds; by number of threads, more of them are taken to do what the most measured did."""

    decode: Mapping[tuple[str, bool], Mapping[int, float]]  # by format and whether weights are repacked
    prompt: Mapping[tuple[str, bool], Mapping[int, float]]
    operators: Mapping[int, float]
    attention: Mapping[tuple[str, bool], tuple[float, float, float]]  # by format of the cache and flash: s per token, element, page

    def products(self, weights: str, repacked: bool, threads: int, prompt: bool) -> float | None:
        """Return multiply-adds/s of a format, None where it was not measured."""
        found = (self.prompt if prompt else self.decode).get((weights, repacked))
        return found[_nearest(found, threads)] if found else None

    def operator_s(self, threads: int) -> float | None:
        """Return what one operator takes beside its work."""
        return self.operators[_nearest(self.operators, threads)] if self.operators else None

    def head_token_s(self, cache: str, flash: bool, width: int, step_bytes: float) -> float | None:
        """Return seconds of attention for one head and one cached token.

        Parameters
        ----------
        cache : str
            Format of the K/V cache.
        flash : bool
        width : int
            Elements of a head.
        step_bytes : float
            From a token's keys to the next one's.
        """
        found = self.attention.get((cache, flash))
        return found[0] + width * found[1] + 2 * step_bytes / PAGE_BYTES * found[2] if found else None


def _nearest(by_threads: Mapping[int, float], threads: int) -> int:
    """The most threads measured that are not more than those in use, or the fewest."""
    return max((n for n in by_threads if n <= threads), default=min(by_threads))


def kernels_of(facts: Facts) -> CpuKernels | None:
    """Return what a machine's record states, None where it states nothing."""
    decode: dict[tuple[str, bool], dict[int, float]] = {}
    prompt: dict[tuple[str, bool], dict[int, float]] = {}
    for i in range(len(facts.items(*PATH, "products"))):
        at = (*PATH, "products", i)
        key = facts.text(*at, "weights"), facts.get(*at, "repacked") is True
        threads = facts.whole(*at, "threads", default=1)
        for found, name in ((decode, "decode_gmac_s"), (prompt, "prompt_gmac_s")):
            rate = facts.number(*at, name)
            if rate:
                found.setdefault(key, {})[threads] = rate * 1e9
    operators = {}
    for i in range(len(facts.items(*PATH, "operators"))):
        at = (*PATH, "operators", i)
        operators[facts.whole(*at, "threads", default=1)] = (facts.number(*at, "us") or 0.0) * 1e-6
    attention = {}
    for i in range(len(facts.items(*PATH, "attention"))):
        at = (*PATH, "attention", i)
        token, element, page = ((facts.number(*at, f"{name}_ns") or 0.0) * 1e-9 for name in ("token", "element", "page"))
        attention[facts.text(*at, "cache"), facts.get(*at, "flash") is True] = token, element, page
    return CpuKernels(decode, prompt, operators, attention) if decode else None
