"""Keys and values of bidirectional attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv.layout import whole_blocks
from engine.lowering.measures import WHOLE_BLOCK
from engine.lowering.operations import Attend
from engine.lowering.program import Op


class BidirectionalKV:
    """Keys and values of bidirectional attention, for one layer at a time. They are stored in pages like those of the
    KV cache, with each prompt in contiguous blocks."""

    def __init__(self, kv_heads: int, dim: int) -> None:
        self.kv_heads, self.dim = kv_heads, dim
        self.pages = self._made(0)

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    def reserve(self, tokens: int, rows: int) -> None:
        """Allocate pages for steps of this many tokens and prompts."""
        self.pages = self._made(whole_blocks(tokens, rows))

    def placed(self, count: Tensor, positions: Tensor) -> tuple[tuple[Tensor], tuple[Tensor], Tensor]:
        """Return block tables, write positions and pages of a step. count: tokens of each row; positions: of the tokens
        in their rows."""
        blocks = -(-count // WHOLE_BLOCK)
        begin = blocks.cumsum(0) - blocks
        if int(blocks.sum()) > len(self.pages):
            self.pages = self._made(int(blocks.sum()))
        table = begin.unsqueeze(1) + torch.arange(int(blocks.max()))
        slot_mapping = begin.repeat_interleave(count) * WHOLE_BLOCK + positions
        return (table,), (slot_mapping,), self.pages

    def _made(self, blocks: int) -> Tensor:
        return torch.zeros(blocks, 1, 2, WHOLE_BLOCK, self.kv_heads, self.dim)


def bidirectional_kv(ops: Sequence[Op]) -> BidirectionalKV | None:
    """Return the pages for bidirectional attention, or None for a model with a KV cache."""
    sizes = {(op.kv_heads, op.part.head_dim) for op in ops if isinstance(op, Attend) and op.layer is None}
    if not sizes:
        return None
    (size,) = sizes
    return BidirectionalKV(*size)
