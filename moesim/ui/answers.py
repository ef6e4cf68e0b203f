"""Owns what a what-if page shows for a screen: the run, its tables, the YAML file and the command that give it again. No widgets.

Runs use the compiled engine: its result is the reference's, sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from moesim.config import Document, command
from moesim.report.page import Entry, best, comparison, glance, whatif_blocks
from moesim.report.page_blocks import Block, write_html
from moesim.scenario import Scenario
from moesim.simulate import Case, Result, make_case, simulate
from moesim.sweep.work import routing_of
from moesim.ui.screen import Screen, document_of, yaml_text
from moesim.whatif import WhatIf, whatif

MOST = 4  # screens kept: two of them side by side, and what they were before the last change


@dataclass(frozen=True)
class Answer:
    """What a screen gave. ``yaml`` gives the result again, and so does ``command`` where the model lies where it did."""

    screen: Screen
    result: Result
    assignments: tuple[str, ...]
    yaml: str

    @cached_property
    def data(self) -> dict[str, Any]:
        """The result in the shape of ``moesim run -o json``."""
        return self.result.as_dict()

    @property
    def command(self) -> str:
        return command(self.screen.scenario, self.assignments)


@lru_cache(maxsize=MOST)
def answer(screen: Screen) -> Answer:
    """Run a screen.

    Raises
    ------
    InputError
        If a control says something impossible.
    """
    scenario, document, base = document_of(screen)
    result = simulate(_case(scenario, document, base))
    return Answer(screen, result, document.assignments, yaml_text(screen))


def _case(scenario: Scenario, document: Document, base: Path) -> Case:
    case = make_case(scenario.model_copy(update={"engine": "fast"}), document, base)
    case.__dict__["routing"] = routing_of(case)  # a trace takes longer to load and adapt than most runs take
    return case


def what_if(found: Answer, every_change: bool = False, progress: Callable[[int, int], None] | None = None) -> WhatIf:
    """Return what a screen's speed depends on; with ``every_change`` also what each change buys, a run of its own each."""
    case, result = found.result.case, found.result
    return whatif(case, found.screen.scenario, found.assignments, draws=0, quick=not every_change, progress=progress, result=result)


def glance_html(found: Answer, label: str) -> str:
    """Return memory bars, lanes and where the time goes, as a page of its own."""
    return write_html(glance(Entry(label, found.data, found.result), label))


def whatif_html(ahead: WhatIf) -> str:
    """Return the what-if tables as a page of its own; empty where there are none."""
    blocks = list(whatif_blocks(ahead))
    return write_html(blocks) if blocks else ""


def comparison_html(found: Sequence[Answer], labels: Sequence[str]) -> str:
    """Return the figures of several screens side by side, as a page of its own."""
    entries = [Entry(label, each.data) for each, label in zip(found, labels, strict=True)]
    return write_html([Block("strong", best(entries, labels)), *comparison(entries, labels)])
