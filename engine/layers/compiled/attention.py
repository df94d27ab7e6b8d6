"""Attention over pages or over the rows of a step, by compiled kernels."""

from collections.abc import Iterator

from torch import Tensor

from engine.layers.compiled.buffers import heads
from engine.layers.compiled.build import CompiledOps, Functions, Structures, TorchOp
from engine.layers.compiled.rows import norm
from engine.layers.local_attention import local_attention
from engine.layers.norm import HeadNorm, ProjectionNorm
from engine.layers.querying import attend_context
from engine.layers.values import pad_values
from engine.lowering.operations import (
    Attend,
    AttendContext,
    AttendLocal,
    CutHeads,
    PadValues,
    PrepareKV,
    QKNorm,
    Rotate,
    ScaleQueries,
    WriteKV,
)
from kernels.cpu import program as cpu


def _head_norm(layer: HeadNorm, qkv: Tensor, heads: int, dim: int) -> Iterator[cpu.Norm]:
    """Normalise all heads at once, or one by one if they have biases, which pieces of a norm share."""
    if layer.bias is None:
        yield norm(layer.norm, layer.weight, None, qkv, qkv, groups=heads, size=dim)
        return
    for head in range(heads):
        piece = qkv[:, head * dim :]
        yield norm(layer.norm, layer.weight[head], layer.bias[head], piece, piece, size=dim)


def _projection_norm(layer: ProjectionNorm, qkv: Tensor) -> Iterator[cpu.Norm]:
    """Normalise q as one piece and k as another."""
    assert layer.part.qk_norm is not None, "the norm of a projection is declared"
    at = 0
    for weight in layer.weights:
        piece = qkv[:, at:]
        yield norm(layer.part.qk_norm, weight, None, piece, piece, size=len(weight))
        at += len(weight)


def _torch_norm(layer: ProjectionNorm, qkv: Tensor, heads: int, dim: int) -> TorchOp:
    """Normalise over the heads of all ranks, which requires an all-reduce."""

    def compute(tokens: int) -> None:
        qk = qkv[:tokens, : heads * dim]
        qk[:] = layer(qk.unflatten(1, (heads, dim))).flatten(1)

    return TorchOp(compute)


def _scale_queries(op: ScaleQueries, ops: CompiledOps) -> Structures:
    qkv = ops.buffers[op.qkv]
    yield cpu.ScaleQueries(
        qkv=qkv.data_ptr(),
        stride=qkv.stride(0),
        size=op.heads * op.head_dim,
        length=op.factor.length,
        offset=op.factor.offset,
        scale=op.factor.scale,
    )


def _pad_values(op: PadValues, ops: CompiledOps) -> Structures:
    x, y = ops.buffers[op.x], ops.buffers[op.y]

    def compute(tokens: int) -> None:
        pad_values(op, x[:tokens], y[:tokens])

    yield TorchOp(compute)


def _cut_heads(op: CutHeads, ops: CompiledOps) -> Structures:
    x, y = heads(ops.buffers[op.x], op.heads), heads(ops.buffers[op.y], op.heads)

    def compute(tokens: int) -> None:
        y[:tokens] = x[:tokens, :, : y.shape[2]]

    yield TorchOp(compute)


def _qk_norm(op: QKNorm, ops: CompiledOps) -> Structures:
    qkv = ops.buffers[op.qkv]
    layer, dim = ops.weights.qk_norm(op.weight), op.weight.attention.head_dim
    if isinstance(layer, HeadNorm):
        yield from _head_norm(layer, qkv, op.heads, dim)
    elif ops.collective is None:
        yield from _projection_norm(layer, qkv)
    else:
        yield _torch_norm(layer, qkv, op.heads, dim)


def rotation(op: Rotate, ops: CompiledOps, qkv: Tensor) -> cpu.RopeKV:
    """Rotate all heads and write no keys and values."""
    return cpu.RopeKV(
        qkv=qkv.data_ptr(),
        stride=qkv.stride(0),
        heads=op.heads,
        kv_heads=0,
        dim=op.head_dim,
        rotary_dim=op.rope.dim,
        rope=ops.program.ropes.index(op.rope),
        interleaved=op.rope.interleaved,
        group=0,
        layer=0,
    )


def _prepare_kv(op: PrepareKV, ops: CompiledOps) -> Structures:
    qkv = ops.buffers[op.qkv]
    rope, place = op.rope, ops.place(op.layer)
    yield cpu.RopeKV(
        qkv=qkv.data_ptr(),
        stride=qkv.stride(0),
        heads=op.heads,
        kv_heads=op.kv_heads,
        dim=op.head_dim,
        rotary_dim=rope.dim if rope else 0,
        rope=ops.program.ropes.index(rope) if rope else 0,
        interleaved=rope.interleaved if rope else False,
        group=place.group,
        layer=place.layer,
    )


def _attend(op: Attend, ops: CompiledOps) -> Structures:
    qkv, y = ops.buffers[op.qkv], ops.buffers[op.y]
    part, place = op.part, ops.place(op.layer)
    sinks, slopes = ops.weights.sinks(op.sinks), ops.weights.slopes(op.slopes)
    biases = ops.weights.bias(op.bias)
    yield cpu.Attend(
        q=qkv.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        slopes=None if slopes is None else slopes.data_ptr(),
        biases=None if biases is None else biases.data_ptr(),
        out=y.data_ptr(),
        q_stride=qkv.stride(0),
        out_stride=y.stride(0),
        heads=op.heads,
        kv_heads=op.kv_heads,
        dim=part.head_dim,
        value_dim=part.head_dim,
        reach=0 if biases is None else biases.shape[1] // 2,
        window=op.window or 0,
        chunk=op.chunk or 0,
        scale=op.scale,
        softcap=part.softcap or 0.0,
        group=place.group,
        layer=place.layer,
        causal=part.causal,
        cross=op.cross,
    )


def _attend_context(op: AttendContext, ops: CompiledOps) -> Structures:
    q, y = ops.buffers[op.q], ops.buffers[op.y]

    def compute(tokens: int) -> None:
        assert ops.context is not None, "the caller gives keys and values"
        y[:tokens] = attend_context(op, q[:tokens], ops.count, ops.context, ops.context_rows)

    yield TorchOp(compute)


def _attend_local(op: AttendLocal, ops: CompiledOps) -> Structures:
    layer, qkv, y = ops.weights.local(op.weight), ops.buffers[op.qkv], ops.buffers[op.y]

    def compute(tokens: int) -> None:
        weights = layer.factors, layer.distances, op.weight.part.softcap
        y[:tokens] = local_attention(qkv[:tokens], ops.count, *weights)

    yield TorchOp(compute)


def _write_kv(op: WriteKV, ops: CompiledOps) -> Structures:
    own = {"layer": op.layer, "heads": op.heads, "kv_heads": op.kv_heads, "head_dim": op.head_dim}
    yield from _prepare_kv(PrepareKV(qkv=op.qkv, norm=None, rope=None, **own), ops)


def _rotate(op: Rotate, ops: CompiledOps) -> Structures:
    yield rotation(op, ops, ops.buffers[op.qkv])


FUNCTIONS: Functions = {
    QKNorm: _qk_norm,
    Rotate: _rotate,
    PrepareKV: _prepare_kv,
    WriteKV: _write_kv,
    ScaleQueries: _scale_queries,
    PadValues: _pad_values,
    CutHeads: _cut_heads,
    Attend: _attend,
    AttendContext: _attend_context,
    AttendLocal: _attend_local,
}
