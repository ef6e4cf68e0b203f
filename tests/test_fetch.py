"""Fetch: pinned and checked, offline from the cache, and one clear line where something is missing."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_server import LocalServer

from moesim import fetch as module
from moesim.cli.main import run
from moesim.errors import InputError
from moesim.fetch import REGISTRY, fetch, is_cached
from moesim.trace_files import import_trace

NAME = "switch-base-8"
TRACE, METADATA = REGISTRY[NAME].files
RAW = {TRACE.name: "switch_base_8_router-trace.v2.json", METADATA.name: "switch_base_8_capture-metadata.json"}


def originals(shared: Path) -> dict[str, bytes]:
    return {name: (shared / "traces" / "raw" / local).read_bytes() for name, local in RAW.items()}


def fill(cache: Path, files: dict[str, bytes]) -> Path:
    folder = cache / "traces" / f"{NAME}-{REGISTRY[NAME].commit[:8]}"
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


class Host(LocalServer):
    """A local stand-in for the host, which counts what is asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        host = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                host.asked.append(self.path)
                data = host.files.get(self.path.rpartition("/")[2])
                self.send_response(200 if data is not None else 404)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

        super().__init__(Handler)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    pytest.importorskip("pooch")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Host()
    monkeypatch.setattr(module, "HOST", server.url)
    yield server
    server.close()


def test_registry_states_the_hashes_of_the_originals(shared: Path) -> None:
    """The shared copies are unchanged, and the source's own metadata names the trace's hash."""
    for file in REGISTRY[NAME].files:
        data = originals(shared)[file.name]
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (file.sha256, file.size_bytes)
    assert json.loads(originals(shared)[METADATA.name])["trace_sha256"] == TRACE.sha256


def test_registry_is_well_formed() -> None:
    for entry in REGISTRY.values():
        assert len(entry.commit) == 40 and entry.licence and entry.files
        for file in entry.files:
            assert len(file.sha256) == 64 and entry.url(file).startswith(f"{module.HOST}/{entry.repository}/{entry.commit}/")


def test_cache_needs_neither_network_nor_pooch(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    fill(tmp_path, originals(shared))
    path = fetch(NAME, tmp_path)
    found = import_trace(path)
    assert found.n_rows == 215 and len(found.sequences) == 10  # the metadata beside it gives the prompts' borders
    with np.load(shared / "traces" / "switch_base_8_encoder.npz", allow_pickle=False) as known:
        assert (found.expert_ids == known["expert_ids"]).all()


def test_downloads_once(shared: Path, tmp_path: Path, host: Host) -> None:
    host.files = originals(shared)
    assert not is_cached(NAME, tmp_path)
    path = fetch(NAME, tmp_path)
    assert path.read_bytes() == host.files[TRACE.name] and is_cached(NAME, tmp_path) and len(host.asked) == 2
    assert host.asked[0] == f"/{REGISTRY[NAME].repository}/{REGISTRY[NAME].commit}/{TRACE.path}"
    assert fetch(NAME, tmp_path) == path and len(host.asked) == 2


def test_damaged_cache_is_fetched_again(shared: Path, tmp_path: Path, host: Host) -> None:
    host.files = originals(shared)
    fill(tmp_path, originals(shared) | {TRACE.name: b"cut"})
    assert fetch(NAME, tmp_path).read_bytes() == host.files[TRACE.name] and len(host.asked) == 1


def test_another_file_is_not_kept(shared: Path, tmp_path: Path, host: Host) -> None:
    host.files = originals(shared) | {TRACE.name: b"something else"}
    with pytest.raises(InputError, match="SHA-256"):
        fetch(NAME, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_no_file_and_no_network(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="404"):
        fetch(NAME, tmp_path)
    monkeypatch.setattr(module, "HOST", "http://127.0.0.1:9")
    with pytest.raises(InputError, match="connect to the network"):
        fetch(NAME, tmp_path)


def test_no_pooch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(InputError, match=r"moesim\[fetch\]"):
        fetch(NAME, tmp_path)


def test_command(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, originals(shared))
    assert run(["trace", "fetch", NAME, "--cache", str(tmp_path)]) == 0
    got = capsys.readouterr()
    assert Path(got.out.strip()).is_file() and "licence Apache-2.0" in got.err and "in the cache" in got.err
    assert run(["trace", "fetch", "--list", "--cache", str(tmp_path), "-o", "json"]) == 0
    assert [row["cached"] for row in json.loads(capsys.readouterr().out)] == [True]
    assert run(["trace", "fetch", "--list", "--cache", str(tmp_path / "none")]) == 0
    assert "Apache-2.0" in capsys.readouterr().out
    assert run(["trace", "fetch", "switch-base"]) == 2
    assert 'did you mean "switch-base-8"' in capsys.readouterr().err
    assert run(["trace", "fetch"]) == 2


def test_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESIM_CACHE", str(tmp_path))
    assert module.cache_folder() == tmp_path
    monkeypatch.delenv("MOESIM_CACHE")
    assert module.cache_folder().name in ("moesim", "cache")
