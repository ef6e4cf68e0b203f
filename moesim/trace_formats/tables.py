"""Owns delimited tables of numbers: read in bulk by pandas, and read again line by line only to name the first bad line.

It must not know what the columns mean. Every line must have every column, a line end closes the last one: a number that was cut
would otherwise be taken for a shorter one.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace_formats.source import Source

Kind = Literal["int", "float", "text"]
_CHECKS = {
    "int": re.compile(r"\s*[+-]?\d{1,18}\s*"),
    "float": re.compile(r"\s*[+-]?(nan|(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)\s*"),
    "text": re.compile(r".*"),
}
_DTYPES: Mapping[str, Any] = {"int": np.int64, "float": np.float64, "text": "category"}


def read_table(
    source: Source, first_line: int, names: Sequence[str], kinds: Mapping[str, Kind], separator: str = ","
) -> dict[str, NDArray[Any]]:
    """Read the lines from ``first_line`` (from 1) on.

    Parameters
    ----------
    source : Source
        The file.
    first_line : int
        First data line; row i of the result is line ``first_line + i``.
    names : sequence of str
        Names of all columns, in file order.
    kinds : mapping
        Kind of the columns wanted; the others are read as text and left out.

    Returns
    -------
    dict
        Column to values: int64, float64, or an object array of texts.

    Raises
    ------
    InputError
        With the first line that has too few or too many columns, or a value of another kind.
    """
    starts = source.line_starts
    body = source.data[int(starts[first_line - 1]) :] if first_line <= len(starts) else b""
    if not body.strip():
        raise source.fail("rows", "at least one line of data", "none", "the file is cut off or empty")
    if not body.endswith(b"\n"):
        got, fix = repr(body[-40:].decode("utf-8", "replace").rpartition("\n")[2]), "the file is cut off; add the line end if it is whole"
        raise source.fail_line(len(starts), "last line", "a line end after it", got, fix)
    body = body.rstrip(b"\r\n") + b"\n"
    dtypes = {name: _DTYPES[kinds.get(name, "text")] for name in names}
    floats = {name: ["nan"] for name in names if kinds.get(name) == "float"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            frame = pd.read_csv(
                io.BytesIO(body), sep=separator, header=None, names=list(names), dtype=dtypes, engine="c", quoting=3, skip_blank_lines=False,
                keep_default_na=False, na_values=floats, low_memory=False, encoding="utf-8",
            )  # fmt: skip
        if not isinstance(frame.index, pd.RangeIndex):
            raise ValueError("more columns than names")
        columns = {name: frame[name] for name in kinds}
        if any(columns[name].isna().any() for name in kinds if kinds[name] == "text"):
            raise ValueError("a column is missing")
        return {name: np.asarray(column) for name, column in columns.items()}
    except (ValueError, TypeError, OverflowError, Warning) as error:  # pandas' ParserError is a ValueError
        raise _first_bad(source, first_line, names, kinds, separator, str(error)) from None


def _first_bad(source: Source, first_line: int, names: Sequence[str], kinds: Mapping[str, Kind], separator: str, why: str) -> InputError:
    for number, raw in enumerate(source.lines[first_line - 1 :], start=first_line):
        try:
            cells = raw.decode("utf-8").split(separator)
        except UnicodeDecodeError:
            return source.fail_line(number, "line", "UTF-8 text", "other bytes", "the file is damaged")
        if len(cells) != len(names):
            return source.fail_line(number, "columns", f"{len(names)}: {separator.join(names)}", f"{len(cells)}: {raw.decode('utf-8')!r}")
        for name, cell in zip(names, cells, strict=True):
            if name in kinds and not _CHECKS[kinds[name]].fullmatch(cell):
                want = "a whole number" if kinds[name] == "int" else "a number"
                return source.fail_line(number, name, want, repr(cell))
    return source.fail("table", f"columns {separator.join(names)}", why)
