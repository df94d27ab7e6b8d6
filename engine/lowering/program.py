"""Intermediate representation of a model's step on one rank: operations on named buffers, and the weights they use.

Independent of torch. `engine.lowering.lower` makes a `Program` from a declaration; `engine.lowering.rewrites` fuses
operations for an executor. The executors are in engine/layers: reference.py (torch), compiled.py (C++ on a CPU) and
fused.py (Triton). Memory and roofline of a plan are sums over the same list (`engine.lowering.measures`).

Every operation reads and writes the rows of all tokens of a step. Operations on a buffer run in order; a buffer has the
value that was written last.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
    Indexer,
    LatentAttention,
    LayerInputs,
    LocalAttention,
    Norm,
    Parameter,
    QueryScale,
    RelativeBias,
    Rope,
)
from engine.models.sources import ACT_FN, join, latent_linears

SHORTCUT = "shortcut"  # buffer that is added after the last block of a layer
Part = Literal[
    "embedding", "attention", "recurrent", "mlp", "experts", "norms", "head", "model", "adapters", "tower", "draft"
]


@declared(frozen=True, kw_only=True)
class Value:
    """A buffer: [tokens · rows, width]."""

    name: str
    width: int  # on one rank
    rows: int = 1  # per token: the number of selected experts for pairs of a token and an expert

    @property
    def elements(self) -> int:
        """Elements per token."""
        return self.rows * self.width


# Weights. `name` is unique in a program.


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
    | HeadMatrices
    | BlockMatrices
    | Correction
    | ExpertScales
    | ActivationNumbers
    | RecurrentParameter
    | LocalWeights
    | Tables
    | TokenTable
    | Multiplier
    | AudioWeights
    | Bounds
    | ForeignWeights
)


# Operations


@declared(frozen=True, kw_only=True)
class Input:
    """y = the rows that the caller gives, such as embedded patches of images."""

    y: Value


@declared(frozen=True, kw_only=True)
class Embed:
    """y = scale · row of the token + row of its position + row of its segment; only the row of the token if it has
    another width than the hidden states."""

    y: Value
    weight: Tables


@declared(frozen=True, kw_only=True)
class LookUpPositions:
    """y = row of the position. The tables of an embedding with projected rows are used separately."""

    y: Value
    weight: Tables


@declared(frozen=True, kw_only=True)
class InsertMedia:
    """x = the first columns of the embeddings of media, for the tokens of media in a step."""

    x: Value


@declared(frozen=True, kw_only=True)
class EmbedMedia:
    """y = the embeddings of media, and 0 for tokens that are not of media."""

    y: Value


@declared(frozen=True, kw_only=True)
class FillMedia:
    """x = the row of one token for the tokens of media in a step."""

    x: Value
    weight: TokenTable
    token: int


@declared(frozen=True, kw_only=True)
class ReadStates:
    """y = the hidden states that the caller of a prediction head gives. skips_first: x = 0 for tokens at position 0."""

    x: Value
    y: Value
    skips_first: bool = True


@declared(frozen=True, kw_only=True)
class AddMedia:
    """x += columns of the embeddings of media, from `first` on, for the tokens of media in a step."""

    x: Value
    first: int


@declared(frozen=True, kw_only=True)
class LookUp:
    """y = scale · row of the token. partial: the table lacks some tokens, which have its first row."""

    y: Value
    weight: TokenTable
    partial: bool = False


@declared(frozen=True, kw_only=True)
class EmbedAudio:
    """y = embeddings of the spectrograms of a step."""

    y: Value
    weight: AudioWeights


@declared(frozen=True, kw_only=True)
class Normalize:
    """y = norm(x)."""

    x: Value
    y: Value
    weight: NormVector


@declared(frozen=True, kw_only=True)
class NormalizeParts:
    """Normalise consecutive columns of x in place, each part with its own norm."""

    x: Value
    weights: tuple[NormVector, ...]


@declared(frozen=True, kw_only=True)
class NormalizeGroups:
    """Normalise groups of consecutive columns in place, each of the norm's size, with the same weights."""

    x: "Columns"
    weight: NormVector


@declared(frozen=True, kw_only=True)
class Linear:
    """y = x W^T (+ b). x: a buffer, or some of its columns.

    reduce: the products of the ranks are added. partial: this rank's share of a sum that a later operation completes;
    rank 0 adds the bias. fp32: y is float32 in any case."""

    x: "Value | Columns"
    y: Value
    weight: Matrix
    reduce: bool = False
    partial: bool = False
    fp32: bool = False


@declared(frozen=True, kw_only=True)
class Activation:
    """y = act(gate) · up of x = [gate, up], or act(x). With a limit and an offset:
    act(min(gate, limit)) · (clamp(up, -limit, limit) + up_offset)."""

    x: Value
    y: Value
    act: str
    gated: bool
    limit: float | None = None
    up_offset: float = 0.0
    numbers: ActivationNumbers | None = None


@declared(frozen=True, kw_only=True)
class Add:
    """x += scale · y, which is the output of a block, or that of another body of the same block. x: a buffer, or some
    of its columns."""

    x: "Value | Columns"
    y: Value
    scale: float = 1.0


@declared(frozen=True, kw_only=True)
class Multiply:
    """y = x times a number of the checkpoint, or a vector, element by element. y may be x."""

    x: Value
    y: Value
    weight: Multiplier


@declared(frozen=True, kw_only=True)
class AllReduce:
    """x = sum of the x of all ranks."""

    x: Value


@declared(frozen=True, kw_only=True)
class QKNorm:
    """Normalise the first `heads` heads of qkv in place: queries, then keys."""

    qkv: Value
    weight: QKNormVectors
    heads: int
    queries: int  # heads that are queries

    @property
    def separate(self) -> bool:
        """Whether each head is normalised separately; else all queries together, and all keys."""
        return self.weight.attention.qk_norm_span != "all"


@declared(frozen=True, kw_only=True)
class Rotate:
    """Rotary position embedding of the first `heads` heads of qkv, in place."""

    qkv: Value
    rope: Rope
    heads: int
    head_dim: int


@declared(frozen=True, kw_only=True)
class PadValues:
    """y = x with zeros after the values of each head, so that they have the size of keys. x: heads that are queries or
    keys, then values."""

    x: Value
    y: Value
    heads: int  # queries and keys
    kv_heads: int
    head_dim: int
    value_dim: int


@declared(frozen=True, kw_only=True)
class CutHeads:
    """y = the first columns of each head of x."""

    x: Value
    y: Value
    heads: int


@declared(frozen=True, kw_only=True)
class ScaleQueries:
    """Multiply the first `heads` heads of qkv, the queries, by the factor of their position, in place."""

    qkv: Value
    factor: QueryScale
    heads: int
    head_dim: int


@declared(frozen=True, kw_only=True)
class WriteKV:
    """Write keys and values to the pages of a layer. cross: of an encoder input, from kv = [keys, values]."""

    qkv: Value
    layer: int
    heads: int  # of the queries before the keys; 0 in kv
    kv_heads: int
    head_dim: int
    cross: bool = False


@declared(frozen=True, kw_only=True)
class PrepareKV:
    """Fused QKNorm, Rotate and WriteKV."""

    qkv: Value
    norm: QKNorm | None
    rope: Rope | None
    layer: int | None
    heads: int
    kv_heads: int
    head_dim: int


@declared(frozen=True, kw_only=True)
class Attend:
    """y = attention of the queries in qkv over the pages of a layer, or over the keys and values of the same step
    (layer None). cross: over an encoder input. windowed: over the window of a patch, in place of its row. With
    `queries_only`, qkv has only queries."""

    qkv: Value
    y: Value
    part: Attention
    layer: int | None
    heads: int
    kv_heads: int
    sinks: SinkLogits | None = None
    slopes: AlibiSlopes | None = None
    bias: DistanceBias | SlopedDistances | None = None
    cross: bool = False
    windowed: bool = False

    @property
    def queries_only(self) -> bool:
        return self.cross or self.part.shared_kv

    @property
    def scale(self) -> float:
        return float(self.part.head_dim**-0.5 if self.part.scale is None else self.part.scale)

    @property
    def window(self) -> int | None:
        return None if self.cross else self.part.window

    @property
    def chunk(self) -> int | None:
        return None if self.cross else self.part.chunk

    @property
    def key_dim(self) -> int:
        return self.part.head_dim

    @property
    def value_dim(self) -> int:
        return self.part.head_dim


@declared(frozen=True, kw_only=True)
class PrepareLatent:
    """Normalise the latent, rotate the shared key, and write both to the pages of a layer. Rotate the last rope.dim
    elements of each query in q, and copy them to the end of the head in y."""

    latent: Value  # latent, then shared key
    q: Value  # [heads, query_dim]
    y: Value  # [heads, state_dim]
    norm: NormVector
    part: LatentAttention
    heads: int
    layer: int


@declared(frozen=True, kw_only=True)
class PrepareIndex:
    """Normalise the key of an indexer, rotate it and the queries, all in place, and write the key to the pages of a
    layer."""

    key: Value
    q: Value  # [heads, head_dim]
    norm: NormVector
    part: Indexer
    layer: int


@declared(frozen=True, kw_only=True)
class SelectKeys:
    """y = positions of the keys that a token reads, ascending, with -1 after them if there are fewer than top_k
    (kernels/attention/select.py)."""

    q: Value
    weights: Value
    key: Value  # of the step's own tokens, which are in the pages too
    y: Value
    part: Indexer
    layer: int


@declared(frozen=True, kw_only=True)
class AbsorbQueries:
    """y[h, : kv_lora_rank] = q[h, : qk_nope_head_dim] W_UK[h]. Its product with a latent is that of the query with the
    head's key, so keys are never expanded."""

    q: Value
    y: Value
    weight: HeadMatrices
    heads: int


@declared(frozen=True, kw_only=True)
class AttendLatent:
    """y = attention of absorbed queries, [heads, state_dim], over the pages of a layer, which are the keys. The first
    kv_lora_rank elements of a key are its value. selected: positions of the keys that are read; None for all."""

    q: Value
    latent: Value  # of the step's own tokens, which are in the pages too
    y: Value
    part: LatentAttention
    heads: int
    layer: int
    selected: Value | None = None
    kv_heads: Literal[1] = 1
    cross: Literal[False] = False
    window: None = None
    chunk: None = None

    @property
    def key_dim(self) -> int:
        return self.part.state_dim

    @property
    def value_dim(self) -> int:
        return self.part.kv_lora_rank


@declared(frozen=True, kw_only=True)
class ExpandValues:
    """y[h] = W_UV[h] x[h]."""

    x: Value
    y: Value
    weight: HeadMatrices
    heads: int


@declared(frozen=True, kw_only=True)
class BlockLinear:
    """y[h] = W[h]ᵀ x[h]."""

    x: Value
    y: Value
    weight: BlockMatrices
    heads: int


@declared(frozen=True, kw_only=True)
class Route:
    """Select the experts of each token from router logits: numbers and weights, [tokens, top_k]."""

    logits: Value
    chosen: Value
    weights: Value
    part: Experts
    correction: Correction | None = None


@declared(frozen=True, kw_only=True)
class ScaleRoutes:
    """Multiply the weight of each pair by the number of its expert, in place."""

    chosen: Value
    weights: Value
    scales: ExpertScales


@declared(frozen=True, kw_only=True)
class ExpertLinear:
    """y[pair] = x[pair] W^T (+ b) of the pair's expert. gathered: x has one row per token, which its pairs share.
    weights: of the pairs, which multiply their rows of x. Only rank 0 adds the biases of products that a later
    operation sums."""

    x: Value
    y: Value
    chosen: Value
    matrices: tuple[Matrix, ...]
    top_k: int
    gathered: bool
    weights: Value | None = None

    @property
    def stack(self) -> str:
        """Name of the matrices together."""
        return f"{self.matrices[0].name} × {len(self.matrices)}"


@declared(frozen=True, kw_only=True)
class Combine:
    """y = Σ weight · x of a token's pairs, in the order of their experts (+ shared, or sigmoid(gate) · shared), in
    float32. weights: None if all are 1. reduce: the sums of the ranks are added. inputs: read in place of x for
    pairs with zero-computation experts; only rank 0 adds them."""

    x: Value
    chosen: Value
    weights: Value | None
    logits: Value  # the last one is the gate of the shared expert
    shared: Value | None
    y: Value
    part: Experts
    inputs: Value | None = None
    reduce: bool = False


@declared(frozen=True, kw_only=True)
class Columns:
    """Columns [first, first + width) of a buffer."""

    value: Value
    first: int
    width: int


@declared(frozen=True, kw_only=True)
class Keep:
    """y = x: a feature of a tower, which later operations on x do not change."""

    x: Value
    y: Columns


@declared(frozen=True, kw_only=True)
class Repeat:
    """y = each column of x, `count` times."""

    x: Value
    y: Value
    count: int


@declared(frozen=True, kw_only=True)
class AttendContext:
    """y = attention of the queries in q to keys and values that the caller gives for the rows of a frame: their columns
    from `first` on. Without `part.source`, q also has keys and values of the queries, which they read too."""

    q: Value
    y: Value
    part: Attention
    first: int

    @property
    def own(self) -> bool:
        return self.q.width > self.part.heads * self.part.head_dim

    @property
    def scale(self) -> float:
        return float(self.part.head_dim**-0.5 if self.part.scale is None else self.part.scale)


@declared(frozen=True, kw_only=True)
class AttendLocal:
    """y = attention of the queries in qkv to the keys and values of positions nearby."""

    qkv: Value
    y: Value
    weight: LocalWeights


@declared(frozen=True, kw_only=True)
class Scale:
    """x *= factor."""

    x: Columns
    factor: float


@declared(frozen=True, kw_only=True)
class Bound:
    """y = x, clipped to the bounds."""

    x: Value
    y: Columns
    weight: Bounds


@declared(frozen=True, kw_only=True)
class Clamp:
    """x = min(max(x, low), high)."""

    x: Columns
    low: float
    high: float


@declared(frozen=True, kw_only=True)
class Spread:
    """y = the streams of x and of its projections to the other streams (kernels/streams.py)."""

    x: Value
    projected: Value
    y: Value


@declared(frozen=True, kw_only=True)
class Predict:
    """y = predictions of the streams, of which x is the first."""

    streams: Value
    coefficients: Value
    y: Value
    x: Value
    count: int


@declared(frozen=True, kw_only=True)
class Correct:
    """y = streams corrected by the change of the first prediction to x, which becomes the first stream."""

    predictions: Value
    x: Value
    coefficients: Value
    y: Value


@declared(frozen=True, kw_only=True)
class Collect:
    """x = mean of x, the first stream, and of the projections of the others, scaled to its size."""

    x: Value
    others: tuple[Value, ...]


@declared(frozen=True, kw_only=True)
class Tanh:
    """x = tanh(factor · x)."""

    x: Value
    factor: float


@declared(frozen=True, kw_only=True)
class Sparsify:
    """x = max(x - mean - multiplier · standard deviation, 0), over the `size` columns of all ranks."""

    x: Columns
    multiplier: float
    size: int


@declared(frozen=True, kw_only=True)
class Gate:
    """y = x · act(gate), element by element. act: sigmoid or none. If the gate has fewer columns than x, each of them
    multiplies several consecutive columns of x."""

    x: Columns
    gate: Columns
    y: Value
    act: Literal["sigmoid", "none"]


@declared(frozen=True, kw_only=True)
class CausalConv:
    """y = act(causal depthwise convolution of x), which continues the inputs in the state of the row's sequence.
    layer: number of the recurrent layer, whose first state it is; None: rows begin with zeros, and have no state."""

    x: Columns
    y: Value
    weight: RecurrentParameter  # [channels, 1, conv]
    bias: RecurrentParameter | None
    act: Literal["silu", "none"]
    layer: int | None


@declared(frozen=True, kw_only=True)
class DeltaRule:
    """y = gated delta rule of [q, k, v], with the decay from a and the gate from b (kernels/recurrent/delta_rule.py).
    The matrix of each value head is the last state of the layer."""

    qkv: Value
    a: Columns  # one for each value head, or with `vector_decay` for each dim of its key
    b: Columns
    y: Value
    slope: RecurrentParameter  # A
    dt_bias: RecurrentParameter
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    beta_scale: float
    vector_decay: bool
    layer: int


@declared(frozen=True, kw_only=True)
class SelectiveScan:
    """y = scan of x, B and C with the steps `dt` (kernels/recurrent/selective_scan.py). The matrix of each head is the
    last state of the layer. gate: y is multiplied by silu(gate)."""

    x: Columns
    b: Columns
    c: Columns
    dt: Columns
    gate: Columns | None
    y: Value
    a: RecurrentParameter
    d: RecurrentParameter | None
    dt_bias: RecurrentParameter | None
    heads: int
    head_dim: int
    groups: int
    state: int
    dt_limits: tuple[float, float]
    layer: int


@declared(frozen=True, kw_only=True)
class GatedRecurrence:
    """y = recurrence of x with the gates of inputs and decays (kernels/recurrent/rg_lru.py). A number for each channel
    is the last state of the layer."""

    x: Value
    gate: Value
    decay: Value
    y: Value
    gate_bias: RecurrentParameter
    decay_bias: RecurrentParameter
    rate: RecurrentParameter
    layer: int


@declared(frozen=True, kw_only=True)
class GatedNorm:
    """y = norm(x) · act(gate), or norm(x · act(gate)) with `gate_first`. The mean is over each of `groups` equal
    groups of columns. all_groups: number of groups of all ranks, if they are fewer than ranks; the mean is then over
    the columns of all ranks that have a share of the group."""

    x: Value
    gate: Columns
    y: Value
    weight: RecurrentParameter
    eps: float
    groups: int
    gate_first: bool
    act: Literal["silu", "sigmoid"] = "silu"
    all_groups: int | None = None


@declared(frozen=True, kw_only=True)
class ForeignDecoder:
    """y = hidden states of a decoder that transformers computes. The attention of its layers follows in the list, for
    plans; engine/layers/foreign.py executes both."""

    y: Value
    weight: ForeignWeights


# Fused operations, made by rewrites.


@declared(frozen=True, kw_only=True)
class AddNormalize:
    """x += scale · added; y = norm(x)."""

    x: Value
    added: Value
    scale: float
    y: Value
    weight: NormVector


@declared(frozen=True, kw_only=True)
class Quantized:
    """`op`, with its output quantized for the matrices that read it."""

    op: Normalize | AddNormalize | Activation
    matrices: tuple[Matrix, ...]


Op = (
    Input
    | Embed
    | EmbedAudio
    | LookUp
    | LookUpPositions
    | InsertMedia
    | EmbedMedia
    | FillMedia
    | Bound
    | ReadStates
    | AddMedia
    | Normalize
    | NormalizeParts
    | NormalizeGroups
    | Linear
    | Activation
    | Add
    | Multiply
    | Scale
    | Clamp
    | AllReduce
    | QKNorm
    | Rotate
    | ScaleQueries
    | PadValues
    | CutHeads
    | WriteKV
    | PrepareKV
    | Attend
    | PrepareLatent
    | PrepareIndex
    | SelectKeys
    | AbsorbQueries
    | AttendLatent
    | ExpandValues
    | BlockLinear
    | Route
    | ScaleRoutes
    | ExpertLinear
    | Combine
    | Spread
    | Predict
    | Correct
    | Collect
    | Tanh
    | Sparsify
    | Gate
    | Keep
    | Repeat
    | AttendLocal
    | AttendContext
    | CausalConv
    | DeltaRule
    | SelectiveScan
    | GatedRecurrence
    | GatedNorm
    | ForeignDecoder
    | AddNormalize
    | Quantized
)
StreamOp = Spread | Predict | Correct | Collect | Tanh | Sparsify
Recurrence = CausalConv | DeltaRule | GatedRecurrence | SelectiveScan


@dataclass(frozen=True)
class Program:
    """A step of one rank. `encoder` computes encoder inputs first and writes their keys and values."""

    ops: tuple[Op, ...]
    out: Value  # the hidden states
    kept: Value | None = None  # inputs of some layers, side by side
    encoder: tuple[Op, ...] = ()
    encoder_out: Value | None = None
    rope_axes: tuple[int, ...] = ()  # M-RoPE: which of a token's three positions rotates each pair; empty: it has one
    queries: Value | None = None  # of cross-attention in the layers with alignment heads, side by side
    routes: tuple[Value, ...] = ()  # selected experts of each layer that has some, which are kept until the step's end
    windowed_spans: bool = False  # only layers with a window read the spans of tokens that see one another

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Return all weights in the order of their first use, which is the order of loading. Those of an encoder come
        first, after the tables of the decoder."""
        found: dict[str, Weight] = {}
        for op in (*self.ops[:1], *self.encoder, *self.ops[1:]):
            for weight in weights_of(op):
                found.setdefault(weight.name, weight)
        return tuple(found.values())

    @property
    def given(self) -> Value:
        """The rows that the caller gives."""
        (first, *_) = self.ops
        assert isinstance(first, Input), "the program receives rows"
        return first.y

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        return tuple(dict.fromkeys(rope for op in (*self.encoder, *self.ops) for rope in _ropes(op)))


def _ropes(op: "Op") -> Iterator[Rope]:
    match op:
        case (
            Rotate(rope=Rope() as rope)
            | PrepareKV(rope=Rope() as rope)
            | PrepareLatent(part=LatentAttention(rope=rope))
            | PrepareIndex(part=Indexer(rope=rope))
        ):
            yield rope


def weights_of(op: Op) -> Iterator[Weight]:
    """Yield the weights of an operation."""
    match op:
        case ExpertLinear(matrices=matrices):
            yield from matrices
        case NormalizeParts(weights=weights):
            yield from weights
        case Attend():
            yield from (weight for weight in (op.sinks, op.slopes, op.bias) if weight is not None)
        case PrepareLatent(norm=norm) | PrepareIndex(norm=norm):
            yield norm
        case Route(correction=Correction() as correction):
            yield correction
        case ScaleRoutes(scales=scales):
            yield scales
        case Activation(numbers=ActivationNumbers() as numbers):
            yield numbers
        case PrepareKV(norm=QKNorm(weight=weight)):
            yield weight
        case CausalConv():
            yield from (weight for weight in (op.weight, op.bias) if weight is not None)
        case DeltaRule():
            yield from (op.slope, op.dt_bias)
        case SelectiveScan():
            yield from (weight for weight in (op.a, op.d, op.dt_bias) if weight is not None)
        case GatedRecurrence():
            yield from (op.gate_bias, op.decay_bias, op.rate)
        case GatedNorm():
            yield op.weight
        case Quantized(op=inner):
            yield from weights_of(inner)
        case (
            Embed()
            | LookUp()
            | LookUpPositions()
            | Multiply()
            | EmbedAudio()
            | FillMedia()
            | Bound()
            | Normalize()
            | NormalizeGroups()
            | Linear()
            | QKNorm()
            | AddNormalize()
            | AbsorbQueries()
            | ExpandValues()
            | BlockLinear()
            | ForeignDecoder()
            | AttendLocal()
        ):
            yield op.weight


def values_read(op: Op) -> tuple[Value, ...]:
    """Return the buffers that an operation reads."""
    match op:
        case Input() | Embed() | EmbedAudio() | EmbedMedia() | LookUp() | LookUpPositions() | ForeignDecoder():
            return ()
        case Multiply() | Tanh() | PadValues() | CutHeads() | Repeat():
            return (op.x,)
        case Spread():
            return op.x, op.projected
        case Predict():
            return op.streams, op.coefficients
        case Correct():
            return op.predictions, op.x, op.coefficients
        case Collect():
            return op.x, *op.others
        case Normalize() | NormalizeParts() | Activation() | ExpandValues() | BlockLinear():
            return (op.x,)
        case Linear():
            return (_buffer(op.x),)
        case PrepareLatent():
            return op.latent, op.q
        case AbsorbQueries():
            return op.q, op.y  # the ends of the heads in y are kept
        case PrepareIndex():
            return op.key, op.q
        case SelectKeys():
            return op.q, op.weights, op.key
        case AttendLatent():
            return op.q, op.latent, *(() if op.selected is None else (op.selected,))
        case Add():
            return _buffer(op.x), op.y
        case Keep():
            return op.x, op.y.value  # its other columns are kept
        case Scale() | Clamp() | NormalizeGroups() | Sparsify():
            return (op.x.value,)
        case AllReduce() | InsertMedia() | FillMedia() | ReadStates() | AddMedia():
            return (op.x,)
        case Bound():
            return op.x, op.y.value  # its other columns are kept
        case QKNorm() | Rotate() | ScaleQueries() | WriteKV() | PrepareKV() | Attend() | AttendLocal():
            return (op.qkv,)
        case AttendContext():
            return (op.q,)
        case Route():
            return (op.logits,)
        case ScaleRoutes():
            return op.chosen, op.weights
        case ExpertLinear():
            return op.x, op.chosen, *(() if op.weights is None else (op.weights,))
        case Combine():
            return op.x, op.chosen, op.logits, *(one for one in (op.weights, op.shared, op.inputs) if one is not None)
        case Gate():
            return op.x.value, op.gate.value
        case CausalConv():
            return (op.x.value,)
        case DeltaRule():
            return op.qkv, op.a.value, op.b.value
        case SelectiveScan():
            columns = (op.x, op.b, op.c, op.dt, *(() if op.gate is None else (op.gate,)))
            return tuple(one.value for one in columns)
        case GatedRecurrence():
            return op.x, op.gate, op.decay
        case GatedNorm():
            return op.x, op.gate.value
        case AddNormalize():
            return op.x, op.added
        case Quantized():
            return values_read(op.op)


def _buffer(x: Value | Columns) -> Value:
    return x.value if isinstance(x, Columns) else x


def values_written(op: Op) -> tuple[Value, ...]:
    """Return the buffers that an operation writes, also partially or in place."""
    match op:
        case Predict() | Correct() | ReadStates():
            return op.y, op.x
        case Spread() | Multiply() | PadValues() | CutHeads() | Repeat() | AttendLocal() | AttendContext():
            return (op.y,)
        case Collect() | Tanh():
            return (op.x,)
        case Input() | Embed() | EmbedAudio() | EmbedMedia() | LookUp() | LookUpPositions():
            return (op.y,)
        case Normalize() | Linear() | Activation() | Attend() | ExpertLinear() | Combine():
            return (op.y,)
        case Keep() | Bound():
            return (op.y.value,)
        case Gate() | CausalConv() | DeltaRule() | SelectiveScan() | GatedRecurrence() | GatedNorm() | BlockLinear():
            return (op.y,)
        case AbsorbQueries() | AttendLatent() | ExpandValues() | SelectKeys():
            return (op.y,)
        case PrepareIndex():
            return op.key, op.q
        case PrepareLatent():
            return op.latent, op.q, op.y
        case ForeignDecoder():
            return (op.y,)
        case Add():
            return (_buffer(op.x),)
        case AllReduce() | NormalizeParts() | InsertMedia() | FillMedia() | AddMedia():
            return (op.x,)
        case Scale() | Clamp() | NormalizeGroups() | Sparsify():
            return (op.x.value,)
        case QKNorm() | Rotate() | ScaleQueries() | PrepareKV():
            return (op.qkv,)
        case WriteKV():
            return ()
        case Route():
            return op.chosen, op.weights
        case ScaleRoutes():
            return (op.weights,)
        case AddNormalize():
            return op.x, op.y
        case Quantized():
            return values_written(op.op)
