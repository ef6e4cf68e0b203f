"""Owns where routing profiles lie: bundled by name, or a file; fitted ones and those made of published facts look the same from here."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from moesim.errors import InputError, did_you_mean
from moesim.generate.facts import FORMAT as FACTS_FORMAT
from moesim.generate.facts import expand, parse_facts
from moesim.generate.routing_profile import MAX_FILE_BYTES, LikeProfile, parse_like

_FOLDER = Path(__file__).resolve().parent / "profiles"


def bundled_likes() -> dict[str, Path]:
    """Return ``{name: path}`` of the bundled profiles, sorted by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.json"))}


def find_like(name: str, base: Path | None = None, where: str = "") -> LikeProfile:
    """Return a profile by its bundled name or its file, relative to ``base`` too.

    Raises
    ------
    InputError
        If there is neither, with the names that exist, or if the file is not valid.
    """
    known = bundled_likes()
    for path in [Path(name), *([base / name] if base else [])]:
        try:
            if path.is_file():
                return read_like(path)
        except (OSError, ValueError):  # a name that is too long or not allowed is no file
            continue
    if name in known:
        return read_like(known[name])
    raise InputError(
        "profile", expected="a bundled name or a file of moesim trace fit", got=f'"{name}"', fix=did_you_mean(name, known), where=where
    )


def read_like(path: Path) -> LikeProfile:
    """Load a profile of either format; the same file is read and expanded once."""
    try:
        found = path.stat()
    except OSError as error:
        raise InputError("profile", expected="a readable file", got=error.strerror or str(error), where=str(path)) from None
    if found.st_size > MAX_FILE_BYTES:
        raise InputError("profile", expected=f"at most {MAX_FILE_BYTES} bytes", got=str(found.st_size), where=str(path))
    return _read(path.absolute(), path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=8)
def _read(absolute: Path, path: Path, mtime_ns: int, size: int) -> LikeProfile:
    """Read a file that looked so."""
    data: Any
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError("profile", expected="a readable file", got=error.strerror or str(error), where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise InputError("profile", expected="JSON", got=str(error)[:120], where=str(path)) from None
    if isinstance(data, dict) and data.get("format") == FACTS_FORMAT:
        return expand(parse_facts(data, str(path)))
    return parse_like(data, str(path))
