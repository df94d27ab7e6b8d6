"""The tensors of one step, made from the request table in a few vectorised operations, with no loop over rows."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.layers.batch import Batch

Integers = NDArray[np.integer]


def build_batch(
    slots: Integers,
    first: Integers,
    count: Integers,
    *,
    tokens: Integers,
    rope_lengths: Integers,
    tables: Sequence[Integers],
    block_tokens: int,
    segments: Integers | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Row i computes positions [first[i], first[i] + count[i]) of the request in table slot slots[i]; count ≥ 1.

    tokens: [table slots, positions], known ids; segments: [tokens] of the step; rope_lengths: [table slots]; tables:
    per group [table slots, blocks].
    """
    count = np.asarray(count, np.int64)
    first = np.asarray(first, np.int64)
    ends = np.cumsum(count)
    starts = ends - count
    total = int(ends[-1]) if len(ends) else 0
    owner = np.repeat(np.arange(len(count)), count)
    positions = np.arange(total) + (first - starts)[owner]
    slot = np.asarray(slots)[owner]
    lengths = first + count
    # Tables are cut to the blocks that this step can touch: wider ones would only be copied.
    width = -(-int(lengths.max()) // block_tokens) if total else 0
    block, offset = np.divmod(positions, block_tokens)

    def tensor(values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

    return Batch(
        ids=tensor(tokens[slot, positions]),
        positions=tensor(positions),
        rope_lengths=tensor(np.maximum(np.asarray(rope_lengths)[slot], positions + 1)),
        query_start=tensor(np.concatenate(([0], ends))),
        lengths=tensor(lengths),
        tables=tuple(tensor(table[slots, :width]) for table in tables),
        slots=tuple(tensor(table[slot, block].astype(np.int64) * block_tokens + offset) for table in tables),
        first=tuple(first.tolist()),
        count=tuple(count.tolist()),
        segments=None if segments is None else tensor(segments),
    )
