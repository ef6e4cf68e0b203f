"""Sweeps of small runs for the tests of sweeps: a base that takes milliseconds, axes of every kind."""

from __future__ import annotations

from pathlib import Path

from small_runs import write_scenario

AXES = """\
axes:
  placement.pools.vram.hold: [2, 4, 6]
  prefetch.predictor: [none, cooccurrence]
  prefetch.distance: {values: [1, 2], when: {prefetch.predictor: cooccurrence}}
  hardware_set.links.h2d.latency: {from: 5 us, to: 45 us, steps: 3}
  hardware_scale.ssd: [0.5, 1, 2]
"""


def write_sweep(folder: Path, axes: str = AXES, more: str = "", settings: str = "set: {engine: fast}\n") -> Path:
    """Write a sweep over the small scenario and return its path."""
    write_scenario(folder)
    path = folder / "sweep.yaml"
    path.write_text(f"name: small\nbase: scenario.yaml\n{settings}{axes}{more}", encoding="utf-8")
    return path
