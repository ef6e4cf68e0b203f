"""Owns what an engine attains on a machine, in place of figures of its profile that nobody has measured there.

A profile's shares are assumptions of good kernels in general. What llama.cpp and its kin reach of a machine's peaks is known from public
measured runs (``runtimes/attained.yaml``, docs/field-coefficients.md):

- CPU: the memory share of its platform; arithmetic = threads x rate of a core, that of prompts if there is one (answers are bound by memory).
- GPU: shares of memory and of half-precision arithmetic (quantised products run at that rate too), and the launch of a kernel.
"""

from __future__ import annotations

from typing import Any

from moesim.errors import InputError
from moesim.hardware import HardwareProfile, kind
from moesim.hardware.parts import Device, Figure
from moesim.runtimes import Rates, RunFacts, Runtime, load_rates, runtime_of
from moesim.scenario import Scenario

SERVER_SHARE = {"server": "server_memory_share", "dual-server": "dual_server_memory_share"}


def memory_share(platform: str) -> str:
    """Return the rate that is the share of main memory's peak on a platform."""
    return SERVER_SHARE.get(platform, "client_memory_share")


def as_found(machine: HardwareProfile, scenario: Scenario, where: str) -> HardwareProfile:
    """Return a machine as the scenario's engine finds it; measured figures stay as they are.

    Raises
    ------
    InputError
        If no such engine is known.
    """
    use, place = scenario.runtime, scenario.placement
    if use is None:
        return machine
    try:
        runtime = runtime_of(use.name)
    except InputError as error:
        raise InputError("runtime.name", expected=error.expected, got=error.got, fix=error.fix, where=where) from None
    prompt = scenario.serving is not None or scenario.workload.prompt_tokens > 0
    on_cpu = {
        part: [r.layers for r in place.layers if r.part == part and kind(r.device) == "cpu"] for part in ("attention", "routed_experts")
    }
    apart = [layers for layers in on_cpu["routed_experts"] if layers not in on_cpu["attention"]]
    mixed, threads = kind(place.attention) != "cpu" and (kind(place.experts) == "cpu" or bool(apart)), use.threads
    rates = load_rates()
    devices = dict(machine.devices)
    for name, device in machine.devices.items():
        if kind(name) == "gpu":
            changes = _gpu(device, runtime, RunFacts(mixed=mixed, gpu=device.chip), rates)
        elif kind(name) == "cpu":
            changes = _cpu(device, runtime, RunFacts(mixed=mixed), rates, threads, prompt)
        else:
            continue
        devices[name] = device.model_copy(update={field: figure for field, figure in changes.items() if figure is not None})
    return machine.model_copy(update={"devices": devices})


def _gpu(device: Device, runtime: Runtime, run: RunFacts, rates: Rates) -> dict[str, Any]:
    half = device.peak.get("fp16") or device.peak.get("bf16")
    quantised = {fmt: half if half is not None and fmt in ("int8", "int4") else peak for fmt, peak in device.peak.items()}
    arithmetic = _open(device.compute_efficiency)
    return {
        "memory_efficiency": _stated(rates["gpu_memory_share"], runtime) if _open(device.memory_efficiency) else None,
        "launch": _stated(rates[runtime.choose("launch", run)], runtime) if _open(device.launch) else None,
        "compute_efficiency": _stated(rates["gpu_prefill_share"], runtime) if arithmetic else None,
        "peak": quantised if arithmetic else None,
    }


def _cpu(device: Device, runtime: Runtime, run: RunFacts, rates: Rates, threads: int | None, prompt: bool) -> dict[str, Any]:
    share = rates[memory_share(device.platform or "")]
    cores = device.cores.value if device.cores is not None else 1
    used = cores if threads is None else min(threads, cores)
    core = rates["cpu_prefill_flops"] * rates[runtime.choose("cpu_prefill", run)] if prompt else rates["cpu_flops"]
    if _open(device.compute_efficiency):
        most = used * core / device.compute_efficiency.value
        peaks = {fmt: most if fmt == "int8" else min(most, peak.value) for fmt, peak in device.peak.items()}
    else:
        peaks = {fmt: peak.value * used / cores for fmt, peak in device.peak.items()}
    return {
        "memory_efficiency": _stated(share, runtime) if _open(device.memory_efficiency) and not device.cpu_bandwidth_threads else None,
        "peak": {fmt: _stated(value, runtime) if value != device.peak[fmt].value else device.peak[fmt] for fmt, value in peaks.items()},
    }


def _open(figure: Figure[float]) -> bool:
    return figure.basis != "measured"


def _stated(value: float, runtime: Runtime) -> Figure[float]:
    return Figure[float].model_construct(value=value, basis="reported", source=f"what {runtime.name} attains in public measured runs")
