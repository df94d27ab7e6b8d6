"""Attention over pages or over the rows of a step, by Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.layers.fused.run import Run
from engine.layers.fused_rows import UNSCALED, QKArguments, prepare_rows, qk_arguments, qk_norm, rotate
from engine.layers.kv import KVLayer
from engine.layers.query_scale import query_factors
from engine.layers.values import pad_values
from engine.lowering.operations import Attend, CutHeads, PadValues, PrepareKV, QKNorm, Rotate, ScaleQueries, WriteKV
from kernels.attention.decode import DECODE_ATTENTION
from kernels.attention.encoder import ENCODER_ATTENTION
from kernels.attention.prefill import PREFILL_ATTENTION, tokens_of_block
from kernels.qk_norm_rope_kv import QK_NORM_ROPE_KV

_PLAIN_QK: QKArguments = (None, "rms", 0.0, None, None, False)


def _prepare_kv(op: PrepareKV, run: Run) -> None:
    if op.layer is None:
        prepare_rows(op, run)
        return
    arguments, bias = qk_arguments(op, run)
    qkv, place, step = run[op.qkv].unflatten(-1, (-1, op.head_dim)), run.model.kv_layers[op.layer], run.step
    scales = run.model.scales[op.layer]
    pages, slots = run.pages[place.group], step.slot_mapping[place.group]
    QK_NORM_ROPE_KV(qkv, pages, place.layer, slots, op.heads, *arguments, *scales, bias)


def _scale_queries(op: ScaleQueries, run: Run) -> None:
    queries = run[op.qkv].unflatten(-1, (-1, op.head_dim))[:, : op.heads]
    queries.mul_(query_factors(op.factor, run.step.positions))


def _write_kv(op: WriteKV, run: Run) -> None:
    """Write the keys and values of encoder inputs; others are written by PrepareKV."""
    place, step = run.model.kv_layers[op.layer], run.step
    kv = run[op.qkv].unflatten(-1, (-1, op.head_dim))
    pages, slots = run.pages[place.group], step.slot_mapping[place.group]
    QK_NORM_ROPE_KV(kv, pages, place.layer, slots, 0, *_PLAIN_QK, *UNSCALED)


def _attend(op: Attend, run: Run) -> None:
    part, step = op.part, run.step
    qkv = run[op.qkv].unflatten(-1, (-1, part.head_dim))
    out = torch.empty(qkv[:, : op.heads].shape, dtype=qkv.dtype, device=qkv.device)
    if op.layer is None:
        q, k, v = qkv.split((op.heads, op.kv_heads, op.kv_heads), 1)
        biases = run.weights.bias(op.bias)
        ENCODER_ATTENTION(q, k, v, step.query_start, out, op.scale, False, part.window, part.softcap, biases)
    elif op.cross:
        _cross_attention(op, run.model.kv_layers[op.layer], run, qkv, out)
    else:
        _paged_attention(op, run.model.kv_layers[op.layer], run, qkv[:, : op.heads], out)
    run[op.y] = out.flatten(1)


def _paged_attention(op: Attend, place: KVLayer, run: Run, q: Tensor, out: Tensor) -> None:
    """Attend to the pages."""
    part, step, table, pages = op.part, run.step, run.step.tables[place.group], run.pages[place.group]
    assert op.layer is not None, "pages belong to a layer"
    scales, starts = run.model.scales[op.layer], run.decoder_starts
    rows = step.slot, step.query_start, step.lengths
    options = op.scale, part.window, part.softcap, run.weights.sinks(op.sinks)
    last = *scales, starts, run.weights.slopes(op.slopes), part.chunk, run.weights.bias(op.bias)
    if step.singles:
        schedules = run.schedules[part.window, part.chunk, op.kv_heads]
        DECODE_ATTENTION(q, pages, place.layer, table, *rows, schedules, out, *options, *last)
    if step.spans:
        schedule = run.prefill_schedule(op.kv_heads, tokens_of_block(q, pages, part.window))
        own_spans = None if run.model.windowed_spans and part.window is None else step.bidirectional
        PREFILL_ATTENTION(q, pages, place.layer, table, *rows, out, *options, own_spans, *last, schedule)


def _cross_attention(op: Attend, place: KVLayer, run: Run, q: Tensor, out: Tensor) -> None:
    """Attend from each token to the entire encoder input of its sequence."""
    step = run.step
    assert step.cross_attention is not None and run.cross_schedules is not None, "cross-attention needs encoder inputs"
    rows = step.cross_attention.slot, step.cross_attention.query_start, step.cross_attention.lengths
    options, table = (op.scale, None, op.part.softcap, None), step.tables[place.group]
    pages = run.pages[place.group]
    DECODE_ATTENTION(q, pages, place.layer, table, *rows, run.cross_schedules, out, *options, *UNSCALED)


def _pad_values(op: PadValues, run: Run) -> None:
    x = run[op.x]
    run[op.y] = pad_values(op, x, x.new_empty(x.shape[0], op.y.width))


def _cut_heads(op: CutHeads, run: Run) -> None:
    run[op.y] = run[op.x].unflatten(-1, (op.heads, -1))[..., : op.y.width // op.heads].flatten(1)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    QKNorm: qk_norm,
    Rotate: rotate,
    PrepareKV: _prepare_kv,
    ScaleQueries: _scale_queries,
    WriteKV: _write_kv,
    Attend: _attend,
    PadValues: _pad_values,
    CutHeads: _cut_heads,
}
