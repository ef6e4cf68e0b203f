"""The catalogue of parts: every figure that follows in two ways does so, parts compose to machines that run, and impossible ones are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli import call

from moesim import config, resources
from moesim.errors import InputError
from moesim.hardware import ChannelFacts, HardwareProfile, figures, load_hardware
from moesim.hardware import catalogue as hardware_catalogue
from moesim.hardware.catalogue import KINDS, SIMD, Cpu, Drive, Gpu, Soc, assumptions, cpu_peaks, folder, part, part_names, parts
from moesim.hardware.compose import compose, find_hardware
from moesim.hardware.grammar import EVERYDAY, is_composition, read_parts
from moesim.simulate import load_case, simulate

GPUS, SOCS, CPUS, DRIVES = parts(Gpu), parts(Soc), parts(Cpu), parts(Drive)
HOST = "ryzen-9950x + ddr5-6000x2:96GiB"
DESKTOP = f"rtx-3090 + {HOST} + pcie4x16 + nvme-gen4"
NO_RATE = {"b200", "mi325x", "mi355x"}  # the vendors round the bandwidth and state no rate of the pins
SMALL = """\
name: small
model: tinymoe
precision: fp16
hardware: "{}"
trace: {{generate: uniform}}
workload: {{prompt_tokens: 2, output_tokens: 2}}
"""


def host(name: str, cpu: Cpu) -> str:
    gen, rate = max(cpu.memory.items())
    return f"{name} + {gen}-{rate}x{cpu.memory_channels}:{16 * cpu.memory_channels}GiB"


MACHINES = [
    *(f"{name} + {HOST}" for name in GPUS),
    *(f"{name}:{soc.memory[-1] // 2**30}GiB" for name, soc in SOCS.items()),
    *(host(name, cpu) for name, cpu in CPUS.items()),
    *(f"{HOST} + {name}" for name in DRIVES),
    f"2 x rtx-3090 + {HOST} + nvme-gen4",
    f"rtx-5090 + 2 x rtx-3090 + {HOST}",
    "rtx-3090 + ryzen-ai-max-395:128GiB + nvme-gen5",
]


# parts ----------------------------------------------------------------------------------------------------------------


def test_the_catalogue_is_as_large_as_promised() -> None:
    assert len(GPUS) + len(SOCS) >= 50 and len(CPUS) >= 30 and len(DRIVES) >= 10
    named = {"m1", "m1-pro", "m1-max", "m1-ultra", "m4-max", "m5", "m5-pro", "m5-max", "snapdragon-x-elite", "snapdragon-8-gen3", "gb10",
             "jetson-orin-nano-8gb", "jetson-orin-nx-16gb", "jetson-agx-orin-64gb", "jetson-thor", "ryzen-ai-max-395", "rk3588", "raspberry-pi-5",
             "core-ultra-7-155h", "core-ultra-7-258v", "core-ultra-9-285h"}  # fmt: skip
    assert named <= set(SOCS)
    assert {"server-dual", "server-single", "workstation", "desktop", "laptop"} == {cpu.platform for cpu in CPUS.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_cut_where_yaml_cuts_them(kind: str) -> None:
    document = config.read_yaml(folder() / f"{kind}.yaml")
    assert list(document.data) == list(part_names(kind))
    for name in part_names(kind):
        assert config.build(KINDS[kind], config.Document(document.data[name], kind)) == part(name)


def test_a_name_means_one_thing() -> None:
    every = [name for kind in KINDS for name in part_names(kind)]
    assert len(every) == len(set(every))
    assert not set(every) & set(resources.names("hardware_profiles"))
    assert not [name for name in every if is_composition(f"{name}.yaml") or not is_composition(name)]


def test_errors_of_a_part_name_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for file in folder().iterdir():
        text = file.read_text(encoding="utf-8")
        (tmp_path / file.name).write_text(text.replace("bus_bits: 352", "bus_bits: wide", 1), encoding="utf-8")
    monkeypatch.setattr(hardware_catalogue, "folder", lambda: tmp_path)
    monkeypatch.setattr(hardware_catalogue, "_entries", hardware_catalogue._entries.__wrapped__)
    lines = (tmp_path / "gpus.yaml").read_text(encoding="utf-8").splitlines()
    with pytest.raises(InputError) as caught:
        part.__wrapped__("gtx-1080-ti")
    assert str(caught.value).startswith(f"{tmp_path / 'gpus.yaml'}:{lines.index('  bus_bits: wide') + 1}: bus_bits")


# what follows in two ways ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*GPUS, *SOCS])
def test_bandwidth_is_bus_times_rate(name: str) -> None:
    it = GPUS.get(name) or SOCS[name]
    assert (it.mt_s is None) == (name in NO_RATE)
    if it.mt_s is not None:
        assert it.bandwidth.value == pytest.approx(it.bus_bits / 8 * it.mt_s * 1e6, rel=0.01)


@pytest.mark.parametrize("name", [*GPUS, *SOCS])
def test_fp32_is_shaders_times_clock(name: str) -> None:
    unit = GPUS[name] if name in GPUS else SOCS[name].gpu
    if unit is not None and unit.shaders is not None and unit.clock_mhz is not None:
        assert unit.peak["fp32"].value == pytest.approx(unit.shaders * unit.flops_per_clock * unit.clock_mhz * 1e6, rel=0.015)


STATED = {  # TFLOP/s or TOP/s, dense, as vendors' papers print them
    "rtx-3090": {"fp32": 35.6, "fp16": 142, "bf16": 71, "int8": 285, "int4": 569},
    "rtx-4090": {"fp32": 82.6, "fp16": 330.3, "bf16": 165.2, "fp8": 660.6, "int8": 660.6, "int4": 1321.2},
    "rtx-5090": {"fp32": 104.8, "fp16": 419, "bf16": 209.5, "fp8": 838, "int8": 838, "fp4": 1676},
    "rtx-a6000": {"fp32": 38.7, "fp16": 154.8, "int8": 309.7, "int4": 619.3},
    "rtx-6000-ada": {"fp32": 91.1, "fp16": 364.2, "fp8": 728.5},
    "rtx-pro-6000-blackwell": {"fp32": 125, "fp16": 503.8, "fp4": 2000},
    "l40s": {"fp32": 91.6, "fp16": 362, "fp8": 733, "int8": 733},
    "l4": {"fp32": 30.3, "fp16": 121, "fp8": 242.5},
    "a40": {"fp32": 37.4, "fp16": 149.7, "int8": 299.3},
    "a10": {"fp32": 31.2, "fp16": 125, "int8": 250},
    "tesla-t4": {"fp32": 8.1, "fp16": 65, "int8": 130, "int4": 260},
    "tesla-v100-32gb": {"fp32": 15.7, "fp16": 125},
    "tesla-p100": {"fp16": 18.7},
    "tesla-p40": {"int8": 47},
    "rtx-2080-ti": {"fp32": 13.4, "fp16": 107.6, "int8": 215},
    "rx-7900-xtx": {"fp32": 61.4, "fp16": 122.8},
    "rx-9070-xt": {"fp32": 48.7, "fp16": 195, "fp8": 389, "int8": 389, "int4": 779},
    "arc-a770-16gb": {"fp32": 19.66, "int8": 262},
    "arc-b580": {"int8": 233},
    "arc-b570": {"int8": 203},
}


@pytest.mark.parametrize("name", STATED)
def test_rates_are_as_the_vendor_states_them(name: str) -> None:
    for fmt, stated in STATED[name].items():
        assert GPUS[name].peak[fmt].value == pytest.approx(stated * 1e12, rel=0.02), fmt  # type: ignore[index]


@pytest.mark.parametrize("name", GPUS)
def test_halving_the_bits_doubles_the_rate_or_leaves_it(name: str) -> None:
    """Of matrix units; from bf16, which counts FP32 accumulation on consumer cards, up to four times."""
    peak = GPUS[name].peak
    for wide, narrow in (("bf16", "fp8"), ("fp16", "fp8"), ("fp16", "int8"), ("fp8", "int8"), ("fp8", "fp4"), ("int8", "int4")):
        if wide in peak and narrow in peak:
            ratio = peak[narrow].value / peak[wide].value  # type: ignore[index]
            assert any(ratio == pytest.approx(n, rel=0.01) for n in (1, 2, 4)), (wide, narrow, ratio)
    assert "fp16" not in peak or peak["fp16"].value >= peak["fp32"].value


@pytest.mark.parametrize("name", GPUS)
def test_memory_is_made_of_chips_on_the_bus(name: str) -> None:
    gpu = GPUS[name]
    if gpu.kind.endswith("-hbm"):
        assert gpu.bus_bits % 1024 == 0
    else:
        chips = gpu.bus_bits / 32
        assert gpu.vram.value / 2**30 / chips in (1, 2, 3, 4, 6), "one or two chips of 1, 2 or 3 GiB on each 32 bits"


@pytest.mark.parametrize("name", CPUS)
def test_cores_match_their_instruction_set(name: str) -> None:
    cpu = CPUS[name]
    allowed = {"avx2": {16, 32}, "avx-vnni": {16, 32}, "neon-dot": {16}}.get(cpu.simd, {32, 64} if cpu.simd == "avx512-bf16" else {64})
    assert cpu.simd in SIMD and {c.flops_per_cycle for c in cpu.cores} <= allowed
    assert cpu.memory_channels % cpu.sockets == 0
    cores = sum(c.count for c in cpu.cores)
    assert cores <= cpu.threads <= 2 * cores
    assert ("2 x" in cpu.chip) == (cpu.sockets == 2) == name.endswith("-dual")


@pytest.mark.parametrize(
    ("name", "fmt", "tflops"),
    [
        ("ryzen-9950x", "fp32", 4.4032),  # 16 x 64 x 4.3 GHz
        ("ryzen-9950x", "int8", 17.6128),
        ("ryzen-7840hs", "bf16", 1.9456),  # 8 x 32 x 3.8 GHz, twice
        ("epyc-9354", "fp32", 3.328),
        ("epyc-9654-dual", "fp32", 14.7456),
        ("i9-14900k", "fp32", 1.4336),  # 8 x 32 x 3.2 + 16 x 16 x 2.4
        ("i7-8700", "int8", 1.2288),
        ("xeon-platinum-8480p", "bf16", 114.688),  # 56 x 1,024 x 2 GHz
        ("xeon-platinum-8480p", "int8", 229.376),  # 56 x 2,048 x 2 GHz
    ],
)
def test_cpu_peaks(name: str, fmt: str, tflops: float) -> None:
    cpu = CPUS[name]
    assert cpu_peaks(cpu.cores, cpu.simd, cpu.sockets)[fmt] == pytest.approx(tflops * 1e12)  # type: ignore[index]


@pytest.mark.parametrize("name", CPUS)
def test_memory_peak_follows_from_channels_and_rate(name: str) -> None:
    cpu = CPUS[name]
    for gen, rate in cpu.memory.items():
        hw = compose(f"{name} + {gen}-{rate}x{cpu.memory_channels}:{16 * cpu.memory_channels}GiB")
        assert hw.channels["ram"].bandwidth.value == pytest.approx(cpu.memory_channels * 8 * rate * 1e6, rel=1e-12)
        assert hw.devices["cpu"].platform == cpu.platform


@pytest.mark.parametrize(
    ("gen", "lanes", "gb_s"), [(3, 16, 15.754), (4, 16, 31.508), (5, 4, 15.754), (5, 16, 63.015), (6, 16, 118.0), (6, 4, 29.5)]
)
def test_pcie_rates(gen: int, lanes: int, gb_s: float) -> None:
    facts = ChannelFacts.model_validate({"pcie_gen": gen, "pcie_lanes": lanes})
    assert facts.peak_bytes_per_s == pytest.approx(gb_s * 1e9, rel=1e-4)


def test_field_machines_agree(shared: Path) -> None:
    """Facts that others state of the same parts: memory, its bandwidth, dense FP16 rates, channels and rates of memory."""
    machines = yaml.safe_load((shared / "field_runs" / "machines.yaml").read_text(encoding="utf-8"))
    by_chip = {gpu.chip: gpu for gpu in GPUS.values()} | {soc.chip.partition(",")[0].partition(" (")[0]: soc for soc in SOCS.values()}
    seen = set()
    for machine in machines.values():
        for card in machine["gpus"]:
            name = {"RTX 4060 Ti 16GB": "RTX 4060 Ti 16 GB", "RTX 5060 Ti": "RTX 5060 Ti 16 GB", "RTX 5880 Ada": "RTX 5880 Ada Generation",
                    "Tesla P100": "Tesla P100 PCIe 16 GB", "RTX 4090D": "RTX 4090 D"}.get(card["name"]["v"], card["name"]["v"])  # fmt: skip
            found = next((it for chip, it in by_chip.items() if re.fullmatch(rf"((GeForce|Radeon) )?{re.escape(name)}", chip)), None)
            assert found is not None, name
            seen.add(name)
            assert found.bandwidth.value / 1e9 == pytest.approx(card["mem_bw_gb_s"]["v"], rel=0.03), name
            rate = card["fp16_tflops"]["v"]
            if isinstance(found, Gpu):
                assert found.vram.value == card["vram_gib"]["v"] * 2**30, name
                assert rate is None or found.peak["fp16"].value / 1e12 == pytest.approx(rate, rel=0.03), name
    assert len(seen) >= 30


# compositions ---------------------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation() -> None:
    hw = compose(DESKTOP)
    like = load_hardware("desktop-24gb")
    assert hw.channel_capacities() == pytest.approx(like.channel_capacities(), rel=0.002)
    assert hw.name == DESKTOP and hw.tiers["ram"].capacity.value == 96 * 2**30
    for device in ("gpu", "cpu"):
        for fmt, peak in like.devices[device].peak.items():
            assert hw.devices[device].peak[fmt].value == pytest.approx(peak.value, rel=0.01)
    assert hw.read_bandwidth("ssd", 2**20, 8) == like.read_bandwidth("ssd", 2**20, 8)


def test_order_and_case_do_not_matter() -> None:
    words = DESKTOP.split(" + ")
    turned = compose(" +".join(reversed(words)).upper().replace("GIB", "GiB"))
    assert turned == compose(DESKTOP)
    assert config.content_hash(turned) == config.content_hash(compose(DESKTOP))
    assert compose(f"{HOST} + rtx-3090 + rtx-5090").name == compose(f"rtx-5090 + {HOST} + rtx-3090").name == f"rtx-5090 + rtx-3090 + {HOST}"
    assert compose(f"2x rtx-3090 + {HOST}") == compose(f"2 x rtx-3090 + {HOST}") == compose(f"2xrtx-3090 + {HOST}")


@pytest.mark.parametrize("text", MACHINES)
def test_composed_machines_are_consistent(text: str) -> None:
    hw = compose(text)
    assert compose(hw.name) == hw
    assert [dotted for dotted, figure in figures(hw) if not figure.source] == []
    for channel in hw.channels.values():
        if channel.facts:
            assert channel.bandwidth.value == pytest.approx(channel.facts.peak_bytes_per_s, rel=0.01)
    for store in hw.storage.values():
        assert all(store.latency.value < p.request * p.depth / p.bandwidth.value for p in store.curve)
    again = config.build(HardwareProfile, config.parse_yaml(yaml.safe_dump(hw.model_dump(mode="json")), "again.yaml"))
    assert again == hw
    assert all(device.supports("int8") for device in hw.devices.values())


@pytest.mark.parametrize("text", MACHINES)
def test_composed_machines_run(text: str, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SMALL.format(text), encoding="utf-8")
    case = load_case(path)
    assert case.layout.ledger.fits and case.hardware.name == compose(text).name
    result = simulate(case)
    assert result.oom is None and result.as_dict()["metrics"]["decode_tok_s"] > 0


def test_every_kind_that_a_part_names_has_its_assumptions() -> None:
    given = assumptions()
    assert all(given.units[gpu.kind].reserved for gpu in GPUS.values())
    assert {gpu.kind for gpu in GPUS.values()} | {u.kind for soc in SOCS.values() for u in (soc.gpu, soc.npu) if u} == set(given.units)
    assert {soc.kind for soc in SOCS.values()} == set(given.socs)
    assert {soc.cpu.simd for soc in SOCS.values()} <= set(SIMD)


def test_two_cards_share_the_lanes_and_can_both_work(tmp_path: Path) -> None:
    hw = compose(f"2 x rtx-3090 + {HOST}")
    assert [name for name in hw.tiers] == ["vram", "vram1", "ram"] and set(hw.links) == {"h2d", "d2h", "h2d1", "d2h1", "p2p", "p2p1"}
    assert hw.channels["pcie_h2d1"].facts == ChannelFacts(pcie_gen=4, pcie_lanes=8)
    path = tmp_path / "scenario.yaml"
    path.write_text(SMALL.format(hw.name) + 'placement: {layers: [{layers: "4-7", device: gpu1}]}\n', encoding="utf-8")
    case = load_case(path)
    assert set(case.layout.pools) == {"vram", "vram1", "ram"}
    assert "gpu1" in simulate(case).as_dict()["lanes"]


def test_defaults_of_what_is_left_out() -> None:
    assert compose(f"rtx-3090 + {HOST}").storage == {}
    facts = {text: compose(f"{text}").channels["pcie_h2d"].facts for text in (
        f"rtx-5090 + {HOST}", f"rtx-4060 + {HOST}", "rtx-5090 + i7-8700 + ddr4-2666x2:32GiB", f"4 x rtx-3090 + {HOST}",
        f"rtx-5090 + rtx-3090 + {HOST} + pcie5x8", "8 x h200 + epyc-9654-dual + ddr5-4800x24:768GiB",
    )}  # fmt: skip
    assert [(f.pcie_gen, f.pcie_lanes) for f in facts.values() if f] == [(5, 16), (4, 8), (3, 8), (4, 4), (5, 8), (5, 16)]
    hw = compose(f"rtx-5090 + rtx-3090 + {HOST} + pcie5x8")
    assert hw.channels["pcie_h2d1"].facts == ChannelFacts(pcie_gen=4, pcie_lanes=8)
    assert (
        hw.channels["pcie_h2d"].bandwidth.basis == "spec"
        and compose(f"rtx-3090 + {HOST}").channels["pcie_h2d"].bandwidth.basis == "assumed"
    )


def test_a_drive_is_no_faster_than_its_slot() -> None:
    assert compose(f"{HOST} + nvme-gen5").read_bandwidth("ssd", 2**24, 64) == 12.4e9
    capped = compose("i7-8700 + ddr4-2666x2:32GiB + nvme-gen5")
    assert capped.read_bandwidth("ssd", 2**24, 64) == pytest.approx(4 * 8e9 / 8 * 128 / 130)
    assert "PCIe 3.0 x4" in capped.channels["ssd"].bandwidth.source
    assert compose(f"{HOST} + nvme-gen4:4TB").tiers["ssd"].capacity.value == 4 * 10**12


def test_memory_above_its_rating_says_so() -> None:
    assert "rated for 5600" in compose(f"rtx-3090 + {HOST}").channels["ram"].bandwidth.source
    assert "rated" not in compose("ryzen-9950x + ddr5-5600x2:96GiB").channels["ram"].bandwidth.source


def test_a_card_beside_an_soc_comes_first() -> None:
    hw = compose("ryzen-ai-max-395:64GiB + rtx-3090")
    assert {name: device.tier for name, device in hw.devices.items()} == {
        "gpu": "vram",
        "gpu1": "unified",
        "npu": "unified",
        "cpu": "unified",
    }
    assert hw.links["h2d"].source == "unified" and hw.devices["cpu"].bandwidth is not None


BAD: list[tuple[str, str]] = [
    (f"rtx-3091 + {HOST}", 'did you mean "rtx-3090"'),
    ("ryzen-9-9950x + ddr5-6000x2:96GiB", 'did you mean "ryzen-9950x"'),
    (f"rtx-3090 + {HOST} + nvme", 'got "nvme"; '),
    (f"rtx-3090 + + {HOST}", 'got ""'),
    ("rtx-3090 + nvme-gen4", "expected a CPU or an SoC, got none; known: "),
    ("rtx-3090 + ryzen-9950x", 'expected memory beside ryzen-9950x, got none; add "ddr5-5600x2:CAPACITY"'),
    ("ryzen-9950x + ddr5-6000x2", "expected memory with its capacity"),
    ("ryzen-9950x + ddr5-6000x2:96GB", "whole GiB"),
    ("ryzen-9950x + ddr5-6000x2:0GiB", "whole GiB"),
    ("ryzen-9950x + ddr5-6000x2:96", "a size such as 64 GB"),
    ("ryzen-9950x + ddr5-6000x2:1024GiB", "at most 128GiB per channel on a desktop platform"),
    ("ryzen-9950x + ddr4-3200x2:64GiB", 'expected memory that ryzen-9950x takes: DDR5-5600, got "ddr4-3200x2:64GiB"'),
    ("ryzen-9950x + ddr5-2666x2:64GiB", "a rate of DDR5, 3200 to 9200 MT/s"),
    ("ryzen-9950x + ddr6-9000x2:64GiB", "ddr3, ddr4 or ddr5"),
    ("ryzen-9950x + ddr5-6000x4:64GiB", "at most the 2 memory channels of ryzen-9950x"),
    ("ryzen-9950x + ddr5-6000x0:64GiB", "at least one memory channel"),
    ("epyc-9354 + ddr5-6000x12:384GiB", "at most the rated DDR5-4800 of epyc-9354"),
    (f"{HOST} + ddr5-6000x2:32GiB", "expected one memory, got"),
    (f"{HOST} + ryzen-7950x", "expected one CPU, got ryzen-9950x, ryzen-7950x"),
    (f"rtx-3090 + rtx-3090 + {HOST}", 'got "rtx-3090" again; write "2 x rtx-3090"'),
    (f"{HOST} + nvme-gen4 + nvme-gen4", '"nvme-gen4" again'),
    (f"{HOST} + nvme-gen4 + sata", "expected one drive"),
    (f"0 x rtx-3090 + {HOST}", "1 to 8 cards"),
    ("2 x epyc-9654 + ddr5-4800x24:768GiB", "two sockets are parts of their own"),
    (f"{HOST} + 2 x nvme-gen4", "a count only before a GPU"),
    (f"rtx-3090:24GiB + {HOST}", "no size of rtx-3090"),
    ("m4-max", 'one of 48GiB, 64GiB, 128GiB, got "m4-max"'),
    ("m4-max:96GiB", "sold with: 48GiB, 64GiB, 128GiB"),
    ("m4-max:64GiB + ryzen-9950x", "no CPU and no memory beside m4-max"),
    ("m4-max:64GiB + ddr5-6000x2:64GiB", "no CPU and no memory beside m4-max"),
    ("m4-max:64GiB + m4-pro:48GiB", "expected one SoC"),
    ("m4-max:64GiB + rtx-3090", "which has no PCIe slot"),
    (f"{HOST} + pcie4x16", "expected a card for the slot"),
    (f"rtx-3090 + {HOST} + pcie4x16 + pcie4x8", "expected one slot"),
    (f"rtx-3090 + {HOST} + pcie7x16", "generation 3 to 6"),
    (f"rtx-3090 + {HOST} + pcie4x12", "1, 2, 4, 8, 16 lanes"),
    (f"rtx-5090 + {HOST} + pcie6x16", "at most PCIe 5, which ryzen-9950x has"),
    (f"rtx-3090 + {HOST} + pcie5x16", "at most the card's own pcie4x16"),
    (f"rtx-4060 + {HOST} + pcie4x16", "at most the card's own pcie4x8"),
    (f"2 x rtx-3090 + {HOST} + pcie4x16", "at most the 24 lanes of ryzen-9950x for all cards"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text for text, _ in BAD])
def test_impossible_machines_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        find_hardware(text, where="scenario.yaml:3")
    assert str(caught.value).startswith("scenario.yaml:3: hardware: expected ")


def test_profiles_and_files_are_no_compositions(tmp_path: Path) -> None:
    assert not is_composition("apple-m4-max") and not is_composition("a+b.yaml") and not is_composition("ref-16bg")
    with pytest.raises(InputError, match='did you mean "ref-16gb"'):
        find_hardware("ref-16bg")
    path = tmp_path / "mine+yours.yaml"
    path.write_text(resources.names("hardware_profiles")["ref-16gb"].read_text(encoding="utf-8"), encoding="utf-8")
    assert find_hardware("mine+yours.yaml", base=tmp_path) == find_hardware("ref-16gb") == load_hardware("ref-16gb")


# command line ---------------------------------------------------------------------------------------------------------


def test_list_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "hardware", "--parts")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    assert [line.split()[0] for line in out.splitlines()] == list(part_names())
    rows = json.loads(call(capsys, "hardware", "--parts", "-o", "json")[1])
    assert {"name": "rtx-3090", "description": "gpus: GeForce RTX 3090 (2020): 24 GiB at 936 GB/s, PCIe 4.0 x16"} in rows
    assert call(capsys, "hardware", "--parts", "ref-16gb")[0] == 2


def test_a_machine_is_shown_with_its_bases(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "hardware", DESKTOP)
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    assert re.search(r"channels.pcie_h2d.bandwidth +31.51 GB/s  spec ", out) and re.search(r"1 x rtx-3090 +1499 USD  2020-09-24", out)
    shown: Any = json.loads(call(capsys, "hardware", DESKTOP, "-o", "json")[1])
    assert config.build(HardwareProfile, config.Document(shown["profile"], "shown")) == compose(DESKTOP)
    assert [row["name"] for row in shown["parts"]] == [name for name, _, _ in read_parts(DESKTOP).counted()]
    code, out, _ = call(capsys, "hardware", "ref-16gb")
    assert code == 0 and "tiers.unified.capacity" in out and "prices" not in out
    code, out, err = call(capsys, "hardware", "rtx-3090")
    assert code == 2 and out == "" and len(err.splitlines()) == 1


def test_run_and_budget_take_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SMALL.format("ref-16gb"), encoding="utf-8")
    for command in ("run", "budget"):
        code, out, _ = call(capsys, command, str(path), "--hardware", DESKTOP, "-o", "json")
        assert code == 0 and json.loads(out)["provenance"]["hardware"] == DESKTOP
        same = call(capsys, command, str(path), "--set", f"hardware={DESKTOP}", "-o", "json")[1]
        assert json.loads(same)["provenance"]["hardware"] == DESKTOP
        code, _, err = call(capsys, command, str(path), "--hardware", "rtx-3091 + " + HOST)
        assert code == 2 and 'did you mean "rtx-3090"' in err


def test_examples_of_the_documentation_compose() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "hardware-catalogue.md").read_text(encoding="utf-8")
    block = re.search(r"```text\n(.*?)```", text, re.S)
    assert block is not None and len(block[1].splitlines()) >= 5
    for line in block[1].splitlines():
        assert compose(line).name
    for simd, factors in SIMD.items():
        row = next(line for line in text.splitlines() if line.startswith("|") and simd in line.split("|")[1].replace(",", " ").split())
        assert [cell.strip() for cell in row.split("|")[2:5]] == [str(factors.get(fmt, "")) for fmt in ("int8", "bf16", "fp16")]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("strix-halo + nvme-gen4", "ryzen-ai-max-395"), ("AMD Strix Halo:128GiB + nvme-gen4", "ryzen-ai-max-395"), ("dgx-spark", "gb10"),
     ("2x NVIDIA P40 + ryzen-9950x + ddr5-6000x2:96GiB", "tesla-p40")],
)  # fmt: skip
def test_everyday_names_are_answered_with_the_catalogues(text: str, meant: str) -> None:
    with pytest.raises(InputError, match=f'did you mean "{meant}"'):
        find_hardware(text)


def test_everyday_names_lead_to_parts() -> None:
    assert set(EVERYDAY.values()) <= set(part_names()) and not set(EVERYDAY) & set(part_names())
