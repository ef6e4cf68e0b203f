"""Owns arrays in files: .npy, .npz, safetensors and torch's .pt, none of them ever unpickled freely.

It must not know what the arrays mean. A declared shape must agree with the bytes that are there before memory is taken. .pt files go
through ``torch.load(weights_only=True)``, torch's own restricted reader, and need torch.
"""

from __future__ import annotations

import importlib
import io
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.trace import MAX_TRACE_BYTES
from moesim.trace_formats.source import Source, is_whole

NPY_MAGIC = b"\x93NUMPY"
_SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U16": "<u2", "U8": "u1"}
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_ZIP_ERRORS = (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, KeyError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


def read_npy(data: bytes, name: str, where: str) -> NDArray[Any]:
    """Read one .npy file of plain numbers or text from memory."""
    file = io.BytesIO(data)
    shape, fortran, dtype = _header(file, name, where)
    size = math.prod(shape) * dtype.itemsize
    have = len(data) - file.tell()
    if size != have:
        raise InputError(
            name, expected=f"{size} bytes for {dtype} {shape}", got=f"{have} bytes", fix="the file is cut off or damaged", where=where
        )
    if not size:
        return np.zeros(shape, dtype)
    return np.frombuffer(data, dtype=dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def _header(file: Any, name: str, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        shape, fortran, dtype = _READERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # numpy parses the header as Python text: a damaged one can raise nearly anything
        got = str(error)[:120] or type(error).__name__
        raise InputError(name, expected="an array in .npy format 1.0 or 2.0", got=got, where=where) from None
    if dtype.hasobject or dtype.fields:
        raise InputError(name, expected="plain numbers", got="Python objects or records", fix="save it without pickle", where=where)
    if not dtype.isnative:
        dtype = dtype.newbyteorder("=") if dtype.itemsize == 1 else dtype
    return shape, fortran, dtype


@lru_cache(maxsize=2)
def zip_names(source: Source) -> tuple[str, ...]:
    """Return the member names of a zip file, or none if it is no zip or a damaged one."""
    if source.data[:2] != b"PK":
        return ()
    try:
        with zipfile.ZipFile(io.BytesIO(source.data)) as archive:
            return tuple(archive.namelist())
    except _ZIP_ERRORS:
        return ()


def npz_headers(source: Source) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name to (shape, kind letter of the type) of an .npz, as far as they can be read; for sniffing."""
    out: dict[str, tuple[tuple[int, ...], str]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(source.data)) as archive:
            for info in archive.infolist():
                with archive.open(info) as file:
                    shape, _, dtype = _header(file, info.filename, source.where)
                    out[info.filename.removesuffix(".npy")] = (shape, dtype.kind)
    except (InputError, *_ZIP_ERRORS):
        pass
    return out


def read_npz(source: Source) -> dict[str, NDArray[Any]]:
    """Read every array of an .npz, in the file's order."""
    out: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(source.data)) as archive:
            declared = sum(info.file_size for info in archive.infolist())
            if declared > MAX_TRACE_BYTES:
                raise source.fail("arrays", f"at most {MAX_TRACE_BYTES} bytes uncompressed", f"{declared} bytes declared")
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name in out:
                    raise source.fail(name, "each array once", "it again")
                out[name] = read_npy(archive.read(info), name, source.where)
    except InputError:
        raise
    except (*_ZIP_ERRORS, MemoryError) as error:
        raise source.fail("arrays", "an undamaged .npz file", str(error) or type(error).__name__) from None
    if not out:
        raise source.fail("arrays", "at least one array", "none")
    return out


def is_safetensors(source: Source) -> bool:
    """Whether the file begins like safetensors: the length of a JSON header that fits the file, and its brace."""
    return source.size > 10 and int.from_bytes(source.data[:8], "little") <= source.size - 8 and source.data[8:9] == b"{"


def read_safetensors(source: Source) -> dict[str, NDArray[Any]]:
    """Read every tensor of a safetensors file (u64 length, JSON of name to dtype, shape, data_offsets, then the bytes); BF16 becomes float32."""
    length = int.from_bytes(source.data[:8], "little")
    if length > source.size - 8:
        raise source.fail_byte(0, "header length", f"at most {source.size - 8}", str(length))
    try:
        header = json.loads(source.data[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, RecursionError, AttributeError) as error:
        raise source.fail_byte(8, "header", "a JSON object", str(error)) from None
    out: dict[str, NDArray[Any]] = {}
    used = 0
    for name, entry in entries.items():
        if not isinstance(entry, Mapping) or entry.get("dtype") not in _SAFETENSORS:
            known = ", ".join(_SAFETENSORS)
            raise source.fail_byte(8, name, f"a dtype of {known}", repr(entry)[:80])
        shape, span = entry.get("shape"), entry.get("data_offsets")
        if not isinstance(shape, list) or len(shape) > 8 or not all(is_whole(n, high=2**40) for n in shape):
            raise source.fail_byte(8, name, "a shape", repr(shape))
        if not isinstance(span, list) or len(span) != 2 or not all(is_whole(n, high=2**62) for n in span):
            raise source.fail_byte(8, name, "data_offsets of two numbers", repr(span))
        dtype = np.dtype(_SAFETENSORS[entry["dtype"]])
        size, begin = math.prod(shape) * dtype.itemsize, 8 + length + span[0]
        if span[1] - span[0] != size or 8 + length + span[1] > source.size:
            got = f"bytes {span[0]} to {span[1]} of {source.size - 8 - length}"
            raise source.fail_byte(begin, name, f"{size} bytes within the file for {entry['dtype']} {shape}", got)
        array = np.frombuffer(source.data, dtype=dtype, count=math.prod(shape), offset=begin).reshape(shape)
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        out[name], used = array, used + size
    if used != source.size - 8 - length:
        raise source.fail_byte(8 + length, "tensors", f"{source.size - 8 - length} bytes in all", f"{used} bytes described")
    return out


def read_torch(source: Source) -> Any:
    """Read a .pt file with torch's restricted reader; tensors become NumPy arrays.

    Raises
    ------
    InputError
        If torch is not installed, or the file is damaged or holds anything but plain data and tensors.
    """
    if not zip_names(source):
        raise source.fail(
            "torch file", "a zip, as torch.save writes it since 1.6", "a damaged zip or another file", "the file is cut off or damaged"
        )
    with zipfile.ZipFile(io.BytesIO(source.data)) as archive:
        declared = sum(info.file_size for info in archive.infolist())
        if declared > MAX_TRACE_BYTES:
            raise source.fail("torch file", f"at most {MAX_TRACE_BYTES} bytes uncompressed", f"{declared} bytes declared")
        try:
            damaged = archive.testzip()
        except _ZIP_ERRORS as error:
            damaged = str(error) or type(error).__name__
        if damaged:
            raise source.fail("torch file", "an undamaged zip", f"{damaged} damaged", "the file is cut off or damaged")
    try:
        torch = importlib.import_module("torch")  # an optional extra, and slow to import
    except ImportError:
        fix = "pip install 'moesim[validate]' (torch), or save the arrays as .npz where the file was recorded"
        raise source.fail("torch", "torch, to read .pt files", "no torch in this environment", fix) from None
    try:
        return _plain(torch.load(io.BytesIO(source.data), map_location="cpu", weights_only=True), torch, 0)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle stream can raise nearly anything, also in torch's reader
        raise source.fail(
            "torch file", "plain data and tensors (weights_only)", str(error).split("\n")[0][:120] or type(error).__name__
        ) from None


def _plain(value: Any, torch: Any, depth: int) -> Any:
    if depth > 16:
        raise ValueError("nested more than 16 deep")
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()
    if isinstance(value, dict):
        return {key: _plain(item, torch, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, torch, depth + 1) for item in value]
    return value
