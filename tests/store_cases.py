"""Small expert stores, a folder that direct reads work in, and faults of a disk."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesim.model import ModelSpec
from moesim.model_files import load_model
from moesim.precision import PrecisionPlan, plan_from

MIXED = {
    "default": "bf16",
    "routed_experts": "int4-g32-torch",
    "overrides": [
        {"part": "routed_experts", "format": "int8", "layers": [1]},
        {"part": "routed_experts", "format": "bf16", "layers": [0], "matrix": "down"},
    ],
}


def small_model() -> ModelSpec:
    """Two layers of 16 experts of three 128 x 128 matrices."""
    return load_model("tinymoe").model_copy(update={"n_layers": 2})


def mixed_plan() -> PrecisionPlan:
    return plan_from(MIXED)


def direct_folder(tmp_path: Path) -> Path:
    """Return a folder whose file system takes O_DIRECT, or skip the test."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(4096))
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"needs a file system with O_DIRECT, which that of {tmp_path} lacks: {error.strerror}")
    finally:
        probe.unlink()
    return tmp_path


def break_disk(monkeypatch: pytest.MonkeyPatch, fault: str, call: int = 0) -> None:
    """Make one expert's read fail below the readers: the ``call``-th one from now on.

    ``"short"``: its last request delivers half; ``"eio"``: it delivers an error; ``"flip"``: the first request delivers one wrong bit.
    """
    from moesim.host import disk_calls

    seen = [0]

    def broken(real: Callable[..., int], target: Callable[..., int]) -> Callable[..., int]:
        def run(*arguments: Any) -> int:
            code = real(*arguments)
            if seen[0] == call:
                results = arguments[-1]
                if fault == "flip":
                    ctypes.c_ubyte.from_address(target(*arguments)).value ^= 1
                else:
                    results[-1] = results[-1] // 2 if fault == "short" else -5
            seen[0] += 1
            return code

        return run

    def of_iocb(_context: int, pointers: int, *_: Any) -> int:
        block = ctypes.c_uint64.from_address(pointers).value
        return ctypes.c_uint64.from_address(block + disk_calls.IOCB.fields["buffer"][1]).value

    monkeypatch.setattr(disk_calls, "aio_read", broken(disk_calls.aio_read, of_iocb))
    for name in ("pread_all", "copy_all"):
        monkeypatch.setattr(disk_calls, name, broken(getattr(disk_calls, name), lambda _, requests, __: int(requests[0, 0])))
