"""Owns the folder in which measurements are kept, so that a run that was broken off goes on where it stopped: one line of JSON each.

Lines are appended and flushed as results arrive; a last line that was cut off is left out when read. Traces lie beside it, by key.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from moesim.errors import InputError
from moesim.trace import RoutingTrace, load_trace, save_trace


class Results:
    """Measurements by key.

    Parameters
    ----------
    folder : Path or None
        Made where it is missing; None keeps nothing on disk.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._found: dict[str, Any] = {}
        self._traces: dict[str, RoutingTrace] = {}
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text(encoding="utf-8").split("\n") if self._path.is_file() else []
        except OSError as error:
            raise InputError(
                "--store", expected="a folder that can be written", got=error.strerror or str(error), where=str(folder)
            ) from None
        for line in lines[:-1]:  # what has no end of line was cut off
            try:
                entry = json.loads(line)
                self._found[entry["key"]] = entry["record"]
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    "--store", expected="results of moesim quality", got=line[:80], fix="name another folder", where=str(self._path)
                ) from None
        if lines and lines[-1]:
            self._path.write_text("\n".join([*lines[:-1], ""]), encoding="utf-8")

    @property
    def _path(self) -> Path:
        return (self.folder or Path()) / "results.jsonl"

    def get(self, key: str) -> Any:
        """Return a record, or None."""
        return self._found.get(key)

    def add(self, key: str, record: Any, trace: RoutingTrace | None = None) -> None:
        """Keep a record, and its trace; both are on disk when this returns."""
        if trace is not None:
            self._traces[key] = trace
        self._found[key] = record
        if self.folder is None:
            return
        try:
            if trace is not None:
                save_trace(trace, self.folder / f"{key}.npz")
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "record": record}, sort_keys=True) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError("--store", expected="room to write", got=error.strerror or str(error), where=str(self.folder)) from None

    def trace(self, key: str) -> RoutingTrace:
        """Return the trace that was kept with a record."""
        if key not in self._traces and self.folder is not None:
            self._traces[key] = load_trace(self.folder / f"{key}.npz")
        return self._traces[key]
