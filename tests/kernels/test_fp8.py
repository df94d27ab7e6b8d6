"""Tests of float8_e4m3fn in the kernels.

They compare conversions of each code with torch, rounding at the boundaries, and matmuls with float64."""

import pytest
import torch

from kernels.activation_quantized import ACTIVATION_QUANTIZED
from kernels.e4m3 import GROUP, MIN_AMAX, from_codes, rounded_rows, to_codes, to_e4m3
from kernels.fp8 import LIBRARY
from kernels.fp8_matmul import FP8_MATMUL, library_product
from kernels.jit import installed, jit, launch, tl
from kernels.quantize_rows import QUANTIZE_ROWS
from kernels.rms_norm_quantized import RMS_NORM_QUANTIZED

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES.view(torch.float8_e4m3fn).float()
BLOCK = 1024


@jit
def to_kernel(x, codes, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < size
    tl.store(codes + at, to_codes(tl.load(x + at, keep, 0.0)), keep)


@jit
def from_kernel(codes, x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < size
    tl.store(x + at, from_codes(tl.load(codes + at, keep, 0), x.dtype.element_ty), keep)


def coded(x):
    """Codes of float32 numbers, by the kernels."""
    x = x.contiguous().to(DEVICE)
    codes = torch.full(x.shape, 255, dtype=torch.uint8, device=DEVICE)
    launch(to_kernel, (-(-x.numel() // BLOCK),), x, codes, x.numel(), BLOCK=BLOCK)
    return codes.cpu()


def own_codes(x):
    """Return torch's codes. The clamp is needed because some torch releases do not saturate."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def steps(x, count):
    """Return the float32 values that are `count` representable values after x. x must not be negative."""
    return (x.view(torch.int32) + count).view(torch.float32)


def alike(got, want):
    """Any code of NaN is any other."""
    both = ((got & 0x7F) == 0x7F) & ((want & 0x7F) == 0x7F)
    return bool((both | (got == want)).all())


def test_every_number_between_two_codes_is_rounded_as_torch_rounds():
    """Test each code, each midpoint between codes, and their adjacent floats: all boundaries of rounding."""
    positive = NUMBERS[:0x7F]  # 0 to 448
    middles = (positive[:-1] + positive[1:]) / 2
    tried = torch.cat((positive, middles, torch.tensor([464.0, 480.0, 512.0, 1e30, torch.inf])))
    tried = torch.cat([tried, *(steps(tried[tried > 0], places) for places in (-2, -1, 1, 2))])
    tried = torch.cat((tried, -tried))
    assert alike(coded(tried), own_codes(tried))


def test_every_half_and_every_bfloat16_is_rounded_as_torch_rounds():
    """With all their NaN, infinities, zeros of both signs and subnormals."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for kind in (torch.float16, torch.bfloat16):
        wide = every.view(kind).float()
        assert alike(coded(wide), own_codes(wide))


def test_overflow_saturates_and_nan_is_kept():
    got = coded(torch.tensor([448.0, 463.9, 465.0, 1e9, torch.inf, -500.0, -torch.inf, torch.nan, -0.0]))
    assert got.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, got[7], 0x80] and int(got[7]) & 0x7F == 0x7F
    torch.testing.assert_close(to_e4m3(torch.tensor([1e9, -1e9])).float(), torch.tensor([448.0, -448.0]))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_every_code_is_decoded_as_in_torch(kind):
    got = torch.zeros(256, dtype=kind, device=DEVICE)
    launch(from_kernel, (1,), CODES.to(DEVICE), got, 256, BLOCK=BLOCK)
    torch.testing.assert_close(got.cpu().float(), NUMBERS, rtol=0, atol=0, equal_nan=True)


def ways(x, group):
    """Yield the rows rounded by each operation that rounds, with arguments that do not change them otherwise.

    For example relu of positive values, or a norm with weights that cancel it."""
    size = x.shape[1]
    yield QUANTIZE_ROWS(x, group)
    yield ACTIVATION_QUANTIZED(x.abs(), "relu", False, group)
    yield RMS_NORM_QUANTIZED(x, torch.ones(size, device=x.device), 1e-6, None, 1.0, group)


@pytest.mark.parametrize("group", [300, GROUP])
def test_zero_rows_have_a_nonzero_scale(group):
    for values, scales in ways(torch.zeros(2, 300, device=DEVICE), group):
        assert (values.float() == 0).all()
        assert (scales > 0).all() and scales.reciprocal().isfinite().all()


@pytest.mark.parametrize("group", [300, GROUP])
def test_quantization_error_is_at_most_half_a_step(group):
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 37
    values, scales = QUANTIZE_ROWS(x, group)
    back = values.float() * scales.repeat_interleave(group, 1)[:, :300]
    assert ((back - x).abs() <= x.abs() / 15.9 + scales.amax() * 2.0**-10).all()
    pieces = values.float().abs().split(group, 1)
    assert all((piece.amax(1) == 448).all() for piece in pieces)


def test_tiny_rows_stay_finite():
    """1 / scale of the least floats would be infinite."""
    x = torch.full((1, 64), 1e-40, device=DEVICE)
    values, scales = QUANTIZE_ROWS(x, 64)
    assert values.float().isfinite().all() and scales.item() == pytest.approx(MIN_AMAX / 448)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_affects_only_its_row(number):
    x = torch.ones(3, 64, device=DEVICE)
    x[1, 5] = number
    weight = to_e4m3(torch.ones(4, 64, device=DEVICE))
    values, scales = QUANTIZE_ROWS(x, 64)
    wanted = rounded_rows(x, 64)
    torch.testing.assert_close(values.float(), wanted[0].float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scales, wanted[1], rtol=0, atol=0)
    y = FP8_MATMUL(values, scales, weight, torch.ones(4, 1, device=DEVICE), 1, None, torch.float32)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


def drawn(rows, inputs, outputs, unit, group, seed=0):
    """Rows, weight and scales that are all different, and the scale of each number by itself."""
    draw = torch.Generator().manual_seed(seed)
    x, x_scales = rounded_rows(torch.randn(rows, inputs, generator=draw), group)
    weight = to_e4m3(torch.randn(outputs, inputs, generator=draw) * 60)
    scales = torch.rand(-(-outputs // unit), x_scales.shape[1], generator=draw) + 0.1
    return x, x_scales, weight, scales


def in_float64(x, x_scales, weight, scales, unit, group):
    """Number by number, from the definition."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    y = torch.zeros(rows, outputs, dtype=torch.float64)
    for at in range(inputs):
        of_x = x[:, at].double() * (1.0 if x_scales is None else x_scales[:, at // group].double())
        of_w = weight[:, at].double() * scales[torch.arange(outputs) // unit, at // group].double()
        y += of_x[:, None] * of_w[None, :]
    return y


@pytest.mark.parametrize(
    ("inputs", "outputs", "unit", "group"),
    [(129, 35, 1, 129), (384, 260, GROUP, GROUP), (300, 150, 32, GROUP), (130, 7, 1, GROUP), (128, 129, GROUP, GROUP)],
)
@pytest.mark.parametrize("rounded", [True, False])
def test_products_equal_sums_in_float64(inputs, outputs, unit, group, rounded):
    x, x_scales, weight, scales = drawn(5, inputs, outputs, unit, group)
    given = (x, x_scales) if rounded else (torch.randn(5, inputs, generator=torch.Generator().manual_seed(3)), None)
    want = in_float64(*given, weight, scales, unit, group)
    moved = (None if one is None else one.to(DEVICE) for one in (*given, weight, scales))
    got = FP8_MATMUL(*moved, unit, None, torch.float32).cpu().double()
    tolerance = 1e-6 if DEVICE == "cpu" else 2e-3  # sums on a GPU's matrix units have fewer bits
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("rows", [1, 5, 64, 129])
def test_library_product_equals_the_kernel(rows):
    """Compare with torch's scaled matmul, which on a GPU uses different kernels by release and number of rows."""
    if ON_GPU and torch.cuda.get_device_capability()[0] not in LIBRARY:
        pytest.skip("torch has no such product for this GPU")
    x, x_scales, weight, scales = (one.to(DEVICE) for one in drawn(rows, 512, 208, 1, 512))
    bias = torch.randn(208, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    for added in (None, bias):
        got = library_product(x, x_scales, weight, scales, added, torch.bfloat16)
        own = FP8_MATMUL(x, x_scales, weight, scales, 1, added, torch.float32)
        assert got.shape == own.shape and got.dtype == torch.bfloat16
        assert (got.float() - own).abs().max() <= own.abs().max() / 128


def test_scales_of_a_wrong_shape_are_rejected():
    x, x_scales, weight, scales = drawn(2, 300, 150, GROUP, GROUP)
    with pytest.raises(ValueError, match="x_scales"):
        FP8_MATMUL(x, x_scales[:, :1], weight, scales, GROUP)
    with pytest.raises(ValueError, match="must be"):
        FP8_MATMUL(x, x_scales, weight, scales[:1], GROUP)
