"""A complete model, its prediction heads, and the parts that it has."""

from typing import Literal

from engine.models.declared import declared
from engine.models.parts.attention import Attention, LatentAttention
from engine.models.parts.audio import AudioEmbedding
from engine.models.parts.blocks import Block, Body, PageWriter, SelfAttention, bodies, is_self_attention
from engine.models.parts.embeddings import Embedding, LayerInputs, Streams
from engine.models.parts.heads import Alignment, Head, Pooler
from engine.models.parts.media import Media
from engine.models.parts.mlp import Experts
from engine.models.parts.norms import Norm
from engine.models.parts.recurrent.mixer import Recurrent


@declared(frozen=True, kw_only=True)
class Encoder:
    """Encoder of an encoder-decoder model. Its token embedding is the decoder's. An encoder of audio reads complete
    windows of `max_encoder_input` positions."""

    embed: Embedding | AudioEmbedding
    blocks: tuple[Block, ...]
    norm: Norm | None
    max_encoder_input: int  # in tokens
    layers: str
    alignment: Alignment | None = None  # of a speech model


@declared(frozen=True, kw_only=True)
class Foreign:
    """Decoder computed by the modelling code of transformers; `Model.blocks` declares only its attention layers."""

    architecture: str
    width: int  # elements per token of its widest layer, estimated
    parameters: int = 0  # number of weights of the checkpoint
    recomputes: bool = False  # pages have tokens' ids instead of keys and values; steps compute complete sequences


@declared(frozen=True, kw_only=True)
class Model:
    """A decoder, an encoder, or both."""

    embed: Embedding
    blocks: tuple[Block, ...]
    norm: Norm | None
    head: Head | None
    max_context: int  # longest supported sequence in tokens, including the encoder input
    root: str = "model"
    layers: str = "layers"
    pooler: Pooler | None = None  # in place of the head
    encoder: Encoder | None = None
    unread: tuple[str, ...] = ()  # prefixes of tensors that checkpoints may have and that are not used
    transposed: bool = False  # projections of the layers are stored as [inputs, outputs] (GPT-2)
    foreign: Foreign | None = None
    media: Media | None = None  # tower and projectors of images, videos or audio
    encoder_only: bool = False  # the outputs are the embeddings of media; there is no token embedding and no block
    layer_inputs: LayerInputs | None = None
    streams: Streams | None = None
    predictor: "Predictor | None" = None  # head that predicts the token after the next one, if a checkpoint has it
    prediction_input: "PredictionInput | FusedStates | None" = None  # of a model that is such a head
    reads_media: bool = False  # a head that reads the embeddings of the media of the model that it drafts for
    kept_layers: tuple[int, ...] = ()
    """Layers whose inputs are kept side by side for a head that drafts, or for its own next draft. The number of layers
    is the output of the last one."""
    shares_embedding: bool = False  # with the model that it drafts for
    shares_head: bool = False

    @property
    def max_encoder_input(self) -> int:
        """Maximum encoder input in tokens; 0 without an encoder."""
        return 0 if self.encoder is None else self.encoder.max_encoder_input

    @property
    def audio(self) -> AudioEmbedding | None:
        """The embedding of a speech model's spectrograms; None for other models."""
        embed = None if self.encoder is None else self.encoder.embed
        return embed if isinstance(embed, AudioEmbedding) else None


@declared(frozen=True, kw_only=True)
class PredictionInput:
    """x = W [token_norm(embedding of the next token), state_norm(hidden state)] (+ b): input of a prediction head. Its
    tensors are named after its layer."""

    projection: str  # name of W
    token_norm: Norm | None  # None: EAGLE
    state_norm: Norm | None
    bias: bool = False
    skips_first: bool = True  # the embedding at position 0 is zero
    states_first: bool = False  # the columns of W for the hidden state precede those for the embedding


@declared(frozen=True, kw_only=True)
class FusedStates:
    """Input of an EAGLE-3 head (arXiv:2503.01840): x = W [hidden states of several layers] (+ b). Its first block reads
    [token_norm(embedding of the next token), state_norm(x)]. For further drafts, x is its own hidden state.

    The caller projects the states of the layers (`engine.lowering.lower.state_projection`)."""

    projection: str  # name of W
    layers: int  # whose states are side by side
    hidden: int  # of each of them
    token_norm: Norm
    state_norm: Norm
    bias: bool = False
    norm_before_residual: bool = False  # state_norm(x) replaces x


@declared(frozen=True, kw_only=True)
class Predictor:
    """Heads that predict tokens after the next one (multi-token prediction, DeepSeek-V3, arXiv:2412.19437).

    At position p, head i reads the token p + i + 1 and predicts the next one. A head is declared as a model of one
    layer with `prediction_input`. It shares the embedding, and usually the output matrix."""

    model: Model  # the first head; also later heads without an entry in `further`
    names: tuple[tuple[str, str], ...]  # prefixes of tensors: in the checkpoint ({}: number of the head), in the layer
    before_norm: bool = False  # the first head reads the model's hidden states before the final norm
    first: int = 0  # number of the first head in `names`
    further: tuple[Model, ...] = ()  # later heads, if they differ from the first
    further_states: Literal["model", "normed", "before norm"] = "normed"
    """Hidden states that a later head reads: of the model, or of the previous head after or before its final norm."""


def attentions(model: Model) -> tuple[SelfAttention, ...]:
    """Return the self-attention part of each layer that has one, in order."""
    return tuple(body for body in all_bodies(model) if is_self_attention(body))


def page_writers(model: Model) -> tuple[PageWriter, ...]:
    """Return the parts that write keys and values, latents, or keys of an indexer to pages, in order. An indexer
    precedes its attention."""
    found: list[PageWriter] = []
    for part in attentions(model):
        if isinstance(part, LatentAttention) and part.indexer is not None:
            found.append(part.indexer)
        if part.causal and not (isinstance(part, Attention) and part.shared_kv):
            found.append(part)
    return tuple(found)


def all_bodies(model: Model) -> tuple[Body, ...]:
    """Return the bodies of all residual blocks, in order, without those of an encoder of an encoder-decoder."""
    return tuple(body for block in model.blocks for branch in block for body in bodies(branch))


def encoder_bodies(model: Model) -> tuple[Body, ...]:
    """Return the bodies of the encoder of an encoder-decoder, in order."""
    blocks = () if model.encoder is None else model.encoder.blocks
    return tuple(body for block in blocks for branch in block for body in bodies(branch))


def recurrents(model: Model) -> tuple[Recurrent, ...]:
    """Return the recurrent part of each layer that has one, in order."""
    return tuple(body for body in all_bodies(model) if isinstance(body, Recurrent))


def is_bidirectional(model: Model) -> bool:
    """Return whether attention is bidirectional, so that a prompt is computed in one step and nothing is cached."""
    return not recurrents(model) and not any(part.causal for part in attentions(model))


def has_experts(model: Model) -> bool:
    return any(isinstance(body, Experts) for body in all_bodies(model))
