"""Declaration of a model as frozen data, independent of torch. Names are those of the checkpoint.

Loading, fusing, tensor parallelism, memory planning and KV cache layout are derived from these values; no model has its
own load code or forward pass.
"""

import math
from dataclasses import replace
from typing import Literal, TypeGuard

from engine.api.media import Modality
from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class Rows:
    """Output rows of a projection that come from one checkpoint tensor."""

    source: str  # the tensor's name
    units: int  # number of heads, or of rows
    width: int = 1  # rows per unit
    at: int = 0  # first row in the tensor
    groups: int = 1  # the units are in this many equal runs of consecutive rows
    stride: int = 0  # rows of the tensor from the start of a run to that of the next
    step: int = 1  # rows of the tensor from one row to the next (2: the rows of two projections alternate)
    has_bias: bool = True  # False: in a projection with a bias, that of these rows is 0 and not stored (Whisper's keys)
    period: int = 0  # number of units in the tensor if the others repeat them; 0: it has all units

    @property
    def stored(self) -> int:
        """Number of units in the tensor."""
        return self.period or self.units


@declared(frozen=True, kw_only=True)
class Linear:
    """y = x W^T (+ b)."""

    rows: tuple[Rows, ...]
    inputs: int
    split: str | None  # axis that tensor parallelism divides: "rows", "inputs" or None
    bias: bool = False


@declared(frozen=True, kw_only=True)
class RMSNorm:
    """y = x / sqrt(mean(x²) + eps) · scale · (w + offset)."""

    size: int
    eps: float
    weight: bool = True  # False: w is 1 (Llama 4)
    offset: float = 0.0  # 1: the checkpoint stores w - 1 (Gemma)
    scale: float = 1.0
    name: str = ""
    last: str = "weight"  # last component of the tensor's name; "": the tensor is `name` itself


@declared(frozen=True, kw_only=True)
class LayerNorm:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · (w + offset) + b."""

    size: int
    eps: float
    bias: bool = True
    weight: bool = True  # False: w is 1 (OLMo 1)
    offset: float = 0.0  # 1: the checkpoint stores w - 1 (Nemotron)
    name: str = ""


Norm = RMSNorm | LayerNorm


def named(norm: Norm, name: str) -> Norm:
    return replace(norm, name=name)


@declared(frozen=True, kw_only=True)
class LinearScaling:
    """Divide all frequencies by `factor`."""

    factor: float


@declared(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK: beyond `original` tokens, the base grows with the length of the sequence."""

    factor: float
    original: int


@declared(frozen=True, kw_only=True)
class Llama3Scaling:
    factor: float
    low_freq: float
    high_freq: float
    original: int


@declared(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float = 1.0  # multiplies cos and sin
    truncate: bool = True  # round the correction range to integer dimensions


@declared(frozen=True, kw_only=True)
class LongScaling:
    """LongRoPE: one factor per frequency."""

    short: tuple[float, ...]  # for sequences of up to `original` tokens
    long: tuple[float, ...]  # for longer sequences
    original: int
    attention: float = 1.0


@declared(frozen=True, kw_only=True)
class NoRotation:
    """All frequencies are 0: the layer has no positions, but the shape of one that has (Kimi Linear)."""


@declared(frozen=True, kw_only=True)
class ProportionalScaling:
    """Only the first `pairs` frequencies are used, divided by `factor`; all others are 0 (Gemma 4)."""

    pairs: int
    factor: float = 1.0


Scaling = NoRotation | ProportionalScaling | LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@declared(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding."""

    dim: int  # the first `dim` dimensions of each head are rotated
    theta: float
    interleaved: bool = False  # pairs are adjacent; else they are half of `dim` apart
    scaling: Scaling | None = None

    def variant(self, length: int) -> int:
        """Return an identifier of the scaling that applies to a sequence of this length. Keys depend on it, so
        sequences of different variants never share cached blocks."""
        match self.scaling:
            case DynamicScaling(original=original):
                return length if length > original else 0
            case LongScaling(original=original):
                return int(length > original)
            case _:
                return 0


@declared(frozen=True, kw_only=True)
class Alibi:
    """Linear bias (arXiv:2108.12409): slope of the head · (position of the key - position of the query), added to the
    scores."""

    max_bias: float = 8.0  # the last of a power of two of heads has the slope 2 ** -max_bias
    factor: float = 1.0  # multiplies all slopes

    def slopes(self, heads: int) -> tuple[float, ...]:
        """Return the slope of each of a model's heads. For n heads, a power of two, they are 2 ** (-max_bias · i / n)
        for i = 1 … n. Other numbers of heads have the slopes of the largest power of two below, then every second slope
        of its double."""
        power = 1 << (heads.bit_length() - 1)
        exponents = [(i + 1) / power for i in range(power)] + [(i + 0.5) / power for i in range(heads - power)]
        return tuple(self.factor * 2.0 ** (-self.max_bias * exponent) for exponent in exponents)


@declared(frozen=True, kw_only=True)
class RelativeBias:
    """Learned bias of each head for the distance d = position of the key - position of the query, added to the scores
    (T5, arXiv:1910.10683, section 2.1). Distances share `buckets` biases.

    Bidirectional attention uses half of the buckets for d ≤ 0, the other half for d > 0. Causal attention uses all of
    them for d ≤ 0. Of n buckets of a direction, the first n // 2 are for single distances |d| = 0, 1, …; the others are
    for ranges that grow by a constant factor up to `max_distance`. Larger distances are in the last one.
    """

    buckets: int
    max_distance: int
    bidirectional: bool
    source: str  # name of the layer in the checkpoint, [buckets, heads]; several attentions may share it

    @property
    def exact(self) -> int:
        """Number of buckets of a direction that are for a single distance."""
        return self.buckets // (4 if self.bidirectional else 2)


@declared(frozen=True, kw_only=True)
class DistanceTable:
    """Learned bias of each head for each distance d = position of the key - position of the query, added to the scores
    of bidirectional attention (Phi-4's Conformer). A table has rows for -max_distance ≤ d < max_distance, or for
    0 ≤ |d| < max_distance if it is `symmetric`. Other distances have the bias of the nearest."""

    max_distance: int
    symmetric: bool
    source: str  # name of the layer in the checkpoint, [buckets, heads]; several attentions may share it

    @property
    def buckets(self) -> int:
        return self.max_distance * (1 if self.symmetric else 2)


@declared(frozen=True, kw_only=True)
class QueryScale:
    """Factor of the queries at position p: 1 + scale · log(1 + floor((p + offset) / length))."""

    scale: float
    length: int
    offset: int = 0


@declared(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention, or cross-attention.

    `qk_norm` normalises q and k before the rotation, or after it (`qk_norm_last`); `qk_norm_span` says over what:

    head   each head separately, with a shared weight of head_dim (Qwen3)
    own    each head separately, with separate weights: [heads, head_dim] (Cohere)
    all    all heads of the projection together (OLMo 2)
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float | None = None  # None: head_dim ** -0.5
    query_scale: QueryScale | None = None  # of causal self-attention
    bias: tuple[bool, bool] = (False, False)  # of qkv, of o
    key_bias: bool = True  # with a bias of qkv: the keys have one
    qk_norm: RMSNorm | LayerNorm | None = None  # its size is head_dim for every span
    qk_norm_span: Literal["head", "own", "all"] = "head"
    window: int | None = None  # a position attends to itself and window - 1 positions before it (and after, not causal)
    chunk: int | None = None
    """Chunked attention: the position p attends to positions floor(p / chunk) · chunk … p. It excludes a window and
    requires causal self-attention."""
    causal: bool = True  # False: bidirectional, without a KV cache
    softcap: float | None = None
    source: bool = False
    """Cross-attention: keys and values are computed from the encoder's output, and every position attends to all of
    them. They are stored in the pages of the preceding self-attention of the block, at the positions of the encoder
    input, which that self-attention does not read."""
    sinks: bool = False  # each head has a learned additional logit in its softmax, without a value (gpt-oss)
    sinks_name: str = "sinks"
    value_dim: int | None = None
    """Size of a head's values, if it is less than that of keys: values are stored with zeros after them, and outputs
    are cut (MiMo-V2-Flash). It excludes `groups`, `order` and `gated`."""
    value_scale: float = 1.0  # multiplies the values
    alibi: Alibi | None = None  # of self-attention; if it is not causal, distances have no sign: -slope · |distance|
    relative: RelativeBias | DistanceTable | None = None  # of self-attention without ALiBi
    sources: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")  # names of the projections
    groups: int = 1
    """If q, k and v are one tensor: its rows are in this many groups, each with an equal number of heads of q, then of
    k, then of v (GPT-NeoX: one group per head; InternLM2: one per KV head)."""
    order: Literal["qkv", "qvk"] = "qkv"  # within a group (qvk: CodeGen)
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_last: bool = False
    qk_norm_listed: bool = False  # `own` weights are one tensor for each head, with its number after the name
    v_norm: RMSNorm | None = None  # of each head's values, without a weight
    shared_kv: bool = False
    """There is no projection to keys and values: the layer reads the pages of the last layer before it that has such
    projections and the same window (Gemma 3n)."""
    gated: bool = False
    """The output of each head is multiplied by sigmoid(its gate). The projection to q has the query of each head,
    followed by its gate (Qwen3-Next), unless `gate_source` names a projection to the gates."""
    gate_source: str = ""  # without a bias
    outputs: int | None = None  # size of the output, if it is not `hidden`
    update: "LowRankUpdate | None" = None  # of the projections to q, k and v
    clipped: bool = False  # inputs and outputs of each projection are clipped to limits in the checkpoint (Gemma 4)
    gate_per_head: bool = False  # a head has one gate, which `gate_source` projects to; else one for each element
    name: str = "self_attn"

    @property
    def value_width(self) -> int:
        """Size of a head's values, and of its output."""
        return self.value_dim or self.head_dim

    @property
    def supported_limits(self) -> bool:
        """Return whether executors support the chunks and scaled queries: in causal self-attention, chunks without a
        window."""
        if self.chunk is None and self.query_scale is None:
            return True
        return self.causal and not self.source and (self.chunk is None or self.window is None)


@declared(frozen=True, kw_only=True)
class Indexer:
    """Selects the keys that sparse attention reads (arXiv:2512.02556, section 2.1): the `top_k` positions, up to the
    token's own, with the largest Σ weight[head] · max(q[head] · key, 0), and the first among equals.

    `wq_b` projects the latent of the queries to q, `wk` a token to its key, which all heads share and `norm`
    normalises, and `weights_proj` to the weights. The first rope.dim elements of q and key are rotated. Keys have pages
    of their own. Every rank has the whole part.
    """

    hidden: int
    heads: int
    head_dim: int
    top_k: int
    q_lora_rank: int  # size of the latent of the queries
    rope: Rope
    norm: LayerNorm
    name: str = "indexer"
    window: None = None
    chunk: None = None


@declared(frozen=True, kw_only=True)
class LatentAttention:
    """Causal multi-head latent attention (arXiv:2405.04434, section 2.1).

    `kv_a_proj_with_mqa` projects a token to its latent, which `latent_norm` normalises, and to a key that `rope`
    rotates. Both are the token's state, which all heads share. `kv_b_proj` has for each head the matrices W_UK
    [qk_nope_head_dim, kv_lora_rank] and W_UV [v_head_dim, kv_lora_rank]: the head's key is W_UK latent, followed by the
    shared key, and its value is W_UV latent. The last rope.dim elements of each query are rotated.
    """

    hidden: int
    heads: int
    kv_lora_rank: int  # size of the latent
    qk_nope_head_dim: int
    v_head_dim: int
    rope: Rope  # all dimensions of the shared key are rotated
    scale: float  # of the scores
    latent_norm: RMSNorm
    q_lora_rank: int | None = None  # None: q_proj in place of q_a_proj, q_norm and q_b_proj
    q_norm: RMSNorm | None = None
    bias: tuple[bool, bool] = (False, False)  # of q_a_proj and kv_a_proj_with_mqa, of o_proj
    indexer: Indexer | None = None  # selects the keys that are read; it needs queries of low rank
    shares_selection: bool = False  # the keys are those that the last indexer before it selected (GLM-5)
    name: str = "self_attn"
    window: None = None
    chunk: None = None
    causal: Literal[True] = True

    @property
    def query_dim(self) -> int:
        """Size of a head's query."""
        return self.qk_nope_head_dim + self.rope.dim

    @property
    def state_dim(self) -> int:
        """Elements of a token's state: its latent, then the shared key."""
        return self.kv_lora_rank + self.rope.dim


@declared(frozen=True, kw_only=True)
class LowRankUpdate:
    """Matrices of low rank, whose product with x is added to projections of x that other layers share (Zamba2):
    W x + B A x. A and B are stored as `name`.0 and `name`.1."""

    rank: int
    names: tuple[str, ...]  # for each projection


XIELU = "xielu"  # activation with learned numbers, which a checkpoint has under `act_fn` of an MLP (Apertus)


@declared(frozen=True, kw_only=True)
class MLP:
    """down(act(gate x) · up x), or down(act(up x)) if gate is None."""

    hidden: int
    intermediate_size: int
    act: str = "silu"  # silu | gelu | gelu_tanh | quick_gelu | relu | relu2 | xielu
    bias: bool = False
    down_bias: bool = False  # without `bias`: of the down projection alone
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False  # gate and up are one tensor, whose rows alternate: gate, up, gate, …
    up_first: bool = False  # gate and up are one tensor, with the rows of up before those of gate (GTE)
    gate_scale: float = 1.0  # multiplies gate x
    sparsity: float = 0.0
    """If not 0, gate x is replaced by max(gate x - t, 0) first. For normally distributed values, the threshold t of a
    token makes this share of them 0: it is their mean plus a multiple of their standard deviation (Gemma 3n)."""
    update: LowRankUpdate | None = None  # of the projection to gate and up, whose rows are one tensor
    clamp: tuple[float, float] | None = None  # gate x is at most the first number, and up x within ± the second
    clipped: bool = False  # inputs and outputs of each projection are clipped to limits in the checkpoint (Gemma 4)
    inputs: int = 0  # size of x, if it is not `hidden`
    name: str = "mlp"


@declared(frozen=True, kw_only=True)
class Stacked:
    """Names of the tensors of a checkpoint that stores a projection of all experts of a layer in one tensor. The first
    braces are replaced by the name of the projection."""

    weight: str
    """Pattern of the weights, [num_experts, outputs, inputs], such as `{}.weight`."""
    others: str = ""
    """Pattern of biases and of the tensors of a quantization format, [num_experts, …], such as `{}_{}`. The second
    braces are replaced by the last component of the name in a single expert."""
    transposed: bool = False  # weights are [num_experts, inputs, outputs]

    def name(self, projection: str, last: str) -> str:
        """Return the name of a tensor whose name in a single expert ends with `last`."""
        return self.weight.format(projection) if last == "weight" else self.others.format(projection, last)


@declared(frozen=True, kw_only=True)
class Experts:
    """Σ w_e · expert_e(x) over the `top_k` experts with the largest scores (ties: lowest index), plus
    sigmoid(s x) · shared(x) if there is a shared expert, or shared(x) without `shared_gate`.

    `scores` defines the scores and w_e:

    softmax          softmax of the router logits over all experts
    softmax_chosen   softmax over the selected experts, which equals the former normalised to a sum of 1
    sigmoid          sigmoid of each logit
    sparsemixer      of each selected expert in turn, the largest logit m first: softmax over the remaining experts with
                     (m - logit) / max(|logit|, m) ≤ 2 · `jitter` (arXiv:2409.12136)

    Experts are selected by score + `correction`. If there are `groups` (equal numbers of experts, in order), only those
    of the `groups_kept` best groups are selected; `group_score` ranks groups by their largest sum, or by the total of
    their two largest. w_e is the score without correction, divided by the sum over the selected experts if
    `normalized`, and multiplied by `weight_scale`. Numbers from `num_experts` on are `zero_experts`, whose output is
    their input (arXiv:2509.01322, section 2.1).

    Expert e is an MLP with tensors under `experts`.e: act(gate x) · up x, or with `limit` and `up_offset`
    act(min(gate x, limit)) · (clamp(up x, -limit, limit) + up_offset). The router is a separate projection, which is
    never quantized. With `router_norm`, its input is the norm of the residual stream instead of the experts' input, and
    its logits are multiplied by `logits_scale`. w_e is also multiplied by the number of the expert under
    `expert_scales`, if there is one. `stacked` declares the tensors of a checkpoint that has all experts in one tensor.
    """

    hidden: int
    intermediate_size: int  # of each routed expert
    num_experts: int  # that have weights
    top_k: int  # experts per token
    scores: Literal["softmax", "softmax_chosen", "sigmoid", "sparsemixer"]
    jitter: float = 0.0  # of sparsemixer
    zero_experts: int = 0
    act: str = "silu"
    limit: float | None = None
    up_offset: float = 0.0
    clamp: tuple[float, float] | None = None  # as in MLP
    bias: bool = False  # of the experts' projections
    router: str = "gate"
    router_bias: bool = False
    router_norm: RMSNorm | None = None
    logits_scale: float = 1.0
    expert_scales: str = ""  # name of a number for each expert
    correction: str = ""  # name of a number for each expert
    correction_is_row: bool = False  # stored as [1, num_experts] (ERNIE)
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top_two"] = "top_two"
    normalized: bool = False
    weight_scale: float = 1.0
    scales_inputs: bool = False  # w_e multiplies the input of expert e instead of its output (Llama 4)
    experts: str = "experts"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False  # as in MLP
    stacked: Stacked | None = None
    shared: MLP | None = None
    shared_gate: str | None = None
    name: str = "mlp"

    @property
    def routed(self) -> int:
        """Number of experts that a router selects from."""
        return self.num_experts + self.zero_experts


@declared(frozen=True, kw_only=True)
class DecaySlopes:
    """Slopes of the decays of lightning attention: `factor` · 2^(-8 h / heads) for head h = 1 … heads, or those of
    ALiBi, which differ if `heads` is not a power of two."""

    heads: int
    factor: float
    alibi: bool

    def values(self) -> tuple[float, ...]:
        if self.alibi:
            return Alibi(factor=self.factor).slopes(self.heads)
        return tuple(self.factor * 2.0 ** (-8.0 * head / self.heads) for head in range(1, self.heads + 1))


@declared(frozen=True, kw_only=True)
class Parameter:
    """Rows of small tensors that are kept in float32. They are divided among ranks like the heads whose rows they
    have."""

    rows: tuple[Rows, ...]  # `source` is the full name of a tensor
    inner: tuple[int, ...] = ()  # shape of a row in the checkpoint
    values: "DecaySlopes | None" = None  # numbers that are not in the checkpoint
    divided: bool = True
    repeat: int = 1  # times that each row is kept: D of a head for each of its channels
    taps: bool = False  # of a convolution: compiled kernels keep it as [conv, channels]
    negative_exp: bool = False  # the value is -exp(tensor): A of a recurrence, stored as its logarithm
    stored: tuple[int, ...] = ()  # shape in the checkpoint, if it is not [rows] or [rows, inner]


@declared(frozen=True, kw_only=True)
class DeltaNet:
    """Gated DeltaNet (arXiv:2412.06464): out(norm(delta_rule(silu(conv(q, k, v)), decay(a), sigmoid(b))) · silu(z)).

    Value heads share the query and the key of a key head: head h of the former belongs to head h // (value_heads /
    key_heads). State of a sequence: the last conv - 1 inputs of the convolution, and a matrix [key_dim, value_dim] for
    each value head."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # width of the convolution
    eps: float  # of the norm of each value head
    projections: Literal["grouped", "joined", "separate", "half"]
    """Names of the projections, and of the tensors of the convolution:

    grouped    in_proj_qkvz and in_proj_ba, with the rows of one key head after another (Qwen3-Next); conv1d
    joined     in_proj_qkv, in_proj_z, in_proj_b and in_proj_a (Qwen3.5); conv1d
    separate   q_proj, k_proj, v_proj, g_proj (z), b_proj and a_proj (OLMo Hybrid); q_conv1d, k_conv1d and v_conv1d
    half       in_proj_qkv and in_proj_z, but in_proj_ba with the rows of one key head after another (GGUF); conv1d
    """
    beta_scale: float = 1.0  # multiplies sigmoid(b)
    stored_key_heads: int = 0
    """Number of key heads in the tensors if the others repeat them: value head h shares those of head h modulo this
    number. 0: the tensors have all key heads. In GGUF, value heads have this order, and key_heads is their number."""
    log_decay: bool = True  # A is stored as log(-A), in GGUF as A
    name: str = "linear_attn"


@declared(frozen=True, kw_only=True)
class KimiDelta:
    """Kimi Delta Attention (arXiv:2510.26692): out(norm(delta_rule(silu(conv(q, k, v)), decay(a), sigmoid(b))) ·
    sigmoid(z)), where a = f_b(f_a(x)) has a decay for each dim of a key, and z = g_b(g_a(x)).

    State of a sequence: as of DeltaNet."""

    hidden: int
    heads: int
    head_dim: int  # of keys and values, and the size of f_a(x) and g_a(x)
    conv: int
    eps: float  # of the norm of each head
    log_decay: bool = True  # A is stored as log(-A), in GGUF as A
    name: str = "self_attn"


@declared(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2 mixer (arXiv:2405.21060): out(norm(scan(silu(conv(x, B, C)), dt) · silu(z))).

    `norm` is the input of the norm:

    gated   the output of the scan times silu(z)
    scan    the output of the scan, before it is multiplied by silu(z)
    none    there is no norm

    The projection has rows of z, x, B, C and dt. State of a sequence: the last conv - 1 inputs of the convolution, and
    a matrix [head_dim, state] for each head."""

    hidden: int
    heads: int
    head_dim: int
    groups: int  # of heads that share B and C, and the mean of the norm
    state: int
    conv: int
    eps: float
    bias: bool = False  # of the projections
    conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, math.inf)
    norm: Literal["gated", "scan", "none"] = "gated"
    scales: tuple[float, ...] = ()  # factors of z, x, B, C and dt; empty: all are 1 (Falcon-H1)
    log_decay: bool = True  # A is stored as log(-A), in GGUF as A
    name: str = "mixer"


@declared(frozen=True, kw_only=True)
class Mamba:
    """Mamba mixer (arXiv:2312.00752): out(scan(u, dt_proj(dt), B, C) · silu(z)) with u = silu(conv(x)), where in_proj
    has rows of x and z, and x_proj(u) has dt, B and C.

    State of a sequence: the last conv - 1 inputs of the convolution, and `state` numbers for each channel."""

    hidden: int
    channels: int
    dt_rank: int  # size of dt
    state: int
    conv: int
    norms: tuple[RMSNorm, ...] = ()  # of dt, B and C
    bias: bool = False  # of in_proj and out_proj
    conv_bias: bool = True
    log_decay: bool = True  # A is stored as log(-A), in GGUF as A
    name: str = "mixer"


@declared(frozen=True, kw_only=True)
class ShortConv:
    """Gated short convolution (LFM2): out(C · conv(B · x)), where in_proj has rows of B, C and x.

    State of a sequence: the last conv - 1 inputs of the convolution."""

    hidden: int
    conv: int
    bias: bool = False  # of the projections and the convolution
    name: str = "conv"


@declared(frozen=True, kw_only=True)
class LightningAttention:
    """Lightning attention (arXiv:2405.17935) of MiniMax-01: out(norm(y) · sigmoid(output_gate x)), where y = S q for
    each head, with the state S ← e^-slope S + v kᵀ. q, k and v are silu(qkv_proj x), with the rows of one head after
    another. The norm is over all heads.

    State of a sequence: a matrix [head_dim, head_dim] for each head."""

    hidden: int
    heads: int
    head_dim: int
    slopes: DecaySlopes
    eps: float  # of the norm
    name: str = "self_attn"


@declared(frozen=True, kw_only=True)
class RgLru:
    """Recurrent block of Griffin (arXiv:2402.19427): out(rg_lru(u) · act(linear_y x)) with u = conv(linear_x x). The
    gates of the recurrence (kernels/recurrent/rg_lru.py) are products of u with a square matrix for each head.

    State of a sequence: the last conv - 1 inputs of the convolution, and a number for each channel."""

    hidden: int
    heads: int
    head_dim: int  # channels of a head
    conv: int
    act: str
    name: str = "temporal_block"


@declared(frozen=True, kw_only=True)
class Projection:
    """y = W x. Every rank has the matrix."""

    hidden: int  # size of inputs and outputs
    name: str


@declared(frozen=True, kw_only=True)
class LayerInput:
    """up(act(gate x) · input of the layer), where the input is the layer's part of `LayerInputs`. Every rank has both
    matrices."""

    hidden: int
    width: int  # of the input
    layer: int
    act: str
    gate: str = "per_layer_input_gate"
    up: str = "per_layer_projection"
    name: str = ""


@declared(frozen=True, kw_only=True)
class LowRank:
    """x + norm(up(down x)), a projection of low rank (LAuReL). Every rank has both matrices."""

    hidden: int
    rank: int
    norm: RMSNorm
    down: str = "linear_left"
    up: str = "linear_right"
    name: str = ""


@declared(frozen=True, kw_only=True)
class LocalAttention:
    """Attention of a position to itself and `window` - 1 positions before it (Gemma 4's Conformer). A score is
    c · k · q' + q' · r within ± `softcap`, where q' is q times softplus of `scales`, and r the projection `distances`
    of sines and cosines of the distance. Every rank has all heads."""

    hidden: int
    heads: int
    window: int
    softcap: float
    clipped: bool  # inputs and outputs of each projection are clipped to limits in the checkpoint
    sources: tuple[str, str, str, str] = ("q_proj.linear", "k_proj.linear", "v_proj.linear", "post.linear")
    scales: str = "per_dim_scale"
    distances: str = "relative_k_proj"
    name: str = "self_attn"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@declared(frozen=True, kw_only=True)
class Convolution:
    """Convolution of a Conformer (arXiv:2005.08100): out(act(norm(inner(c)))), where c convolves each channel of
    u · gate_act(g) over the last `kernel` positions of a window, and `into` projects x to u and g. Every rank has all
    channels."""

    hidden: int
    kernel: int
    gate_act: str
    act: str
    into: str
    filters: str  # of the convolution
    out: str
    inner: str = ""  # name of a projection; "": there is none
    norm: RMSNorm | None = None
    limit: float | None = None  # the input of the norm is clipped to ± this number
    bias: bool = False
    multiplier: int = 1  # convolutions of a channel
    clipped: bool = False  # inputs and outputs of `into` and `out` are clipped to limits in the checkpoint
    name: str = ""


Recurrent = DeltaNet | KimiDelta | LightningAttention | Mamba | Mamba2 | RgLru | ShortConv
SelfAttention = Attention | LatentAttention
PageWriter = SelfAttention | Indexer
Body = SelfAttention | MLP | Experts | Recurrent | LayerInput | LowRank | Projection | LocalAttention | Convolution


@declared(frozen=True, kw_only=True)
class Parallel:
    """Several bodies with the same input; their outputs are summed (Cohere)."""

    bodies: tuple[Body, ...]
    scales: tuple[float, ...] = ()  # factor of each body's output, greater than 0; empty: all are 1
    norms: tuple[Norm, ...] = ()  # norm of the input of each body, in place of the block's `before` (GPT-NeoX)
    after: tuple[Norm | None, ...] = ()  # norm of the output of each body, before they are added (Gemma 4)


@declared(frozen=True, kw_only=True)
class ResidualBlock:
    """x = last(factor · (x + scale · after(body(before(x))))), or with `multiplier` its product with that number.

    A block with `side` computes a side stream s of hidden states, which are not added to x, or reads it (Zamba2):

    opens       s = body(before([x, e])), where e is the embedding of the token
    continues   s = body(before(s))
    joins       x = x + body(before(x + s))

    With the side `pair`, x = x + body([e, x']), whose columns `FusedStates` computed (EAGLE-3).

    `shortcut` has the same input as the body, or with `shortcut_norm` that norm of x; its output is added after the
    last residual block of the layer (LongCat, Arctic)."""

    body: Body | Parallel
    first: Norm | None = None  # replaces x by its norm before anything else (MiniMax-01)
    before: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0
    last: Norm | None = None
    factor: float = 1.0
    multiplier: str = ""  # name of a tensor with a single number
    side: Literal["", "opens", "continues", "joins", "pair"] = ""
    path: str = ""  # of its tensors below the root, if they belong to another layer, which shares them
    shortcut: Experts | None = None
    shortcut_norm: Norm | None = None
    limit: float | None = None  # inputs of `before`, `after` and `last` are clipped to ± this number


Block = tuple[ResidualBlock, ...]


@declared(frozen=True, kw_only=True)
class Lookup:
    """Table with `count` rows; the row of a token's position or segment is added to its embedding."""

    count: int
    name: str = ""
    offset: int = 0  # row of position 0
    period: int | None = None
    """Sinusoidal table, which is not in the checkpoint: sines (first half of a row) and cosines of
    p · 10000^(-i / period) for row p."""


@declared(frozen=True, kw_only=True)
class Embedding:
    """x = norm(scale · row of the token + row of its position + row of its segment). With `width`, the row of a token
    is projected by `into`, and the hidden states by `out` before the head; there are no segments (OPT-350M)."""

    vocab: int
    hidden: int
    width: int | None = None  # of the rows of tokens; None: `hidden`
    into: str = "project_in"
    out: str = "project_out"
    scale: float = 1.0
    name: str = "embed_tokens"
    positions: Lookup | None = None
    segments: Lookup | None = None
    norm: Norm | None = None
    positions_last: bool = False  # rows of positions are added to the embeddings of media too; no segments

    @property
    def is_sum(self) -> bool:
        """True if the rows of positions or segments are added at once."""
        apart = self.width is not None or self.positions_last
        return not apart and (self.positions is not None or self.segments is not None)

    @property
    def row_width(self) -> int:
        """Size of a token's row, and of the inputs of the head."""
        return self.width or self.hidden


@declared(frozen=True, kw_only=True)
class LayerInputs:
    """A vector of each token for each layer (per-layer embeddings): factor · (norm(W x) + scale · row of the token),
    where x is the token's embedding, and the norm is over the vector of each layer. A row has the vectors of all
    layers. Every rank has both matrices."""

    vocab: int
    layers: int
    width: int  # of the vector of a layer
    scale: float
    factor: float
    norm: RMSNorm
    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"  # W


@declared(frozen=True, kw_only=True)
class Streams:
    """Hidden states in several streams (AltUp, kernels/streams.py). The blocks of a layer compute the first one from
    predictions; then all are corrected by its change. The last block of a layer, a `LayerInput`, is added to all other
    streams; with `scaled`, it reads the first one times a vector.

    Coefficients are projections of tanh(W norm(x) / hidden), where x is the first stream."""

    count: int
    norm: RMSNorm
    scaled: bool = True
    into: str = "altup_projections"  # projections from the embedding to the other streams
    out: str = "altup_unembed_projections"
    router: str = "altup.modality_router"  # W
    prediction: str = "altup.prediction_coefs"
    correction: str = "altup.correction_coefs"
    scale: str = "altup.correct_output_scale"


@declared(frozen=True, kw_only=True)
class AudioEmbedding:
    """Embedding of a log-mel spectrogram [mels, 2 · positions]: x = gelu(conv2(gelu(conv1(spectrogram)))) + row of the
    position. Both convolutions have a width of 3; the second has a stride of 2."""

    mels: int
    hidden: int
    positions: int
    convolutions: tuple[str, str] = ("conv1", "conv2")
    table: str = "embed_positions"
    name: str = ""  # prefix of the names
    complete: bool = False  # an item is one or more complete windows, without a mask
    chunk: int = 0
    """Frames of a chunk: a spectrogram of any length is divided (Qwen2.5-Omni). The positions of a chunk attend to one
    another, and their rows are sines and cosines. 0: one chunk of up to `frames`, with a table."""

    @property
    def frames(self) -> int:
        return 2 * self.positions

    @property
    def norm(self) -> None:
        return None


@declared(frozen=True, kw_only=True)
class ChunkedAudio:
    """Embedding of a log-mel spectrogram [mels, frames] of any length, in chunks, of which the last one is padded with
    zeros: x = W gelu(conv3(gelu(conv2(gelu(conv1(chunk)))))) + row of the position within the chunk. The convolutions
    are 3 · 3 with a stride of 2; W reads the channels of all bands. Rows are sines and cosines. `window` chunks attend
    to one another."""

    mels: int
    hidden: int
    channels: int
    chunk: int  # frames
    window: int
    fills: bool = (
        True  # a spectrogram of less than a chunk is padded to a chunk; else it is the only one, of its length
    )
    convolutions: tuple[str, str, str] = ("conv2d1", "conv2d2", "conv2d3")
    out: str = "conv_out"  # W
    norm: None = None

    @property
    def bands(self) -> int:
        """Bands after the convolutions."""
        return self.reduced(self.mels)

    def positions(self, frames: int) -> int:
        """Return the number of embeddings of a spectrogram."""
        whole, rest = divmod(frames, self.chunk)
        return whole * self.reduced(self.chunk) + self.reduced(rest)

    @staticmethod
    def reduced(size: int) -> int:
        """Return the size after the convolutions."""
        for _ in range(3):
            size = (size + 1) // 2
        return size


@declared(frozen=True, kw_only=True)
class SubsampledAudio:
    """Embedding of a log-mel spectrogram [frames, mels] of a Conformer (Phi-4): x = W conv((spectrogram - mean) ·
    scale). Convolutions of 3 · 3 with a stride of 2 divide the number of frames by `reduction`; all but the first are
    of single channels, followed by one of single positions."""

    mels: int
    hidden: int
    act: str
    channels: int
    reduction: int  # a power of two
    norm: None = None
    convolutions: tuple[str, ...] = ("embed.conv.0",)

    @property
    def bands(self) -> int:
        """Bands after the convolutions."""
        return self.reduced(self.mels)

    @property
    def halvings(self) -> int:
        return self.reduction.bit_length() - 1

    def reduced(self, size: int) -> int:
        """Return the size after the convolutions."""
        return -(-size // self.reduction)


@declared(frozen=True, kw_only=True)
class NormedAudio:
    """Embedding of a log-mel spectrogram [frames, mels] of a Conformer (Gemma 4): x = W conv(spectrogram). A norm of
    the channels and ReLU follow each of two convolutions of 3 · 3 with a stride of 2."""

    hidden: int
    channels: tuple[int, int]
    eps: float
    norm: None = None
    convolutions: tuple[str, ...] = ("subsample_conv_projection.layer0.conv",)

    @property
    def bands(self) -> int:
        """Bands after the convolutions."""
        return self.channels[0] // 4

    @staticmethod
    def reduced(size: int) -> int:
        """Return the size after the convolutions."""
        return -(-size // 4)


@declared(frozen=True, kw_only=True)
class Head:
    """Logits = softcap(scale · (h W^T + b))."""

    tied: bool  # W is the embedding
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False  # b is the bias of the layer `name`
    unit_rows: bool = False  # the rows of W are divided by their lengths (Baichuan 2)
    added: str = ""  # name of b if it is a separate tensor [1, vocab], which a checkpoint may lack
    tied_unless_stored: bool = False  # `tied` is false if and only if the checkpoint has a tensor of the head (T5)
    name: str = "lm_head"
    rows: int = 0  # of W, if it has logits of some tokens only (EAGLE-3); 0: those of the embedding
    ids: str = ""  # name of a tensor [rows] int64: distance from the number of a row to the id of its token


@declared(frozen=True, kw_only=True)
class Dense:
    """y = act(x W^T (+ b)), in float32."""

    linear: Linear
    act: str = "none"  # none | tanh | sigmoid, or an activation of MLPs
    path: str = ""  # prefix of the tensor names, from the root of the checkpoint


@declared(frozen=True, kw_only=True)
class TokenLogits:
    """Logits of some tokens."""

    tokens: tuple[int, ...]
    source: str  # name of the matrix
    vocab: int  # its number of rows
    hidden: int


@declared(frozen=True, kw_only=True)
class Difference:
    """The first of two numbers minus the second."""


@declared(frozen=True, kw_only=True)
class PooledNorm:
    """Norm of the pooled vector."""

    norm: Norm
    path: str = ""  # as in Dense


Stage = Dense | TokenLogits | Difference | PooledNorm
Pool = Literal["first", "last", "mean", "max"]


@declared(frozen=True, kw_only=True)
class Pooler:
    """Reduces the hidden states of a prompt to one vector (`pool`), then applies `stages` in order, then `activation`,
    which a request may disable."""

    task: Literal["embed", "classify", "token_classify"]
    """Output: a vector of the prompt (`embed`), scores of its labels (`classify`) or of each token's labels."""
    width: int  # size of the output
    pool: Pool
    stages: tuple[Stage, ...] = ()
    activation: Literal["none", "normalize", "softmax", "sigmoid"] = "none"
    labels: tuple[str, ...] = ()
    dimensions: tuple[int, ...] = ()  # lengths to which a vector may be truncated before normalisation
    any_dimensions: bool = False
    padding: int | None = None  # token with which texts are padded to the longest prompt (SigLIP)
    canonical: Literal["", "lower", "words"] = ""  # texts are in lower case; words: and without punctuation
    whole: bool = True  # False: there are only vectors of single tokens (late interaction)


@declared(frozen=True, kw_only=True)
class Alignment:
    """Heads of cross-attention whose weights follow the audio: they give the times of the tokens of a transcript."""

    heads: tuple[tuple[int, int], ...]  # (block of the decoder, head), in ascending order
    median_width: int = 7  # positions of the median filter, an odd number

    @property
    def layers(self) -> tuple[int, ...]:
        """The blocks that have such heads."""
        return tuple(dict.fromkeys(layer for layer, _ in self.heads))


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


# Towers: encoders of images and videos.


@declared(frozen=True, kw_only=True)
class Patches:
    """Projection of the pixels of each patch: channel by channel, of each frame by frame, row by row."""

    source: str
    hidden: int
    size: int  # pixels of a side
    channels: int = 3
    frames: int = 1  # consecutive frames in a patch
    bias: bool = True
    flat: bool = False  # `pixel_values` has a row for each patch (Qwen2-VL); else it has images
    strip: bool = False  # with `flat`: patches are side by side in one image (MiniCPM-V)
    factor: float = 1.0  # pixels are multiplied by it first, and `offset` is added
    offset: float = 0.0
    dimensions: Literal[0, 2, 3] = 2  # of the convolution as which the weight is stored; 0: of a matrix
    norm: Norm | None = None

    @property
    def pixels(self) -> int:
        return self.channels * self.frames * self.size**2

    @property
    def linear(self) -> Linear:
        """The projection, which every rank has."""
        rows = (Rows(source=self.source, units=self.hidden),)
        return Linear(rows=rows, inputs=self.pixels, split=None, bias=self.bias)

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the weight in the checkpoint."""
        square = (self.size, self.size)
        inner = {0: (self.pixels,), 2: (self.channels, *square), 3: (self.channels, self.frames, *square)}
        return self.hidden, *inner[self.dimensions]


@declared(frozen=True, kw_only=True)
class PatchPositions:
    """Learned table for a square grid of patches, whose rows are added to the patches.

    `fit` says how the table fits other grids:

    none      it does not: all images have the size of the table
    bilinear  bilinear interpolation between the centres of patches, with antialiasing (SigLIP 2)
    corners   bilinear interpolation, with the corners of the grid at the corners of the table (Qwen3-VL)
    bicubic   bicubic interpolation between the centres of patches
    nearest   the row of the table whose share of the side has the patch's begin (Idefics3)
    axes      there are two tables, one after the other: for columns, then for rows; their rows are added (Gemma 4)
    """

    name: str
    side: int
    fit: Literal["none", "bilinear", "corners", "bicubic", "nearest", "axes"] = "none"
    quotients: bool = False  # with `nearest`: shares are quotients, else multiples of the share of a patch (MiniCPM-V)
    class_row: bool = False  # the table has a row for the class token, in the place of the token
    stored: tuple[int, ...] = ()  # shape in the checkpoint, if it is not [rows, hidden]

    @property
    def rows(self) -> int:
        return 2 * self.side if self.fit == "axes" else self.side**2 + self.class_row


@declared(frozen=True, kw_only=True)
class GridRope:
    """Rotary positions of patches. Pair i of a head is rotated by p · theta^-exponents[i], where p is the patch's row
    (axes[i] = 0) or column (axes[i] = 1), counted from `first`."""

    rope: Rope  # of the attention, for its dimensions and pairs
    axes: tuple[int, ...]
    exponents: tuple[float, ...]
    first: int = 0


@declared(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the checkpoint that layers read under another name, shape or scale."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    scale: str = ""  # name of a vector, by whose elements the rows are multiplied
    added: tuple["StoredTensor", ...] = ()  # vectors that are added to this one, one after another
    half: int = 0
    """Rows of half a head, if each half is rotated by itself. The second quarter of a head is exchanged with the third,
    so that the halves of the pairs are half a head apart."""


@declared(frozen=True, kw_only=True)
class Tower:
    """features = the outputs of the blocks `taken`, side by side."""

    patches: Patches | AudioEmbedding | ChunkedAudio | SubsampledAudio | NormedAudio
    """Embedding of the inputs; the parts below about grids are for patches."""
    blocks: tuple[Block, ...]
    taken: tuple[int, ...]  # numbers of blocks computed before a feature is taken; `norm` applies to all of them
    layers: str  # path of the blocks
    root: str = ""
    positions: PatchPositions | None = None
    class_token: str = ""  # name of a vector that is a further token
    class_shape: tuple[int, ...] = ()  # its shape in the checkpoint, if it is not [hidden]
    class_last: bool = False  # it follows the patches; else it precedes them
    rope: GridRope | None = None
    before: Norm | None = None  # of the patches with their positions
    norm: Norm | None = None
    side: int = 1  # patches are in order of squares of side · side patches
    window: int = 0  # side of the windows of attention in patches; 0: attention is among all patches of a frame
    whole: tuple[int, ...] = ()  # blocks with attention among all patches of a frame, if there are windows
    scales: tuple[tuple[str, str], ...] = ()  # (matrix, vector that multiplies its outputs), names within a block
    keeps_class: bool = False  # features include the class token
    halved: tuple[str, ...] = ()  # tensors within a block with heads whose halves are rotated by themselves (Gemma 4)
    standard: tuple[str, str] | None = None  # names of b and s; features are replaced by (factor · x - b) · s (Gemma 4)
    factor: float = 1.0  # of `standard`
    completed: int = 0
    """Side of squares of patches, for images with masks of their patches; 0: images have no masks. The unmasked part is
    completed to whole squares. The added patches attend to unmasked patches, and no patch attends to them (Phi-4)."""
    clip_window: int = 0
    """Positions of a clip that see one another; zeros fill the last of several windows. 0: all of them do."""
    renamed: tuple[tuple[str, StoredTensor], ...] = ()
    """Tensors of other shapes in the checkpoint, by the names that layers read, both within a block."""
    unread: tuple[str, ...] = ()

    @property
    def hidden(self) -> int:
        return self.patches.hidden

    @property
    def width(self) -> int:
        """Columns of the features."""
        return self.hidden * len(self.taken)


@declared(frozen=True, kw_only=True)
class Merge:
    """Join the features of squares of side · side patches: the first row, then the next rows."""

    side: int
    by_channel: bool = False  # instead, channel by channel (Mistral 3)


@declared(frozen=True, kw_only=True)
class AveragePool:
    """Mean of squares of side · side patches."""

    side: int


@declared(frozen=True, kw_only=True)
class AverageRows:
    """Mean of `count` consecutive rows of an item; rows beyond the last whole group are left out."""

    count: int


@declared(frozen=True, kw_only=True)
class JoinRows:
    """Join `count` consecutive rows of a frame side by side."""

    count: int


@declared(frozen=True, kw_only=True)
class JoinTiles:
    """Put the tiles of an image in their places, with a vector after each row, then another vector, then the first
    tile, which is the scaled-down image, also with the vector after each row (Phi-4)."""

    width: int  # of the vectors
    row_end: str  # name of a vector
    between: str


@declared(frozen=True, kw_only=True)
class ClassRow:
    """The row of the class token of each frame, which precedes the others."""

    rows: int  # rows of an image


@declared(frozen=True, kw_only=True)
class AttentionPool:
    """y = p + mlp(norm(p)), where p is the attention of a learned query, `probe`, to all rows of a frame (SigLIP).
    Every rank computes it completely."""

    hidden: int
    heads: int
    norm: LayerNorm
    mlp: "MLP"
    rows: int  # rows of an image of the usual size
    name: str = "head"


@declared(frozen=True, kw_only=True)
class Resampler:
    """The first queries of a table, after attention to all rows of a frame (Aria). Their number depends on that of the
    patches of a square image, whose side is the longer one of the frame. Every rank computes it completely."""

    hidden: int
    heads: int
    eps: float  # of the norms of queries and rows
    queries: tuple[tuple[int, int], ...]  # (patches of a square image, number of queries), in ascending order


@declared(frozen=True, kw_only=True)
class QFormer:
    """Outputs of learned queries. In each block of a BERT they attend to one another, and in every `every`-th block,
    the first included, to all rows of a frame (BLIP-2). Every rank computes it completely."""

    hidden: int
    inputs: int  # width of the rows
    layers: int
    heads: int
    intermediate_size: int
    act: str
    eps: float
    every: int
    queries: int
    rows: int  # rows of an image of the usual size


@declared(frozen=True, kw_only=True)
class Perceiver:
    """Outputs of learned queries, which in each block attend to all rows of a frame and to one another (Idefics2).
    Every rank computes it completely."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    act: str  # of the MLPs, which are four times as wide
    eps: float
    queries: int
    rows: int  # rows of an image of the usual size


@declared(frozen=True, kw_only=True)
class WindowMerge:
    """y = mean(z) + W₂ gelu_tanh(W₁ norm(z)), where z = x + attention(norm(x)) are the rows of a square of side · side
    patches, side by side in the norm, which attend to one another (MiniCPM-V). Every rank computes it completely."""

    hidden: int
    heads: int
    intermediate_size: int  # outputs of W₁
    eps: float
    side: int
    name: str

    @property
    def rows(self) -> int:
        """Rows of a square."""
        return self.side**2


@declared(frozen=True, kw_only=True)
class Blocks:
    """Further blocks of a tower. All rows of a frame attend to one another."""

    hidden: int
    blocks: tuple[Block, ...]
    layers: str  # path of the blocks
    first: int  # number of the first of them in the checkpoint


@declared(frozen=True, kw_only=True)
class Project:
    """y = act(x W^T (+ b))."""

    linear: Linear
    act: str = "none"


@declared(frozen=True, kw_only=True)
class Activate:
    """y = act(x)."""

    act: str


Querying = AttentionPool | Resampler | QFormer | Perceiver | WindowMerge
"""Steps with attention that have fewer rows after it: of learned queries to the rows of a frame, or within squares."""
RowStep = Merge | AveragePool | AverageRows | JoinRows | JoinTiles | ClassRow | Querying
"""Steps after which there is another number of rows."""
ProjectorStep = RowStep | Blocks | Project | Activate | Norm | MLP


@declared(frozen=True, kw_only=True)
class Projector:
    """Applies `steps` in order to the features, or to one of them."""

    steps: tuple[ProjectorStep, ...]
    root: str = ""
    feature: int | None = None  # number of the feature that it reads; None for all of them, side by side
    renamed: tuple[tuple[str, StoredTensor], ...] = ()
    """Tensors under other names in the checkpoint, by the names that layers read, both relative to `root`."""


@declared(frozen=True, kw_only=True)
class Tiles:
    """Embeddings of an image that was cut into tiles: first the scaled-down image, then the tiles in their places,
    without the padding and with `newline` after each row (LLaVA-NeXT)."""

    sizes: tuple[tuple[int, int], ...]  # (height, width) to which images may be padded
    size: int  # pixels of a tile's side
    newline: str  # name of a vector
    width: int  # of the vector
    most: int = 0  # most tiles; beyond, embeddings are interpolated (OneVision); 0: no limit


@declared(frozen=True, kw_only=True)
class GridPositions:
    """M-RoPE (arXiv:2409.12191): a token of an item has a position in time, height and width, and each pair of a head
    is rotated by one of them. The next text token continues after the largest position."""

    sections: tuple[int, ...]  # numbers of pairs for time, height and width
    interleaved: bool  # pairs alternate between the three; else they are in three runs
    side: int  # patches of a token's side
    time: Literal["frames", "seconds", "separate"]
    """Position in time of a video's frame: its number; its time in units of 1 / tokens_per_second (Qwen2.5-VL); or 0,
    as each frame is an item of its own between text tokens (Qwen3-VL)."""
    tokens_per_second: float = 1.0
    after_time: bool = False  # the next text token continues after the largest position in time too (Qwen2.5-Omni)


@declared(frozen=True, kw_only=True)
class Media:
    """Items of a request have `token` (or `video_token`) as placeholders in the prompt, whose embeddings are replaced
    by those of the item, in order."""

    tower: Tower
    projectors: tuple[Projector, ...]  # their outputs are side by side
    hidden: int  # of the text model
    token: int
    video_token: int | None = None
    attention: Literal["causal", "item", "prefix"] = "causal"
    """Attention of the text model: causal; bidirectional among the tokens of an item (Gemma 3); or bidirectional in the
    whole prompt (PaliGemma)."""
    windowed_items: bool = False  # with attention `item`: bidirectional in layers with a window only (Gemma 4)
    layer_token: int = 0  # token whose rows in the table of `LayerInputs` the tokens of media have
    deepstack: tuple[int, ...] = ()
    """Columns of an embedding beyond the first `hidden` are, in order, added to the hidden states of the token after
    these blocks of the text model (Qwen3-VL)."""
    positions: GridPositions | None = None
    tiles: Tiles | None = None
    audio: "Media | None" = None  # tower for audio clips, if this one is for images and videos
    beside_images: bool = False
    """The second projector is for the clips of prompts with images, and the first one for others (Phi-4)."""
    is_vector: bool = False
    """An item is a prompt of its own, of one token, and its only embedding is the vector of the prompt. The text model
    does not read it (CLIP)."""
    is_loaded: bool = True  # False: there is no tower, and items have their embeddings

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities of the items that the tower reads."""
        if not isinstance(self.tower.patches, Patches):
            return ("audio",)
        visual: tuple[Modality, ...] = ("image",) if self.video_token is None else ("image", "video")
        return visual if self.audio is None else (*visual, "audio")

    @property
    def towers(self) -> tuple["Media", ...]:
        """All towers that are loaded: this one, and the one for audio clips."""
        return tuple(one for one in (self, self.audio) if one is not None and one.is_loaded)

    @property
    def width(self) -> int:
        """Columns of an embedding."""
        return self.hidden * (1 + len(self.deepstack))

    def step_embeddings(self, step_tokens: int) -> int:
        """Return the number of embeddings that the tower computes in a step with this many tokens of media. The vector
        of an image counts as all of its patches."""
        if not self.is_vector:
            return step_tokens
        steps = (step for one in self.projectors for step in one.steps)
        return max(1, step_tokens // max(step.rows for step in steps if isinstance(step, ClassRow | AttentionPool)))


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


def is_self_attention(body: Body) -> TypeGuard[SelfAttention]:
    return isinstance(body, LatentAttention) or (isinstance(body, Attention) and not body.source)


def summed_bodies(branch: ResidualBlock) -> tuple[Body, ...]:
    """Return the bodies whose outputs a residual block adds."""
    return branch.body.bodies if isinstance(branch.body, Parallel) else (branch.body,)


def bodies(branch: ResidualBlock) -> tuple[Body, ...]:
    """Return all bodies of a residual block, its shortcut last."""
    return summed_bodies(branch) if branch.shortcut is None else (*summed_bodies(branch), branch.shortcut)


def body_scales(branch: ResidualBlock) -> tuple[float, ...]:
    """Return the factor of the output of each body of a residual block."""
    scales = branch.body.scales if isinstance(branch.body, Parallel) else ()
    return scales or (1.0,) * len(summed_bodies(branch))


def body_norms(branch: ResidualBlock) -> tuple[Norm, ...]:
    """Return the norm of each body of a residual block; empty if the bodies share the norm `before`."""
    return branch.body.norms if isinstance(branch.body, Parallel) else ()


def output_norms(branch: ResidualBlock) -> tuple[Norm | None, ...]:
    """Return the norm of the output of each body of a residual block; empty if there are none."""
    return branch.body.after if isinstance(branch.body, Parallel) else ()


def block_norms(branch: ResidualBlock) -> tuple[Norm, ...]:
    """Return all norms of the hidden states in a residual block."""
    routers = (body.router_norm for body in bodies(branch) if isinstance(body, Experts))
    around = (
        branch.first,
        branch.before,
        *body_norms(branch),
        *output_norms(branch),
        branch.after,
        branch.last,
        branch.shortcut_norm,
    )
    return tuple(norm for norm in (*around, *routers) if norm is not None)


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
