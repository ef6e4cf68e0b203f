"""Owns the making of the notebooks: each ``NN_name.py`` (jupytext, py:percent) is converted and executed beside its source.

``python notebooks/build.py [NAME...] [--write]``; it needs ``moesim[notebooks]``. It prints wall seconds, CPU seconds and size of each
notebook, and exits with 1 after an error, showing the cell. With ``--write`` the executed notebooks are kept, without times, as ``NN_name.ipynb``.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).resolve().parent
LIMIT_S = 90.0


def sources(names: list[str]) -> list[Path]:
    """Return the sources of some notebooks, by name or number; of all where none is named."""
    every = sorted(HERE.glob("[0-9][0-9]_*.py"))
    unknown = [name for name in names if not any(_meant(path, name) for path in every)]
    if unknown:
        sys.exit(f"error: expected notebooks among {', '.join(path.stem for path in every)}, got {', '.join(unknown)}")
    return [path for path in every if not names or any(_meant(path, name) for name in names)]


def _meant(path: Path, name: str) -> bool:
    return Path(name).stem in (path.stem, path.stem[:2])


def execute(source: Path, limit_s: float) -> nbformat.NotebookNode:
    """Convert and execute one notebook in its own kernel.

    Raises
    ------
    CellExecutionError, CellTimeoutError, DeadKernelError
        Of the first cell that fails, or that is still busy when the notebook has taken ``limit_s``.
    """
    notebook = jupytext.read(source)
    metadata = notebook.metadata.copy()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # jupytext draws one at random
    began = time.monotonic()
    client = NotebookClient(
        notebook, timeout_func=lambda _cell: max(began + limit_s - time.monotonic(), 1.0), kernel_name="python3",
        resources={"metadata": {"path": str(HERE)}}, record_timing=False, extra_arguments=["--log-level=ERROR"],
    )  # fmt: skip
    client.execute()
    notebook.metadata = metadata  # without the kernel's version
    return notebook


def _cpu_s() -> float:
    """CPU seconds of kernels that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Build what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description="Execute notebooks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name or number, such as 01; all without one")
    parser.add_argument("--write", action="store_true", help="keep the executed notebooks")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="wall time of one notebook; more on a busy machine")
    chosen = parser.parse_args()
    failed = 0
    for source in sources(chosen.names):
        began, used = time.monotonic(), _cpu_s()
        try:
            notebook = execute(source, chosen.limit)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed += 1
            print(f"{source.stem}: FAILED\n{error}", flush=True)
            continue
        text = nbformat.writes(notebook) + "\n"
        if chosen.write:
            source.with_suffix(".ipynb").write_text(text, encoding="utf-8")
        seconds = f"{time.monotonic() - began:.0f} s, {_cpu_s() - used:.0f} s of CPU time"
        print(f"{source.stem}: {seconds}, {len(text.encode()) / 1e3:.0f} kB", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
