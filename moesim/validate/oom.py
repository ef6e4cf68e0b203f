"""Owns the out-of-memory points: predicted by the ledger, measured by bisection in child processes under a true limit.

Three dimensions of one plan: context length, batch, resident experts. Each is raised until a real run ends for want of memory. The ledger's
prediction has a line for the runtime: what a process holds besides the plan (interpreter, torch, threads, compiled code), measured once on
a small run without a limit. A run that ends so has to say what it lacked, and to leave files and other processes as they were.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.errors import InputError, MoesimError
from moesim.ledger import largest
from moesim.simulate import Case
from moesim.validate.oom_probe import REFUSED
from moesim.validate.suite import Entry

PROBE_S = 120.0  # a probe that has not ended by then never will
TIER = "ram"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as workers compute; a pool of threads beside them would end the process where it cannot start
SMALL = (
    'trace={"generate": "uniform"}',
    'workload={"output_tokens": 2, "cached_tokens": 16}',
    "memory.context_tokens=1024",
)  # what all probes have in common

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Dimension:
    """What is raised until memory runs out."""

    name: str
    unit: str
    path: str  # what is set
    room_bytes: int  # of the limit, beyond the runtime
    resolution: float  # relative step at which bisection ends; at least one unit

    def assignments(self, n: int) -> tuple[str, ...]:
        return (f"{self.path}={n}",)


DIMENSIONS = (
    Dimension("context_tokens", "tokens", "memory.context_tokens", 1 << 30, 0.005),
    Dimension("batch", "sequences", "workload.batch", 1 << 30, 0.0),
    Dimension("resident_experts", "experts per layer", f"placement.pools.{TIER}.hold", 320 << 20, 0.0),
)


@dataclass(frozen=True, slots=True)
class Point:
    """An out-of-memory point: the largest count that fits."""

    dimension: str
    unit: str
    predicted: int
    measured: int
    limit_bytes: int
    runtime_bytes: int
    probes: int
    message: str  # of the smallest run that failed
    peak_bytes: int  # of the largest run that did not
    untouched: bool  # files and another process, after all failed runs

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Probe:
    """How one child process ended."""

    fits: bool
    message: str
    peak_bytes: int


def probe(scenario: Path, assignments: Sequence[str], folder: Path, limit_bytes: int | None) -> Probe:
    """Run a scenario in a child process under a limit.

    Raises
    ------
    MoesimError
        If the run ended for another reason than memory.
    """
    asked = {"scenario": str(scenario), "assignments": list(assignments), "folder": str(folder), "limit_bytes": limit_bytes}
    command = [sys.executable, "-m", "moesim.validate.oom_probe", json.dumps(asked)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL, check=False, env=os.environ | ONE_THREAD
        )
    except subprocess.TimeoutExpired:
        raise MoesimError(f"--oom: a probe did not end within {PROBE_S:.0f} s") from None
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:
        found = {}
    if found.get("outcome") == "ran":
        return Probe(True, "", int(found["peak_bytes"]))
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if found.get("outcome") == "out of memory":
        return Probe(False, found["message"], 0)
    if limit_bytes is not None and any(text in done.stderr for text in ("MemoryError", *REFUSED)):
        return Probe(False, f"out of memory: {last}", 0)
    raise MoesimError(f"--oom: a probe failed with exit code {done.returncode}: {found.get('message') or last}")


def bisect(fits: Callable[[int], bool], guess: int, least: int, most: int, step: int = 1) -> int:
    """Return a count that fits such that one at most ``step`` above it does not, in least..most; least - 1 if nothing fits.

    It brackets the guess, wider and wider until one end fits and the other does not, so a wrong guess costs probes, not truth. Beyond
    ``most`` nothing fits.
    """
    width = max(step, round(0.02 * guess), 1)
    low, high = max(guess - width, least), min(guess + width, most + 1)
    while low >= least and not fits(low):
        high, low, width = low, max(low - 2 * width, least) if low > least else least - 1, 2 * width
    while high <= most and high > low and fits(high):
        low, high, width = high, min(high + 2 * width, most + 1), 2 * width
    while high - low > step:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Bench:
    """One machine with little memory on which plans are tried.

    Parameters
    ----------
    entry : Entry
        Its scenario is what is run, with a few tokens.
    profile : Path
        The measured machine.
    folder : Path
        Where its expert store lies, built already.
    """

    def __init__(self, entry: Entry, profile: Path, folder: Path) -> None:
        self.entry, self.profile, self.folder = entry, profile, folder
        small = self.load(())
        if set(small.layout.pools) != {TIER}:
            raise InputError("--oom", expected=f"a scenario whose experts lie in {TIER} alone", got=", ".join(small.layout.pools) or "none")
        self.hold = max(small.model.n_experts // 4, 1)
        self.n_experts = small.model.n_experts
        self.runtime_bytes = self._runtime_bytes()

    def load(self, assignments: Sequence[str]) -> Case:
        """The small case with changes."""
        return Entry(self.entry.name, self.entry.scenario, (*SMALL, *assignments), self.entry.where).load(self.profile)

    def _runtime_bytes(self) -> int:
        """What a process holds besides the plan; of two small runs the lesser, as the first may have to compile."""
        case = self.load(self._held())
        peaks = [self.probe((), None).peak_bytes for _ in range(2)]
        return min(peaks) - case.layout.ledger.planned_bytes(TIER)

    def _held(self) -> tuple[str, ...]:
        return (f"placement.pools.{TIER}.hold={self.hold}",)

    def probe(self, assignments: Sequence[str], limit_bytes: int | None) -> Probe:
        """Run the small case with changes under a limit."""
        changes = (*SMALL, *self._held(), *assignments, f"hardware={json.dumps(str(self.profile.resolve()))}")
        return probe(self.entry.scenario, changes, self.folder, limit_bytes)

    def predicted(self, dimension: Dimension, limit_bytes: int, most: int) -> int:
        """The largest count at which the ledger fits under a limit, runtime included."""
        machine = (f"memory.runtime={self.runtime_bytes} B", f"hardware_set.tiers.{TIER}.capacity={limit_bytes} B")

        def fits(n: int) -> bool:
            case = self.load((*self._held(), *machine, *dimension.assignments(max(n, 1))))
            return case.layout.ledger.left_bytes(TIER) >= 0

        return largest(fits, most)

    def point(self, dimension: Dimension) -> Point:
        """Predict and measure one out-of-memory point."""
        most = self.n_experts if dimension.path.endswith(".hold") else 1 << 20
        limit_bytes = self.runtime_bytes + dimension.room_bytes
        guess = self.predicted(dimension, limit_bytes, most)
        seen: dict[int, Probe] = {}

        def fits(n: int) -> bool:
            if n not in seen:
                seen[n] = self.probe(dimension.assignments(n), limit_bytes)
            return seen[n].fits

        before = _listing(self.folder)
        with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as bystander:
            found = bisect(fits, max(guess, 1), 1, most, max(1, int(dimension.resolution * guess)))
            untouched = bystander.poll() is None and _listing(self.folder) == before
            bystander.communicate()
        failed = min((n for n, it in seen.items() if not it.fits), default=None)
        return Point(
            dimension.name, dimension.unit, guess, found, limit_bytes, self.runtime_bytes, len(seen),
            seen[failed].message if failed is not None else "", seen[found].peak_bytes if found in seen else 0, untouched,
        )  # fmt: skip


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a folder's files."""
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())


def find_points(entry: Entry, profile: Path, folder: Path, progress: Progress = lambda *_: None) -> list[Point]:
    """Predict and measure the out-of-memory points of a scenario in all dimensions.

    Raises
    ------
    InputError
        If the scenario's experts do not lie in main memory alone, or the system sets no such limits.
    MoesimError
        If a probe fails for another reason than memory.
    """
    progress("memory of the runtime", 0, len(DIMENSIONS) + 1)
    bench = Bench(entry, profile, folder)
    out = []
    for i, dimension in enumerate(DIMENSIONS):
        progress(f"out-of-memory point: {dimension.name}", i + 1, len(DIMENSIONS) + 1)
        out.append(bench.point(dimension))
    return out
