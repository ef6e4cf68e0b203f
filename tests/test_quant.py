"""Quantisers: bytes and values of every format, clipping, activation-aware scales, low-rank corrections; each does what it claims on known matrices."""

from __future__ import annotations

import numpy as np
import pytest

from moesim.precision import FORMATS

torch = pytest.importorskip("torch", reason="quantisers need torch: pip install 'moesim[capture]'")

from moesim.quant.clip import clipped_ranges  # noqa: E402
from moesim.quant.grid import full_ranges, pack_bits, rounded, unpack_bits  # noqa: E402
from moesim.quant.lowrank import correction  # noqa: E402
from moesim.quant.packing import DECODED_FORMATS, REAL_FORMATS, pack, packed_layout, random_packed, view  # noqa: E402
from moesim.quant.scaling import best_scale  # noqa: E402

INTEGERS = [name for name in (*REAL_FORMATS, *DECODED_FORMATS) if FORMATS[name].kind == "int"]


def weights(rows: int = 32, cols: int = 256, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.standard_normal((rows, cols)) * rng.lognormal(size=(rows, 1)), dtype=torch.float32)


def back(name: str, w: torch.Tensor, ranges: object = None) -> torch.Tensor:
    return view(pack(w, FORMATS[name], ranges), packed_layout(FORMATS[name], *w.shape)).dequantise()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*REAL_FORMATS, *DECODED_FORMATS])
def test_bytes_are_the_formats_and_stand_for_the_rounded_weights(name: str) -> None:
    w = weights()
    assert pack(w, FORMATS[name]).numel() == FORMATS[name].bytes_for(*w.shape)
    if FORMATS[name].kind == "int":
        assert torch.equal(back(name, w), rounded(w, FORMATS[name]))


@pytest.mark.parametrize(("name", "levels"), [("int4-g64", 15), ("int3-g64", 7), ("int2-g64", 3), ("int8-g64", 254)])
def test_group_formats_are_within_half_a_step(name: str, levels: int) -> None:
    w = weights()
    w[0, :64] = 0  # an empty group
    w[1, :64] = w[1, :64].abs() + 1  # one that is far from 0: its range must still hold 0
    low, high = full_ranges(w, FORMATS[name])
    span = 2 * torch.maximum(-low, high) if levels == 254 else high.clamp(min=0) - low.clamp(max=0)
    off = (back(name, w) - w).reshape(32, 4, 64).abs().amax(2)
    assert bool((off <= span / levels * (0.5 + 2**-9 * levels) + 1e-6).all())
    assert bool((back(name, w)[0, :64] == 0).all())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bits_are_packed_without_gaps(bits: int) -> None:
    steps = torch.from_numpy(np.random.default_rng(bits).integers(0, 2**bits, (3, 5, 64)))
    data = pack_bits(steps, bits)
    assert data.shape == (3, 5, 64 * bits // 8) and torch.equal(unpack_bits(data, bits).long(), steps)
    first = sum(int(v) << (bits * i) for i, v in enumerate(steps[0, 0, :8].tolist()))
    assert data[0, 0, :bits].tolist() == list(first.to_bytes(bits, "little"))


@pytest.mark.parametrize("name", ["int3-g64", "int4-g32", "int8-g128"])
def test_columns_that_do_not_fill_a_group(name: str) -> None:
    w = weights(7, 200)
    assert pack(w, FORMATS[name]).numel() == FORMATS[name].bytes_for(7, 200)
    assert back(name, w).shape == (7, 200)
    assert float((back(name, w) - w).abs().mean() / w.abs().mean()) < 0.3


@pytest.mark.parametrize("name", DECODED_FORMATS)
def test_products_of_decoded_formats(name: str) -> None:
    layout = packed_layout(FORMATS[name], 48, 256)
    packed = view(torch.from_numpy(random_packed(np.random.default_rng(0), layout)), layout)
    x = torch.tensor(np.random.default_rng(1).standard_normal((3, 256))).bfloat16()
    exact = x.double() @ packed.dequantise().double().t()
    assert float((packed.matmul(x).double() - exact).abs().max() / exact.abs().max()) < 2**-6


@pytest.mark.parametrize("name", INTEGERS)
def test_clipping_never_adds_squared_error(name: str) -> None:
    w = weights()
    w[:, 7] *= 6  # an outlier in each row
    importance = torch.ones(256)
    importance[7] = 0  # which never meets an activation
    for weigh in (None, importance):
        count = torch.ones(256) if weigh is None else weigh
        plain = ((back(name, w) - w).square() * count).sum()
        clipped = ((back(name, w, clipped_ranges(w, FORMATS[name], weigh)) - w).square() * count).sum()
        assert float(clipped) <= float(plain) * (1 + 1e-6)
    if name.startswith(("int2", "int3")):
        assert float(clipped) < 0.9 * float(plain)  # an outlier that does not count is cut off


def test_scaling_protects_channels_with_large_activations() -> None:
    w, squares = weights(), torch.ones(256)
    squares[:8] = 400.0
    form = FORMATS["int3-g64"]
    scale = best_scale([(w, form, squares)], squares, torch.arange(256))
    assert float(scale[:8].min()) > float(scale[8:].max())
    assert float(scale.log().mean().abs()) < 1e-5
    error = [float(((rounded(w * s, form) / s - w).square() * squares).sum()) for s in (torch.ones(256), scale)]
    assert error[1] < 0.7 * error[0]


def test_scaling_that_does_not_help_is_left_out() -> None:
    assert torch.equal(best_scale([(weights(), FORMATS["bf16"], torch.rand(256))], torch.rand(256), torch.arange(256)), torch.ones(256))


def test_channels_of_one_maker_get_one_factor() -> None:
    """Two query heads read each value head: four makers' channels, eight inputs."""
    made_by = torch.arange(4).reshape(2, 2).repeat_interleave(2, 0).reshape(-1)
    assert made_by.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    squares = torch.tensor([100.0, 1, 100, 1, 1, 1, 1, 1])
    scale = best_scale([(weights(16, 8), FORMATS["int2-g64"], squares)], squares, made_by)
    assert scale.shape == (4,) and float(scale[0]) >= float(scale[1:].max())


def test_correction_is_the_best_of_its_rank() -> None:
    rng = torch.Generator().manual_seed(0)
    squares = torch.rand(64, generator=rng) + 0.1
    exact = torch.randn(32, 2, generator=rng) @ torch.randn(2, 64, generator=rng)
    a, b = correction(exact, squares, 2)
    assert a.shape == (2, 64) and b.shape == (32, 2)
    assert torch.allclose(b @ a, exact, atol=1e-4)  # an error of rank 2 is gone
    noise = torch.randn(32, 64, generator=rng)
    left = [float(((noise - (lambda p: p[1] @ p[0])(correction(noise, squares, r))).square() * squares).sum()) for r in (1, 4, 32)]
    assert left[0] > left[1] > left[2] and left[2] < 1e-6
    sizes = torch.linalg.svdvals(noise * squares.sqrt())
    assert left[1] == pytest.approx(float(sizes[4:].square().sum()), rel=1e-3)  # Eckart-Young
    wide_a, wide_b = correction(noise[:3], squares, 8)  # a rank above what there is
    assert torch.allclose(wide_b @ wide_a, noise[:3], atol=1e-4)
