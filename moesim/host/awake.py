"""Owns keeping the processor's cores awake while something is measured.

A core that sleeps between tasks wakes slowly and then runs slowly for milliseconds: on a virtual machine a task that waited for another
thread began 100 us late, and tasks after a wait of 8 ms took 30 % longer (measured on two virtual cores of a server). A process of
idle priority on each core, which gives way at once to whatever has work, keeps the clock up, as the kernel's ``idle=poll`` would. It
takes no part in the run: workers wait for each other on locks as before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(100000):
        pass
"""


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keep the cores that this process may use awake; where the system has no idle priority, do nothing."""
    if not hasattr(os, "SCHED_IDLE"):
        yield
        return
    spinners = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN, str(core), str(os.getpid())], stdin=subprocess.DEVNULL)
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()
