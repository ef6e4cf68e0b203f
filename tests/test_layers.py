"""Imports point downwards only, files stay small, and the package stays light (the rooms of README.md's map)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "moesim"


def rooms() -> dict[str, int]:
    """Rank of each module in the map of README.md. A line names files, or a folder and its modules: ``.`` is the folder's own
    ``__init__.py``, ``*`` stands for all of its modules, which may import each other.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- rooms -->\n```\n(.*?)```", text, re.S)
    assert block, "README.md has no map of rooms"
    rank: dict[str, int] = {}
    for line in block[1].splitlines():
        words = line.split("  #")[0].split()
        folder = words.pop(0).removesuffix("/") if words[0].endswith("/") else ""
        for word in words:
            room = folder if word == "." else f"{folder}.{word}" if folder else word.removesuffix(".py")
            names = [n for n in modules() if n.startswith(room[:-1])] if word == "*" else [room]
            rank |= dict.fromkeys((n for n in names if n not in rank), len(rank))
    return rank


def modules() -> dict[str, Path]:
    """The modules by name; a folder's ``__init__.py`` counts where it holds more than a docstring."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if path.name != "__init__.py" or (name and len(ast.parse(path.read_text(encoding="utf-8")).body) > 1):
            found[name] = path
    return found


def test_every_module_has_a_place_in_the_map() -> None:
    assert sorted(modules()) == sorted(rooms())


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_up_the_map(name: str) -> None:
    order = rooms()
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("moesim"):
            base = node.module.removeprefix("moesim").lstrip(".")
            inner = [f"{base}.{a.name}".lstrip(".") for a in node.names]
            targets = [module if module in order else base for module in inner]
        elif isinstance(node, ast.Import):
            targets = [a.name.removeprefix("moesim.") for a in node.names if a.name.startswith("moesim.")]
        for target in targets:
            if target in order:
                same_folder = order[target] == order[name]
                assert same_folder or order[target] < order[name], f"{name} imports {target}, which stands below it in the map"


@pytest.mark.parametrize("name", sorted(modules()))
def test_files_are_small(name: str) -> None:
    assert len(modules()[name].read_text(encoding="utf-8").splitlines()) <= 500


def test_import_is_light() -> None:
    code = "import sys, moesim; print([m for m in ('torch', 'numba', 'matplotlib', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_forbidden_calls() -> None:
    """Nothing is unpickled, and YAML only comes through the safe loader."""
    bad = re.compile(
        r"pickle\.loads?\(|allow_pickle=True|yaml\.load\(|yaml\.unsafe_load|weights_only=False|(?<![.\w])eval\(|(?<![.\w])exec\("
    )
    for name, path in modules().items():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not bad.search(line), f"{name}:{number}"
