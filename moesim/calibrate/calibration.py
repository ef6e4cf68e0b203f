"""Owns the calibration of this machine: from probe runs, reads and copies to a hardware profile whose figures are measured.

What it cannot measure stands in the profile as assumed. The profile describes the machine as the real engine uses it: ``cpu`` is one
worker thread with its share of the cores, ``gpu`` an emulated accelerator (another worker, with a memory of its own in the same DRAM),
``h2d`` and ``d2h`` copies between the two. It needs torch, which is optional.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moesim import config, resources
from moesim.calibrate.io import Timed, Way, attained_bytes_per_s, memory_bytes_per_s, time_copies, time_reads
from moesim.calibrate.probes import ProbeRunner, probes
from moesim.calibrate.samples import BESIDE, COMPUTE, Samples, trimmed_mean
from moesim.config import Document
from moesim.hardware import HardwareProfile
from moesim.host.awake import cores_awake
from moesim.schedule import Kind
from moesim.validate.case import Stores

MIB = 1 << 20
NOISY = 0.10  # spread of repeats above which a calibration is doubtful
REPEATS = 3
FORMATS = ("int4-g128-torch", "int8")
SHAPES = (("validation/model.yaml", 1024, FORMATS), ("tinymoe", 256, ("int4-g64-torch", "int8")))
DIRECT = [Way("direct", request, depth) for request in (16 << 10, 128 << 10, MIB) for depth in (1, 4)]
OTHERS = [Way("buffered", 128 << 10, 1), Way("buffered", MIB, 1), Way("mmap", MIB, 1)]

Progress = Callable[[str, int, int], None]


@dataclass
class Calibration:
    """A measured profile and how steady the machine was."""

    profile: HardwareProfile
    data: dict[str, Any]
    spreads: dict[str, float] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """Median spread of all figures."""
        return float(np.median(list(self.spreads.values())))

    @property
    def noisy(self) -> list[str]:
        """What spread more than a tenth, the worst first."""
        return sorted((name for name, spread in self.spreads.items() if spread > NOISY), key=lambda name: -self.spreads[name])

    @property
    def text(self) -> str:
        """The profile as YAML."""
        plain = json.loads(json.dumps(self.data))  # what stands in it twice is written out twice: profiles know no anchors
        text = yaml.safe_dump(plain, sort_keys=False, width=160, allow_unicode=True)
        return f"# Measured by `moesim calibrate`. Median spread of its figures: {self.spread:.1%}.\n{text}"


def calibrate(folder: Path | None = None, progress: Progress = lambda *_: None, repeats: int = REPEATS) -> Calibration:
    """Measure this machine.

    Parameters
    ----------
    folder : Path, optional
        Where expert stores are kept, on the drive that is to be measured; by default a temporary folder.
    progress : callable
        Told (what, done, all).
    repeats : int
        Runs of each probe after the one that warms up.
    """
    with Stores(folder) as stores, tempfile.TemporaryDirectory() as scratch, cores_awake():
        return _Bench(stores, Path(scratch), progress, repeats).run()


class _Bench:
    """One calibration under way."""

    def __init__(self, stores: Stores, scratch: Path, progress: Progress, repeats: int) -> None:
        self.stores, self.scratch, self.repeats = stores, scratch, repeats
        self.rng = np.random.default_rng(1)
        self.date = datetime.date.today().isoformat()
        self.spreads: dict[str, float] = {}
        self._report, self._done, self._all = progress, 0, 1
        self.points: list[dict[str, Any]] = []

    def step(self, what: str) -> Callable[[], None]:
        def one() -> None:
            self._done += 1
            self._report(what, self._done, self._all)

        return one

    def figure(self, name: str, value: str, spread: float | None, how: str) -> dict[str, str]:
        if spread is not None:
            self.spreads[name] = spread
        shown = f", spread {spread:.1%}" if spread is not None else ""
        return {"value": value, "basis": "measured", "source": f"{how}{shown}, {self.date}"}

    def run(self) -> Calibration:
        data = _skeleton(self.stores.folder)
        path = self.scratch / "machine.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        base = resources.folder("scenarios")
        plans = [
            (ProbeRunner(str(model), context, path, self.stores, base), probes(forms, context, i > 0))
            for i, (model, context, forms) in enumerate(SHAPES)
        ]
        runs = sum(len(found) for _, found in plans) * (self.repeats + 1)
        self._all = runs + 4 * (len(DIRECT) + len(OTHERS) + 2 + 3) + 2
        large = plans[0][0]
        store = self.stores.get(large.case(plans[0][1][0]))
        small = self.stores.get(plans[1][0].case(plans[1][1][0]))
        reads = time_reads(store, [*DIRECT, *OTHERS], self.rng, self.step("reads"))
        single = time_reads(small, [Way("direct", MIB, 1), Way("direct", 16 << 10, 4)], self.rng, self.step("small reads"))
        sizes = (small.slot_bytes(small.layers[0]), MIB, store.slot_bytes(store.layers[0]))
        copies = time_copies(sizes, self.rng, self.step("copies"))
        bandwidth = [memory_bytes_per_s(threads) for threads in (1, 2)]
        self._done += 2
        sampled = [{probe.name: runner.sample(probe, self.repeats, self.step(f"{runner_name}: {probe.name}")) for probe in found}
                   for (runner, found), (runner_name, *_) in zip(plans, SHAPES, strict=True)]  # fmt: skip
        for samples in sampled:
            self._kernels([s for name, runs_ in samples.items() if name not in ("reading", "waiting", "copying") for s in runs_])
        self._storage(data, store.slot_bytes(store.layers[0]), reads, small.slot_bytes(small.layers[0]), single)
        self._links(data, copies, bandwidth)
        self._lanes(data, sampled[0], reads[Way("direct", MIB, 4)], copies[sizes[-1]])
        attained = max(_rate(p) for p in self.points if p["part"] == "ffn" and p["tokens"] == 1)
        channel = float(data["channels"]["ram"]["bandwidth"]["value"].split()[0]) * 1e6
        for device in ("cpu", "gpu"):
            data["devices"][device]["kernels"] = [dict(p) for p in self.points]
            how = {"basis": "measured", "source": f"the fastest expert kernel on one row, {self.date}"}
            data["devices"][device]["memory_efficiency"] = {"value": round(min(attained / channel, 1.0), 4), **how}
        profile = config.build(HardwareProfile, Document(data, "calibration"))
        return Calibration(profile, data, self.spreads)

    # ---- figures

    def _kernels(self, runs: Sequence[Samples]) -> None:
        """Times of compute tasks, by part, format, rows and bytes; of attention apart what the cache adds."""
        found: dict[tuple[str, str, int, int, int], list[list[float]]] = {}
        for run in runs:
            mine: dict[tuple[str, str, int, int, int], list[float]] = {}
            for row in np.flatnonzero(np.isin(run.kind, COMPUTE) & ~run.handed).tolist():
                work = run.works[row]
                if not work.part or work.part == "copy":
                    continue
                state = work.state_bytes if work.part == "attention" else 0
                key = (work.part, work.weights, work.tokens, work.weight_bytes or work.state_bytes, state)
                mine.setdefault(key, []).append(float(run.taken_s[row]))
            for key, values in mine.items():
                found.setdefault(key, []).append(values)
        timed = {}
        for key, rounds in found.items():
            n = sum(len(r) for r in rounds)
            if n >= 6 or key[0] == "head":
                mean = trimmed_mean(np.concatenate([np.array(r) for r in rounds]))
                means = [trimmed_mean(np.array(r)) for r in rounds]
                spread = float(np.std(means, ddof=1) / np.mean(means)) if len(means) > 1 and n >= 30 else None
                timed[key] = (mean, spread, n)
        for (part, weights, tokens, size, _), (mean, spread, n) in timed.items():
            if part != "attention":
                self._point(part, weights, tokens, size, mean, spread, n)
        self._attention({key: value for key, value in timed.items() if key[0] == "attention"})

    def _attention(self, timed: dict[tuple[str, str, int, int, int], tuple[float, float | None, int]]) -> None:
        """A line over the bytes of cache for each number of rows: the time without a cache, and what a cache adds."""
        rows: dict[tuple[str, int, int], list[tuple[int, float, int]]] = {}
        for (_, weights, tokens, size, state), (mean, _, n) in timed.items():
            rows.setdefault((weights, tokens, size), []).append((state, mean, n))
        slope = 0.0
        for (weights, tokens, size), points in sorted(rows.items(), key=lambda item: item[0][1]):
            x, y, number = (np.array(c, np.float64) for c in zip(*points, strict=True))
            if len(points) > 2 and x.max() > 2 * x.min():
                slope = max(float(np.polyfit(x, y, 1, w=np.sqrt(number))[0]), 0.0)
                self._point("kv", "", tokens, int(x.max()), slope * float(x.max()), None, int(number.sum()))
            base = float(np.average(y - slope * x, weights=number))
            self._point("attention", weights, tokens, size, max(base, 0.5 * float(y.min())), None, int(number.sum()))

    def _point(self, part: str, weights: str, tokens: int, size: int, mean: float, spread: float | None, n: int) -> None:
        time = self.figure(f"{part} {weights} {tokens} x {size}", f"{mean * 1e6:.1f} us", spread, f"mean of {n} tasks")
        self.points.append({"part": part, "weights": weights, "tokens": tokens, "bytes": f"{size} B", "time": time})

    def _storage(self, data: dict[str, Any], size: int, reads: dict[Way, Timed], small: int, single: dict[Way, Timed]) -> None:
        latency = min(t.mean_s for t in single.values()) * 0.8  # most of a small read is the wait for its only request
        ssd = data["storage"]["ssd"]
        ssd["latency"] = self.figure("read latency", f"{latency * 1e6:.1f} us", None, f"0.8 of a read of {small} B")

        def curve(ways: Sequence[Way]) -> list[dict[str, Any]]:
            out = []
            for way in ways:
                timed = reads[way]
                rate = attained_bytes_per_s(way, size, 1, timed.mean_s, latency)
                name = f"{way.engine} reads of {way.request_bytes} B at depth {way.depth}"
                how = f"experts of {size} B, {way.engine}"
                out.append({"request": f"{way.request_bytes} B", "depth": way.depth,
                            "bandwidth": self.figure(name, f"{rate / 1e6:.2f} MB/s", timed.spread, how)})  # fmt: skip
            return out

        ssd["curve"] = curve(DIRECT)
        ssd["engines"] = {"buffered": {"curve": curve([w for w in OTHERS if w.engine == "buffered"])},
                          "mmap": {"curve": curve([w for w in OTHERS if w.engine == "mmap"]), "fault_size": _assumed(f"{MIB} B", "as measured: one request")}}  # fmt: skip
        best = max(float(p["bandwidth"]["value"].split()[0]) for p in ssd["curve"])
        data["channels"]["ssd"]["bandwidth"] = self.figure("drive", f"{1.02 * best:.2f} MB/s", None, "2 % over the fastest direct reads")

    def _links(self, data: dict[str, Any], copies: dict[int, Timed], bandwidth: Sequence[float]) -> None:
        small, *_, large = sorted(copies)
        rate = (large - small) / (copies[large].mean_s - copies[small].mean_s)
        latency = max(copies[small].mean_s - small / rate, 1e-6)
        how = f"copies of {small} and {large} B"
        data["channels"]["copy"]["bandwidth"] = self.figure("copies", f"{rate / 1e6:.1f} MB/s", copies[large].spread, how)
        for link in data["links"].values():
            link["latency"] = self.figure("copy latency", f"{latency * 1e6:.2f} us", copies[small].spread, how)
        most = max(*bandwidth, 2 * rate)
        how = "read and written bytes of one or two threads that copy, the faster"
        data["channels"]["ram"]["bandwidth"] = self.figure("memory", f"{most / 1e6:.0f} MB/s", None, how)

    def _lanes(self, data: dict[str, Any], sampled: dict[str, list[Samples]], read: Timed, copy: Timed) -> None:
        """How long workers take to begin when they waited for another, and how lanes slow each other."""
        parts = {**data["devices"], **data["links"], **data["storage"]}
        begun = np.concatenate([run.begun_s[run.handed & run.on("h2d")] for run in sampled["copying"]])
        extras = {
            "cpu": _handoff(sampled["waiting"], "cpu", None),
            "ssd": _handoff(sampled["waiting"], "ssd", read.mean_s),  # the first read of a drive that was idle is part of it
            "h2d": float(np.median(begun)) if len(begun) >= 20 else None,
        }
        for lane, extra in extras.items():
            if extra is not None:
                how = "tasks that waited for another lane, beyond those that did not"
                parts[lane]["handoff"] = self.figure(f"hand-over to {lane}", f"{max(extra, 0.0) * 1e6:.1f} us", None, how)
        for other in ("gpu", "d2h"):
            like = {"gpu": "cpu", "d2h": "h2d"}[other]
            if "handoff" in parts[like] and "handoff" not in parts[other]:
                parts[other]["handoff"] = dict(parts[like]["handoff"])
        out = []
        for name, device, mover, by_itself in (("reading", "cpu", "ssd", read), ("copying", "gpu", "h2d", copy)):
            runs = sampled[name]
            slow = _slowdown(runs, device, mover)
            busy = np.concatenate([run.taken_s[run.on(mover) & ~run.handed & (run.beside[device] > BESIDE)] for run in runs])
            moved = trimmed_mean(busy) / by_itself.mean_s if len(busy) >= 20 else 1.0
            pairs = [(device, mover, slow), (mover, device, moved)]
            if name == "reading":
                pairs += [("gpu", mover, slow), (mover, "gpu", moved)]
            origin = {"basis": "measured", "source": f"probe {name}, {self.date}"}
            out += [{"lane": a, "beside": b, "slowdown": {"value": round(min(max(s, 1.0), 2.0), 4), **origin}} for a, b, s in pairs]
        data["interference"] = out


def _handoff(runs: Sequence[Samples], lane: str, alone_s: float | None) -> float | None:
    """How much longer tasks of a lane take that waited for another lane: beyond ``alone_s``, or tasks of the same kind that did not wait."""
    extra: list[float] = []
    weight: list[int] = []
    for kind in (Kind.LOAD, Kind.FFN):
        mine = [run.on(lane) & (run.kind == kind) for run in runs]
        handed = np.concatenate([run.taken_s[m & run.handed] for run, m in zip(runs, mine, strict=True)])
        own = np.concatenate([run.taken_s[m & ~run.handed] for run, m in zip(runs, mine, strict=True)])
        if len(handed) >= 20 and (alone_s is not None or len(own) >= 20):
            extra.append(trimmed_mean(handed) - (trimmed_mean(own) if alone_s is None else alone_s))
            weight.append(len(handed))
    return float(np.average(extra, weights=weight)) if extra else None


def _slowdown(runs: Sequence[Samples], device: str, mover: str) -> float:
    """How many times longer compute tasks of a device take beside a busy mover: of each kind the ratio, weighted by its time."""
    weighted = total = 0.0
    for kind in COMPUTE:
        mine = [run.on(device) & (run.kind == kind) & ~run.handed for run in runs]
        free = np.concatenate([run.taken_s[m & run.alone] for run, m in zip(runs, mine, strict=True)])
        busy = np.concatenate([run.taken_s[m & (run.beside[mover] > BESIDE)] for run, m in zip(runs, mine, strict=True)])
        if len(free) >= 20 and len(busy) >= 20:
            time = len(busy) * trimmed_mean(busy)
            weighted += time * trimmed_mean(busy) / trimmed_mean(free)
            total += time
    return weighted / total if total else 1.0


def _rate(point: dict[str, Any]) -> float:
    """Bytes per second that a measured kernel attains."""
    return float(point["bytes"].split()[0]) / (float(point["time"]["value"].split()[0]) * 1e-6)


def _assumed(value: str, source: str) -> dict[str, str]:
    return {"value": value, "basis": "assumed", "source": source}


def _skeleton(folder: Path) -> dict[str, Any]:
    """The profile before anything is timed: sizes, and nominal figures that are replaced or stay assumed."""
    folder.mkdir(parents=True, exist_ok=True)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(folder).free
    chip = processor()
    core = {"value": "20 GFLOP/s", "basis": "assumed", "source": "nominal: measured times take its place"}

    def device(tier: str, what: str) -> dict[str, Any]:
        return {
            "chip": what, "tier": tier, "peak": {f: dict(core) for f in ("fp32", "bf16", "int8")},
            "compute_efficiency": {"value": 1.0, "basis": "assumed", "source": "nominal"},
            "memory_efficiency": {"value": 0.5, "basis": "assumed", "source": "nominal: half of what two threads copy"},
            "launch": _assumed("10 us", "nominal: one torch call"),
        }  # fmt: skip

    def link(source: str, target: str) -> dict[str, Any]:
        whole = {"value": 1.0, "basis": "assumed", "source": "both ends lie in the same memory"}
        return {"source": source, "target": target, "channel": "copy", "latency": _assumed("1 us", "nominal"), "pinned_efficiency": whole, "pageable_efficiency": dict(whole)}  # fmt: skip

    return {
        "name": "this-machine",
        "description": f"{chip}, {os.cpu_count()} cores, {total / 2**30:.0f} GiB, as the real engine uses it; gpu and vram are emulated in the same memory",
        "tiers": {
            "ram": {"capacity": {"value": f"{total} B", "basis": "measured", "source": "reported by the system"}, "channel": "ram"},
            "vram": {"capacity": _assumed(f"{total // 2} B", "emulated: half of the memory"), "channel": "ram"},
            "ssd": {"capacity": {"value": f"{free} B", "basis": "measured", "source": "free space of the store's folder"}, "channel": "ssd"},
        },
        "channels": {"ram": {"bandwidth": _assumed("20 GB/s", "nominal")}, "ssd": {"bandwidth": _assumed("1 GB/s", "nominal")}, "copy": {"bandwidth": _assumed("5 GB/s", "nominal")}},
        "devices": {"cpu": device("ram", chip) | {"cores": {"value": 1, "basis": "spec", "source": "one worker thread"}}, "gpu": device("vram", f"emulated by {chip}")},
        "links": {"h2d": link("ram", "vram"), "d2h": link("vram", "ram")},
        "storage": {"ssd": {"tier": "ssd", "latency": _assumed("100 us", "nominal"), "curve": [{"request": f"{MIB} B", "depth": 1, "bandwidth": _assumed("1 GB/s", "nominal")}]}},
    }  # fmt: skip


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
