"""Owns ``moesim trace fit`` and ``moesim trace generate``: a routing profile from a trace, and a trace from a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from moesim.cli.options import ListFormat, ListOutput, bundled, check_target, note, say
from moesim.cli.traces import read_trace
from moesim.errors import InputError
from moesim.generate import from_popularity, zipf_popularity
from moesim.generate.bundled import bundled_likes, find_like
from moesim.generate.fit import CLASSES, RANK, fit
from moesim.generate.like import generate
from moesim.generate.routing_profile import LikeProfile, save_like
from moesim.model_files import load_model
from moesim.text_table import columns
from moesim.trace import RoutingTrace, save_trace

BASELINES = "uniform", "zipf"  # what others assume


def register(app: typer.Typer) -> None:
    """Add the commands to ``moesim trace``."""
    app.command("fit", epilog="Example: moesim trace fit mine.npz --out mine.json")(fit_command)
    app.command("generate", epilog="Example: moesim trace generate --like gpt-oss-20b --rows 4000 --sequences 16 --out drawn.npz")(
        generate_command
    )


def fit_command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A trace of any known format, or the name of a bundled one.",
            autocompletion=bundled("traces"),
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The profile to write, a .json file.", show_default=False)],
    rank: Annotated[int, typer.Option(help="Factors that all layers share, at most.", min=1, max=512)] = RANK,
    classes: Annotated[int, typer.Option(help="Token classes, at most.", min=1, max=512)] = CLASSES,
    seed: Annotated[int, typer.Option(help="Seed of the fit.", min=0)] = 0,
    output: ListOutput = ListFormat.text,
) -> None:
    """Fit a routing profile to a trace, to generate more like it."""
    check_target(out, "--out", ".json")
    trace = read_trace(file)
    profile = fit(trace, np.random.default_rng(seed), rank=rank, classes=classes, source=Path(file).name, progress=_progress)
    save_like(profile, out)
    note(f"wrote {out}")
    _show(profile, output)


def generate_command(
    like: Annotated[
        str,
        typer.Option(
            "--like",
            help="A bundled profile or a .json file of moesim trace fit; list: the bundled ones; uniform or zipf: independent draws.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="The trace to write, an .npz file.", show_default=False)] = None,
    rows: Annotated[int, typer.Option(help="Tokens in all.", min=1, max=20_000_000)] = 4096,
    sequences: Annotated[int, typer.Option(help="Sequences of equal length.", min=1)] = 16,
    prefill: Annotated[int, typer.Option(help="First rows of each sequence that are prefill.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.", min=0)] = 0,
    model: Annotated[
        str | None,
        typer.Option(help="With uniform and zipf: the model whose shape it is.", autocompletion=bundled("models"), show_default=False),
    ] = None,
    zipf_exponent: Annotated[float, typer.Option(help="Of zipf: popularity falls as rank to minus this power.", min=0, max=4)] = 1.0,
    output: ListOutput = ListFormat.text,
) -> None:
    """Generate a trace that routes like a profile's model, or as others assume: independently, uniformly or by Zipf's law."""
    if like == "list":
        lines = {name: str(path) for name, path in bundled_likes().items()}
        say(json.dumps(lines, indent=2) if output is ListFormat.json else "\n".join(lines))
        return
    if out is None:
        raise InputError("--out", expected="a file to write", got="none", fix="say --out drawn.npz")
    check_target(out, "--out", ".npz")
    if (model is not None) != (like in BASELINES):
        fix = "say --model NAME with them, and with them alone"
        raise InputError("--model", expected=f"a model with {' and '.join(BASELINES)}", got=f"{model or 'none'} with {like}", fix=fix)
    rng, profile = np.random.default_rng(seed), None
    if model is not None:
        spec = load_model(model)
        shape = len(spec.moe_layers), spec.n_experts
        popularity = np.ones(shape) if like == "uniform" else zipf_popularity(*shape, zipf_exponent, rng)
        trace = from_popularity(popularity, spec.top_k, rows, rng, n_sequences=sequences, prefill_rows=prefill)
    else:
        profile = find_like(like)
        trace = generate(profile, rows, rng, n_sequences=sequences, prefill_rows=prefill)
    save_trace(trace, out)
    _say_trace(profile, trace, out, output)


def _say_trace(profile: LikeProfile | None, trace: RoutingTrace, out: Path, output: ListFormat) -> None:
    if output is ListFormat.json:
        say(json.dumps({"file": str(out), "hash": trace.hash, "meta": trace.meta}, indent=2, sort_keys=True))
        return
    say(f"{out}: {trace!r}")
    for caveat in trace.meta["caveats"]:
        say(f"  {caveat}")
    assumed = [figure.name for figure in (profile.figures if profile is not None else ()) if figure.basis == "assumed"]
    if assumed:
        say(f"  assumed: {', '.join(assumed)}")


def _show(profile: LikeProfile, output: ListFormat) -> None:
    if output is ListFormat.json:
        figures = [{"name": f.name, "value": f.value, "basis": f.basis, "source": f.source} for f in profile.figures]
        say(json.dumps({"model": profile.model, "source": profile.source, "notes": list(profile.notes), "figures": figures}, indent=2))
        return
    say(repr(profile))
    for text in profile.notes:
        say(f"  {text}")
    rows = [("figure", "value", "basis", "source"), *((f.name, f"{f.value:.4g}", f.basis, f.source) for f in profile.figures)]
    say("\n".join(columns(rows, right=[1])))


def _progress(stage: str, done: int, total: int) -> None:
    if done == total or done % 10 == 0:
        note(f"{stage}: {done}/{total}")
