"""Packing: bytes as the format says, errors within half a step, products as with the weights that the bytes stand for."""

from __future__ import annotations

import numpy as np
import pytest

from moesim.errors import InputError
from moesim.precision import FORMATS, Format

torch = pytest.importorskip("torch", reason="real kernels need torch: pip install 'moesim[validate]'")

from moesim.quant.packing import REAL_FORMATS, pack, packed_layout, random_packed, view  # noqa: E402

SHAPES = [(16, 128), (48, 256), (128, 128)]
INT4 = [name for name in REAL_FORMATS if name.startswith("int4")]


def weights(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Rows of unlike size, off centre, with an all-equal group and an all-zero row."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, cols)) * rng.lognormal(size=(rows, 1)) * 0.02 + 0.005
    w[0, :128] = 0.3
    w[1] = 0
    return torch.tensor(w, dtype=torch.float32)


@pytest.mark.parametrize("rows,cols", SHAPES)
@pytest.mark.parametrize("name", REAL_FORMATS)
def test_bytes_are_those_of_the_format(name: str, rows: int, cols: int) -> None:
    layout = packed_layout(FORMATS[name], rows, cols)
    packed = pack(weights(rows, cols), FORMATS[name])
    drawn = random_packed(np.random.default_rng(0), layout)
    assert packed.numel() == drawn.size == layout.n_bytes == FORMATS[name].bytes_for(rows, cols)
    seen = view(packed, layout)
    parts = seen.values.numel() * seen.values.element_size() + seen.scales.numel() * seen.scales.element_size()
    assert parts == layout.n_bytes


@pytest.mark.parametrize("rows,cols", SHAPES)
@pytest.mark.parametrize("name", INT4)
def test_int4_is_within_half_a_step(name: str, rows: int, cols: int) -> None:
    group = FORMATS[name].block
    w = weights(rows, cols)
    back = view(pack(w, FORMATS[name]), packed_layout(FORMATS[name], rows, cols)).dequantise()
    grouped, got = (x.reshape(rows, -1, group) for x in (w, back))
    step = (grouped.amax(2) - grouped.amin(2)) / 15
    # bf16 keeps 8 bits: the scale is off by up to 2**-9 of itself, over 8 steps, and the zero by 2**-9 of itself
    bound = step * (0.5 + 10 * 2**-9) + grouped.abs().amax(2) * 2**-8 + 1e-30
    assert bool(((grouped - got).abs().amax(2) <= bound).all())
    assert float((w - back).abs().mean()) < float(step.mean()) / 3


@pytest.mark.parametrize("rows,cols", SHAPES)
def test_int8_is_within_half_a_step(rows: int, cols: int) -> None:
    w = weights(rows, cols)
    back = view(pack(w, FORMATS["int8"]), packed_layout(FORMATS["int8"], rows, cols)).dequantise()
    step = w.abs().amax(1, keepdim=True) / 127
    assert bool(((w - back).abs() <= step * (0.5 + 2**-8) + 1e-30).all())


def test_bf16_is_torch_rounding() -> None:
    w = weights(16, 128)
    assert torch.equal(view(pack(w, FORMATS["bf16"]), packed_layout(FORMATS["bf16"], 16, 128)).dequantise(), w.bfloat16().float())


def test_int4_against_a_matrix_that_it_holds_exactly() -> None:
    """Every value of q at a known place: catches a wrong order of values, groups or scales."""
    rows, cols, group = 32, 128, 32
    q = torch.arange(rows * cols).reshape(rows, cols) * 7 % 16
    q[:, ::group], q[:, 1::group] = 0, 15
    scale = 2.0 ** -(1 + torch.arange(rows)[:, None] % 5 + torch.arange(cols)[None] // group)
    zero = scale * 0.5  # a range of -7.5 to 7.5 steps
    w = (q - 8) * scale + zero
    layout = packed_layout(FORMATS["int4-g32-torch"], rows, cols)
    packed = view(pack(w, FORMATS["int4-g32-torch"]), layout)
    assert torch.equal(packed.dequantise(), w)
    assert torch.equal(packed.matmul(torch.eye(cols, dtype=torch.bfloat16)).float(), w.t().bfloat16().float())


@pytest.mark.parametrize("tokens", [1, 3, 4, 17])
@pytest.mark.parametrize("name", REAL_FORMATS)
def test_product_is_that_of_the_dequantised_weights(name: str, tokens: int) -> None:
    layout = packed_layout(FORMATS[name], 96, 256)
    packed = view(pack(weights(96, 256), FORMATS[name]), layout)
    x = torch.tensor(np.random.default_rng(tokens).standard_normal((tokens, 256))).bfloat16()
    exact = x.double() @ packed.dequantise().double().t()
    error = (packed.matmul(x).double() - exact).abs().max() / exact.abs().max()
    assert float(error) < 2**-7


@pytest.mark.parametrize("name", REAL_FORMATS)
def test_drawn_weights_keep_the_scale_of_activations(name: str) -> None:
    layout = packed_layout(FORMATS[name], 256, 512)
    one, same, other = (random_packed(np.random.default_rng(seed), layout) for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    w = view(torch.from_numpy(one), layout).dequantise()
    assert bool(torch.isfinite(w).all())
    assert abs(float(w.mean())) < 1e-3
    spread = float(w.std()) * 512**0.5
    assert 0.98 < spread < 1.02 if name != "bf16" else 0.7 < spread < 1.42


def test_views_do_not_copy() -> None:
    layout = packed_layout(FORMATS["int8"], 16, 32)
    buffer = pack(weights(16, 128)[:, :32].contiguous(), FORMATS["int8"])
    packed = view(buffer, layout)
    buffer[0] = 77
    assert int(packed.values[0, 0]) == 77
    assert packed.values.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize(
    "name,rows,cols,words",
    [
        ("Q4_K", 256, 256, "one with a real kernel"),
        ("nf4", 128, 128, "it can be simulated, not run"),
        ("int4-g128-torch", 24, 128, "multiples of 16"),
        ("int4-g128-torch", 16, 192, "multiples of 128"),
        ("int8", 16, 40, "inputs in multiples of 16"),
        ("bf16", 0, 8, "0 outputs"),
    ],
)
def test_refused_shapes_and_formats(name: str, rows: int, cols: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        packed_layout(FORMATS[name], rows, cols)


def test_a_format_of_another_size_under_a_known_name_is_refused() -> None:
    with pytest.raises(InputError, match="real kernel"):
        packed_layout(Format("int8", 1, 1, "int", "int8", row_bytes=4), 16, 32)


def test_refused_weights_and_buffers() -> None:
    with pytest.raises(InputError, match="finite"):
        pack(torch.full((16, 32), float("nan")), FORMATS["bf16"])
    with pytest.raises(InputError, match="matrix"):
        pack(torch.zeros(16), FORMATS["bf16"])
    layout = packed_layout(FORMATS["int8"], 16, 32)
    for wrong in (torch.zeros(layout.n_bytes - 1, dtype=torch.uint8), torch.zeros(layout.n_bytes, dtype=torch.int8)):
        with pytest.raises(InputError, match="contiguous uint8"):
            view(wrong, layout)
