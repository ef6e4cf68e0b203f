"""Owns a sweep from its file to its answer: the best point, the front, what each axis does, all points as a frame.

``sweep`` runs one; ``Sweep`` is what it found. Main effects are of the full set of points that were computed: the range of the mean
objective over an axis's values, and the share of the objective's variance between them (the first-order index of Sobol', Math. Comput.
Simul. 55 (2001), exact on a full grid).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim import __version__
from moesim.config import command
from moesim.errors import InputError
from moesim.host.cores import cores
from moesim.html_table import html_table
from moesim.sweep.pareto import front
from moesim.sweep.record import NAMES, Bound, limits_of, objectives_of, value, violation
from moesim.sweep.run import Evaluator, Runner, on_cores
from moesim.sweep.space import MOST_POINTS, Point, Space, code_identity
from moesim.sweep.spec import SweepSpec, load_sweep
from moesim.sweep.store import Row, Store
from moesim.sweep.trials import search

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 10  # points in a notebook
BESIDE = (
    ("speed", 1),
    ("memory", -1),
    ("price", -1),
    ("energy", -1),
    ("quality_loss", -1),
)  # what a front is over, where one objective is stated
UNKNOWN = {  # start of a key -> part, what some point must have, what to do where none has
    "quality.": (
        "quality", "a precision whose quality is measured or published in some point",
        "measure one with moesim quality and state its plan, or drop quality here",
    ),
    "facts.price": ("price", "a machine whose profile states a price in some point", "state one in the profile (price), or drop price here"),
    "energy.": (
        "energy", "a device that states idle_power and active_power in some point", "state them in the profile, or drop energy here",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A sweep that has been checked and not run."""

    spec: SweepSpec
    space: Space
    objectives: tuple[tuple[str, int], ...]  # key of the record, +1 to maximise or -1 to minimise
    lower: tuple[Bound, ...]
    upper: tuple[Bound, ...]

    def violation(self, row: Row) -> float:
        """Return by how much a row misses the constraints; 0 where it meets them."""
        return violation(row.record, self.spec.constraints.fits, self.lower, self.upper)


@dataclass(frozen=True)
class Sweep:
    """What a sweep found. Points stand in the order of the axes; a search holds those that it tried."""

    plan: Plan
    points: tuple[Point, ...]
    rows: tuple[Row, ...]
    searched: str  # how the points were chosen: "grid", or sampler, trials and seed

    @property
    def n_points(self) -> int:
        return len(self.points)

    @property
    def n_failed(self) -> int:
        return sum(row.status == "failed" for row in self.rows)

    @cached_property
    def unknown(self) -> dict[str, int]:
        """How many rows that ran have no figure, by each key that is limited or an objective; where it is limited they do not meet it."""
        keys = [key for key, _ in (*self.plan.lower, *self.plan.upper, *self.plan.objectives)]
        ran = [row.record for row in self.rows if row.status == "fine"]
        counts = {key: sum(value(record, key) is None for record in ran) for key in dict.fromkeys(keys)}
        return {key: n for key, n in counts.items() if n}

    @cached_property
    def feasible(self) -> tuple[int, ...]:
        """Numbers of the rows that meet the constraints and have a figure for the first objective."""
        key = self.plan.objectives[0][0]
        return tuple(i for i, row in enumerate(self.rows) if self.plan.violation(row) == 0 and value(row.record, key) is not None)

    @cached_property
    def best(self) -> int | None:
        """Number of the best row by the first objective; of equal ones the first. None if no point is feasible."""
        key, sign = self.plan.objectives[0]
        return max(self.feasible, key=lambda i: (sign * (value(self.rows[i].record, key) or 0.0), -i), default=None)

    @cached_property
    def goals(self) -> tuple[tuple[str, int], ...]:
        """What the front is over: the objectives, or, where there is one, it and what else has figures that differ."""
        stated = self.plan.objectives
        if len(stated) > 1:
            return stated
        beside = [(NAMES[name], sign) for name, sign in BESIDE if NAMES[name] != stated[0][0]]
        return stated + tuple((key, sign) for key, sign in beside if self._differs(key))

    def _differs(self, key: str) -> bool:
        found = [value(self.rows[i].record, key) for i in self.feasible]
        return None not in found and len(set(found)) > 1

    @cached_property
    def pareto(self) -> tuple[int, ...]:
        """Numbers of the feasible rows that no other is better than in every goal."""
        table = [
            [sign * v if (v := value(self.rows[i].record, key)) is not None else math.nan for key, sign in self.goals]
            for i in self.feasible
        ]
        gains = np.array(table, np.float64).reshape(-1, len(self.goals))
        whole = np.flatnonzero(~np.isnan(gains).any(axis=1))
        return tuple(self.feasible[whole[i]] for i in front(gains[whole]))

    def effects(self, key: str) -> list[dict[str, Any]]:
        """Return the main effect of every axis on one figure, the strongest first.

        Returns
        -------
        list of dict
            axis, range (of the mean over the axis's values, in the figure's unit), share (of the variance), means ({value: mean}), over
            the points at which the axis applies and that have the figure.
        """
        figures = [value(row.record, key) for row in self.rows]
        out = []
        for a, axis in enumerate(self.plan.space.axes):
            known = [(p.choice[a], v) for p, v in zip(self.points, figures, strict=True) if v is not None and p.choice[a] >= 0]
            if not known:
                continue
            which, numbers = np.array([i for i, _ in known]), np.array([v for _, v in known])
            levels = sorted(set(which.tolist()))
            means = [float(numbers[which == i].mean()) for i in levels]
            between = sum(float((which == i).mean()) * (m - float(numbers.mean())) ** 2 for i, m in zip(levels, means, strict=True))
            share = between / float(numbers.var()) if numbers.var() > 0 else 0.0
            labels = [axis.options[i].label for i in levels]
            row = {"axis": axis.name, "range": max(means) - min(means), "share": share, "means": dict(zip(labels, means, strict=True))}
            out.append(row)
        return sorted(out, key=lambda row: -row["range"])

    def command(self, i: int) -> str:
        """Return the command that runs one point alone."""
        return command(self.plan.spec.base, self.plan.space.assignments(self.points[i]))

    def point(self, i: int) -> dict[str, Any]:
        """Return one point as plain data: its number, the value of every axis, its status, what the front is over, and what runs it alone."""
        row = self.rows[i]
        return {
            "point": self.points[i].index,
            "values": self.plan.space.values(self.points[i]),
            "status": row.status,
            "key": row.key,
            **({"error": row.error} if row.error else {}),
            "goals": {key: value(row.record, key) for key, _ in self.goals},
            "command": self.command(i),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the answer in the stable shape of ``moesim sweep -o json``."""
        failed = [i for i, row in enumerate(self.rows) if row.status == "failed"]
        return {
            "n_points": self.n_points,
            "n_failed": self.n_failed,
            "n_out_of_memory": sum(row.status == "oom" for row in self.rows),
            "n_feasible": len(self.feasible),
            "n_unknown": self.unknown,
            "best": None if self.best is None else self.point(self.best),
            "pareto": [self.point(i) for i in self.pareto],
            "pareto_over": [{"key": key, "sense": "maximise" if sign > 0 else "minimise"} for key, sign in self.goals],
            "sensitivity": {key: self.effects(key) for key, _ in self.plan.objectives},
            "failed": [self.point(i) for i in failed[:100]],
            "provenance": {
                "version": __version__,
                "code": code_identity(),
                "sweep": self.plan.spec.name,
                "base": self.plan.spec.base,
                "points": self.searched,
                "prices": sorted({b for row in self.rows if row.record and (b := row.record["facts"]["price_basis"])}),
            },
        }

    def frame(self) -> pd.DataFrame:
        """Return all points as a frame: status, one column an axis, one a figure (dotted, units in the names)."""
        import pandas as pd

        table = []
        for point, row in zip(self.points, self.rows, strict=True):
            values = {name: v if isinstance(v, (int, float, str, bool)) else str(v) for name, v in self.plan.space.values(point).items()}
            table.append({"point": point.index, "status": row.status, **values, **_numbers(row.record), "error": row.error})
        axes = [axis.name for axis in self.plan.space.axes]
        out = pd.DataFrame(table)
        first = ["point", "status", *(a for a in axes if a in out)]
        rest = sorted(c for c in out.columns if c not in first and c != "error")
        return out[[*first, *rest, "error"]] if table else pd.DataFrame(columns=[*first, "error"])

    def __repr__(self) -> str:
        return f"Sweep({self.plan.spec.name}: {self.n_points} points, {self.n_failed} failed, {len(self.feasible)} feasible)"

    def _repr_html_(self) -> str:
        """The best point, then the rest of the front, with their values and the figures that they are compared by."""
        shown = [self.point(i) for i in dict.fromkeys(([] if self.best is None else [self.best]) + list(self.pareto))][:SHOWN]
        axes = [axis.name for axis in self.plan.space.axes]
        rows = [
            (point["point"], *(point["values"].get(axis, "") for axis in axes), *(f"{goal:.4g}" for goal in point["goals"].values()))
            for point in shown
        ]
        counts = f"{self.n_points} points, {self.n_failed} failed, {len(self.feasible)} feasible; the best, and the front"
        return html_table(f"{self.plan.spec.name}: {counts}", rows, ("point", *axes, *(key for key, _ in self.goals)))


def plan_sweep(name: str | Path, limit: int | None = MOST_POINTS) -> Plan:
    """Load a sweep and refuse what is wrong with it, before anything runs.

    Parameters
    ----------
    name : str or Path
        A bundled name, or a file.
    limit : int, optional
        The most points of a grid; None where a search will choose among them.

    Raises
    ------
    InputError
        With the line of the sweep file.
    """
    spec, document, folder = load_sweep(name)
    space = Space(spec, document, folder)
    objectives = objectives_of(spec.objectives, document.where(("objectives",)))
    lower, upper = limits_of(spec.constraints, document.where(("constraints",)))
    if limit is not None:
        for _ in space.points(limit):
            pass
    space.check()
    for where, keys in (("constraints", (*lower, *upper)), ("objectives", objectives)):
        for start, (part, expected, fix) in UNKNOWN.items():
            if any(key.startswith(start) for key, _ in keys) and not space.known(part):
                raise InputError(f"{where}: {part}", expected=expected, got="none", fix=fix, where=document.where((where,)))
    return Plan(spec, space, objectives, lower, upper)


def sweep(
    plan: Plan,
    store: Store | None = None,
    *,
    runner: Runner | None = None,
    workers: int | None = None,
    sampler: str = "",
    trials: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    counted: Callable[[Mapping[str, int]], None] | None = None,
) -> Sweep:
    """Compute a sweep's points, those that the store has not, and return what was found.

    Parameters
    ----------
    plan : Plan
        Of ``plan_sweep``.
    store : Store, optional
        Where rows are kept; in memory without one.
    runner : callable, optional
        How chunks are run (``on_cores``, ``on_cluster``); on all cores without one.
    workers : int, optional
        How many chunks run at a time.
    sampler, trials, seed
        "" for the whole grid, or "tpe" or "nsga2" to choose ``trials`` points of it.
    progress : callable, optional
        Called with (points done, points in all).
    counted : callable, optional
        Called at the end with how many points were computed, and how many were found in the store.
    """
    own = store is None
    store = Store(None, code_identity()) if store is None else store
    workers = workers or cores()
    evaluator = Evaluator(plan.space, store, runner or on_cores(workers), workers, progress)
    try:
        if sampler:
            points = search(plan.space, plan.objectives, plan.violation, evaluator, sampler, trials, seed)
            how = f"{sampler}, {trials} trials, seed {seed}"
        else:
            points, how = tuple(plan.space.points()), "grid"
            evaluator(points)
        if counted is not None:
            counted({"computed": evaluator.computed, "found": evaluator.found})
        rows = {row.key: row for row in store.rows(set(evaluator.keys.values()))}
        return Sweep(plan, points, tuple(rows[evaluator.keys[point]] for point in points), how)
    finally:
        if own:
            store.__exit__(None, None, None)


def _numbers(data: Any, prefix: str = "") -> dict[str, float]:
    """Every number of a record by its dotted key; of lists none."""
    out: dict[str, float] = {}
    for key, item in (data or {}).items():
        if isinstance(item, Mapping):
            out |= _numbers(item, f"{prefix}{key}.")
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            out[f"{prefix}{key}"] = item
    return out
