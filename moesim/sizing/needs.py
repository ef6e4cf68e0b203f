"""Owns the needs file of ``moesim size``: models, load, service level, quality floor, budget and what is owned, as strict data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from moesim import config, resources
from moesim.config import Spec, problem
from moesim.errors import InputError
from moesim.hardware.grammar import read_parts
from moesim.model_files import load_model
from moesim.precision import FORMATS
from moesim.units import Seconds

Count = Annotated[int, Field(ge=1, le=1_000_000)]
MOST_USERS = 256


class Level(Spec):
    """What every user must get: decode speed, and the time to the first token of a prompt that comes alone."""

    decode_tok_s: Annotated[float, Field(gt=0)]
    ttft: Seconds | None = None


class Batch(Spec):
    """Requests that nobody waits for one by one, all to be done within a time."""

    requests: Count
    prompt_tokens: Count
    output_tokens: Annotated[int, Field(ge=2, le=1_000_000)]
    within: Annotated[Seconds, Field(gt=0)]


class Quality(Spec):
    """What precision of the experts is acceptable: at least so many bits per weight, scales included; by name; or a loss that is measured or published."""

    floor_bits: Annotated[float, Field(gt=0, le=32)] | None = None
    formats: list[str] = []
    max_loss_percent: Annotated[float, Field(ge=0, le=100)] | None = (
        None  # of all large matrices in one format; what is unknown does not count
    )

    @model_validator(mode="after")
    def _check(self) -> Quality:
        if (self.floor_bits is not None) + bool(self.formats) + (self.max_loss_percent is not None) != 1:
            raise problem("one of floor_bits, formats or max_loss_percent", "several or none", "state the floor once")
        for name in self.formats:
            if name not in FORMATS:
                raise problem("known formats", f'"{name}"', "see moesim.precision.FORMATS")
        return self


class Budget(Spec):
    """What may be spent, what is owned aside."""

    amount: Annotated[float, Field(gt=0)]
    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")]


class Needs(Spec):
    """A whole needs file."""

    name: str = ""
    description: str = ""
    models: Annotated[list[str], Field(min_length=1)]  # each must meet the level; they are loaded one at a time
    users: Annotated[int, Field(ge=1, le=MOST_USERS)] = 1
    context_tokens: Count = 8192
    prompt_tokens: Count = 1000  # a usual prompt that is not in the cache
    level: Level | None = None
    batch: Batch | None = None
    quality: Quality
    budget: Budget | None = None
    owned: str = ""  # a composition of parts
    consider: list[str] = []  # compositions to judge instead of the usual ones

    @model_validator(mode="after")
    def _check(self) -> Needs:
        if (self.level is None) == (self.batch is None):
            raise problem("one of level or batch", "both or none", "state what must be reached once")
        if self.prompt_tokens > self.context_tokens:
            raise problem("prompt_tokens of at most context_tokens", str(self.prompt_tokens), "a prompt lies within the context")
        return self

    @property
    def context(self) -> int:
        """Tokens of context that memory must hold for each sequence."""
        return self.context_tokens if self.batch is None else self.batch.prompt_tokens + self.batch.output_tokens

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.prompt_tokens if self.batch is None else self.batch.prompt_tokens


def load_needs(name: str) -> tuple[Needs, Path]:
    """Load needs by bundled name or path, and the folder that relative names refer to.

    Raises
    ------
    InputError
        If there is no such file, or it is wrong; with ``file:line``.
    """
    path = resources.find("scenarios/needs", name)
    document = config.read_yaml(path)
    needs = config.build(Needs, document)
    for i, model in enumerate(needs.models):
        load_model(model, path.parent, document.where(("models", i)))
    for field, texts in (("owned", [needs.owned] if needs.owned else []), ("consider", needs.consider)):
        for i, text in enumerate(texts):
            try:
                read_parts(text)
            except InputError as error:
                raise error.under(field).at(document.where((field, i) if field == "consider" else (field,))) from None
    return needs.model_copy(update={"name": needs.name or path.stem}), path.parent


def line_of(name: str, field: str) -> str:
    """Return ``file:line`` of a dotted field of a needs file."""
    return config.read_yaml(resources.find("scenarios/needs", name)).where(tuple(field.split(".")))
