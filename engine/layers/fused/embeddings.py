"""Hidden states from tables, media and other models, by Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch

from engine.layers.fused.run import Run
from engine.lowering.operations import (
    AddMedia,
    Embed,
    EmbedMedia,
    FillMedia,
    InsertMedia,
    LookUp,
    LookUpPositions,
    ReadStates,
)
from kernels.embedding import EMBEDDING


def _read_states(op: ReadStates, run: Run) -> None:
    assert run.step.draft_inputs is not None, "a head for drafts reads hidden states"
    run[op.y] = run.step.draft_inputs.to(run.model.dtype)
    if op.skips_first:
        run[op.x].masked_fill_((run.step.positions == 0).unsqueeze(1), 0)


def _embed(op: Embed, run: Run) -> None:
    step, tables, vocabulary = run.step, run.weights.tables(op.weight), run.model.vocabulary
    if vocabulary.world.size > 1 or vocabulary.blocks is not None:
        run[op.y] = tables.summed(step.ids, step.positions, step.segments, run.model.dtype)
        return
    if not op.weight.embed.is_sum:
        run[op.y] = EMBEDDING(step.ids, vocabulary.table, run.model.dtype, vocabulary.part.scale)
        return
    added = step.positions, tables.position_rows, step.segments, tables.segments
    run[op.y] = EMBEDDING(step.ids, vocabulary.table, run.model.dtype, vocabulary.part.scale, *added)


def _insert_media(op: InsertMedia, run: Run) -> None:
    if run.step.media is not None:
        run.step.media.insert(run[op.x])


def _embed_media(op: EmbedMedia, run: Run) -> None:
    ids = run.step.ids
    run[op.y] = torch.zeros(len(ids), op.y.width, dtype=run.model.dtype, device=ids.device)
    if run.step.media is not None:
        run.step.media.insert(run[op.y])


def _fill_media(op: FillMedia, run: Run) -> None:
    step = run.step
    if step.media is not None:
        token = torch.tensor([op.token], device=step.ids.device)
        step.media.fill(run[op.x], run.weights.token_rows(op.weight).look_up(token, run.model.dtype))


def _add_media(op: AddMedia, run: Run) -> None:
    if run.step.media is not None:
        run.step.media.add(run[op.x], op.first)


def _look_up(op: LookUp, run: Run) -> None:
    rows = run.weights.token_rows(op.weight)
    ids = torch.where(run.step.ids < rows.part.vocab, run.step.ids, 0)
    run[op.y] = EMBEDDING(ids, rows.table, run.model.dtype, rows.part.scale)


def _look_up_positions(op: LookUpPositions, run: Run) -> None:
    run[op.y] = run.model.vocabulary.position(run.step.positions, run.model.dtype)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    ReadStates: _read_states,
    Embed: _embed,
    EmbedMedia: _embed_media,
    FillMedia: _fill_media,
    InsertMedia: _insert_media,
    AddMedia: _add_media,
    LookUp: _look_up,
    LookUpPositions: _look_up_positions,
}
