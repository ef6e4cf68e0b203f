"""Owns which requests come: when each arrives, how long its prompt and its answer are, which prefix it shares.

Arrivals come from one stream (the scenario's ``seed``), lengths and prefix groups from two others (``content_seed``), so each can change
alone. At another rate the same draws are stretched, so that the points of a curve over rates differ in the rate and in nothing else.

    poisson  gaps = E / rate,         E standard exponential
    gamma    gaps = G / (b * rate),   G standard gamma of shape b (burstiness); variance of the gaps: 1 / (b rate^2)
    lognormal lengths = exp(ln(mean) - sigma^2 / 2 + sigma * N), rounded, cut to low..high
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.serving.request_files import FileRequests, read_requests
from moesim.serving_spec import Lengths, Serving

Ints = NDArray[np.int64]
ARRIVALS, LENGTHS, GROUPS = 10, 11, 12  # streams beside those of routing (no number) and jitter (1)
PS_PER_S = 1e12
LATEST_S = 9e6  # int64 picoseconds end a little later


@dataclass(frozen=True, eq=False)
class Requests:
    """All requests of a run, by number (R,). ``arrival_ps`` is None in a closed loop of ``users``."""

    prompt: Ints
    output: Ints
    group: Ints  # of a shared prefix, -1 where there is none
    arrival_ps: Ints | None
    users: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompt)


def draw_requests(spec: Serving, seed: int, base: Path | None = None, where: str = "") -> Requests:
    """Draw the requests of a scenario.

    Parameters
    ----------
    spec : Serving
    seed : int
        Of the arrivals.
    base : Path, optional
        Folder that a file of requests is looked up in, beside the working folder.
    where : str
        Place of the file's name, for messages.

    Raises
    ------
    InputError
        If a file is not there, is wrong, or has no times where they are asked for; if a run would last too long.
    """
    n, notes = spec.requests, list[str]()
    lengths = np.random.default_rng([spec.content_seed, LENGTHS])
    times: Ints | None = None
    if spec.file:
        path = _find(spec.file, base, where)
        found = read_requests(path, spec.format)
        notes += found.notes
        prompt, output = found.prompt, found.output
        if spec.arrivals.process == "file":
            times = _file_times(found, path)
            if len(times) < n:
                notes.append(f"{len(times)} requests, as many as {path.name} has")
            prompt, output, times = prompt[:n], output[:n], times[:n]
        else:
            rows = lengths.integers(0, len(prompt), n)
            prompt, output = prompt[rows], output[rows]
            notes.append(f"lengths of {n} requests drawn from {len(found.prompt)} of {path.name}, prompt and answer together")
    else:
        prompt, output = draw_lengths(spec.prompt, n, lengths), draw_lengths(spec.output, n, lengths)
    n = len(prompt)
    group = np.full(n, -1, np.int64)
    if spec.prefix_tokens:
        chosen = np.random.default_rng([spec.content_seed, GROUPS]).integers(0, spec.prefix_groups, n)
        group = np.where(prompt > spec.prefix_tokens, chosen, -1)
        if (group < 0).any():
            notes.append(f"{int((group < 0).sum())} prompts of at most {spec.prefix_tokens} tokens share no prefix")
    closed = spec.arrivals.process == "concurrency"
    arrival = None if closed else arrivals(spec, n, np.random.default_rng([seed, ARRIVALS]), times)
    return Requests(prompt, output, group, arrival, spec.arrivals.concurrency if closed else 0, tuple(notes))


def _find(name: str, base: Path | None, where: str) -> Path:
    for path in (Path(name), *([base / name] if base is not None else [])):
        if path.is_file():
            return path
    raise InputError("serving.file", expected="a file of requests", got=f'"{name}"', where=where)


def _file_times(found: FileRequests, path: Path) -> Ints:
    if found.arrival_ps is None:
        raise InputError(
            "serving.arrivals.process", expected="one that draws arrivals, as the file has no times", got="file", where=str(path)
        )
    return found.arrival_ps


def draw_lengths(spec: Lengths, n: int, rng: np.random.Generator) -> Ints:
    """Draw lengths in tokens, (n,)."""
    if spec.distribution == "fixed":
        return np.full(n, spec.mean, np.int64)
    if spec.distribution == "uniform":
        return rng.integers(spec.low, spec.high + 1, n)
    drawn = np.exp(math.log(spec.mean) - spec.sigma**2 / 2 + spec.sigma * rng.standard_normal(n))
    return np.clip(np.rint(drawn), spec.low, spec.high).astype(np.int64)


def arrivals(spec: Serving, n: int, rng: np.random.Generator, times: Ints | None = None) -> Ints:
    """Arrival times in picoseconds, ascending, (n,): drawn, or those of a file, stretched to the mean rate where one is stated."""
    how, rate = spec.arrivals, spec.arrivals.requests_per_s
    if times is not None:
        if rate is None:
            return times
        span = int(times[-1] - times[0])
        if n < 2 or span == 0:
            raise InputError("serving.arrivals.requests_per_s", expected="none for requests that all arrive at once", got=f"{rate:g}")
        return _whole((times - times[0]) / span * (n - 1) / rate)
    gaps = rng.standard_exponential(n) if how.process == "poisson" else rng.standard_gamma(how.burstiness, n) / how.burstiness
    return _whole(np.cumsum(gaps) / (rate or 1.0))


def _whole(seconds: NDArray[np.float64]) -> Ints:
    if seconds[-1] > LATEST_S:
        raise InputError(
            "serving.arrivals", expected="arrivals within 104 days", got=f"{seconds[-1] / 86400:.3g} days", fix="raise the rate"
        )
    return np.ceil(seconds * PS_PER_S).astype(np.int64)


def at_rate(spec: Serving, rate: float) -> Serving:
    """The same with another mean rate of arrivals, requests/s."""
    process = "poisson" if spec.arrivals.process == "concurrency" else spec.arrivals.process
    return spec.model_copy(update={"arrivals": spec.arrivals.model_copy(update={"process": process, "requests_per_s": rate})})


def at_concurrency(spec: Serving, users: int) -> Serving:
    """The same with a closed loop of users."""
    changed = {"process": "concurrency", "concurrency": users, "requests_per_s": None, "burstiness": 1.0}
    return spec.model_copy(update={"arrivals": spec.arrivals.model_copy(update=changed)})
