"""Hidden states from tables, media and other models, with torch."""

from collections.abc import Callable
from typing import Any

import torch

from engine.layers.reference.run import Run
from engine.layers.vocabulary import Vocabulary
from engine.lowering.operations import (
    AddMedia,
    Embed,
    EmbedAudio,
    EmbedMedia,
    FillMedia,
    Input,
    InsertMedia,
    LookUp,
    LookUpPositions,
    ReadStates,
)


def _input(op: Input, run: Run) -> None:
    assert op.y.name in run.values, "the caller gives the rows"


def _embed(op: Embed, run: Run) -> None:
    run[op.y] = run.weights.tables(op.weight).summed(run.ids, run.positions, run.segments, run.dtype)


def _insert_media(op: InsertMedia, run: Run) -> None:
    if run.media is not None:
        run.media.insert(run[op.x])


def _embed_media(op: EmbedMedia, run: Run) -> None:
    run[op.y] = torch.zeros(len(run.ids), op.y.width, dtype=run.dtype, device=run.ids.device)
    if run.media is not None:
        run.media.insert(run[op.y])


def _fill_media(op: FillMedia, run: Run) -> None:
    if run.media is not None:
        row = run.weights.token_rows(op.weight).look_up(torch.tensor([op.token], device=run.ids.device), run.dtype)
        run.media.fill(run[op.x], row)


def _read_states(op: ReadStates, run: Run) -> None:
    assert run.states is not None, "a prediction head reads hidden states"
    run[op.y] = run.states.to(run.dtype)
    if op.skips_first:
        run[op.x].masked_fill_((run.positions == 0).unsqueeze(1), 0)


def _add_media(op: AddMedia, run: Run) -> None:
    if run.media is not None:
        run.media.add(run[op.x], op.first)


def _look_up(op: LookUp, run: Run) -> None:
    run[op.y] = run.weights.token_rows(op.weight).look_up(run.ids, run.dtype)


def _look_up_positions(op: LookUpPositions, run: Run) -> None:
    tables = run.weights.tables(op.weight)
    assert isinstance(tables, Vocabulary), "only decoders project the rows of tokens"
    run[op.y] = tables.position(run.positions, run.dtype)


def _embed_audio(op: EmbedAudio, run: Run) -> None:
    assert run.spectrograms is not None, "the encoder inputs are audio"
    run[op.y] = run.weights.audio(op.weight).embed(run.spectrograms, run.dtype)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    Input: _input,
    Embed: _embed,
    InsertMedia: _insert_media,
    ReadStates: _read_states,
    AddMedia: _add_media,
    LookUp: _look_up,
    LookUpPositions: _look_up_positions,
    EmbedAudio: _embed_audio,
    EmbedMedia: _embed_media,
    FillMedia: _fill_media,
}
