"""Real-gated linear recurrent unit (RG-LRU) of Griffin (arXiv:2402.19427, section 2.4) and RecurrentGemma.

For each channel with a state h, and each token:

    u = sigmoid(gate + gate_bias) · x
    a = exp(-8 · softplus(rate) · sigmoid(decay + decay_bias))
    h ← a h + sqrt(1 - a²) u,    y = h

The first token of a sequence has h = u, without the root. All arithmetic is in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import recurrent as compiled
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.recurrent.common import (
    check_state,
    draw_rows,
    draw_state,
    row_bounds,
    rows_with_tokens,
    sigmoid,
    single_row,
    softplus,
)

EXPONENT = -8.0  # c of the paper, negative
BLOCK = 128  # channels of a program


def _reference(
    x: Tensor,
    gate: Tensor,
    decay: Tensor,
    gate_bias: Tensor,
    decay_bias: Tensor,
    rate: Tensor,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    """x, gate, decay: [tokens, channels], whose rows may be strided; gate_bias, decay_bias, rate: [channels] fp32;
    state: [slots, channels]; query_start, slots, first: see common.py → y: [tokens, channels], and the state, which is
    changed in place."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    opened = x.float() * torch.sigmoid(gate.float() + gate_bias)
    power = EXPONENT * functional.softplus(rate) * torch.sigmoid(decay.float() + decay_bias)
    fade, scaled = power.exp(), opened * torch.sqrt(1 - torch.exp(2 * power))
    positions = first[query_start.diff() > 0].tolist()
    rows = rows_with_tokens(state, query_start, slots, first)
    for position, (tokens, h, line) in zip(positions, rows, strict=True):
        for t in range(tokens.start, tokens.stop):
            is_first = position + t == tokens.start
            h = opened[t] if is_first else fade[t] * h + scaled[t]
            y[t] = h.to(y.dtype)
        line.copy_(h)
    return y, state


@jit
def rg_lru_kernel(
    x,
    gate,
    decay,
    gate_bias,
    decay_bias,
    rate,
    state,
    query_start,
    slots,
    first,
    y,
    x_row,
    gate_row,
    decay_row,
    slot_stride,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program for each row and block of channels."""
    start, count, slot, position = row_bounds(tl.program_id(0), query_start, slots, first, slot_stride)
    if count == 0:
        return
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    live = channel < CHANNELS
    opening = tl.load(gate_bias + channel, live, 0.0)
    closing = tl.load(decay_bias + channel, live, 0.0)
    slope = softplus(tl.load(rate + channel, live, 0.0)) * -8.0
    h = tl.load(state + slot + channel, live & (channel * 0 + position > 0), 0.0)
    for token in range(count):
        at = start + token
        u = tl.load(x + at * x_row + channel, live, 0.0).to(tl.float32)
        u *= sigmoid(tl.load(gate + at * gate_row + channel, live, 0.0).to(tl.float32) + opening)
        power = slope * sigmoid(tl.load(decay + at * decay_row + channel, live, 0.0).to(tl.float32) + closing)
        root = tl.sqrt(1.0 - tl.exp(2.0 * power))
        h = tl.where(channel * 0 + position + token == 0, u, tl.exp(power) * h + root * u)
        tl.store(y + at * CHANNELS + channel, h.to(y.dtype.element_ty), live)
    tl.store(state + slot + channel, h, live)


def _triton(
    x: Tensor,
    gate: Tensor,
    decay: Tensor,
    gate_bias: Tensor,
    decay_bias: Tensor,
    rate: Tensor,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels, rows = x.shape[1], slots.shape[0]
    wide = min(BLOCK, power_of_2(channels))
    if rows:
        launch(
            rg_lru_kernel,
            (rows, -(-channels // wide)),
            *(x, gate, decay, gate_bias, decay_bias, rate, state, query_start, slots, first, y),
            row_stride(x, "x"),
            row_stride(gate, "gate"),
            row_stride(decay, "decay"),
            check_state(state),
            CHANNELS=channels,
            WIDE=wide,
            warps=1,
        )
    return y, state


def _inputs(make: Make, counts: tuple[int, ...], channels: int, pad: int = 0) -> Args:
    query_start, slots, first = draw_rows(make, counts)
    state = draw_state(make, slots, first, channels)
    rows = [make.normal(sum(counts) + pad, channels) for _ in range(3)]
    vectors = [make.normal(channels, dtype=torch.float32) for _ in range(3)]
    return *rows, *vectors, state, query_start, slots, first


RG_LRU = Op(
    name="rg_lru",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("decode", {"counts": (1, 0, 1), "channels": 260}),
        Case("mixed", {"counts": (1, 2, 17, 0, 5), "channels": 40, "pad": 3}),
        Case("odd", {"counts": (9, 1), "channels": 7}),
        Case("empty", {"counts": (), "channels": 8}),
        Case("decode-32x2560", {"counts": (1,) * 32, "channels": 2560}, bench=True),
        Case("4x512x2560", {"counts": (512,) * 4, "channels": 2560}, bench=True),
        Case("4096x4096", {"counts": (4096,), "channels": 4096}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, gate, decay, gate_bias, decay_bias, rate, state, starts, slots, first: (
        4 * x.nbytes + nbytes(gate_bias, decay_bias, rate) + 2 * len(slots) * state[:1].nbytes
    ),
    compiled=compiled.rg_lru,
    cpu_cases=(
        Case("1x2560", {"counts": (1,), "channels": 2560}),
        Case("8x2560", {"counts": (1,) * 8, "channels": 2560}),
        Case("512x2560", {"counts": (512,), "channels": 2560}),
    ),
    single_row=single_row((0, 1, 2), 6),
    rows=lambda args: len(args[8]),
    strided=(0, 1, 2, 6),
)
