"""Whisper: speech recognition and translation with an encoder of spectrograms and a decoder with cross-attention.

The encoder is pre-norm, after two convolutions (see AudioEmbedding); the decoder has learned positions, and its logits
share the token embedding. Projections to keys have no bias.

Source: transformers modeling_whisper.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.bart import Side, side_block
from engine.models.config import MAX_LAYERS, Config, shown
from engine.models.parts import (
    Alignment,
    Attention,
    AudioEmbedding,
    Block,
    Body,
    Embedding,
    Encoder,
    Head,
    LayerNorm,
    Lookup,
    Model,
    ResidualBlock,
    named,
)

ARCHITECTURES = ("WhisperForConditionalGeneration",)
MAX_MELS = 1024
MAX_MEDIAN = 99  # positions of the filter of alignments
_DEFAULTS = {"activation_function": "gelu", "max_source_positions": 1500, "max_target_positions": 448}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, num_mel_bins=80, **_DEFAULTS)
    if c.values.get("tie_word_embeddings", True) is not True:
        raise CheckpointError("config.json: tie_word_embeddings is not true; supported are models with a tied head")
    hidden = c.whole("d_model")
    window, longest = c.whole("max_source_positions"), c.whole("max_target_positions")
    norm = LayerNorm(size=hidden, eps=1e-5)

    def branch(body: Body, name: str) -> ResidualBlock:
        return ResidualBlock(body=body, before=named(norm, name))

    def block(side: Side) -> Block:
        return side_block(c, side, branch, key_bias=False)

    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=hidden,
            scale=math.sqrt(hidden) if c.flag("scale_embedding") else 1.0,
            name="decoder.embed_tokens",
            positions=Lookup(count=longest, name="decoder.embed_positions"),
        ),
        blocks=(block("decoder"),) * c.whole("decoder_layers", most=MAX_LAYERS),
        norm=named(norm, "decoder.layer_norm"),
        head=Head(tied=True),
        max_context=window + longest,
        layers="decoder.layers",
        encoder=Encoder(
            embed=AudioEmbedding(
                mels=c.whole("num_mel_bins", most=MAX_MELS), hidden=hidden, positions=window, name="encoder"
            ),
            blocks=(block("encoder"),) * c.whole("encoder_layers", most=MAX_LAYERS),
            norm=named(norm, "encoder.layer_norm"),
            max_encoder_input=window,
            layers="encoder.layers",
        ),
        unread=("proj_out.",),  # a stored copy of the token embedding
    )


def with_alignment(model: Model, config: Mapping[str, Any], generation: Mapping[str, Any], place: str) -> Model:
    """Return the model with the alignment heads of generation_config.json; by default those of the upper half of the
    decoder, as in the reference implementation. place: name of the file in errors. Raises CheckpointError."""
    assert model.encoder is not None, "a speech model has an encoder"
    layers = len(model.blocks)
    heads = next(part.body.heads for part in model.blocks[0] if isinstance(part.body, Attention) and part.body.source)
    given = generation.get("alignment_heads")
    if given is None:
        found = {(layer, head) for layer in range(layers // 2, layers) for head in range(heads)}
    else:
        if not isinstance(given, list) or not given:
            raise CheckpointError(f"{place}: alignment_heads is {shown(given)}; it must be a list of layers and heads")
        found = {_alignment_head(pair, layers, heads, place) for pair in given}
    width = Config.of(config, median_filter_width=7).whole("median_filter_width", most=MAX_MEDIAN)
    if width % 2 == 0:
        raise CheckpointError(f"config.json: median_filter_width is {width}; it must be odd")
    alignment = Alignment(heads=tuple(sorted(found)), median_width=width)
    return replace(model, encoder=replace(model.encoder, alignment=alignment))


def _alignment_head(pair: Any, layers: int, heads: int, place: str) -> tuple[int, int]:
    ids = pair if isinstance(pair, list) else []
    if len(ids) != 2 or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise CheckpointError(f"{place}: alignment_heads has {shown(pair)}; each entry must be a layer and a head")
    layer, head = ids
    if not (0 <= layer < layers and 0 <= head < heads):
        raise CheckpointError(
            f"{place}: alignment_heads has {shown(pair)}; the decoder has {layers} layers of {heads} heads"
        )
    return layer, head
