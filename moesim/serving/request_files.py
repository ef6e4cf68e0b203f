"""Owns files of requests that others recorded: arrival times, lengths of prompts and answers.

    csv       arrival_s,prompt_tokens,output_tokens   (arrival_s may be left out)
    azure     TIMESTAMP,ContextTokens,GeneratedTokens, the columns of the Azure LLM inference traces (Azure/AzurePublicDataset);
              times count from the first row
    sharegpt  JSON: a list of {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, ...]}; the first
              question and the first answer of each, a token counted as four bytes of UTF-8, as no tokenizer is at hand

Files are read strictly and never trusted: sizes are limited, a wrong row is named.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.serving_spec import MOST_TOKENS

MOST_BYTES = 2 * 2**30
MOST_ROWS = 5_000_000
BYTES_PER_TOKEN = 4  # of UTF-8 text in English, the usual rule of thumb
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?$")

Row = tuple[int | None, int, int]  # arrival ps, tokens of prompt and answer


@dataclass(frozen=True, eq=False)
class FileRequests:
    """Requests of a file, in the order of arrival where it has times; times count from the first."""

    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    arrival_ps: NDArray[np.int64] | None
    notes: tuple[str, ...]


def read_requests(path: Path, form: str) -> FileRequests:
    """Read a file of requests.

    Raises
    ------
    InputError
        With ``file:line`` (or the number of the conversation) of what is wrong.
    """
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise InputError("serving.file", expected=f"at most {MOST_BYTES} bytes", got=str(size), where=str(path))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("serving.file", expected="a readable text file", got=str(error)[:100], where=str(path)) from None
    notes: tuple[str, ...] = ()
    if form == "sharegpt":
        rows, skipped = _sharegpt(text, path)
        notes = (f"{path.name}: a token is counted as {BYTES_PER_TOKEN} bytes of UTF-8",)
        notes += (f"{path.name}: {skipped} conversations without a question and an answer left out",) if skipped else ()
    else:
        rows = list(_azure(text, path) if form == "azure" else _own(text, path))
    if not rows:
        raise InputError("serving.file", expected="at least one request", got="none", where=str(path))
    if rows[0][0] is not None:
        first = min(row[0] for row in rows if row[0] is not None)
        rows = sorted(((at or 0) - (first if form == "azure" else 0), prompt, output) for at, prompt, output in rows)
    columns = [np.array(column, np.int64) for column in zip(*((at or 0, *rest) for at, *rest in rows), strict=True)]
    return FileRequests(columns[1], columns[2], columns[0] if rows[0][0] is not None else None, notes)


def _table(text: str, path: Path, head: tuple[str, ...], optional: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file:line, row) of a CSV whose columns are known."""
    reader = csv.reader(text.splitlines())
    try:
        names = [name.strip() for name in next(reader, [])]
        missing = [name for name in head if name not in names and name != optional]
        if missing:
            raise InputError(
                "serving.file", expected=f"columns {', '.join(head)}", got=", ".join(names)[:100] or "nothing", where=f"{path}:1"
            )
        for number, row in enumerate(reader, 2):
            if not row:
                continue
            if number > MOST_ROWS:
                raise InputError("serving.file", expected=f"at most {MOST_ROWS} rows", got="more", where=str(path))
            if len(row) != len(names):
                raise InputError("serving.file", expected=f"{len(names)} fields", got=str(len(row)), where=f"{path}:{number}")
            yield f"{path}:{number}", dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise InputError("serving.file", expected="CSV", got=str(error), where=str(path)) from None


def _tokens(row: dict[str, str], name: str, where: str) -> int:
    text = row[name].strip()
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_TOKENS:
        raise InputError(f"serving.file {name}", expected=f"a whole number from 1 to {MOST_TOKENS}", got=f'"{text[:40]}"', where=where)
    return int(text)


def _own(text: str, path: Path) -> Iterator[Row]:
    for where, row in _table(text, path, ("arrival_s", "prompt_tokens", "output_tokens"), optional="arrival_s"):
        at = _seconds(row["arrival_s"].strip(), where) if "arrival_s" in row else None
        yield at, _tokens(row, "prompt_tokens", where), _tokens(row, "output_tokens", where)


def _seconds(text: str, where: str) -> int:
    """Seconds as whole picoseconds, exactly."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal(-1)
    if not (value.is_finite() and 0 <= value < 9_000_000):
        raise InputError("serving.file arrival_s", expected="seconds from 0 to 9,000,000", got=f'"{text[:40]}"', where=where)
    return int(value * 10**12)


def _azure(text: str, path: Path) -> Iterator[Row]:
    for where, row in _table(text, path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        stamp = row["TIMESTAMP"].strip()
        match = _TIME.match(stamp)
        try:
            parsed = datetime.fromisoformat(match[1].replace("T", " ")) if match else None
        except ValueError:
            parsed = None
        if match is None or parsed is None:
            raise InputError(
                "serving.file TIMESTAMP", expected="a time such as 2023-11-16 18:17:03.9799600", got=f'"{stamp[:40]}"', where=where
            )
        whole = parsed - datetime(2000, 1, 1)
        ps = (whole.days * 86_400 + whole.seconds) * 10**12 + int((match[2] or "0").ljust(12, "0"))
        yield ps, _tokens(row, "ContextTokens", where), _tokens(row, "GeneratedTokens", where)


def _sharegpt(text: str, path: Path) -> tuple[list[Row], int]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("serving.file", expected="JSON", got=str(error)[:100], where=str(path)) from None
    if not isinstance(data, list):
        raise InputError("serving.file", expected="a list of conversations", got=type(data).__name__, where=str(path))
    rows: list[Row] = []
    for number, item in enumerate(data):
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list):
            raise InputError(
                f"serving.file [{number}]", expected='an object with a list "conversations"', got=repr(item)[:60], where=str(path)
            )
        spoken = [(turn.get("from"), _count(turn.get("value"))) for turn in turns if isinstance(turn, dict)]
        start = next((i for i, (who, size) in enumerate(spoken) if who in ("human", "user") and size), len(spoken))
        if start + 1 < len(spoken) and spoken[start + 1][0] in ("gpt", "assistant") and spoken[start + 1][1]:
            rows.append((None, spoken[start][1], spoken[start + 1][1]))
    return rows, len(data) - len(rows)


def _count(text: Any) -> int:
    """Tokens of a text by its size; 0 of anything else."""
    return min(-(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN), MOST_TOKENS) if isinstance(text, str) else 0
