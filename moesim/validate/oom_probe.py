"""Owns one real run in a process of its own under a memory limit: the probe of ``moesim validate --oom``, ``python -m moesim.validate.oom_probe``.

The limit is RLIMIT_DATA: the kernel refuses any mapping of private writable memory (heap, arenas, stacks of threads) beyond it, to the
page, so that the run itself can say what it lacked; no privilege is needed, and nothing outside the process is touched. It is set before
anything of weight is imported. A reserve is held until all that is planned lies in memory: a run that lacks the last few megabytes
would else fail where threads start or kernels are compiled, in native code that cannot say why. The answer is one line of JSON on
stdout: how the run ended, and the most memory that it held, the reserve included.
"""

from __future__ import annotations

import json
import mmap
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.errors import EXIT_DOES_NOT_FIT, DoesNotFit, InputError, MoesimError

SAMPLE_S = 0.003
RESERVE_BYTES = 64 << 20  # five threads with stacks of 8 MB, and 3 MB of a small run (torch 2.13)
REFUSED = (
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "bad_alloc",
    "can't start new thread",
    "Thread creation failed",
)


@dataclass(frozen=True, slots=True)
class _Planned:
    """As much of a result as a real run takes: its schedule."""

    schedule: Any


def data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it.

    Raises
    ------
    InputError
        Where the system does not say.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise InputError("--oom", expected="a system that tells a process its memory (/proc/self/status)", got=sys.platform)


class _Peak:
    """The most memory that was held while it ran, by looking every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = data_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.bytes = max(self.bytes, data_bytes())

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.bytes


def ran_out(error: BaseException) -> bool:
    """Whether an error, or what caused it, means that memory was refused."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (MemoryError, DoesNotFit)) or any(text in str(seen) for text in REFUSED):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def run_once(scenario: str, assignments: tuple[str, ...], folder: Path) -> None:
    """Plan a scenario and run it for real, once."""
    from moesim.engines.real import run  # torch comes after the limit
    from moesim.schedule import Schedule
    from moesim.simulate import load_case
    from moesim.validate.case import Stores, prepare

    case = load_case(scenario, assignments)
    reserve = mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    planner = case.planner()
    schedule = Schedule(planner.lanes, planner.tiers, planner.lines, fragments=list(planner.fragments()))
    with prepare(case, _Planned(schedule), Stores(folder).get(case)) as real:  # type: ignore[arg-type]
        reserve.close()
        run(real.program)


def main(text: str, work: Callable[[str, tuple[str, ...], Path], None] = run_once) -> int:
    """Run what a JSON text asks for under its limit, and print how it ended; 3 if memory ran out.

    Parameters
    ----------
    text : str
        ``scenario``, ``assignments``, ``folder`` of the stores, ``limit_bytes`` (null: none).
    work : callable
        What is run.
    """
    asked = json.loads(text)
    if asked["limit_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (asked["limit_bytes"], asked["limit_bytes"]))
    out: dict[str, Any] = {"outcome": "ran", "message": ""}
    code = 0
    try:
        peak = _Peak()
        work(asked["scenario"], tuple(asked["assignments"]), Path(asked["folder"]))
        out["peak_bytes"] = peak.end()
    except Exception as error:
        if not ran_out(error):
            out |= {"outcome": "failed", "message": f"{type(error).__name__}: {error}"}
            code = error.exit_code if isinstance(error, MoesimError) else 1
        else:
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            held, limit = f"{data_bytes():,} B held", asked["limit_bytes"]
            out |= {"outcome": "out of memory", "message": f"out of memory: {held}{f' of {limit:,} B' if limit else ''} ({why})"}
            code = EXIT_DOES_NOT_FIT
    print(json.dumps(out), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
