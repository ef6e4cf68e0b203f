"""Owns the table of predictors by name: from a routing trace to the experts that a prefetcher would fetch, as data, before anything runs.

It must not know about pools, time or engines. What a prediction is, and what its source, ``predictors`` says.
"""

from __future__ import annotations

import inspect
from typing import Any

from moesim.errors import InputError, did_you_mean
from moesim.policies.learned import Cooccurrence, Linear, TwoStep
from moesim.policies.predictors import GateLookahead, Nothing, Oracle, Popularity, Predictor, Previous, Source, source_cells

__all__ = ["PREDICTORS", "Predictor", "Source", "make_predictor", "source_cells", "source_of"]

PREDICTORS: dict[str, type[Any]] = {  # a user may add a class, as to CACHE_POLICIES
    kind.name: kind for kind in (Nothing, Oracle, Popularity, Previous, Cooccurrence, Linear, TwoStep, GateLookahead)
}


def make_predictor(name: str, **options: Any) -> Predictor:
    """Build a predictor.

    Parameters
    ----------
    name : str
        A key of ``PREDICTORS``.
    **options
        What its class takes: ``threshold`` (all), ``ridge`` (linear), ``recall``, ``loss``, ``seed`` (gate-lookahead).

    Raises
    ------
    InputError
        On an unknown name or option, or a value out of range.
    """
    if name not in PREDICTORS:
        raise InputError("predictor", expected="a known name", got=f'"{name}"', fix=did_you_mean(name, PREDICTORS))
    known = inspect.signature(PREDICTORS[name]).parameters
    for option in options:
        if option not in known:
            raise InputError(f"predictor {name}", expected=f"options among {', '.join(known)}", got=option, fix=did_you_mean(option, known))
    predictor: Predictor = PREDICTORS[name](**options)
    return predictor


def source_of(name: str) -> Source:
    """Tell which tasks yield a predictor's output: ``none``, ``router`` (at the source layer), ``previous`` (token's router) or ``both``."""
    if name not in PREDICTORS:
        raise InputError("predictor", expected="a known name", got=f'"{name}"', fix=did_you_mean(name, PREDICTORS))
    source: Source = PREDICTORS[name].source
    return source
