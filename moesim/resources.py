"""Owns where bundled data lies: models, hardware profiles, traces, scenarios; the same in a wheel and in a checkout."""

from __future__ import annotations

from pathlib import Path

from moesim.errors import InputError, did_you_mean

_PACKAGE = Path(__file__).resolve().parent
_SUFFIXES = {
    "models": ".yaml",
    "hardware_profiles": ".yaml",
    "runtimes": ".yaml",
    "scenarios": ".yaml",
    "scenarios/sweeps": ".yaml",
    "scenarios/needs": ".yaml",
    "scenarios/serving": ".yaml",
    "traces": ".npz",
}


def folder(kind: str) -> Path:
    """Return the folder of one kind of bundled data: beside the package in a checkout, inside it in a wheel."""
    inside = _PACKAGE / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def names(kind: str) -> dict[str, Path]:
    """Return ``{name: path}`` of the bundled data of one kind, sorted by name. A trace lies in a folder of its name, beside its card."""
    pattern = ("*/*" if kind == "traces" else "*") + _SUFFIXES[kind]
    found = [p for p in folder(kind).glob(pattern) if p.is_file() and (kind != "traces" or p.stem == p.parent.name)]
    return {p.stem: p for p in sorted(found)}


def find(kind: str, name: str, *, base: Path | None = None, where: str = "") -> Path:
    """Return the path of ``name``: a file (relative to ``base`` too), or bundled data of that kind.

    Raises
    ------
    InputError
        If there is neither, with the names that exist.
    """
    candidates = [Path(name)] + ([base / name] if base else [])
    found = [candidate for candidate in candidates if _exists(candidate)]
    for candidate in found:
        if candidate.is_file():
            return candidate
    known = names(kind)
    if name in known:
        return known[name]
    what, got = (
        kind.rpartition("/")[2].rstrip("s").replace("_", " "),
        f'"{name}"' + (", a folder" if any(c.is_dir() for c in found) else ""),
    )
    raise InputError(what, expected="a bundled name or a file", got=got, fix=did_you_mean(name, known), where=where)


def _exists(path: Path) -> bool:
    """Whether there is something at a path; a name that is too long or not allowed is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
