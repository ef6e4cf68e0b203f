"""A scenario that plans and runs in a fraction of a second, and its result, for the tests of what is on top."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from moesim.simulate import Result, load_case, simulate

SMALL = """\
name: small
model: tinymoe
precision: fp16
hardware: laptop-8gb
trace: {generate: uniform}
workload: {prompt_tokens: 8, output_tokens: 6}
placement:
  pools:
    vram: {hold: 4, policy: lru}
    ram: {hold: 8, policy: lru}
prefetch: {predictor: cooccurrence, distance: 1}
"""


def write_scenario(folder: Path, text: str = SMALL) -> str:
    """Write a scenario and return its path."""
    path = folder / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@cache
def small_result() -> Result:
    """The result of the small scenario; made once."""
    with TemporaryDirectory() as folder:
        return simulate(load_case(write_scenario(Path(folder))))
