"""Owns the validation suite's file: cases that are one scenario with some of its values changed, on the machine that was measured.

A suite is a folder with a ``suite.yaml``, or that file; a single scenario is a suite of one case. Whatever hardware a scenario names, the
calibrated profile takes its place; what a case changes of it (``hardware_set``: a slower drive) is applied on top.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from moesim import config, resources
from moesim.config import Spec, problem
from moesim.errors import InputError
from moesim.simulate import Case, load_case

SUITE_FILE = "suite.yaml"


class SuiteCase(Spec):
    """One case: its name, whether the quick suite has it, and the values of the base scenario that it changes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    quick: bool = False
    set: dict[str, Any] = {}


class Suite(Spec):
    """A suite as its file states it."""

    base: str
    cases: Annotated[list[SuiteCase], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Suite:
        names = [case.name for case in self.cases]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise problem("a name of its own for each case", f'"{twice[0]}" twice', "rename one of them")
        return self


@dataclass(frozen=True)
class Entry:
    """A case to be loaded: a scenario with assignments, and where the case is stated."""

    name: str
    scenario: Path
    assignments: tuple[str, ...]
    where: str

    def load(self, profile: Path) -> Case:
        """Load the case on a measured machine.

        Raises
        ------
        InputError
            If the scenario or what the case changes is wrong; it names the case.
        """
        machine = f"hardware={json.dumps(str(profile.resolve()))}"
        try:
            return load_case(self.scenario, (*self.assignments, machine, f"name={json.dumps(self.name)}"))
        except InputError as error:
            where = self.where if not error.where or error.where.startswith("--set ") else error.where
            what = f"case {self.name}: {error.what}"
            raise InputError(what, expected=error.expected, got=error.got, fix=error.fix, where=where) from None


def entries(target: str | Path, quick: bool = False) -> list[Entry]:
    """Return the cases of a suite's folder or file, or of a single scenario.

    Parameters
    ----------
    target : str or Path
        A folder with ``suite.yaml``, such a file, or the name or path of a scenario.
    quick : bool
        Only the cases that the suite marks as quick; a single scenario is its own quick suite.

    Raises
    ------
    InputError
        If there is no such suite or scenario, or the file is wrong.
    """
    path = Path(target)
    if path.is_dir():
        path = path / SUITE_FILE
        if not path.is_file():
            raise InputError("suite", expected=f"a {SUITE_FILE} in the folder", got="none", where=str(target))
    elif path.name != SUITE_FILE or not path.is_file():
        found = resources.find("scenarios", str(target))
        return [Entry(found.stem, found, (), str(found))]
    out = list(_entries(path, quick))
    if not out:
        raise InputError("--quick", expected="cases marked quick: true", got="none", where=str(path))
    return out


def _entries(path: Path, quick: bool) -> Iterator[Entry]:
    document = config.read_yaml(path)
    suite = config.build(Suite, document)
    base = resources.find("scenarios", suite.base, base=path.parent, where=document.where(("base",)))
    for i, case in enumerate(suite.cases):
        if case.quick or not quick:
            assignments = tuple(f"{name}={json.dumps(value)}" for name, value in case.set.items())
            yield Entry(case.name, base, assignments, document.where(("cases", i)))
