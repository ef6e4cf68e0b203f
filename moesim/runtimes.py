"""Owns how known engines execute: what they do by which flags and since when, and which share of a machine's peaks they attain.

It must not know works or schedules. A runtime is a YAML file of rules; the rates that the rules name stand in ``attained.yaml``, one
figure each with its basis and physical meaning, for all engines together. A rate of basis *fitted* comes from public measured runs
(``benchmarks/fit_field.py``); for a host that was among those, the value fitted without it is used, so that no prediction rests on a
measurement of the machine it is made for.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from moesim import config, resources
from moesim.config import Document, Spec, build
from moesim.errors import InputError, did_you_mean


class Rate(Spec):
    """One coefficient: its value in SI units (or a plain share), what it means, and where it comes from."""

    value: Annotated[float, Field(gt=0)]
    unit: str = ""
    basis: Literal["fitted", "measured", "reported", "assumed"]
    meaning: str
    source: str


class Spread(Spec):
    """Half width of the 80 % interval of a prediction, as a ratio of times: from x / ratio to x * ratio."""

    placement: str
    mode: Literal["decode", "batched decode", "prefill"]
    cold: Annotated[float, Field(ge=1)]
    warm: Annotated[float, Field(ge=1)]


class AttainedFile(Spec):
    """What ``attained.yaml`` holds."""

    rates: dict[str, Rate]
    spreads: Annotated[tuple[Spread, ...], Field(strict=False)]


class Rule(Spec):
    """Names a choice, where all of its conditions hold; conditions left out always do."""

    use: str
    since: str = ""  # first date on which the engine does so
    before: str = ""
    versions: Annotated[tuple[str, ...], Field(strict=False)] = ()  # builds that have it whatever their date
    flags: Annotated[tuple[str, ...], Field(strict=False)] = ()  # any of these run options
    flash: bool | None = None
    latent: bool | None = None  # multi-head latent attention
    kv: str = ""  # pattern of the cache's format
    head_not: int = 0  # any width of an attention head but this
    room_twice: bool | None = None  # main memory holds the weights twice
    mixed: bool | None = None  # GPU and CPU take turns within a step
    gpu: str = ""  # pattern of the card's name
    quant: str = ""  # pattern of the quantisation's name

    def holds(self, run: RunFacts) -> bool:
        """Whether all conditions hold for a run."""
        dated = bool(self.since) and run.date >= self.since or any(v in run.version for v in self.versions)
        dated = dated or not (self.since or self.versions)
        return (
            dated
            and (not self.before or run.date < self.before)
            and (not self.flags or bool(run.flags & set(self.flags)))
            and self.flash in (None, run.flash)
            and self.latent in (None, run.latent)
            and self.room_twice in (None, run.room_twice)
            and (not self.kv or bool(re.search(self.kv, run.kv)))
            and (not self.head_not or run.head != self.head_not)
            and self.mixed in (None, run.mixed)
            and (not self.gpu or bool(re.search(self.gpu, run.gpu)))
            and (not self.quant or bool(re.search(self.quant, run.quant)))
        )


Rules = Annotated[tuple[Rule, ...], Field(strict=False, min_length=1)]


class Runtime(Spec):
    """How one engine executes. Of each list of rules the first that holds decides; the last must hold always."""

    name: str
    families: Annotated[tuple[str, ...], Field(strict=False)]
    description: str
    source: str
    kv: str = "fp16"  # format of the K/V cache where nothing is stated
    kv_round_tokens: int = 1  # the cache that attention reads is rounded up to this
    micro_batch: int = 512
    flash: Rules  # yes | no: attention in one kernel, where the run does not say
    latent_cache: Rules  # compressed | whole: what a latent-attention cache holds
    latent_prompt: Rules  # expanded | absorbed: whether prompts see whole heads or the latent, which takes more arithmetic
    launch: Rules  # the rate of one kernel's launch and drain
    norms: Rules  # fused | apart: whether norms of queries and keys and of router weights run inside other kernels
    gpu_attention: Rules  # vector | on-the-fly | tensor | unfused | none: no kernel for this cache, the CPU computes it
    cpu_attention: Rules  # blocked | unfused | serial
    cpu_prefill: Rules  # the rate factor of matrix times matrix on the CPU
    prompt_products: Rules  # together | one-by-one | gathered: kernels of a prompt's expert products on the GPU
    prefill_experts: Rules  # gpu | cpu: where experts in main memory are computed once a batch is large
    copy_from_tokens: int = 32  # the smallest batch for which experts are copied to the GPU
    numa: Rules  # yes | no: whether threads and pages are spread over the sockets on purpose
    repack: Rules = (Rule(use="no"),)  # yes | no: whether the CPU's kernels read a copy of the weights in a layout of their own
    pinned: Rules  # yes | no: whether weights in main memory lie in pages that the GPU copies from directly

    def choose(self, field: str, run: RunFacts) -> str:
        """Return what the first rule of a field that holds says."""
        rules: tuple[Rule, ...] = getattr(self, field)
        return next((rule.use for rule in rules if rule.holds(run)), rules[-1].use)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a runtime's rules may ask of a run; dates as YYYY-MM-DD or shorter, an unknown one counts as recent."""

    date: str = "9999"
    version: str = ""
    flags: frozenset[str] = frozenset()
    flash: bool = True
    latent: bool = False
    kv: str = "f16"
    head: int = 128
    room_twice: bool = False
    mixed: bool = False
    gpu: str = ""
    quant: str = ""


@dataclass(frozen=True)
class Rates:
    """Values of all rates, and the spread of predictions."""

    values: Mapping[str, float]
    spreads: Mapping[tuple[str, str], Spread]

    def __getitem__(self, name: str) -> float:
        try:
            return self.values[name]
        except KeyError:
            raise InputError("rate", expected="one of attained.yaml", got=f'"{name}"', fix=did_you_mean(name, self.values)) from None

    def interval(self, placement: str, mode: str, warm: bool) -> float:
        """Return the ratio of the 80 % interval; the widest of the mode for a placement that was never measured."""
        found = self.spreads.get((placement, mode))
        known = [found] if found else [s for s in self.spreads.values() if s.mode == mode] or list(self.spreads.values())
        return max(s.warm if warm else s.cold for s in known)


@lru_cache(maxsize=1)
def attained_file() -> AttainedFile:
    """Return ``attained.yaml`` as it is."""
    return build(AttainedFile, config.read_yaml(resources.find("runtimes", "attained")))


@lru_cache(maxsize=1)
def held_out() -> dict[str, dict[str, float]]:
    """Fitted rates without each host that they were fitted on, by host."""
    text = config.read_text(resources.folder("runtimes") / "attained_without_host.csv")
    return {row.pop("host"): {k: float(v) for k, v in row.items()} for row in csv.DictReader(text.splitlines())}


def load_rates(host: str = "") -> Rates:
    """Return the rates for predictions of a host: fitted ones without it, where it was among the fitted."""
    stated = attained_file()
    values = {name: rate.value for name, rate in stated.rates.items()} | held_out().get(host, {})
    return Rates(values, {(s.placement, s.mode): s for s in stated.spreads})


def was_fitted(host: str) -> bool:
    """Whether measurements of a host are among those that the rates were fitted on."""
    return host in held_out()


@lru_cache(maxsize=1)
def load_runtimes() -> tuple[Runtime, ...]:
    """Return all runtimes."""
    paths = [path for name, path in resources.names("runtimes").items() if name != "attained"]
    return tuple(build(Runtime, Document(d.data, d.source, d.lines)) for d in map(config.read_yaml, paths))


def runtime_of(family: str) -> Runtime:
    """Return the runtime of an engine family.

    Raises
    ------
    InputError
        If no runtime knows it.
    """
    for runtime in load_runtimes():
        if family in (runtime.name, *runtime.families):
            return runtime
    known = sorted({f for r in load_runtimes() for f in (r.name, *r.families)})
    raise InputError("engine_family", expected="a known engine", got=f'"{family}"', fix=did_you_mean(family, known))
