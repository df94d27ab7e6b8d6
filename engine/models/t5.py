"""T5 (also Flan-T5), mT5 and UMT5: encoder-decoder models with relative position biases, RMS norms and no biases.

Scores are not scaled. T5 and mT5 have one bias table for all layers of the encoder and one for the decoder, in their
first layers; UMT5 has one in every layer. Cross-attention has none.

Source: transformers modeling_t5.py, modeling_mt5.py, modeling_umt5.py. Logits are multiplied by d_model ** -0.5 unless
`scale_decoder_outputs` (written by transformers 5) or `tie_word_embeddings` is false; those of mT5 never are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.api.errors import CheckpointError
from engine.models.config import ACTIVATIONS, MAX_LAYERS, Config, shown
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Body,
    Embedding,
    Encoder,
    Head,
    Model,
    RelativeBias,
    ResidualBlock,
    RMSNorm,
    named,
)

MAX_DISTANCE = 65_536  # limit of relative_attention_max_distance: a table of biases has an entry for each distance
Side = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class _Kind:
    """Properties of an architecture."""

    bias_per_layer: bool  # else all layers use the table of the first one
    scales_logits: bool
    feed_forward: str  # default of feed_forward_proj


_KINDS = {
    "T5ForConditionalGeneration": _Kind(False, True, "relu"),
    "MT5ForConditionalGeneration": _Kind(False, False, "gated-gelu"),
    "UMT5ForConditionalGeneration": _Kind(True, True, "gated-gelu"),
}
ARCHITECTURES = tuple(_KINDS)
_DEFAULTS = {
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "n_positions": 512,
}


def declare(config: Mapping[str, Any]) -> Model:
    kind = _KINDS[config["architectures"][0]]
    c = Config.of(config, feed_forward_proj=kind.feed_forward, **_DEFAULTS)
    hidden, longest = c.whole("d_model"), c.whole("n_positions")
    norm = RMSNorm(size=hidden, eps=c.number("layer_norm_epsilon"))
    embed = Embedding(vocab=c.whole("vocab_size"), hidden=hidden, name="shared")

    def branch(body: Body, layer: str) -> ResidualBlock:
        return ResidualBlock(body=body, before=named(norm, f"{layer}.layer_norm"))

    def block(side: Side, number: int) -> Block:
        causal = side == "decoder"
        first = number if kind.bias_per_layer else 0
        relative = _relative(c, f"{side}.block.{first}.layer.0.SelfAttention.relative_attention_bias", causal=causal)
        own = branch(_attention(c, "layer.0.SelfAttention", causal=causal, relative=relative), "layer.0")
        if side == "encoder":
            return own, branch(_mlp(c, "layer.1.DenseReluDense"), "layer.1")
        cross = _attention(c, "layer.1.EncDecAttention", causal=False, source=True)
        return own, branch(cross, "layer.1"), branch(_mlp(c, "layer.2.DenseReluDense"), "layer.2")

    layers = c.whole("num_layers", most=MAX_LAYERS)
    decoder_layers = layers
    if c.values.get("num_decoder_layers") is not None:
        decoder_layers = c.whole("num_decoder_layers", most=MAX_LAYERS)
    scaled = kind.scales_logits and c.values.get(
        "scale_decoder_outputs", c.values.get("tie_word_embeddings") is not False
    )
    return Model(
        embed=embed,
        blocks=tuple(block("decoder", number) for number in range(decoder_layers)),
        norm=named(norm, "decoder.final_layer_norm"),
        head=Head(
            tied=c.values.get("tie_word_embeddings") is not False,
            tied_unless_stored=True,
            scale=hidden**-0.5 if scaled else 1.0,
        ),
        max_context=2 * longest,
        root="",
        layers="decoder.block",
        encoder=Encoder(
            embed=embed,
            blocks=tuple(block("encoder", number) for number in range(layers)),
            norm=named(norm, "encoder.final_layer_norm"),
            max_encoder_input=longest,
            layers="encoder.block",
        ),
        # Copies of the token embedding, and a table that the first T5 models have and nothing reads.
        unread=(
            "encoder.embed_tokens.",
            "decoder.embed_tokens.",
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",
        ),
    )


def _relative(c: Config, source: str, *, causal: bool) -> RelativeBias:
    buckets = c.whole("relative_attention_num_buckets", least=4)
    found = RelativeBias(
        buckets=buckets,
        max_distance=c.whole("relative_attention_max_distance", most=MAX_DISTANCE),
        bidirectional=not causal,
        source=source,
    )
    if found.max_distance <= buckets // 2:
        raise CheckpointError(
            f"config.json: relative_attention_max_distance is {found.max_distance}; it must be greater than half of "
            f"relative_attention_num_buckets, {buckets}"
        )
    return found


def _attention(
    c: Config, name: str, *, causal: bool, relative: RelativeBias | None = None, source: bool = False
) -> Attention:
    heads = c.whole("num_heads")
    return Attention(
        hidden=c.whole("d_model"),
        heads=heads,
        kv_heads=heads,
        head_dim=c.whole("d_kv"),
        rope=None,
        scale=1.0,
        causal=causal,
        source=source,
        relative=relative,
        sources=("q", "k", "v", "o"),
        name=name,
    )


def _mlp(c: Config, name: str) -> MLP:
    """feed_forward_proj is the name of an activation, with `gated-` in front of it for an MLP with a gate."""
    asked = c.values["feed_forward_proj"]
    gate, _, act = asked.rpartition("-") if isinstance(asked, str) else ("", "", "")
    act = "gelu_new" if asked == "gated-gelu" else act
    if gate not in ("", "gated") or act not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: feed_forward_proj is {shown(asked)}; supported are {', '.join(ACTIVATIONS)}, also with "
            "gated- in front"
        )
    return MLP(
        hidden=c.whole("d_model"),
        intermediate_size=c.whole("d_ff"),
        act=ACTIVATIONS[act],
        gate="wi_0" if gate else None,
        up="wi_1" if gate else "wi",
        down="wo",
        name=name,
    )
