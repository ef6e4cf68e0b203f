"""Owns what is stated of a precision plan's quality: measured or published, with its source, or nothing. Never an estimate.

It must not know formats. A loss is in percent of the unquantised model's own figure: of bits per byte (``moesim quality``), of a perplexity,
or of whatever ``benchmark`` names.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moesim import config
from moesim.config import Spec

Text = Annotated[str, Field(min_length=1, max_length=500)]
Percent = Annotated[float, Field(ge=-100, le=1e6, allow_inf_nan=False)]


class StatedQuality(Spec):
    """What a plan costs in quality, and who says so. ``measured`` names the hash of the plan that was measured, so that a change is noticed."""

    basis: Literal["measured", "published"]
    model: Text
    benchmark: Text
    loss_percent: Percent
    low_percent: Percent | None = None  # of a 95 % interval
    high_percent: Percent | None = None
    plan_hash: str = ""
    source: Text


class PublishedRow(Spec):
    """One published figure: all large matrices of ``model`` in ``format``."""

    model: Text
    format: Text
    benchmark: Text
    loss_percent: Percent
    source: Text


class PublishedTable(Spec):
    """The bundled table, ``published_quality.yaml``."""

    rows: list[PublishedRow]


@cache
def published() -> tuple[PublishedRow, ...]:
    """Return the bundled rows."""
    return tuple(config.build(PublishedTable, config.read_yaml(Path(__file__).with_name("published_quality.yaml"))).rows)


def find_published(model: str, format: str) -> StatedQuality | None:
    """Return what is published of a model whose large matrices are all in one format, or None."""
    for row in published():
        if (row.model, row.format) == (model, format):
            return StatedQuality(basis="published", **row.model_dump(exclude={"format"}))
    return None
