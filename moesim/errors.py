"""Owns the errors that moesim raises on purpose and the exit code each one means.

Every message says what is wrong, what was expected, what was got and how to fix it; where the value came from a file,
it begins with ``file:line``. Anything that is not a ``MoesimError`` is a bug of ours and exits with 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_INTERNAL = 1
EXIT_INPUT = 2
EXIT_DOES_NOT_FIT = 3
EXIT_OUT_OF_TOLERANCE = 4


class MoesimError(Exception):
    """Base of all deliberate errors; ``exit_code`` is what the command line returns."""

    exit_code = EXIT_INTERNAL


class InputError(MoesimError):
    """Bad usage or bad input.

    Parameters
    ----------
    what : str
        The field or thing that is wrong, e.g. ``"hardware.tiers.ram.capacity"``.
    expected, got : str
        What would have been right, and what was found.
    fix : str
        What the user can do about it.
    where : str
        ``file:line`` (or ``file``, or the command-line option) that the value came from.
    """

    exit_code = EXIT_INPUT

    def __init__(self, what: str, *, expected: str = "", got: str = "", fix: str = "", where: str = "") -> None:
        self.what, self.expected, self.got, self.fix, self.where = what, expected, got, fix, where
        text = what
        if expected or got:
            text += ": " + ", ".join(part for part in (expected and f"expected {expected}", got and f"got {got}") if part)
        if fix:
            text += f"; {fix}"
        super().__init__(f"{where}: {text}" if where else text)

    def at(self, where: str) -> InputError:
        """Return the same error with its place stated (kept if it already has one)."""
        return InputError(self.what, expected=self.expected, got=self.got, fix=self.fix, where=self.where or where)

    def under(self, field: str) -> InputError:
        """Return the same error with its field named from one level up: ``default`` under ``precision`` is ``precision.default``."""
        what = self.what if self.what == field or self.what.startswith(field + ".") else f"{field}.{self.what}"
        return InputError(what, expected=self.expected, got=self.got, fix=self.fix, where=self.where)


class DoesNotFit(MoesimError):
    """A plan that the memory cannot hold, where the caller asked for a gate (``moesim budget --check``)."""

    exit_code = EXIT_DOES_NOT_FIT


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``'did you mean "x"? '`` for a near miss, followed by the known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f'did you mean "{close[0]}"? ' if close else ""
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{hint}known: {shown}"
