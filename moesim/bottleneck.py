"""Owns the reading of a critical path: which lane holds a run up, by how much, and what would help. One sentence each.

The advice is first-order: a lane with share s of the critical path, made f times as fast, saves at most s (1 - 1/f) of the time
(Amdahl 1967, AFIPS 30, 483); another lane may take over before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesim.hardware import kind
from moesim.metrics import PS
from moesim.simulate import Result

FASTER = 1.1
MEMORY_BOUND = 0.6  # share of a device's memory bandwidth above which bytes, not arithmetic or launches, set its pace
MUCH_WASTE = 0.2  # share of a channel's bytes prefetched in vain that is worth a word
CLOSE = 0.25  # share of the critical path that makes a second lane worth a word
_ADVICE = {
    "ssd": "A faster drive, more room for experts in memory, or fewer bits per expert would help",
    "link": "More experts kept in VRAM, fewer bits per expert, or a faster link would help",
}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The lane with the largest share of the critical path.

    Parameters
    ----------
    lane : str
    share : float
        Its share of the critical path.
    busy : float
        Its utilisation over the whole run.
    wait_ms : float
        What loads cost per token.
    finding, advice : str
        One sentence each.
    """

    lane: str
    share: float
    busy: float
    wait_ms: float
    finding: str
    advice: str


def lane_shares(critical_path: list[dict[str, Any]]) -> dict[str, float]:
    """Return the share of the critical path of each lane, largest first."""
    out: dict[str, float] = {}
    for row in critical_path:
        out[row["lane"]] = out.get(row["lane"], 0.0) + row["share"]
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def find(result: Result, data: Mapping[str, Any]) -> Bottleneck | None:
    """Read the critical path of a result; None where nothing ran. ``data`` is ``result.as_dict()``."""
    if not data["critical_path"]:
        return None
    lanes = lane_shares(data["critical_path"])
    lane, share = next(iter(lanes.items()))
    busy, wait = data["lanes"][lane]["utilisation"], data["metrics"]["io_wait_ms_per_token"]
    parts = [row for row in data["critical_path"] if row["lane"] == lane]
    saving = f"10 % more speed there saves at most {_share(share * (1 - 1 / FASTER))} of the time"
    if kind(lane) in ("gpu", "npu", "cpu"):
        named = ", ".join(f"{row['kind']} {_share(row['share'])}" for row in parts[:2])
        finding = (
            f"The {lane.upper()} sets the pace: it has {_share(share)} of the critical path ({named}); loads cost {wait:.3g} ms per token."
        )
        advice = f"{_device_advice(result, lane)}; {saving}."
    else:
        verb = "reads" if kind(lane) == "ssd" else "copies"
        finding = (
            f"The run waits for {name_of(result, lane)}: its {verb} are {_share(share)} of the critical path "
            f"(busy {_share(busy)} of the time); "
            f"compute waits {wait:.3g} ms per token for loads."
        )
        advice = f"{_ADVICE['ssd' if kind(lane) == 'ssd' else 'link']}; {saving}."
        advice += _waste(result, data, lane)
    other = next((name for name, part in lanes.items() if name != lane and part > CLOSE), None)
    if other is not None:
        finding += f" Next is {name_of(result, other)} with {_share(lanes[other])}."
    contention = sum(row["contention"] for row in data["critical_path"])
    if contention > 0.1:
        finding += f" Sharing channels costs {_share(contention)} of it."
    return Bottleneck(lane, share, busy, wait, finding, advice)


def name_of(result: Result, lane: str) -> str:
    """Return what a lane is, in words."""
    hardware = result.case.hardware
    if lane in hardware.links:
        return f"the link from {hardware.links[lane].source} to {hardware.links[lane].target} ({lane})"
    return "the SSD" if lane == "ssd" else f"the {lane.upper()}" if lane in hardware.devices else lane


def channel_of(result: Result, lane: str) -> str:
    """Return the channel that a link, a drive or a device's memory draws on."""
    hardware = result.case.hardware
    if lane in hardware.links:
        return hardware.links[lane].channel
    return hardware.tiers[(hardware.storage[lane] if lane in hardware.storage else hardware.devices[lane]).tier].channel


def _device_advice(result: Result, lane: str) -> str:
    meter, channel = result.meter, channel_of(result, lane)
    used = 0.0
    if meter is not None and channel in meter.channels:
        mine = [x.name for x in meter.lanes].index(lane)
        busy_s = float(meter.busy_ps[mine]) * PS
        moved = float(meter.drawn[mine, meter.channels.index(channel)])
        used = moved / busy_s / result.case.hardware.channel_capacities()[channel] if busy_s else 0.0
    if used >= MEMORY_BOUND:
        return (
            f"While busy the {lane.upper()} draws {_share(used)} of its memory's bandwidth: "
            "faster memory or fewer bits per weight would help"
        )
    return (
        f"While busy the {lane.upper()} draws only {_share(used)} of its memory's bandwidth, so arithmetic and kernel launches weigh more: "
        "a larger batch or a faster chip would help"
    )


def _waste(result: Result, data: Mapping[str, Any], lane: str) -> str:
    moved = data["transfers"].get(channel_of(result, lane))
    if not moved or moved["prefetch_wasted_bytes"] <= MUCH_WASTE * moved["bytes"]:
        return ""
    return f" {_share(moved['prefetch_wasted_bytes'] / moved['bytes'])} of its bytes were prefetched in vain: try prefetch.predictor=none."


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
