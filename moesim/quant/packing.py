"""Owns how expert weights lie in memory for torch's weight-only kernels on CPUs, and the products with them.

A packed matrix is one run of bytes: the values, then the scales. Its size is exactly ``Format.bytes_for``, and torch reads it where it
lies, so what a disk read delivers is multiplied without a copy or a conversion. Matrices are N outputs by K inputs.

- ``int4-g32-torch``, ``-g64-``, ``-g128-``: the N K / 2 bytes of ``_convert_weight_to_int4pack_for_cpu``, whose order depends on the vector
  unit (``cpu_capability``), then (K / group, N, 2) bf16 of scale and zero. A weight is (q - 8) scale + zero with q of 0 to 15.
- ``int8``: (N, K) int8, then (N,) bf16 scales. A weight is q scale with q of -127 to 127.
- ``bf16``: (N, K) bf16.
- ``DECODED_FORMATS``, for which torch has no kernel on CPUs: ``fp16``, ``fp32``, and the group-wise integers of ``grid.py`` as (N, G, bytes) of
  values without gaps, then (N, G) fp16 scales and (N, G) uint8 zeros (not for 8 bits). A product turns the matrix into bf16 first, every time.

torch's own sources (aten/src/ATen/native/LinearAlgebra.cpp and native/cpu/int4mm_kernel.cpp, int8mm_kernel.cpp) define these layouts. It
must not know models, files or experts. It needs torch, which is optional.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesim.errors import InputError
from moesim.precision import FORMATS, Format

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise InputError(
        "torch", expected="an installed package, to run real experts", got=str(error)[:120], fix="pip install 'moesim[validate]'"
    ) from None

from moesim.quant.grid import Ranges, bits_of, full_ranges, grid, grouped, nearest_steps, pack_bits, unpack_bits

REAL_FORMATS = ("int4-g32-torch", "int4-g64-torch", "int4-g128-torch", "int8", "bf16")
"""Names of the formats that have a kernel here."""
DECODED_FORMATS = ("fp16", "fp32", *(f"int{bits}-g{group}" for bits in (8, 4, 3, 2) for group in (32, 64, 128)))
"""Names of the formats that are decoded before they are multiplied."""

_INT4_ROWS = 16  # torch packs whole blocks of this many rows, and refuses others
_INT8_COLS = 16  # the kernel reads this many columns at a time without a remainder; torch 2.13 crashes on others
_INT4_VARIANCE = (16**2 - 1) / 12  # of an integer drawn evenly from 16 values
_INT8_VARIANCE = (256**2 - 1) / 12
_BF16_VARIANCE = 7 / 3  # of +-m with m drawn evenly from [1, 2)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the values and scales of one packed matrix lie; made by ``packed_layout``.

    Parameters
    ----------
    format : Format
        One of ``REAL_FORMATS`` or ``DECODED_FORMATS``.
    rows, cols : int
        N outputs and K inputs.
    n_bytes : int
        Size of the packed matrix, scales included.
    """

    format: Format
    rows: int
    cols: int
    n_bytes: int

    @property
    def kernel(self) -> str:
        """``"int4"``, ``"int8"``, ``"bf16"``, or ``"decode"`` where there is none."""
        return "decode" if self.format.name in DECODED_FORMATS else self.format.name.partition("-")[0]

    @property
    def value_bytes(self) -> int:
        """Bytes of the values; the scales follow them."""
        if self.kernel == "decode":
            return self.n_bytes
        return self.rows * self.cols * {"int4": 1, "int8": 2, "bf16": 4}[self.kernel] // 2


def packed_layout(format: Format, rows: int, cols: int) -> PackedLayout:
    """Return the layout of an (N, K) matrix.

    Parameters
    ----------
    format : Format
        The format, one of ``REAL_FORMATS`` or ``DECODED_FORMATS``.
    rows, cols : int
        N outputs and K inputs.

    Raises
    ------
    InputError
        If the format has no real kernel, or the kernel cannot take that shape.
    """
    if format.name not in REAL_FORMATS + DECODED_FORMATS or format != FORMATS[format.name]:
        real = ", ".join(REAL_FORMATS)
        raise InputError("format", expected=f"one with a real kernel: {real}", got=f'"{format.name}"', fix="it can be simulated, not run")
    layout = PackedLayout(format, rows, cols, format.bytes_for(rows, cols))
    needs = {
        "int4": (_INT4_ROWS, format.block),
        "int8": (1, _INT8_COLS),
        "bf16": (1, 1),
        "decode": (1, 1),
    }[layout.kernel]
    if rows < 1 or cols < 1 or rows % needs[0] or cols % needs[1]:
        expected = f"outputs in multiples of {needs[0]} and inputs in multiples of {needs[1]} for {format.name}"
        raise InputError("matrix", expected=expected, got=f"{rows} outputs x {cols} inputs", fix="choose another group size or format")
    return layout


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed matrix as views into its bytes; made by ``view``.

    Parameters
    ----------
    layout : PackedLayout
        Shape and format.
    values : Tensor
        int4: (N, K / 2) uint8 in torch's order; int8: (N, K) int8; bf16: (N, K) bf16; decode: all bytes.
    scales : Tensor
        int4: (K / group, N, 2) bf16 of scale and zero; int8: (N,) bf16; bf16, decode: empty.
    """

    layout: PackedLayout
    values: Tensor
    scales: Tensor

    def matmul(self, x: Tensor) -> Tensor:
        """Multiply activations by the transposed weights.

        Parameters
        ----------
        x : Tensor
            (T, K) bf16, contiguous.

        Returns
        -------
        Tensor
            (T, N) bf16.
        """
        kernel = self.layout.kernel
        out: Tensor
        if kernel == "int4":
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.values, self.layout.format.block, self.scales)
        elif kernel == "int8":
            out = torch.ops.aten._weight_int8pack_mm(x, self.values, self.scales)
        else:
            out = torch.nn.functional.linear(x, self.dequantise().to(torch.bfloat16) if kernel == "decode" else self.values)
        return out

    def dequantise(self) -> Tensor:
        """Return the weights that the packed bytes stand for, (N, K) float32, exact but for float32's own rounding."""
        if self.layout.kernel == "decode":
            return _decode(self.values, self.layout)
        if self.layout.kernel == "bf16":
            return self.values.float()
        if self.layout.kernel == "int8":
            return self.values.float() * self.scales.float()[:, None]
        rows, cols, group = self.layout.rows, self.layout.cols, self.layout.format.block
        plain = torch.zeros(cols // group, rows, 2, dtype=torch.bfloat16)
        plain[..., 0] = 1
        # with scales of 1 the products with unit vectors are the integers themselves, in whatever order torch keeps them
        integers: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(cols, dtype=torch.bfloat16), self.values, group, plain)
        grouped = integers.t().reshape(rows, cols // group, group).float()
        scales = self.scales.float().transpose(0, 1)  # (N, K / group, 2)
        weight: Tensor = grouped * scales[..., :1] + scales[..., 1:]
        return weight.reshape(rows, cols)


def view(buffer: Tensor, layout: PackedLayout) -> Packed:
    """See the bytes of a packed matrix as a matrix, without copying them.

    Parameters
    ----------
    buffer : Tensor
        (n_bytes,) uint8, contiguous and at an even offset of its storage.
    layout : PackedLayout
        What the bytes hold.

    Raises
    ------
    InputError
        If the buffer has another size or type.
    """
    if buffer.dtype != torch.uint8 or buffer.shape != (layout.n_bytes,) or not buffer.is_contiguous():
        expected = f"{layout.n_bytes:,} contiguous uint8"
        raise InputError("buffer", expected=expected, got=f"{tuple(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}")
    rows, cols = layout.rows, layout.cols
    values = buffer[: layout.value_bytes]
    if layout.kernel == "decode":
        return Packed(layout, values, values[:0])
    scales = buffer[layout.value_bytes :].view(torch.bfloat16)
    if layout.kernel == "int4":
        return Packed(layout, values.view(rows, cols // 2), scales.view(cols // layout.format.block, rows, 2))
    if layout.kernel == "int8":
        return Packed(layout, values.view(torch.int8).view(rows, cols), scales)
    return Packed(layout, values.view(torch.bfloat16).view(rows, cols), scales)


def pack(weight: Tensor, format: Format, ranges: Ranges | None = None) -> Tensor:
    """Quantise a matrix into its packed bytes: the nearest values of the grid that spans each group's range.

    Values are rounded against the scales as stored.

    Parameters
    ----------
    weight : Tensor
        (N, K) float32.
    format : Format
        One of ``REAL_FORMATS`` or ``DECODED_FORMATS``.
    ranges : (Tensor, Tensor), optional
        Least and greatest value to reach in each group, (N, G); by default those of the weights. Floats have none.

    Returns
    -------
    Tensor
        (n_bytes,) uint8.

    Raises
    ------
    InputError
        As ``packed_layout``, and for weights that are no matrix or not finite.
    """
    if weight.dim() != 2:
        raise InputError("weight", expected="a matrix (N, K)", got=f"shape {tuple(weight.shape)}")
    if not torch.isfinite(weight).all():
        raise InputError("weight", expected="finite numbers", got="inf or nan")
    rows, cols = weight.shape
    layout = packed_layout(format, rows, cols)
    if format.kind == "float":
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        return weight.to(kinds[format.name]).contiguous().view(torch.uint8).reshape(-1)
    weight = weight.float()
    to = grid(format, full_ranges(weight, format) if ranges is None else ranges)
    steps = nearest_steps(grouped(weight, format), to)
    if layout.kernel == "decode":
        return _encode(steps, format, to.scale, to.zero)
    out = torch.empty(layout.n_bytes, dtype=torch.uint8)
    packed = view(out, layout)
    if layout.kernel == "int8":
        packed.scales.copy_(to.scale[:, 0])
        packed.values.copy_(steps.reshape(rows, cols))
    else:
        packed.scales[..., 0].copy_(to.scale.t())
        packed.scales[..., 1].copy_(to.offset.t())
        q = (steps + 8).to(torch.int32).reshape(rows, cols).contiguous()
        packed.values.copy_(torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1))
    return out


def _encode(steps: Tensor, format: Format, scale: Tensor, zero: Tensor) -> Tensor:
    bits = bits_of(format)
    parts = [steps.to(torch.int8).view(torch.uint8) if bits == 8 else pack_bits(steps, bits), scale.to(torch.float16).view(torch.uint8)]
    if bits < 8:
        parts.append(zero.to(torch.uint8))
    return torch.cat([part.contiguous().reshape(-1) for part in parts])


def _decode(data: Tensor, layout: PackedLayout) -> Tensor:
    """The (N, K) float32 weights of a format without a kernel."""
    name, rows, cols = layout.format.name, layout.rows, layout.cols
    if name in ("fp16", "fp32"):
        return data.view(torch.float16 if name == "fp16" else torch.float32).reshape(rows, cols).float()
    bits, group = bits_of(layout.format), layout.format.block
    n = -(-cols // group)
    at = rows * n * group * bits // 8
    stored = data[:at].reshape(rows, n, -1)
    steps = stored.view(torch.int8).float() if bits == 8 else unpack_bits(stored, bits)
    scale = data[at : at + 2 * rows * n].view(torch.float16).reshape(rows, n, 1).float()
    if bits < 8:
        steps = steps - data[at + 2 * rows * n :].reshape(rows, n, 1).float()
    return (steps * scale).reshape(rows, -1)[:, :cols]


def random_packed(rng: np.random.Generator, layout: PackedLayout) -> NDArray[np.uint8]:
    """Draw a packed matrix directly, at the speed of the generator rather than of a quantiser.

    Weights have mean 0 and a standard deviation of 1 / sqrt(K) (bf16: within a factor of sqrt(2) of it), so that activations keep their scale.

    Parameters
    ----------
    rng : numpy Generator
        Where the values come from.
    layout : PackedLayout
        Shape and format.

    Returns
    -------
    (n_bytes,) uint8 array
    """
    if layout.kernel == "decode":
        drawn = torch.from_numpy(rng.standard_normal((layout.rows, layout.cols), np.float32)) / math.sqrt(layout.cols)
        return np.asarray(pack(drawn, layout.format).numpy())
    words = rng.integers(0, 1 << 64, -(-layout.n_bytes // 8), dtype=np.uint64)
    out = words.view(np.uint8)[: layout.n_bytes]
    if layout.kernel == "bf16":
        exponent = 127 + round(-math.log2(_BF16_VARIANCE * layout.cols) / 2)
        bits = out.view(np.uint16)
        bits &= np.uint16(0x807F)  # sign and mantissa stay drawn
        bits |= np.uint16(exponent << 7)
        return out
    packed = view(torch.from_numpy(out), layout)
    if layout.kernel == "int8":
        packed.scales.fill_(1 / math.sqrt(_INT8_VARIANCE * layout.cols))
    else:
        packed.scales.fill_(1 / math.sqrt(_INT4_VARIANCE * layout.cols))
        packed.scales[..., 1] /= 2  # the mean of q - 8 is -1/2
    return out


def cpu_capability() -> str:
    """Return the vector unit that torch's kernels use, on which the order of packed int4 values depends, e.g. ``"AVX512"``."""
    return str(torch.backends.cpu.get_cpu_capability())
