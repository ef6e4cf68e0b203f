"""What an engine attains takes the place of a machine's assumed figures, whatever machine the scenario is run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.config import Document, build
from moesim.errors import InputError
from moesim.hardware import HardwareProfile
from moesim.hardware.compose import find_hardware
from moesim.llama.flags import to_scenario
from moesim.llama.options import parse_command
from moesim.runtime_rates import as_found
from moesim.runtimes import load_rates
from moesim.scenario import Scenario
from moesim.simulate import make_case, simulate

DESKTOP = "rtx-3090 + ryzen-9950x + ddr5-6000x2:96GiB + pcie4x16 + nvme-gen4"
RATES = load_rates()


def scenario(prompt: int = 64, placement: dict[str, Any] | None = None, **use: Any) -> Scenario:
    data = {"model": "olmoe-1b-7b", "hardware": DESKTOP, "trace": {"generate": "uniform"}, "workload": {"prompt_tokens": prompt, "output_tokens": 2},
            "placement": placement or {}, "runtime": {"name": "llama.cpp", **use}}  # fmt: skip
    return build(Scenario, Document(data, "test"))


def machine() -> HardwareProfile:
    return find_hardware(DESKTOP, Path(), "test")


def test_shares_are_those_of_the_engine() -> None:
    found = as_found(machine(), scenario(), "").devices
    assert found["gpu"].memory_efficiency.value == RATES["gpu_memory_share"]
    assert found["cpu"].memory_efficiency.value == RATES["client_memory_share"]
    assert found["gpu"].compute_efficiency.value == RATES["gpu_prefill_share"]
    assert found["gpu"].peak["int8"] == machine().devices["gpu"].peak["fp16"]  # quantised products run at the rate of half precision
    assert "llama.cpp" in found["cpu"].peak["int8"].source


@pytest.mark.parametrize(("threads", "prompt"), [(8, 64), (16, 64), (99, 64), (8, 0)])
def test_arithmetic_of_a_cpu_goes_with_its_threads(threads: int, prompt: int) -> None:
    cpu = as_found(machine(), scenario(prompt, threads=threads), "").devices["cpu"]
    core = RATES["cpu_prefill_flops"] * RATES["cpu_prefill_plain_share"] if prompt else RATES["cpu_flops"]
    assert cpu.effective_flops_per_s("int8") == pytest.approx(min(threads, 16) * core)


def test_graphs_are_off_where_the_cpu_computes_experts() -> None:
    beside = {"attention": "gpu", "layers": [{"layers": "0-3", "part": "routed_experts", "device": "cpu"}]}
    together = {"attention": "gpu", "layers": [*beside["layers"], {"layers": "0-3", "part": "attention", "device": "cpu"}]}  # type: ignore[misc]
    launch = [as_found(machine(), scenario(placement=it), "").devices["gpu"].launch.value for it in (beside, together)]
    assert launch == [RATES["launch"], RATES["launch_graphs"]]


def test_what_was_measured_stays() -> None:
    data = machine().model_dump(mode="json")
    for name in ("cpu", "gpu"):
        for figure in ("memory_efficiency", "compute_efficiency", "launch"):
            data["devices"][name][figure] |= {"basis": "measured", "source": "here"}
    measured = build(HardwareProfile, Document(data, "test"))
    assert as_found(measured, scenario(), "") == measured
    half = as_found(measured, scenario(threads=8), "").devices["cpu"].peak["int8"].value
    assert half == pytest.approx(measured.devices["cpu"].peak["int8"].value / 2)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match=r'runtime.name: expected a known engine, got "lama.cpp"; did you mean "llama.cpp"'):
        as_found(machine(), scenario(name="lama.cpp"), "")


def test_a_command_line_runs_at_the_rates_of_its_engine() -> None:
    """A desktop CPU's prompt of 512 tokens was measured at 142 tokens/s (docs/field-accuracy.md); kernels at the chip's peak would give over 900."""
    line = "llama-bench -m Qwen3-30B-A3B-IQ4_XS.gguf -ngl 0 -fa 0 -p 512 -n 4 -t 8"
    said = to_scenario(parse_command(line), "ryzen-7950x + ddr5-5200x2:64GiB")
    assert said.scenario["runtime"] == {"name": "llama.cpp", "threads": 8}
    speeds = [
        simulate(make_case(build(Scenario, Document(said.scenario | {"runtime": use}, "test"))), keep=False).as_dict()["metrics"][
            "prefill_tok_s"
        ]
        for use in ({"name": "llama.cpp"}, None)
    ]
    assert 100 < speeds[0] < 250 < 900 < speeds[1]
