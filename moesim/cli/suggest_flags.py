"""Owns ``moesim suggest-flags``: the llama.cpp flags that a scenario's model runs best with on its machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moesim.cli.options import Assignments, ListFormat, ListOutput, Machine, ScenarioName, note, say
from moesim.errors import InputError, did_you_mean
from moesim.llama import suggest as llama_suggest
from moesim.llama.options import FORK, MAINLINE, TOOLS
from moesim.simulate import Case, load_case

_SEARCHED = ("placement", "prefetch", "pipeline", "io")  # sections of a scenario that the search sets itself

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command("suggest-flags", epilog="Example: moesim suggest-flags qwen3-30b-desktop --set precision=Q4_K")
def command(
    scenario: ScenarioName,
    output: ListOutput = ListFormat.text,
    assignments: Assignments = None,
    hardware: Machine = None,
    tool: Annotated[str, typer.Option(help="llama-cli, llama-server or llama-bench.")] = "llama-cli",
    engine: Annotated[str, typer.Option(help=f"{MAINLINE} or {FORK}.")] = MAINLINE,
) -> None:
    """Search the fastest llama.cpp flags for a scenario."""
    for option, value, known in (("--tool", tool, TOOLS), ("--engine", engine, (MAINLINE, FORK))):
        if value not in known:
            raise InputError(option, expected="one that is known", got=f'"{value}"', fix=did_you_mean(value, known))
    case = _case(scenario, tuple(assignments or ()), hardware)
    if "gpu1" in case.hardware.devices:
        note("note: only the first GPU is used; dividing layers among several is not searched")
    found = llama_suggest.suggest(case, tool, engine)
    say(llama_suggest.as_json(found) if output is ListFormat.json else llama_suggest.text(found))


def _case(scenario: str, assignments: tuple[str, ...], hardware: str | None) -> Case:
    """The case on its own or another machine; where that one lacks what the scenario's placement names, without that, as the search places anew."""
    if hardware is None:
        return load_case(scenario, assignments)
    changes = (*assignments, f"hardware={json.dumps(hardware)}")
    try:
        return load_case(scenario, changes)
    except InputError as error:
        if not error.what.startswith(_SEARCHED):
            raise
        case = load_case(scenario, (*changes, *(f"{field}={{}}" for field in _SEARCHED)))
        note(f"note: {error.what}: {hardware} has no {error.got}; the scenario's placement is left out, the search makes its own")
        return case
