"""Rows of a step and their states, as all recurrent operations receive them.

The tokens of all rows are concatenated. The last arguments of an operation with a state are:

    state        one float32 line for each slot, contiguous within a slot; slots may be farther apart, because the pool
                 of a model holds the states of all layers for each slot
    query_start  [rows + 1] int32: the tokens of row r are query_start[r] … query_start[r + 1] - 1
    slots        [rows] int32: line of `state` of each row; no two rows with tokens share a line
    first        [rows] int32: position of the first token of each row; at 0 the previous state is zeros, whatever the
                 line contains (it may be NaN)

The line of a row then contains the state after its last token. Rows without tokens change nothing. Outputs of tokens
after the last row (a step padded to the size of a captured graph) are not written.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kernels.jit import jit, tl
from kernels.op import Args, Make, SingleRow


def rows_with_tokens(
    state: Tensor, query_start: Tensor, slots: Tensor, first: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each row with tokens the range of these tokens, a copy of the state before them, and the line of
    `state` to update."""
    bounds = query_start.tolist()
    for begin, end, slot, position in zip(bounds, bounds[1:], slots.tolist(), first.tolist(), strict=False):
        if end > begin:
            line = state[slot]
            yield slice(begin, end), torch.zeros_like(line) if position == 0 else line.clone(), line


@jit
def row_bounds(row, query_start, slots, first, slot_stride):
    """Return the first token of a row, the number of its tokens, the offset of its state, and the position of its first
    token."""
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    return start.to(tl.int64), count, tl.load(slots + row).to(tl.int64) * slot_stride, tl.load(first + row)


@jit
def softplus(x):
    """log(1 + e^x), by a series in z / (2 + z) with z = e^-|x|: Triton has no log1p on all devices."""
    z = tl.exp(-tl.abs(x))
    s = z / (z + 2.0)
    square = s * s
    p = square * (2.0 / 15.0) + 2.0 / 13.0
    p = p * square + 2.0 / 11.0
    p = p * square + 2.0 / 9.0
    p = p * square + 2.0 / 7.0
    p = p * square + 2.0 / 5.0
    p = p * square + 2.0 / 3.0
    p = p * square + 2.0
    return tl.maximum(x, 0.0) + p * s


@jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


def check_state(state: Tensor) -> int:
    """Return the slot stride of a state in elements. Raise ValueError unless it is float32 and each slot is
    contiguous."""
    if state.dtype != torch.float32 or not state[:1].is_contiguous():
        raise ValueError(f"state: must be float32 and contiguous within a slot, not {state.dtype} {state.stride()}")
    return state.stride(0)


def token_stride(x: Tensor, name: str) -> int:
    """Return the stride of tokens in elements. Raise ValueError unless the elements of a token are contiguous."""
    if not x[:1].is_contiguous():
        raise ValueError(f"{name}: the elements of a token must be contiguous, not {x.stride()} apart")
    return x.stride(0)


def draw_rows(make: Make, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return query_start, slots and first of rows with these numbers of tokens. There is one more slot than rows.
    Every second row starts at position 0."""
    starts = list(accumulate(counts, initial=0))
    first = [0 if row % 2 == 0 else row + 4 for row in range(len(counts))]
    return make.tensor(starts), make.permutation(len(counts) + 1)[:-1], make.tensor(first)


def draw_state(make: Make, slots: Tensor, first: Tensor, *shape: int) -> Tensor:
    """Draw the states of `draw_rows`, with NaN in slots whose rows start at position 0, and in the unused one."""
    state = make.normal(len(slots) + 1, *shape, dtype=torch.float32)
    if not make.meta:
        unused = torch.ones(len(state), dtype=torch.bool, device=state.device)
        unused[slots[first > 0].long()] = False
        state[unused] = float("nan")
    return state


def draw_slopes(make: Make, *shape: int) -> Tensor:
    """Draw A, negative numbers."""
    logs = make.normal(*shape, dtype=torch.float32)
    return logs if make.meta else -logs.exp()


def single_row(tokens: Sequence[int], state: int) -> SingleRow:
    """Return `single_row` of operations whose arguments at `tokens` have a line for each token. The state, at `state`,
    is followed by query_start, slots and first. Outputs are one tensor of tokens, and the state."""

    def select(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
        begin, end = args[state + 1][row : row + 2].tolist()
        slot = int(args[state + 2][row])
        own = list(args)
        for at in tokens:
            own[at] = None if args[at] is None else args[at][begin:end]
        own[state] = args[state][slot : slot + 1]
        own[state + 1] = args[state + 1][row : row + 2] - begin
        own[state + 2] = torch.zeros_like(args[state + 2][:1])
        own[state + 3] = args[state + 3][row : row + 1]
        return tuple(own), lambda outputs: (outputs[0][begin:end], outputs[1][slot : slot + 1])

    return select
