"""Owns the options that several commands share, and where their output goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moesim import resources
from moesim.errors import InputError

EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports of a program whose reader went away


def bundled(kind: str) -> Callable[[str], list[str]]:
    """Return what completes the bundled names of one kind in a shell; where none fits the shell completes file names."""
    return lambda incomplete: [name for name in resources.names(kind) if name.startswith(incomplete)]


class Format(StrEnum):
    """What a command prints."""

    text = "text"
    json = "json"
    md = "md"
    csv = "csv"


class ListFormat(StrEnum):
    """What a command prints that has no tables to flatten."""

    text = "text"
    json = "json"


ScenarioName = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="A bundled name (see moesim scenarios) or a YAML file.",
        autocompletion=bundled("scenarios"),
        show_default=False,
    ),
]
Output = Annotated[Format, typer.Option("-o", "--output", help="Format of the answer on stdout.")]
ListOutput = Annotated[ListFormat, typer.Option("-o", "--output", help="Format of the answer on stdout.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a value of the scenario; may be repeated.", show_default=False),
]

Machine = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="MACHINE",
        help="The same as --set hardware=MACHINE: a profile, or parts joined by +.",
        autocompletion=bundled("hardware_profiles"),
        show_default=False,
    ),
]


def say(text: str) -> None:
    """Print data on stdout; a reader that went away ends the command (typer itself would exit with 1 then)."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise typer.Exit(EXIT_BROKEN_PIPE) from None


def note(text: str) -> None:
    """Print a note on stderr."""
    print(text, file=sys.stderr)


def check_target(path: Path, option: str, suffix: str) -> Path:
    """Return a path that can be written later, or refuse it now, before the work is done."""
    if path.suffix.lower() != suffix:
        raise InputError(option, expected=f"a file name that ends in {suffix}", got=f'"{path}"')
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(option, expected="a file in a folder that exists", got=f'"{path}"', fix=f"create {path.parent} first")
    return path


def write(path: Path, text: str, option: str) -> None:
    """Write a text file, or raise an InputError that names it."""
    with writing(path, option):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Name the file and the option that asked for it in an InputError where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(option, expected="a writable file", got=error.strerror or str(error), where=str(path)) from None
