"""Owns the reading of a GGUF header: metadata and the list of tensors. It never reads tensor data, which need not be there.

Layout (ggml/docs/gguf.md, versions 2 and 3, little-endian): ``GGUF``, u32 version, u64 tensor count, u64 pair count; pairs of key, u32
type, value; tensor infos of name, u32 number of dimensions, u64 sizes (innermost first), u32 type, u64 offset. A string is a u64 length
and its bytes; an array a u32 type, a u64 length and its elements. Every length is checked against the file before it is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moesim.errors import InputError
from moesim.precision import Format, get_format

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_NAME = 65535  # the limit of keys in the specification
KEEP_STRING = 1 << 16  # longer values (chat templates aside, licences) are skipped, no fact of the architecture is that long
KEEP_ITEMS = 1 << 14  # longer arrays are vocabularies
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MIN_PAIR, MIN_INFO = 8 + 4 + 1, 8 + 4 + 4 + 8  # least bytes of a pair and of a tensor info

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# ggml type numbers (ggml.h, enum ggml_type); numbers that are missing were removed from GGML or belong to forks
TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "bf16", 34: "TQ1_0", 35: "TQ2_0",
    39: "mxfp4", 40: "nvfp4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor info: name, sizes with the innermost (input channels) first, format, and its bytes."""

    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (long strings and arrays left out) and tensor infos of one file; ``header_bytes`` is where the infos end."""

    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    header_bytes: int


def is_gguf(path: Path) -> bool:
    """True if a file begins with GGUF's magic bytes.

    Raises
    ------
    InputError
        If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError as error:
        raise InputError("file", expected="a readable file", got=error.strerror or str(error), where=str(path)) from None


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises
    ------
    InputError
        With file and byte offset: if it is cut off, of another version or byte order, or states sizes that cannot be.
    """
    try:
        with path.open("rb") as file:
            return _Reader(file, path.stat().st_size, str(path)).header()
    except OSError as error:
        raise InputError("file", expected="a readable file", got=error.strerror or str(error), where=str(path)) from None


class _Reader:
    """A position in the header, with every read checked against the size of the file."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self.file, self.size, self.where, self.at = file, size, where, 0

    def fail(self, what: str, expected: str, got: str, fix: str = "") -> InputError:
        return InputError(what, expected=expected, got=got, fix=fix, where=f"{self.where}, byte {self.at}")

    def need(self, n: int, what: str) -> None:
        if n > self.size - self.at:
            got = f"{self.size - self.at} to the end of the file"
            raise self.fail(what, f"{n} bytes", got, "the file is cut off or damaged; fetch it again")

    def take(self, n: int, what: str) -> bytes:
        self.need(n, what)
        data = self.file.read(n)
        if len(data) != n:
            raise self.fail(what, f"{n} bytes", f"{len(data)}", "the file changed while it was read")
        self.at += n
        return data

    def skip(self, n: int, what: str) -> None:
        self.need(n, what)
        self.at += n
        self.file.seek(self.at)

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit: int) -> str:
        n = self.u64(what)
        if n > limit:
            raise self.fail(what, f"a length of at most {limit}", str(n), "the file is damaged")
        try:
            return self.take(n, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(what, "UTF-8 text", "other bytes", "the file is damaged") from None

    def header(self) -> GgufHeader:
        if self.take(4, "magic") != MAGIC:
            raise InputError("GGUF", expected="the bytes GGUF at the start", got="others", where=self.where)
        version = self.u32("version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            got = "a big-endian file" if swapped else f"version {version}"
            raise self.fail("GGUF version", "2 or 3, little-endian", got, "convert the file with a current tool")
        n_tensors, n_pairs = self.u64("tensor count"), self.u64("pair count")
        self.need(n_pairs * MIN_PAIR, f"{n_pairs} metadata pairs")
        metadata: dict[str, Any] = {}
        for _ in range(n_pairs):
            key = self.string("metadata key", MAX_NAME)
            if key in metadata:
                raise self.fail(key, "each key once", "it again", "the file is damaged")
            metadata[key] = self.value(self.u32(key), key, 0)
        self.need(n_tensors * MIN_INFO, f"{n_tensors} tensor infos")
        alignment = metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise self.fail("general.alignment", "a multiple of 8", repr(alignment))
        tensors: dict[str, GgufTensor] = {}
        for _ in range(n_tensors):
            tensor = self.tensor(alignment)
            if tensor.name in tensors:
                raise self.fail(tensor.name, "each tensor once", "it again", "the file is damaged")
            tensors[tensor.name] = tensor
        return GgufHeader(version, metadata, tuple(tensors.values()), self.at)

    def value(self, kind: int, key: str, depth: int) -> Any:
        """Read one value; a long string or array is skipped and counts as absent (None)."""
        if kind in _SCALARS:
            code = "<" + _SCALARS[kind]
            return struct.unpack(code, self.take(struct.calcsize(code), key))[0]
        if kind == _STRING:
            n = self.u64(key)
            if n > KEEP_STRING:
                self.skip(n, key)
                return None
            return self.take(n, key).decode("utf-8", "replace")
        if kind != _ARRAY:
            raise self.fail(key, "a value type of 0 to 12", str(kind), "the file is damaged or newer than this reader")
        if depth >= MAX_ARRAY_DEPTH:
            raise self.fail(key, f"arrays nested at most {MAX_ARRAY_DEPTH} deep", "deeper ones")
        item, n = self.u32(key), self.u64(key)
        if item in _SCALARS:
            code = _SCALARS[item]
            width = struct.calcsize("<" + code)
            if n > KEEP_ITEMS:
                self.skip(n * width, key)
                return None
            return list(struct.unpack(f"<{n}{code}", self.take(n * width, key)))
        self.need(n * (12 if item == _ARRAY else 8), f"{n} elements of {key}")
        if n <= KEEP_ITEMS:
            return [self.value(item, key, depth + 1) for _ in range(n)]
        for _ in range(n):  # a vocabulary: step over it without keeping it
            if item == _STRING:
                self.skip(self.u64(key), key)
            else:
                self.value(item, key, depth + 1)
        return None

    def tensor(self, alignment: int) -> GgufTensor:
        name = self.string("tensor name", MAX_NAME)
        n_dims = self.u32(name)
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fail(name, f"1 to {MAX_DIMS} dimensions", str(n_dims), "the file is damaged")
        shape = tuple(self.u64(name) for _ in range(n_dims))
        number, offset = self.u32(name), self.u64(name)
        total = 1
        for n in shape:
            total *= n
        if not 0 < total < 1 << 48:
            raise self.fail(name, "sizes of 1 or more, below 2**48 elements", str(list(shape)), "the file is damaged")
        if number not in TYPES:
            raise self.fail(
                name, "a known tensor type", str(number), "types of forks are not supported; known: " + ", ".join(TYPES.values())
            )
        stored = get_format(TYPES[number])
        if shape[0] % stored.block:
            raise self.fail(name, f"rows of a multiple of {stored.block} ({stored.name})", str(shape[0]), "the file is damaged")
        if offset % alignment:
            raise self.fail(name, f"an offset that is a multiple of {alignment}", str(offset), "the file is damaged")
        return GgufTensor(name, shape, stored, offset, stored.bytes_for(total // shape[0], shape[0]))
