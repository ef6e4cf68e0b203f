"""Owns what a runtime attains on a machine in one run: a profile with real rates in place of peaks, and works as its kernels see them.

stream rate      = share x peak of the memory, or share x measured bandwidth where that is lower
arithmetic       = rate per core x cores used; share of the peak on a GPU
padded rows      = rows x (1 + tile / rows per expert) in a prompt's expert products
serial attention = heads per core x tokens x time of one head and token

Where a machine's record states what the engine's kernels do on it (``kernels.py``), that takes the place of rates per core.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from moesim.backtest.machine import Machine
from moesim.hardware import HardwareProfile
from moesim.hardware.parts import Figure
from moesim.runtime_rates import memory_share
from moesim.runtimes import Rates, RunFacts, Runtime
from moesim.schedule import Work
from moesim.steady import Part

PRODUCT_KERNELS = {"together": 0, "one-by-one": 3, "gathered": 9}  # of each used expert in a prompt; 0: of all of them together
SLOWER_ATTENTION = {"unfused": "gpu_unfused_attention_share", "on-the-fly": "gpu_unpacking_attention_share"}
PLAIN_SIMD = 0.5  # two instructions where a dot product takes one
THEORETICAL = 0.97  # a "measured" bandwidth within 3 % of the peak is the peak


@dataclass(frozen=True, slots=True)
class Attained:
    """Rates of one run in SI units; shares are of the machine's peaks."""

    gpu_memory_share: float
    gpu_flops_per_s: float
    gpu_attention_flops_per_s: float
    gpu_launch_s: float
    cpu_memory_share: float
    cpu_flops_per_s: float
    cpu_attention_flops_per_s: float
    cpu_kernel_s: float
    serial_head_token_s: float  # 0: attention on the CPU is not serial
    cores: float
    cache_traffic: float
    converts: bool  # a quantised cache is first written out, and read again, in 16 bit
    tile_rows: float
    product_kernels: int  # of each expert
    pcie_share: float
    linear_kernels: int
    hand_over_s: float
    storage_share: float


def attain(
    machine: Machine, runtime: Runtime, run: RunFacts, rates: Rates, *, prefill: bool, cores: float, step_bytes: float = 0.0
) -> Attained:
    """Return what a runtime attains on a machine.

    Parameters
    ----------
    machine : Machine
    runtime : Runtime
    run : RunFacts
    rates : Rates
    prefill : bool
        Many tokens a step, or one per sequence.
    cores : float
        CPU cores in use.
    step_bytes : float
        From one cached token's keys to the next one's.
    """
    core = 1.0 if machine.dot_products else PLAIN_SIMD
    attention_core = core * (rates["server_core_share"] if machine.server_cores else 1.0)
    decode_flops = cores * core * rates["cpu_flops"]
    prefill_flops = cores * core * rates["cpu_prefill_flops"] * rates[runtime.choose("cpu_prefill", run)]
    on_cpu, on_gpu = runtime.choose("cpu_attention", run), runtime.choose("gpu_attention", run)
    head_token = rates["cpu_serial_head_token"] / attention_core if on_cpu == "serial" else 0.0
    operator, products = rates["cpu_kernel"], None
    if machine.kernels:
        products = machine.kernels.products(run.quant, runtime.choose("repack", run) == "yes", int(cores), prefill)
        if products:
            decode_flops = prefill_flops = 2 * products
        operator = machine.kernels.operator_s(int(cores)) or operator
        head_token = machine.kernels.head_token_s(run.kv, run.flash, run.head, step_bytes) or head_token
    if prefill or products:
        cpu_attention = prefill_flops
    else:
        cpu_attention = cores * attention_core * rates["cpu_flops"] * (rates["cpu_attention_share"] if on_cpu == "blocked" else 1.0)
    tensor = machine.gpu_flops_per_s or 1.0
    launch = rates[runtime.choose("launch", run)]
    if machine.old_card:
        launch *= rates["old_gpu_launch"]
    converts = on_gpu == "tensor" and run.kv[:1] in ("q", "i") and not prefill
    pcie = rates["pcie_share"]
    if runtime.choose("pinned", run) == "no" and machine.pcie_bytes_per_s:
        pcie = min(pcie, rates["pageable_bytes_per_s"] / machine.pcie_bytes_per_s)
    return Attained(
        gpu_memory_share=rates["gpu_memory_share"],
        gpu_flops_per_s=tensor * rates["gpu_prefill_share"],
        gpu_attention_flops_per_s=_gpu_attention(machine, on_gpu, rates, prefill),
        gpu_launch_s=launch,
        cpu_memory_share=_memory_share(machine, runtime, run, rates),
        cpu_flops_per_s=prefill_flops if prefill else decode_flops,
        cpu_attention_flops_per_s=cpu_attention,
        cpu_kernel_s=operator,
        serial_head_token_s=head_token,
        cores=cores,
        cache_traffic=rates["gpu_cache_traffic"],
        converts=converts,
        tile_rows=rates["gpu_prefill_tile"] if prefill else 0.0,
        product_kernels=PRODUCT_KERNELS[runtime.choose("prompt_products", run)] if prefill else 0,
        pcie_share=pcie,
        linear_kernels=round(rates["linear_attention_kernels"]),
        hand_over_s=rates["hand_over"],
        storage_share=_storage_share(machine, rates),
    )


def _storage_share(machine: Machine, rates: Rates) -> float:
    """Share of a drive's rated read rate that experts read on demand attain."""
    mapped, rated = machine.mapped_bytes_per_s, machine.ssd_bytes_per_s
    return mapped / rated if mapped and rated else rates["storage_share"]


def _memory_share(machine: Machine, runtime: Runtime, run: RunFacts, rates: Rates) -> float:
    """Share of main memory's peak bandwidth that matrix-vector kernels stream."""
    one_node = machine.sockets > 1 and "numa=isolate" in run.flags
    platform = "server" if one_node else machine.platform
    share = rates[memory_share(platform)] / (machine.sockets if one_node else 1)
    if platform == "dual-server" and runtime.choose("numa", run) == "no":
        share /= machine.sockets
    peak, measured = machine.ram_bytes_per_s or 0.0, machine.ram_measured_bytes_per_s
    if measured and measured < THEORETICAL * peak:  # a benchmark sees the chiplet links of one socket, but not who reads from which node
        attained = rates["measured_memory_share"] * measured / peak
        share = min(share, attained) if machine.platform == "dual-server" else attained
    return share


def _gpu_attention(machine: Machine, kernel: str, rates: Rates, prefill: bool) -> float:
    """FLOP/s of attention on a GPU."""
    if prefill:
        flops = (machine.gpu_flops_per_s or 1.0) * rates["gpu_prefill_attention_share"]
    else:
        share = rates["gpu_tensor_attention_share" if kernel == "tensor" else "gpu_vector_attention_share"]
        flops = (machine.gpu_vector_flops_per_s or 1.0) * share
    return flops * (rates[SLOWER_ATTENTION[kernel]] if kernel in SLOWER_ATTENTION else 1.0)


def as_found(profile: HardwareProfile, it: Attained) -> HardwareProfile:
    """Return a profile of peaks with what is attained in their place."""
    devices = {}
    for name, device in profile.devices.items():
        flops, attention, share, launch = (
            (it.gpu_flops_per_s, it.gpu_attention_flops_per_s, it.gpu_memory_share, it.gpu_launch_s)
            if name == "gpu"
            else (it.cpu_flops_per_s, it.cpu_attention_flops_per_s, it.cpu_memory_share, it.cpu_kernel_s)
        )
        peaks = {"fp16" if name == "gpu" else "int8": _figure(flops), "fp32": _figure(attention)}
        devices[name] = device.model_copy(update={"peak": peaks, "memory_efficiency": _figure(share), "launch": _figure(launch)})
    links = {
        name: link.model_copy(update={"pinned_efficiency": _figure(it.pcie_share), "pageable_efficiency": _figure(it.pcie_share)})
        for name, link in profile.links.items()
    }
    found = profile.model_copy(update={"devices": devices, "links": links})
    return found.scaled("ssd", it.storage_share) if profile.storage else found


def _figure(value: float) -> Figure[float]:
    return Figure[float].model_construct(value=value, basis="assumed", source="attained by a runtime")


def as_executed(parts: Iterable[Part], it: Attained) -> list[Part]:
    """Return the works of a step as the runtime's kernels see them: padded, converted, serial, handed over."""
    return [p._replace(work=_executed(p, it)) for p in parts]


def _executed(part: Part, it: Attained) -> Work:
    work, gpu = part.work, part.work.resource == "gpu"
    if part.name == "linear attention":
        return replace(work, kernels=it.linear_kernels)
    if part.name == "hand-over":
        return replace(work, overhead_s=it.hand_over_s)
    if part.name == "attention":
        if gpu:
            return replace(work, state_bytes=round(work.state_bytes * it.cache_traffic + (part.half_bytes * 2 if it.converts else 0)))
        if it.serial_head_token_s:
            rounds = max(part.units / it.cores, 1.0)
            return replace(work, flops=0.0, state_bytes=0, overhead_s=rounds * part.pairs * it.serial_head_token_s)
    if part.name == "GPU experts" and it.tile_rows:
        kernels = it.product_kernels * part.units or work.kernels
        return replace(work, flops=work.flops * (1 + it.tile_rows * part.units / work.tokens), kernels=kernels)
    return work
