"""Owns asking one case many times over: its speed on other machines, by re-timing where the schedule stays, by planning anew where not.

Speed is what the run is about: decode tokens/s of one sequence where it decodes, else prefill tokens/s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from moesim.cost import CostModel
from moesim.engines.retime import retime
from moesim.errors import InputError
from moesim.hardware import HardwareProfile
from moesim.host.cores import cores
from moesim.metrics import PS
from moesim.schedule import Ints, Schedule
from moesim.simulate import Case, Result, simulate
from moesim.whatif.figures import on

AT_A_TIME = 64  # machines whose costs are held at once
WORTH_PROCESSES_S = 5.0  # of planning anew


def speed(steps: Ints, end_ps: Ints) -> float:
    """Return tokens/s from the rows of steps and their ends: as ``metrics.latency`` does, decode first; nan where nothing was counted."""
    emits = steps[:, 5] > 0
    at = end_ps[emits] * PS
    if len(at) > 1:
        return float((len(at) - 1) / (at[-1] - at[0]))
    prefill = steps[:, 3] == 0
    return float(steps[prefill, 4].sum() / (end_ps[prefill].max() * PS)) if prefill.any() else float("nan")


def speed_of(result: Result) -> float:
    """Return the speed of a result; nan where nothing ran."""
    return speed(result.meter.steps, result.meter.step_end_ps) if result.meter is not None and result.oom is None else float("nan")


class Replay:
    """One case, and its schedule once it is planned.

    Parameters
    ----------
    case : Case
        It is run by the compiled engine, whose times are the reference's.
    result : Result, optional
        Of the case, where it ran already.
    """

    def __init__(self, case: Case, result: Result | None = None) -> None:
        self.case = on(case, case.hardware, case.scenario.model_copy(update={"engine": "fast"}))
        self._known = result

    @cached_property
    def result(self) -> Result:
        """The case as it stands, measured."""
        return self._known or simulate(self.case, keep=False)

    @cached_property
    def speed(self) -> float:
        return speed_of(self.result)

    @cached_property
    def schedule(self) -> Schedule:
        if self.result.kept is not None:
            return self.result.schedule
        planner = self.case.planner()
        return Schedule(planner.lanes, planner.tiers, planner.lines, self.case.layout.depends_on, list(planner.fragments()))

    def speeds(self, machines: Sequence[HardwareProfile]) -> list[float]:
        """Return tokens/s on machines that differ from the case's in figures that only price work."""
        timing = self.case.scenario.timing
        if self.case.layout.depends_on != {"trace"} or timing.jitter or timing.background:
            return self._planned_anew([on(self.case, machine) for machine in machines])
        steps = np.concatenate([f.steps for f in self.schedule.fragments])
        out: list[float] = []
        for first in range(0, len(machines), AT_A_TIME):
            models = [CostModel(machine) for machine in machines[first : first + AT_A_TIME]]
            costs = [[model.costs(fragment) for fragment in self.schedule.fragments] for model in models]
            out += [speed(steps, ends) for ends in retime(self.schedule, costs).step_end_ps]
        return out

    def _planned_anew(self, cases: Sequence[Case]) -> list[float]:
        """Run cases on all cores where that saves more than starting processes costs."""
        began = time.perf_counter()
        out = [self.again(case) for case in cases[:1]]
        expected_s = (time.perf_counter() - began) * (len(cases) - 1)
        if expected_s < WORTH_PROCESSES_S or cores() == 1:
            return out + [self.again(case) for case in cases[1:]]
        import joblib

        return out + list(joblib.Parallel(n_jobs=cores(), batch_size=1)(joblib.delayed(Replay.again)(case) for case in cases[1:]))

    @staticmethod
    def again(case: Case) -> float:
        """Return tokens/s of a case that is planned anew; nan where it does not fit or cannot be."""
        try:
            return speed_of(simulate(case, keep=False))
        except InputError:
            return float("nan")
