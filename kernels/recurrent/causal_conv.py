"""Causal depthwise convolution over the tokens of a sequence, whose state is its last width - 1 inputs.

    y[t, c] = act(bias[c] + Σ_j weight[c, j] · x[t - (width - 1) + j, c])

Inputs before the row's first token come from the state; the weights' last column belongs to the token itself, as in
torch's conv1d. Sums are in float32. Used by Mamba (arXiv:2312.00752), gated DeltaNet (arXiv:2412.06464) and LFM2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import activated
from kernels.attention.common import row_of
from kernels.cpu import recurrent as compiled
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.recurrent.common import check_state, draw_rows, draw_state, row_bounds, rows_with_tokens, single_row

ACTS = ("silu", "none")
BLOCK_TOKENS = 16  # of a program, in steps with several tokens for a row


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    """x: [tokens, channels], whose rows may be strided; weight: [channels, width] fp32; bias: [channels] fp32; act:
    silu or none; state: [slots, channels, width - 1], oldest input first; query_start, slots, first: see common.py →
    y: [tokens, channels], and the state, which is changed in place."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, before, line in rows_with_tokens(state, query_start, slots, first):
        inputs = torch.cat((before, x[tokens].float().T), 1)
        out = functional.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight)).T
        y[tokens] = (functional.silu(out) if act == "silu" else out).to(y.dtype)
        line.copy_(inputs[:, inputs.shape[1] - line.shape[1] :])
    return y, state


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, count: Sequence[int]) -> Tensor:
    """Return the convolution of rows that begin with zeros, without an activation. x: [tokens, channels]; weight,
    bias: as above; count: tokens of each row → [tokens, channels]."""
    before = weight.shape[1] - 1
    rows = (functional.pad(piece.float().T, (before, 0)) for piece in torch.split(x, list(count)))
    found = [functional.conv1d(piece, weight.unsqueeze(1), bias, groups=len(weight)).T for piece in rows]
    return torch.cat(found).to(x.dtype)


@jit
def _input(x, state, at, position, channel, mask, x_row, WIDTH: tl.constexpr):
    """Load input `at` of a row for each channel. x: the row's first token, at `position`; earlier ones are in the
    state."""
    kept = mask & (at < 0) & (at >= -position * WIDTH)  # none at position 0
    old = tl.load(state + channel * (WIDTH - 1) + (at + (WIDTH - 1)), kept, 0.0)
    new = tl.load(x + at * x_row + channel, mask & (at >= 0), 0.0).to(tl.float32)
    return tl.where(at < 0, old, new)


@jit
def _output(total, x, state, at, position, channel, mask, live, weight, x_row, WIDTH: tl.constexpr, ACT: tl.constexpr):
    """Add the taps of token `at` of a row to the bias, and apply the activation."""
    for tap in tl.static_range(WIDTH):
        taken = _input(x, state, at - (WIDTH - 1) + tap, position, channel, mask, x_row, WIDTH)
        total = tl.fma(taken, tl.load(weight + channel * WIDTH + tap, live, 0.0), total)
    if ACT == "silu":
        total = activated(total, ACT)
    return total


@jit
def _update(x, state, count, position, channel, live, x_row, WIDTH: tl.constexpr, KEPT: tl.constexpr):
    """Replace the state by the last inputs. Threads read what others write, hence the barriers."""
    kept = tl.arange(0, KEPT)[None, :]
    mask = live[:, None] & (kept < WIDTH - 1)
    value = _input(x, state, count - (WIDTH - 1) + kept, position, channel[:, None], mask, x_row, WIDTH)
    tl.debug_barrier()
    tl.store(state + channel[:, None] * (WIDTH - 1) + kept, value, mask)


@jit
def causal_conv_rows_kernel(
    x,
    weight,
    bias,
    state,
    query_start,
    slots,
    first,
    y,
    x_row,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """One program for each row and block of channels, for steps with one token or a few in each row."""
    start, count, slot, position = row_bounds(tl.program_id(0), query_start, slots, first, slot_stride)
    if count == 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < CHANNELS
    base = tl.load(bias + channel, live, 0.0) if BIAS else tl.zeros([BLOCK], tl.float32)
    x += start * x_row
    state += slot
    for token in range(count):
        at = channel * 0 + token
        out = _output(base, x, state, at, position, channel, live, live, weight, x_row, WIDTH, ACT)
        tl.store(y + (start + token) * CHANNELS + channel, out.to(y.dtype.element_ty), live)
    _update(x, state, count, position, channel, live, x_row, WIDTH, KEPT)


@jit(varying=("rows",))
def causal_conv_tokens_kernel(
    x,
    weight,
    bias,
    state,
    query_start,
    slots,
    first,
    y,
    rows,
    x_row,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program for each block of tokens of a row and block of channels. The state is only read."""
    block = tl.program_id(0)
    row = row_of(block, query_start, rows, TOKENS)
    start, count, slot, position = row_bounds(row, query_start, slots, first, slot_stride)
    begin = (block - tl.load(query_start + row) // TOKENS - row) * TOKENS
    if begin >= count:
        return
    at = begin + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = channel < CHANNELS
    mask = live & (at < count)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias + channel, live, 0.0)
    total = _output(
        total, x + start * x_row, state + slot, at, position, channel, mask, live, weight, x_row, WIDTH, ACT
    )
    tl.store(y + (start + at) * CHANNELS + channel, total.to(y.dtype.element_ty), mask)


@jit
def causal_conv_state_kernel(
    x,
    state,
    query_start,
    slots,
    first,
    x_row,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Update the states after causal_conv_tokens_kernel."""
    start, count, slot, position = row_bounds(tl.program_id(0), query_start, slots, first, slot_stride)
    if count == 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _update(x + start * x_row, state + slot, count, position, channel, channel < CHANNELS, x_row, WIDTH, KEPT)


def _triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    if act not in ACTS:
        raise ValueError(f"activation {act!r}: there are {', '.join(ACTS)}")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, channels = x.shape
    rows, width = slots.shape[0], weight.shape[1]
    places = query_start, slots, first
    strides = row_stride(x, "x"), check_state(state)
    sizes = {"CHANNELS": channels, "WIDTH": width}
    options = {"ACT": act, "BIAS": bias is not None}
    kept = power_of_2(width - 1)
    given = x, weight, weight if bias is None else bias, state, *places, y
    if tokens <= rows:
        block = min(256, power_of_2(channels))
        grid = rows, -(-channels // block)
        launch(causal_conv_rows_kernel, grid, *given, *strides, **sizes, **options, BLOCK=block, KEPT=kept, warps=2)
        return y, state
    if rows:
        block = min(128, power_of_2(channels))
        grid = tokens // BLOCK_TOKENS + rows, -(-channels // block)
        tile = {"BLOCK": block, "TOKENS": BLOCK_TOKENS}
        launch(causal_conv_tokens_kernel, grid, *given, rows, *strides, **sizes, **options, **tile)
        grid = rows, -(-channels // block)
        launch(causal_conv_state_kernel, grid, x, state, *places, *strides, **sizes, BLOCK=block, KEPT=kept)
    return y, state


def _inputs(
    make: Make, counts: tuple[int, ...], channels: int, width: int, act: str = "silu", bias: bool = True, pad: int = 0
) -> Args:
    query_start, slots, first = draw_rows(make, counts)
    state = draw_state(make, slots, first, channels, width - 1)
    weight = make.normal(channels, width, dtype=torch.float32)
    added = make.normal(channels, dtype=torch.float32) if bias else None
    return make.normal(sum(counts) + pad, channels), weight, added, act, state, query_start, slots, first


CAUSAL_CONV = Op(
    name="causal_conv",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("decode", {"counts": (1, 0, 1), "channels": 260, "width": 4}),
        Case("mixed", {"counts": (1, 2, 17, 0, 5), "channels": 40, "width": 4, "pad": 3}),
        Case("plain", {"counts": (9, 1), "channels": 24, "width": 8, "act": "none", "bias": False}),
        Case("no-state", {"counts": (5,), "channels": 16, "width": 1}),
        Case("empty", {"counts": (), "channels": 8, "width": 4}),
        Case("decode-32x8192", {"counts": (1,) * 32, "channels": 8192, "width": 4, "bias": False}, bench=True),
        Case("4096x8192", {"counts": (4096,), "channels": 8192, "width": 4, "bias": False}, bench=True),
        Case("2048x5376", {"counts": (512,) * 4, "channels": 5376, "width": 4}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, weight, bias, act, state, starts, slots, first: (
        2 * x.nbytes + nbytes(weight, bias) + 2 * len(slots) * state[:1].nbytes
    ),
    compiled=compiled.causal_conv,
    cpu_cases=(
        Case("1x8192", {"counts": (1,), "channels": 8192, "width": 4, "bias": False}),
        Case("8x8192", {"counts": (1,) * 8, "channels": 8192, "width": 4, "bias": False}),
        Case("512x8192", {"counts": (512,), "channels": 8192, "width": 4, "bias": False}),
    ),
    single_row=single_row((0,), 4),
    rows=lambda args: len(args[6]),
    strided=(0, 4),
)
