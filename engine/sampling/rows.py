"""The rows of one step that sample a token.

A stage is a function `Rows -> LogitProcessor | None`. On the host it determines which rows use it and prepares index
tensors, or returns None if no row does. The LogitProcessor changes logits [rows, vocab] in place on the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.sampling.columns import Columns

LogitProcessor = Callable[[Tensor], None]


@dataclass(frozen=True)
class Rows:
    """Rows and the request data that stages read."""

    slots: np.ndarray  # [rows] int64
    lengths: np.ndarray  # [rows] int64, number of known tokens, which is the position of the sampled token
    columns: Columns
    tokens: np.ndarray  # [slots, max_context + 1] integer, of the request table
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)  # constrained row: [ceil(vocab / 32)] uint32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the logits

    def __len__(self) -> int:
        return len(self.slots)

    def to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def using(self, sparse: Mapping[int, object]) -> list[int]:
        """Return the rows whose slot has an entry."""
        return [row for row, slot in enumerate(self.slots.tolist()) if slot in sparse] if sparse else []

    @cached_property
    def greedy(self) -> np.ndarray:
        return self.columns.temperature[self.slots] == 0.0

    def history(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the known tokens of these rows and which of them belong to the reply: ids and bool [rows, longest].
        Padding repeats a row's first token and counts as prompt, so that scattering to it has no effect."""
        lengths, slots = self.lengths[rows], self.slots[rows]
        at = np.arange(int(lengths.max()))
        known = at < lengths[:, None]
        reply = known & (at >= self.columns.prompt_tokens[slots][:, None])
        ids = self.tokens[slots, : len(at)].astype(np.int64)
        return self.to_device(np.where(known, ids, ids[:, :1])), self.to_device(reply)


def flat(rows: list[int], ids: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return index pairs (row, id) for lists of ids of several rows, concatenated."""
    return np.repeat(np.array(rows, np.int64), [len(part) for part in ids]), np.concatenate(ids)
