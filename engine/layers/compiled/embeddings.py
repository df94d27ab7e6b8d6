"""Hidden states from tables, media and other models, by compiled kernels."""

import torch
from torch import Tensor

from engine.layers.batch import MediaRows
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


def _embed(op: Embed, ops: CompiledOps) -> Structures:
    if op.weight.embed.is_sum:
        return  # computed before the step
    assert ops.vocabulary is not None, "a program with an embedding has a vocabulary"
    yield _rows(ops.vocabulary.table, ops.vocabulary.part.scale, ops.buffers[op.y], ops.vocabulary.blocks)


def _look_up(op: LookUp, ops: CompiledOps) -> Structures:
    if not op.partial:
        yield _rows(ops.weights.token_rows(op.weight).table, op.weight.part.scale, ops.buffers[op.y])


def _insert_media(op: InsertMedia, ops: CompiledOps) -> Structures:
    x = ops.buffers[op.x]
    yield TorchOp(lambda tokens: _media(ops).insert(x[:tokens]), media=True)


def _add_media(op: AddMedia, ops: CompiledOps) -> Structures:
    x = ops.buffers[op.x]
    yield TorchOp(lambda tokens: _media(ops).add(x[:tokens], op.first), media=True)


def _fill_media(op: FillMedia, ops: CompiledOps) -> Structures:
    x = ops.buffers[op.x]
    row = ops.weights.token_rows(op.weight).look_up(torch.tensor([op.token]), x.dtype)
    yield TorchOp(lambda tokens: _media(ops).fill(x[:tokens], row), media=True)


def _media(ops: CompiledOps) -> MediaRows:
    assert ops.media is not None, "a step without media has no such operation"
    return ops.media


def _read_states(op: ReadStates, ops: CompiledOps) -> Structures:
    x, y = ops.buffers[op.x], ops.buffers[op.y]

    def compute(tokens: int) -> None:
        assert ops.read_states is not None, "a prediction head reads hidden states"
        states, first = ops.read_states
        y[:tokens] = states
        if op.skips_first:
            x.index_fill_(0, first, 0.0)

    yield TorchOp(compute)


FUNCTIONS: Functions = {
    **dict.fromkeys((Input, EmbedAudio, LookUpPositions), given),
    Embed: _embed,
    LookUp: _look_up,
    InsertMedia: _insert_media,
    AddMedia: _add_media,
    FillMedia: _fill_media,
    ReadStates: _read_states,
}
