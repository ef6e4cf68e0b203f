"""Owns the Timeline: when each task started and ended, and what it had waited for. Simulated and measured runs alike.

``cause`` is the event that allowed the start: the dependency that ended last, or, if the task was ready earlier, the task
whose end freed the server, or the one before it in the queue (head-of-line blocking). Where several bind at the same
instant a dependency wins over the lane, and the largest id among dependencies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_CAUSE = -1
CAUSE_HEAD_OF_LINE = 5  # beside schedule.Dep: the lane was free, but the task before in the queue had not started


@dataclass(frozen=True, slots=True)
class Timeline:
    """Columns over tasks, sorted by task id; times are int64 picoseconds."""

    task: NDArray[np.int64]
    start_ps: NDArray[np.int64]
    end_ps: NDArray[np.int64]
    server: NDArray[np.int16]
    cause: NDArray[np.int64]
    cause_type: NDArray[np.int8]

    @staticmethod
    def from_rows(rows: Iterable[tuple[int, int, int, int, int, int]]) -> Timeline:
        """Build from rows (task, start, end, server, cause, cause type) in any order."""
        table = np.array(sorted(rows), np.int64).reshape(-1, 6)
        task, start_ps, end_ps, server, cause, cause_type = (column.copy() for column in table.T)
        return Timeline(task, start_ps, end_ps, server.astype(np.int16), cause, cause_type.astype(np.int8))

    @staticmethod
    def concat(parts: Iterable[Timeline]) -> Timeline:
        """Join timelines of one run and sort by task id."""
        parts = list(parts)
        if not parts:
            return Timeline.from_rows([])
        task = np.concatenate([p.task for p in parts])
        columns = [np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Timeline)]
        if np.all(task[1:] > task[:-1]):
            return Timeline(*columns)
        order = np.argsort(task, kind="stable")
        return Timeline(*(column[order] for column in columns))

    def rows(self, first: int, n: int) -> Timeline:
        """Return the part of ``n`` tasks from one task on."""
        return Timeline(*(getattr(self, f.name)[first : first + n] for f in fields(Timeline)))

    @property
    def makespan_ps(self) -> int:
        return int(self.end_ps.max()) if len(self.task) else 0

    def __len__(self) -> int:
        return len(self.task)

    def __repr__(self) -> str:
        return f"Timeline({len(self.task)} tasks, makespan {self.makespan_ps} ps)"


def plain(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return a column as the one type that loops are compiled for: C order, writeable."""
    if array.dtype == dtype and array.flags.carray:
        return array
    return np.array(array, dtype, order="C")
