"""A step as device tensors."""

from dataclasses import dataclass

from torch import Tensor

from engine.layers.batch import MediaRows
from engine.layers.states import LayerStates


@dataclass(frozen=True)
class CrossAttentionInputs:
    """Cross-attention of a step: every decoder token is a separate row that attends to the entire encoder input."""

    decoder_starts: Tensor  # [rows] int32, first position of the decoder's tokens, where self-attention begins
    slot: Tensor  # [tokens] int32, slot of the token's request
    query_start: Tensor  # [tokens + 1] int32: 0, 1, …
    lengths: Tensor  # [tokens] int32, length of the encoder input; 0 for padding


@dataclass(frozen=True)
class DeviceStep:
    """A step as device tensors. Rows without tokens are padding.

    In an encoder-decoder model, rows contain only decoder tokens, and `positions` counts from the end of the encoder
    input."""

    ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    rope_lengths: Tensor  # [tokens] int32, length that determines the token's rotary scaling
    slot_mapping: Tensor  # [groups, tokens] int32, KV write position: block · block_tokens + offset, or negative
    slot: Tensor  # [rows] int32, index into `tables`
    query_start: Tensor  # [rows + 1] int32
    lengths: Tensor  # [rows] int32, tokens of each sequence after this step
    tables: Tensor  # [groups, slots, blocks] int32
    pages: Tensor  # [blocks, layers_per_block, planes, block_tokens, kv_heads, head_dim]
    singles: bool  # some row has one token
    spans: bool  # some row has several tokens
    segments: Tensor | None = None  # [tokens] int32, for models with segment embeddings
    first: Tensor | None = None  # [rows] int32, position of each row's first token, for recurrent layers
    states: LayerStates = ()  # of the recurrent layers
    cross_attention: CrossAttentionInputs | None = None
    encoder_inputs: "DeviceStep | None" = None  # encoder inputs to read before this step
    media: MediaRows | None = None  # None: no token is of media
    rope_deltas: Tensor | None = None  # [tokens] int32, rotary position minus position; None: both are equal
    axes: Tensor | None = None  # [tokens, 3] int32, M-RoPE positions in time, height and width; None: all `positions`
    adapters: Tensor | None = None  # [tokens] int32, LoRA adapter of each token, their number for none
    draft_inputs: Tensor | None = None  # [tokens, hidden], hidden states that a head for drafts reads
    bidirectional: Tensor | None = None  # [tokens, 2] int32, spans of tokens that see one another; None: none do
