# mypy: ignore-errors
"""Owns the loops of system calls behind a disk read, compiled so that they hold no interpreter lock and run no Python per request.

Source of the structures and numbers: Linux's include/uapi/linux/aio_abi.h and the system call tables of x86-64 and arm64. It must not
know experts; errors are returned as numbers, and what each request delivered lies in ``results``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

import numba
import numpy as np
from numba import njit, types

IOCB = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4"), ("buffer", "<u8"),
        ("n_bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("event_fd", "<u4"),
    ]
)  # fmt: skip
EVENT_WORDS = 4  # data, iocb, result, second result
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # io_setup, io_destroy, io_getevents, io_submit
SETUP, DESTROY, GET_EVENTS, SUBMIT = _CALLS.get(platform.machine(), (-1, -1, -1, -1))
EAGAIN, EINTR = errno.EAGAIN, errno.EINTR

_WORD = types.intp
_syscall = types.ExternalFunction("syscall", _WORD(_WORD, _WORD, _WORD, _WORD, _WORD, _WORD))
_pread = types.ExternalFunction("pread", _WORD(types.int32, _WORD, _WORD, types.int64))
_memcpy = types.ExternalFunction("memcpy", _WORD(_WORD, _WORD, _WORD))
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())


def aio_setup(depth: int) -> int:
    """Make a context for ``depth`` requests in flight, or raise an OSError."""
    context = ctypes.c_ulong(0)
    _raw(SETUP, ctypes.c_long(depth), ctypes.byref(context))
    return context.value


def aio_destroy(context: int) -> None:
    """Free a context; waits for what is in flight."""
    _raw(DESTROY, ctypes.c_ulong(context))


def _raw(number: int, *arguments: object) -> None:
    if number < 0:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@njit(types.int64(types.int64, types.int64, types.int64, types.int64[::1], types.int64[::1]), nogil=True, cache=True)
def aio_read(context, pointers, depth, events, results):
    """Read with at most ``depth`` requests in flight; return 0 or an error number.

    ``pointers`` is the address of one pointer to an ``IOCB`` a request, whose ``data`` is the request's number; ``events`` has room for
    ``depth`` events. ``results`` gets each request's bytes, or minus its error number.
    """
    total = results.size
    sent = done = failed = 0
    while done < total:
        while failed == 0 and sent < total and sent - done < depth:
            n = _syscall(SUBMIT, context, min(total, done + depth) - sent, pointers + 8 * sent, 0, 0)
            if n >= 0:
                sent += n
                continue
            number = numba.carray(_errno(), 1)[0]
            if number == EAGAIN and sent > done:
                break  # the context is busy until something ends
            if number != EINTR and number != EAGAIN:
                failed = number
        if failed != 0 and sent == done:
            return failed  # only now is nothing in flight into the slot
        n = _syscall(GET_EVENTS, context, 1, depth, events.ctypes.data, 0)
        if n < 0:
            number = numba.carray(_errno(), 1)[0]
            if number != EINTR:
                return number
            continue
        for i in range(n):
            results[events[EVENT_WORDS * i]] = events[EVENT_WORDS * i + 2]
        done += n
    return 0


@njit(types.int64(types.int32, types.int64[:, ::1], types.int64[::1]), nogil=True, cache=True)
def pread_all(fd, requests, results):
    """Read one request after another, (n, 3) of address, offset and bytes; return 0, as ``results`` say the rest."""
    for i in range(results.size):
        n = _pread(fd, requests[i, 0], requests[i, 2], requests[i, 1])
        while n < 0 and numba.carray(_errno(), 1)[0] == EINTR:
            n = _pread(fd, requests[i, 0], requests[i, 2], requests[i, 1])
        results[i] = n if n >= 0 else -np.int64(numba.carray(_errno(), 1)[0])
    return 0


@njit(types.int64(types.int64, types.int64[:, ::1], types.int64[::1]), nogil=True, cache=True)
def copy_all(mapping, requests, results):
    """Copy one run after another from a mapped file at an address, as ``pread_all`` reads."""
    for i in range(results.size):
        _memcpy(requests[i, 0], mapping + requests[i, 1], requests[i, 2])
        results[i] = requests[i, 2]
    return 0
