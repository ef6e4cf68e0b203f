"""Records which experts the trained model chooses on held-out text: writes tinymoe.npz.

    python record.py [--folder FOLDER] [--per-domain N]

Only the shipped files of FOLDER are needed: the weights and heldout.npz. A sequence is 256 tokens of one document, the
first 64 rows marked as prefill and the other 192 as decode. The text is given, not generated ("teacher forced"), so the
decode rows are what the model would have routed had it produced exactly this text. The sequences take turns through
the domains, as a mix of requests would.

Arrays: expert_ids int16 (T, L, K) in the router's order, weights float16 (T, L, K), seq_id and position int32 (T,),
phase uint8 (T,) with 0 prefill and 1 decode, meta: a 0-d string of JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from corpus import DOMAINS
from data import load_token_file
from model import Routing, TinyMoeForCausalLM, load_model

PREFILL = 64
STRIDE = 512  # a gap between two excerpts of one document, so that they do not continue one another


def choose_sequences(file: dict[str, np.ndarray], length: int, per_domain: int) -> list[dict]:
    """Excerpts of held-out documents: first the heads of all documents of a domain, then second excerpts, and so on.

    Returns
    -------
    list of dict
        domain, document (name), document_index, offset (in tokens); domains take turns.
    """
    by_domain = []
    for domain in DOMAINS:
        documents = np.flatnonzero(file["domain"] == domain).tolist()
        found = []
        for offset in range(0, int(np.diff(file["offsets"]).max()), STRIDE):
            for d in documents:
                if offset + length <= file["offsets"][d + 1] - file["offsets"][d]:
                    entry = {"domain": domain, "document": str(file["name"][d]), "document_index": d, "offset": offset}
                    found.append(entry)
        by_domain.append(found[:per_domain])
    rounds = range(max(len(f) for f in by_domain))
    return [found[i] for i in rounds for found in by_domain if i < len(found)]


@torch.no_grad()
def route(model: TinyMoeForCausalLM, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights for tokens (B, S): int16 and float16 (B, S, L, K)."""
    ids, weights = [], []
    for i in range(0, len(tokens), 16):
        capture: list[Routing] = []
        model(torch.from_numpy(tokens[i : i + 16].astype(np.int64)), capture)
        ids.append(torch.stack([r.expert_ids for r in capture], dim=2).numpy().astype(np.int16))
        weights.append(torch.stack([r.weights for r in capture], dim=2).numpy().astype(np.float16))
    return np.concatenate(ids), np.concatenate(weights)


def record(folder: Path, per_domain: int) -> dict:
    """Write `folder`/tinymoe.npz; returns its meta."""
    model = load_model(folder)
    c = model.config
    file = load_token_file(folder / "heldout.npz")
    chosen = choose_sequences(file, c.context, per_domain)
    starts = [file["offsets"][s["document_index"]] + s["offset"] for s in chosen]
    tokens = np.stack([file["tokens"][i : i + c.context] for i in starts])  # (B, S)
    ids, weights = route(model, tokens)
    n, s = tokens.shape
    sources = json.loads(str(file["meta"]))["sources"]
    meta = {
        "format": "moesim-trace-npz v1",
        "model": "tinymoe",
        "n_layers": c.n_layers,
        "n_experts": c.n_experts,
        "top_k": c.top_k,
        "dataset": "held-out excerpts of five domains, see sources",
        "captured_by": "moesim traces/tinymoe/record.py",
        "licence": "routing only, no text: same licence as the project",
        "sources": sources,
        "n_tokens": n * s,
        "n_sequences": n,
        "missing_cells": 0,
        "caveats": [
            f"teacher forced: the text is given; rows from position {PREFILL} on are marked decode but nothing was sampled",
            "a sequence starts anywhere in a document where offset > 0, with no context before it",
            "a small model trained for minutes; its router mixes in the previous token (router_shift) to resemble large models",
            "domains take turns sequence by sequence; several sequences may come from one document",
            "weights are the softmax over the two chosen logits, descending by slot",
        ],
        "router_shift": c.router_shift,
        "sequences": [{"seq_id": i, "n_tokens": s, **entry} for i, entry in enumerate(chosen)],
    }
    np.savez_compressed(
        folder / "tinymoe.npz",
        expert_ids=ids.reshape(n * s, c.n_layers, c.top_k),
        weights=weights.reshape(n * s, c.n_layers, c.top_k),
        seq_id=np.repeat(np.arange(n, dtype=np.int32), s),
        position=np.tile(np.arange(s, dtype=np.int32), n),
        phase=np.tile((np.arange(s) >= PREFILL).astype(np.uint8), n),
        meta=np.array(json.dumps(meta)),
    )
    return meta


def main() -> None:
    parser = argparse.ArgumentParser(description="record the routing of the tiny MoE model on held-out text")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="weights and heldout.npz; receives the trace")
    parser.add_argument("--per-domain", type=int, default=28, help="sequences of each domain")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a fixed number of threads gives the same sums, so the same choices at near ties
    meta = record(args.folder, args.per_domain)
    print(f"{meta['n_sequences']} sequences, {meta['n_tokens']} tokens")


if __name__ == "__main__":
    main()
