"""Owns rounding: the values that a format can hold in each group of a matrix, the nearest of them, and bits without gaps.

A group is ``Format.block`` columns of one row, or the whole row where a format has one scale a row. Its values are q scale + offset:

- ``int4-g*-torch``: q of -8 to 7; scale and offset are bf16, the layout of torch's kernel.
- ``int2-`` to ``int4-g*``: q of 0 to 2**b - 1; scale is fp16 and offset is -zero scale with a whole zero of 0 to 255: 0 is always a value.
- ``int8-g*``: q of -127 to 127, an fp16 scale. ``int8``: the same for a whole row, its scale in bf16.

It must not know bytes in files, models or activations. It needs torch, which is optional.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesim.precision import Format

Ranges = tuple[Tensor, Tensor]
"""Least and greatest value that each group is to reach, two (N, G) float32."""

_LEAST = {torch.bfloat16: torch.finfo(torch.bfloat16).tiny, torch.float16: torch.finfo(torch.float16).tiny}  # scales stay normal numbers


@dataclass(frozen=True, slots=True)
class Grid:
    """The values of each group, as stored: (N, G) scale, offset and (where whole zeros are stored) zero; q from ``least`` to ``most``."""

    scale: Tensor
    offset: Tensor
    zero: Tensor
    least: int
    most: int


def bits_of(format: Format) -> int:
    """Bits of one value, of an integer format."""
    return int(format.name[3])


def group_size(format: Format, cols: int) -> int:
    """Columns that share a scale."""
    return cols if format.row_bytes else format.block


def grouped(weight: Tensor, format: Format) -> Tensor:
    """Return a matrix (N, K) as (N, G, columns of a group), the last group filled up with zeros."""
    rows, cols = weight.shape
    group = group_size(format, cols)
    return torch.nn.functional.pad(weight, (0, -cols % group)).reshape(rows, -1, group)


def full_ranges(weight: Tensor, format: Format) -> Ranges:
    """Return the range of each group: nothing is clipped."""
    groups = grouped(weight, format)
    return groups.amin(2), groups.amax(2)


def grid(format: Format, ranges: Ranges) -> Grid:
    """Return the values that span given ranges, scales and offsets rounded to what is stored."""
    low, high = ranges
    bits = bits_of(format)
    if format.name.endswith("-torch"):
        scale = _stored((high - low) / 15, torch.bfloat16)
        # the middle of the range, half a step above the value of q = 8, keeps the clamped error even at both ends
        offset = ((low + high + scale) / 2).to(torch.bfloat16).float()
        return Grid(scale, offset, torch.zeros_like(scale), -8, 7)
    if bits == 8:
        kind = torch.bfloat16 if format.row_bytes else torch.float16
        scale = _stored(torch.maximum(-low, high) / 127, kind)
        return Grid(scale, torch.zeros_like(scale), torch.zeros_like(scale), -127, 127)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _stored((high - low) / (2**bits - 1), torch.float16)
    zero = (-low / scale).round().clamp(0, 255)
    return Grid(scale, -zero * scale, zero, 0, 2**bits - 1)


def _stored(scale: Tensor, kind: torch.dtype) -> Tensor:
    return scale.clamp(min=_LEAST[kind]).to(kind).float()


def nearest_steps(groups: Tensor, to: Grid) -> Tensor:
    """Return q of each value of a ``grouped`` matrix, (N, G, columns of a group) float32."""
    return ((groups - to.offset[..., None]) / to.scale[..., None]).round().clamp(to.least, to.most)


def values(steps: Tensor, of: Grid, cols: int) -> Tensor:
    """Return the (N, K) float32 weights that steps of a grid stand for."""
    return (steps * of.scale[..., None] + of.offset[..., None]).reshape(len(steps), -1)[:, :cols]


def rounded(weight: Tensor, format: Format, ranges: Ranges | None = None) -> Tensor:
    """Return a matrix as an integer format holds it, (N, K) float32."""
    to = grid(format, full_ranges(weight, format) if ranges is None else ranges)
    return values(nearest_steps(grouped(weight, format), to), to, weight.shape[1])


def pack_bits(steps: Tensor, bits: int) -> Tensor:
    """Return values of ``bits`` bits (..., n) as bytes without gaps, the lowest bits first: (..., n bits / 8) uint8."""
    single = (steps.to(torch.uint8)[..., None] >> torch.arange(bits, dtype=torch.uint8)) & 1
    octets = single.reshape(*steps.shape[:-1], -1, 8)
    return (octets << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_bits(data: Tensor, bits: int) -> Tensor:
    """Undo ``pack_bits``: (..., n bits / 8) uint8 to (..., n) float32."""
    single = ((data[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).reshape(*data.shape[:-1], -1, bits)
    return (single << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8).float()
