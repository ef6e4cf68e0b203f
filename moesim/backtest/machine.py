"""Owns the way from a machine's record in a folder of field runs to numbers: rates, sizes, and what had to be assumed for them.

Peaks only; what an engine attains of them is ``runtimes.py``'s business. A fact that nobody stated is None, or, where the name of a
processor settles it, the platform's usual figure, listed in ``assumed``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from moesim.backtest.data import Facts, Lacking
from moesim.backtest.kernels import CpuKernels, kernels_of
from moesim.config import Document, build
from moesim.hardware import HardwareProfile

GB = 1e9
KIB, GIB = 2**10, 2**30
TFLOP = 1e12
READ_AROUND_KIB = 128.0  # Linux: read_ahead_kb of most block devices
UNKNOWN_BYTES_PER_S = 1e9  # stands where nothing is stated; rows that depend on it are refused before
Platform = Literal["desktop", "server", "dual-server", "soc"]

# Processor name -> channels and MT/s of its usual memory, where a record leaves them out; the first that matches.
_XEON = r"Xeon (Gold|Platinum|Silver|Bronze) \d"  # the second digit is the generation
_PLATFORMS = (
    (r"Ryzen (Threadripper )?PRO 3|Threadripper (PRO [35]|[35]\d\d5WX)|EPYC 7", 8, 3200),
    (r"Threadripper (PRO [79]|[79]\d\d5WX)", 8, 5200),
    (r"Threadripper (7|9)", 4, 5200),
    (r"Threadripper 1\d\d\d", 4, 2666),
    (r"Threadripper 2\d\d\d", 4, 2933),
    (r"Threadripper 3\d\d\d", 4, 3200),
    (r"EPYC 9", 12, 4800),
    (r"Xeon Silver 4[12]\d\d", 6, 2400),
    (_XEON + r"1\d\d", 6, 2666),  # Skylake
    (_XEON + r"2\d\d", 6, 2933),  # Cascade Lake
    (_XEON + r"3\d\d", 8, 3200),  # Ice Lake
    (_XEON + r"4\d\d", 8, 4800),  # Sapphire Rapids
    (_XEON + r"5\d\d", 8, 5600),  # Emerald Rapids
    (r"Core i[79]-(7[89]|9[89]|109)\d\dXE?\b", 4, 3200),  # the X series; rated 2666 to 2933, overclocked as a rule
    (r"Ryzen.* [789]\d\d\d|Ryzen AI( \d| HX| PRO)* 3\d\d\b|Core Ultra|Core i\d-1[2345]\d\d\d", 2, 5600),
    (r"Ryzen.* \d\d\d\d|Core i\d-1[01]\d\d\d", 2, 3200),
    (r"Core i\d-[6-9]\d\d\d", 2, 2666),
)
_BY_TYPE = {"DDR4": 3200, "DDR5": 5600}
_DDR5_FROM = 4000  # MT/s
_MARKS = r"\((R|TM)\)|[®™]"  # in names as processors give them
_SERVER = r"EPYC|Xeon"
_VNNI_WITH_AVX2 = r"Core (i\d-1[2-5]\d\d\d|Ultra)"
_LANE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938}  # per lane and direction, 128b/130b
# Cards whose half-precision peak is that of tensor cores, four times their vectors'; cards before there were any.
_TENSOR = r"RTX|GB10|A\d{3,4}\b|(?<!Apple )\bA(2|10G?|16|30|40)\b|\bL\d{1,2}S?\b|[HB]\d{3}\b|\bH20\b|V100|Titan V\b|\bT4\b"
_OLD = r"GTX|(Tesla|Quadro) [KMP]|\b[KMP]\d{2,3}\b|GeForce (9|10)\d0\b|Titan (X|Z|Black)"
# Half-precision throughput per memory bandwidth, FLOP per byte, where a record has no rate: tensor cards, older cards, Apple GPUs.
_FLOP_PER_BYTE = {"tensor": 200.0, "card": 30.0, "soc": 70.0}


@dataclass(frozen=True)
class Machine:
    """Figures of one machine, in bytes, bytes/s, FLOP/s; None where unknown.

    Several cards are one device: a sequence passes through them one after the other, so their rates are harmonic means, weighted by the
    memory that decides how much each one holds.
    """

    name: str
    host: str
    platform: Platform
    gpus: int
    gpu_name: str
    gpu_bytes_per_s: float | None
    gpu_flops_per_s: float | None  # dense half precision, tensor cores where there are any
    gpu_vector_flops_per_s: float | None
    old_card: bool  # before tensor cores
    gpu_bytes: int
    pcie_bytes_per_s: float | None
    ram_bytes_per_s: float | None
    ram_measured_bytes_per_s: float | None
    ram_bytes: int | None
    cores: int | None
    sockets: int
    dot_products: bool  # instructions that multiply and add 8-bit integers (VNNI, AMX, Arm), as all processors since about 2021 have
    server_cores: bool  # many cores at a low clock
    ssd_bytes_per_s: float | None
    mapped_bytes_per_s: float | None  # of a mapped file's pages that are read when they are touched, in memory that is full
    read_around_bytes: int  # what one such fault brings in around its page
    page_cache_bytes: int | None  # memory that nothing takes but the run itself and the pages of its file
    kernels: CpuKernels | None
    assumed: tuple[str, ...]


def has_tensor_cores(gpu: str) -> bool:
    """Return whether a card, by its name, has tensor cores."""
    return bool(re.search(_TENSOR, gpu, re.IGNORECASE))


def precedes_tensor_cores(gpu: str) -> bool:
    """Return whether a card, by its name, is of a generation before tensor cores."""
    return bool(re.search(_OLD, gpu, re.IGNORECASE))


def machine_of(facts: Facts) -> Machine:
    """Return the figures of a record.

    Raises
    ------
    InputError
        If it is no record, or a fact in it cannot be read.
    """
    facts.check()
    assumed: list[str] = []
    unified = facts.get("unified") is True
    sockets = facts.whole("cpu", "sockets", default=1)
    cpu = re.sub(_MARKS, "", facts.text("cpu", "name"))
    peak, channels = _ram(facts, cpu, sockets, assumed)
    gpus = [i for i in range(len(facts.items("gpus"))) if facts.number("gpus", i, "mem_bw_gb_s")]
    counts = [facts.whole("gpus", i, "count", default=1, least=1) for i in gpus]
    weights = [n * (facts.number("gpus", i, "vram_gib") or 1.0) for n, i in zip(counts, gpus, strict=True)]
    bandwidth = _harmonic([facts.number("gpus", i, "mem_bw_gb_s") or 0.0 for i in gpus], weights)
    flops = [facts.number("gpus", i, "fp16_tflops") for i in gpus]
    tensor = _harmonic([f or 0.0 for f in flops], weights) if all(flops) else None
    ram = {key: facts.number("ram", key) for key in ("peak_bw_gb_s", "mt_s", "channels")}
    soc = unified or (not gpus and ram["peak_bw_gb_s"] is not None and ram["mt_s"] is None and ram["channels"] is None)
    name = " + ".join(facts.text("gpus", i, "name") for i in gpus)
    with_tensor = has_tensor_cores(name)
    if bandwidth and tensor is None:
        tensor = bandwidth * _FLOP_PER_BYTE["tensor" if with_tensor else "soc" if unified else "card"] / 1e3
        assumed.append("GPU arithmetic from its bandwidth")
    links = [(facts.number("gpus", i, "pcie_gen"), facts.number("gpus", i, "pcie_lanes")) for i in gpus[:1]]
    pcie = None
    if links and not unified:
        generation, lanes = links[0]
        pcie = _LANE_GB_S.get(int(generation or 4), _LANE_GB_S[4]) * (lanes or 16) * GB
        if not lanes or not generation:
            assumed.append("PCIe x16" if generation else "PCIe 4.0 x16")
    platform: Platform = "soc" if soc else "dual-server" if sockets > 1 else "server" if _is_server(cpu, channels) else "desktop"
    measured, ram_gib, ssd = facts.number("ram", "measured_bw_gb_s"), facts.number("ram", "gib"), facts.number("ssd", "seq_read_gb_s")
    mapped, cache_gib = facts.number("ssd", "mapped_read_gb_s"), facts.number("ram", "page_cache_gib")
    return Machine(
        name=facts.name,
        host=facts.text("host_group") or facts.name,
        platform=platform,
        gpus=sum(counts),
        gpu_name=name,
        gpu_bytes_per_s=bandwidth * GB if bandwidth else None,
        gpu_flops_per_s=tensor * TFLOP if tensor else None,
        gpu_vector_flops_per_s=tensor * TFLOP / (4 if with_tensor else 1) if tensor else None,
        old_card=precedes_tensor_cores(name),
        gpu_bytes=int(sum(weights) * GIB) if gpus else 0,
        pcie_bytes_per_s=pcie,
        ram_bytes_per_s=peak * GB if peak else None,
        ram_measured_bytes_per_s=measured * GB if measured else None,
        ram_bytes=int(ram_gib * GIB) if ram_gib else None,
        cores=facts.whole("cpu", "cores") or None,
        sockets=sockets,
        dot_products=facts.text("cpu", "simd") != "avx2" or bool(re.search(_VNNI_WITH_AVX2, cpu)),
        server_cores=bool(re.search(_SERVER, cpu)),
        ssd_bytes_per_s=ssd * GB if ssd else None,
        mapped_bytes_per_s=mapped * GB if mapped else None,
        read_around_bytes=int((facts.number("ssd", "read_around_kib") or READ_AROUND_KIB) * KIB),
        page_cache_bytes=int(cache_gib * GIB) if cache_gib else None,
        kernels=kernels_of(facts),
        assumed=tuple(assumed),
    )


def _ram(facts: Facts, cpu: str, sockets: int, assumed: list[str]) -> tuple[float | None, int]:
    """Peak GB/s of main memory, and its channels."""
    channels, rate = facts.whole("ram", "channels"), facts.number("ram", "mt_s")
    usual = next(((c * sockets, r) for pattern, c, r in _PLATFORMS if re.search(pattern, cpu)), (0, 0))
    peak = facts.number("ram", "peak_bw_gb_s")
    if peak:
        return peak, channels or usual[0]
    gib, kind = facts.number("ram", "gib"), facts.text("ram", "type")
    if not channels and not usual[0] and not cpu and sockets == 1 and gib and gib <= 128 and kind in _BY_TYPE:
        usual = (2, _BY_TYPE[kind])
    if not channels and usual[0]:
        channels = usual[0]
        assumed.append(f"{channels} memory channels")
    if not rate:
        rate = usual[1]
        if kind in _BY_TYPE and (not rate or (rate >= _DDR5_FROM) != (kind == "DDR5")):
            rate = _BY_TYPE[kind]
        if channels and rate:
            assumed.append(f"memory at {rate:g} MT/s")
    return (channels * 8 * rate / 1e3 if channels and rate else None), channels


def _is_server(cpu: str, channels: int) -> bool:
    return channels > 2 or bool(re.search(_SERVER + "|Threadripper PRO", cpu))


def _harmonic(values: list[float], weights: list[float]) -> float | None:
    if not values or not all(values):
        return None
    return sum(weights) / sum(w / v for v, w in zip(values, weights, strict=True))


def profile_of(machine: Machine) -> HardwareProfile:
    """Return the machine as a profile of peaks: efficiencies are 1 and latencies 0 until a runtime says what it attains.

    Raises
    ------
    Lacking
        If neither the memory of a GPU nor main memory has a stated bandwidth.
    """
    tiers: dict[str, Any] = {}
    channels: dict[str, Any] = {}
    devices: dict[str, Any] = {}
    links: dict[str, Any] = {}
    main = "unified" if machine.platform == "soc" and machine.gpus else "ram"
    ram = machine.ram_bytes_per_s or (machine.gpu_bytes_per_s if main == "unified" else None)
    tiers[main] = {"capacity": f"{machine.ram_bytes or 2**50} B", "channel": main}
    channels[main] = {"bandwidth": f"{ram or UNKNOWN_BYTES_PER_S} B/s"}
    ideal = {"compute_efficiency": 1.0, "memory_efficiency": 1.0, "launch": "0 s"}
    devices["cpu"] = {"tier": main, "cores": machine.cores or 1, "peak": {"fp32": "1 TFLOP/s"}, **ideal}
    if machine.gpu_bytes_per_s and machine.gpu_flops_per_s:
        tier = main
        if main == "ram":
            tier = "vram"
            tiers["vram"] = {"capacity": f"{machine.gpu_bytes} B", "channel": "vram"}
            channels["vram"] = {"bandwidth": f"{machine.gpu_bytes_per_s} B/s"}
            channels["pcie"] = {"bandwidth": f"{machine.pcie_bytes_per_s or UNKNOWN_BYTES_PER_S} B/s"}
            way = {"channel": "pcie", "latency": "0 s", "pinned_efficiency": 1.0, "pageable_efficiency": 1.0}
            links = {"h2d": {"source": "ram", "target": "vram", **way}, "d2h": {"source": "vram", "target": "ram", **way}}
        devices["gpu"] = {"tier": tier, "peak": {"fp16": f"{machine.gpu_flops_per_s} FLOP/s"}, **ideal}
    if ram is None and "vram" not in tiers:
        raise Lacking("no memory bandwidth stated")
    storage: dict[str, Any] = {}
    if machine.ssd_bytes_per_s:
        rate = f"{machine.ssd_bytes_per_s} B/s"
        tiers["ssd"] = {"capacity": "16 TB", "channel": "ssd"}
        channels["ssd"] = {"bandwidth": rate}
        storage["ssd"] = {"tier": "ssd", "latency": "0 s", "curve": [{"request": "1 MiB", "depth": 1, "bandwidth": rate}],
                          "engines": {"mmap": {"efficiency": 1.0, "fault_size": "1 MiB"}, "buffered": {"efficiency": 1.0}}}  # fmt: skip
    data = {"name": machine.name, "description": "peaks of a machine of a folder of field runs", "tiers": tiers, "channels": channels,
            "devices": devices, "links": links, "storage": storage}  # fmt: skip
    return build(HardwareProfile, Document(data, f"machine {machine.name}"))
