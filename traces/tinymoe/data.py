"""Tokenizer and token files: from the texts of corpus.py to token ids, and the measure bits per byte.

The token files heldout.npz and calibration.npz are shipped, so that a later evaluation needs neither the packages nor
the versions that the text came from:

    tokens   uint16 [N]     documents one after another, without separators
    offsets  int64 [D + 1]  document d is tokens[offsets[d]:offsets[d + 1]]
    bytes    int32 [D]      UTF-8 bytes of the text that those tokens stand for
    domain   str [D]        name of the domain
    name     str [D]        name of the document inside its domain
    meta     str, 0-d       JSON: sources, licences, how the excerpts were cut

Bits per byte: each document is preceded by the separator token <|doc|> and cut into windows of 256 tokens; a window
sees nothing of the one before it; every token of the document is predicted exactly once. The sum of -log2 p over
the tokens is divided by the bytes of the text. This does not depend on the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import DOMAINS, load_split
from model import TinyMoeForCausalLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|doc|>"  # stands before every document; token id 0
SEPARATOR_ID = 0
MAX_DOCUMENT_TOKENS = 2048  # an excerpt is the head of its document, so that many documents take part
SHIPPED_TOKENS = {"heldout": 20_000, "calibration": 12_000}  # per domain


def train_tokenizer(cache: Path, vocab_size: int, bytes_per_domain: int = 1_500_000) -> Tokenizer:
    """Byte-level BPE, trained on the same amount of training text from every domain."""
    taken = dict.fromkeys(DOMAINS, 0)
    texts = []
    documents = load_split(cache, "train")
    np.random.default_rng(0).shuffle(documents)
    for d in documents:
        if taken[d["domain"]] < bytes_per_domain:
            taken[d["domain"]] += len(d["text"].encode())
            texts.append(d["text"])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes that each token stands for, int32 (vocab_size,); 0 for the separator."""
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int32)
    for token, i in tokenizer.get_vocab().items():
        # the byte-level alphabet has one character per byte
        sizes[i] = 0 if i == SEPARATOR_ID else len(token)
    return sizes


def training_streams(cache: Path, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """One uint16 stream of training tokens per domain, a separator before every document; kept in the cache."""
    path = cache / "train_tokens.npz"
    if path.exists():
        with np.load(path, allow_pickle=False) as z:
            return {d: z[d] for d in DOMAINS}
    parts: dict[str, list[np.ndarray]] = {d: [] for d in DOMAINS}
    documents = load_split(cache, "train")
    for d, encoding in zip(documents, tokenizer.encode_batch([d["text"] for d in documents]), strict=True):
        parts[d["domain"]].append(np.array([SEPARATOR_ID, *encoding.ids], np.uint16))
    streams = {d: np.concatenate(p) for d, p in parts.items()}
    np.savez(path, **streams)
    return streams


def write_token_file(path: Path, cache: Path, split: str, tokenizer: Tokenizer) -> None:
    """Write the shipped token file of a split: heads of documents, the same budget of tokens for every domain."""
    sizes = token_bytes(tokenizer)
    documents = load_split(cache, split)
    # file order is alphabetical: a shuffle keeps the budget from taking only the first letters
    np.random.default_rng(1).shuffle(documents)
    chosen: list[tuple[str, str, np.ndarray]] = []
    for domain in DOMAINS:
        left = SHIPPED_TOKENS[split]
        for d in (d for d in documents if d["domain"] == domain):
            ids = np.array(tokenizer.encode(d["text"]).ids, np.uint16)[: min(left, MAX_DOCUMENT_TOKENS)]
            if len(ids) < 256:
                continue
            chosen.append((domain, d["name"], ids))
            left -= len(ids)
            if left < 256:
                break
    sources = json.loads((cache / "sources.json").read_text(encoding="utf-8"))["domains"]
    meta = {
        "format": "moesim token file v1",
        "split": split,
        "tokenizer": "tokenizer.json",
        "excerpts": f"first {MAX_DOCUMENT_TOKENS} tokens of a document at most",
        "sources": {d: {k: s[k] for k in ("package", "version", "licence")} for d, s in sources.items()},
    }
    np.savez_compressed(
        path,
        tokens=np.concatenate([c[2] for c in chosen]),
        offsets=np.cumsum([0, *(len(c[2]) for c in chosen)], dtype=np.int64),
        bytes=np.array([sizes[c[2]].sum() for c in chosen], np.int32),
        domain=np.array([c[0] for c in chosen]),
        name=np.array([c[1] for c in chosen]),
        meta=np.array(json.dumps(meta)),
    )


def load_token_file(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a token file."""
    with np.load(path, allow_pickle=False) as z:
        return {k: z[k] for k in z.files}


@torch.no_grad()
def bits_per_byte(model: TinyMoeForCausalLM, file: dict[str, np.ndarray], max_documents: int | None = None) -> dict:
    """Bits per byte of every domain of a token file and their mean.

    Parameters
    ----------
    model : TinyMoeForCausalLM
    file : dict
        What `load_token_file` returns.
    max_documents : int, optional
        Use only the first documents of each domain, for a quick look.

    Returns
    -------
    dict
        Domain name to bits per byte, and "mean" for the unweighted mean over the domains.
    """
    size = model.config.context
    windows, targets, owners = [], [], []
    total_bytes = dict.fromkeys(DOMAINS, 0)
    used = dict.fromkeys(DOMAINS, 0)
    for d, domain in enumerate(file["domain"].tolist()):
        if max_documents is not None and used[domain] >= max_documents:
            continue
        used[domain] += 1
        total_bytes[domain] += int(file["bytes"][d])
        ids = file["tokens"][file["offsets"][d] : file["offsets"][d + 1]].astype(np.int64)
        inputs = np.concatenate(([SEPARATOR_ID], ids[:-1]))
        for start in range(0, len(ids), size):
            x, y = inputs[start : start + size], ids[start : start + size]
            pad = size - len(x)  # causal: padding at the end changes nothing before it
            windows.append(np.pad(x, (0, pad)))
            targets.append(np.pad(y, (0, pad), constant_values=-1))
            owners.append(DOMAINS.index(domain))
    sums = torch.zeros(len(DOMAINS), dtype=torch.float64)
    for i in range(0, len(windows), 16):
        x, y = (torch.from_numpy(np.stack(part[i : i + 16])) for part in (windows, targets))
        loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")
        sums.index_add_(0, torch.tensor(owners[i : i + 16]), loss.view(y.shape).sum(1).double())
    result = {d: float(sums[i] / np.log(2)) / total_bytes[d] for i, d in enumerate(DOMAINS) if total_bytes[d]}
    return result | {"mean": float(np.mean(list(result.values())))}
