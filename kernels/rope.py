"""Rotary positions: pairs of each head's first `dim` elements are rotated by position · frequency.

Pair i is (x[i], x[i + dim/2]), or (x[2i], x[2i+1]) where interleaved. With c = cos and s = sin of the pair's angle:
(a, b) → (a·c - b·s, b·c + a·s). Source: arXiv:2104.09864.

A token of an image has several positions (its time, height and width), and each pair is rotated by one of them. The
positions of a text token are equal, so its angles match ordinary RoPE. Source: arXiv:2409.12191 (there called M-RoPE).
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, tl
from kernels.op import Args, Case, Make, Op, nbytes


def rope_angles(positions: Tensor, frequencies: Tensor, attention: float, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return cos and sin for `rotate_`, each [tokens, 1, dim] fp32; sin includes the sign for its place in the pair.

    positions: [tokens] int64, or [tokens, dim / 2] if each pair has its own; frequencies: [dim / 2], or [tokens, dim / 2] where they depend on the token's sequence;
    attention multiplies both (yarn, longrope).
    """
    angles = (positions.unsqueeze(1) if positions.ndim == 1 else positions).float() * frequencies
    cos, sin = angles.cos().mul_(attention), angles.sin().mul_(attention)
    if interleaved:
        both = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return both[0].unsqueeze(1), both[1].unsqueeze(1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate the first `dim` elements of x: [tokens, heads, head_dim] in place."""
    part = x[..., : cos.shape[-1]]
    if interleaved:
        swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        low, high = part.chunk(2, -1)
        swapped = torch.cat((high, low), -1)
    if x.dtype == torch.float32:
        part.mul_(cos).addcmul_(swapped, sin)
    else:
        part.copy_(part * cos + swapped * sin)


def _reference(
    positions: Tensor, frequencies: Tensor, attention: float, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """positions: [tokens] integers, or [tokens, several] with axes: [half] int32, which of these positions rotates each
    pair; frequencies: [half] fp32, or [tokens, half] if each token has its own → cos and sin, [tokens, half] fp32, one
    for each pair."""
    turned = positions.unsqueeze(1) if axes is None else positions[:, axes.long()]
    angles = turned.float() * frequencies
    return angles.cos() * attention, angles.sin() * attention


@jit
def rope_angles_kernel(
    positions,
    frequencies,
    axes,
    cos,
    sin,
    position_row,
    position_axis,
    frequency_row,
    attention,
    AXES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keep = at < HALF
    if AXES:
        position = tl.load(positions + token * position_row + tl.load(axes + at, keep, 0) * position_axis, keep, 0)
    else:
        position = tl.load(positions + token * position_row)
    angle = position.to(tl.float32) * tl.load(frequencies + token * frequency_row + at, keep, 0.0)
    tl.store(cos + token * HALF + at, tl.cos(angle) * attention, keep)
    tl.store(sin + token * HALF + at, tl.sin(angle) * attention, keep)


def _triton(
    positions: Tensor, frequencies: Tensor, attention: float, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens, half = positions.shape[0], frequencies.shape[-1]
    cos, sin = (torch.empty((tokens, half), dtype=torch.float32, device=positions.device) for _ in range(2))
    launch(
        rope_angles_kernel,
        (tokens,),
        positions,
        frequencies,
        positions if axes is None else axes,
        cos,
        sin,
        positions.stride(0),
        positions.stride(-1),
        frequencies.stride(0) if frequencies.ndim == 2 else 0,
        attention,
        AXES=axes is not None,
        HALF=half,
        BLOCK=power_of_2(half),
        warps=1,
    )
    return cos, sin


def _inputs(make: Make, tokens: int, half: int, own: bool = False, several: int = 0) -> Args:
    frequencies = 1.0 / 10000.0 ** (torch.arange(half, device=make.device) / half)
    if own:
        frequencies = frequencies * make.normal(tokens, 1, dtype=torch.float32).abs()
    if several:
        return make.integers(0, 100_000, tokens, several), frequencies, 1.25, make.integers(0, several, half)
    return make.integers(0, 100_000, tokens), frequencies, 1.25, None


ROPE_ANGLES = Op(
    name="rope_angles",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("odd", {"tokens": 5, "half": 12}),
        Case("own", {"tokens": 3, "half": 16, "own": True}),
        Case("several", {"tokens": 7, "half": 20, "several": 3}),
        Case("several-own", {"tokens": 3, "half": 9, "several": 3, "own": True}),
        Case("empty", {"tokens": 0, "half": 8}),
        Case("decode-256x64", {"tokens": 256, "half": 64}, bench=True),
        Case("8192x64", {"tokens": 8192, "half": 64}, bench=True),
        Case("8192x64-several", {"tokens": 8192, "half": 64, "several": 3}, bench=True),
    ),
    # fp32 whatever the type of the activations; an angle of 1e5 is known to 4e-3 in fp32, to the same bits in both
    tolerance={torch.float32: 1e-4, torch.float16: 1e-4, torch.bfloat16: 1e-4},
    traffic=lambda positions, frequencies, attention, axes=None: (
        nbytes(positions, frequencies, axes) + 8 * positions.shape[0] * frequencies.shape[-1]
    ),
    single_row=lambda args, row: (
        (args[0][row : row + 1], args[1][row : row + 1] if args[1].ndim == 2 else args[1], *args[2:]),
        lambda outputs: tuple(output[row : row + 1] for output in outputs),
    ),
)
