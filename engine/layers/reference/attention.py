"""Attention over pages or over the rows of a step, with torch."""

from collections.abc import Callable
from typing import Any

from engine.layers.local_attention import local_attention
from engine.layers.query_scale import query_factors
from engine.layers.querying import attend_context
from engine.layers.reference.run import Run, heads
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
from kernels.attention.encoder_torch import encoder_attention
from kernels.paged_attention import paged_attention
from kernels.paged_kv import write_kv
from kernels.rope import rotate_


def _attend_context(op: AttendContext, run: Run) -> None:
    step = run.step
    assert step.context is not None, "the caller gives keys and values"
    run[op.y] = attend_context(op, run[op.q], step.count, step.context, step.context_rows)


def _attend_local(op: AttendLocal, run: Run) -> None:
    layer, qkv = run.weights.local(op.weight), run[op.qkv]
    y = local_attention(qkv, run.step.count, layer.factors, layer.distances, op.weight.part.softcap)
    run[op.y] = y.to(qkv.dtype)


def _qk_norm(op: QKNorm, run: Run) -> None:
    qk = heads(run[op.qkv], op.weight.attention.head_dim)[:, : op.heads]
    qk.copy_(run.weights.qk_norm(op.weight)(qk))


def _rotate(op: Rotate, run: Run) -> None:
    rotate_(heads(run[op.qkv], op.head_dim)[:, : op.heads], *run.step.angles[op.rope], op.rope.interleaved)


def _scale_queries(op: ScaleQueries, run: Run) -> None:
    heads(run[op.qkv], op.head_dim)[:, : op.heads].mul_(query_factors(op.factor, run.positions))


def _write_kv(op: WriteKV, run: Run) -> None:
    kv = heads(run[op.qkv], op.head_dim)[:, op.heads :]
    place = run.kv_layers[op.layer]
    writes = (run.step.cross_writes if op.cross else run.step.writes)[place.group][place.layer]
    if op.layer in run.read_again:
        run.written[op.layer] = kv
    write_kv(run.step.pages[place.group], writes, kv[:, : op.kv_heads], kv[:, op.kv_heads :])


def _prepare_kv(op: PrepareKV, run: Run) -> None:
    sizes = {"heads": op.heads, "kv_heads": op.kv_heads, "head_dim": op.head_dim}
    if op.norm is not None:
        _qk_norm(op.norm, run)
    if op.rope is not None:
        _rotate(Rotate(qkv=op.qkv, rope=op.rope, heads=op.heads + op.kv_heads, head_dim=op.head_dim), run)
    if op.layer is not None:
        _write_kv(WriteKV(qkv=op.qkv, layer=op.layer, **sizes), run)


def _attend(op: Attend, run: Run) -> None:
    part, step = op.part, run.step
    qkv = heads(run[op.qkv], part.head_dim)
    q, k, v = (qkv, None, None) if op.queries_only else qkv.split((op.heads, op.kv_heads, op.kv_heads), 1)
    if part.shared_kv and op.layer is not None:
        k, v = run.written[op.layer].split(op.kv_heads, 1)
    if op.layer is None:
        biases, rows = run.weights.bias(op.bias), step.windows if op.windowed else step.count
        run[op.y] = encoder_attention(q, k, v, rows, op.scale, part.window, part.softcap, biases, step.keys).flatten(1)
        return
    place = run.kv_layers[op.layer]
    reads = (step.cross_reads if op.cross else step.reads)[place.group]
    options: dict[str, Any] = {"scale": op.scale, "softcap": part.softcap}
    if not op.cross:
        options |= {"sinks": run.weights.sinks(op.sinks), "slopes": run.weights.slopes(op.slopes)}
        options |= {"biases": run.weights.bias(op.bias)}
    run[op.y] = paged_attention(q, k, v, step.pages[place.group], place.layer, reads, **options).flatten(1)


def _pad_values(op: PadValues, run: Run) -> None:
    x = run[op.x]
    run[op.y] = pad_values(op, x, x.new_empty(x.shape[0], op.y.width))


def _cut_heads(op: CutHeads, run: Run) -> None:
    run[op.y] = heads(run[op.x], op.x.width // op.heads)[..., : op.y.width // op.heads].flatten(1)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    AttendLocal: _attend_local,
    AttendContext: _attend_context,
    QKNorm: _qk_norm,
    Rotate: _rotate,
    ScaleQueries: _scale_queries,
    WriteKV: _write_kv,
    PrepareKV: _prepare_kv,
    Attend: _attend,
    PadValues: _pad_values,
    CutHeads: _cut_heads,
}
