"""Owns the file in which a sweep's results are kept: one row a point, under the point's key, written as results arrive.

SQLite in WAL mode: what has been written survives the death of the process, at any time. Rows hold nothing that differs between two
runs of the same point (no times, no hosts), so that two stores of the same points export the same bytes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moesim.errors import InputError

FORMAT = "moesim sweep 1"
BUSY_S = 60.0  # how long a write waits for another process that writes
_TABLES = """
CREATE TABLE IF NOT EXISTS about (format TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS points (
    key TEXT PRIMARY KEY, code TEXT NOT NULL, status TEXT NOT NULL, settings TEXT NOT NULL, record TEXT, error TEXT NOT NULL
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One point's outcome. ``status`` is fine, oom (memory ran out: a result too) or failed (``error`` says why, there is no record)."""

    key: str
    status: str
    settings: str  # JSON: the dotted paths that the point sets over the base
    record: dict[str, Any] | None
    error: str = ""


class Store:
    """Results by key. ``path`` None keeps them in memory.

    Raises
    ------
    InputError
        If the file cannot be written, or is something else.
    """

    def __init__(self, path: Path | None, code: str) -> None:
        self.path, self.code = path, code
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, timeout=BUSY_S)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            with self._db:
                self._db.executescript(_TABLES)
                formats = [name for (name,) in self._db.execute("SELECT format FROM about")]
                if not formats:
                    self._db.execute("INSERT INTO about VALUES (?)", (FORMAT,))
        except sqlite3.Error as error:
            raise InputError(
                "store", expected="a file that sweeps can be kept in", got=str(error), fix="name another file", where=str(path)
            ) from None
        if formats not in ([], [FORMAT]):
            raise InputError("store", expected=FORMAT, got=", ".join(formats), fix="name another file", where=str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._db.close()

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows, all or none; a key that is there keeps its row."""
        table = [(r.key, self.code, r.status, r.settings, None if r.record is None else _dump(r.record), r.error) for r in rows]
        try:
            with self._db:
                self._db.executemany("INSERT OR IGNORE INTO points VALUES (?, ?, ?, ?, ?, ?)", table)
        except sqlite3.Error as error:
            fix = "make room, and run again: what is in it is kept"
            raise InputError("store", expected="a file that can be written", got=str(error), fix=fix, where=str(self.path)) from None

    def keys(self) -> set[str]:
        """Return the keys that are there."""
        return {key for (key,) in self._db.execute("SELECT key FROM points")}

    def rows(self, keys: Collection[str]) -> Iterator[Row]:
        """Yield the rows of these keys, sorted by key."""
        wanted = set(keys)
        with closing(self._db.execute("SELECT key, status, settings, record, error FROM points ORDER BY key")) as found:
            for key, status, settings, text, error in found:
                if key in wanted:
                    yield Row(key, status, settings, None if text is None else json.loads(text), error)

    def others(self) -> int:
        """Return how many rows were computed by another version of the code."""
        return int(self._db.execute("SELECT COUNT(*) FROM points WHERE code != ?", (self.code,)).fetchone()[0])

    def export(self) -> str:
        """Return everything as JSON lines, sorted by key."""
        found = self._db.execute("SELECT key, code, status, settings, record, error FROM points ORDER BY key")
        names = ("key", "code", "status", "settings", "record", "error")
        return "".join(_dump(dict(zip(names, row, strict=True))) + "\n" for row in found)


def _dump(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))
