"""Selective scan of Mamba (arXiv:2312.00752) and Mamba 2 (arXiv:2405.21060).

For each head with P channels, a state h of [P, N] and each token:

    Δ = clamp(softplus(dt + dt_bias), dt_limits)
    h ← exp(Δ A) h + (Δ x) Bᵀ
    y = h C + D x            (with a gate: · silu(gate))

Mamba 2: A is one number for each head, and B and C are shared by the heads of a group: head h belongs to group h //
(heads / groups). Mamba 1: each channel is a head with P = 1 and N numbers in A, and there is one group. All arithmetic
is in float32.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import activated
from kernels.cpu import recurrent as compiled
from kernels.jit import jit, launch, power_of_2, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.recurrent.common import (
    check_state,
    draw_rows,
    draw_slopes,
    draw_state,
    row_bounds,
    rows_with_tokens,
    single_row,
    softplus,
    token_stride,
)

ELEMENTS = 4096  # of the states in a program


def _reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    gate: Tensor | None,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    """x, gate: [tokens, heads, P]; dt: [tokens, heads]; B, C: [tokens, groups, N]; tokens of these may be strided, for
    example columns of one projection; A: [heads] or [heads, N] fp32, negative (-exp of the stored A_log); D: [heads] or
    [heads, P] fp32; dt_bias: [heads] fp32; state: [slots, heads, P, N]; query_start, slots, first: see common.py → y:
    [tokens, heads, P], and the state, which is changed in place."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, groups = x.shape[1], B.shape[1]
    has_vectors = A.ndim == 2  # then decays of all tokens, and copies of B and C for all heads, are too large
    wide_b, wide_c = (
        one.float().expand(-1, heads, -1) if has_vectors else one.float().repeat_interleave(heads // groups, 1)
        for one in (B, C)
    )
    step = dt.float() if dt_bias is None else dt.float() + dt_bias
    step = functional.softplus(step).clamp(*dt_limits).unsqueeze(2)  # [tokens, heads, 1]
    decay = step if has_vectors else torch.exp(step * A.unsqueeze(1)).unsqueeze(2)  # [tokens, heads, 1, 1]
    scaled = step * x.float()
    for tokens, matrix, line in rows_with_tokens(state, query_start, slots, first):
        for t in range(tokens.start, tokens.stop):
            fade = torch.exp(step[t] * A).unsqueeze(1) if has_vectors else decay[t]
            matrix = fade * matrix + scaled[t].unsqueeze(2) * wide_b[t].unsqueeze(1)
            out = torch.einsum("hpn,hn->hp", matrix, wide_c[t])
            if D is not None:
                out += x[t].float() * D.view(heads, -1)
            y[t] = (out if gate is None else out * functional.silu(gate[t].float())).to(y.dtype)
        line.copy_(matrix)
    return y, state


@jit
def selective_scan_kernel(
    x,
    dt,
    A,
    B,
    C,
    D,
    dt_bias,
    gate,
    state,
    query_start,
    slots,
    first,
    y,
    x_token,
    dt_token,
    B_token,
    C_token,
    gate_token,
    slot_stride,
    dt_min,
    dt_max,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    VECTOR_A: tl.constexpr,
    SKIP: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for each row, group and tile of the group's channels, whose states are in registers from token to
    token. SKIP: numbers of D for each head, 0 without D."""
    start, count, slot, position = row_bounds(tl.program_id(0), query_start, slots, first, slot_stride)
    if count == 0:
        return
    group = tl.program_id(1)
    offset = tl.program_id(2) * TILE + tl.arange(0, TILE)
    live = offset < CHANNELS // GROUPS
    channel = group * (CHANNELS // GROUPS) + offset
    head = channel // P
    n = tl.arange(0, WIDE)
    real = n < N
    spot = state + slot + channel[:, None] * N + n[None, :]
    mask = live[:, None] & real[None, :]
    matrix = tl.load(spot, mask & (n * 0 + position > 0)[None, :], 0.0)
    if VECTOR_A:
        slope = tl.load(A + head[:, None] * N + n[None, :], mask, 0.0)
    else:
        slope = tl.load(A + head, live, 0.0)
    if BIAS:
        bias = tl.load(dt_bias + head, live, 0.0)
    if SKIP:
        skip = tl.load(D + (head if SKIP == 1 else channel), live, 0.0)
    for at in range(count):
        token = start + at
        step = tl.load(dt + token * dt_token + head, live, 0.0).to(tl.float32)
        if BIAS:
            step += bias
        step = tl.minimum(tl.maximum(softplus(step), dt_min), dt_max)
        value = tl.load(x + token * x_token + channel, live, 0.0).to(tl.float32)
        into = tl.load(B + token * B_token + group * N + n, real, 0.0).to(tl.float32)
        out_of = tl.load(C + token * C_token + group * N + n, real, 0.0).to(tl.float32)
        if VECTOR_A:
            matrix *= tl.exp(step[:, None] * slope)
        else:
            matrix *= tl.exp(step * slope)[:, None]
        matrix += (step * value)[:, None] * into[None, :]
        out = tl.sum(matrix * out_of[None, :], 1)
        if SKIP:
            out += skip * value
        if GATED:
            out *= activated(tl.load(gate + token * gate_token + channel, live, 0.0).to(tl.float32), "silu")
        tl.store(y + token * CHANNELS + channel, out.to(y.dtype.element_ty), live)
    tl.store(spot, matrix, mask)


def _triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    gate: Tensor | None,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _, heads, size = x.shape
    _, groups, width = B.shape
    channels, wide = heads * size, power_of_2(width)
    tile = min(power_of_2(channels // groups), max(16, ELEMENTS // wide))
    launch(
        selective_scan_kernel,
        (slots.shape[0], groups, -(-channels // groups // tile)),
        x,
        dt,
        A,
        B,
        C,
        A if D is None else D,
        A if dt_bias is None else dt_bias,
        x if gate is None else gate,
        state,
        query_start,
        slots,
        first,
        y,
        *(token_stride(one, name) for one, name in ((x, "x"), (dt, "dt"), (B, "B"), (C, "C"))),
        0 if gate is None else token_stride(gate, "gate"),
        check_state(state),
        *dt_limits,
        CHANNELS=channels,
        GROUPS=groups,
        P=size,
        N=width,
        VECTOR_A=A.ndim == 2,
        SKIP=0 if D is None else D.numel() // heads,
        BIAS=dt_bias is not None,
        GATED=gate is not None,
        WIDE=wide,
        TILE=tile,
    )
    return y, state


def _inputs(
    make: Make,
    counts: tuple[int, ...],
    heads: int,
    size: int,
    width: int,
    groups: int = 1,
    vector_a: bool = False,
    skip: int = 1,
    bias: bool = True,
    gated: bool = False,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    pad: int = 0,
) -> Args:
    query_start, slots, first = draw_rows(make, counts)
    tokens = sum(counts) + pad
    slopes = draw_slopes(make, *((heads, width) if vector_a else (heads,)))
    shape = (heads, size) if skip > 1 else (heads,)
    return (
        *(make.normal(tokens, heads, size), make.normal(tokens, heads, scale=3.0), slopes),
        *(make.normal(tokens, groups, width), make.normal(tokens, groups, width)),
        make.normal(*shape, dtype=torch.float32) if skip else None,
        make.normal(heads, dtype=torch.float32) if bias else None,
        make.normal(tokens, heads, size) if gated else None,
        *(draw_state(make, slots, first, heads, size, width), query_start, slots, first, dt_limits),
    )


MAMBA_2 = {"heads": 80, "size": 64, "width": 128}  # Mamba 2 2.7B
MAMBA = {"heads": 5120, "size": 1, "width": 16, "vector_a": True, "gated": True}  # Mamba 2.8B
NEMOTRON = {"heads": 128, "size": 64, "width": 128, "groups": 8}  # Nemotron-H 8B
SELECTIVE_SCAN = Op(
    name="selective_scan",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("groups", {"counts": (1, 3, 0), "heads": 6, "size": 8, "width": 16, "groups": 2, "pad": 2}),
        Case("mamba", {"counts": (2, 1), "heads": 300, "vector_a": True, "size": 1, "width": 16, "gated": True}),
        Case("odd", {"counts": (3,), "heads": 3, "size": 5, "width": 21, "skip": 5, "dt_limits": (0.01, 1.0)}),
        Case("plain", {"counts": (2, 1), "heads": 2, "size": 16, "width": 8, "skip": 0, "bias": False}),
        Case("empty", {"counts": (), "heads": 2, "size": 8, "width": 16}),
        Case("mamba2-decode-32", MAMBA_2 | {"counts": (1,) * 32}, bench=True),
        Case("nemotron-decode-32", NEMOTRON | {"counts": (1,) * 32}, bench=True),
        Case("mamba-decode-32", MAMBA | {"counts": (1,) * 32}, bench=True),
    ),
    tolerance={torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, dt, A, B, C, D, bias, gate, state, starts, slots, *rest: (
        nbytes(x, x, dt, A, B, C, D, bias, gate) + 2 * len(slots) * state[:1].nbytes
    ),
    compiled=compiled.selective_scan,
    cpu_cases=(
        Case("mamba2-1", MAMBA_2 | {"counts": (1,)}),
        Case("mamba2-8", MAMBA_2 | {"counts": (1,) * 8}),
        Case("mamba2-512", MAMBA_2 | {"counts": (512,)}),
        Case("mamba-8", MAMBA | {"counts": (1,) * 8}),
    ),
    single_row=single_row((0, 1, 3, 4, 7), 8),
    rows=lambda args: len(args[10]),
    strided=(0, 1, 3, 4, 7, 8),
)
