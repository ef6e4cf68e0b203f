"""Owns what every reader shares about a file: its bytes, lines and JSON, the places in it, the caller's options, the notes.

It must not know any format. A file is read once, whole, after its size was checked; errors say ``file:line`` or ``file, byte N``.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import MAX_TRACE_BYTES

HEAD_BYTES = 1 << 16
_KEY = re.compile(rb'"([A-Za-z_][A-Za-z0-9_]*)"\s*:')
_CUT = "the file is cut off or damaged; fetch or record it again"


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may state that a file does not.

    Parameters
    ----------
    top_k, n_layers, n_experts : int, optional
        Shape of the routing. What a file states itself must agree.
    prompt_tokens : tuple of int
        Prompt lengths, in the order of the file's sequences.
    mapping : (L, P) or (P,) int64, optional
        Logical expert of each physical one.
    metadata : Path, optional
        The capture metadata that belongs to a trace.
    select : mapping
        Column to value: which rows of a table with several models to take.
    """

    top_k: int | None = None
    n_layers: int | None = None
    n_experts: int | None = None
    prompt_tokens: tuple[int, ...] = ()
    mapping: NDArray[np.int64] | None = None
    metadata: Path | None = None
    select: Mapping[str, str] = field(default_factory=dict)


class Source:
    """One file, read once."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.where = str(path)
        self.notes: list[str] = []
        try:
            if self.path.is_dir():
                raise InputError("trace", expected="a file", got="a folder", where=self.where)
            self.size = self.path.stat().st_size
            if self.size > MAX_TRACE_BYTES:
                raise InputError("trace", expected=f"at most {MAX_TRACE_BYTES} bytes", got=f"{self.size}", fix="split it", where=self.where)
            self.data = self.path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as some editors put before text
        except FileNotFoundError:
            raise InputError("trace", expected="an existing file", got="none", fix="check the path", where=self.where) from None
        except (OSError, ValueError) as error:
            raise InputError("trace", expected="a readable file", got=str(error)[:120], where=self.where) from None
        self.size = len(self.data)
        if not self.data:
            raise InputError("trace", expected="a file with content", got="an empty one", where=self.where)

    def note(self, text: str) -> None:
        """Remember what the caller must be told."""
        if text not in self.notes:
            self.notes.append(text)

    # --- errors -----------------------------------------------------------------------------------------------------------------

    def fail(self, what: str, expected: str, got: str, fix: str = "") -> InputError:
        """Return an error of the whole file."""
        return InputError(what, expected=expected, got=got[:200], fix=fix, where=self.where)

    def fail_line(self, line: int, what: str, expected: str, got: str, fix: str = "") -> InputError:
        """Return an error at a line, counted from 1."""
        return InputError(what, expected=expected, got=got[:200], fix=fix, where=f"{self.where}:{line}")

    def fail_byte(self, at: int, what: str, expected: str, got: str, fix: str = _CUT) -> InputError:
        """Return an error at a byte offset."""
        return InputError(what, expected=expected, got=got[:200], fix=fix, where=f"{self.where}, byte {at}")

    # --- text -------------------------------------------------------------------------------------------------------------------

    @cached_property
    def head(self) -> bytes:
        """The first bytes."""
        return self.data[:HEAD_BYTES]

    @cached_property
    def is_text(self) -> bool:
        """Whether the first bytes are text: no control characters but white space."""
        return not re.search(rb"[\x00-\x08\x0b\x0e-\x1f]", self.head)

    @cached_property
    def lines(self) -> list[bytes]:
        """All lines without their ends; empty lines at the end are left out."""
        lines = self.data.split(b"\n")
        while lines and not lines[-1].strip():
            lines.pop()
        return [line.removesuffix(b"\r") for line in lines] if b"\r" in self.data else lines

    def first_lines(self, number: int = 2) -> list[str]:
        """Return the first lines of the head, for sniffing."""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in self.head.split(b"\n")[:number]]

    @cached_property
    def line_starts(self) -> NDArray[np.int64]:
        """Byte offset of each line."""
        ends = np.flatnonzero(np.frombuffer(self.data, np.uint8) == 10)
        return np.concatenate([[0], ends + 1]).astype(np.int64)

    def line_at(self, byte: int) -> int:
        """Return the line, from 1, that a byte lies in."""
        return bisect_right(self.line_starts, byte)

    # --- JSON -------------------------------------------------------------------------------------------------------------------

    @cached_property
    def _first_value(self) -> Any:
        start = self.size - len(self.data.lstrip()) if self.head[:1].isspace() else 0
        stop = self.data.find(b"\n", start)
        try:
            return json.loads(self.data[start : stop if stop >= 0 else self.size])
        except (ValueError, RecursionError):
            return None

    @cached_property
    def is_json(self) -> bool:
        """Whether the text begins like a JSON object or array."""
        return self.is_text and self.head.lstrip()[:1] in (b"{", b"[")

    @cached_property
    def is_jsonl(self) -> bool:
        """Whether the first line is a JSON object by itself and another line follows."""
        return self.is_json and isinstance(self._first_value, dict) and b"\n" in self.data.strip()

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of the first JSON object; of a document that is damaged, those that stand near its start."""
        if not self.is_json:
            return frozenset()
        first = self._first_value if self.is_jsonl else None
        if first is None:
            try:
                first = self.document
            except InputError:
                return frozenset(key.decode() for key in _KEY.findall(self.head))
        if isinstance(first, list):
            first = first[0] if first else None
        return frozenset(first) if isinstance(first, dict) else frozenset()

    @cached_property
    def document(self) -> Any:
        """The whole file as one JSON value."""
        try:
            return json.loads(self.data)
        except json.JSONDecodeError as error:
            raise self.fail_line(error.lineno, "JSON", "one value", error.msg, "the file is cut off or damaged") from None
        except UnicodeDecodeError as error:
            raise self.fail_byte(error.start, "JSON", "UTF-8 text", "other bytes") from None
        except (ValueError, RecursionError) as error:
            raise self.fail("JSON", "one value", str(error) or type(error).__name__) from None

    def json_chunks(self, first: int = 0, chunk: int = 2_000) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield (number of the first line, from 0; the objects) of some lines at a time, parsed in bulk.

        The first bad line is looked for only if there is one. A caller that keeps arrays instead of the objects reads far faster.
        """
        for start in range(first, len(self.lines), chunk):
            part = self.lines[start : start + chunk]
            try:
                found = json.loads(b"[" + b",".join(part) + b"]")
                if len(found) != len(part) or not all(type(item) is dict for item in found):
                    raise ValueError("another number of objects")
            except (ValueError, RecursionError):
                raise self._first_bad_json(start) from None
            yield start, found

    def json_lines(self) -> list[dict[str, Any]]:
        """Return the JSON object of every line."""
        return [row for _, rows in self.json_chunks() for row in rows]

    def _first_bad_json(self, start: int) -> InputError:
        for number, line in enumerate(self.lines[start:], start=start + 1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                return self.fail_line(number, "JSON", "one object on the line", str(error) or type(error).__name__, _CUT)
            if not isinstance(value, dict):
                return self.fail_line(number, "JSON", "one object on the line", type(value).__name__)
        return self.fail("JSON lines", "one object on each line", "others")


def some(values: Any, most: int = 8) -> str:
    """Return the first few values as text."""
    values = list(values)
    return ", ".join(str(value) for value in values[:most]) + (", ..." if len(values) > most else "")


def is_whole(value: Any, low: int = 0, high: int = 2**31 - 1) -> bool:
    """Whether a JSON value is an integer within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
