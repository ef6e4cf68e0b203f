"""Owns the fine-tuning of adapters: a few steps on calibration text towards what the unquantised model says, the quantised weights frozen.

The loss is the Kullback-Leibler divergence of the quantised model's next-token distribution from the unquantised one's. What is kept is the
better of before and after on text of its own, so that tuning never makes a plan worse on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moesim.quality.evaluate import evaluate
from moesim.quality.quantise import Quantised, originals, restore
from moesim.quality.subject import Subject, view_of
from moesim.quality.text import Text, windows_of

STEPS = 60
WINDOWS = 4  # of a step
RATE = 1e-3


def tune(
    subject: Subject,
    quantised: Quantised,
    calibration: Text,
    choosing: Text,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Quantised:
    """Return a quantised model with tuned adapters; the model's own weights are left as they were.

    Parameters
    ----------
    subject : Subject
        Holding its own, unquantised weights.
    quantised : Quantised
        With adapters to begin from.
    calibration, choosing : Text
        What is trained on, and what decides whether the result is kept.
    """
    own = originals(subject)
    teacher = {name: p.detach().clone() for name, p in subject.module.named_parameters()}
    pairs = {key: (a.float().requires_grad_(), b.float().requires_grad_()) for key, (a, b) in quantised.adapters.items()}
    adapted = [site for site in subject.sites if site.key in pairs]
    try:
        restore(subject, {site.key: quantised.weight(site, adapted=False) for site in subject.sites})
        frozen = {name: p.detach().clone() for name, p in subject.module.named_parameters()}

        def parameters() -> dict[str, Tensor]:
            out = {name: frozen[name].clone() for name in {site.parameter for site in adapted}}
            for site in adapted:
                a, b = pairs[site.key]
                view_of(out[site.parameter], site).add_(b @ a)
            return out

        optimiser = torch.optim.Adam([t for pair in pairs.values() for t in pair], lr=RATE)
        windows = windows_of(calibration, subject.window, subject.first_token, WINDOWS)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
        for step in range(STEPS):
            tokens = torch.from_numpy(windows[order[step % len(order)]].inputs)
            with torch.no_grad():
                wanted = subject.run(tokens, teacher).log_softmax(-1)
            for group in optimiser.param_groups:
                group["lr"] = RATE * (1 - step / STEPS)
            found = subject.run(tokens, parameters()).log_softmax(-1)
            loss = torch.nn.functional.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            if progress is not None:
                progress(step + 1, STEPS)
        tuned = replace(quantised, adapters={key: (a.detach().bfloat16(), b.detach().bfloat16()) for key, (a, b) in pairs.items()})
        return min((tuned, quantised), key=lambda it: loss_of(subject, it, choosing))
    finally:
        restore(subject, own)


def loss_of(subject: Subject, quantised: Quantised, text: Text) -> float:
    """Loss per token of a quantised model; its weights stay in the model."""
    restore(subject, weights_of(subject, quantised))
    return evaluate(subject, text, routing=False)[0].mean_loss


def weights_of(subject: Subject, quantised: Quantised) -> dict[str, Tensor]:
    """Return what all of a quantised model's bytes stand for, by ``Site.key``."""
    return {site.key: quantised.weight(site) for site in subject.sites}
