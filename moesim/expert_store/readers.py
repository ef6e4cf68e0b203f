"""Owns how experts come from the disk into memory slots in a run: direct, buffered or mmap, at disk speed or throttled.

Everything but the reading itself is done in ``prepare``; the operation it returns does its system calls without the interpreter's lock and
returns the bytes that they delivered. It must not know tasks or lanes. An operation runs once at a time; different ones may run at once.

- *direct*: O_DIRECT, ``depth`` requests of ``request_bytes`` in flight by Linux' native AIO.
- *buffered*: pread through the page cache, one request after another, without read-ahead.
- *mmap*: page faults on a mapping, with the kernel's own read-ahead; ``request_bytes`` has no effect.

The page cache is no cache of experts here: buffered and mmap drop the pages that they brought after each read, as part of the operation, so that each
read comes from the disk, in a calibration as in a run. A mapped file that shrinks or cannot be read ends the process (SIGBUS), as mmap does.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError, did_you_mean
from moesim.expert_store import ExpertStore, Extent
from moesim.host import disk_calls
from moesim.host.links import Throttle

Engine = Literal["direct", "buffered", "mmap"]
DIRECT_ALIGN = 4096  # covers drives of 512 and of 4096 byte blocks

Operation = Callable[[], int]
Requests = NDArray[np.int64]  # (n, 3): address in memory, offset in the file, bytes


class Reader(ABC):
    """Prepares reads of one store; made by ``open_reader``."""

    def __init__(self, store: ExpertStore, request_bytes: int, depth: int, bytes_per_s: float | None) -> None:
        self.store, self.request_bytes, self.depth = store, request_bytes, depth
        self.path: Path = store.path
        self._throttle = None if bytes_per_s is None else Throttle(bytes_per_s)
        self.fd = self._open(os.O_RDONLY)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_CLOEXEC)
        except OSError as error:
            got = error.strerror or str(error)
            raise InputError("expert store", expected="a readable file", got=got, where=str(self.path)) from None

    def prepare(self, layer: int, expert: int, buffer: memoryview) -> Operation:
        """Return the operation that reads an expert into a slot.

        Parameters
        ----------
        layer, expert : int
            Which expert.
        buffer : memoryview
            The slot, of exactly ``store.slot_bytes(layer)`` writable bytes; at a multiple of 4096 for direct reads.

        Returns
        -------
        callable
            Returns the bytes delivered, always the whole slot; else it raises an InputError with file, offset, expected and got. It
            keeps the slot alive.
        """
        if buffer.readonly or not buffer.contiguous or buffer.nbytes != self.store.slot_bytes(layer):
            expected = f"{self.store.slot_bytes(layer):,} writable bytes in a row"
            raise InputError("slot", expected=expected, got=f"{buffer.nbytes:,} {'read-only ' if buffer.readonly else ''}bytes")
        slot = np.frombuffer(buffer, dtype=np.uint8)
        extents = self.store.extents(layer, expert)
        requests = self._requests(extents, slot.ctypes.data)
        results = np.zeros(len(requests), dtype=np.int64)
        sizes = np.ascontiguousarray(requests[:, 2])
        n_bytes = int(sizes.sum())
        read = self._calls(requests, results, extents)

        def operation(slot: Any = slot) -> int:
            results.fill(0)
            failed = read()
            if failed or not np.array_equal(results, sizes):
                raise self._error(failed, requests, results)
            return n_bytes

        return operation if self._throttle is None else self._throttle.pace(operation, n_bytes)

    def _requests(self, extents: tuple[Extent, ...], address: int) -> Requests:
        step = self.request_bytes
        cut = [(address + at + i, offset + i, min(step, size - i)) for offset, at, size in extents for i in range(0, size, step)]
        return np.array(cut, dtype=np.int64)

    @abstractmethod
    def _calls(self, requests: Requests, results: NDArray[np.int64], extents: tuple[Extent, ...]) -> Callable[[], int]:
        """Return what fills ``results`` with the bytes of each request, or returns an error number."""

    def _error(self, failed: int, requests: Requests, results: NDArray[np.int64]) -> InputError:
        bad = int(np.argmax(results != requests[:, 2]))
        offset, size, got = int(requests[bad, 1]), int(requests[bad, 2]), int(results[bad])
        number = failed or -got
        text = f"{os.strerror(number)} (error {number})" if number > 0 else f"{got:,}"
        fix = "the disk or its connection fails" if number > 0 else "the file is cut short: build the store again"
        return InputError(f"read at offset {offset:,}", expected=f"{size:,} bytes", got=text, fix=fix, where=str(self.path))

    def close(self) -> None:
        """Close the file; prepared operations must not run any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DirectReader(Reader):
    """O_DIRECT with native AIO: ``depth`` requests in flight from the calling thread."""

    def __init__(self, store: ExpertStore, request_bytes: int, depth: int, bytes_per_s: float | None) -> None:
        for name, size in (("align", store.index.align), ("request_bytes", request_bytes)):
            if size % DIRECT_ALIGN:
                fix = "build the store with align 4096" if name == "align" else ""
                raise InputError(name, expected=f"a multiple of {DIRECT_ALIGN} for direct reads", got=str(size), fix=fix)
        self._contexts: list[int] = []
        self._idle: list[int] = []
        super().__init__(store, request_bytes, depth, bytes_per_s)
        try:
            self._idle.append(self._context())
        except InputError:
            if depth > 1:
                self.close()
                raise

    def _open(self, flags: int) -> int:
        try:
            return super()._open(flags | os.O_DIRECT)
        except InputError as error:
            fix = "choose a folder on a disk, or engine buffered"
            raise InputError("direct read", expected="a file system with O_DIRECT", got=error.got, fix=fix, where=str(self.path)) from None

    def _context(self) -> int:
        try:
            context = disk_calls.aio_setup(self.depth)
        except OSError as error:
            got, fix = error.strerror or str(error), "use depth 1; /proc/sys/fs/aio-max-nr bounds the contexts of all processes"
            raise InputError(
                "depth", expected="1 where Linux' native AIO cannot be used", got=f"{self.depth}; io_setup: {got}", fix=fix
            ) from None
        self._contexts.append(context)
        return context

    def _calls(self, requests: Requests, results: NDArray[np.int64], extents: tuple[Extent, ...]) -> Callable[[], int]:
        if requests[0, 0] % DIRECT_ALIGN:
            raise InputError("slot", expected=f"an address that is a multiple of {DIRECT_ALIGN}", got=hex(int(requests[0, 0])))
        if not self._contexts:
            return lambda: int(disk_calls.pread_all(self.fd, requests, results))
        blocks = np.zeros(len(requests), dtype=disk_calls.IOCB)  # opcode 0 is a read
        blocks["data"], blocks["fd"] = np.arange(len(requests)), self.fd
        blocks["buffer"], blocks["offset"], blocks["n_bytes"] = requests.T
        pointers = blocks.ctypes.data + np.arange(len(requests), dtype=np.int64) * disk_calls.IOCB.itemsize
        events = np.zeros(self.depth * disk_calls.EVENT_WORDS, dtype=np.int64)
        idle, depth, address = self._idle, self.depth, pointers.ctypes.data

        def calls(blocks: Any = blocks, pointers: Any = pointers) -> int:  # keeps what the kernel is pointed to
            try:
                context = idle.pop()
            except IndexError:
                context = self._context()
            try:
                return int(disk_calls.aio_read(context, address, depth, events, results))
            finally:
                idle.append(context)

        return calls

    def close(self) -> None:
        """Close the file and free the contexts."""
        while self._contexts:
            disk_calls.aio_destroy(self._contexts.pop())
        self._idle.clear()
        super().close()


class BufferedReader(Reader):
    """pread through the page cache."""

    def __init__(self, store: ExpertStore, request_bytes: int, depth: int, bytes_per_s: float | None) -> None:
        super().__init__(store, request_bytes, depth, bytes_per_s)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _calls(self, requests: Requests, results: NDArray[np.int64], extents: tuple[Extent, ...]) -> Callable[[], int]:
        fd = self.fd

        def calls() -> int:
            failed = int(disk_calls.pread_all(fd, requests, results))
            for offset, _, size in extents:
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
            return failed

        return calls


class MmapReader(Reader):
    """Page faults on a mapping of the whole file."""

    def __init__(self, store: ExpertStore, request_bytes: int, depth: int, bytes_per_s: float | None) -> None:
        super().__init__(store, request_bytes, depth, bytes_per_s)
        self._map = mmap.mmap(self.fd, store.index.data_bytes, prot=mmap.PROT_READ)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _requests(self, extents: tuple[Extent, ...], address: int) -> Requests:
        return np.array([(address + at, offset, size) for offset, at, size in extents], dtype=np.int64)

    def _calls(self, requests: Requests, results: NDArray[np.int64], extents: tuple[Extent, ...]) -> Callable[[], int]:
        mapped = np.frombuffer(self._map, dtype=np.uint8)
        fd, base = self.fd, mapped.ctypes.data
        pages = [(offset - offset % mmap.PAGESIZE, size + offset % mmap.PAGESIZE) for offset, _, size in extents]

        def calls(mapped: Any = mapped) -> int:
            failed = int(disk_calls.copy_all(base, requests, results))
            for offset, size in pages:
                self._map.madvise(mmap.MADV_DONTNEED, offset, size)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # of the whole file: read-ahead has brought more than was asked for
            return failed

        return calls

    def close(self) -> None:
        """Close the file; the mapping ends with the last prepared operation."""
        try:
            self._map.close()
        except BufferError:
            pass
        super().close()


_ENGINES: dict[str, type[Reader]] = {"direct": DirectReader, "buffered": BufferedReader, "mmap": MmapReader}


def open_reader(
    store: ExpertStore, engine: Engine = "direct", *, request_bytes: int = 1 << 20, depth: int = 1, bytes_per_s: float | None = None
) -> Reader:
    """Open a store for reading in a run.

    Parameters
    ----------
    store : ExpertStore
        The opened store.
    engine : str
        ``"direct"``, ``"buffered"`` or ``"mmap"``.
    request_bytes : int
        Size of a request; a longer extent is several.
    depth : int
        Requests of one operation in flight at once; 1 unless direct.
    bytes_per_s : float, optional
        Throttle that all operations of this reader share.

    Raises
    ------
    InputError
        For another engine, a depth that it cannot have, sizes that are not aligned, or a file system that refuses direct reads.
    """
    found = _ENGINES.get(engine)
    if found is None:
        raise InputError("engine", expected="a way to read", got=f'"{engine}"', fix=did_you_mean(engine, _ENGINES))
    if request_bytes < 1 or depth < 1:
        raise InputError("request_bytes, depth", expected="at least 1", got=f"{request_bytes}, {depth}")
    if depth > 1 and engine != "direct":
        raise InputError("depth", expected=f"1 for {engine} reads, which wait for each request", got=str(depth), fix="use engine direct")
    return found(store, request_bytes, depth, bytes_per_s)
