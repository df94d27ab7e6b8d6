"""Attention over latents, and the selection of keys, by Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch

from engine.layers.fused.run import Run
from engine.lowering.operations import (
    AbsorbQueries,
    AttendLatent,
    ExpandValues,
    PrepareIndex,
    PrepareLatent,
    SelectKeys,
)
from engine.models.parts import RMSNorm
from kernels.attention.latent import LATENT_DECODE, LATENT_PREFILL
from kernels.attention.select import SELECT_KEYS
from kernels.attention.sparse_latent import SPARSE_LATENT
from kernels.head_matmul import HEAD_MATMUL
from kernels.index_kv import INDEX_KV
from kernels.latent_kv import LATENT_KV


def _prepare_latent(op: PrepareLatent, run: Run) -> None:
    part, layer, step = op.part, run.weights.norm(op.norm), run.step
    place, (cos, sin) = run.model.kv_layers[op.layer], run.angles[part.rope]
    q = run[op.q].unflatten(-1, (op.heads, part.query_dim))
    y = q.new_empty(len(q), op.heads, part.state_dim)
    slots = step.slot_mapping[place.group]
    norm = layer.weight, layer.norm.eps
    LATENT_KV(run[op.latent], q, run.pages[place.group], place.layer, slots, *norm, cos, sin, part.rope.interleaved, y)
    run[op.y] = y.flatten(1)


def _prepare_index(op: PrepareIndex, run: Run) -> None:
    part, layer, step = op.part, run.weights.norm(op.norm), run.step
    place, (cos, sin) = run.model.kv_layers[op.layer], run.angles[part.rope]
    assert layer.bias is not None and not isinstance(layer.norm, RMSNorm), "keys of an indexer have a layer norm"
    written = run.pages[place.group], place.layer, step.slot_mapping[place.group]
    q = run[op.q].unflatten(-1, (part.heads, part.head_dim))
    norm = layer.weight, layer.bias, layer.norm.eps
    INDEX_KV(run[op.key], q, *written, *norm, cos, sin, part.rope.interleaved)


def _select_keys(op: SelectKeys, run: Run) -> None:
    part, step, place = op.part, run.step, run.model.kv_layers[op.layer]
    q = run[op.q].unflatten(-1, (part.heads, part.head_dim))
    selected = torch.empty((len(q), part.top_k), dtype=torch.int32, device=q.device)
    rows = step.tables[place.group], step.slot, step.query_start, step.lengths
    run[op.y], *_ = SELECT_KEYS(q, run[op.weights], run.pages[place.group], place.layer, *rows, selected)


def _absorb_queries(op: AbsorbQueries, run: Run) -> None:
    part, keys = op.weight.attention, run.weights.heads(op.weight).keys
    q = run[op.q].unflatten(-1, (op.heads, part.query_dim))[..., : part.qk_nope_head_dim]
    y = run[op.y].unflatten(-1, (op.heads, part.state_dim))[..., : part.kv_lora_rank]
    HEAD_MATMUL(q, keys.transpose(1, 2), y)


def _attend_latent(op: AttendLatent, run: Run) -> None:
    part, step, place = op.part, run.step, run.model.kv_layers[op.layer]
    q = run[op.q].unflatten(-1, (op.heads, part.state_dim))
    out = q.new_empty(len(q), op.heads, part.kv_lora_rank)
    read = q, run.pages[place.group], place.layer, step.tables[place.group], step.slot, step.query_start, step.lengths
    if op.selected is not None:
        SPARSE_LATENT(*read, run[op.selected], out, part.scale)
        run[op.y] = out.flatten(1)
        return
    if step.singles:
        LATENT_DECODE(*read, run.schedules[None, None, op.kv_heads], out, part.scale)
    if step.spans:
        LATENT_PREFILL(*read, out, part.scale)
    run[op.y] = out.flatten(1)


def _expand_values(op: ExpandValues, run: Run) -> None:
    part, x = op.weight.attention, run[op.x].unflatten(-1, (op.heads, -1))
    y = x.new_empty(len(x), op.heads, part.v_head_dim)
    run[op.y] = HEAD_MATMUL(x, run.weights.heads(op.weight).values, y).flatten(1)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    PrepareLatent: _prepare_latent,
    PrepareIndex: _prepare_index,
    SelectKeys: _select_keys,
    AbsorbQueries: _absorb_queries,
    AttendLatent: _attend_latent,
    ExpandValues: _expand_values,
}
