"""Owns real memory with a hard limit: one page-aligned anonymous mapping a tier, handed out to the byte.

It must not know what the memory is for. Nothing is given back before the whole arena is closed: slots, K/V and buffers of a run live as
long as the run does.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import DoesNotFit, InputError

PAGE_BYTES = mmap.PAGESIZE


class OutOfMemory(DoesNotFit):
    """An arena that is full, or that the system had no memory for.

    Parameters
    ----------
    arena : str
        Its name.
    asked_bytes, left_bytes, capacity_bytes : int
        What was asked for, with the padding before it; what was left; what the arena may hold.
    cause : str
        Why, where it is not the arena's own limit.
    """

    def __init__(self, arena: str, asked_bytes: int, left_bytes: int, capacity_bytes: int, cause: str = "") -> None:
        self.arena, self.asked_bytes, self.left_bytes, self.capacity_bytes = arena, asked_bytes, left_bytes, capacity_bytes
        why = f": {cause}" if cause else ""
        super().__init__(f"{arena} is out of memory{why}: asked for {asked_bytes:,} B, {left_bytes:,} B left of {capacity_bytes:,} B")


class Arena:
    """One tier's memory.

    Parameters
    ----------
    name : str
        Name of the tier, for messages.
    capacity_bytes : int
        Hard limit. The mapping is rounded up to whole pages; ``take`` is not.

    Raises
    ------
    OutOfMemory
        If the system refuses the mapping.
    """

    def __init__(self, name: str, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise InputError("capacity_bytes", expected="at least 0", got=str(capacity_bytes))
        self.name, self.capacity_bytes, self.used_bytes = name, capacity_bytes, 0
        pages = max(-(-capacity_bytes // PAGE_BYTES), 1)
        try:
            # private: a shared mapping would be no part of what RLIMIT_DATA counts
            self._map: mmap.mmap | None = mmap.mmap(-1, pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(name, capacity_bytes, 0, capacity_bytes, f"the system refused the mapping ({error.strerror})") from None
        # huge pages, where the kernel has them: direct reads of 3 MB took half the CPU time and were 16 to 28 % faster (Linux 6.18, virtio)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    @property
    def left_bytes(self) -> int:
        """Bytes that can still be taken."""
        return self.capacity_bytes - self.used_bytes

    def take(self, n_bytes: int, align: int = 1) -> memoryview:
        """Hand out the next bytes.

        Parameters
        ----------
        n_bytes : int
            Size.
        align : int
            The start is a multiple of it (a power of two up to the page size); bytes skipped for that count as used. Slots that direct
            reads fill need 4096.

        Returns
        -------
        memoryview
            ``n_bytes`` writable bytes, zero at first.

        Raises
        ------
        OutOfMemory
            If the arena has no room for them.
        """
        if n_bytes < 0 or align < 1 or PAGE_BYTES % align:
            raise InputError("take", expected=f"a size and an alignment that divides {PAGE_BYTES}", got=f"{n_bytes} B at {align}")
        padding = -self.used_bytes % align
        if padding + n_bytes > self.left_bytes:
            raise OutOfMemory(self.name, padding + n_bytes, self.left_bytes, self.capacity_bytes)
        start = self.used_bytes + padding
        self.used_bytes = start + n_bytes
        return memoryview(self._open())[start : self.used_bytes]

    def touch(self) -> None:
        """Write to every page, keeping what it holds, so that no page fault falls into a measured run."""
        pages = np.frombuffer(self._open(), dtype=np.uint8)[::PAGE_BYTES]
        pages |= 0

    def close(self) -> None:
        """Give the memory back, at once or as soon as the last view of it is gone."""
        found, self._map = self._map, None
        if found is not None:
            try:
                found.close()
            except BufferError:
                pass  # the mapping ends with its views

    def _open(self) -> mmap.mmap:
        if self._map is None:
            raise InputError(f"arena {self.name}", expected="an open arena", got="a closed one")
        return self._map

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Arena {self.name}: {self.used_bytes:,} of {self.capacity_bytes:,} B used>"


def as_array(region: memoryview, dtype: Any = np.uint8) -> NDArray[Any]:
    """Return a numpy view of a region, without a copy; ``torch.from_numpy`` of it is a torch view."""
    return np.frombuffer(region, dtype=dtype)
