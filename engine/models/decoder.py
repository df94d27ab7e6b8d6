"""Declaration of a decoder with Llama's order and names of blocks, which many families share.

Each family declares its attention, MLP and norm; `llama_decoder` places them.
"""

from collections.abc import Sequence

from engine.models.config import Config
from engine.models.parts import (
    MLP,
    Attention,
    Embedding,
    Experts,
    Head,
    Model,
    Norm,
    Parallel,
    Recurrent,
    ResidualBlock,
    Rope,
    SelfAttention,
    named,
)
from engine.models.rope import claimed_context

Feed = MLP | Experts | Parallel


def llama_decoder(
    c: Config,
    attention: Attention | Sequence[SelfAttention | Recurrent],
    mlp: Feed | Sequence[Feed],
    norm: Norm,
    *,
    positions: Rope | None,
    residual: float = 1.0,
    embedding: float = 1.0,
    logits: float = 1.0,
) -> Model:
    """Return the declaration. attention, mlp: of all layers, or of each; recurrent parts may replace attention.
    residual, embedding, logits: multipliers.

    positions: RoPE that determines the longest sequence."""
    layers = (attention,) * c.layers if isinstance(attention, Attention) else tuple(attention)
    mlps = (mlp,) * c.layers if isinstance(mlp, Feed) else tuple(mlp)
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, scale=embedding),
        blocks=tuple(
            (
                ResidualBlock(before=named(norm, "input_layernorm"), body=one, scale=residual),
                ResidualBlock(before=named(norm, "post_attention_layernorm"), body=two, scale=residual),
            )
            for one, two in zip(layers, mlps, strict=True)
        ),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), scale=logits),
        max_context=claimed_context(c, positions),
    )


def mask_buffers(c: Config, layers: str, attention: str) -> tuple[str, ...]:
    """Return the names of the causal masks that old exporters stored in each layer. They are not weights."""
    buffers = ("bias", "masked_bias", "causal_mask")
    return tuple(f"{layers}.{index}.{attention}.{name}" for index in range(c.layers) for name in buffers)
