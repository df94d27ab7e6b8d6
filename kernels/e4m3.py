"""float8_e4m3fn: rows of numbers rounded to it with a scale, and converted back, in torch and in Triton.

    scale = largest |x| / 448 of a row, or of each group of its inputs;  q = round(x / scale);  x ≈ scale · q

Rounding is to nearest, ties to even. Values beyond 448 become 448. NaN stays NaN and does not affect the scale. The
format has no infinity: an infinity in a row becomes NaN, and the scale infinite. Source: arXiv:2209.05433.

Kernels read the codes as uint8, because some targets lack the type. NVIDIA GPUs of compute capability 8.9 and newer
convert by an instruction; other targets and the interpreter use integer arithmetic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.jit import cuda_capability_geq, jit, tl

LARGEST = 448.0
GROUP = 128  # inputs that share a scale where a row has several
MIN_AMAX = 2.0**-100  # lower bound of a row's largest number: zeros get a scale with a finite inverse


@dataclass(frozen=True)
class Rounding:
    """Method of rounding rows."""

    group: int  # inputs that share a scale, which may be all
    static_scale: Tensor | None = None  # [1] float32, one scale for all rows; by default it follows from their numbers


@dataclass(frozen=True)
class Rounded:
    """Rows in e4m3."""

    values: Tensor  # [rows, inputs] float8_e4m3fn
    scales: Tensor  # [rows, groups] float32


def to_e4m3(x: Tensor) -> Tensor:
    """Any floating type → float8_e4m3fn. Clamp first, because some releases of torch convert too large values to
    NaN."""
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def groups_of(size: int, group: int) -> int:
    return -(-size // group)


def rounded_rows(x: Tensor, group: int, static_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x: [rows, size] of any floating type → values of the same shape in e4m3, scales [rows, groups] float32. The last
    group may be shorter than the others."""
    rows, size = x.shape
    groups = groups_of(size, group)
    padded = functional.pad(x.float(), (0, groups * group - size)).unflatten(1, (groups, group))
    if static_scale is None:
        scales = padded.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(2).clamp(min=MIN_AMAX) * (1 / LARGEST)
    else:
        scales = static_scale.float().view(1, 1).expand(rows, groups).contiguous()
    values = to_e4m3(padded * scales.reciprocal()[:, :, None])
    return values.flatten(1)[:, :size].contiguous(), scales


def empty_rounded(rows: int, size: int, group: int, device: torch.device) -> Rounded:
    """Allocate memory for rounded rows."""
    values = torch.empty((rows, size), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return Rounded(values, torch.empty((rows, groups_of(size, group)), dtype=torch.float32, device=device))


@jit
def to_codes(x):
    """float32 → codes of e4m3 in uint8."""
    if cuda_capability_geq(8, 9):
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F800000)
        # 3 of the 23 bits of mantissa stay; the exponent counts from 7 and not from 127
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # below 2^-6 all are multiples of 2^-9, the last place of floats next to 2^14
        small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        whole = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E)
        whole = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, whole)
        code = (whole | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@jit
def from_codes(codes, TYPE: tl.constexpr):
    """Codes of e4m3 in uint8 → their numbers, which every wider type represents exactly."""
    if cuda_capability_geq(8, 9):
        half = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # sign, 4 bits of exponent and 3 of mantissa where a half has them; its exponent counts from 15 and not from 7
        wide = codes.to(tl.int16)
        half = (((wide << 8) & -0x8000) | ((wide << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
        half = tl.where((wide & 0x7F) == 0x7F, float("nan"), half)
    return half.to(TYPE)


@jit
def for_products(codes):
    """Convert codes in uint8 to operands of tile products: e4m3 if the target multiplies it, else halves."""
    if cuda_capability_geq(8, 9):
        taken = codes.to(tl.float8e4nv, bitcast=True)
    else:
        taken = from_codes(codes, tl.float16)
    return taken


@jit
def rounded_tile(x, static_scale, STATIC: tl.constexpr):
    """x: [groups, width] float32, 0 where there is nothing → codes of the same shape, scales [groups]."""
    if STATIC:
        scale = tl.load(static_scale) + tl.zeros([x.shape[0]], tl.float32)
    else:
        # An unused row may be all NaN. The constants are 2^-100 and 1 / 448.
        largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)
        scale = tl.maximum(largest, 7.888609052210118e-31) * 0.002232142857142857
    inverse = tl.div_rn(tl.full([x.shape[0]], 1.0, tl.float32), scale)
    return to_codes(x * inverse[:, None]), scale
