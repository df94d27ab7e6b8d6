"""Attention over latents, and the selection of keys, with torch."""

from collections.abc import Callable
from typing import Any

import torch

from engine.layers.norm import normed
from engine.layers.reference.run import Run, heads
from engine.lowering.operations import (
    AbsorbQueries,
    AttendLatent,
    ExpandValues,
    PrepareIndex,
    PrepareLatent,
    SelectKeys,
)
from kernels.paged_kv import write_latents
from kernels.paged_latents import paged_latent_attention, select_paged_keys
from kernels.rope import rotate_


def _prepare_latent(op: PrepareLatent, run: Run) -> None:
    part, latent, q = op.part, run[op.latent], heads(run[op.q], op.part.query_dim)
    layer, rank = run.weights.norm(op.norm), part.kv_lora_rank
    latent[:, :rank] = normed(layer.norm, latent[:, :rank], layer.weight, layer.bias)
    rotated = q[..., part.qk_nope_head_dim :]
    for x in (latent[:, rank:].unsqueeze(1), rotated):
        rotate_(x, *run.step.angles[part.rope], part.rope.interleaved)
    absorbed = q.new_empty(len(q), op.heads, part.state_dim)
    absorbed[..., rank:] = rotated
    run[op.y] = absorbed.flatten(1)
    place = run.kv_layers[op.layer]
    write_latents(run.step.pages[place.group], run.step.writes[place.group][place.layer], latent)


def _prepare_index(op: PrepareIndex, run: Run) -> None:
    part, key, q = op.part, run[op.key], heads(run[op.q], op.part.head_dim)
    layer, place = run.weights.norm(op.norm), run.kv_layers[op.layer]
    key = run[op.key] = normed(layer.norm, key, layer.weight, layer.bias)
    for x in (key.unsqueeze(1), q):
        rotate_(x, *run.step.angles[part.rope], part.rope.interleaved)
    write_latents(run.step.pages[place.group], run.step.writes[place.group][place.layer], key)


def _select_keys(op: SelectKeys, run: Run) -> None:
    place, step = run.kv_layers[op.layer], run.step
    q = heads(run[op.q], op.part.head_dim)
    read = step.pages[place.group], place.layer, step.reads[place.group]
    run[op.y] = select_paged_keys(q, run[op.weights], run[op.key], *read, top_k=op.part.top_k)


def _absorb_queries(op: AbsorbQueries, run: Run) -> None:
    part, keys = op.weight.attention, run.weights.heads(op.weight).keys
    q, y = heads(run[op.q], part.query_dim), heads(run[op.y], part.state_dim)
    y[..., : part.kv_lora_rank] = torch.bmm(q[..., : part.qk_nope_head_dim].transpose(0, 1), keys).transpose(0, 1)


def _attend_latent(op: AttendLatent, run: Run) -> None:
    place, part, step = run.kv_layers[op.layer], op.part, run.step
    q = heads(run[op.q], part.state_dim)
    options: dict[str, Any] = {"value_dim": part.kv_lora_rank, "scale": part.scale}
    options |= {"selected": None if op.selected is None else run[op.selected]}
    latents, reads, pages = run[op.latent], step.reads[place.group], step.pages[place.group]
    run[op.y] = paged_latent_attention(q, latents, pages, place.layer, reads, **options).flatten(1)


def _expand_values(op: ExpandValues, run: Run) -> None:
    values = run.weights.heads(op.weight).values
    x = heads(run[op.x], op.weight.attention.kv_lora_rank)
    run[op.y] = torch.bmm(x.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).flatten(1)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    PrepareLatent: _prepare_latent,
    PrepareIndex: _prepare_index,
    SelectKeys: _select_keys,
    AbsorbQueries: _absorb_queries,
    AttendLatent: _attend_latent,
    ExpandValues: _expand_values,
}
