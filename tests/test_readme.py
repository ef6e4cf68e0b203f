"""Every figure and command that README.md shows is produced by the program as it is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesim.cli.main import app
from moesim.simulate import load_case, simulate

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(marker: str) -> str:
    """The code block that follows ``<!-- marker -->``."""
    found = re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)```", README, re.S)
    assert found, f"README.md has no block {marker}"
    return found[1]


def moesim(command: str, folder: Path) -> str:
    """Run one ``moesim`` command line of README.md and return its stdout."""
    arguments = [str(folder / a) if a.endswith((".png", ".json")) else a for a in shlex.split(command, comments=True)[1:]]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_quickstart_answer(tmp_path: Path) -> None:
    """The answer that README.md prints, but for the simulator's own speed."""
    shown = [line for line in block("quickstart").splitlines() if not line.startswith("simulator")]
    got = [line for line in moesim("moesim run quickstart", tmp_path).splitlines() if not line.startswith("simulator")]
    assert got == shown


@pytest.mark.parametrize("command", [line for line in block("commands").splitlines() if line.startswith(".venv/bin/moesim")])
def test_commands(command: str, tmp_path: Path) -> None:
    assert moesim(command, tmp_path)


def test_what_the_text_says_about_the_variations() -> None:
    """Half of the experts: little more than half the speed, the SSD limits; an oracle prefetcher wins most of it back."""
    whole, half, oracle = (speed(*options) for options in ((), (HALF,), (HALF, "prefetch.predictor=oracle")))
    assert 0.5 < half / whole < 0.65
    assert (oracle - half) / (whole - half) > 0.6


HALF = "placement.pools.unified.hold=8"


def speed(*assignments: str) -> float:
    return float(simulate(load_case("quickstart", assignments)).as_dict()["metrics"]["decode_tok_s"])
