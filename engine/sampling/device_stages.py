"""Logit processors of `pipeline.py` as kernels.

`stage(rows, upload)` runs on the host: it determines which rows use the stage and adds their parameters to the step's
upload, or returns None if no row uses it. The returned LogitProcessor changes logits [rows, vocab] fp32 in place on the
device. Compiled CPU kernels have the same arguments (compiled.py). Known tokens are read from the device's table,
because the host does not have the latest ones yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import Rows, flat
from kernels.op import Op
from kernels.sampling.bad_words import BAD_WORDS
from kernels.sampling.logit_bias import LOGIT_BIAS
from kernels.sampling.min_tokens import MIN_TOKENS
from kernels.sampling.penalties import PENALTIES
from kernels.sampling.token_mask import TOKEN_MASK


class PenaltyColumns(Protocol):
    """Device columns that processors read, [slots] each."""

    @property
    def prompt_tokens(self) -> Tensor: ...  # int32
    @property
    def repetition(self) -> Tensor: ...  # fp32
    @property
    def frequency(self) -> Tensor: ...
    @property
    def presence(self) -> Tensor: ...


def _launched(op: Op) -> Callable[..., Any]:
    return op


@dataclass(frozen=True)
class State:
    """Device inputs of processors."""

    slot: Tensor  # [rows] int32
    lengths: Tensor  # [rows] int32
    tokens: Tensor  # [slots, width] int32
    columns: PenaltyColumns
    counts: Tensor  # [some, vocab] int32, scratch with one line per row of a launch (kernels/sampling/penalties.py)
    body: Callable[[Op], Callable[..., Any]] = _launched  # selects the implementation of an operation; default: Triton


LogitProcessor = Callable[[Tensor, State], object]


ALIGNED = 4  # words: kernels are specialised for arguments at multiples of 16 bytes, and recompiled for others


class Upload:
    """Arrays of a step that are copied to the device at once."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._words = 0
        self._sent: Tensor | None = None

    def add(self, values: np.ndarray) -> Callable[[], Tensor]:
        """Add 32-bit values. Return a function that returns them on the device after `send`."""
        part = np.ascontiguousarray(values)
        start, end = self._words, self._words + part.size
        dtype = torch.float32 if part.dtype == np.float32 else torch.int32
        gap = -end % ALIGNED
        self._parts += [part.reshape(-1).view(np.int32), np.zeros(gap, np.int32)]
        self._words = end + gap

        def there() -> Tensor:
            assert self._sent is not None, "call send before reading"
            return self._sent[start:end].view(dtype).view(part.shape)

        return there

    def send(self, device: torch.device) -> None:
        if not self._parts:
            return
        whole = torch.from_numpy(np.concatenate(self._parts))
        if device.type == "cuda":
            whole = whole.pin_memory()  # torch keeps the memory until the copy is done
        self._sent = whole.to(device, non_blocking=True)


def token_mask(rows: Sequence[int], words: Sequence[np.ndarray], upload: Upload) -> LogitProcessor | None:
    """Return the processor that applies masks. words: [ceil(vocab / 32)] uint32 for each row."""
    if not rows:
        return None
    users, bits = upload.add(np.array(rows, np.int32)), upload.add(np.stack(words).view(np.int32))
    return lambda logits, state: state.body(TOKEN_MASK)(logits, users(), bits())


def allowed_token_ids(rows: Rows, upload: Upload) -> LogitProcessor | None:
    users = rows.using(rows.columns.allowed)
    return token_mask(users, [rows.columns.allowed_bits(int(rows.slots[row])) for row in users], upload)


def logit_bias(rows: Rows, upload: Upload) -> LogitProcessor | None:
    users = rows.using(rows.columns.bias)
    if not users:
        return None
    entries = [rows.columns.bias[int(rows.slots[row])] for row in users]
    at, ids = (upload.add(part.astype(np.int32)) for part in flat(users, [ids for ids, _ in entries]))
    values = upload.add(np.concatenate([values for _, values in entries]))
    return lambda logits, state: state.body(LOGIT_BIAS)(logits, at(), ids(), values())


def min_tokens(rows: Rows, upload: Upload) -> LogitProcessor | None:
    columns = rows.columns
    early = rows.lengths - columns.prompt_tokens[rows.slots] < columns.min_tokens[rows.slots]
    users = [row for row in rows.using(columns.stop_ids) if early[row]]
    if not users:
        return None
    lists = [columns.stop_ids[int(rows.slots[row])] for row in users]
    padded = np.full((len(users), max(map(len, lists))), -1, np.int32)
    for line, ids in zip(padded, lists, strict=True):
        line[: len(ids)] = ids
    at, stops = upload.add(np.array(users, np.int32)), upload.add(padded)
    return lambda logits, state: state.body(MIN_TOKENS)(logits, at(), stops())


def penalties(rows: Rows, upload: Upload, at_once: int) -> LogitProcessor | None:
    """Return the penalty processor. at_once: rows per launch."""
    columns, slots = rows.columns, rows.slots
    begun = rows.lengths > columns.prompt_tokens[slots]
    of_reply = ((columns.frequency[slots] != 0) | (columns.presence[slots] != 0)) & begun
    users = np.flatnonzero((columns.repetition[slots] != 1.0) | of_reply)
    if not len(users):
        return None
    at = upload.add(users.astype(np.int32))

    def process(logits: Tensor, state: State) -> None:
        columns = state.columns
        known = state.slot, state.lengths, state.tokens, columns.prompt_tokens
        strength = columns.repetition, columns.frequency, columns.presence
        for start in range(0, len(users), at_once):
            state.body(PENALTIES)(logits, at()[start : start + at_once], *known, *strength, state.counts)

    return process


def bad_words(rows: Rows, upload: Upload) -> LogitProcessor | None:
    users = rows.using(rows.columns.bad_words)
    if not users:
        return None
    words = [rows.columns.bad_words[int(rows.slots[row])] for row in users]
    longest = max(word.prefixes.shape[1] for word in words)
    padded = [np.pad(w.prefixes, ((0, 0), (longest - w.prefixes.shape[1], 0)), constant_values=-1) for w in words]
    row = upload.add(np.repeat(np.array(users, np.int32), [len(word.lasts) for word in words]))
    last = upload.add(np.concatenate([word.lasts for word in words]).astype(np.int32))
    prefix = upload.add(np.concatenate(padded).astype(np.int32))

    def process(logits: Tensor, state: State) -> None:
        known = state.slot, state.lengths, state.tokens, state.columns.prompt_tokens
        state.body(BAD_WORDS)(logits, *known, row(), last(), prefix())

    return process
