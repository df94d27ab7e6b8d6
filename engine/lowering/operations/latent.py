"""Operations of attention over latents (MLA), and of the selection of keys by an indexer."""

from typing import ClassVar, Literal

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.values import Value
from engine.lowering.operations.weights import HeadMatrices, NormVector
from engine.models.declared import declared
from engine.models.parts import Indexer, LatentAttention


@declared(frozen=True, kw_only=True)
class PrepareLatent(Operation):
    """Normalise the latent, rotate the shared key, and write both to the pages of a layer. Rotate the last rope.dim
    elements of each query in q, and copy them to the end of the head in y."""

    in_place: ClassVar[tuple[str, ...]] = ("latent", "q")

    latent: Value  # latent, then shared key
    q: Value  # [heads, query_dim]
    y: Value  # [heads, state_dim]
    norm: NormVector
    part: LatentAttention
    heads: int
    layer: int


@declared(frozen=True, kw_only=True)
class PrepareIndex(Operation):
    """Normalise the key of an indexer, rotate it and the queries, all in place, and write the key to the pages of a
    layer."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("key", "q")

    key: Value
    q: Value  # [heads, head_dim]
    norm: NormVector
    part: Indexer
    layer: int


@declared(frozen=True, kw_only=True)
class SelectKeys(Operation):
    """y = positions of the keys that a token reads, ascending, with -1 after them if there are fewer than top_k
    (kernels/attention/select.py)."""

    q: Value
    weights: Value
    key: Value  # of the step's own tokens, which are in the pages too
    y: Value
    part: Indexer
    layer: int


@declared(frozen=True, kw_only=True)
class AbsorbQueries(Operation):
    """y[h, : kv_lora_rank] = q[h, : qk_nope_head_dim] W_UK[h]. Its product with a latent is that of the query with the
    head's key, so keys are never expanded."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("y",)

    q: Value
    y: Value
    weight: HeadMatrices
    heads: int


@declared(frozen=True, kw_only=True)
class AttendLatent(Operation):
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
class ExpandValues(Operation):
    """y[h] = W_UV[h] x[h]."""

    x: Value
    y: Value
    weight: HeadMatrices
    heads: int
