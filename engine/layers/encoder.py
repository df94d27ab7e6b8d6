"""Encoder of an encoder-decoder model."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.layers.batch import EncoderInputs
from engine.layers.block import KVLayerAllocator, Loadable, ResidualBlockLayer
from engine.layers.norm import NormLayer
from engine.layers.step import Step
from engine.layers.vocabulary import EncoderEmbedding, Vocabulary
from engine.models.parts import Encoder
from engine.models.sources import join


class EncoderLayers:
    """Bidirectional blocks over each encoder input. Only the keys and values for cross-attention are cached."""

    def __init__(
        self, part: Encoder, root: str, world: World, vocabulary: Vocabulary, allocator: KVLayerAllocator
    ) -> None:
        self.embedding = EncoderEmbedding(part.embed, root, vocabulary)
        self.residual_blocks = [
            ResidualBlockLayer(residual_block, join(root, part.layers, str(index)), world, allocator)
            for index, block in enumerate(part.blocks)
            for residual_block in block
        ]
        self.norm = NormLayer(part.norm, root) if part.norm is not None else None

    @property
    def loadables(self) -> Iterator[EncoderEmbedding | Loadable]:
        yield self.embedding
        for block in self.residual_blocks:
            yield from block.loadables
        if self.norm is not None:
            yield self.norm

    def __call__(self, encoder_inputs: EncoderInputs, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [tokens, hidden] of all encoder inputs, concatenated."""
        step = Step(pages, (), (), {}, encoder_inputs.count)
        x = self.embedding.entered(encoder_inputs.ids, encoder_inputs.positions, dtype)
        for block in self.residual_blocks:
            x = block(x, step)
        return x if self.norm is None else self.norm(x)
