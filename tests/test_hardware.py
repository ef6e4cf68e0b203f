"""Hardware profiles: the bundled ones load and are consistent; curves, fallbacks and derating do what they say; bad input is named."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moesim import config, resources
from moesim.errors import InputError
from moesim.hardware import Figure, HardwareProfile, Rate, assumed_figures, figures, load_hardware
from moesim.hardware.parts import Size

NAMES = sorted(resources.names("hardware_profiles"))
KIB, MIB = 1024, 1024 * 1024

BASE = """\
name: toy
description: toy machine
tiers:
  vram: {capacity: 8 GiB, channel: vram}
  ram: {capacity: 32 GiB, reserved: 2 GiB, channel: ram}
  ssd: {capacity: 1 TB, channel: ssd}
channels:
  vram: {bandwidth: 400 GB/s}
  ram: {bandwidth: 80 GB/s, facts: {memory_channels: 2, mt_s: 5000}}
  pcie_h2d: {bandwidth: 16 GB/s}
  pcie_d2h: {bandwidth: 16 GB/s}
  ssd: {bandwidth: 4 GB/s}
devices:
  gpu:
    tier: vram
    peak: {fp32: 10 TFLOP/s, fp16: 40 TFLOP/s, int8: 80 TOP/s}
    compute_efficiency: 0.5
    memory_efficiency: 0.8
    launch: 5 us
  cpu:
    tier: ram
    peak: {fp32: 1 TFLOP/s}
    compute_efficiency: 1
    memory_efficiency: 0.75
    bandwidth: 50 GB/s
    launch: 0 s
    cores: 8
    cpu_bandwidth_threads:
      - {threads: 2, bandwidth: 20 GB/s}
      - {threads: 8, bandwidth: 56 GB/s}
links:
  h2d: {source: ram, target: vram, channel: pcie_h2d, latency: 10 us, pinned_efficiency: 0.75, pageable_efficiency: 0.25}
  d2h: {source: vram, target: ram, channel: pcie_d2h, latency: 10 us, pinned_efficiency: 0.75, pageable_efficiency: 0.25}
storage:
  ssd:
    tier: ssd
    latency: 10 us
    curve:
      - {request: 4 KiB, depth: 1, bandwidth: 64 MB/s}
      - {request: 4 KiB, depth: 16, bandwidth: 1 GB/s}
      - {request: 1 MiB, depth: 1, bandwidth: 2 GB/s}
      - {request: 1 MiB, depth: 16, bandwidth: 4 GB/s}
"""


def toy(*changes: tuple[str, str]) -> HardwareProfile:
    text = BASE
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return config.build(HardwareProfile, config.parse_yaml(text, "toy.yaml"))


# bundled profiles -----------------------------------------------------------------------------------------------------


def test_the_wanted_profiles_are_bundled() -> None:
    assert {"ref-16gb", "desktop-24gb", "laptop-8gb", "apple-m4-max", "strix-halo", "cpu-server"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_profile_loads_and_is_consistent(name: str) -> None:
    hw = load_hardware(name)
    assert hw.name == name
    for channel in hw.channels.values():
        if channel.facts:
            assert channel.bandwidth.value == pytest.approx(channel.facts.peak_bytes_per_s, rel=1e-3)
    for store in hw.storage.values():
        limit = hw.channels[hw.tiers[store.tier].channel].bandwidth.value
        assert max(p.bandwidth.value for p in store.curve) == pytest.approx(limit, rel=0.05)
        assert all(p.bandwidth.value <= limit for p in store.curve)
        assert all(store.latency.value < p.request * p.depth / p.bandwidth.value for p in store.curve)
    for device in hw.devices.values():
        assert device.supports("int8")
        assert device.effective_flops_per_s("int8") >= device.effective_flops_per_s("fp16" if "fp16" in device.peak else "bf16")


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    assert [dotted for dotted, figure in figures(load_hardware(name)) if not figure.source] == []


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_through_yaml_text(name: str) -> None:
    hw = load_hardware(name)
    text = yaml.safe_dump(hw.model_dump(mode="json"))
    again = config.build(HardwareProfile, config.parse_yaml(text, "again.yaml"))
    assert again == hw
    assert config.content_hash(again) == config.content_hash(hw)


def test_reference_device_is_in_decimal_gigabytes() -> None:
    hw = load_hardware("ref-16gb")
    assert hw.is_unified and hw.links == {}
    assert hw.tiers["unified"].usable_bytes == 16 * 10**9
    assert hw.read_bandwidth("ssd", 16 * MIB, 8) == 2e9
    assert "tiers.unified.capacity" not in assumed_figures(hw)
    assert "channels.unified.bandwidth" in assumed_figures(hw)


# figures --------------------------------------------------------------------------------------------------------------


def test_a_plain_quantity_is_assumed() -> None:
    figure = Figure[Rate].model_validate("936 GB/s")
    assert (figure.value, figure.basis) == (936e9, "assumed")


@given(st.floats(min_value=1e-3, max_value=1e30, allow_nan=False))
def test_a_written_rate_reads_back_exactly(value: float) -> None:
    figure = Figure[Rate].model_construct(value=value, basis="assumed", source="")
    assert Figure[Rate].model_validate(figure.model_dump()).value == value


@given(st.integers(min_value=0, max_value=10**18))
def test_a_written_size_reads_back_exactly(value: int) -> None:
    figure = Figure[Size].model_construct(value=value, basis="assumed", source="")
    assert Figure[Size].model_validate(figure.model_dump()).value == value


def test_assumed_figures_are_dotted_names_that_set_takes() -> None:
    names = assumed_figures(toy())
    assert {"devices.gpu.peak.fp16", "storage.ssd.curve.3.bandwidth", "tiers.ram.reserved", "links.h2d.latency"} <= set(names)
    document = config.parse_yaml(BASE, "toy.yaml").set(["storage.ssd.curve.3.bandwidth=3 GB/s"])
    assert config.build(HardwareProfile, document).storage["ssd"].curve[3].bandwidth.value == 3e9


# devices --------------------------------------------------------------------------------------------------------------


def test_formats_fall_back_to_wider_ones_only() -> None:
    gpu, cpu = toy().devices["gpu"], toy().devices["cpu"]
    assert gpu.effective_flops_per_s("int4") == 40e12 == gpu.effective_flops_per_s("int8")
    assert gpu.effective_flops_per_s("bf16") == gpu.effective_flops_per_s("fp8") == gpu.effective_flops_per_s("fp4") == 20e12
    assert [cpu.compute_format(f) for f in ("int4", "bf16", "fp32")] == ["fp32"] * 3
    npu = load_hardware("ref-16gb").devices["npu"]
    assert npu.supports("int4") and npu.compute_format("int4") == "int8"
    assert not npu.supports("fp32")
    with pytest.raises(InputError, match="one that the device can do: fp16, int8, int4"):
        npu.effective_flops_per_s("fp32")
    with pytest.raises(InputError, match='did you mean "int8"'):
        gpu.effective_flops_per_s("int9")


def test_stream_cap_is_the_tightest_of_share_port_and_threads() -> None:
    hw = toy()
    assert hw.stream_cap("gpu") == 320e9
    assert hw.stream_cap("cpu") == 50e9
    assert [hw.stream_cap("cpu", n) for n in (1, 2, 5, 8, 32)] == [10e9, 20e9, 38e9, 56e9, 56e9]
    with pytest.raises(InputError, match="did you mean"):
        hw.stream_cap("gpu0")


def test_channel_capacities_include_the_cores() -> None:
    capacities = toy().channel_capacities()
    assert capacities == {"vram": 400e9, "ram": 80e9, "pcie_h2d": 16e9, "pcie_d2h": 16e9, "ssd": 4e9, "cores": 8.0}


def test_pcie_facts() -> None:
    hw = toy(("pcie_h2d: {bandwidth: 16 GB/s}", "pcie_h2d: {bandwidth: 16 GB/s, facts: {pcie_gen: 5, pcie_lanes: 4}}"))
    facts = hw.channels["pcie_h2d"].facts
    assert facts is not None and facts.peak_bytes_per_s == pytest.approx(32e9 / 8 * 4 * 128 / 130)


# storage and links ----------------------------------------------------------------------------------------------------


def test_curve_is_exact_at_its_points_and_clamped_beyond() -> None:
    hw = toy()
    for point in hw.storage["ssd"].curve:
        assert hw.read_bandwidth("ssd", point.request, point.depth) == point.bandwidth.value
    assert hw.read_bandwidth("ssd", 64 * MIB, 1) == 2e9
    assert hw.read_bandwidth("ssd", 64 * MIB, 999) == 4e9
    assert hw.read_bandwidth("ssd", 4 * KIB, 999) == 1e9
    assert hw.read_bandwidth("ssd", 1 * KIB, 1) == 16e6  # as long as 4 KiB takes
    assert hw.read_bandwidth("ssd", 4 * KIB, 4) == pytest.approx(math.sqrt(64e6 * 1e9))


def test_between_points_a_request_costs_a_constant_plus_its_bytes() -> None:
    hw = toy()
    times = [r / hw.read_bandwidth("ssd", r, 1) for r in (4 * KIB, 260 * KIB, 516 * KIB, 772 * KIB, 1028 * KIB - 4 * KIB)]
    steps = [b - a for a, b in itertools.pairwise(times[:4])]
    assert steps == pytest.approx([steps[0]] * 3)


@given(
    st.floats(1, 64 * MIB), st.floats(1, 64 * MIB), st.floats(1, 1000), st.floats(1, 1000),
    st.sampled_from(["direct", "buffered", "mmap"]), st.sampled_from(NAMES),
)  # fmt: skip
def test_bandwidth_is_monotone_and_latency_is_counted_once(r0: float, r1: float, d0: float, d1: float, engine: str, name: str) -> None:
    hw = PROFILES[name]
    (r0, r1), (d0, d1) = sorted((r0, r1)), sorted((d0, d1))
    low, high = hw.read_bandwidth("ssd", r0, d0, engine=engine), hw.read_bandwidth("ssd", r1, d1, engine=engine)
    assert 0 < low <= high * (1 + 1e-12) <= hw.channels["ssd"].bandwidth.value * (1 + 1e-12)
    size = hw.storage["ssd"].request_bytes(r0, engine)
    cap = hw.read_flow_cap("ssd", r0, d0, engine=engine)
    assert low <= cap * (1 + 1e-12) <= hw.channels["ssd"].bandwidth.value * (1 + 1e-12)
    apart = hw.storage["ssd"].latency.value / d0 + size / cap
    assert apart >= size / low * (1 - 1e-9)
    if cap < hw.channels["ssd"].bandwidth.value:
        assert apart == pytest.approx(size / low)


PROFILES = {name: load_hardware(name) for name in NAMES}


def test_ways_of_reading() -> None:
    hw = toy()
    assert hw.read_bandwidth("ssd", MIB, 1, engine="buffered") == pytest.approx(0.8 * 2e9)
    assert hw.read_bandwidth("ssd", MIB, 1, engine="mmap") == pytest.approx(0.7 * hw.read_bandwidth("ssd", 128 * KIB, 1))
    with pytest.raises(InputError, match="direct, buffered or mmap"):
        hw.read_bandwidth("ssd", MIB, 1, engine="uring")
    with pytest.raises(InputError, match="above 0"):
        hw.read_bandwidth("ssd", 0, 1)


def test_bytes_outside_of_the_fast_region_read_slower() -> None:
    hw = toy(("    latency: 10 us\n    curve", "    latency: 10 us\n    fast_region: {share: 0.25, rest_factor: 0.5}\n    curve"))
    assert hw.read_bandwidth("ssd", MIB, 16) == 4e9
    assert hw.read_bandwidth("ssd", MIB, 16, fast=False) == 2e9
    assert toy().read_bandwidth("ssd", MIB, 16, fast=False) == 4e9


def test_a_slower_channel_binds_the_curve() -> None:
    hw = toy(("ssd: {bandwidth: 4 GB/s}", "ssd: {bandwidth: 1 GB/s}"))
    assert hw.read_bandwidth("ssd", MIB, 16) == 1e9 == hw.read_flow_cap("ssd", MIB, 16)


def test_links_pinned_and_pageable() -> None:
    hw = toy()
    assert hw.link_flow_cap("h2d", MIB) == 12e9
    assert hw.link_flow_cap("h2d", MIB, pinned=False) == 4e9
    assert hw.link_bandwidth("h2d", 120_000) == pytest.approx(6e9)  # 10 us of latency, 10 us of flow
    curve = "curve: [{request: 64 KiB, bandwidth: 3 GB/s}, {request: 1 MiB, bandwidth: 10 GB/s}]"
    hw = toy(("channel: pcie_h2d, ", f"channel: pcie_h2d, {curve}, "))
    assert hw.link_bandwidth("h2d", 64 * KIB) == 3e9
    assert hw.link_bandwidth("h2d", 64 * KIB, pinned=False) == pytest.approx(1e9)
    assert 10e-6 + 64 * KIB / hw.link_flow_cap("h2d", 64 * KIB) == pytest.approx(64 * KIB / 3e9)


# derating -------------------------------------------------------------------------------------------------------------


def test_derated_scales_rates_and_nothing_else() -> None:
    hw = toy()
    slow = hw.derated(0.5)
    assert slow.channel_capacities() == {**{k: v / 2 for k, v in hw.channel_capacities().items()}, "cores": 8.0}
    assert slow.devices["gpu"].effective_flops_per_s("int8") == 20e12
    assert slow.stream_cap("cpu") == 25e9 and slow.stream_cap("cpu", 5) == 19e9
    assert slow.read_bandwidth("ssd", 300 * KIB, 3) == pytest.approx(hw.read_bandwidth("ssd", 300 * KIB, 3) / 2)
    assert slow.tiers == hw.tiers and slow.storage["ssd"].latency == hw.storage["ssd"].latency
    assert "times 0.5" in slow.channels["ram"].bandwidth.source
    assert hw.derated(1) == hw
    with pytest.raises(InputError, match="derate"):
        hw.derated(1.5)


def test_a_profiles_own_derate_is_applied_once_and_can_be_overridden() -> None:
    hw = toy(("name: toy", "name: toy\nderate: 0.6"))
    assert hw.channels["ram"].bandwidth.value == 80e9
    assert hw.derated().channels["ram"].bandwidth.value == pytest.approx(48e9)
    assert hw.derated().derated() == hw.derated()
    assert hw.derated(0.5).channels["ram"].bandwidth.value == 40e9


def test_scaled_takes_the_curves_of_its_channel_along() -> None:
    hw = toy()
    fast = hw.scaled("ssd", 2)
    assert fast.read_bandwidth("ssd", MIB, 16) == 8e9 and fast.stream_cap("gpu") == hw.stream_cap("gpu")
    assert hw.scaled("ram", 2).stream_cap("cpu", 8) == 112e9
    with pytest.raises(InputError, match="known: pcie_d2h"):
        hw.scaled("nvlink", 2)


# bad input ------------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, str, str, str]] = [
    ("unknown tier", "tier: vram\n", "tier: vrom\n", 'devices.gpu.tier: expected a tier of this profile, got "vrom"; did you mean "vram"'),
    ("unknown channel", "capacity: 8 GiB, channel: vram", "capacity: 8 GiB, channel: hbm", "tiers.vram.channel"),
    ("unknown link target", "target: vram", "target: gpu", "links.h2d.target"),
    ("link to itself", "source: ram, target: vram", "source: vram, target: vram", "links.h2d.target"),
    ("bare number", "bandwidth: 400 GB/s", "bandwidth: 400", "channels.vram.bandwidth: expected a bandwidth"),
    ("wrong dimension", "launch: 5 us", "launch: 5 GB", "devices.gpu.launch: expected a time"),
    ("zero bandwidth", "bandwidth: 400 GB/s", "bandwidth: 0 GB/s", "channels.vram.bandwidth: expected greater than 0"),
    ("negative capacity", "capacity: 8 GiB", "capacity: -8 GiB", "tiers.vram.capacity"),
    ("efficiency above one", "compute_efficiency: 0.5", "compute_efficiency: 1.5", "devices.gpu.compute_efficiency"),
    ("efficiency of zero", "compute_efficiency: 0.5", "compute_efficiency: 0", "devices.gpu.compute_efficiency"),
    ("a list as figure", "compute_efficiency: 0.5", "compute_efficiency: [0.5]", "devices.gpu.compute_efficiency: expected a quantity"),
    ("reserved above capacity", "reserved: 2 GiB", "reserved: 64 GiB", "tiers.ram.reserved: expected at most the capacity"),
    ("source missing", "launch: 5 us", "launch: {value: 5 us, basis: spec}", 'devices.gpu.launch.source'),
    ("unknown basis", "launch: 5 us", "launch: {value: 5 us, basis: guessed, source: x}", "devices.gpu.launch.basis: expected one of"),
    ("unknown key", "launch: 5 us", "lunch: 5 us", 'devices.gpu.lunch: expected a known key, got "lunch"; did you mean "launch"'),
    ("unknown format", "fp16: 40 TFLOP/s", "fp17: 40 TFLOP/s", "devices.gpu.peak.fp17"),
    ("no peaks", "peak: {fp32: 1 TFLOP/s}", "peak: {}", "devices.cpu.peak"),
    ("listed format without peak", "launch: 0 s", "launch: 0 s\n    formats: [fp32, fp16]\n    dequant_bytes_per_s: 0 B/s", "devices.cpu"),
    ("format it cannot do", "launch: 5 us", "launch: 5 us\n    formats: [fp4]", "devices.gpu.formats.0"),
    ("curve not sorted", "request: 4 KiB, depth: 16", "request: 2 MiB, depth: 16", "storage.ssd.curve.2"),
    ("curve twice the same", "request: 4 KiB, depth: 16", "request: 4 KiB, depth: 1", "storage.ssd.curve.1"),
    ("curve with a hole", "      - {request: 1 MiB, depth: 1, bandwidth: 2 GB/s}\n", "", "storage.ssd.curve: expected a full grid"),
    ("curve without depth 1", "depth: 1,", "depth: 2,", "storage.ssd.curve.0.depth"),
    ("curve that falls", "depth: 16, bandwidth: 4 GB/s", "depth: 16, bandwidth: 1.5 GB/s", "storage.ssd.curve.3.bandwidth"),
    ("threads not rising", "threads: 8", "threads: 2", "devices.cpu.cpu_bandwidth_threads.1.threads"),
    ("CPU without cores", "    cores: 8\n", "", "devices.cpu.cores"),
    ("device on storage", "tier: ram\n", "tier: ssd\n", "devices.cpu.tier"),
    ("drive on RAM", "    tier: ssd\n", "    tier: ram\n", "storage.ssd.tier"),
    ("no drive", BASE[BASE.index("storage:") :], "", "tiers.ssd: expected a drive under storage for this tier, got none; add storage.ssd"),
    ("no way back", "  d2h: {source: vram, target: ram", "  p2p: {source: ram, target: vram", "devices.gpu.tier: expected a link out of"),
    ("channel named cores", "channels:\n", "channels:\n  cores: {bandwidth: 1 GB/s}\n", "channels.cores"),
    ("device of no kind", "  gpu:\n", "  tpu:\n", "devices.tpu"),
    ("incomplete facts", "memory_channels: 2, mt_s: 5000", "memory_channels: 2", "channels.ram.facts"),
    ("contradicting facts", "memory_channels: 2, mt_s", "memory_channels: 2, bus_bits: 64, mt_s", "channels.ram.facts.bus_bits"),
    ("derate above one", "name: toy", "name: toy\nderate: 1.2", "derate"),
    ("price without source", "name: toy", "name: toy\nprice: {amount: 9, currency: USD, date: 2024-01-02, basis: spec}", "price.source"),
    ("price with a bad date", "name: toy", "name: toy\nprice: {amount: 9, currency: USD, date: January}", "price.date"),
    ("idle above active", "launch: 5 us", "launch: 5 us\n    idle_power: 9 W\n    active_power: 5 W", "devices.gpu.idle_power"),
    ("ram and unified", "  ssd: {capacity", "  unified: {capacity: 8 GiB, channel: ram}\n  ssd: {capacity", "tiers.unified"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_names_file_and_field(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in BASE
    path = tmp_path / "bad.yaml"
    path.write_text(BASE.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_hardware("bad.yaml", base=tmp_path)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"{path}:")


def test_unknown_profile_gets_a_hint() -> None:
    with pytest.raises(InputError, match='scenario.yaml:3: .*did you mean "ref-16gb"'):
        load_hardware("ref-16bg", where="scenario.yaml:3")


def test_cross_checks_keep_their_field_inside_another_spec() -> None:
    class Holder(config.Spec):
        hardware: HardwareProfile

    text = "hardware:\n" + "".join(f"  {line}\n" for line in BASE.replace("reserved: 2 GiB", "reserved: 64 GiB").splitlines())
    with pytest.raises(InputError, match=r"^s.yaml:6: hardware.tiers.ram.reserved"):
        config.build(Holder, config.parse_yaml(text, "s.yaml"))


def test_profiles_are_frozen() -> None:
    hw: Any = toy()
    with pytest.raises(ValueError, match="frozen"):
        hw.name = "other"
