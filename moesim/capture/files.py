"""Owns what a capture reads and writes: a file of prompts, and a trace file that grows on disk.

It must not know how routing is listened to. Memory does not grow with a recording: rows are appended to one file a column, and the
columns are copied into the ``.npz`` at the end.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import RoutingTrace, load_trace

_COLUMNS = {"expert_ids": "<i2", "weights": "<f2", "seq_id": "<i4", "position": "<i4", "phase": "u1"}
_COPY_BYTES = 1 << 20
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt")


def need(module: str) -> Any:
    """Import torch or transformers, or say how to install them."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = "pip install 'moesim[capture]' (torch, transformers)"
        raise InputError(module, expected="an installed package, to run models", got=str(error)[:120], fix=fix) from None


def read_prompts(path: str | Path, folder: str | Path | None, max_tokens: int | None = None) -> list[list[int]]:
    """Read prompts and make token ids of them with the model's own tokeniser.

    A ``.jsonl`` file holds one prompt a line: a text, or an object with ``prompt`` or ``token_ids``. Any other file is text, one
    prompt a line. Empty lines are skipped.

    Parameters
    ----------
    path : path
        The file of prompts.
    folder : path, optional
        The model's folder, where its tokeniser is; needed where there is a text.
    max_tokens : int, optional
        Longer prompts are cut to their first tokens.
    """
    tokenizer: Any = None
    out: list[list[int]] = []
    for number, prompt in prompts_of(path):
        if isinstance(prompt, str):
            tokenizer = tokenizer or _tokenizer(folder)
            prompt = [int(token) for token in tokenizer(prompt)["input_ids"]]
        if not prompt:
            raise InputError("prompt", expected="at least one token", got="none", where=f"{path}:{number}")
        out.append(prompt[:max_tokens])
    return out


def prompts_of(path: str | Path) -> list[tuple[int, str | list[int]]]:
    """Return (line number, text or token ids) of each prompt of a file; see ``read_prompts``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError("--prompts", expected="a readable UTF-8 file", got=str(error)[:120], where=str(path)) from None
    out: list[tuple[int, str | list[int]]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        out.append((number, _json_prompt(line, f"{path}:{number}") if str(path).endswith(".jsonl") else line.rstrip("\r")))
    if not out:
        raise InputError("--prompts", expected="at least one prompt", got="an empty file", where=str(path))
    return out


class Parts:
    """Columns of a trace that grow in files, and are joined into one ``.npz`` without being read into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.n_rows = 0
        self.shape: tuple[tuple[int, int], bool] = ((0, 0), False)  # (L, K), and whether all rows have weights
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Parts:
        self._files = {name: open(self.folder / name, "wb") for name in _COLUMNS}
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, ids: NDArray[np.int16], weights: NDArray[np.float16] | None, sequence: int, first: int, phase: int) -> None:
        """Append the rows of one pass; ``first`` is the position of its first token."""
        n, n_layers, top_k = ids.shape
        if not self.n_rows:
            self.shape = (n_layers, top_k), weights is not None
        elif self.shape[0] != (n_layers, top_k):
            raise InputError("model", expected=f"(layers, K) of {self.shape[0]} in every pass", got=str((n_layers, top_k)))
        has = self.shape[1] and weights is not None
        self.shape = self.shape[0], has
        columns: dict[str, Any] = {
            "expert_ids": ids,
            "seq_id": np.full(n, sequence),
            "position": first + np.arange(n),
            "phase": np.full(n, phase),
        }
        if has:
            columns["weights"] = weights
        for name, column in columns.items():
            self._files[name].write(np.ascontiguousarray(column, dtype=_COLUMNS[name]).tobytes())
        self.n_rows += n

    def join(self, path: Path, meta: dict[str, Any]) -> None:
        """Write the ``.npz`` that ``trace.load_trace`` reads; the files must be closed."""
        (n_layers, top_k), has_weights = self.shape
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, kind in _COLUMNS.items():
                if name == "weights" and not has_weights:
                    continue
                shape = (self.n_rows, n_layers, top_k) if name in ("expert_ids", "weights") else (self.n_rows,)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file, open(self.folder / name, "rb") as part:
                    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                    shutil.copyfileobj(part, file, _COPY_BYTES)
            with archive.open("meta.npy", "w") as file:
                np.lib.format.write_array(file, np.array(json.dumps(meta, sort_keys=True)), allow_pickle=False)

    def finish(self, meta: dict[str, Any], target: Path | None) -> RoutingTrace:
        """Join the columns, read the trace, checked, and put the file where it belongs; the column files must be closed."""
        finished = self.folder / "trace.npz"
        self.join(finished, meta)
        trace = load_trace(finished)
        if target is not None:
            os.replace(finished, target)
        return trace


@contextmanager
def parts_beside(target: Path | None) -> Iterator[Parts]:
    """Give columns in a folder beside the file that they will become, which is removed in the end.

    Raises
    ------
    InputError
        If the folder or a file in it cannot be written.
    """
    try:
        folder = tempfile.mkdtemp(prefix=".moesim-capture-", dir=None if target is None else target.parent)
        try:
            yield Parts(Path(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        where = str(target or tempfile.gettempdir())
        raise InputError("--out", expected="a writable file", got=error.strerror or str(error), where=where) from None


def _tokenizer(folder: str | Path | None) -> Any:
    try:
        # without any of its files transformers 5 makes up an empty tokeniser
        if folder is None or not any(path for pattern in _TOKENIZER_FILES for path in Path(folder).glob(pattern)):
            raise FileNotFoundError("no tokenizer.json or the like")
        auto = need("transformers").AutoTokenizer
        return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        fix = 'give a .jsonl file of {"token_ids": [...]} to do without'
        raise InputError("tokenizer", expected="a tokeniser beside the model", got=got, fix=fix, where=str(folder)) from None


def _json_prompt(line: str, where: str) -> str | list[int]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("prompt", expected="a JSON text or object", got=str(error)[:120], where=where) from None
    if isinstance(value, dict):
        value = value.get("token_ids", value.get("prompt"))
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value):
        return value
    raise InputError("prompt", expected='a text, or an object with "prompt" or "token_ids"', got=line.strip()[:80], where=where)
