"""Declaration of a decoder with Llama's order and names of blocks, which many families share.

Each family declares its attention, MLP and norm; `llama_decoder` places them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

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
    PredictionInput,
    Predictor,
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


def with_predictor(
    model: Model,
    c: Config,
    body: SelfAttention,
    mlp: Feed,
    names: Sequence[tuple[str, str]],
    *,
    tensors: tuple[str, str, str, str] = ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    count: str = "num_nextn_predict_layers",
    first: int = 0,
    further: Sequence[tuple[SelfAttention, Feed]] = (),
    before_norm: bool = False,
    further_states: Literal["model", "normed", "before norm"] = "normed",
    own_output: str = "",
    **reads: bool,
) -> Model:
    """Return the model with the heads that predict tokens after the next one, if the configuration has some.

    body, mlp: of the layer of a head. further: of later heads, if they differ. names: beginnings of the tensors in the
    checkpoint ({}: the number of the head, `first` for the first one), and in the layer. tensors: names of the
    projection, of the norms of embeddings and of hidden states, and of the final norm or "". count: key of the number
    of heads. own_output: name of the output matrix, if each head has its own. before_norm, further_states: see
    `Predictor`. reads: fields of `PredictionInput`."""
    if not c.values.get(count):
        return model
    norm = model.norm
    assert norm is not None, "a model with a prediction head has a final norm"
    projection, of_token, of_state, final = tensors

    def head(body: SelfAttention, mlp: Feed) -> Model:
        layer = (
            ResidualBlock(before=named(norm, "input_layernorm"), body=body),
            ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
        )
        output = f"{model.root}.layers.0.{own_output}"
        return replace(
            model,
            blocks=(layer,),
            norm=named(norm, f"layers.0.{final}") if final else None,
            head=Head(tied=False, name=output) if own_output else model.head,
            unread=(),
            shares_embedding=True,
            shares_head=not own_output,
            prediction_input=PredictionInput(
                projection=projection, token_norm=named(norm, of_token), state_norm=named(norm, of_state), **reads
            ),
            kept_layers=(1,) if further_states == "before norm" else (),
        )

    predictor = Predictor(
        model=head(body, mlp),
        names=tuple(names),
        before_norm=before_norm,
        first=first,
        further=tuple(head(*parts) for parts in further),
        further_states=further_states,
    )
    return replace(model, predictor=predictor)


def layers_of_heads(c: Config, count: str = "num_nextn_predict_layers") -> tuple[str, ...]:
    """Return the beginnings of the tensors of prediction heads in layers beyond the last one."""
    number = c.whole(count, least=0, most=64) if c.values.get(count) is not None else 0
    return tuple(f"layers.{c.layers + index}." for index in range(max(1, number)))


def mask_buffers(c: Config, layers: str, attention: str) -> tuple[str, ...]:
    """Return the names of the causal masks that old exporters stored in each layer. They are not weights."""
    buffers = ("bias", "masked_bias", "causal_mask")
    return tuple(f"{layers}.{index}.{attention}.{name}" for index in range(c.layers) for name in buffers)
