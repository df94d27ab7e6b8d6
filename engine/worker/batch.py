"""Build the input tensors of a step from the request table, with vectorised operations and no loop over rows."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.layers.batch import Batch, EncoderInputs

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
    sources: Integers | None = None,
    adapters: Integers | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Row i computes positions [first[i], first[i] + count[i]) of the request in table slot slots[i]; count ≥ 1.

    tokens: [table slots, positions], known ids. segments: [tokens] of the step. rope_lengths: [table slots]. tables:
    per group [table slots, blocks]. sources: [table slots], length of the encoder input; None without an encoder.
    adapters: [table slots], adapter of the request or -1; None without adapters.
    """
    count = np.asarray(count, np.int64)
    first = np.asarray(first, np.int64)
    decoder_starts, encoder_inputs = np.zeros_like(first), None
    if sources is not None:
        decoder_starts = np.asarray(sources)[slots]
        encoder_inputs = _encoder_inputs(
            np.asarray(slots)[first < decoder_starts], tokens, sources, tables, block_tokens, device
        )
        count = first + count - np.maximum(first, decoder_starts)
        first = np.maximum(first, decoder_starts)
    ends = np.cumsum(count)
    starts = ends - count
    total = int(ends[-1]) if len(ends) else 0
    owner = np.repeat(np.arange(len(count)), count)
    positions = np.arange(total) + (first - starts)[owner]
    slot = np.asarray(slots)[owner]
    lengths = first + count
    # Tables are truncated to the blocks that this step can access, to copy less.
    width = -(-int(lengths.max()) // block_tokens) if total else 0
    block, offset = np.divmod(positions, block_tokens)

    def tensor(values: Integers) -> Tensor:
        return _tensor(values, device)

    return Batch(
        ids=tensor(tokens[slot, positions]),
        positions=tensor(positions - decoder_starts[owner]),
        rope_lengths=tensor(np.maximum(np.asarray(rope_lengths)[slot], positions + 1)),
        query_start=tensor(np.concatenate(([0], ends))),
        lengths=tensor(lengths),
        tables=tuple(tensor(table[slots, :width]) for table in tables),
        slot_mapping=tuple(tensor(table[slot, block].astype(np.int64) * block_tokens + offset) for table in tables),
        first=tuple(first.tolist()),
        count=tuple(count.tolist()),
        slots=tensor(np.asarray(slots)),
        segments=None if segments is None else tensor(segments),
        decoder_starts=None if sources is None else tuple(decoder_starts.tolist()),
        encoder_inputs=encoder_inputs,
        adapters=None if adapters is None else _adapters(adapters[slot], device),
    )


def _adapters(adapters: Integers, device: torch.device | str) -> Tensor | None:
    if not (adapters >= 0).any():
        return None
    return torch.from_numpy(np.ascontiguousarray(adapters, np.int32)).to(device)


def _encoder_inputs(
    slots: Integers,
    tokens: Integers,
    sources: Integers,
    tables: Sequence[Integers],
    block_tokens: int,
    device: torch.device | str,
) -> EncoderInputs | None:
    """Return the complete encoder inputs of these requests."""
    if not len(slots):
        return None
    count = np.asarray(sources)[slots]
    slot = np.repeat(slots, count)
    positions = np.arange(len(slot)) - np.repeat(np.cumsum(count) - count, count)
    block, offset = np.divmod(positions, block_tokens)
    return EncoderInputs(
        ids=_tensor(tokens[slot, positions], device),
        positions=_tensor(positions, device),
        slot_mapping=tuple(
            _tensor(table[slot, block].astype(np.int64) * block_tokens + offset, device) for table in tables
        ),
        count=tuple(count.tolist()),
    )


def _tensor(values: Integers, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)
