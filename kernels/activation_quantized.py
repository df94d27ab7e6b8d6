"""act(gate) · up of a fused projection, rounded to float8_e4m3fn for the projection that reads it.

    y = act(gate) · up in float32;  scale = max |y| / 448 of a row or group;  q = round(y / scale)

y itself is never rounded to the type of the activations. kernels/activation.py has the functions, kernels/e4m3.py the
rounding.
"""

import torch
from torch import Tensor

from kernels.activation import ACTIVATIONS, activated
from kernels.e4m3 import GROUP, empty_rounded, rounded_rows, rounded_tile
from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes

TILE = 2048  # elements of a program that has several groups


def _reference(
    x: Tensor, act: str, has_gate: bool, group: int, static_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x: [tokens, 2 · inner] with a gate, else [tokens, inner] → values [tokens, inner] in e4m3, scales [tokens,
    groups] float32."""
    wide = x.float()
    if not has_gate:
        return rounded_rows(ACTIVATIONS[act](wide), group, static_scale)
    gate, up = wide.chunk(2, -1)
    return rounded_rows(ACTIVATIONS[act](gate) * up, group, static_scale)


@jit
def activation_quantized_kernel(
    x,
    static_scale,
    values,
    scales,
    x_row,
    INNER: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STATIC: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program for some groups of a row, each of GROUP elements in a tile's row of WIDTH."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    inside = tl.arange(0, WIDTH)[None, :]
    at = group[:, None] * GROUP + inside
    keep = (inside < GROUP) & (at < INNER)
    result = activated(tl.load(x + row * x_row + at, keep, 0.0).to(tl.float32), ACT)
    if GATED:
        result *= tl.load(x + row * x_row + INNER + at, keep, 0.0).to(tl.float32)
    codes, scale = rounded_tile(result, static_scale, STATIC)
    tl.store(values + row * INNER + at, codes, keep)
    tl.store(scales + row * GROUPS + group, scale, group < GROUPS)


def _triton(
    x: Tensor, act: str, has_gate: bool, group: int, static_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if act not in ACTIVATIONS:
        raise ValueError(f"activation {act!r}: there are {', '.join(ACTIVATIONS)}")
    rows, inner = x.shape[0], x.shape[1] // 2 if has_gate else x.shape[1]
    made = empty_rounded(rows, inner, group, x.device)
    groups, width = made.scales.shape[1], power_of_2(min(group, inner))
    tile = min(power_of_2(groups), max(1, TILE // width))
    launch(
        activation_quantized_kernel,
        (rows, -(-groups // tile)),
        x,
        made.scales if static_scale is None else static_scale,
        made.values.view(torch.uint8),
        made.scales,
        row_stride(x, "x"),
        INNER=inner,
        ACT=act,
        GATED=has_gate,
        GROUP=group,
        GROUPS=groups,
        STATIC=static_scale is not None,
        TILE_GROUPS=tile,
        WIDTH=width,
        warps=row_warps(tile * width),
    )
    return made.values, made.scales


def _inputs(
    make: Make,
    rows: int,
    inner: int,
    act: str,
    has_gate: bool = True,
    group: int | None = None,
    static_scale: bool = False,
) -> Args:
    scale = make.zeros(1, dtype=torch.float32) + 0.02 if static_scale else None
    return make.normal(rows, inner * (1 + has_gate), scale=3.0), act, has_gate, group or inner, scale


ACTIVATION_QUANTIZED = Op(
    name="activation_quantized",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        *(Case(f"{act}-odd", {"rows": 3, "inner": 77, "act": act}) for act in ACTIVATIONS),
        Case("plain", {"rows": 2, "inner": 40, "act": "gelu", "has_gate": False}),
        Case("groups", {"rows": 4, "inner": 300, "act": "silu", "group": GROUP}),
        Case("plain-groups", {"rows": 3, "inner": 130, "act": "relu", "has_gate": False, "group": GROUP}),
        Case("many-groups", {"rows": 2, "inner": 20 * GROUP, "act": "silu", "group": GROUP}),
        Case("static", {"rows": 4, "inner": 64, "act": "silu", "static_scale": True}),
        Case("empty", {"rows": 0, "inner": 64, "act": "silu"}),
        Case("decode-32x14336", {"rows": 32, "inner": 14336, "act": "silu"}, bench=True),
        Case("4096x14336", {"rows": 4096, "inner": 14336, "act": "silu"}, bench=True),
        Case("groups-4096x12288", {"rows": 4096, "inner": 12288, "act": "silu", "group": GROUP}, bench=True),
        Case("gelu_tanh-4096x14336", {"rows": 4096, "inner": 14336, "act": "gelu_tanh"}, bench=True),
        Case("static-4096x14336", {"rows": 4096, "inner": 14336, "act": "silu", "static_scale": True}, bench=True),
    ),
    # values may be a step of e4m3 apart; this is for the scales
    tolerance={torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5},
    traffic=lambda x, act, has_gate, group, static_scale=None: (
        x.nbytes + x.numel() // (1 + has_gate) + nbytes(static_scale) + 4 * x.numel() // (1 + has_gate) // group
    ),
    single_row=independent_rows(0),
    strided=(0,),
)
