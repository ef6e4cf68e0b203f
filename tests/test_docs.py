"""Every command and every Python block of the pages runs, in the order of its page, in a folder with the examples.

A comment right before a block says otherwise: ``<!-- nightly: why -->`` (slow), ``<!-- not run: why -->`` (torch, network, other hosts).
"""

from __future__ import annotations

import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moesim.simulate import load_case, simulate

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)): page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts}
PAGES["README.md"] = ROOT / "README.md"
ELSEWHERE = ("run", "test", "commands", "quickstart", "rooms")  # marks of README's blocks that test_readme.py and .ci/run take
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=fence)$", re.M | re.S)
RUN = ("bash", "console", "python")
SHOWN = ("text", "yaml", "json", "")
MOST_NOT_RUN = 14


@dataclass(frozen=True)
class Block:
    """One code block of a page: its language, text, and when it is run: ``run`` (always), ``elsewhere``, or what the comment before it says."""

    page: str
    line: int
    language: str
    body: str
    mark: str

    @property
    def why(self) -> str:
        return self.mark.partition(": ")[2]


def blocks(page: str) -> list[Block]:
    text = PAGES[page].read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("fence")) + 1
        mark = match["mark"] or "run"
        when = mark if mark.startswith(("nightly: ", "not run: ")) else "elsewhere" if match["mark"] in ELSEWHERE else "run"
        found.append(Block(page, line, match["language"].strip(), match["body"], when))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
NOT_RUN = [block for block in ALL if block.mark.startswith("not run")]


def run(block: Block, folder: Path) -> None:
    """Run one block in a folder, as a reader would."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "MPLBACKEND": "agg"}

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)

    where = f"{block.page}:{block.line}"
    if block.language == "console":
        for command, expected in re.findall(r"^\$ ([^\n]*)\n((?:(?!\$ )[^\n]*\n)*)", block.body, re.M):
            done = call("bash", "-c", command)
            assert done.stdout + done.stderr == expected, where
        return
    if block.language == "python" and block.body.startswith(">>>"):
        (folder / "block.txt").write_text(block.body, encoding="utf-8")
        done = call(sys.executable, "-m", "doctest", "block.txt")
    elif block.language == "python":
        done = call(sys.executable, "-c", block.body)
    else:
        done = call("bash", "-euo", "pipefail", "-c", block.body)
    assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def run_page(page: str, folder: Path, marks: tuple[str, ...]) -> None:
    shutil.copytree(DOCS / "examples", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks(page):
        if block.language in RUN and block.mark.partition(":")[0] in marks:
            run(block, folder)


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language in RUN and b.mark == "run" for b in blocks(page))])
def test_page(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, ("run",))


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language in RUN and b.mark.startswith("nightly") for b in blocks(page))])
def test_page_with_what_is_slow(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, ("run", "nightly"))


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda b: f"{b.page}:{b.line}")
def test_what_is_not_run(block: Block) -> None:
    """One skip for each block that no test runs, with its reason; ``pytest -rs`` lists them."""
    assert block.why
    pytest.skip(block.why)


def test_few_blocks_are_not_run() -> None:
    assert len(NOT_RUN) <= MOST_NOT_RUN


def test_languages_are_known() -> None:
    """A command under another language would not be run, and nobody would notice."""
    strange = [f"{b.page}:{b.line}: {b.language}" for b in ALL if b.language not in RUN + SHOWN and not b.language.startswith("{")]
    assert strange == []


def test_names_in_pages_exist() -> None:
    named = {name for page in PAGES.values() for name in re.findall(r"\{py:\w+\}`([\w.]+)`|`(moesim(?:\.\w+)+)`", page.read_text("utf-8"))}
    for name in sorted({part for pair in named for part in pair if part}):
        assert pkgutil.resolve_name(name) is not None


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    explained = set(re.findall(r"^\| `moesim\[(\w+)\]`", PAGES["guide/install.md"].read_text("utf-8"), re.M))
    assert set(extras) - {"dev", "all"} <= explained


def test_an_own_policy_takes_thirty_lines() -> None:
    code = (DOCS / "examples" / "second_chance.py").read_text(encoding="utf-8")
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert len(lines) <= 30


def test_what_the_pictures_say() -> None:
    """A perfect prediction wins, the realistic one loses here, and a faster link makes the GPU the limit."""
    none, real, perfect = (result(*more) for more in ((), ("prefetch.predictor=cooccurrence",), ("prefetch.predictor=oracle",)))
    assert speed(perfect) > speed(none) > speed(real)
    assert real["transfers"]["pcie"]["prefetch_wasted_bytes"] > 0
    fast = result("hardware_set.channels.pcie.bandwidth=126 GB/s")
    assert (limit(none), limit(fast)) == ("h2d", "gpu")


def result(*assignments: str) -> dict[str, Any]:
    return simulate(load_case(DOCS / "examples" / "my-scenario.yaml", assignments)).as_dict()


def speed(data: dict[str, Any]) -> float:
    return float(data["metrics"]["decode_tok_s"])


def limit(data: dict[str, Any]) -> str:
    """The lane with the largest share of the critical path."""
    shares: dict[str, float] = {}
    for row in data["critical_path"]:
        shares[row["lane"]] = shares.get(row["lane"], 0.0) + row["share"]
    return max(shares, key=lambda lane: shares[lane])
