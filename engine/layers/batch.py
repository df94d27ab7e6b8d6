"""The tensors of one step, as the model reads them. `engine.worker.batch` makes them from the request table."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Tokens of all rows, one row after another. `slots`: block · block_tokens + offset, where a token's K and V go."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    rope_lengths: Tensor  # [tokens] int64, the length of sequence whose rotation the token uses
    query_start: Tensor  # [rows + 1] int64, first token of each row, and the number of tokens
    lengths: Tensor  # [rows] int64, tokens of each sequence after this step
    tables: tuple[Tensor, ...]  # per group: [rows, blocks] int64, 0 where there is none (any more)
    slots: tuple[Tensor, ...]  # per group: [tokens] int64
    first: tuple[int, ...]  # first position of each row
    count: tuple[int, ...]  # positions of each row
    segments: Tensor | None = None  # [tokens] int64, number of the token's segment, of models that tell them apart

    @property
    def rows(self) -> int:
        return len(self.count)

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def last(self) -> Tensor:
        """[rows]: index of each row's last token."""
        return self.query_start[1:] - 1
