"""Owns the pace of emulated disks and links, and real memory copies over one.

A ``Throttle`` is a token bucket whose bucket is nearly empty: a transfer of n bytes ends no sooner than n / rate after it began, and
transfers that follow one another on the same link share the rate. What a sleep ends late is made up for by the transfer that follows at
once, up to ``MOST_CREDIT_S``, so that the mean rate holds; idle time earns nothing, as on a real link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from moesim.errors import InputError

MOST_CREDIT_S = 0.01  # sleeps end 0.1 ms late on an idle machine and some ms late on one with more threads than cores
AT_ONCE_S = 0.001  # a hand-off between threads; what begins later follows an idle time


class Throttle:
    """Paces operations to a rate.

    Parameters
    ----------
    bytes_per_s : float
        The rate that is emulated. It cannot be faster than the transfer itself.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if not 0 < bytes_per_s < float("inf"):
            raise InputError("bytes_per_s", expected="a rate above 0", got=str(bytes_per_s))
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when the link is free again
        self._credit_s = 0.0  # by how much the last transfer ended late
        self._ended_s = 0.0  # when it did
        self._lock = threading.Lock()

    def pace(self, operation: Callable[[], int], n_bytes: int) -> Callable[[], int]:
        """Return an operation of ``n_bytes`` that ends no sooner than the link would have moved them."""

        def paced() -> int:
            now = time.perf_counter()
            with self._lock:
                credit = self._credit_s if now - self._ended_s < AT_ONCE_S else 0.0
                begin = max(self._free_s, now - credit)
                end = self._free_s = begin + n_bytes / self.bytes_per_s
                self._credit_s = 0.0
            moved = operation()
            left = end - time.perf_counter()
            late = MOST_CREDIT_S if left > 0 else max(now - begin, 0.0)  # without a sleep only what was late before stays so
            if left > 0:
                time.sleep(left)
            self._ended_s = time.perf_counter()
            self._credit_s = min(self._ended_s - end, late)
            return moved

        return paced


class CopyLink:
    """Copies between places in memory, at memory speed or throttled.

    Parameters
    ----------
    bytes_per_s : float, optional
        The rate of the link that is emulated.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._throttle = None if bytes_per_s is None else Throttle(bytes_per_s)

    def prepare(self, source: memoryview, target: memoryview) -> Callable[[], int]:
        """Return an operation that copies one slot over another, without the interpreter's lock, and returns the bytes copied.

        Raises
        ------
        InputError
            If the two differ in size.
        """
        if source.nbytes != target.nbytes:
            raise InputError("copy", expected=f"two slots of one size, {source.nbytes:,} B", got=f"{target.nbytes:,} B")
        read: Any = np.frombuffer(source, dtype=np.uint8)
        write: Any = np.frombuffer(target, dtype=np.uint8)
        n_bytes, copyto = source.nbytes, np.copyto

        def copy() -> int:
            copyto(write, read)
            return n_bytes

        return copy if self._throttle is None else self._throttle.pace(copy, n_bytes)
