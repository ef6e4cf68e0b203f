"""What the names of cards and processors settle: tensor cores, kernels, and the memory that is usual where a record leaves it out."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.backtest.data import Facts
from moesim.backtest.machine import Machine, has_tensor_cores, machine_of, precedes_tensor_cores
from moesim.runtimes import RunFacts, runtime_of

TENSOR = ("A2", "A10", "A10G", "A16", "A30", "A40", "A100-SXM4-80GB", "A800", "L4", "L40", "L40S", "NVIDIA L40S", "H20", "H100", "H200", "GH200", "B100", "B200",
          "T4", "Tesla T4", "V100", "Tesla V100-SXM2-32GB", "RTX 3090", "NVIDIA GeForce RTX 4090", "RTX A6000", "Quadro RTX 4000", "Titan RTX", "Titan V", "GB10")  # fmt: skip
OLD = (
    "GeForce 1080 Ti",
    "GeForce GTX 1080",
    "Titan Xp",
    "NVIDIA TITAN Xp",
    "M40",
    "Tesla M40",
    "P40",
    "P100",
    "Tesla P100",
    "Quadro P6000",
    "K80",
)
NEITHER = ("Apple A16", "Apple A18 Pro", "Apple M2", "Apple M4 Max", "RX 7900 XT", "T400", "Accelerator X9")
ADA = ("L4", "L40", "L40S", "NVIDIA L4", "RTX 4090", "RTX 5880 Ada")


def run_on(gpu: str) -> RunFacts:
    return RunFacts(
        date="2026-01", version="", flags=frozenset(), latent=False, kv="f16", head=128, flash=True, room_twice=True, mixed=False, gpu=gpu
    )


def test_tensor_cores_by_name() -> None:
    assert [name for name in TENSOR if not has_tensor_cores(name) or precedes_tensor_cores(name)] == []
    assert [name for name in OLD if has_tensor_cores(name) or not precedes_tensor_cores(name)] == []
    assert [name for name in NEITHER if has_tensor_cores(name) or precedes_tensor_cores(name)] == []


def test_kernels_of_llama_cpp_by_name() -> None:
    engine = runtime_of("llama.cpp")
    assert {engine.choose("gpu_attention", run_on(name)) for name in ADA} == {"vector"}
    assert {engine.choose("gpu_attention", run_on(name)) for name in ("A10", "A40", "A100", "RTX 3090", "L400", "V100")} == {"tensor"}
    assert {engine.choose("launch", run_on(name)) for name in OLD} == {"launch"}
    assert {engine.choose("launch", run_on(name)) for name in ("A40", "L4", "RTX 3090", "Apple M2", "RX 7900 XT")} == {"launch_graphs"}


def machine(cpu: str, **ram: Any) -> Machine:
    data = {"gpus": [{"name": "RTX 3090", "mem_bw_gb_s": 936}], "cpu": {"name": cpu, "sockets": ram.pop("sockets", 1)}, "ram": ram}
    return machine_of(Facts("box", data, "machines.yaml"))


@pytest.mark.parametrize("cpu, channels, rate", [
    ("Xeon Platinum 8180", 6, 2666), ("Xeon Gold 6148", 6, 2666), ("Xeon Silver 4114", 6, 2400), ("Intel(R) Xeon(R) Gold 6138 CPU @ 2.00GHz", 6, 2666),
    ("Xeon Gold 6248R", 6, 2933), ("Xeon Platinum 8280", 6, 2933), ("Xeon Silver 4210", 6, 2400), ("Xeon Gold 5318Y", 8, 3200),
    ("Xeon Platinum 8352V", 8, 3200), ("Xeon Silver 4314", 8, 3200), ("Xeon Gold 6454S", 8, 4800), ("Xeon Platinum 8480+", 8, 4800),
    ("Xeon Gold 6548Y+", 8, 5600), ("Xeon Platinum 8592+", 8, 5600), ("Threadripper 1950X", 4, 2666), ("Ryzen Threadripper 2990WX", 4, 2933),
    ("Ryzen Threadripper 3970X", 4, 3200), ("Threadripper 7970X", 4, 5200), ("Threadripper PRO 3955WX", 8, 3200), ("Threadripper 5975WX", 8, 3200),
    ("AMD Ryzen Threadripper PRO 7965WX 24-Cores", 8, 5200), ("Core i9-10980XE", 4, 3200), ("Intel(R) Core(TM) i9-7900X CPU", 4, 3200),
    ("Core i7-7820X", 4, 3200), ("Core i9-9980XE", 4, 3200), ("Core i9-10900K", 2, 3200), ("Core i7-9700K", 2, 2666), ("Ryzen 7 7840HS", 2, 5600),
    ("Ryzen 7 8840U", 2, 5600), ("Ryzen 9 8945HS", 2, 5600), ("Ryzen AI 9 HX 370", 2, 5600), ("Ryzen AI 7 PRO 350", 2, 5600), ("Ryzen 7 5700G", 2, 3200),
    ("Ryzen 9 7950X", 2, 5600), ("EPYC 9355", 12, 4800), ("EPYC 7343", 8, 3200),
])  # fmt: skip
def test_usual_memory_by_processor(cpu: str, channels: int, rate: int) -> None:
    found = machine(cpu)
    assert found.ram_bytes_per_s == pytest.approx(channels * 8e6 * rate)
    assert {f"{channels} memory channels", f"memory at {rate} MT/s"} <= set(found.assumed)
    assert machine(cpu, sockets=2).ram_bytes_per_s == pytest.approx(2 * channels * 8e6 * rate)


def test_a_stated_kind_of_memory_overrides_the_usual_rate_only_where_it_differs() -> None:
    def mt_s(cpu: str, kind: str) -> float:
        return (machine(cpu, type=kind, channels=2).ram_bytes_per_s or 0.0) / 16e6

    assert mt_s("Core i5-12400", "DDR4") == 3200 and mt_s("Core i5-12400", "DDR5") == 5600
    assert mt_s("Xeon Gold 6148", "DDR4") == 2666 and mt_s("Processor Y", "DDR5") == 5600
    assert machine("Ryzen AI Max+ 395").ram_bytes_per_s is None and machine("Ryzen 7 8840U", mt_s=7500).ram_bytes_per_s == pytest.approx(
        120e9
    )
