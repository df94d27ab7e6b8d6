"""Embeddings of an image that was cut into tiles (LLaVA-NeXT, OneVision).

The image was padded to one of several sizes and cut; the whole image, scaled down, is the first tile. The embeddings of
the other tiles are put in their places, the padding is cut off, and a vector is added to the end of each row. Frames of
a video (OneVision) are tiles whose embeddings are scaled down. Source: transformers modeling_llava_next.py,
modeling_llava_onevision.py.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from engine.layers.patches import Grid
from engine.models.media import Tiles

MOST_SHRINKING = 1.1  # rows are interpolated only if there are more than this many times the limit


def arranged(tiles: Tiles, x: Tensor, grids: Sequence[Grid], sizes: Tensor, newline: Tensor) -> Tensor:
    """x: embeddings of all tiles, [tiles · side · side, hidden]; sizes: (height, width) of the original image."""
    if len(grids) == 1:
        return torch.cat((x, newline.unsqueeze(0)))
    side = grids[0][1]
    height, width = (int(one) for one in sizes.flatten().tolist())
    high, wide = (one // tiles.size for one in best_size(tiles, height, width))
    base, rest = x[: side * side], x[side * side :]
    square = rest.view(high, wide, side, side, -1).permute(4, 0, 2, 1, 3).reshape(-1, high * side, wide * side)
    square = _unpadded(square, height, width)
    if tiles.most:
        rows, columns = square.shape[1:]
        ratio = math.sqrt(rows * columns / (tiles.most * side**2))
        if ratio > MOST_SHRINKING:
            square = interpolate(square.unsqueeze(0), [int(rows // ratio), int(columns // ratio)], mode="bilinear")[0]
    ends = newline[:, None, None].expand(-1, square.shape[1], 1)
    return torch.cat((base, torch.cat((square, ends), 2).flatten(1).T))


def pooled_frames(x: Tensor, grids: Sequence[Grid], newline: Tensor) -> Tensor:
    """Return the embeddings of a video: of each frame half the rows and columns, rounded up, and `newline` at the end.
    x: embeddings of all frames, [frames · rows · columns, hidden]."""
    _, high, wide = grids[0]
    frames = x.view(len(grids), high, wide, -1).permute(0, 3, 1, 2)
    small = interpolate(frames, [-(-high // 2), -(-wide // 2)], mode="bilinear")
    return torch.cat((small.permute(0, 2, 3, 1).flatten(0, 2), newline.unsqueeze(0)))


def tile_layout(item: Mapping[str, Tensor], count: int) -> tuple[int, int]:
    """Return the rows and columns of an image's tiles. count: tiles, including the scaled-down image. Raises ValueError
    if the size of the image implies another number."""
    if "image_sizes" not in item:
        raise ValueError(f"an item of media has {', '.join(item)}; the tower reads image_sizes too")
    high, wide = (int(one) for one in item["image_sizes"].flatten().tolist())
    edge = item["image_pixel_values"].shape[-1]
    rows, columns = high // edge, wide // edge
    if rows < 1 or columns < 1 or rows * columns + 1 != count:
        raise ValueError(f"an item of media has {count} tiles for an image of {high} x {wide} pixels")
    return rows, columns


def joined_tiles(
    x: Tensor, grids: Sequence[Grid], layouts: Sequence[tuple[int, int]], row_end: Tensor, between: Tensor
) -> tuple[Tensor, tuple[Grid, ...]]:
    """Return the rows of each item, as `engine.models.parts.JoinTiles` says, and a grid for each item. x: rows of all
    tiles; grids: of the tiles; layouts: rows and columns of the tiles of each item."""
    squares = iter(
        part.view(*grid[1:], -1) for part, grid in zip(torch.split(x, [g[1] * g[2] for g in grids]), grids, strict=True)
    )
    found = []
    for rows, columns in layouts:
        first = next(squares)
        rest = torch.cat([torch.cat([next(squares) for _ in range(columns)], 1) for _ in range(rows)])
        joined, small = (torch.cat((one, row_end.expand(len(one), 1, -1)), 1).flatten(0, 1) for one in (rest, first))
        found.append(torch.cat((joined, between.unsqueeze(0), small)))
    return torch.cat(found), tuple((1, 1, len(one)) for one in found)


def best_size(tiles: Tiles, height: int, width: int) -> tuple[int, int]:
    """Return the size with the most pixels of the image; of several, that with the least padding."""

    def fit(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - size[0] * size[1]

    return max(tiles.sizes, key=fit)


def _unpadded(x: Tensor, height: int, width: int) -> Tensor:
    """Cut off the rows or columns of padding. x: [hidden, rows, columns]."""
    rows, columns = x.shape[1:]
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        cut = (rows - kept) // 2
        return x[:, cut : rows - cut]
    kept = int(round(width * (rows / height), 7))
    cut = (columns - kept) // 2
    return x[:, :, cut : columns - cut]
