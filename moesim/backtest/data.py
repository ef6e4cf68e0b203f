"""Owns the reading of a folder of public measured runs: runs.csv, memory.csv, machines.yaml, models.yaml. It predicts nothing.

Only what makes the folder itself unreadable is an error here. What is wrong with a line or a record is said when somebody asks for it
(``Row.check``, ``Row.number``, ``Facts.number``), so that it is the reason why one row is left out, and the others are not.

An empty cell is a fact that nobody stated and is read as None, never as a default. Facts of machines are ``{v: value, prov: origin}``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim import config
from moesim.errors import InputError

RUN_COLUMNS = ("row_id", "run_id", "model", "engine_family", "machine", "offload_kind", "metric", "value")
MEMORY_COLUMNS = ("row_id", "model", "engine", "machine", "offload_kind", "metric", "value")
METRICS = {"decode_tok_s": "decode", "batched_decode_tok_s": "batched decode", "prefill_tok_s": "prefill"}
MAX_CSV_BYTES = 64 * 1024 * 1024
SHOWN = 40  # characters of an odd value in a message


class Lacking(Exception):
    """A fact that a prediction rests on is not stated, or cannot be read: the reason why a row is skipped."""


@contextmanager
def as_reason() -> Iterator[None]:
    """Make whatever is wrong with a row's cells, its machine or its model the reason why the row is skipped."""
    try:
        yield
    except InputError as error:
        found = ", ".join(part for part in (error.expected and f"expected {error.expected}", error.got and f"got {error.got}") if part)
        raise Lacking(f"{error.what}: {found}" if found else error.what) from None


@dataclass(frozen=True)
class Row:
    """One measured value with the settings that somebody stated; cells by column name, as text. ``fault``: why the line is not a row."""

    cells: Mapping[str, str]
    where: str
    fault: str = ""

    def text(self, column: str) -> str:
        """Return a cell, empty where nothing was stated."""
        return self.cells.get(column) or ""

    def number(self, column: str) -> float | None:
        """Return a number of at least 0, or None where nothing was stated.

        Raises
        ------
        InputError
            With the line of the file, where the cell holds something else.
        """
        text = self.text(column).strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise InputError(column, expected="a number of at least 0, or nothing", got=quoted(text), where=self.where)
        return value

    def whole(self, column: str) -> int | None:
        """Return a count, or None."""
        value = self.number(column)
        return None if value is None else int(round(value))

    @property
    def row_id(self) -> str:
        return self.text("row_id")

    @property
    def value(self) -> float:
        """The measured value.

        Raises
        ------
        InputError
            If there is none, or it is not above 0 (a memory figure may be 0).
        """
        value = self.number("value")
        lowest_is_zero = not self.text("metric").endswith("tok_s")
        if value is None or (value == 0 and not lowest_is_zero):
            raise InputError("value", expected="a measured value above 0", got=quoted(self.text("value")), where=self.where)
        return value

    def check(self) -> None:
        """Raise InputError if the line is not whole or states no measured value."""
        if self.fault:
            raise InputError("line", expected="one cell for each column", got=self.fault, where=self.where)
        _ = self.value

    @property
    def mode(self) -> str:
        """What the row measures, one of ``METRICS``' values.

        Raises
        ------
        InputError
            If its metric is not known.
        """
        metric = self.text("metric")
        if metric not in METRICS:
            raise InputError("metric", expected=" or ".join(METRICS), got=quoted(metric), where=self.where)
        return METRICS[metric]

    @property
    def flags(self) -> frozenset[str]:
        """Run options as written, such as ``rtr`` or ``mla=3``."""
        return frozenset(part.strip() for part in self.text("flags").split(";") if part.strip())

    def flag(self, name: str) -> str:
        """Return the value of an option ``name=value``, or empty."""
        return next((f.partition("=")[2] for f in self.flags if f.startswith(name + "=")), "")


@dataclass(frozen=True)
class Facts:
    """The record of one machine or model; ``data`` is a mapping unless somebody wrote something else."""

    name: str
    data: Any
    where: str

    def check(self) -> None:
        """Raise InputError if the record is not a mapping."""
        if not isinstance(self.data, Mapping):
            raise InputError(f"record of {self.name}", expected="a mapping of facts", got=_shown(self.data), where=self.where)

    def get(self, *path: str | int) -> Any:
        """Return a fact by its path, None where it is not stated; ``{v, prov}`` pairs are opened."""
        here: Any = self.data
        for part in path:
            if isinstance(here, Mapping):
                here = here.get(str(part))
            elif isinstance(here, list) and isinstance(part, int) and part < len(here):
                here = here[part]
            else:
                return None
        return here.get("v") if isinstance(here, Mapping) and "v" in here else here

    def number(self, *path: str | int, least: float = 0.0) -> float | None:
        """Return a number of at least ``least``, also one that is written as text, or None where nothing was stated."""
        stated = self.get(*path)
        if stated is None:
            return None
        try:
            value = math.nan if isinstance(stated, bool) else float(stated)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value) or value < least:
            what = ".".join([self.name, *map(str, path)])
            raise InputError(what, expected=f"a number of at least {least:g}", got=_shown(stated), where=self.where)
        return value

    def whole(self, *path: str | int, default: int = 0, least: int = 0) -> int:
        """Return a count, or the default."""
        value = self.number(*path, least=least)
        return default if value is None else int(value)

    def text(self, *path: str | int) -> str:
        """Return a text, empty where it is not stated."""
        value = self.get(*path)
        return "" if value is None else str(value)

    def items(self, *path: str | int) -> list[Any]:
        """Return a list, empty where it is not stated."""
        value = self.get(*path)
        return value if isinstance(value, list) else []


@dataclass(frozen=True)
class FieldRuns:
    """A folder of measured runs."""

    folder: Path
    runs: tuple[Row, ...]
    memory: tuple[Row, ...]
    machines: Mapping[str, Facts]
    models: Mapping[str, Facts]

    def __repr__(self) -> str:
        return f"FieldRuns({len(self.runs)} speeds, {len(self.memory)} memory figures, {len(self.machines)} machines, {len(self.models)} models)"


def read_field_runs(folder: str | Path) -> FieldRuns:
    """Read a folder of measured runs; memory.csv may be absent or empty, machines.yaml and models.yaml may be empty.

    Raises
    ------
    InputError
        For a missing file or column, or a file that is no CSV or YAML, with the file and line.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError("FOLDER", expected="a folder with runs.csv, machines.yaml and models.yaml", got=f'"{folder}"')
    memory = folder / "memory.csv"
    return FieldRuns(
        folder,
        _read_csv(folder / "runs.csv", RUN_COLUMNS),
        _read_csv(memory, MEMORY_COLUMNS, may_be_empty=True) if memory.exists() else (),
        _read_facts(folder / "machines.yaml"),
        _read_facts(folder / "models.yaml"),
    )


def _read_csv(path: Path, wanted: tuple[str, ...], may_be_empty: bool = False) -> tuple[Row, ...]:
    text = config.read_text(path, MAX_CSV_BYTES)
    if may_be_empty and not text.strip():
        return ()
    reader = csv.reader(text.splitlines(keepends=True))
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise InputError("columns", expected=", ".join(wanted), got=str(error), where=f"{path}:1") from None
    lacking = [name for name in wanted if name not in names]
    if lacking:
        raise InputError("columns", expected=", ".join(wanted), got=f"no {', '.join(lacking)}", where=f"{path}:1")
    return tuple(_rows(reader, names, path))


def _rows(reader: Any, names: list[str], path: Path) -> Iterator[Row]:
    """Yield the lines of a CSV reader that are not blank, each with its fault, if it has one."""
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Row({}, f"{path}:{reader.line_num}", str(error))
            continue
        if cells is None:
            return
        if cells:
            whole = len(cells) >= len(names) and not any(cells[len(names) :])
            fault = "" if whole else f"{len(cells)} cells for {len(names)} columns"
            yield Row(dict(zip(names, cells, strict=False)), f"{path}:{reader.line_num}", fault)


def _read_facts(path: Path) -> dict[str, Facts]:
    data = config.read_plain_yaml(path)
    if not isinstance(data, (dict, type(None))):
        raise InputError("document", expected="a mapping of names to records", got=type(data).__name__, where=str(path))
    return {str(name): Facts(str(name), record, str(path)) for name, record in (data or {}).items()}


def quoted(text: str) -> str:
    """Return the beginning of a cell for a message, on one line."""
    return f'"{" ".join(text[: 2 * SHOWN].split())[:SHOWN]}"'


def _shown(value: Any) -> str:
    return repr(value)[:SHOWN]
