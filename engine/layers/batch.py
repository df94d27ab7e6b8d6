"""Input tensors of one step. `engine.worker.batch` builds them from the request table."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EncoderInputs:
    """Encoder inputs of a step, concatenated. `slot_mapping`: KV write position of each token, as in Batch."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slot_mapping: tuple[Tensor, ...]  # per group: [tokens] int64
    count: tuple[int, ...]  # tokens of each encoder input
    spectrograms: Tensor | None = None  # [inputs, mels, frames] float32, for a speech model


@dataclass(frozen=True)
class MediaRows:
    """Embeddings of the tokens of media in a step."""

    tokens: Tensor  # [n] int64, index in the step
    embeddings: Tensor  # [n, Media.width] of the activations' type

    def insert(self, x: Tensor) -> None:
        """Replace the rows of these tokens in x: [tokens, hidden]."""
        x.index_copy_(0, self.tokens, self.embeddings[:, : x.shape[1]])

    def fill(self, x: Tensor, row: Tensor) -> None:
        """Replace the rows of these tokens in x by one row: [1, columns of x]."""
        x.index_copy_(0, self.tokens, row.expand(len(self.tokens), -1))

    def add(self, x: Tensor, first: int) -> None:
        """Add columns of the embeddings, from `first` on, to the rows of these tokens in x: [tokens, hidden]."""
        x.index_add_(0, self.tokens, self.embeddings[:, first : first + x.shape[1]])


@dataclass(frozen=True)
class Batch:
    """Tokens of all rows, concatenated. `slot_mapping`: block · block_tokens + offset, the KV write position of each
    token.

    In an encoder-decoder model, a sequence begins with its encoder input. The batch contains only decoder tokens, and
    `positions` counts from the end of the encoder input."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    rope_lengths: Tensor  # [tokens] int64, length that determines the token's rotary scaling
    query_start: Tensor  # [rows + 1] int64, first token of each row, and the number of tokens
    lengths: Tensor  # [rows] int64, tokens of each sequence after this step
    tables: tuple[Tensor, ...]  # per group: [rows, blocks] int64, 0 for blocks that are unused or released
    slot_mapping: tuple[Tensor, ...]  # per group: [tokens] int64
    first: tuple[int, ...]  # first position of each row
    count: tuple[int, ...]  # positions of each row
    slots: Tensor  # [rows] int64, slot of each row in the request table, which is also its state slot
    segments: Tensor | None = None  # [tokens] int64, segment number of the token, for models with segments
    decoder_starts: tuple[int, ...] | None = None  # encoder-decoder: positions at which the decoder's tokens begin
    encoder_inputs: EncoderInputs | None = None  # encoder inputs that the step reads
    adapters: Tensor | None = None  # [tokens] int32, adapter of each token, -1 for none; None: no token has one
    media: MediaRows | None = None  # None: no token is of media
    axes: Tensor | None = None  # [tokens, 3] int64, M-RoPE positions in time, height and width; None: all `positions`
    states: Tensor | None = None  # [tokens, hidden], hidden states that a prediction head reads
    spans: Tensor | None = None
    """[tokens, 2] int64, begin and end of the positions that see one another in both directions with the token, equal
    for none; None: attention is causal for all tokens."""

    @property
    def rows(self) -> int:
        return len(self.count)

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def state_rows(self) -> tuple[Tensor, ...]:
        """Rows as recurrent operations receive them (kernels/recurrent/common.py): query_start, slots and first,
        int32."""
        first = torch.tensor(self.first, dtype=torch.int32, device=self.slots.device)
        return self.query_start.int(), self.slots.int(), first

    @property
    def last(self) -> Tensor:
        """[rows]: index of each row's last token."""
        return self.query_start[1:] - 1
