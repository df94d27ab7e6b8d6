"""Patches of images and videos: their pixels, order and positions.

The patches of an item are in the order of rows, or in that of squares of side · side patches (`Tower.side`), which a
projector joins. A grid is (frames, rows, columns) of patches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from engine.models.media import GridRope, Patches, PatchPositions, Tower
from kernels.rope import rope_angles

Grid = tuple[int, int, int]
GRIDS = ("image_grid_thw", "video_grid_thw", "image_grid_hws", "grid_thws", "spatial_shapes", "target_sizes")
INTERPOLATION: dict[str, dict[str, Any]] = {
    "bicubic": {"mode": "bicubic"},
    "bilinear": {"mode": "bilinear", "antialias": True},
    "corners": {"mode": "bilinear", "align_corners": True},
}
VIDEO = "pixel_values_videos"
PIXELS = ("pixel_values", VIDEO)
MASKED = ("image_pixel_values", "image_attention_mask")
"""Pixels of tiles and the masks of their patches."""
PLACES = ("image_position_ids", "video_position_ids")
"""Column and row of each patch; -1 for padding."""


def pixel_rows(tower: Tower, item: Mapping[str, Tensor], *, cropped: bool) -> tuple[Tensor, tuple[Grid, ...]]:
    """Return the pixels of the patches of an item, [patches, pixels], and its grids. cropped: images are padded, and
    `image_sizes` are their own sizes. Raises ValueError for tensors that the tower does not read."""
    patches = tower.patches
    assert isinstance(patches, Patches), "spectrograms have no patches"
    pixels = next((item[name] for name in PIXELS if name in item), None)
    if pixels is None:
        raise ValueError(f"an item of media has {', '.join(item)}; the tower reads {' or '.join(PIXELS)}")
    places = next((item[name] for name in PLACES if name in item), None)
    if patches.flat and places is not None:
        return _placed(pixels.reshape(-1, patches.pixels), places.reshape(-1, *places.shape[-2:]))
    if patches.flat:
        sizes = next((item[name] for name in GRIDS if name in item), None)
        if sizes is None:
            raise ValueError(f"an item of media has {', '.join(item)}; the tower reads the grid {' or '.join(GRIDS)}")
        listed = sizes.reshape(-1, sizes.shape[-1]).tolist()
        grids = tuple((1, *map(int, one)) if len(one) == 2 else tuple(map(int, one)) for one in listed)
        rows = _from_strip(patches, pixels) if patches.strip else pixels.reshape(-1, patches.pixels)
        return rows, grids  # type: ignore[return-value]
    mask = item.get("pixel_attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("an item of media has padded pixels; resize the image to whole tiles")
    images = pixels.reshape(-1, *pixels.shape[-3:])
    sizes = item.get("image_sizes") if cropped else None
    shapes = [images.shape[-2:]] * len(images) if sizes is None else sizes.reshape(-1, 2).tolist()
    size, made, grids_of = patches.size, list[Tensor](), list[Grid]()
    for image, (height, width) in zip(images, shapes, strict=True):
        high, wide = int(height) // size, int(width) // size
        cut = image[:, : high * size, : wide * size].reshape(-1, high, size, wide, size)
        made.append(cut.permute(1, 3, 0, 2, 4).reshape(high * wide, patches.pixels))
        grids_of.append((1, high, wide))
    return torch.cat(made), tuple(grids_of)


def _from_strip(patches: Patches, pixels: Tensor) -> Tensor:
    """Return the rows of patches that are side by side, [channels, size, patches · size]."""
    if pixels.shape[-3:-1] != (patches.channels, patches.size) or pixels.shape[-1] % patches.size:
        raise ValueError(
            f"an item of media has pixels of shape {list(pixels.shape)}; the tower reads a row of patches of "
            f"{patches.size} x {patches.size} pixels"
        )
    strip = pixels.reshape(patches.channels, patches.size, -1, patches.size)
    return strip.permute(2, 0, 1, 3).flatten(1)


def masked_rows(tower: Tower, item: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Grid, ...], tuple[Grid, ...]]:
    """Return the pixels of the patches of an image in tiles, [patches, pixels], the grids of its tiles, and the grids
    of unmasked patches. The former are completed to squares (`Tower.completed`). Raises ValueError for tensors that the
    tower does not read."""
    patches, side = tower.patches, tower.completed
    assert isinstance(patches, Patches), "spectrograms have no patches"
    if any(name not in item for name in MASKED):
        raise ValueError(f"an item of media has {', '.join(item)}; the tower reads {' and '.join(MASKED)}")
    pixels, mask = (item[name] for name in MASKED)
    tiles, size = pixels.reshape(-1, *pixels.shape[-3:]), patches.size
    masks = mask.reshape(-1, *mask.shape[-2:]) > 0
    if tiles.shape[1] != patches.channels or [len(tiles), *(side // size for side in tiles.shape[2:])] != [
        *masks.shape
    ]:
        raise ValueError(
            f"an item of media has pixels of shape {list(pixels.shape)} with a mask of shape {list(mask.shape)}; the "
            f"mask has an element for each patch of {size} x {size} pixels"
        )
    rows, grids, kept = list[Tensor](), list[Grid](), list[Grid]()
    for tile, own in zip(tiles, masks, strict=True):
        high, wide = int(own[:, 0].sum()), int(own[0].sum())
        whole = -(-high // side) * side, -(-wide // side) * side
        if int(own[:high, :wide].sum()) != int(own.sum()) or int(own.sum()) != high * wide or not high * wide:
            raise ValueError("an item of media has a mask that does not keep the first rows and columns of a tile")
        if whole[0] > own.shape[0] or whole[1] > own.shape[1]:
            raise ValueError(f"an item of media has tiles that are not divided into squares of {side} patches")
        cut = tile[:, : whole[0] * size, : whole[1] * size].reshape(-1, whole[0], size, whole[1], size)
        rows.append(cut.permute(1, 3, 0, 2, 4).reshape(whole[0] * whole[1], patches.pixels))
        grids.append((1, *whole))
        kept.append((1, high, wide))
    return torch.cat(rows), tuple(grids), tuple(kept)


def unmasked(grid: Grid, kept: Grid) -> Tensor:
    """Return whether each patch of a completed grid is not masked, [patches] bool."""
    found = torch.zeros(grid[1:], dtype=torch.bool)
    found[: kept[1], : kept[2]] = True
    return found.flatten()


def _placed(pixels: Tensor, places: Tensor) -> tuple[Tensor, tuple[Grid, ...]]:
    """Return the patches without padding, and the grid of each frame. places: [frames, patches, 2]."""
    kept = (places >= 0).all(2)
    sides = [place[own].amax(0).tolist() if own.any() else [-1, -1] for place, own in zip(places, kept, strict=True)]
    grids = tuple((1, row + 1, column + 1) for column, row in sides)
    if kept.numel() != len(pixels) or [high * wide for _, high, wide in grids] != kept.sum(1).tolist():
        raise ValueError("an item of media has patches whose positions are not those of a grid")
    return pixels[kept.flatten()], grids


def in_squares(grid: Grid, side: int) -> Tensor:
    """Return the row-major numbers of a frame's patches in the order of squares, [rows · columns] int64."""
    _, high, wide = grid
    numbers = torch.arange(high * wide).view(high, wide)
    if side == 1:
        return numbers.flatten()
    return numbers.view(high // side, side, wide // side, side).transpose(1, 2).flatten()


def grid_positions(grid: Grid, side: int) -> Tensor:
    """Return row and column of each patch of all frames, [patches, 2] int64."""
    numbers = in_squares(grid, side)
    return torch.stack((numbers // grid[2], numbers % grid[2]), 1).repeat(grid[0], 1)


def grid_angles(rope: GridRope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin for `rotate_`, [patches, 1, dim] fp32. positions: of `grid_positions`."""
    exponents = torch.tensor(rope.exponents, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / rope.rope.theta**exponents
    turned = (positions + rope.first)[:, torch.tensor(rope.axes, device=positions.device)].float() * frequencies
    ones = torch.ones(len(turned), dtype=torch.int64, device=positions.device)
    return rope_angles(ones, turned, 1.0, rope.rope.interleaved)


def completed_positions(part: PatchPositions, table: Tensor, grid: Grid, kept: Grid) -> Tensor:
    """Return the rows of the patches of a completed grid, [patches, hidden]. Masked patches have the first row of the
    table."""
    found = table[0].expand(*grid[1:], -1).clone()
    found[: kept[1], : kept[2]] = position_rows(part, table, kept, 1).view(kept[1], kept[2], -1)
    return found.flatten(0, 1)


def position_rows(part: PatchPositions, table: Tensor, grid: Grid, side: int) -> Tensor:
    """Return the rows that are added to the patches of a grid, [patches, hidden]. table: [side · side, hidden]."""
    _, high, wide = grid
    if part.fit == "none" and (high, wide) != (part.side, part.side):
        size = f"{high} × {wide}"
        raise ValueError(f"an image has {size} patches; this tower reads images of {part.side} × {part.side}")
    if part.fit == "axes":
        if max(high, wide) > part.side:
            raise ValueError(f"an image has {high} × {wide} patches; this tower reads up to {part.side} in a row")
        rows = table[part.side : part.side + high].unsqueeze(1) + table[:wide]
    elif part.fit == "nearest":
        down, right = (_nearest(count, part.side, part.quotients) for count in (high, wide))
        rows = table.view(part.side, part.side, -1)[down][:, right]
    elif (high, wide) == (part.side, part.side):
        rows = table
    else:
        # torch 2.13 interpolates channels-last tensors wrongly to a width of 1.
        square = table.float().view(1, part.side, part.side, -1).permute(0, 3, 1, 2).contiguous()
        options = INTERPOLATION[part.fit]
        rows = interpolate(square, (high, wide), **options)[0].permute(1, 2, 0).to(table.dtype)
    return rows.reshape(high * wide, -1)[in_squares(grid, side).to(table.device)].repeat(grid[0], 1)


def _nearest(count: int, side: int, quotients: bool) -> Tensor:
    """Return the place in a table of `side` places of each of `count` patches, [count] int64. Roundings differ between
    quotients and products with the share of a patch."""
    places = torch.arange(count)
    begins = places / count if quotients else (places * (1.0 / torch.tensor(float(count)))).clamp(max=1 - 1e-6)
    return torch.bucketize(begins, torch.arange(1 / side, 1.0, 1 / side), right=True)


def windows(grid: Grid, side: int, window: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the order of a grid's patches by window, [patches] int64, and the number of patches of each window.
    window: its side in patches. Squares stay together. Source: transformers vision_utils.py."""
    frames, high, wide = grid
    each, unit = window // side, side * side
    numbers = torch.arange(high // side * (wide // side)).view(high // side, wide // side)
    pieces = [piece.flatten() for strip in numbers.split(each, 0) for piece in strip.split(each, 1)]
    squares = torch.cat(pieces)
    one = (squares.unsqueeze(1) * unit + torch.arange(unit)).flatten()
    order = torch.cat([one + frame * high * wide for frame in range(frames)])
    return order, tuple(len(piece) * unit for piece in pieces) * frames


def in_windows(x: Tensor, count: Sequence[int], size: int) -> tuple[Tensor, tuple[int, ...], Tensor]:
    """Divide clips into windows of `size` positions, of which zeros fill the last one; a shorter clip is a window of
    its own. count: positions of each clip. Returns the rows, the positions of each window, and whether each row was
    added, [rows] bool."""
    pieces, sizes, added = list[Tensor](), list[int](), list[Tensor]()
    for piece in torch.split(x, list(count)):
        rest = -len(piece) % size if len(piece) > size else 0
        pieces.append(torch.nn.functional.pad(piece, (0, 0, 0, rest)))
        sizes += [size] * (len(pieces[-1]) // size) if len(piece) > size else [len(piece)]
        added.append(torch.arange(len(piece) + rest, device=x.device) >= len(piece))
    return torch.cat(pieces), tuple(sizes), torch.cat(added)


def joined(x: Tensor, grids: Sequence[Grid], side: int, is_ordered: bool) -> tuple[Tensor, tuple[Grid, ...]]:
    """Return the rows of each square of side · side patches, [squares, side · side, columns], and the grids of squares.
    Patches beyond the last whole square are left out. is_ordered: the rows are in the order of squares."""
    made = tuple((frames, high // side, wide // side) for frames, high, wide in grids)
    if is_ordered:
        return x.view(-1, side * side, x.shape[1]), made
    pieces, at = [], 0
    for (frames, high, wide), (_, rows, columns) in zip(grids, made, strict=True):
        patches = x[at : at + frames * high * wide].view(frames, high, wide, -1)
        at += frames * high * wide
        whole = patches[:, : rows * side, : columns * side].reshape(frames, rows, side, columns, side, -1)
        pieces.append(whole.transpose(2, 3).reshape(frames * rows * columns, side * side, -1))
    return torch.cat(pieces), made


def averaged(x: Tensor, grids: Sequence[Grid], count: int) -> tuple[Tensor, tuple[Grid, ...]]:
    """Return the means of `count` consecutive rows of each grid (1, 1, rows), and the grids of the means."""
    pieces = torch.split(x, [rows for _, _, rows in grids])
    means = [piece[: len(piece) // count * count].unflatten(0, (-1, count)).mean(1) for piece in pieces]
    return torch.cat(means), tuple((1, 1, len(one)) for one in means)
