"""Inputs of a step from the request table on the device: ids, positions and slot mapping of its tokens.

Row r computes positions first[r] … of the request in line slot[r] of the persistent tables; its tokens are
query_start[r] … query_start[r + 1] - 1 of the step. A token at position p of group g goes to block table[g][slot][p //
block_tokens]. Tokens after the last row (a step padded to the size of a captured graph) are token 0 at position 0, and
their keys are not written.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, tl
from kernels.op import Args, Case, Make, Op, nbytes

NO_SLOT = -1


def _reference(
    tokens: Tensor,
    rope_lengths: Tensor,
    tables: Tensor,
    slot: Tensor,
    first: Tensor,
    query_start: Tensor,
    total: int,
    block_tokens: int,
) -> tuple[Tensor, ...]:
    """tokens: [slots, positions] int32; rope_lengths: [slots] int32; tables: [groups, slots, blocks] int32; slot,
    first: [rows] int32; query_start: [rows + 1] int32; total: tokens of the step with padding. → ids, positions,
    rope_lengths: [total] int32; lengths: [rows] int32, known tokens after the step, 0 for rows without tokens;
    slot_mapping: [groups, total] int32, block · block_tokens + offset."""
    count = (query_start[1:] - query_start[:-1]).long()
    owner = torch.repeat_interleave(torch.arange(len(count), device=slot.device), count)
    real = len(owner)
    at = torch.arange(real, device=slot.device)
    position = first[owner].long() + at - query_start[owner].long()
    line = slot[owner].long()
    ids, positions = (torch.zeros(total, dtype=torch.int32, device=slot.device) for _ in range(2))
    ids[:real], positions[:real] = tokens[line, position], position.int()
    token_rope_lengths = torch.ones(total, dtype=torch.int32, device=slot.device)
    token_rope_lengths[:real] = torch.maximum(rope_lengths[line].long(), position + 1).int()
    slot_mapping = torch.full((len(tables), total), NO_SLOT, dtype=torch.int32, device=slot.device)
    slot_mapping[:, :real] = tables[:, line, position // block_tokens] * block_tokens + (position % block_tokens).int()
    return ids, positions, token_rope_lengths, torch.where(count > 0, first + count, 0).int(), slot_mapping


@jit(varying=("rows", "total"))
def step_inputs_kernel(
    tokens,
    rope_lengths,
    tables,
    slot,
    first,
    query_start,
    ids,
    positions,
    token_rope_lengths,
    lengths,
    slot_mapping,
    rows,
    total,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NO_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row, and one for the padding after them."""
    row = tl.program_id(0)
    start = tl.load(query_start + row)
    is_row = row < rows
    end = total
    line = start * 0
    begin = start * 0
    if is_row:
        end = tl.load(query_start + row + 1)
        line = tl.load(slot + row)
        begin = tl.load(first + row)
        tl.store(lengths + row, tl.where(end > start, begin + end - start, 0))
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        keep = token < end
        known = token < tl.where(is_row, end, start)
        position = tl.where(is_row, begin + token - start, 0)
        here = tokens + line.to(tl.int64) * WIDTH + position
        tl.store(ids + token, tl.load(here, known, 0), keep)
        tl.store(positions + token, position, keep)
        length = tl.load(rope_lengths + line + position * 0, known, 0)
        tl.store(token_rope_lengths + token, tl.maximum(length, position + 1), keep)
        for group in tl.static_range(GROUPS):
            place = tables + group * TABLE + line.to(tl.int64) * BLOCKS + position // BLOCK_TOKENS
            block = tl.load(place, known, 0)
            written = tl.where(is_row, block * BLOCK_TOKENS + position % BLOCK_TOKENS, NO_SLOT)
            tl.store(slot_mapping + group * total + token, written, keep)


def _triton(
    tokens: Tensor,
    rope_lengths: Tensor,
    tables: Tensor,
    slot: Tensor,
    first: Tensor,
    query_start: Tensor,
    total: int,
    block_tokens: int,
) -> tuple[Tensor, ...]:
    groups, rows, device = len(tables), slot.shape[0], slot.device
    ids, positions, token_rope_lengths = (torch.empty(total, dtype=torch.int32, device=device) for _ in range(3))
    lengths = torch.empty(rows, dtype=torch.int32, device=device)
    slot_mapping = torch.empty((groups, total), dtype=torch.int32, device=device)
    launch(
        step_inputs_kernel,
        (rows + 1,),
        tokens,
        rope_lengths,
        tables,
        slot,
        first,
        query_start,
        ids,
        positions,
        token_rope_lengths,
        lengths,
        slot_mapping,
        rows,
        total,
        WIDTH=tokens.stride(0),
        GROUPS=groups,
        TABLE=tables.stride(0),
        BLOCKS=tables.shape[2],
        BLOCK_TOKENS=block_tokens,
        NO_SLOT=NO_SLOT,
        BLOCK=128,
        warps=1,
    )
    return ids, positions, token_rope_lengths, lengths, slot_mapping


def _inputs(
    make: Make, counts: list[int], slots: int, width: int, block_tokens: int = 4, groups: int = 1, padding: int = 0
) -> Args:
    """Each row computes `counts` of its positions, up to its end."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    blocks = -(-width // block_tokens)
    return (
        make.integers(0, 1000, slots, width),
        make.integers(0, width, slots),
        make.integers(1, 5000, groups, slots, blocks),
        make.permutation(slots)[: len(counts)].contiguous(),
        make.tensor([(7 * row) % (width - count + 1) for row, count in enumerate(counts)]),
        make.tensor(ends),
        ends[-1] + padding,
        block_tokens,
    )


def _traffic(
    tokens: Tensor, rope_lengths: Tensor, tables: Tensor, slot: Tensor, first: Tensor, query_start: Tensor, *rest: int
) -> int:
    total = rest[0]
    return nbytes(slot, first, query_start) + 4 * (6 + len(tables)) * total


STEP_INPUTS = Op(
    name="step_inputs",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("mixed", {"counts": [1, 5, 1, 0, 9], "slots": 8, "width": 13}),
        Case("padded", {"counts": [1, 1, 0, 0], "slots": 4, "width": 9, "padding": 2}),
        Case("groups", {"counts": [3, 1], "slots": 3, "width": 11, "block_tokens": 3, "groups": 3}),
        Case("long", {"counts": [300], "slots": 2, "width": 301}),
        Case("empty", {"counts": [], "slots": 2, "width": 8}),
        Case(
            "decode-256",
            {"counts": [1] * 256, "slots": 256, "width": 131073, "block_tokens": 16, "groups": 1},
            bench=True,
        ),
        Case("prefill-8192", {"counts": [2048] * 4, "slots": 256, "width": 131073, "block_tokens": 16}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},  # whole numbers only
    traffic=_traffic,
    rows=lambda args: args[3].shape[0],
)


def _written(tensor: Tensor, runs: Tensor, count: int) -> Tensor:
    """tensor: int32 of any shape; runs: int32, `count` triples (place in the tensor, length, place of the values in
    `runs` itself), then the values → the tensor, changed in place."""
    flat = tensor.view(-1)
    for place, length, source in runs[: 3 * count].view(-1, 3).tolist():
        flat[place : place + length] = runs[source : source + length]
    return tensor


@jit
def staged_writes_kernel(tensor, runs, BLOCK: tl.constexpr):
    """One program for each run."""
    run = runs + tl.program_id(0) * 3
    place, length, source = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    for at in range(0, length, BLOCK):
        some = at + tl.arange(0, BLOCK)
        keep = some < length
        tl.store(tensor + place + some, tl.load(runs + source + some, keep, 0), keep)


def _write(tensor: Tensor, runs: Tensor, count: int) -> Tensor:
    launch(staged_writes_kernel, (count,), tensor, runs, BLOCK=256, warps=1)
    return tensor


def _runs(make: Make, lengths: list[int], size: int) -> Args:
    """Runs of these lengths at places that do not overlap."""
    values = make.integers(0, 10_000, sum(lengths))
    space = size // max(1, len(lengths))
    header, source = [], 3 * len(lengths)
    for number, length in enumerate(lengths):
        header += [number * space + (number % 3), length, source]
        source += length
    return make.integers(0, 9, size), torch.cat((make.tensor(header), values)), len(lengths)


STAGED_WRITES = Op(
    name="staged_writes",
    reference=_written,
    triton=_write,
    inputs=_runs,
    cases=(
        Case("some", {"lengths": [3, 1, 20, 300], "size": 2000}),
        Case("empty", {"lengths": [], "size": 10}),
        Case("256-requests", {"lengths": [1] * 255 + [8192], "size": 16_000_000}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    traffic=lambda tensor, runs, count: 2 * nbytes(runs),
)


@jit
def next_tokens_kernel(tokens, slot, lengths, ids, WIDTH: tl.constexpr):
    """One program for each row."""
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    if length > 0:
        tl.store(tokens + tl.load(slot + row).to(tl.int64) * WIDTH + length, tl.load(ids + row))


def _next(tokens: Tensor, slot: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    launch(next_tokens_kernel, (slot.shape[0],), tokens, slot, lengths, ids, WIDTH=tokens.stride(0), warps=1)
    return tokens


def _next_reference(tokens: Tensor, slot: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    """tokens: [slots, positions] int32; slot, lengths, ids: [rows] int32. The token drawn for row r becomes the one at
    position lengths[r] of line slot[r]; rows of length 0 draw nothing. → tokens, changed in place."""
    real = lengths > 0
    tokens[slot[real].long(), lengths[real].long()] = ids[real]
    return tokens


def _drawn(make: Make, rows: int, slots: int, width: int) -> Args:
    lengths = make.integers(1, width, rows)
    if rows > 1 and not make.meta:
        lengths[rows // 2] = 0
    slot = make.permutation(slots)[:rows].contiguous()
    return make.integers(0, 9, slots, width), slot, lengths, make.integers(10, 1000, rows)


NEXT_TOKENS = Op(
    name="next_tokens",
    reference=_next_reference,
    triton=_next,
    inputs=_drawn,
    cases=(
        Case("some", {"rows": 5, "slots": 7, "width": 9}),
        Case("empty", {"rows": 0, "slots": 2, "width": 4}),
        Case("256", {"rows": 256, "slots": 256, "width": 131073}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    traffic=lambda tokens, slot, lengths, ids: 4 * nbytes(ids),
)
