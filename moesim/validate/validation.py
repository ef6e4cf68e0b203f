"""Owns a whole validation: cases run and compared, out-of-memory points, what was measured where, and the verdict.

It needs torch, which is optional.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moesim import __version__
from moesim.calibrate.calibration import processor
from moesim.config import content_hash
from moesim.hardware import HardwareProfile, load_hardware
from moesim.host.cores import cores
from moesim.validate.case import Stores
from moesim.validate.comparison import Executed, compare
from moesim.validate.oom import find_points
from moesim.validate.run import execute
from moesim.validate.suite import Entry
from moesim.validate.verdict import summary

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Validation:
    """What a validation gave: its data in the shape of ``validate -o json``, and the runs behind it, for pictures."""

    data: dict[str, Any]
    executed: Sequence[Executed]

    @property
    def met(self) -> bool:
        """Whether all that could be judged is within tolerance."""
        return bool(self.data["summary"]["met"])

    def __repr__(self) -> str:
        return f"Validation({len(self.executed)} cases, {'within' if self.met else 'outside'} tolerance)"


def validate(
    suite: str,
    entries: Sequence[Entry],
    profile: Path,
    stores: Stores,
    repeats: int = 5,
    oom: bool = False,
    progress: Progress = lambda *_: None,
) -> Validation:
    """Validate cases on this machine.

    Parameters
    ----------
    suite : str
        What to call them.
    entries : sequence of Entry
    profile : Path
        The machine as ``moesim calibrate`` measured it.
    stores : Stores
        Expert stores, on the drive that was calibrated.
    repeats : int
        Runs of each case after the one that warms up.
    oom : bool
        Whether to find the out-of-memory points too, with the first case's scenario.
    progress : callable
        Told (what, done, all).

    Raises
    ------
    InputError
        If a case, or the profile, is wrong, or cannot be run for real.
    """
    machine = load_hardware(str(profile))
    cases = [entry.load(profile) for entry in entries]
    executed = execute(cases, stores, repeats, progress)
    rows = [compare(it) for it in executed]
    points = [it.as_dict() for it in find_points(entries[0], profile, stores.folder, progress)] if oom else []
    data = {
        "scenarios": rows,
        "oom": points,
        "summary": summary(rows, points),
        "provenance": provenance(suite, machine, repeats, cases[0].scenario.seed),
    }
    return Validation(data, executed)


def provenance(suite: str, machine: HardwareProfile, repeats: int, seed: int) -> dict[str, Any]:
    """Return where, when and with what a validation was made."""
    return {
        "suite": suite,
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "repeats": repeats,
        "seed": seed,
        "profile": machine.name,
        "profile_hash": content_hash(machine),
        "machine": {
            "processor": processor(),
            "cores": cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
