"""Owns the calibration of a profile by somebody's benchmark: each device's rates turned until the simulation gives the measured tokens/s.

Decode rows set what a device draws from its memory and how long its kernels take to start, prefill rows its arithmetic:

    memory_efficiency x f, launch / f      so that tg rows agree, in the geometric mean
    compute_efficiency x g                 so that pp rows agree

Rows are taken in groups by the devices that compute them: GPU alone, CPU alone, both; a group turns the devices that no group before it has
turned, so rows of both find the CPU's factor once the GPU's is known, and one common factor where it is not. Shares end at 1. What
remains of each row's error is reported, not hidden: a factor that has no effect (a prompt bound by memory) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from moesim.config import Document, build
from moesim.errors import InputError
from moesim.hardware import HardwareProfile
from moesim.hardware.compose import find_hardware
from moesim.hardware.parts import Device, Figure, times
from moesim.llama.bench import BenchRow, read_bench
from moesim.llama.flags import to_scenario
from moesim.scenario import Scenario
from moesim.simulate import Case, make_case, simulate
from moesim.whatif.figures import on

FAR = math.log(100)  # factors from 1/100 to 100 are searched
HALVINGS = 10  # to within half a percent
ANSWER = 8  # tokens simulated of an answer
ENOUGH = 0.01
Factors = dict[str, tuple[float, float]]  # device -> of decode, of prefill


@dataclass(frozen=True)
class Fitted:
    """A row, and what is predicted before and after."""

    row: BenchRow
    devices: tuple[str, ...]
    before: float
    after: float


@dataclass(frozen=True)
class BenchCalibration:
    """A profile and how well it explains the rows that made it."""

    profile: HardwareProfile
    factors: Factors
    rows: tuple[Fitted, ...]
    notes: tuple[str, ...]


def calibrate_from(path: Path, hardware: str, model: str = "") -> BenchCalibration:
    """Calibrate a machine's profile by results of llama-bench on it.

    Parameters
    ----------
    path : Path
    hardware : str
        The machine that was measured: a profile, or parts joined by ``+``.
    model : str
        Bundled model or file that stands for the file that the results name.

    Raises
    ------
    InputError
        If the file holds no results, or a row's model or placement is not known.
    """
    rows, base = read_bench(path), find_hardware(hardware, Path(), "--hardware")
    cases = [_case(row, hardware, model) for row in rows]
    used = [_devices(case) for case in cases]
    factors: Factors = {}
    notes: list[str] = []
    for group in sorted(set(used), key=lambda devices: (len(devices), devices)):
        free = [device for device in group if device not in factors]
        if len(group) > 1 and any(row.prefill for row, devices in zip(rows, used, strict=True) if devices == group):
            notes.append(
                "pp rows with experts on the CPU: llama.cpp copies them to the GPU, so the arithmetic found holds for such runs only"
            )
        mine = [i for i, devices in enumerate(used) if devices == group]
        if free:
            _turn([rows[i] for i in mine], [cases[i] for i in mine], free, factors, base, notes)
    profile = turned(base, factors, path.name, len(rows))
    fitted = [
        Fitted(row, devices, _speed(row, case, base), _speed(row, case, profile))
        for row, case, devices in zip(rows, cases, used, strict=True)
    ]
    return BenchCalibration(profile, factors, tuple(fitted), tuple(notes))


def _case(row: BenchRow, hardware: str, model: str) -> Case:
    """The row's case; of an answer its middle tokens."""
    command = row.command
    if not row.prefill:
        skipped = max(command.generate - ANSWER, 0) // 2
        command = replace(command, depth=command.depth + skipped, generate=min(command.generate, ANSWER))
    try:
        return make_case(build(Scenario, Document(to_scenario(command, hardware, model).scenario, row.where)))
    except InputError as error:
        raise error.at(row.where) from None


def _devices(case: Case) -> tuple[str, ...]:
    layout = case.layout
    return tuple(sorted({*layout.attention_device, *(layout.expert_device[i] for i in layout.moe_layers)}))


def _speed(row: BenchRow, case: Case, hardware: HardwareProfile) -> float:
    """Tokens/s of a row's case on another state of its machine, with the arithmetic that its threads leave the CPU."""
    cpu, threads = hardware.devices["cpu"], row.command.threads
    if threads is not None and cpu.cores is not None and threads < cpu.cores.value:
        peaks = {name: times(peak, threads / cpu.cores.value) for name, peak in cpu.peak.items()}
        hardware = hardware.model_copy(update={"devices": {**hardware.devices, "cpu": cpu.model_copy(update={"peak": peaks})}})
    metrics = simulate(on(case, hardware.derated()), keep=False).as_dict()["metrics"]
    if metrics is None:
        raise InputError("--from", expected="runs that fit the machine's memory", got="one that does not", fix="choose the machine that was measured",
                         where=row.where)  # fmt: skip
    return float(metrics["prefill_tok_s" if row.prefill else "decode_tok_s"])


def _turn(
    rows: Sequence[BenchRow], cases: Sequence[Case], free: Sequence[str], factors: Factors, base: HardwareProfile, notes: list[str]
) -> None:
    """Find the common factors of ``free`` devices by bisection, decode first, as memory also bounds prompts."""
    factors |= dict.fromkeys(free, (1.0, 1.0))
    names = ", ".join(free)
    for prefill in (False, True):
        mine = [(row, case) for row, case in zip(rows, cases, strict=True) if row.prefill == prefill]
        if not mine:
            notes.append(f"{names}: no {'pp' if prefill else 'tg'} rows; its {'arithmetic' if prefill else 'memory rate'} stays as it was")
            continue
        before = _off(mine, base, factors)
        if abs(before) < ENOUGH:
            continue
        end = math.copysign(FAR, before)
        if _off(mine, base, _changed(factors, free, prefill, end)) * before > 0:
            what = "prompts" if prefill else "answers"
            notes.append(
                f"{names}: {what} stay {math.expm1(-before):+.0%} off; something else than its rates bounds them, or a share is 1 already"
            )
            continue
        low, high = sorted((0.0, end))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if _off(mine, base, _changed(factors, free, prefill, middle)) > 0 else (low, middle)
        factors |= _changed(factors, free, prefill, (low + high) / 2)


def _changed(factors: Factors, free: Sequence[str], prefill: bool, log_factor: float) -> Factors:
    """Factors with those of ``free`` devices replaced."""
    decode = factors[free[0]][0]
    pair = (decode, math.exp(log_factor)) if prefill else (math.exp(log_factor), 1.0)
    return factors | dict.fromkeys(free, pair)


def _off(mine: Sequence[tuple[BenchRow, Case]], base: HardwareProfile, factors: Factors) -> float:
    """Mean logarithm of measured over predicted tokens/s; it falls as rates rise."""
    machine = turned(base, factors, "", len(mine))
    return math.fsum(math.log(row.tok_s / _speed(row, case, machine)) for row, case in mine) / len(mine)


def turned(base: HardwareProfile, factors: Mapping[str, tuple[float, float]], source: str, n_rows: int) -> HardwareProfile:
    """Return a profile with devices' rates times their factors; figures that change are measured, by ``source``."""
    devices = dict(base.devices)
    for name, (decode, prefill) in factors.items():
        device: Device = devices[name]
        said = f"{source}: {n_rows} rows of llama-bench"
        update: dict[str, Figure[float]] = {}
        if decode != 1:
            update["memory_efficiency"] = _measured(min(device.memory_efficiency.value * decode, 1.0), said)
            update["launch"] = _measured(device.launch.value / decode, said)
        if prefill != 1:
            update["compute_efficiency"] = _measured(min(device.compute_efficiency.value * prefill, 1.0), said)
        devices[name] = device.model_copy(update=update)
    return base.model_copy(update={"devices": devices})


def _measured(value: float, source: str) -> Figure[float]:
    return Figure[float](value=value, basis="measured", source=source)


def profile_text(found: BenchCalibration) -> str:
    """Return the profile as YAML, headed by what it was made from."""
    lines = [
        f"# {row.row.test} on {' and '.join(row.devices)}: measured {row.row.tok_s:.4g} tokens/s, calibrated {row.after:.4g}"
        for row in found.rows
    ]
    data = found.profile.model_dump(mode="json", exclude_none=True)
    return "\n".join([*lines, yaml.safe_dump(data, sort_keys=False, width=140, allow_unicode=True)])
