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

from moesim.errors import InputError
from moesim.hardware import HardwareProfile
from moesim.hardware_compose import find_hardware
from moesim.hardware_parts import Device, Figure
from moesim.llama_bench import BenchRow, read_bench
from moesim.llama_flags import to_scenario
from moesim.scenario import Scenario
from moesim.simulate import Case, make_case, simulate
from moesim.knobs import on

ROUNDS = 6
ANSWER = 8  # tokens simulated of an answer
ENOUGH = 0.01
LEAST = 1e-3  # a change of the result by less than this share is none
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
        mine = [i for i, devices in enumerate(used) if devices == group]
        if free:
            _turn([rows[i] for i in mine], [cases[i] for i in mine], free, factors, base, notes)
    profile = turned(base, factors, path.name, rows)
    fitted = [
        Fitted(row, devices, _speed(case, base), _speed(case, profile)) for row, case, devices in zip(rows, cases, used, strict=True)
    ]
    return BenchCalibration(profile, factors, tuple(fitted), tuple(notes))


def _case(row: BenchRow, hardware: str, model: str) -> Case:
    """The row's case; of an answer its middle tokens."""
    command = row.command
    if not row.prefill:
        skipped = max(command.generate - ANSWER, 0) // 2
        command = replace(command, depth=command.depth + skipped, generate=min(command.generate, ANSWER))
    try:
        return make_case(Scenario.model_validate(to_scenario(command, hardware, model).scenario))
    except InputError as error:
        raise error.at(row.where) from None


def _devices(case: Case) -> tuple[str, ...]:
    layout = case.layout
    return tuple(sorted({*layout.attention_device, *(layout.expert_device[i] for i in layout.moe_layers)}))


def _speed(case: Case, hardware: HardwareProfile) -> float:
    changed = hardware if not case.scenario.hardware_set else _with_threads(case, hardware)
    metrics = simulate(on(case, changed.derated(case.scenario.derate)), keep=False).as_dict()["metrics"]
    if metrics is None:
        raise InputError("--from", expected="runs that fit the machine's memory", got="one that does not", fix="choose the machine that was measured")
    return float(metrics["prefill_tok_s"] if case.scenario.workload.prompt_tokens else metrics["decode_tok_s"])


def _with_threads(case: Case, hardware: HardwareProfile) -> HardwareProfile:
    """The profile with the peaks that the row's number of threads leaves the CPU."""
    cpu = hardware.devices["cpu"].model_copy(update={"peak": case.hardware.devices["cpu"].peak})
    return hardware.model_copy(update={"devices": {**hardware.devices, "cpu": cpu}})


def _turn(rows: Sequence[BenchRow], cases: Sequence[Case], free: Sequence[str], factors: Factors, base: HardwareProfile, notes: list[str]) -> None:
    """Find the factors of ``free`` devices by fixed-point steps; both kinds of rows in turn, as decode also bounds prompts."""
    factors |= dict.fromkeys(free, (1.0, 1.0))
    for prefill in (False, True):
        mine = [i for i, row in enumerate(rows) if row.prefill == prefill]
        if not mine:
            notes.append(f"{', '.join(free)}: no {'pp' if prefill else 'tg'} rows; its {'arithmetic' if prefill else 'memory rate'} stays as it was")
            continue
        last = math.inf
        for _ in range(ROUNDS):
            machine = turned(base, factors, "", rows)
            off = math.fsum(math.log(rows[i].tok_s / _speed(cases[i], machine)) for i in mine) / len(mine)
            if abs(off) < ENOUGH or abs(last - off) < LEAST:
                break
            last = off
            for device in free:
                decode, prompt = factors[device]
                factors[device] = (decode, prompt * math.exp(off)) if prefill else (decode * math.exp(off), prompt)
        if abs(off) > ENOUGH:
            what = "prompts" if prefill else "answers"
            notes.append(f"{', '.join(free)}: {what} remain {math.expm1(-off):+.0%} off; something else than its rates bounds them, or a share of 1")


def turned(base: HardwareProfile, factors: Mapping[str, tuple[float, float]], source: str, rows: Sequence[BenchRow]) -> HardwareProfile:
    """Return a profile with devices' rates times their factors; figures that change are measured, by ``source``."""
    devices = dict(base.devices)
    for name, (decode, prefill) in factors.items():
        device: Device = devices[name]
        said = f"{source}: {len(rows)} rows of llama-bench"
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
