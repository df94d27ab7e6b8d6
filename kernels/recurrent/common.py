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

from collections.abc import Iterator

import torch
from torch import Tensor


def rows_with_tokens(
    state: Tensor, query_start: Tensor, slots: Tensor, first: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each row with tokens their range, a copy of the state before them, and the line of `state` to
    update."""
    bounds = query_start.tolist()
    for begin, end, slot, position in zip(bounds, bounds[1:], slots.tolist(), first.tolist(), strict=False):
        if end > begin:
            line = state[slot]
            yield slice(begin, end), torch.zeros_like(line) if position == 0 else line.clone(), line
