"""Owns ``moesim quality`` and ``moesim quality search``: what a precision plan costs on a real model, and the best plan for a budget.

torch is optional, so what needs it is imported when a command runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from moesim.cli.options import Format, Output, check_target, note, say, write, writing
from moesim.cli.progress import Tick, progress
from moesim.errors import InputError
from moesim.precision import get_format
from moesim.report import quality as report_quality
from moesim.units import parse

if TYPE_CHECKING:
    from moesim.quality.study import Measured, Study


class ModelOrCommand(TyperGroup):
    """A group whose first word may be a model: ``moesim quality tinymoe`` is ``moesim quality evaluate tinymoe``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["evaluate", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ModelOrCommand, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, no_args_is_help=True,
    help="Measure what precision costs in quality, find the best plan.",
    epilog="Example: moesim quality tinymoe --plan int4 --plan int3+clip",
)  # fmt: skip

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="tinymoe, or the folder of a transformers model (safetensors).", show_default=False)
]
Text = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Held-out documents, a file a domain: a text a line, or .jsonl with token_ids.", show_default=False),
]
CalibrationText = Annotated[
    list[Path] | None,
    typer.Option("--calibration", metavar="FILE", help="Other documents, to calibrate and choose by.", show_default=False),
]
Store = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Where results are kept, and found again. [default: NAME.quality here]", show_default=False),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of tuning and of intervals.")]
Threads = Annotated[int | None, typer.Option(metavar="N", min=1, help="Threads. [default: torch's]", show_default=False)]


@app.command("evaluate", epilog="Example: moesim quality evaluate tinymoe --plan int4 --plan plan.yaml -o md; 'evaluate' may be left out")
def evaluate(
    model: Model,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="A name of the ladder, a format, a YAML file or mapping; repeat it. [default: the ladder]",
            show_default=False,
        ),
    ] = None,
    text: Text = None,
    calibration: CalibrationText = None,
    sensitivity: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="The plan whose layers and parts are taken apart. [default: int3]", show_default=False),
    ] = None,
    real: Annotated[bool, typer.Option("--real", help="Run each plan in the real engine too (tinymoe).")] = False,
    store: Store = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each quantised model and its plan there.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw quality against bytes, sensitivity, loss by position.", show_default=False)
    ] = None,
    seed: Seed = 0,
    threads: Threads = None,
    output: Output = Format.text,
) -> None:
    """Measure plans on held-out text: losses with intervals, long texts, sensitivity, routing."""
    if plot is not None:
        check_target(plot, "--plot", ".png")
    study = open_study(model, text, calibration, store, seed, threads)
    from moesim.quality.answer import answer
    from moesim.quality.claims import Judge
    from moesim.quality.dequant import measure as measure_dequant
    from moesim.quality.plans import SENSITIVITY, find_plan, ladder
    from moesim.quality.sensitivity import sensitivity as take_apart

    spec = study.subject.spec
    chosen = dict(find_plan(name, spec) for name in plan) if plan else ladder(spec)
    unit_name, unit_plan = find_plan(sensitivity or SENSITIVITY, spec)
    began = time.process_time()
    with ticking() as tick:
        study.tick = tick or study.tick
        measured = []
        for name, it in chosen.items():
            measured.append(study.measure(name, it, real))
            note(
                f"{name}: {measured[-1].stored_bytes:,} bytes, loss {study.bootstrap.change(measured[-1].evaluation, study.reference[0]).value:.2f} %"
            )
        units = take_apart(study, unit_name, unit_plan)
    formats = dict.fromkeys(it.plan.format("routed_experts", spec.moe_layers[0]).name for it in measured)
    dequant = measure_dequant([name for name in formats if get_format(name).quantised])
    note(
        f"{len(measured)} plans; {time.process_time() - began:.0f} s of CPU time now, {sum(it.cpu_s for it in measured):.0f} s for the plans in all"
    )
    claims = Judge(spec, study.bootstrap, study.reference[0], measured).claims(units, dequant)
    if save is not None:
        _save(study, measured, save)
    data = answer(study, measured, units, dequant, claims)
    if plot is not None:
        _plot(data, plot)
    printers = {
        Format.text: report_quality.text, Format.json: report_quality.as_json, Format.md: report_quality.markdown,
        Format.csv: report_quality.as_csv,
    }  # fmt: skip
    say(printers[output](data))


@app.command("search", epilog='Example: moesim quality search --budget "2.9 MiB" --out plan.yaml')
def search(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="tinymoe, or the folder of a transformers model.")] = "tinymoe",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar='"X MiB"', help='The most bytes of all weights, or with --scenario the least speed, as "400 tok/s".', show_default=False
        ),
    ] = None,
    min_quality: Annotated[
        str | None, typer.Option(metavar='"X %"', help="Instead: the smallest plan that loses at most so much.", show_default=False)
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(metavar="SCENARIO", help="Gives the machine and workload of a speed budget.", show_default=False)
    ] = None,
    text: Text = None,
    calibration: CalibrationText = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Write the plan, as scenarios take it.", show_default=False)] = None,
    store: Store = None,
    seed: Seed = 0,
    threads: Threads = None,
    output: Output = Format.text,
) -> None:
    """Search a mixed plan: sensitivity first, then bits; compared with other orders on held-out text."""
    if out is not None:
        check_target(out, "--out", ".yaml")
    if (budget is None) == (min_quality is None):
        got = "both" if budget else "neither"
        raise InputError("moesim quality search", expected="one of --budget and --min-quality", got=got)
    goal, value = _goal(budget, min_quality, scenario)
    study = open_study(model, text, calibration, store, seed, threads)
    from moesim.quality.answer import search_answer
    from moesim.quality.search import search as run_search

    with ticking() as tick:
        study.tick = tick or study.tick
        found = run_search(study, goal, value, scenario or "")
    data = search_answer(study, found)
    if out is not None:
        write(out, data["yaml"], "--out")
    printers = {
        Format.text: report_quality.search_text, Format.json: report_quality.as_json, Format.md: report_quality.search_markdown,
        Format.csv: report_quality.as_csv,
    }  # fmt: skip
    say(printers[output](data))


def open_study(
    model: str, text: list[Path] | None, calibration: list[Path] | None, store: Path | None, seed: int, threads: int | None
) -> Study:
    """Load a model and its texts; results are kept beside the caller unless a folder is named.

    Raises
    ------
    InputError
        If torch is not installed, or a model of a folder comes without texts.
    """
    from moesim.capture.files import need

    torch = need("torch")
    from moesim.quality.store import Results
    from moesim.quality.study import Study
    from moesim.quality.subject import load_subject
    from moesim.quality.text import read_texts, read_token_file

    if threads is not None:
        torch.set_num_threads(threads)
    given = model != "tinymoe" or text or calibration
    if given and not (text and calibration):
        fix = "two different sets of files: what is measured on must not be calibrated on"
        raise InputError("moesim quality", expected="--text and --calibration", got="one or none of them", fix=fix)
    if text and calibration and (twice := {p.resolve() for p in text} & {p.resolve() for p in calibration}):
        raise InputError("--calibration", expected="other files than --text", got=str(min(twice)), fix="held-out text must be held out")
    subject = load_subject(model)
    if text and calibration:
        held, other = (read_texts(files, subject.folder, subject.spec.vocab_size) for files in (text, calibration))
    else:
        held, other = (read_token_file(subject.folder / f"{name}.npz") for name in ("heldout", "calibration"))
    kept = store if store is not None else Path(f"{subject.spec.name}.quality")
    return Study(subject, held, other, Results(kept), seed=seed)


@contextmanager
def ticking() -> Iterator[Tick | None]:
    """Yield what takes (what, done, all) where stderr is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    with progress("quality") as tick:
        yield tick


def _goal(budget: str | None, min_quality: str | None, scenario: str | None) -> tuple[str, float]:
    """What a search must reach: (bytes | loss | speed, number)."""
    if min_quality is not None:
        return "loss", _number(min_quality, "%", "--min-quality")
    if budget is not None and budget.rstrip().endswith("tok/s"):
        if scenario is None:
            raise InputError(
                "--budget", expected="--scenario beside a speed", got="none", fix="name a scenario: it gives machine and workload"
            )
        return "speed", _number(budget, "tok/s", "--budget")
    return "bytes", float(int(parse(budget or "", "bytes")))


def _number(text: str, unit: str, option: str) -> float:
    try:
        value = float(text.strip().removesuffix(unit))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise InputError(option, expected=f'a number with its unit, as "2 {unit}"', got=f'"{text}"')
    return value


def _save(study: Study, measured: list[Measured], folder: Path) -> None:
    from moesim.quality.answer import plan_yaml, stated

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--save", expected="a folder that can be written", got=error.strerror or str(error), where=str(folder)) from None
    for it in measured:
        study.quantised(it.plan).save(folder / f"{it.name}.safetensors")
        write(folder / f"{it.name}.yaml", plan_yaml(stated(study, it)), "--save")


def _plot(data: dict[str, Any], path: Path) -> None:
    from moesim.plots import quality as plots_quality  # matplotlib takes a while to import

    with writing(path, "--plot"):
        plots_quality.plot_quality(data, path)
