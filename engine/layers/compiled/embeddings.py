"""Hidden states from tables, media and other models, by compiled kernels."""

import torch
from torch import Tensor

from engine.layers.compiled.build import CompiledOps, Functions, Structures, TorchOp, given
from engine.lowering.operations import (
    AddMedia,
    Embed,
    EmbedAudio,
    FillMedia,
    Input,
    InsertMedia,
    LookUp,
    LookUpPositions,
    ReadStates,
)
from kernels.cpu import program as cpu
from kernels.cpu.packing import BLOCK_FORMS, FORMS
from kernels.ggml_blocks import BlockWeight


def _rows(table: Tensor, scale: float, y: Tensor, blocks: BlockWeight | None = None) -> cpu.Embed:
    """Write the row of each token, times `scale`. blocks: the table if it is in blocks of ggml."""
    return cpu.Embed(
        table=table.data_ptr(),
        out=y.data_ptr(),
        out_stride=y.stride(0),
        size=y.shape[1],
        type=cpu.TYPES[table.dtype] if blocks is None else cpu.EMBED_BLOCKS + FORMS.index(BLOCK_FORMS[blocks.kind]),
        scale=scale,
    )


def _media(op: InsertMedia | AddMedia | FillMedia, ops: CompiledOps) -> TorchOp:
    x = ops.buffers[op.x]
    row = x
    if isinstance(op, FillMedia):
        row = ops.weights.token_rows(op.weight).look_up(torch.tensor([op.token]), x.dtype)

    def compute(tokens: int) -> None:
        assert ops.media is not None, "a step without media has no such operation"
        if isinstance(op, FillMedia):
            ops.media.fill(x[:tokens], row)
        elif isinstance(op, AddMedia):
            ops.media.add(x[:tokens], op.first)
        else:
            ops.media.insert(x[:tokens])

    return TorchOp(compute, media=True)


def _read_states(ops: CompiledOps, x: Tensor, y: Tensor, *, skips_first: bool) -> TorchOp:
    def compute(tokens: int) -> None:
        assert ops.read_states is not None, "a prediction head reads hidden states"
        states, first = ops.read_states
        y[:tokens] = states
        if skips_first:
            x.index_fill_(0, first, 0.0)

    return TorchOp(compute)


def _embed(ops: CompiledOps, x: Tensor) -> cpu.Embed:
    assert ops.vocabulary is not None, "a program with an embedding has a vocabulary"
    return _rows(ops.vocabulary.table, ops.vocabulary.part.scale, x, ops.vocabulary.blocks)


def _media_op(op: InsertMedia | AddMedia | FillMedia, ops: CompiledOps) -> Structures:
    yield _media(op, ops)


def _embed_op(op: Embed, ops: CompiledOps) -> Structures:
    if not op.weight.embed.is_sum:
        yield _embed(ops, ops.buffers[op.y])


def _read_states_op(op: ReadStates, ops: CompiledOps) -> Structures:
    yield _read_states(ops, ops.buffers[op.x], ops.buffers[op.y], skips_first=op.skips_first)


def _look_up(op: LookUp, ops: CompiledOps) -> Structures:
    if not op.partial:
        yield _rows(ops.weights.token_rows(op.weight).table, op.weight.part.scale, ops.buffers[op.y])


FUNCTIONS: Functions = {
    **dict.fromkeys((Input, EmbedAudio, LookUpPositions), given),
    Embed: _embed_op,
    **dict.fromkeys((InsertMedia, AddMedia, FillMedia), _media_op),
    ReadStates: _read_states_op,
    LookUp: _look_up,
}
