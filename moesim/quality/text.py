"""Owns the text that quality is measured on: documents of token ids by domain, and the windows that a model reads them in.

A document is cut into windows; a window sees nothing of the one before it, and every token of the document is predicted exactly once where the
model has a token to begin with (else all but the first). It must not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moesim import config
from moesim.capture.files import prompts_of, read_prompts
from moesim.errors import InputError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """Documents.

    Parameters
    ----------
    documents : tuple of (n,) int64 arrays
        Token ids.
    domains : tuple of str
        One a document.
    byte_counts : tuple of int
        UTF-8 bytes of each document; 0 where only token ids are known, and then losses are per token.
    """

    documents: tuple[Ints, ...]
    domains: tuple[str, ...]
    byte_counts: tuple[int, ...]

    @cached_property
    def hash(self) -> str:
        """What tells texts apart."""
        return config.content_hash({"tokens": [d.tolist() for d in self.documents], "domains": self.domains, "bytes": self.byte_counts})

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.documents))

    @property
    def has_bytes(self) -> bool:
        return all(self.byte_counts)

    def split(self) -> tuple[Text, Text]:
        """Return two halves, dealt out document by document within each domain: one to calibrate on, one to choose by."""
        seen: dict[str, int] = {}
        halves: tuple[list[int], list[int]] = ([], [])
        for i, domain in enumerate(self.domains):
            seen[domain] = seen.get(domain, -1) + 1
            halves[seen[domain] % 2].append(i)
        if not halves[1]:
            raise InputError("calibration text", expected="at least two documents of a domain", got="one of each", fix="add documents")
        return self.take(halves[0]), self.take(halves[1])

    def take(self, which: Sequence[int]) -> Text:
        """Return some of the documents."""
        return Text(
            tuple(self.documents[i] for i in which), tuple(self.domains[i] for i in which), tuple(self.byte_counts[i] for i in which)
        )

    def head(self, n_tokens: int) -> Text:
        """Return the beginnings of all documents, so that together they have about so many tokens; bytes are no longer known."""
        share = min(1.0, n_tokens / self.n_tokens)
        cut = tuple(d[: max(2, round(share * len(d)))] for d in self.documents)
        return self if share == 1.0 else Text(cut, self.domains, (0,) * len(cut))


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of one length: inputs and targets (B, S) int64, and the document of each (B,)."""

    inputs: Ints
    targets: Ints
    document: Ints


def windows_of(text: Text, length: int, first_token: int | None, most: int = 16) -> list[Batch]:
    """Cut documents into windows of at most ``length`` tokens, without padding: whole windows together, each document's rest alone.

    Parameters
    ----------
    text : Text
    length : int
        Tokens of a whole window.
    first_token : int or None
        Stands before each document, where a model has one.
    most : int
        Whole windows in a batch.
    """
    whole: list[tuple[Ints, Ints, int]] = []
    rests: list[tuple[Ints, Ints, int]] = []
    for number, ids in enumerate(text.documents):
        x, y = (ids[:-1], ids[1:]) if first_token is None else (np.concatenate(([first_token], ids[:-1])), ids)
        for at in range(0, len(y), length):
            cut = x[at : at + length], y[at : at + length], number
            (whole if len(cut[0]) == length else rests).append(cut)
    groups = [whole[i : i + most] for i in range(0, len(whole), most)] + [[rest] for rest in rests]
    return [Batch(np.stack([x for x, _, _ in g]), np.stack([y for _, y, _ in g]), np.array([d for _, _, d in g])) for g in groups]


def read_token_file(path: Path) -> Text:
    """Read a token file of the bundled model (its format: traces/tinymoe/data.py)."""
    with np.load(path, allow_pickle=False) as file:
        tokens, offsets = file["tokens"].astype(np.int64), file["offsets"].tolist()
        documents = tuple(tokens[a:b] for a, b in zip(offsets, offsets[1:], strict=False))
        return Text(documents, tuple(file["domain"].tolist()), tuple(file["bytes"].tolist()))


def read_texts(paths: Sequence[Path], model: Path, vocab_size: int) -> Text:
    """Read files of documents, one domain a file: a text a line, or ``.jsonl`` of texts or ``{"token_ids": [...]}``; see ``capture.files``.

    Raises
    ------
    InputError
        If a file cannot be read, or a token is none of the model's.
    """
    documents: list[Ints] = []
    domains: list[str] = []
    sizes: list[int] = []
    for path in paths:
        found = list(zip(prompts_of(path), read_prompts(path, model), strict=True))
        for (number, given), tokens in found:
            ids = np.array(tokens, np.int64)
            if len(ids) < 2 or int(ids.max()) >= vocab_size:
                got = f"{len(ids)} tokens, the largest {int(ids.max(initial=0))}"
                raise InputError("document", expected=f"at least two tokens below {vocab_size}", got=got, where=f"{path}:{number}")
            documents.append(ids)
            domains.append(path.stem)
            sizes.append(len(given.encode()) if isinstance(given, str) else 0)
    if not all(sizes):
        sizes = [0] * len(sizes)
    return Text(tuple(documents), tuple(domains), tuple(sizes))
