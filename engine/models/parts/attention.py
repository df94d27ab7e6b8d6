"""Attention with keys and values in pages: of heads, of latents, and of selected keys."""

from typing import Literal

from engine.models.declared import declared
from engine.models.parts.linear import LowRankUpdate
from engine.models.parts.norms import LayerNorm, RMSNorm
from engine.models.parts.positions import Alibi, DistanceTable, QueryScale, RelativeBias, Rope


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
    update: LowRankUpdate | None = None  # of the projections to q, k and v
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
