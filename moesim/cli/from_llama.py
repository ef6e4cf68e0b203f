"""Owns ``moesim from-llama``: a command line of llama.cpp or ik_llama.cpp as a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from moesim.cli.options import bundled, check_target, note, say, write
from moesim.errors import InputError
from moesim.llama.flags import to_scenario
from moesim.llama.options import parse_command

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command(
    "from-llama",
    epilog="Example: moesim from-llama 'llama-bench -m Qwen3-30B-A3B-Q4_K_M.gguf -ncmoe 20 -fa 1' --hardware desktop-24gb -o run.yaml",
)
def command(
    line: Annotated[str, typer.Argument(metavar="LINE", help="The command line, as one quoted argument.", show_default=False)],
    hardware: Annotated[
        str,
        typer.Option(
            metavar="MACHINE", help="A profile, or parts joined by +.", autocompletion=bundled("hardware_profiles"), show_default=False
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="A bundled model or file in place of the line's -m.", autocompletion=bundled("models"), show_default=False
        ),
    ] = "",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION",
            help="Formats in place of what the file's name says, as in a scenario: Q4_K, plan.yaml, '{default: Q8_0, routed_experts: IQ2_XS}'.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="llama.cpp or ik_llama.cpp; default: told by the options that are used.", show_default=False)
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.yaml", help="Write the scenario here instead of to stdout.", show_default=False),
    ] = None,
) -> None:
    """Turn a llama.cpp command line into a scenario.

    Lines of llama-bench, llama-cli, llama-server and of ik_llama.cpp are read; what has no counterpart is noted on stderr.
    """
    if output is not None:
        check_target(output, "--output", ".yaml")
    said = parse_command(line, engine)
    found = to_scenario(said, hardware, model, output.stem if output is not None else "", _plain(precision))
    head = f"# {' '.join(line.split())}\n" if line.isprintable() else ""
    text = head + yaml.safe_dump(found.scenario, sort_keys=False, width=140, allow_unicode=True)
    if output is None:
        say(text)
    else:
        write(output, text, "--output")
    for remark in found.notes:
        note(f"note: {remark}")


def _plain(precision: str | None) -> Any:
    """A precision in a scenario's syntax as plain data."""
    try:
        return None if precision is None else yaml.safe_load(precision)
    except yaml.YAMLError:
        expected = "a format, a plan's file or a mapping of parts to formats"
        raise InputError(
            "--precision", expected=expected, got=f'"{precision}"', fix="write it as in a scenario: '{default: Q4_K}'"
        ) from None
