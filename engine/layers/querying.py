"""Attention of learned queries to the rows of a frame, and the rows of queries and squares of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.layers.patches import Grid
from engine.lowering.operations import AttendContext
from engine.models.parts import AttentionPool, Perceiver, QFormer, Resampler


def attend_context(op: AttendContext, q: Tensor, count: Sequence[int], context: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the outputs of all heads, [queries, heads · dim]. q: [queries, columns], queries, and with `op.own` also
    keys and values of the queries; count: queries of each frame; context: keys and values of the rows of frames, of all
    layers; rows: of each frame."""
    part, dim = op.part, op.part.head_dim
    width = part.kv_heads * dim
    kv = context[:, op.first : op.first + 2 * width]
    found = []
    for mine, given in zip(torch.split(q, list(count)), torch.split(kv, list(rows)), strict=True):
        queries, own = mine.split((part.heads * dim, mine.shape[1] - part.heads * dim), 1)
        if op.own:
            given = torch.cat((given, own))
        heads = (one.unflatten(1, (-1, dim)).transpose(0, 1).unsqueeze(0) for one in (queries, *given.chunk(2, 1)))
        y = scaled_dot_product_attention(*heads, scale=op.scale, enable_gqa=part.heads != part.kv_heads)
        found.append(y[0].transpose(0, 1).flatten(1))
    return torch.cat(found)


def query_counts(part: AttentionPool | Resampler | QFormer | Perceiver, grids: Sequence[Grid]) -> list[int]:
    """Return the number of queries of each frame. Raises ValueError for a size for which there is none."""
    match part:
        case AttentionPool():
            return [1 for frames, _, _ in grids for _ in range(frames)]
        case QFormer() | Perceiver():
            return [part.queries for frames, _, _ in grids for _ in range(frames)]
    known = dict(part.queries)
    for _, high, wide in grids:
        if max(high, wide) ** 2 not in known:
            sizes = ", ".join(map(str, known))
            raise ValueError(f"an image has {high} x {wide} patches; the longer side must be the root of {sizes}")
    return [known[max(high, wide) ** 2] for frames, high, wide in grids for _ in range(frames)]


def squares(x: Tensor, grids: Sequence[Grid], side: int) -> Tensor:
    """Return the rows of each square of side · side patches, one square after another, [rows, columns]. Raises
    ValueError for grids that squares do not divide."""
    found, frames = list[Tensor](), torch.split(x, [high * wide for count, high, wide in grids for _ in range(count)])
    sizes = [(high, wide) for count, high, wide in grids for _ in range(count)]
    for rows, (high, wide) in zip(frames, sizes, strict=True):
        if high % side or wide % side:
            raise ValueError(f"an image has {high} x {wide} patches; both must be multiples of {side}")
        cut = rows.view(high // side, side, wide // side, side, -1).transpose(1, 2)
        found.append(cut.reshape(-1, x.shape[1]))
    return torch.cat(found)
