"""Owns ``moesim trace``: what a routing trace holds, traces of other tools, and parts and sums of traces."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moesim import resources
from moesim.cli import trace_capture, trace_generate
from moesim.cli.options import ListFormat, ListOutput, bundled, check_target, note, say, write
from moesim.cli.traces import check_other, read_trace
from moesim.errors import InputError
from moesim.profile import RoutingProfile, save_profile
from moesim.report import trace as report_trace
from moesim.trace import DECODE, PREFILL, RoutingTrace, save_trace
from moesim.trace_edit import counts_csv, merge_traces, parse_numbers, parse_span, phase_rows, route_trace_csv, to_profile
from moesim.trace_files import FORMATS, import_trace, load_map, notes_of
from moesim.trace_formats.source import Options
from moesim.trace_stats import analyse_phases

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
trace_generate.register(app)
trace_capture.register(app)
SLOW_CELLS = 200_000  # rows x layers above which the statistics take more than a few seconds
FORMAT_HELP = "auto (by content), or one of: " + ", ".join(FORMATS)


class Target(StrEnum):
    """What ``trace convert`` writes."""

    npz = "npz"
    profile = "profile"
    counts = "counts-csv"
    route_trace = "bigmoeonedge"


class PhaseName(StrEnum):
    """A phase of a trace."""

    prefill = "prefill"
    decode = "decode"


AnyFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A trace of any known format, or the name of a bundled one.",
        autocompletion=bundled("traces"),
        show_default=False,
    ),
]
FormatName = Annotated[str, typer.Option("--format", metavar="NAME", help=FORMAT_HELP)]
TopK = Annotated[int | None, typer.Option(metavar="K", min=1, help="Experts per token, where the file does not say.", show_default=False)]
Layers = Annotated[int | None, typer.Option(metavar="L", min=1, help="Layers, where the file does not say.", show_default=False)]
Experts = Annotated[
    int | None, typer.Option(metavar="E", min=1, help="Experts per layer, where the file does not say.", show_default=False)
]
Prompts = Annotated[str | None, typer.Option(metavar="N[,N...]", help="Prompt lengths, one a sequence.", show_default=False)]
MapFile = Annotated[
    Path | None, typer.Option("--map", metavar="FILE", help="Logical expert of each physical one (.npy or JSON).", show_default=False)
]
Metadata = Annotated[Path | None, typer.Option(metavar="FILE", help="Capture metadata of a StrataMoE trace.", show_default=False)]
Select = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Rows of a counts table to take; may be repeated.", show_default=False)
]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="OUT.npz", help="The file to write.", show_default=False)]


@app.callback()
def trace() -> None:
    """Look into routing traces."""


@app.command(epilog="Example: moesim trace info tinymoe -o json")
def info(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A trace of any known format, or the name of a bundled one.",
            autocompletion=bundled("traces"),
            show_default=False,
        ),
    ],
    output: ListOutput = ListFormat.text,
) -> None:
    """Show a trace's shape, skew, reuse, cache hit rates and predictability."""
    routing = read_trace(file)
    if routing.n_rows * routing.n_layers > SLOW_CELLS:
        note(f"analysing {routing.n_rows} rows of {routing.n_layers} layers ...")
    found = analyse_phases(routing)
    say(json.dumps(found, indent=2, sort_keys=True, allow_nan=False) if output is ListFormat.json else report_trace.text(routing, found))


@app.command("import", epilog="Example: moesim trace import route.csv -o route.npz")
def import_(
    file: AnyFile,
    format: FormatName = "auto",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="OUT", help="Write .npz (a profile: .json).", show_default=False)
    ] = None,
    top_k: TopK = None,
    layers: Layers = None,
    experts: Experts = None,
    prompt_tokens: Prompts = None,
    map: MapFile = None,
    metadata: Metadata = None,
    select: Select = None,
) -> None:
    """Read a trace that another tool recorded, and say what it does and does not hold."""
    if out is not None:
        check_target(out, "--out", ".json" if out.suffix.lower() == ".json" else ".npz")
    found = _read(file, format, _options(top_k, layers, experts, prompt_tokens, map, metadata, select), out)
    if out is not None:
        _save(found, out)
    say(repr(found))


@app.command(epilog="Example: moesim trace convert trace.mblt -o counts.csv")
def convert(
    file: AnyFile,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The file to write.", show_default=False)],
    to: Annotated[
        Target | None, typer.Option(help="What to write; by the suffix: .npz npz, .json profile, .csv counts-csv.", show_default=False)
    ] = None,
    format: FormatName = "auto",
    top_k: TopK = None,
    layers: Layers = None,
    experts: Experts = None,
    prompt_tokens: Prompts = None,
    map: MapFile = None,
    metadata: Metadata = None,
    select: Select = None,
) -> None:
    """Write a trace of any known format as another: .npz, a profile, a table of counts, or BigMoeOnEdge's CSV."""
    suffixes = {".npz": Target.npz, ".json": Target.profile, ".csv": Target.counts}
    wanted = to or suffixes.get(out.suffix.lower())
    if wanted is None:
        raise InputError("--out", expected=f"a name that ends in {', '.join(suffixes)}, or --to", got=f'"{out}"')
    check_target(out, "--out", {Target.npz: ".npz", Target.profile: ".json"}.get(wanted, ".csv"))
    found = _read(file, format, _options(top_k, layers, experts, prompt_tokens, map, metadata, select), out)
    if wanted is Target.profile:
        save_profile(found if isinstance(found, RoutingProfile) else to_profile(found, Path(file).name), out)
    elif isinstance(found, RoutingProfile):
        raise InputError("--to", expected="profile: the source holds counts without order", got=wanted.value, where=file)
    elif wanted is Target.npz:
        save_trace(found, out)
    else:
        write(out, counts_csv(found) if wanted is Target.counts else route_trace_csv(found), "--out")
    say(repr(found))


@app.command("slice", epilog="Example: moesim trace slice tinymoe --sequences 0-9 -o first.npz")
def slice_(
    file: AnyFile,
    out: Out,
    rows: Annotated[str | None, typer.Option(metavar="A:B", help="Rows A to B, B excluded.", show_default=False)] = None,
    sequences: Annotated[
        str | None, typer.Option(metavar="N,N-M", help="Whole sequences, by number in the file.", show_default=False)
    ] = None,
    phase: Annotated[PhaseName | None, typer.Option(help="Rows of one phase.", show_default=False)] = None,
) -> None:
    """Write a part of a trace: sequences first, then the phase, then rows of what is left."""
    check_target(out, "--out", ".npz")
    if rows is None and sequences is None and phase is None:
        raise InputError("trace slice", expected="--rows, --sequences or --phase", got="none of them")
    part = read_trace(file, out)
    if sequences is not None:
        part = part.select_sequences(parse_numbers(sequences, "--sequences"))
    if phase is not None:
        part = phase_rows(part, DECODE if phase is PhaseName.decode else PREFILL)
    if rows is not None:
        part = part.slice_rows(*parse_span(rows, part.n_rows, "--rows"))
    save_trace(part, out)
    say(repr(part))


@app.command(epilog="Example: moesim trace merge a.npz b.npz -o both.npz")
def merge(
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="Traces of one model shape.", show_default=False)],
    out: Out,
) -> None:
    """Join traces of one model shape into one file."""
    check_target(out, "--out", ".npz")
    merged = merge_traces([read_trace(file, out) for file in files], files)
    save_trace(merged, out)
    say(repr(merged))


def _options(
    top_k: int | None,
    layers: int | None,
    experts: int | None,
    prompt_tokens: str | None,
    map_file: Path | None,
    metadata: Path | None,
    select: list[str] | None,
) -> Options:
    chosen: dict[str, str] = {}
    for text in select or ():
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise InputError("--select", expected="COLUMN=VALUE, as in model=Qwen/Qwen3-30B-A3B", got=f'"{text}"')
        chosen[name.strip()] = value
    prompts = tuple(parse_numbers(prompt_tokens, "--prompt-tokens", ranges=False)) if prompt_tokens is not None else ()
    mapping = None if map_file is None else load_map(map_file)
    return Options(top_k, layers, experts, prompts, mapping, metadata, chosen)


def _read(file: str, format: str, options: Options, out: Path | None) -> RoutingTrace | RoutingProfile:
    """Read a file of any known format, and say on stderr what it does not hold."""
    path = resources.find("traces", file)
    if out is not None:
        check_other(out, path)
    found = import_trace(path, format, options)
    for text in notes_of(found):
        note(f"note: {text}")
    return found


def _save(found: RoutingTrace | RoutingProfile, out: Path) -> None:
    if isinstance(found, RoutingProfile):
        save_profile(found, check_target(out, "--out", ".json"))
    else:
        save_trace(found, check_target(out, "--out", ".npz"))
