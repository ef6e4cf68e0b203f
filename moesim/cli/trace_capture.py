"""Owns ``moesim trace capture``, ``moesim trace plot`` and ``moesim trace fetch``: a trace from a model, its picture, public traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moesim import resources
from moesim.capture import capture, load_model
from moesim.capture.files import prompts_of, read_prompts
from moesim.capture.gguf import capture_gguf
from moesim.capture.server import TIMEOUT_S, capture_server
from moesim.cli.options import ListFormat, ListOutput, bundled, check_target, note, say, writing
from moesim.cli.traces import read_trace
from moesim.errors import InputError
from moesim.fetch import REGISTRY, fetch, find_public, is_cached
from moesim.text_table import columns
from moesim.trace import save_trace
from moesim.trace_files import notes_of
from moesim.trace_formats.source import Options

SLOW_CELLS = 20_000  # rows x layers above which the replay of Belady takes more than a few seconds


def register(app: typer.Typer) -> None:
    """Add the commands to ``moesim trace``."""
    example = "Example: moesim trace capture ./olmoe --prompts prompts.txt --new-tokens 64 --out olmoe.npz"
    app.command("capture", epilog=example)(capture_command)
    app.command("plot", epilog="Example: moesim trace plot tinymoe --out tinymoe.png")(plot_command)
    app.command("fetch", epilog="Example: moesim trace fetch switch-base-8")(fetch_command)


def capture_command(
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help='One prompt a line; .jsonl: texts, or {"prompt": ...} or {"token_ids": [...]}.', show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.npz", help="The trace to write.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Folder of a model in safetensors, or a .gguf; with --server the model's name there.", show_default=False
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens to generate greedily after each prompt.")] = 0,
    max_prompt: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Cut longer prompts to so many tokens.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Where to run the model: cpu, cuda, cuda:1, mps.")] = "cpu",
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a running server that returns routed_experts instead.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.001, help="Longest wait for one answer of the server.")] = TIMEOUT_S,
    top_k: Annotated[int | None, typer.Option(metavar="K", min=1, help="Experts per token, if the server sends bare numbers.")] = None,
    layers: Annotated[int | None, typer.Option(metavar="L", min=1, help="Layers, if the server sends bare numbers.")] = None,
    experts: Annotated[int | None, typer.Option(metavar="E", min=1, help="Experts per layer; a server does not say.")] = None,
) -> None:
    """Run prompts through a local model or a server, and record which experts each token chose."""
    check_target(out, "--out", ".npz")
    if server is not None:
        asked = [_cut(prompt, max_prompt, f"{prompts}:{number}") for number, prompt in prompts_of(prompts)]
        options = Options(top_k, layers, experts)
        trace = capture_server(
            server,
            asked,
            new_tokens=new_tokens,
            model=model,
            options=options,
            timeout_s=timeout,
            progress=lambda done: note(f"{done} of {len(asked)} prompts"),
        )
        save_trace(trace, out)
    elif model is not None and model.endswith(".gguf"):
        trace = capture_gguf(
            resources.find("models", model),
            prompts,
            out,
            new_tokens=new_tokens,
            max_prompt=max_prompt,
            progress=lambda done, rows: note(f"{done} prompts, {rows:,} tokens"),
        )
    else:
        if model is None:
            raise InputError("MODEL", expected="a model's folder, a .gguf file, or --server URL", got="neither")
        if not Path(model).is_dir():
            raise InputError("MODEL", expected="a model's folder, a .gguf file, or --server URL", got=f'"{model}", which is no folder')
        asked_ids = read_prompts(prompts, model, max_prompt)
        trace = capture(
            load_model(model, device),
            asked_ids,
            out,
            new_tokens=new_tokens,
            name=Path(model).resolve().name,
            progress=lambda done, rows: note(f"{done} of {len(asked_ids)} prompts, {rows:,} tokens"),
        )
    for text in notes_of(trace):
        note(f"note: {text}")
    say(repr(trace))


def plot_command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A trace of any known format, or the name of a bundled one.",
            autocompletion=bundled("traces"),
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.png", help="The picture to write.", show_default=False)],
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens that caches and predictors are judged on.")] = 4000,
) -> None:
    """Draw a trace: who is used, how soon again, what caches of each size hit, how predictable the next layer is."""
    check_target(out, "--out", ".png")
    found = read_trace(file)
    if min(found.n_rows, rows) * found.n_layers > SLOW_CELLS:
        note(f"replaying caches over {min(found.n_rows, rows):,} tokens of {found.n_layers} layers ...")
    from moesim.plots.trace import plot_trace  # matplotlib is slow to import, and the other commands do without

    with writing(out, "--out"):
        plot_trace(found, out, rows)
    say(str(out))


def fetch_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A name that --list shows.", show_default=False)] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show what there is, and download nothing.")] = False,
    output: ListOutput = ListFormat.text,
    cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to keep it; by default the user's cache.", show_default=False)
    ] = None,
) -> None:
    """Download a public trace, pinned and checked, and print its path; once fetched it needs no network."""
    if list_:
        say(_listed(cache, output))
        return
    if name is None:
        raise InputError("NAME", expected="the name of a public trace", got="none", fix=f"known: {', '.join(sorted(REGISTRY))}")
    entry = find_public(name)
    size = sum(file.size_bytes for file in entry.files)
    note(f"{name}: {entry.about}")
    note(f"licence {entry.licence}, github.com/{entry.repository} at {entry.commit}")
    note("in the cache" if is_cached(name, cache) else f"downloading {size:,} bytes ...")
    path = fetch(name, cache)
    say(json.dumps({"name": name, "path": str(path), "licence": entry.licence}) if output is ListFormat.json else str(path))


def _cut(prompt: str | list[int], most: int | None, where: str) -> str | list[int]:
    if most is not None and isinstance(prompt, str):
        raise InputError(
            "--max-prompt", expected="prompts as token_ids, with --server", got="a text", fix="cut the text itself", where=where
        )
    return prompt[:most]


def _listed(cache: Path | None, output: ListFormat) -> str:
    rows = [
        {
            "name": name,
            "licence": entry.licence,
            "bytes": sum(file.size_bytes for file in entry.files),
            "cached": is_cached(name, cache),
            "source": f"github.com/{entry.repository} at {entry.commit[:8]}",
            "about": entry.about,
        }
        for name, entry in sorted(REGISTRY.items())
    ]
    if output is ListFormat.json:
        return json.dumps(rows, indent=2, sort_keys=True)
    head = ["name", "licence", "size", "cached", "source", "what"]
    table = [
        [str(r["name"]), str(r["licence"]), f"{r['bytes']:,} B", "yes" if r["cached"] else "no", str(r["source"]), str(r["about"])]
        for r in rows
    ]
    return "\n".join(columns([head, *table], [2]))
