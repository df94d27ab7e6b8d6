"""Reads of the decoder's tokens in encoder-decoder models: self-attention and cross-attention.

The sequence of the request in line s begins with its encoder input, encoder_lengths[s] positions. The decoder's own
tokens follow, count positions from there, and in self-attention read no earlier key. In cross-attention they read the
whole encoder input, and each token is a row of its own (kernels/attention/decode.py). Rows and padding are as in
kernels/step_inputs.py; padding reads nothing.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, tl
from kernels.op import Args, Case, Make, Op, nbytes


def _reference(encoder_lengths: Tensor, positions: Tensor, slot: Tensor, query_start: Tensor) -> tuple[Tensor, ...]:
    """encoder_lengths: [slots] int32, tokens of each encoder input; positions: [tokens] int32, in the sequence,
    including padding; slot: [rows] int32; query_start: [rows + 1] int32 → decoder_starts: [rows] int32, the position of
    a row's first own token; positions, changed in place to count from the end of the encoder input; slots and lengths
    of each token as a row of its own, [tokens] int32; and starts: [tokens + 1] int32, which are 0, 1, …"""
    decoder_starts = encoder_lengths[slot.long()]
    owner = torch.repeat_interleave(torch.arange(len(slot), device=slot.device), query_start.diff().long())
    total, real = len(positions), len(owner)
    slots, lengths = torch.zeros((2, total), dtype=torch.int32, device=slot.device)
    slots[:real], lengths[:real] = slot[owner], decoder_starts[owner]
    positions[:real] -= decoder_starts[owner]
    return decoder_starts, positions, slots, lengths, torch.arange(total + 1, dtype=torch.int32, device=slot.device)


@jit(varying=("rows", "total"))
def cross_attention_inputs_kernel(
    encoder_lengths,
    positions,
    slot,
    query_start,
    decoder_starts,
    slots,
    lengths,
    starts,
    rows,
    total,
    BLOCK: tl.constexpr,
):
    """One program for each row, and one for the padding after them."""
    row = tl.program_id(0)
    is_row = row < rows
    start = tl.load(query_start + row)
    end = tl.where(is_row, tl.load(query_start + row + 1, is_row, 0), total)
    line = tl.load(slot + row, is_row, 0)
    encoder_length = tl.load(encoder_lengths + line, is_row, 0)
    tl.store(decoder_starts + row, encoder_length, is_row)
    tl.store(starts + total, total, row == rows)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        keep = token < end
        tl.store(positions + token, tl.load(positions + token, keep, 0) - encoder_length, keep)
        tl.store(slots + token, line, keep)
        tl.store(lengths + token, encoder_length, keep)
        tl.store(starts + token, token, keep)


def _triton(encoder_lengths: Tensor, positions: Tensor, slot: Tensor, query_start: Tensor) -> tuple[Tensor, ...]:
    rows, total, device = slot.shape[0], positions.shape[0], positions.device
    decoder_starts, slots, lengths, starts = (
        torch.empty(count, dtype=torch.int32, device=device) for count in (rows, total, total, total + 1)
    )
    launch(
        cross_attention_inputs_kernel,
        (rows + 1,),
        encoder_lengths,
        positions,
        slot,
        query_start,
        decoder_starts,
        slots,
        lengths,
        starts,
        rows,
        total,
        BLOCK=128,
        warps=1,
    )
    return decoder_starts, positions, slots, lengths, starts


def _inputs(make: Make, counts: list[int], slots: int, padding: int = 0) -> Args:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    positions = make.integers(50, 90, ends[-1] + padding)
    positions[ends[-1] :] = 0
    return (
        make.integers(0, 50, slots),
        positions,
        make.permutation(slots)[: len(counts)].contiguous(),
        make.tensor(ends),
    )


CROSS_ATTENTION_INPUTS = Op(
    name="cross_attention_inputs",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("mixed", {"counts": [1, 5, 1, 0, 9], "slots": 8}),
        Case("padded", {"counts": [1, 1, 0, 0], "slots": 4, "padding": 2}),
        Case("long", {"counts": [300, 20], "slots": 2, "padding": 130}),
        Case("empty", {"counts": [], "slots": 2}),
        Case("decode-256", {"counts": [1] * 256, "slots": 256}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},  # whole numbers only
    traffic=lambda encoder_lengths, positions, slot, query_start: (
        2 * nbytes(slot) + nbytes(query_start) + 5 * nbytes(positions)
    ),
    rows=lambda args: args[2].shape[0],
)
