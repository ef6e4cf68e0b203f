"""Owns the registry of public routing traces, and their download: pinned by commit and SHA-256, licence known beforehand.

An entry is here only if its hash is known to be that of the original file. Those of ``stratamoe``: an unchanged copy lies with this
project's shared data, and the capture metadata of the source states the trace's SHA-256 itself. The other public traces that this
project knows are kept repacked or cut, so the hashes of their originals are not known and they are not listed. A file is downloaded
once (pooch) and then served from the cache, which needs neither pooch nor a network.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.errors import InputError, did_you_mean

HOST = "https://raw.githubusercontent.com"


@dataclass(frozen=True, slots=True)
class PublicFile:
    """One file of an entry: its path in the repository, its SHA-256 and its size."""

    path: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        """Name of the file without its folder."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """A public trace: where it comes from, under which licence, and what it holds; its first file is the trace."""

    repository: str
    commit: str
    licence: str
    about: str
    files: tuple[PublicFile, ...]

    def url(self, file: PublicFile) -> str:
        """Address of a file at the pinned commit."""
        return f"{HOST}/{self.repository}/{self.commit}/{file.path}"


REGISTRY = {
    "switch-base-8": PublicTrace(
        repository="Labeeb2339/stratamoe-lab",
        commit="08bfd806911082841cc531c4367f424595ddc228",
        licence="Apache-2.0",
        about="switch-base-8 encoder, 6 MoE layers, 8 experts, top-1: 215 prefill tokens in 10 prompts, no weights",
        files=(
            PublicFile(
                "evidence/switch-base-8/router-trace.v2.json",
                "63f4c131866f560999c95ec8cfcc8dcea4a0e7677553f2b02a35a0d709d4d175",
                38153,
            ),
            PublicFile(
                "evidence/switch-base-8/capture-metadata.json",
                "5b6c1f51184c31161787313458426680623a44169e9106f72b8564a8a1e5ab70",
                3890,
            ),
        ),
    ),
}


def cache_folder() -> Path:
    """Return where downloads are kept: ``$MOESIM_CACHE``, else ``moesim`` in the system's folder of caches."""
    chosen = os.environ.get("MOESIM_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "~")).expanduser() / "moesim" / "cache"
    base = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "moesim"


def find_public(name: str) -> PublicTrace:
    """Return an entry of the registry, or raise an InputError with the names there are."""
    if name not in REGISTRY:
        raise InputError("trace", expected="the name of a public trace", got=f'"{name}"', fix=did_you_mean(name, REGISTRY))
    return REGISTRY[name]


def is_cached(name: str, folder: Path | None = None) -> bool:
    """Whether all files of an entry are in the cache, whole."""
    entry = find_public(name)
    return all(_whole(_place(name, file, folder), file) for file in entry.files)


def fetch(name: str, folder: Path | None = None) -> Path:
    """Return the path of a public trace; files that are not in the cache are downloaded and checked.

    Parameters
    ----------
    name : str
        A name of ``REGISTRY``.
    folder : Path, optional
        The cache, by default ``cache_folder()``.

    Raises
    ------
    InputError
        If the name is unknown, pooch is not installed, there is no network, or a download is not the file that was pinned.
    """
    entry = find_public(name)
    for file in entry.files:
        place = _place(name, file, folder)
        if not _whole(place, file):
            _download(entry, file, place)
    return _place(name, entry.files[0], folder)


def _place(name: str, file: PublicFile, folder: Path | None) -> Path:
    entry = REGISTRY[name]
    return (folder or cache_folder()) / "traces" / f"{name}-{entry.commit[:8]}" / file.name


def _whole(path: Path, file: PublicFile) -> bool:
    try:
        return path.stat().st_size == file.size_bytes and hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    except OSError:
        return False


def _download(entry: PublicTrace, file: PublicFile, place: Path) -> None:
    url = entry.url(file)
    try:
        pooch: Any = importlib.import_module("pooch")
    except ImportError:
        fix = f"pip install 'moesim[fetch]', or put {url} there by hand"
        raise InputError("pooch", expected=f"pooch, to download {file.name} to {place}", got="no pooch installed", fix=fix) from None
    pooch.get_logger().setLevel("ERROR")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        pooch.retrieve(url, known_hash=f"sha256:{file.sha256}", fname=place.name, path=place.parent)
    except ValueError as error:  # pooch's word for a wrong hash
        raise InputError(
            "download", expected=f"SHA-256 {file.sha256}", got=str(error)[:160], fix="the file was not kept", where=url
        ) from None
    except OSError as error:  # requests' errors are among them
        fix = f"connect to the network, or put the file at {place} by hand"
        got = f"{type(error).__name__}: {str(error)[:160]}"
        raise InputError("download", expected="the file", got=got, fix=fix, where=url) from None
