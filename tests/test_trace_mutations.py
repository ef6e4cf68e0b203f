"""Damaged files: 200 mutations of every format give an InputError that names the file, or a right read; never another exception.

None of the formats but eval-callback (a sum a tensor), policylang (a number of entries), .npz, .pt (CRC of the zip) has a check of its own.
A digit or byte turned into another valid expert id, count, weight or position cannot be told from the truth. What the tests demand is what
redundancy allows: a truncation never changes what is read, only how much; one changed byte of an expert id changes one choice; and
all else that is read has the right shape.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trace_writers as w

from moesim.cli.main import run
from moesim.errors import InputError
from moesim.profile import RoutingProfile
from moesim.trace import RoutingTrace
from moesim.trace_files import import_trace
from moesim.trace_formats.source import Options

CASES = w.cases()
NUMBER = 200
Mutation = Callable[[bytes, np.random.Generator], bytes]


def truncate(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(0, len(data)))]


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    out = bytearray(data)
    for at in rng.integers(0, len(data), size=int(rng.integers(1, 4))):
        out[at] = int(rng.integers(256))
    return bytes(out)


def swap(data: bytes, rng: np.random.Generator) -> bytes:
    out = bytearray(data)
    a, b = rng.integers(0, len(data), size=2)
    out[a], out[b] = out[b], out[a]
    return bytes(out)


def digit(data: bytes, rng: np.random.Generator) -> bytes:
    """Wrong counts: a digit becomes another, or (in binary files) a byte grows."""
    places = np.flatnonzero((np.frombuffer(data, np.uint8) >= 48) & (np.frombuffer(data, np.uint8) < 58))
    out = bytearray(data)
    at = int(rng.choice(places)) if len(places) else int(rng.integers(len(data)))
    out[at] = 48 + int(rng.integers(10)) if len(places) else (out[at] + 1) % 256
    return bytes(out)


def drop(data: bytes, rng: np.random.Generator) -> bytes:
    a, b = sorted(int(n) for n in rng.integers(0, len(data), size=2))
    return data[:a] + data[min(b, a + 200) :]


def double(data: bytes, rng: np.random.Generator) -> bytes:
    a, b = sorted(int(n) for n in rng.integers(0, len(data), size=2))
    b = min(b, a + 200)
    return data[:b] + data[a:b] + data[b:]


def line_out(data: bytes, rng: np.random.Generator) -> bytes:
    lines = data.split(b"\n")
    del lines[int(rng.integers(len(lines)))]
    return b"\n".join(lines)


MUTATIONS: list[Mutation] = [truncate, flip, swap, digit, drop, double, line_out, truncate, digit, flip]


def is_part(found: RoutingTrace, whole: RoutingTrace) -> bool:
    """Whether every cell that was read stands in the whole trace, at its place."""
    rows = {(int(s), int(p)): t for t, (s, p) in enumerate(zip(whole.seq_id, whole.position, strict=True))}
    at = [rows.get((int(s), int(p)), -1) for s, p in zip(found.seq_id, found.position, strict=True)]
    if min(at) < 0 or found.n_layers > whole.n_layers or found.top_k != whole.top_k:
        return False
    same = found.expert_ids == whole.expert_ids[at, : found.n_layers]
    return bool(same[found.present].all()) and bool((found.phase == whole.phase[at]).all())


@pytest.mark.parametrize("name", list(CASES))
def test_damaged_files(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = tmp_path / case.name
    options = case.write(case.trace, path)
    data = path.read_bytes()
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    refused = 0
    for i in range(NUMBER):
        mutation = MUTATIONS[i % len(MUTATIONS)]
        changed = mutation(data, rng)
        path.write_bytes(changed)
        try:
            found = import_trace(path, case.format if i % 2 else "auto", options)
        except InputError as error:
            assert error.where.startswith(str(path)) or case.name in str(error) or "metadata" in str(error), str(error)
            refused += 1
            continue
        if isinstance(found, RoutingProfile):
            assert np.isfinite(found.popularity).all()
            continue
        RoutingTrace(found.expert_ids, found.weights, found.seq_id, found.position, found.phase, found.meta)  # valid all the same
        if mutation is truncate and changed != data:
            assert is_part(found, case.trace), f"mutation {i}: a cut file gave what was not in it"
        elif mutation in (digit, line_out) and found.expert_ids.shape == case.trace.expert_ids.shape:
            different = int((found.expert_ids != case.trace.expert_ids).any(axis=2).sum())
            renamed = case.format == "router-logits" and "layer_numbers" in found.meta  # a digit of a layer's name: a note tells its number
            assert renamed or different <= (3 if case.format == "router-logits" else 1), f"mutation {i}: {different} cells differ"
    assert refused > NUMBER // 8


def test_damaged_pt_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch, the optional extra that reads .pt files")
    trace = w.make(sequences=3)
    dump = w.sglang_dump(trace)
    dump["records"] = [{k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in r.items()} for r in dump["records"]]
    dump["last_physical_to_logical_map"] = torch.from_numpy(dump["last_physical_to_logical_map"])
    path = tmp_path / "t.pt"
    torch.save(dump, path)
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    for i in range(NUMBER):
        path.write_bytes(MUTATIONS[i % len(MUTATIONS)](data, rng))
        try:
            found = import_trace(path, "sglang", Options(n_experts=16))
        except InputError as error:
            assert error.where.startswith(str(path))
            continue
        assert isinstance(found, RoutingTrace) and found.hash == trace.hash, "the zip's CRC tells"


@pytest.mark.parametrize("name", ["bigmoeonedge", "mbolt", "vllm_jsonl", "logits_npz"])
def test_exit_codes_of_damaged_files(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    path = tmp_path / case.name
    case.write(case.trace, path)
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(10):
        path.write_bytes(truncate(data, rng))
        code = run(["trace", "import", str(path), "--format", case.format, "--top-k", "3"])
        answer = capsys.readouterr()
        assert code in (0, 2) and "Traceback" not in answer.err and (code == 0 or str(path) in answer.err)


@pytest.mark.parametrize("name", list(CASES))
def test_declared_sizes_take_no_memory(tmp_path: Path, name: str) -> None:
    """Every number of a text header, and every word of a binary head, blown up: refused at once."""
    case = CASES[name]
    path = tmp_path / case.name
    options = case.write(case.trace, path)
    data = path.read_bytes()
    for at in range(0, min(len(data), 96), 4):
        path.write_bytes(data[:at] + b"\xff\xff\xff\x7f" + data[at + 4 :])
        try:
            import_trace(path, case.format, options)
        except InputError:
            pass
    text = data[:400].decode("latin1")
    for match in re.finditer(r"\d+", text):
        path.write_bytes((text[: match.start()] + "99999999999" + text[match.end() :]).encode("latin1") + data[400:])
        try:
            import_trace(path, case.format, options)
        except InputError:
            pass
