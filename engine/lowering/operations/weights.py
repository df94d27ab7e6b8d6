"""Weights of operations. `name` is unique in a program."""

from functools import cached_property
from typing import Literal

from engine.models import parts
from engine.models.declared import declared
from engine.models.parts import (
    Alibi,
    Attention,
    AudioEmbedding,
    DistanceTable,
    Embedding,
    Experts,
    Foreign,
    Head,
    LatentAttention,
    LayerInputs,
    LocalAttention,
    Norm,
    Parameter,
    RelativeBias,
)
from engine.models.sources import ACT_FN, join, latent_linears

Part = Literal[
    "embedding", "attention", "recurrent", "mlp", "experts", "norms", "head", "model", "adapters", "tower", "draft"
]


@declared(frozen=True, kw_only=True)
class Matrix:
    """A projection, as `linear` fuses it from tensors of the checkpoint under `path`."""

    linear: parts.Linear
    path: str
    part: Part
    quantized: bool = True  # False: exempt from quantization at load time
    expert: int | None = None  # number of a routed expert
    wide_rows: int = 0  # last outputs that compiled kernels keep in bfloat16 when they quantize the others at load

    @cached_property
    def name(self) -> str:
        return join(self.path, "+".join(dict.fromkeys(row.source for row in self.linear.rows)))


@declared(frozen=True, kw_only=True)
class NormVector:
    """Weight and bias of a norm."""

    norm: Norm
    path: str

    @cached_property
    def name(self) -> str:
        return join(self.path, self.norm.name)


@declared(frozen=True, kw_only=True)
class QKNormVectors:
    """Weights of the norms of queries and keys."""

    attention: Attention
    path: str

    @cached_property
    def name(self) -> str:
        return join(self.path, "qk_norm")


@declared(frozen=True, kw_only=True)
class SinkLogits:
    """A logit for each head of an attention with sinks."""

    attention: Attention
    path: str

    @cached_property
    def name(self) -> str:
        return join(self.path, self.attention.sinks_name)


@declared(frozen=True, kw_only=True)
class HeadMatrices:
    """W_UK and W_UV of each head of a latent attention, which are never quantized."""

    attention: LatentAttention
    path: str

    @property
    def linear(self) -> parts.Linear:
        """The projection of the checkpoint that has the rows of all heads, W_UK before W_UV."""
        return latent_linears(self.attention)[1]

    @cached_property
    def name(self) -> str:
        return join(self.path, self.linear.rows[0].source)


@declared(frozen=True, kw_only=True)
class BlockMatrices:
    """A square matrix [inputs, outputs] for each head of an RG-LRU, which are never quantized."""

    source: str
    heads: int  # of all ranks
    size: int
    path: str

    @cached_property
    def name(self) -> str:
        return join(self.path, self.source)


@declared(frozen=True, kw_only=True)
class Correction:
    """A number for each expert, which is added to the scores that select experts."""

    experts: Experts
    path: str

    @cached_property
    def name(self) -> str:
        return join(self.path, self.experts.correction)


@declared(frozen=True, kw_only=True)
class ExpertScales:
    """A number for each expert, which multiplies the weights of its pairs."""

    experts: Experts
    path: str

    @cached_property
    def name(self) -> str:
        return join(self.path, self.experts.expert_scales)


@declared(frozen=True, kw_only=True)
class ActivationNumbers:
    """Learned numbers of the activation xIELU."""

    path: str  # of the MLP

    @cached_property
    def name(self) -> str:
        return join(self.path, ACT_FN)


@declared(frozen=True, kw_only=True)
class AlibiSlopes:
    """Slope of each head, computed when the model is loaded. All layers share them."""

    alibi: Alibi
    heads: int  # of all ranks

    @cached_property
    def name(self) -> str:
        return f"ALiBi slopes of {self.heads} heads (max_bias {self.alibi.max_bias}, factor {self.alibi.factor})"


@declared(frozen=True, kw_only=True)
class DistanceBias:
    """Bias of each head for each distance between a query and a key, expanded from buckets when the model is loaded.
    Layers with the same source share it."""

    relative: RelativeBias | DistanceTable
    heads: int  # of all ranks
    root: str

    @property
    def width(self) -> int:
        """Number of distances, -max_distance … max_distance; those outside have the bias of the nearest."""
        return 2 * self.relative.max_distance + 1

    @cached_property
    def name(self) -> str:
        return join(self.root, self.relative.source)


@declared(frozen=True, kw_only=True)
class LocalWeights:
    """Factors of the queries, and projected distances, of a local attention, both in float32."""

    part: LocalAttention
    path: str

    @cached_property
    def name(self) -> str:
        return join(self.path, f"{self.part.scales}+{self.part.distances}")


@declared(frozen=True, kw_only=True)
class SlopedDistances:
    """ALiBi in both directions: bias -slope · |distance| of each head for each distance, computed when the model is
    loaded. All layers share them."""

    alibi: Alibi
    heads: int  # of all ranks
    reach: int  # largest distance

    @property
    def width(self) -> int:
        """Number of distances, -reach … reach."""
        return 2 * self.reach + 1

    @cached_property
    def name(self) -> str:
        return f"ALiBi biases of {self.heads} heads (max_bias {self.alibi.max_bias}, up to {self.reach} tokens)"


@declared(frozen=True, kw_only=True)
class Tables:
    """Rows of tokens, positions and segments. The head of a decoder belongs to them, because it may be tied."""

    embed: Embedding
    root: str
    head: Head | None
    own_tokens: bool = True  # False: the encoder of an encoder-decoder, which uses the decoder's rows of tokens

    @cached_property
    def name(self) -> str:
        return join(self.root, self.embed.name) if self.own_tokens else "encoder tables"


@declared(frozen=True, kw_only=True)
class AudioWeights:
    """Convolutions and positions of spectrograms."""

    embed: AudioEmbedding
    root: str

    @cached_property
    def name(self) -> str:
        return join(self.root, self.embed.name, "+".join(self.embed.convolutions))


@declared(frozen=True, kw_only=True)
class RecurrentParameter:
    """A small parameter of a recurrent part: rows of a convolution, A, biases, D, or the weight of a norm."""

    parameter: Parameter
    path: str

    @cached_property
    def name(self) -> str:
        return join(self.path, self.parameter.rows[0].source)


@declared(frozen=True, kw_only=True)
class TokenTable:
    """Rows of tokens with a vector for each layer."""

    part: LayerInputs
    root: str

    @cached_property
    def name(self) -> str:
        return join(self.root, self.part.table)


@declared(frozen=True, kw_only=True)
class Multiplier:
    """A number, or a vector."""

    name: str
    size: int = 1


@declared(frozen=True, kw_only=True)
class Bounds:
    """The least and the largest number of the inputs or outputs of a projection."""

    path: str  # of the projection
    side: Literal["input", "output"]

    @cached_property
    def name(self) -> str:
        return join(self.path, f"{self.side}_min")


@declared(frozen=True, kw_only=True)
class ForeignWeights:
    """All weights of a decoder that transformers computes."""

    foreign: Foreign

    @cached_property
    def name(self) -> str:
        return self.foreign.architecture


Weight = (
    Matrix
    | NormVector
    | QKNormVectors
    | SinkLogits
    | AlibiSlopes
    | DistanceBias
    | SlopedDistances
    | LocalWeights
    | HeadMatrices
    | BlockMatrices
    | Correction
    | ExpertScales
    | ActivationNumbers
    | RecurrentParameter
    | Tables
    | TokenTable
    | Multiplier
    | AudioWeights
    | Bounds
    | ForeignWeights
)
