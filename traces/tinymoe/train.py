"""Trains the tokenizer and the tiny MoE model: the recipe and the loop. Under 20 minutes on one CPU thread.

    python train.py --cache DIR --out FOLDER [--steps N]

FOLDER receives tokenizer.json, heldout.npz, calibration.npz, weights.safetensors, config.json and curve.csv. The run
is deterministic for a given number of threads, and continues from DIR/checkpoint.safetensors where one is found.

The loss has three parts: cross entropy; 0.002 (by default) times the load-balancing loss E * sum_e f_e * p_e, where
f_e is the share of the choices that went to expert e and p_e the mean router probability; and 0.001 times the squared
log-sum-exp of the router logits. The balancing weight sets how skewed the popularity of experts becomes; README.md
says why it was chosen.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import DOMAINS
from data import bits_per_byte, load_token_file, token_bytes, train_tokenizer, training_streams, write_token_file
from model import Routing, TinyMoeConfig, TinyMoeForCausalLM, load_model, save_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

CURVE_COLUMNS = ("step", "tokens", "train_bits_per_byte", "heldout_bits_per_byte")


def router_losses(capture: list[Routing], n_experts: int) -> tuple[Tensor, Tensor]:
    """Load-balancing loss and z-loss, both as the mean over the layers."""
    balance, z = [], []
    for r in capture:
        share = torch.bincount(r.expert_ids.flatten(), minlength=n_experts) / r.expert_ids.numel()
        balance.append(n_experts * (share * r.logits.softmax(-1).mean((0, 1))).sum())
        z.append(r.logits.logsumexp(-1).square().mean())
    return torch.stack(balance).mean(), torch.stack(z).mean()


def learning_rate(step: int, steps: int, peak: float, warmup: int = 60) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def draw_batch(streams: dict[str, np.ndarray], rng: np.random.Generator, batch: int, size: int) -> Tensor:
    """Random windows, every domain equally likely whatever its size; int64 (batch, size + 1)."""
    rows = []
    for domain in rng.integers(len(DOMAINS), size=batch):
        stream = streams[DOMAINS[domain]]
        start = rng.integers(len(stream) - size)
        rows.append(stream[start : start + size + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def save_checkpoint(path: Path, model: TinyMoeForCausalLM, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Model, optimiser moments and the step, as plain tensors; replaced in one move."""
    tensors = {"step": torch.tensor(step)}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = p.detach().clone()
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"{key}.{name}"] = optimiser.state[p][key].clone()
    save_file(tensors, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_checkpoint(path: Path, model: TinyMoeForCausalLM, optimiser: torch.optim.Optimizer) -> int:
    """Restore what `save_checkpoint` wrote; returns the step to go on with."""
    tensors = load_file(path)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[f"model.{name}"])
            optimiser.state[p] = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")}
    return int(tensors["step"])


def prepare(cache: Path, out: Path, vocab_size: int) -> Tokenizer:
    """Tokenizer and token files; what is there already is kept."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "tokenizer.json"
    if not path.exists():
        train_tokenizer(cache, vocab_size).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    for split in ("heldout", "calibration"):
        if not (out / f"{split}.npz").exists():
            write_token_file(out / f"{split}.npz", cache, split, tokenizer)
    return tokenizer


def train(args: argparse.Namespace) -> None:
    """Run the whole recipe; see the module docstring."""
    torch.set_num_threads(args.threads)
    config = TinyMoeConfig(router_shift=args.shift)
    tokenizer = prepare(args.cache, args.out, config.vocab_size)
    streams = training_streams(args.cache, tokenizer)
    sizes = torch.from_numpy(token_bytes(tokenizer))
    heldout = load_token_file(args.out / "heldout.npz")
    model = TinyMoeForCausalLM(config, torch.Generator().manual_seed(args.seed))
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    checkpoint, curve_path = args.cache / f"{args.checkpoint}.safetensors", args.out / "curve.csv"
    first, rows = 0, []
    if checkpoint.exists():
        first = load_checkpoint(checkpoint, model, optimiser)
        with open(curve_path, encoding="utf-8", newline="") as f:
            rows = [r for r in csv.reader(f)][1:]
        rows = [r for r in rows if int(r[0]) <= first]

    else:
        held = bits_per_byte(model, heldout)["mean"]
        rows = [[0, 0, "", f"{held:.4f}"]]

    started, running = time.monotonic(), []
    for step in range(first, args.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        # a generator per step: a resumed run draws the same batches as an uninterrupted one
        window = draw_batch(streams, np.random.default_rng((args.seed, step)), args.batch, config.context)
        capture: list[Routing] = []
        logits = model(window[:, :-1], capture)
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        balance, z = router_losses(capture, config.n_experts)
        (loss + args.balance * balance + args.z_loss * z).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        nats_to_bits = window[:, 1:].numel() / math.log(2) / int(sizes[window[:, 1:]].sum())
        running.append(loss.item() * nats_to_bits)
        done = step + 1
        if done % 50 == 0 or done == args.steps:
            spent = time.monotonic() - started
            rate = (done - first) * args.batch * config.context / spent
            eta = spent / (done - first) * (args.steps - done)
            print(
                f"step {done}/{args.steps}  train {np.mean(running[-50:]):.3f} bits/byte  balance {balance.item():.3f}  "
                f"z {z.item():.2f}  {rate:.0f} tokens/s  {spent / 60:.1f} min, eta {eta / 60:.1f} min",
                flush=True,
            )
        if done % args.every == 0 or done == args.steps:
            held = bits_per_byte(model, heldout)["mean"]
            rows.append([done, done * args.batch * config.context, f"{np.mean(running):.4f}", f"{held:.4f}"])
            running = []
            with open(curve_path, "w", encoding="utf-8", newline="") as f:
                csv.writer(f, lineterminator="\n").writerows([CURVE_COLUMNS, *rows])
            save_checkpoint(checkpoint, model, optimiser, done)
            print(f"step {done}: held-out {held:.4f} bits/byte", flush=True)

    recipe = {k: getattr(args, k) for k in ("steps", "batch", "lr", "balance", "z_loss", "seed")}
    recipe |= {"tokens": args.steps * args.batch * config.context, "tokenizer": "tokenizer.json"}
    save_model(model, args.out, {"separator_token_id": 0, "training": recipe})
    # measured on what was written, float16 rounding included
    final = {k: round(v, 4) for k, v in bits_per_byte(load_model(args.out), heldout).items()}
    save_model(model, args.out, {"separator_token_id": 0, "training": recipe, "heldout_bits_per_byte": final})
    print(json.dumps(final))


def main() -> None:
    parser = argparse.ArgumentParser(description="train the tiny MoE model")
    parser.add_argument("--cache", type=Path, required=True, help="folder of corpus.py, also for the checkpoint")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for what is shipped")
    parser.add_argument("--checkpoint", default="checkpoint", help="name of the checkpoint in the cache")
    parser.add_argument("--steps", type=int, default=3300)
    parser.add_argument("--batch", type=int, default=4, help="windows per step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--balance", type=float, default=0.002, help="weight of the load-balancing loss")
    parser.add_argument("--z-loss", type=float, default=0.001)
    parser.add_argument("--shift", type=float, default=0.2, help="share of the previous token in the router's input")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=300, help="steps between two lines of the curve")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
