"""Functions of operations on rows with Triton kernels, which the decoder (`fused/`) and towers (tower_triton.py)
share."""

from typing import Any, Protocol

from torch import Tensor

from engine.layers.loaded import LoadedWeights
from engine.layers.norm import HeadNorm, NormLayer, ProjectionNorm
from engine.lowering.operations import (
    Activation,
    Add,
    Columns,
    Keep,
    Normalize,
    PrepareKV,
    QKNorm,
    Rotate,
    Value,
)
from engine.models.parts import LayerNorm, RMSNorm, Rope
from kernels.activation import ACTIVATION
from kernels.layer_norm import LAYER_NORM
from kernels.qk_norm_rope_kv import QK_NORM_ROPE_KV, NormKind
from kernels.rms_norm import RMS_NORM

QKArguments = tuple[Tensor | None, NormKind, float, Tensor | None, Tensor | None, bool]
UNSCALED = (1.0, 1.0)


class Run(Protocol):
    """Values of a step or of a tower."""

    weights: LoadedWeights
    angles: dict[Rope, tuple[Tensor, Tensor]]  # [tokens, pairs] each

    def columns(self, columns: Columns) -> Tensor: ...

    def has(self, value: Value) -> bool: ...

    def __getitem__(self, value: Value) -> Any: ...

    def __setitem__(self, value: Value, tensor: Any) -> None: ...


def keep(op: Keep, run: Run) -> None:
    x = run[op.x]
    if not run.has(op.y.value):
        run[op.y.value] = x.new_empty(x.shape[0], op.y.value.width)
    run.columns(op.y).copy_(x)


def normalize(op: Normalize, run: Run) -> None:
    run[op.y] = fused_norm(run.weights.norm(op.weight), run[op.x])


def activation(op: Activation, run: Run) -> None:
    numbers = run.weights.activation(op.numbers)
    run[op.y] = ACTIVATION(run[op.x], op.act, op.gated, op.limit, op.up_offset, numbers)


def add(op: Add, run: Run) -> None:
    x = run.columns(op.x) if isinstance(op.x, Columns) else run[op.x]
    x.add_(run[op.y], alpha=op.scale)


def qk_norm(op: QKNorm, run: Run) -> None:
    """Normalise q and k in place, each over all its heads together."""
    layer, qkv = run.weights.qk_norm(op.weight), run[op.qkv]
    assert isinstance(layer, ProjectionNorm), "norms of separate heads are fused"
    dim = op.weight.attention.head_dim
    if layer.world.size > 1:
        qk = qkv.unflatten(-1, (-1, dim))[:, : op.heads]
        qk.copy_(layer(qk))
        return
    pieces = qkv[:, : op.queries * dim], qkv[:, op.queries * dim : op.heads * dim]
    for piece, weight in zip(pieces, layer.weights, strict=True):
        RMS_NORM(piece, weight, layer.eps, None, 1.0, piece)


def rotate(op: Rotate, run: Run) -> None:
    """Rotate q and k in place; no norm or writing of keys and values can be fused."""
    qkv = run[op.qkv].unflatten(-1, (-1, op.head_dim))
    queries = 2 * op.heads - qkv.shape[1]  # heads are queries and keys, and there are as many values as keys
    QK_NORM_ROPE_KV(qkv, None, 0, None, queries, None, "rms", 0.0, *run.angles[op.rope], op.rope.interleaved)


def qk_arguments(op: PrepareKV, run: Run) -> tuple[QKArguments, Tensor | None]:
    """Return the arguments of the norms and the rotation of queries and keys, and the bias of the norms."""
    weight, bias, eps = None, None, 0.0
    kind: NormKind = "rms"
    if op.norm is not None:
        norm = run.weights.qk_norm(op.norm.weight)
        assert isinstance(norm, HeadNorm), "only norms of separate heads are fused"
        weight, bias, eps = norm.weight, norm.bias, norm.norm.eps
        kind = "layer" if isinstance(norm.norm, LayerNorm) else "rms"
    cos, sin = (None, None) if op.rope is None else run.angles[op.rope]
    return (weight, kind, eps, cos, sin, op.rope is not None and op.rope.interleaved), bias


def prepare_rows(op: PrepareKV, run: Run) -> None:
    """Normalise and rotate queries and keys in place, without writing them to pages."""
    if op.rope is None and op.norm is None:
        return
    arguments, bias = qk_arguments(op, run)
    qkv = run[op.qkv].unflatten(-1, (-1, op.head_dim))
    QK_NORM_ROPE_KV(qkv, None, 0, None, op.heads, *arguments, *UNSCALED, bias)


def add_norm(layer: NormLayer, added: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return x + scale · added, and its norm."""
    match layer.norm:
        case RMSNorm(eps=eps):
            y, x = RMS_NORM(added, layer.weight, eps, x, scale)
        case LayerNorm(eps=eps):
            y, x = LAYER_NORM(added, layer.weight, layer.bias, eps, x, scale)
    return x, y


def fused_norm(layer: NormLayer, x: Tensor) -> Tensor:
    match layer.norm:
        case RMSNorm(eps=eps):
            return RMS_NORM(x, layer.weight, eps)
        case LayerNorm(eps=eps):
            return LAYER_NORM(x, layer.weight, layer.bias, eps)
