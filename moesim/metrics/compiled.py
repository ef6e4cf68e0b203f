# mypy: ignore-errors
"""Owns the compiled loops of the metrics: the very source of ``metrics_kernel``, for runs whose engine is compiled as well.

Compiled without reference counts: all arrays come in from outside.
"""

from __future__ import annotations

from types import FunctionType

from numba import njit

from moesim.engines.fast_state import STAMP, ceil_ps
from moesim.metrics import kernel as metrics_kernel

_NAMES = "find", "settle", "place", "waits", "served", "cover", "extra_ps", "walk", "parts", "use", "forget"
_INNER = "find", "extra_ps"  # called by the others alone
_scope = {**vars(metrics_kernel), "ceil_ps": ceil_ps}  # where the compiled functions find each other


def _compile(name):
    plain = _scope[name]
    options = {"forceinline": True, "no_cpython_wrapper": True} if name in _INNER else {"cache": True, "nogil": True}
    _scope[name] = njit(**options, _nrt=False, no_cfunc_wrapper=True)(FunctionType(plain.__code__, _scope, name))
    return _scope[name]


find, settle, place, waits, served, cover, extra_ps, walk, parts, use, forget = (_compile(name) for name in _NAMES)
stamp = STAMP
