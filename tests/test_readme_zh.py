"""README.zh.md keeps in step with README.md: the same commands in the same order, and no output that README.md does not show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))


def fenced(text: str, language: str) -> list[tuple[str, str]]:
    """(mark, body) of the code blocks of one language, in order."""
    return re.findall(rf"(?:<!-- ([^\n]*) -->\n)?```{language}\n(.*?)```", text, re.S)


def test_the_same_commands() -> None:
    assert fenced(ENGLISH, "bash") == fenced(CHINESE, "bash")
    assert len(fenced(CHINESE, "bash")) >= 4


def test_what_it_shows_is_what_readme_shows() -> None:
    english = [body.splitlines() for _, body in fenced(ENGLISH, "text")]
    for lines in ([line for line in body.splitlines() if line] for _, body in fenced(CHINESE, "text")):
        assert any(set(lines) <= set(block) for block in english), lines


def test_the_same_sections() -> None:
    assert len(re.findall(r"^## ", ENGLISH, re.M)) == len(re.findall(r"^## ", CHINESE, re.M))


def test_what_it_names_exists() -> None:
    names = set(re.findall(r"`((?:docs|scenarios|traces)/[^`]*)`", CHINESE)) | set(re.findall(r"\]\(([^)]*)\)", CHINESE))
    assert names and [name for name in names if not (ROOT / name).exists()] == []
    options = set(re.findall(r"`(moesim [a-z-]+(?: [a-z-]+)?)", CHINESE)) - set(re.findall(r"`(moesim [a-z-]+(?: [a-z-]+)?)", ENGLISH))
    assert options == set()
