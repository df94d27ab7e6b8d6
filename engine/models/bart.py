"""BART, mBART, Pegasus, Marian and M2M100 (including NLLB): encoder-decoder models with cross-attention.

They differ in the placement of norms (post-norm in BART and Marian; pre-norm with a final norm in the others), in
whether embeddings are normalised, and in positions (learned or sinusoidal). Encoder and decoder share one token
embedding.

Source: transformers modeling_bart.py, modeling_mbart.py, modeling_pegasus.py, modeling_marian.py, modeling_m2m_100.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.api.errors import CheckpointError
from engine.models.config import MAX_LAYERS, Config
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Body,
    Embedding,
    Encoder,
    Head,
    LayerNorm,
    Lookup,
    Model,
    Norm,
    ResidualBlock,
    named,
)

Side = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class _Kind:
    """Properties of an architecture."""

    in_front: bool  # pre-norm, with a final norm
    normed: bool  # the embeddings are normalised
    positions: Literal["learned", "marian", "fairseq"]
    """learned: table whose positions start at the third row. marian: sinusoidal with period hidden / 2. fairseq:
    sinusoidal with period hidden / 2 - 1, positions start after the row of the padding id."""
    added: bool  # a bias row is added to the logits
    defaults: Mapping[str, Any]  # of the configuration class in transformers


_ALL = {"activation_function": "gelu", "max_position_embeddings": 1024, "pad_token_id": 1}
_M2M100 = {**_ALL, "activation_function": "relu", "scale_embedding": True}
_KINDS = {
    "BartForConditionalGeneration": _Kind(False, True, "learned", True, _ALL),
    "MBartForConditionalGeneration": _Kind(True, True, "learned", True, _ALL),
    "PegasusForConditionalGeneration": _Kind(True, False, "marian", True, _ALL),
    "MarianMTModel": _Kind(False, False, "marian", True, _ALL),
    "M2M100ForConditionalGeneration": _Kind(True, False, "fairseq", False, _M2M100),
}
ARCHITECTURES = tuple(_KINDS)


def declare(config: Mapping[str, Any]) -> Model:
    kind = _KINDS[config["architectures"][0]]
    c = Config.of(config, **kind.defaults)
    for key in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
        if c.values.get(key, True) is not True:
            raise CheckpointError(
                f"config.json: {key} is not true; supported are models whose encoder, decoder and logits share one "
                "token embedding"
            )
    hidden, longest = c.whole("d_model"), c.whole("max_position_embeddings")
    norm = LayerNorm(size=hidden, eps=1e-5)
    embed = Embedding(
        vocab=c.whole("vocab_size"),
        hidden=hidden,
        scale=math.sqrt(hidden) if c.flag("scale_embedding") else 1.0,
        name="shared",
    )

    def entered(side: str) -> Embedding:
        return replace(
            embed,
            positions=_positions(kind, f"{side}.embed_positions", longest, hidden, c.whole("pad_token_id", least=0)),
            norm=named(norm, f"{side}.layernorm_embedding") if kind.normed else None,
        )

    def branch(body: Body, name: str) -> ResidualBlock:
        own: Norm = named(norm, name)
        return ResidualBlock(body=body, before=own) if kind.in_front else ResidualBlock(body=body, last=own)

    def block(side: Side) -> Block:
        return side_block(c, side, branch)

    def end(side: str) -> Norm | None:
        return named(norm, f"{side}.layer_norm") if kind.in_front else None

    return Model(
        embed=entered("decoder"),
        blocks=(block("decoder"),) * c.whole("decoder_layers", most=MAX_LAYERS),
        norm=end("decoder"),
        head=Head(tied=True, added="final_logits_bias" if kind.added else ""),
        max_context=2 * longest,
        layers="decoder.layers",
        encoder=Encoder(
            embed=entered("encoder"),
            blocks=(block("encoder"),) * c.whole("encoder_layers", most=MAX_LAYERS),
            norm=end("encoder"),
            max_encoder_input=longest,
            layers="encoder.layers",
        ),
        # Aliases of the token embedding, and computed positions.
        unread=tuple(
            f"{side}.{name}"
            for side in ("encoder", "decoder")
            for name in ("embed_tokens.", "version", *(() if kind.positions == "learned" else ("embed_positions.",)))
        ),
    )


def side_block(c: Config, side: Side, branch: Callable[[Body, str], ResidualBlock], *, key_bias: bool = True) -> Block:
    """Return a block of the encoder or the decoder. branch: a body and the name of its norm as a residual block."""
    hidden, heads = c.whole("d_model"), c.whole(f"{side}_attention_heads")
    if hidden % heads:
        raise CheckpointError(
            f"config.json: {side}_attention_heads is {heads}; d_model, {hidden}, must be a multiple of it"
        )
    attention = Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        rope=None,
        bias=(True, True),
        key_bias=key_bias,
        causal=side == "decoder",
        sources=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    mlp = MLP(
        hidden=hidden,
        intermediate_size=c.whole(f"{side}_ffn_dim"),
        act=c.activation("activation_function"),
        bias=True,
        gate=None,
        up="fc1",
        down="fc2",
        name="",
    )
    first, last = branch(attention, "self_attn_layer_norm"), branch(mlp, "final_layer_norm")
    if side == "encoder":
        return first, last
    reads = replace(attention, source=True, causal=False, name="encoder_attn")
    return first, branch(reads, "encoder_attn_layer_norm"), last


def _positions(kind: _Kind, name: str, longest: int, hidden: int, padding: int) -> Lookup:
    half = hidden // 2
    match kind.positions:
        case "learned":
            return Lookup(count=longest + 2, name=name, offset=2)
        case "marian":
            return Lookup(count=longest, period=half)
        case "fairseq":
            return Lookup(count=longest + padding + 1, offset=padding + 1, period=half - 1)
