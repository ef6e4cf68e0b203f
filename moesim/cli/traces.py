"""Owns how commands read a trace that is named on the command line."""

from __future__ import annotations

from pathlib import Path

from moesim import resources
from moesim.cli.options import note
from moesim.errors import InputError
from moesim.profile import RoutingProfile
from moesim.trace import RoutingTrace
from moesim.trace_files import import_trace, notes_of


def check_other(out: Path, source: Path) -> None:
    """Refuse to write over the file that is read."""
    if out.exists() and out.samefile(source):
        raise InputError("--out", expected="another file than the one that is read", got=f'"{out}"', fix="choose another name")


def read_trace(file: str, out: Path | None = None) -> RoutingTrace:
    """Return a trace of any known format or a bundled one, to be written to ``out`` in some form; say on stderr what it does not hold."""
    path = resources.find("traces", file)
    if out is not None:
        check_other(out, path)
    found = import_trace(path)
    if isinstance(found, RoutingProfile):
        raise InputError("trace", expected="a trace", got="a source of counts, which has no rows", where=file)
    for text in notes_of(found):
        note(f"note: {text}")
    return found
