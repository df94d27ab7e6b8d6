"""What a model is made of: frozen, torch-free declarations. Names are the names in the checkpoint.

Loading, fusing, tensor parallelism, memory planning and KV state are derived from these values; no model has load code
or a forward pass of its own.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Output rows of a projection that come from one source: `units` heads of `width` rows, from row `at` on."""

    source: str
    units: int
    width: int = 1
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class Linear:
    """y = x W^T (+ b). `split` says which axis tensor parallelism divides: "rows", "inputs" or None."""

    rows: tuple[Rows, ...]
    inputs: int
    split: str | None
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """y = x / sqrt(mean(x²) + eps) · (w + offset). `offset` 1: the checkpoint stores w - 1 (Gemma)."""

    size: int
    eps: float
    offset: float = 0.0
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    size: int
    eps: float
    bias: bool = True
    name: str = ""


Norm = RMSNorm | LayerNorm


def named(norm: Norm, name: str) -> Norm:
    return replace(norm, name=name)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK: past `original` tokens the base grows with the length of the sequence."""

    factor: float
    original: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    factor: float
    low_freq: float
    high_freq: float
    original: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """`attention` multiplies cos and sin; `truncate` rounds the correction range to whole dimensions."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LongScaling:
    """LongRoPE: one factor a frequency, `short` up to `original` tokens of sequence, `long` past them."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention: float = 1.0


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions on the first `dim` of each head. `interleaved`: pairs are neighbours, not halves apart."""

    dim: int
    theta: float
    interleaved: bool = False
    scaling: Scaling | None = None

    def variant(self, length: int) -> int:
        """Which rotation the tokens of a sequence of this length share: 0, or what else their keys depend on. Sequences
        of different variants never share cached blocks."""
        match self.scaling:
            case DynamicScaling(original=original):
                return length if length > original else 0
            case LongScaling(original=original):
                return int(length > original)
            case _:
                return 0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention. `qk_norm` norms q and k before the rotation; over what says `qk_norm_span`:

    head   each head by itself, all with one weight of head_dim (Qwen3)
    own    each head by itself, each with its own weight: [heads, head_dim] (Cohere)
    all    the heads of the whole projection together (OLMo 2)

    `source`: keys and values are those of what the encoder made of the source, and every position reads all of them.
    They are kept in the pages of the attention before it in its block, at the positions of the source, which that one
    does not read.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float | None = None  # None: head_dim ** -0.5
    bias: tuple[bool, bool] = (False, False)  # of qkv, of o
    qk_norm: RMSNorm | LayerNorm | None = None  # its size is head_dim, whatever the span
    qk_norm_span: Literal["head", "own", "all"] = "head"
    window: int | None = None  # position n reads itself and the window - 1 before it, and behind it if not causal
    causal: bool = True  # False: a position reads those behind it too, and nothing is kept of the sequence
    softcap: float | None = None
    source: bool = False
    sinks: bool = False  # each head has a logit more in its softmax, which is learned and has no value (gpt-oss)
    sources: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    name: str = "self_attn"


@dataclass(frozen=True, kw_only=True)
class MLP:
    """down(act(gate x) · up x), or down(act(up x)) where gate is None."""

    hidden: int
    intermediate_size: int
    act: str = "silu"  # silu | gelu | gelu_tanh | relu | relu2
    bias: bool = False
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    name: str = "mlp"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Σ w_e · expert_e(x) over the `top_k` experts with the largest router logits, the lowest numbers among equals,
    plus sigmoid(s x) · shared(x) if there is a shared expert (without `shared_gate`: shared(x) as it is).

    How w_e comes from the logits says `scores`:

    softmax          its share of the softmax over all experts
    softmax_chosen   its share of the softmax over the chosen ones, which is the first one scaled to a sum of 1

    Expert e is an MLP whose tensors are under `experts`.e; the router is a projection of its own, never rounded.
    """

    hidden: int
    intermediate_size: int  # of each routed expert
    num_experts: int
    top_k: int  # experts per token
    scores: Literal["softmax", "softmax_chosen"]
    act: str = "silu"
    router: str = "gate"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: MLP | None = None
    shared_gate: str | None = None
    name: str = "mlp"


Body = Attention | MLP | Experts


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Several bodies read the same normed input; their outputs are summed (Cohere)."""

    bodies: tuple[Body, ...]


@dataclass(frozen=True, kw_only=True)
class ResidualBlock:
    """x = last(x + scale · after(body(before(x))))."""

    body: Body | Parallel
    before: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0
    last: Norm | None = None


Block = tuple[ResidualBlock, ...]


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """`count` rows of which one is added to a token's embedding: that of its position, or of its segment. `offset`: the
    row of the first. `period`: the rows are in no checkpoint but sines (the first half of a row) and cosines of
    p · 10000^(-i / period), p the row's number."""

    count: int
    name: str = ""
    offset: int = 0
    period: int | None = None


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """x = norm(scale · row of the token + row of its position + row of its segment)."""

    vocab: int
    hidden: int
    scale: float = 1.0
    name: str = "embed_tokens"
    positions: Lookup | None = None
    segments: Lookup | None = None
    norm: Norm | None = None


@dataclass(frozen=True, kw_only=True)
class Head:
    """Logits = softcap(scale · (h W^T + b)). `tied`: W is the embedding. `bias`: b is that of the layer `name`.
    `added`: the name of b where it is a row of its own, [1, vocab], which a checkpoint may lack."""

    tied: bool
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False
    added: str = ""
    name: str = "lm_head"


@dataclass(frozen=True, kw_only=True)
class Dense:
    """y = act(x W^T (+ b)), in float32. `path`: that its source is under, from the top of the checkpoint."""

    linear: Linear
    act: str = "none"  # none | tanh | sigmoid, or that of an MLP
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenLogits:
    """The logits of some tokens: rows of the matrix of that name, which has `vocab` of them."""

    tokens: tuple[int, ...]
    source: str
    vocab: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first of two numbers less the second."""


@dataclass(frozen=True, kw_only=True)
class PooledNorm:
    """A norm of what was pooled; `path` as for Dense."""

    norm: Norm
    path: str = ""


Stage = Dense | TokenLogits | Difference | PooledNorm
Pool = Literal["first", "last", "mean", "max"]


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """What becomes of the hidden states of a prompt: one vector (`pool`), then `stages` in order, then `activation`,
    which a request may do without.

    `task` says what comes out: a vector for the whole (`embed`), numbers of its labels (`classify`), or those of each
    token (`token_classify`). A vector may be cut to any of `dimensions`, before it is normalised. Without `whole` there
    are vectors of single tokens alone."""

    task: Literal["embed", "classify", "token_classify"]
    width: int  # numbers that come out
    pool: Pool
    stages: tuple[Stage, ...] = ()
    activation: Literal["none", "normalize", "softmax", "sigmoid"] = "none"
    labels: tuple[str, ...] = ()
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False
    whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """What reads the source before a decoder whose layers attend to it: blocks of their own over embeddings of their
    own, of which the rows of the tokens are the decoder's. `max_source`: the longest source, in tokens."""

    embed: Embedding
    blocks: tuple[Block, ...]
    norm: Norm | None
    max_encoder_input: int
    layers: str


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder, an encoder, or both. `max_context` is the longest sequence the configuration claims to support, in
    tokens; a source, which is the first part of a sequence, counts. Those that pool have a `pooler` in the place of the
    head. `unread` begins the names of tensors that checkpoints may have and that nothing here is computed with."""

    embed: Embedding
    blocks: tuple[Block, ...]
    norm: Norm | None
    head: Head | None
    max_context: int
    root: str = "model"
    layers: str = "layers"
    pooler: Pooler | None = None
    encoder: Encoder | None = None
    unread: tuple[str, ...] = ()

    @property
    def max_encoder_input(self) -> int:
        """0 without an encoder: all of a sequence is the decoder's."""
        return 0 if self.encoder is None else self.encoder.max_encoder_input


def attentions(model: Model) -> tuple[Attention, ...]:
    """The attention part of each layer that has one, in order of the layers, without those that read a source."""
    return tuple(body for body in all_bodies(model) if isinstance(body, Attention) and not body.source)


def bodies(branch: ResidualBlock) -> tuple[Body, ...]:
    """What a branch runs on its normed input; several are summed."""
    return branch.body.bodies if isinstance(branch.body, Parallel) else (branch.body,)


def all_bodies(model: Model) -> tuple[Body, ...]:
    """Those of all branches, in order, without an encoder's in front."""
    return tuple(body for block in model.blocks for branch in block for body in bodies(branch))


def encoder_bodies(model: Model) -> tuple[Body, ...]:
    """Those of an encoder in front, in order."""
    blocks = () if model.encoder is None else model.encoder.blocks
    return tuple(body for block in blocks for branch in block for body in bodies(branch))


def has_no_kv_cache(model: Model) -> bool:
    """Whether its attention reads both ways, so that a prompt is computed as a whole and nothing of it is kept."""
    return not any(part.causal for part in attentions(model))


def has_experts(model: Model) -> bool:
    return any(isinstance(body, Experts) for body in all_bodies(model))
