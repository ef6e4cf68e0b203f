"""Owns what the controls of a what-if page say, as data, and the scenario that they mean. It knows no widget and computes nothing.

A screen starts as a scenario says; what was changed since becomes settings laid over that scenario, so that every screen is also a YAML
file and a command line. Another model brings a routing of its own, another machine keeps of the placement what it has devices and tiers for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import yaml

from moesim import config, resources
from moesim.config import Document
from moesim.errors import InputError
from moesim.hardware import HardwareProfile, kind
from moesim.model_files import load_model_with_plan
from moesim.scenario import Io, Placement, Pool, Prefetch, Scenario, load_scenario
from moesim.sizing.run import like_name
from moesim.sweep.paths import put
from moesim.sweep.space import assemble, lay, machine
from moesim.whatif.upgrades import LADDERS

FORMATS = (*LADDERS[0], "mxfp4", *LADDERS[1])  # of the routed experts, that a page offers
# Routing where nothing is known of a model's: the busier half of 128 experts gets 81 % of the tokens (claim T2), as in scenario sizing
SKEWED = {"generate": "zipf", "zipf_exponent": 0.8, "train_fraction": 0.5}
_FILES = (("model",), ("hardware",), ("trace", "source"), ("trace", "profile"), ("trace", "counts"))  # where a scenario names files
_PLACES = {  # field of a screen: path in a scenario, the control's label
    "users": ("workload.batch", "Users at the same time"),
    "context_tokens": ("memory.context_tokens", "Context to plan for"),
    "cached_tokens": ("workload.cached_tokens", "Tokens in the cache at the start"),
    "prompt_tokens": ("workload.prompt_tokens", "Prompt tokens"),
    "output_tokens": ("workload.output_tokens", "Output tokens"),
    "site": ("placement.site", "Experts that are missing"),
    "predictor": ("prefetch.predictor", "Prefetch predictor"),
    "distance": ("prefetch.distance", "Prefetch distance"),
    "io_engine": ("io.engine", "Reads"),
    "io_depth": ("io.depth", "I/O depth"),
    "io_threads": ("io.threads", "I/O threads"),
}
LABELS = {field: label for field, (_, label) in _PLACES.items()} | {
    "scenario": "Start from scenario", "model": "Model", "experts": "Precision of the experts", "hardware": "Machine",
    "hold": "Experts held", "below": "Experts held in RAM below", "policy": "Pool policy",
}  # fmt: skip
CHOICES = {
    "policy": get_args(Pool.model_fields["policy"].annotation),
    "site": get_args(Placement.model_fields["site"].annotation),
    "predictor": get_args(Prefetch.model_fields["predictor"].annotation),
    "io_engine": get_args(Io.model_fields["engine"].annotation),
}


@dataclass(frozen=True)
class Figure:
    """A figure of a machine that can be edited; ``path`` is that of a setting, ``value`` in base units."""

    path: str
    label: str
    unit: str
    value: float


@dataclass(frozen=True)
class Screen:
    """What the controls of one configuration say.

    Parameters
    ----------
    scenario : str
        What everything else started from: a bundled name or a file.
    model, hardware : str
        As a scenario names them.
    experts : str
        Format of the routed experts; empty: as the scenario, or the model's own file, states.
    figures : tuple of (str, float)
        Path and value of each figure of the machine that was edited (``machine_figures``).
    hold, policy : str
        Of the pool that the experts' device computes from.
    below : str
        What the RAM below that pool holds; empty: as many as fit, or there is none (``has_ram_below``).
    """

    scenario: str
    model: str
    hardware: str
    users: int
    context_tokens: int
    cached_tokens: int
    prompt_tokens: int
    output_tokens: int
    hold: str
    policy: str
    site: str
    predictor: str
    distance: int
    io_engine: str
    io_depth: int
    io_threads: int
    below: str = ""
    experts: str = ""
    figures: tuple[tuple[str, float], ...] = ()


def start(name: str) -> Screen:
    """Return the screen of a scenario as it stands.

    Raises
    ------
    InputError
        If there is no such scenario, or it is wrong.
    """
    scenario, document, base = opened(name)
    pools: dict[str, Pool] = {str(tier): pool for tier, pool in scenario.placement.pools.items()}
    hardware = machine(_underated(document), base)
    near = _near(scenario.placement, hardware)
    pool, below = pools.get(near, Pool()), pools.get("ram", Pool()).hold if "ram" in hardware.tiers and near != "ram" else ""
    return Screen(
        scenario=name, model=scenario.model, hardware=scenario.hardware, users=scenario.workload.batch,
        context_tokens=scenario.memory.context_tokens, cached_tokens=scenario.workload.cached_tokens,
        prompt_tokens=scenario.workload.prompt_tokens, output_tokens=scenario.workload.output_tokens, hold=str(pool.hold), policy=pool.policy,
        site=scenario.placement.site, predictor=scenario.prefetch.predictor, distance=scenario.prefetch.distance,
        io_engine=scenario.io.engine, io_depth=scenario.io.depth, io_threads=scenario.io.threads, below=str(below),
    )  # fmt: skip


def machine_figures(screen: Screen) -> list[Figure]:
    """Return the figures of a screen's machine that can be edited: memory sizes and bandwidths, as they are without edits.

    Raises
    ------
    InputError
        If there is no such machine.
    """
    hardware = _machine(screen)
    sizes = [
        Figure(f"hardware_set.tiers.{name}.capacity.value", f"{name} size (GB)", "bytes", float(tier.capacity.value))
        for name, tier in hardware.tiers.items()
        if kind(name) != "ssd"
    ]
    rates = [
        Figure(f"hardware_scale.{name}", f"{name} bandwidth (GB/s)", "bytes_per_s", channel.bandwidth.value)
        for name, channel in hardware.channels.items()
    ]
    return sizes + rates


def has_ram_below(screen: Screen) -> bool:
    """Say whether a screen's machine has a RAM below the memory that the experts are computed from."""
    hardware = _machine(screen)
    return "ram" in hardware.tiers and _near(opened(screen.scenario)[0].placement, hardware) != "ram"


def document_of(screen: Screen) -> tuple[Scenario, Document, Path]:
    """Return the scenario that a screen means, where each value came from, and the folder that relative names refer to.

    Raises
    ------
    InputError
        If a control says something impossible; its label is the place.
    """
    before, document, base = opened(screen.scenario)
    document = assemble(document, settings(screen), base)
    return config.build(Scenario, document).model_copy(update={"name": before.name}), document, base


@lru_cache(maxsize=8)
def settings(screen: Screen) -> tuple[tuple[str, Any, str], ...]:
    """Return what a screen changes of its scenario: dotted path, value, and the label of the control."""
    return tuple(_settings(screen))


def _settings(screen: Screen) -> Iterator[tuple[str, Any, str]]:
    scenario, document, _ = opened(screen.scenario)
    first = start(screen.scenario)
    if screen.model != first.model:
        yield from _another_model(screen)
    if screen.experts:
        stated = "file" if screen.model != first.model and _states_precision(screen.model) else scenario.precision
        plan = stated if isinstance(stated, dict) else {"default": stated}
        yield "precision", {**plan, "routed_experts": screen.experts}, LABELS["experts"]
    if screen.hardware != first.hardware:
        yield "hardware", screen.hardware, LABELS["hardware"]
        for field in ("hardware_set", "hardware_scale"):
            if getattr(scenario, field):
                yield field, {}, LABELS["hardware"]
        yield "placement", _moved(document.data.get("placement", {}), scenario.placement, _machine(screen)), LABELS["hardware"]
    near = _near(scenario.placement, _machine(screen))
    for field, path in (("hold", f"{near}.hold"), ("policy", f"{near}.policy"), ("below", "ram.hold")):
        value = getattr(screen, field)
        if value != getattr(first, field) and (field != "below" or has_ram_below(screen)):
            yield f"placement.pools.{path}", int(value) if value.isdecimal() else value or "fit", LABELS[field]
    for field, (path, label) in _PLACES.items():
        if getattr(screen, field) != getattr(first, field):
            yield path, getattr(screen, field), label
    now = {figure.path: figure for figure in machine_figures(screen)}
    for path, value in screen.figures:
        figure, (part, _, name) = now[path], path.partition(".")
        before = scenario.hardware_scale.get(name, 1.0) if screen.hardware == first.hardware else 1.0
        yield path, (before * value / figure.value if part == "hardware_scale" else f"{round(value)} B"), figure.label


def _another_model(screen: Screen) -> Iterator[tuple[str, Any, str]]:
    """The model, its routing where a profile of its shape is bundled or a skewed one, and the precision that its file states."""
    yield "model", screen.model, LABELS["model"]
    yield "trace", _routing_of(screen.model, opened(screen.scenario)[2]), LABELS["model"]
    if not screen.experts and _states_precision(screen.model):
        yield "precision", "file", LABELS["model"]


@lru_cache(maxsize=16)
def _routing_of(model: str, base: Path) -> dict[str, Any]:
    like = like_name(load_model_with_plan(model, base, LABELS["model"])[0], model)
    return {"generate": "like", "profile": like} if like else SKEWED


def _states_precision(model: str) -> bool:
    return model not in resources.names("models") and load_model_with_plan(model)[1] is not None


def _near(placement: Placement, hardware: HardwareProfile) -> str:
    """The tier that the experts' device computes from, as ``Layout`` chooses it where no rule says otherwise."""
    for device in (placement.experts, placement.attention, "gpu", "cpu"):
        if device in hardware.devices:
            return hardware.devices[device].tier
    return next(iter(hardware.tiers))


def _moved(stated: Mapping[str, Any], placement: Placement, hardware: HardwareProfile) -> dict[str, Any]:
    """A placement on another machine: devices and tiers that it has, and the nearest pool where the nearest pool is there."""
    out: dict[str, Any] = {"site": placement.site}
    out |= {key: stated[key] for key in ("attention", "experts") if stated.get(key) in hardware.devices}
    out |= {key: stated[key] for key in ("embeddings", "lookup") if stated.get(key) in hardware.tiers}
    pools = stated.get("pools", {})
    near = _near(placement, hardware)
    kept = {tier: pool for tier, pool in pools.items() if tier in hardware.tiers}
    return out | {"pools": {near: next(iter(pools.values()), {}), **kept}}


@lru_cache(maxsize=8)
def opened(name: str) -> tuple[Scenario, Document, Path]:
    """Return a scenario, its document with relative files written out so that it can be saved anywhere, and its folder.

    Raises
    ------
    InputError
        If there is no such scenario, or it is wrong.
    """
    scenario, document, base = load_scenario(name)
    data: dict[str, Any] = document.data
    for path in _FILES:
        holder: dict[str, Any] = data if len(path) == 1 else data.get(path[0], {})
        value = holder.get(path[-1])
        if isinstance(value, str) and value and not Path(value).exists() and (base / value).exists():
            data = put(data, ".".join(path), str((base / value).resolve()))
    document = replace(document, data=data)
    return config.build(Scenario, document).model_copy(update={"name": scenario.name}), document, base


def _underated(document: Document) -> Document:
    return replace(document, data=document.data | {"derate": 1.0})


def _machine(screen: Screen) -> HardwareProfile:
    """The machine of a screen before figures are edited, and before derating."""
    scenario, document, base = opened(screen.scenario)
    if screen.hardware != scenario.hardware:
        changed = {"hardware": screen.hardware, "hardware_set": {}, "hardware_scale": {}}
        document = lay(document, [(path, value, LABELS["hardware"]) for path, value in changed.items()])
    return machine(_underated(document), base)


class _Dumper(yaml.SafeDumper):
    """Writes floats as our reader wants them: digits, no exponent."""


_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _digits(value)))


def _digits(value: float) -> str:
    text = format(Decimal(repr(value)), "f")
    return text if "." in text else f"{text}.0"


def yaml_text(screen: Screen) -> str:
    """Return the scenario of a screen as a YAML file of its own; a model that was dropped into the page must lie beside it."""
    scenario, document, _ = document_of(screen)
    data = {"name": scenario.name, **document.data}
    head = f"# moesim run FILE.yaml; started from the scenario {screen.scenario}\n"
    if Path(screen.model).is_relative_to(_drop_folder()):
        data["model"] = Path(screen.model).name
        head += f"# put the model's {data['model']} beside this file\n"
    return head + yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True)


@lru_cache(maxsize=1)
def _drops() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moesim-ui-")


def _drop_folder() -> Path:
    return Path(_drops().name)


def keep(name: str, content: bytes) -> str:
    """Keep a file that was dropped into the page until the program ends, and return its path."""
    folder = _drop_folder() / sha256(content).hexdigest()[:16] / "dropped"  # a config.json is called after its folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (Path(name.replace("\\", "/")).name or "model")
    path.write_bytes(content)
    return str(path)


def explain(error: InputError) -> list[tuple[str, str]]:
    """Return an error as labels and texts: where, what, expected, got, fix; those it has."""
    parts = (("where", error.where), ("what", error.what), ("expected", error.expected), ("got", error.got), ("fix", error.fix))
    return [(label, text) for label, text in parts if text]
