"""Owns the reading of llama-bench's results: JSON, JSON lines, CSV, Markdown, each row as the command line of its test and what it measured.

A row's settings are put back into the words of a command line, so that ``llama_options`` alone says what they mean. Columns that a Markdown
table leaves out were at their defaults.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.config import read_text
from moesim.errors import InputError
from moesim.llama.options import LlamaCommand, parse_command

# option -> names of its column, in JSON and CSV and in Markdown
_COLUMNS = {
    "-m": ("model_filename",), "-ngl": ("n_gpu_layers", "ngl"), "-ncmoe": ("n_cpu_moe",), "-ub": ("n_ubatch",), "-b": ("n_batch",),
    "-t": ("n_threads", "threads"), "-ctk": ("type_k",), "-ctv": ("type_v",), "-fa": ("flash_attn", "fa"), "-mmp": ("use_mmap", "mmap"),
    "-nkvo": ("no_kv_offload", "nkvo"), "-sm": ("split_mode", "sm"), "-mg": ("main_gpu",), "-ts": ("tensor_split", "ts"),
    "-ot": ("tensor_buft_overrides", "ot"), "-nopo": ("no_op_offload", "nopo"), "-p": ("n_prompt",), "-n": ("n_gen",), "-d": ("n_depth",),
    "-rtr": ("repack", "rtr"), "-mla": ("mla_attn", "mla"),
}  # fmt: skip
_DEFAULTS = {"-ts": ("0.00", "0"), "-ot": ("none", ""), "-ngl": ("-1",), "-rtr": ("0", "false"), "-mla": ("0",), "-ncmoe": ("0",)}
_TEST = re.compile(r"(pp|tg)\s*(\d+)(?:\s*@\s*d\s*(\d+))?")
_QUALITY = re.compile(r" - (Small|Medium|Large)")  # how a model's type is written where no file is named
_SPEED = re.compile(r"(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One test: tokens/s of a prompt or of an answer, at a depth."""

    command: LlamaCommand
    tok_s: float
    where: str

    @property
    def prefill(self) -> bool:
        return self.command.generate == 0

    @property
    def test(self) -> str:
        """Its name as llama-bench writes it."""
        c = self.command
        return (f"pp{c.prompt}" if self.prefill else f"tg{c.generate}") + (f" @ d{c.depth}" if c.depth else "")


def read_bench(path: Path) -> tuple[BenchRow, ...]:
    """Read a file of results. Tests of a prompt and an answer together (pg) are left out.

    Raises
    ------
    InputError
        If it is none of the known formats, or a row lacks its test or speed.
    """
    text = read_text(path)
    rows = tuple(_row(data, f"{path}:{line}") for line, data in _records(text, path) if not _both(data))
    if not rows:
        raise InputError("--from", expected="results of llama-bench (-o json, jsonl, csv or md)", got="none", where=str(path))
    return rows


def _records(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield line (or number, in JSON) and columns of each result."""
    start = text.lstrip()[:1]
    if start in ("[", "{"):
        try:
            items = json.loads(text) if start == "[" else [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise InputError("--from", expected="JSON as llama-bench writes it", got=str(error)[:80], where=str(path)) from None
        yield from ((i, item) for i, item in enumerate(items, start=1) if isinstance(item, dict))
        return
    lines = text.splitlines()
    if lines and "avg_ts" in lines[0]:
        yield from enumerate(csv.DictReader(lines), start=2)
        return
    head: list[str] = []
    for number, line in enumerate(lines, start=1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|") or set(line) <= set("|-: "):
            continue
        if "t/s" in cells:
            head = cells
        elif head and len(cells) == len(head):
            yield number, dict(zip(head, cells, strict=True))


def _both(data: Mapping[str, Any]) -> bool:
    return str(data.get("test", "")).strip().startswith("pp") and "+tg" in str(data["test"]) or all(
        str(data.get(column, "0")) not in ("0", "") for column in ("n_prompt", "n_gen")
    )  # fmt: skip


def _row(data: Mapping[str, Any], where: str) -> BenchRow:
    words = ["llama-bench"]
    for option, names in _COLUMNS.items():
        value = next((str(data[name]).strip() for name in names if data.get(name) is not None), "")
        if value and value.lower() not in _DEFAULTS.get(option, ()):
            words += [option, {"true": "1", "false": "0"}.get(value.lower(), value)]
    kind = str(data.get("model_type") or data.get("model") or "")
    if "-m" not in words and kind:
        words += ["-m", _QUALITY.sub(lambda m: f"_{m[1][0]}", kind)]
    if "test" in data:
        match = _TEST.fullmatch(str(data["test"]).strip())
        if not match:
            raise InputError("test", expected="as in pp512 or tg128 @ d4096", got=f'"{data["test"]}"', where=where)
        sizes = {"pp": "0", "tg": "0", match[1]: match[2]}
        words += ["-p", sizes["pp"], "-n", sizes["tg"], "-d", match[3] or "0"]
    speed = _SPEED.match(str(data.get("avg_ts", data.get("t/s", ""))).strip())
    if not speed or float(speed[1]) <= 0:
        raise InputError("avg_ts", expected="tokens/s above 0", got=str(data.get("avg_ts", data.get("t/s"))), where=where)
    try:
        command = parse_command(words)
    except InputError as error:
        raise error.at(where) from None
    if command.prompt == command.generate == 0:
        raise InputError("test", expected="n_prompt or n_gen above 0", got="both 0", where=where)
    return BenchRow(command, float(speed[1]), where)
