"""The notebooks: all of them there, each the pair of its source, executed without error. CI executes them (``notebooks/build.py``)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed (pip install 'moesim[notebooks]')")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py"))
MOST_BYTES = 3_000_000  # of all notebooks
# a path from the root of a file system, as errors, warnings and temporary files show them; not the tail of a name, an address or a ratio
ABSOLUTE = re.compile(r"(?<![\w.<:/])/(?:home|root|tmp|usr|opt|work|var|mnt|Users|private)/|[A-Z]:\\\\")


def notebook(source: Path) -> Any:
    return jupytext.read(source.with_suffix(".ipynb"))


def cells(it: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in it.cells]


def texts(output: Any) -> list[str]:
    """What an output says: its stream, or every form of its data that is text."""
    if output.output_type == "stream":
        return [output.text]
    return [str(value) for kind, value in output.get("data", {}).items() if not kind.startswith("image/png")]


def test_one_to_ten() -> None:
    assert [path.stem[:2] for path in SOURCES] == [f"{n:02}" for n in range(1, 11)]
    assert [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))] == [path.stem for path in SOURCES]


def test_size() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS.glob("*.ipynb")) < MOST_BYTES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_pair(source: Path) -> None:
    assert cells(notebook(source)) == cells(jupytext.read(source))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_executed(source: Path) -> None:
    code = [cell for cell in notebook(source).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs) or source.stem[:2] == "09"  # that one shows a table


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_absolute_paths(source: Path) -> None:
    said = [text for cell in notebook(source).cells for output in cell.get("outputs", []) for text in texts(output)]
    assert not [found for text in said if (found := ABSOLUTE.search(text))]


def test_titles_ask() -> None:
    """The first line of each is its only heading of the first level, which the documentation lists."""
    for source in SOURCES:
        headings = [line for kind, text in cells(jupytext.read(source)) if kind == "markdown" for line in re.findall(r"^# .+", text, re.M)]
        assert len(headings) == 1, source.name


def test_unknown_name() -> None:
    pytest.importorskip("nbclient", reason="nbclient is not installed (pip install 'moesim[notebooks]')")
    run = subprocess.run([sys.executable, NOTEBOOKS / "build.py", "77"], capture_output=True, text=True)
    assert run.returncode == 1 and "01_quickstart" in run.stderr and "got 77" in run.stderr


def test_failing_cell(tmp_path: Path) -> None:
    """A notebook that fails shows the cell and exits with 1; nothing is written."""
    pytest.importorskip("nbclient", reason="nbclient is not installed (pip install 'moesim[notebooks]')")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (pip install 'moesim[notebooks]')")
    (tmp_path / "build.py").write_text((NOTEBOOKS / "build.py").read_text())
    (tmp_path / "01_wrong.py").write_text("# %%\nprint(1 + 1)\n\n# %%\nlanes = 1 / 0\n")
    run = subprocess.run([sys.executable, tmp_path / "build.py", "--write"], capture_output=True, text=True)
    assert run.returncode == 1 and "lanes = 1 / 0" in run.stdout and "ZeroDivisionError" in run.stdout
    assert not (tmp_path / "01_wrong.ipynb").exists()


def test_every_numbered_claim_has_a_verdict() -> None:
    """The claims page shows the table of notebook 09; its numbers are those of the field notes, where these are at hand."""
    tables = [
        out["data"]["text/markdown"]
        for cell in notebook(NOTEBOOKS / "09_field_claims.py").cells
        for out in cell.get("outputs", ())
        if "text/markdown" in out.get("data", {})
    ]
    rows = {row[0]: row[2] for row in (line.strip("| ").split(" | ") for line in tables[-1].splitlines()[2:])}
    assert set(rows.values()) <= {"**holds**", "**holds when**", "**refuted**", "**contradicts itself**"}
    notes = ROOT.parent / "shared" / "CLAIMS.md"
    if not notes.exists():
        pytest.skip("needs ../shared/CLAIMS.md, the numbered field claims")
    asked = set(re.findall(r"^- ([MTPHBSQW]\d+) ", notes.read_text(encoding="utf-8"), re.M))
    assert asked == set(rows), asked ^ set(rows)
