"""Owns Python's garbage collector: when it must not run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Leave garbage alone until the context ends.

    For loops that make many objects and no cycles of them: a full collection walks over everything that all imports have left behind as
    well, 70 to 100 ms, and a tenth of a long simulation went into collections that found nothing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
