"""The tensors of one step, as the model reads them. `engine.worker.batch` makes them from the request table."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Entering:
    """Sources that a step reads, one after another: `slots` is where keys and values of each token go, as in Batch."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: tuple[Tensor, ...]  # per group: [tokens] int64
    count: tuple[int, ...]  # tokens of each source


@dataclass(frozen=True)
class Batch:
    """Tokens of all rows, one row after another. `slots`: block · block_tokens + offset, where a token's K and V go.

    Where a decoder attends to sources, a sequence begins with its source: `begins` are the positions that the decoder's
    own tokens begin at, and what its layers read first. These tokens alone are in the batch, and count from there in
    `positions`; sources that the step reads are `entering`."""

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
    begins: tuple[int, ...] | None = None
    entering: Entering | None = None

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
