"""Owns the reading of a folder of public measured runs: runs.csv, memory.csv, machines.yaml, models.yaml. It judges and predicts nothing.

An empty cell is a fact that nobody stated and is read as None, never as a default. Facts of machines are ``{v: value, prov: origin}``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim import config
from moesim.errors import InputError

RUN_COLUMNS = ("row_id", "run_id", "model", "engine_family", "machine", "offload_kind", "metric", "value")
MEMORY_COLUMNS = ("row_id", "model", "engine", "machine", "offload_kind", "metric", "value")
METRICS = {"decode_tok_s": "decode", "batched_decode_tok_s": "batched decode", "prefill_tok_s": "prefill"}
MAX_CSV_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Row:
    """One measured value with the settings that somebody stated; cells by column name, as text."""

    cells: Mapping[str, str]
    where: str

    def text(self, column: str) -> str:
        """Return a cell, empty where nothing was stated."""
        return self.cells.get(column) or ""

    def number(self, column: str) -> float | None:
        """Return a finite number, or None where nothing was stated.

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
        if not math.isfinite(value):
            raise InputError(column, expected="a number or nothing", got=f'"{text[:40]}"', where=self.where)
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
        if value is None or value < 0 or (value == 0 and not lowest_is_zero):
            raise InputError("value", expected="a measured value above 0", got=f'"{self.text("value")}"', where=self.where)
        return value

    @property
    def flags(self) -> frozenset[str]:
        """Run options as written, such as ``rtr`` or ``mla=3``."""
        return frozenset(part.strip() for part in self.text("flags").split(";") if part.strip())

    def flag(self, name: str) -> str:
        """Return the value of an option ``name=value``, or empty."""
        return next((f.partition("=")[2] for f in self.flags if f.startswith(name + "=")), "")


@dataclass(frozen=True)
class Facts:
    """The record of one machine or model."""

    name: str
    data: Mapping[str, Any]
    where: str

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

    def number(self, *path: str | int) -> float | None:
        """Return a positive number, or None."""
        value = self.get(*path)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise InputError(
                ".".join([self.name, *map(str, path)]), expected="a number of at least 0", got=repr(value)[:60], where=self.where
            )
        return float(value)

    def whole(self, *path: str | int, default: int = 0) -> int:
        """Return a count, or the default."""
        value = self.number(*path)
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
    """Read a folder of measured runs; memory.csv may be absent.

    Raises
    ------
    InputError
        For a missing file, column or value, with the file and line.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError("FOLDER", expected="a folder with runs.csv, machines.yaml and models.yaml", got=f'"{folder}"')
    memory = folder / "memory.csv"
    return FieldRuns(
        folder,
        _read_csv(folder / "runs.csv", RUN_COLUMNS),
        _read_csv(memory, MEMORY_COLUMNS) if memory.exists() else (),
        _read_facts(folder / "machines.yaml"),
        _read_facts(folder / "models.yaml"),
    )


def _read_csv(path: Path, wanted: tuple[str, ...]) -> tuple[Row, ...]:
    text = config.read_text(path, MAX_CSV_BYTES)
    reader = csv.DictReader(text.splitlines(keepends=True))
    lacking = [name for name in wanted if name not in (reader.fieldnames or ())]
    if lacking:
        raise InputError("columns", expected=", ".join(wanted), got=f"no {', '.join(lacking)}", where=f"{path}:1")
    rows = []
    try:
        for cells in reader:
            row = Row({k: v for k, v in cells.items() if isinstance(k, str) and isinstance(v, str)}, f"{path}:{reader.line_num}")
            _ = row.value  # refused here rather than in the middle of a run
            if wanted is RUN_COLUMNS and row.text("metric") not in METRICS:
                raise InputError("metric", expected=" or ".join(METRICS), got=f'"{row.text("metric")}"', where=row.where)
            rows.append(row)
    except csv.Error as error:
        raise InputError("CSV", expected="well-formed rows", got=str(error), where=f"{path}:{reader.line_num}") from None
    return tuple(rows)


def _read_facts(path: Path) -> dict[str, Facts]:
    data = config.read_plain_yaml(path)
    if not isinstance(data, dict):
        raise InputError("document", expected="a mapping of names to records", got=type(data).__name__, where=str(path))
    for name, record in data.items():
        if not isinstance(record, dict):
            raise InputError(str(name), expected="a record", got=repr(record)[:60], where=str(path))
    return {str(name): Facts(str(name), record, str(path)) for name, record in data.items()}
