"""The rows of one step that draw a token, as the stages see them.

A stage is a function `Rows -> Edit | None`: on the host it looks who uses it and prepares small index tensors; None
means that nobody does and nothing is launched. An `Edit` changes logits [rows, vocab] in place, later, on the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.sampling.columns import Columns

Edit = Callable[[Tensor], None]


@dataclass(frozen=True)
class Rows:
    """`lengths[i]` tokens of slot `slots[i]` are known, so the drawn token gets that position. `tokens` is the request
    table's column. `masks`: allowed tokens of constrained rows, one bit each. `device` is the logits'."""

    slots: np.ndarray  # [rows] int64
    lengths: np.ndarray  # [rows] int64
    columns: Columns
    tokens: np.ndarray  # [slots, max_context + 1] integer
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)  # row: [ceil(vocab / 32)] uint32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.slots)

    def to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)

    def using(self, sparse: Mapping[int, object]) -> list[int]:
        """The rows whose slot has an entry."""
        return [row for row, slot in enumerate(self.slots.tolist()) if slot in sparse] if sparse else []

    @cached_property
    def greedy(self) -> np.ndarray:
        return self.columns.temperature[self.slots] == 0.0

    def history(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Known tokens of these rows and which of them are the reply's: ids and bool [rows, longest]. Places past a
        row's end repeat its first token and count as prompt, so that a scatter there writes what is written anyway."""
        lengths, slots = self.lengths[rows], self.slots[rows]
        at = np.arange(int(lengths.max()))
        known = at < lengths[:, None]
        reply = known & (at >= self.columns.prompt_tokens[slots][:, None])
        ids = self.tokens[slots, : len(at)].astype(np.int64)
        return self.to_device(np.where(known, ids, ids[:, :1])), self.to_device(reply)


def flat(rows: list[int], ids: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Index pairs (row, id) of lists of ids of several rows, end to end."""
    return np.repeat(np.array(rows, np.int64), [len(part) for part in ids]), np.concatenate(ids)
