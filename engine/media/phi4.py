"""Phi-4-multimodal: an image is scaled to whole tiles, padded with white and divided, after the whole image as a tile.

Tiles have masks of the patches that are not padding. Source: transformers image_processing_phi4_multimodal.py.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
from PIL import Image

from engine.media.frames import resized_frame
from engine.media.pixels import BICUBIC, BILINEAR, HALF, Normalisation, Size, channels, read_normalisation, read_square
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **{"resample": BICUBIC, "image_mean": HALF, "image_std": HALF, "size": {"height": 448, "width": 448}},
    **{"patch_size": 14, "dynamic_hd": 36},
}
LEAST = 10
"""Least pixels of an edge after scaling."""
MAX_TILES = 1 << 7
HALFWAY = (-0.09375, 0.59375, 0.59375, -0.09375)
"""Weights of bicubic interpolation in the middle between two pixels, with a = -0.75."""


@lru_cache(maxsize=8)
def grids_of(most: int) -> tuple[tuple[int, int], ...]:
    """Return columns and rows of all grids of at most `most` tiles, smaller grids first. Grids with the same number of
    tiles are in the order of a Python set, as in transformers."""
    found = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= most}
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))


def best_grid(width: int, height: int, edge: int, most: int) -> tuple[int, int]:
    """Return the columns and rows of at most `most` tiles whose aspect ratio is closest to the image's. Among equal
    ratios, return the last grid of which the image fills at least half."""
    best, least = (1, 1), float("inf")
    for columns, rows in grids_of(most):
        difference = abs(width / height - columns / rows)
        if difference < least:
            best, least = (columns, rows), difference
        elif difference == least and width * height > 0.5 * edge * edge * columns * rows:
            best = columns, rows
    return best


@dataclass(frozen=True)
class Fitted:
    """Tiles of an image: their rows and columns, and the size of the image in them."""

    rows: int
    columns: int
    size: Size


def shrunk(pixels: Array, factor: int, axis: int) -> Array:
    """Shrink an axis by a whole factor: bicubic interpolation without antialiasing, float32. An odd factor selects
    pixels; an even factor interpolates halfway between two pixels."""
    if factor % 2:
        return np.take(pixels, np.arange(factor // 2, pixels.shape[axis], factor), axis)
    first = np.arange(pixels.shape[axis] // factor) * factor + factor // 2 - 2
    taps = (np.take(pixels, np.clip(first + at, 0, pixels.shape[axis] - 1), axis) for at in range(4))
    found = np.zeros([edge // factor if at == axis else edge for at, edge in enumerate(pixels.shape)], np.float32)
    for tap, weight in zip(taps, HALFWAY, strict=True):
        found += tap * np.float32(weight)
    return found


@dataclass(frozen=True)
class Phi4:
    """Image processor of Phi-4-multimodal."""

    tokens: Tokens
    edge: int
    """Pixels of a tile's side."""
    patch_size: int
    most: int
    """Largest number of tiles, without the whole image."""
    normalisation: Normalisation

    @property
    def side(self) -> int:
        """Tokens in a row of a tile: half the number of patches, rounded up."""
        return -(-self.edge // self.patch_size // 2)

    def _fitted(self, width: int, height: int) -> Fitted:
        columns, rows = ceil(width / self.edge), ceil(height / self.edge)
        if columns * rows > self.most:
            columns, rows = best_grid(width, height, self.edge, self.most)
        by_width, by_height = columns * self.edge / width, rows * self.edge / height
        if by_width < by_height:
            size = int(height * by_width), columns * self.edge
        else:
            size = rows * self.edge, int(width * by_height)
        if min(size) < LEAST:
            raise MediaError(f"an image of {width} x {height} pixels has an aspect ratio that the model cannot process")
        return Fitted(rows, columns, size)

    def _patches(self, fitted: Fitted) -> tuple[list[int], list[int]]:
        """Return the number of patches that are not masked in each row and each column of tiles."""
        each = self.edge // self.patch_size
        found = []
        for count, edge in ((fitted.rows, fitted.size[0]), (fitted.columns, fitted.size[1])):
            kept = count * each - (count * self.edge - edge) // self.patch_size
            found.append([min(max(kept - tile * each, 0), each) for tile in range(count)])
        if 0 in found[0] or 0 in found[1]:
            raise MediaError("an image has an aspect ratio that leaves a tile empty")
        return found[0], found[1]

    def layout(self, width: int, height: int) -> Layout:
        high, wide = (sum((each + 1) // 2 for each in kept) for kept in self._patches(self._fitted(width, height)))
        return Layout(self.tokens.image, (self.side * (self.side + 1) + 1 + high * (wide + 1),))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        fitted, edge = self._fitted(*image.size), self.edge
        rows, columns = fitted.rows, fitted.columns
        canvas = np.full((3, rows * edge, columns * edge), 255, np.uint8)
        high, wide = fitted.size
        canvas[:, :high, :wide] = resized_frame(channels(image), (high, wide), BILINEAR)
        pixels = self.normalisation.apply(canvas)
        whole = shrunk(shrunk(pixels, columns, 2), rows, 1)
        tiles = pixels.reshape(3, rows, edge, columns, edge).transpose(1, 3, 0, 2, 4).reshape(-1, 3, edge, edge)
        each, (below, right) = edge // self.patch_size, self._patches(fitted)
        masks = np.zeros((rows * columns + 1, each, each), np.float32)
        masks[0] = 1
        for number in range(rows * columns):
            masks[number + 1, : below[number // columns], : right[number % columns]] = 1
        return {
            "image_pixel_values": np.concatenate([whole[None], tiles])[None],
            "image_sizes": np.array([[rows * edge, columns * edge]], np.int64),
            "image_attention_mask": masks[None],
        }


def declare(files: Files) -> Processor:
    settings, token = files.settings(DEFAULTS), files.token("image_token", "<|image|>")
    high, wide = read_square(settings["size"])
    patch, most = int(settings["patch_size"]), int(settings["dynamic_hd"])
    if high != wide or patch < 1 or high % (2 * patch):
        raise ValueError("size must be a square of an even number of patches of patch_size")
    if not 1 <= most <= MAX_TILES:
        raise ValueError(f"dynamic_hd is {most}; it must be 1 to {MAX_TILES}")
    if int(settings["resample"]) != BICUBIC:
        raise ValueError(f"resample is {settings['resample']}; supported is {int(BICUBIC)}, bicubic")
    return Phi4(Tokens(token, token), high, patch, most, read_normalisation(settings))
