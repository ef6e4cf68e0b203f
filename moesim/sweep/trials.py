"""Owns the search of large spaces through Optuna: which points to compute next, given those that have been.

Axes are suggested as positions in their lists: of ordered axes as whole numbers, so that neighbours inform each other, of others as
choices. A search begins with a balanced design, in which every value of every axis occurs about equally often; then one point of each batch is
the sampler's, and the others are points that differ from the best one so far in one axis. Points are told in order, in batches of a fixed
size, so that a seed gives the same points on any number of cores.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from moesim.errors import InputError
from moesim.sweep.record import value
from moesim.sweep.run import Evaluator
from moesim.sweep.space import Point, Space
from moesim.sweep.store import Row

SAMPLERS = ("tpe", "nsga2")
BATCH = 4  # points between two looks at what was learned
REPEATS = 32  # suggestions in a row that were tried before, until a point is drawn at random instead
MOST_AT_START = 20  # points of the balanced design
WORST = 1e30  # stands for a figure that a point does not have


def search(
    space: Space,
    objectives: tuple[tuple[str, int], ...],
    violation: Callable[[Row], float],
    evaluate: Evaluator,
    sampler: str,
    trials: int,
    seed: int,
) -> tuple[Point, ...]:
    """Compute ``trials`` different points, chosen one batch after the other, and return them in the order of the axes.

    Parameters
    ----------
    space : Space
    objectives : tuple of (key, sign)
    violation : callable
        By how much a row misses the constraints.
    evaluate : Evaluator
        Computes points and stores their rows.
    sampler : {"tpe", "nsga2"}
        Tree-structured Parzen estimator (Bergstra et al., NIPS 2011), or NSGA-II (Deb et al., IEEE TEVC 6 (2002)).
    trials, seed : int

    Raises
    ------
    InputError
        If the extra is not installed, or the sampler unknown.
    """
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise InputError("--search", expected="the extra search", got="no optuna", fix="pip install 'moesim[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if sampler not in SAMPLERS:
        raise InputError("--search", expected=f"one of {', '.join(SAMPLERS)}", got=f'"{sampler}"')
    if trials < 1:
        raise InputError("--trials", expected="at least 1 point", got=str(trials))
    study = optuna.create_study(
        directions=["maximize" if sign > 0 else "minimize" for _, sign in objectives], sampler=_sampler(optuna, sampler, trials, seed)
    )
    rng = np.random.default_rng(seed)
    tried: dict[tuple[int, ...], Point] = {}
    best = _Best(objectives[0])
    start = _balanced(space, max(BATCH, min(MOST_AT_START, trials // 3)), rng)
    repeated = optuna.trial.TrialState.FAIL
    while len(tried) < min(trials, space.most_points):
        n = min(BATCH, trials - len(tried))
        wanted = [start.pop() for _ in range(min(n, len(start)))] or _neighbours(space, best.choice, tried, rng)[: n - 1]
        asked = _ask(study, repeated, space, tried, n, wanted, rng)
        if not asked:
            break
        evaluate([point for _, point in asked], of=trials, done=len(tried))
        tried |= {point.choice: point for _, point in asked}
        rows = {row.key: row for row in evaluate.store.rows({evaluate.keys[point] for _, point in asked})}
        for trial, point in asked:
            row = rows[evaluate.keys[point]]
            figures = [value(row.record, key) for key, _ in objectives]
            missed = min(violation(row), WORST)
            best.note(point.choice, figures[0], missed)
            trial.set_constraint("limits", missed)
            study.tell(trial, [sign * -WORST if v is None else v for v, (_, sign) in zip(figures, objectives, strict=True)])
    return tuple(sorted(tried.values(), key=lambda point: point.choice))


class _Best:
    """The best point so far: of those that miss the limits the one that misses least."""

    def __init__(self, objective: tuple[str, int]) -> None:
        self.sign = objective[1]
        self.choice: tuple[int, ...] | None = None
        self._rank: tuple[float, float] = (math.inf, math.inf)

    def note(self, choice: tuple[int, ...], figure: float | None, missed: float) -> None:
        rank = (missed, math.inf if figure is None else -self.sign * figure)
        if self.choice is None or rank < self._rank:
            self.choice, self._rank = choice, rank


def _balanced(space: Space, n: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Return up to ``n`` different points in which the values of each axis take turns, each axis in an order of its own."""
    columns = [rng.permutation(np.resize(rng.permutation(len(axis.options)), n)) for axis in space.axes]
    found = {_where_it_applies(space, [int(column[i]) for column in columns]): None for i in range(n)}
    return list(found)


def _where_it_applies(space: Space, wanted: list[int]) -> tuple[int, ...]:
    """Return a choice with -1 for every axis that takes no part in it, and an option for every axis that does."""
    chosen: tuple[int, ...] = ()
    for i in wanted:
        chosen += (max(i, 0),) if space.applies(chosen) else (-1,)
    return chosen


def _neighbours(
    space: Space, choice: tuple[int, ...] | None, tried: dict[tuple[int, ...], Point], rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Return the points that differ from one in one axis and were not tried, in random order."""
    if choice is None:
        return []
    found: dict[tuple[int, ...], None] = {}
    for a, axis in enumerate(space.axes):
        for i in range(len(axis.options)) if choice[a] >= 0 else ():
            other = _where_it_applies(space, [*choice[:a], i, *choice[a + 1 :]])
            if other not in tried:
                found[other] = None
    return [list(found)[i] for i in rng.permutation(len(found))]


def _sampler(optuna: Any, name: str, trials: int, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=BATCH)
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=max(4, min(50, trials // 5)))


def _ask(
    study: Any,
    repeated: Any,
    space: Space,
    tried: dict[tuple[int, ...], Point],
    n: int,
    wanted: list[tuple[int, ...]],
    rng: np.random.Generator,
) -> list[tuple[Any, Point]]:
    """Ask for up to ``n`` points that are new, those wanted first; suggestions that are not new end in the state ``repeated``."""
    out: list[tuple[Any, Point]] = []
    new: set[tuple[int, ...]] = set()
    repeats = 0
    wanted = list(wanted)
    while len(new) < n:
        if wanted:
            _enqueue(study, space, wanted.pop())
        elif repeats >= REPEATS:
            choice = _untried(space, tried.keys() | new, rng)
            if choice is None:
                break
            _enqueue(study, space, choice)
            repeats = 0
        trial = study.ask()
        choice = _suggested(trial, space)
        if choice in tried or choice in new:
            repeats += 1
            study.tell(trial, state=repeated)
            continue
        new.add(choice)
        out.append((trial, Point(_index(space, choice), choice)))
    return out


def _enqueue(study: Any, space: Space, choice: tuple[int, ...]) -> None:
    study.enqueue_trial({axis.name: i for axis, i in zip(space.axes, choice, strict=True) if i >= 0})


def _suggested(trial: Any, space: Space) -> tuple[int, ...]:
    chosen: tuple[int, ...] = ()
    for axis in space.axes:
        if not space.applies(chosen):
            chosen += (-1,)
        elif axis.ordered:
            chosen += (trial.suggest_int(axis.name, 0, len(axis.options) - 1),)
        else:
            chosen += (trial.suggest_categorical(axis.name, list(range(len(axis.options)))),)
    return chosen


def _untried(space: Space, tried: Any, rng: np.random.Generator) -> tuple[int, ...] | None:
    """Draw a point that was not tried; None if ever more draws find none."""
    for _ in range(1000):
        chosen: tuple[int, ...] = ()
        for axis in space.axes:
            chosen += (int(rng.integers(len(axis.options))),) if space.applies(chosen) else (-1,)
        if chosen not in tried:
            return chosen
    return next((point.choice for point in space.points() if point.choice not in tried), None) if space.most_points < 10**6 else None


def _index(space: Space, choice: tuple[int, ...]) -> int:
    """A number of a point of a search: its position in the product of all axes."""
    sizes = [len(axis.options) for axis in space.axes]
    return sum(max(i, 0) * math.prod(sizes[a + 1 :]) for a, i in enumerate(choice))
