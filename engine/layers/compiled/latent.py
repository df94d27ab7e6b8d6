"""Attention over latents, and the selection of keys, by compiled kernels."""

from engine.layers.compiled.attention import rotation
from engine.layers.compiled.buffers import heads
from engine.layers.compiled.build import CompiledOps, Functions, Structures
from engine.layers.compiled.rows import norm
from engine.lowering.operations import (
    AbsorbQueries,
    AttendLatent,
    ExpandValues,
    PrepareIndex,
    PrepareLatent,
    Rotate,
    SelectKeys,
)
from kernels.cpu import program as cpu

LATENT_HEADS = 16  # heads that read the latents of a piece of work together, at most


def _prepare_latent(op: PrepareLatent, ops: CompiledOps) -> Structures:
    values = ops.buffers
    part, latent, q, y, place = op.part, values[op.latent], values[op.q], values[op.y], ops.place(op.layer)
    layer = ops.weights.norm(op.norm)
    yield norm(layer.norm, layer.weight, layer.bias, latent, latent, size=part.kv_lora_rank)
    yield cpu.LatentKV(
        latent=latent.data_ptr(),
        q=q.data_ptr(),
        y=y.data_ptr(),
        latent_stride=latent.stride(0),
        q_stride=q.stride(0),
        y_stride=y.stride(0),
        heads=op.heads,
        query_dim=part.query_dim,
        dim=part.state_dim,
        rotary_dim=part.rope.dim,
        rope=ops.program.ropes.index(part.rope),
        interleaved=part.rope.interleaved,
        group=place.group,
        layer=place.layer,
    )


def _prepare_index(op: PrepareIndex, ops: CompiledOps) -> Structures:
    values = ops.buffers
    part, key, layer, place = op.part, values[op.key], ops.weights.norm(op.norm), ops.place(op.layer)
    yield norm(layer.norm, layer.weight, layer.bias, key, key)
    for x, count in ((values[op.q], part.heads), (key, 1)):
        yield rotation(Rotate(qkv=op.q, rope=part.rope, heads=count, head_dim=part.head_dim), ops, x)
    # A latent without queries, whose rotation is done.
    yield cpu.LatentKV(
        latent=key.data_ptr(),
        latent_stride=key.stride(0),
        dim=part.head_dim,
        group=place.group,
        layer=place.layer,
    )


def _select_keys(op: SelectKeys, ops: CompiledOps) -> Structures:
    values = ops.buffers
    part, q, weights, place = op.part, values[op.q], values[op.weights], ops.place(op.layer)
    yield cpu.Select(
        q=q.data_ptr(),
        weights=weights.data_ptr(),
        selected=values[op.y].data_ptr(),  # int32
        q_stride=q.stride(0),
        weights_stride=weights.stride(0),
        heads=part.heads,
        dim=part.head_dim,
        top_k=part.top_k,
        group=place.group,
        layer=place.layer,
    )


def _attend_latent(op: AttendLatent, ops: CompiledOps) -> Structures:
    values = ops.buffers
    part, place, q, y = op.part, ops.place(op.layer), values[op.q], values[op.y]
    # Heads are the work of several threads.
    each = max(size for size in range(1, min(op.heads, LATENT_HEADS) + 1) if op.heads % size == 0)
    yield cpu.Attend(
        q=q.data_ptr(),
        selected=None if op.selected is None else values[op.selected].data_ptr(),  # int32
        out=y.data_ptr(),
        q_stride=q.stride(0),
        out_stride=y.stride(0),
        heads=op.heads,
        kv_heads=op.heads // each,
        dim=part.state_dim,
        value_dim=part.kv_lora_rank,
        window=0,
        chunk=0,
        top_k=0 if op.selected is None else op.selected.width,
        scale=part.scale,
        softcap=0.0,
        group=place.group,
        layer=place.layer,
        causal=True,
        latent=True,
    )


def _absorb_queries(op: AbsorbQueries, ops: CompiledOps) -> Structures:
    q, y = heads(ops.buffers[op.q], op.heads), heads(ops.buffers[op.y], op.heads)
    yield cpu.heads(ops.weights.heads(op.weight).absorbing, q, y)


def _expand_values(op: ExpandValues, ops: CompiledOps) -> Structures:
    x, y = heads(ops.buffers[op.x], op.heads), heads(ops.buffers[op.y], op.heads)
    yield cpu.heads(ops.weights.heads(op.weight).expanding, x, y)


FUNCTIONS: Functions = {
    PrepareLatent: _prepare_latent,
    PrepareIndex: _prepare_index,
    SelectKeys: _select_keys,
    AbsorbQueries: _absorb_queries,
    AttendLatent: _attend_latent,
    ExpandValues: _expand_values,
}
