"""Root mean square norm with a gate, of recurrent layers' outputs.

    y = x / sqrt(mean(x²) + eps) · w · act(gate)                        gated DeltaNet: the gate follows the norm
    y = u / sqrt(mean(u²) + eps) · w,  u = x · act(gate)                Mamba 2 (`gate_first`)

The mean is over adjacent groups of `size` elements, and in float32, as everything else is. Sources: arXiv:2412.06464,
arXiv:2405.21060.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import activated
from kernels.cpu import recurrent as compiled
from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes
from kernels.recurrent.common import sigmoid

ACTS = {"silu": functional.silu, "sigmoid": torch.sigmoid}


def _reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool = False, act: str = "silu", groups: int = 1
) -> Tensor:
    """x, gate: [tokens, groups · size], whose rows may be strided; weight: [groups · size], or [size] for all groups,
    fp32; act: silu or sigmoid → [tokens, groups · size] of x's type."""
    wide, factor = x.float(), ACTS[act](gate.float())
    if gate_first:
        wide = wide * factor
    pieces = wide.unflatten(1, (groups, -1))
    scale = torch.rsqrt(pieces.square().mean(-1, keepdim=True) + eps)
    normed = (pieces * scale * weight.view(-1, pieces.shape[2])).flatten(1)
    return (normed if gate_first else normed * factor).to(x.dtype)


@jit
def gated_norm_kernel(
    x,
    gate,
    weight,
    y,
    x_row,
    gate_row,
    eps,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ACT: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for each row and tile of groups. SHARED: all groups have the same weights."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    at = tl.arange(0, WIDE)[None, :]
    mask = (group < GROUPS) & (at < SIZE)
    place = group * SIZE + at
    value = tl.load(x + row * x_row + place, mask, 0.0).to(tl.float32)
    factor = tl.load(gate + row * gate_row + place, mask, 0.0).to(tl.float32)
    factor = activated(factor, ACT) if ACT == "silu" else sigmoid(factor)
    if GATE_FIRST:
        value *= factor
    value *= tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
    value *= tl.load(weight + (at if SHARED else place), mask, 0.0)
    if not GATE_FIRST:
        value *= factor
    tl.store(y + row * (GROUPS * SIZE) + place, value.to(y.dtype.element_ty), mask)


def _triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool = False, act: str = "silu", groups: int = 1
) -> Tensor:
    if act not in ACTS:
        raise ValueError(f"gate {act!r}: there are {', '.join(ACTS)}")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = x.shape
    size = width // groups
    wide = power_of_2(size)
    tile = min(power_of_2(groups), max(1, 2048 // wide))
    launch(
        gated_norm_kernel,
        (rows, -(-groups // tile)),
        x,
        gate,
        weight,
        y,
        row_stride(x, "x"),
        row_stride(gate, "gate"),
        eps,
        SIZE=size,
        GROUPS=groups,
        SHARED=weight.shape[0] != width,
        GATE_FIRST=gate_first,
        ACT=act,
        WIDE=wide,
        TILE=tile,
        warps=row_warps(wide * tile),
    )
    return y


def _inputs(
    make: Make, rows: int, size: int, groups: int, shared: bool = True, gate_first: bool = False, act: str = "silu"
) -> Args:
    width = groups * size
    weight = make.normal(size if shared else width, dtype=torch.float32)
    return make.normal(rows, width), make.normal(rows, width), weight, 1e-5, gate_first, act, groups


GATED_NORM = Op(
    name="gated_norm",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("heads", {"rows": 3, "size": 24, "groups": 5}),
        Case("sigmoid", {"rows": 2, "size": 32, "groups": 2, "act": "sigmoid"}),
        Case("gate-first", {"rows": 2, "size": 77, "groups": 3, "shared": False, "gate_first": True}),
        Case("many", {"rows": 1, "size": 600, "groups": 5, "gate_first": True}),
        Case("empty", {"rows": 0, "size": 32, "groups": 2}),
        Case("decode-32x32x128", {"rows": 32, "size": 128, "groups": 32}, bench=True),
        Case("4096x32x128", {"rows": 4096, "size": 128, "groups": 32, "act": "sigmoid"}, bench=True),
        Case("2048x5120", {"rows": 2048, "size": 5120, "groups": 1, "gate_first": True}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, gate, weight, *rest: nbytes(x, x, gate, weight),
    compiled=compiled.gated_norm,
    cpu_cases=(
        Case("8x32x128", {"rows": 8, "size": 128, "groups": 32}),
        Case("512x5120", {"rows": 512, "size": 5120, "groups": 1, "gate_first": True}),
    ),
    single_row=independent_rows(0, 1),
    strided=(0, 1),
)
