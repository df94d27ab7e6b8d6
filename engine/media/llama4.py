"""Llama 4: tiles of an image on the canvas that fits it best, and the whole image in one more tile.

The image keeps its aspect ratio and is padded with black on the right and below. Pixels are rescaled and normalised in
bfloat16. Source: transformers processing_llama4.py, image_processing_llama4.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor
from typing import Any

import numpy as np
from PIL import Image

from engine.media.frames import resized_frame
from engine.media.pixels import BILINEAR, HALF, Normalisation, Size, channels, read_normalisation, read_square
from engine.media.processed import Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **{"resample": BILINEAR, "image_mean": HALF, "image_std": HALF, "size": {"height": 336, "width": 336}},
    **{"do_resize": True, "max_patches": 16, "resize_to_max_canvas": False},
}
MAX_TILES = 1 << 10


def canvases(most: int) -> list[Size]:
    """Return rows and columns of every canvas of up to `most` tiles, grouped by aspect ratio."""
    ratios: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                ratios.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [canvas for group in ratios.values() for canvas in group]


def best_canvas(height: int, width: int, sizes: Sequence[Size], *, largest: bool) -> Size:
    """Return the size in pixels to which the image is enlarged least, or otherwise reduced least; of several the one
    with the least padding. largest: enlarge it most."""
    scales = [min(np.float32(wide / width), np.float32(high / height)) for high, wide in sizes]
    larger = [scale for scale in scales if scale >= 1]
    if larger:
        chosen = max(larger) if largest else min(larger)
    else:
        chosen = max(scales)
    fitting = [size for size, scale in zip(sizes, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda size: size[0] * size[1])


def fitted(height: int, width: int, target: Size) -> Size:
    """Return the largest size with the image's aspect ratio in the target."""
    by_width, by_height = target[1] / width, target[0] / height
    if by_width < by_height:
        return max(1, min(floor(height * by_width), target[0])), target[1]
    return target[0], max(1, min(floor(width * by_height), target[1]))


def rounded(x: Array) -> Array:
    """Round float32 to bfloat16, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass(frozen=True)
class Llama4:
    """Processor of Llama 4."""

    tokens: Tokens
    edge: int
    """Edge of a tile in pixels."""
    per_tile: int
    """Image tokens of a tile."""
    most: int
    """Tiles of a canvas."""
    enlarges: bool
    """Images fill the largest canvas."""
    resample: int
    normalisation: Normalisation

    @cached_property
    def _sizes(self) -> list[Size]:
        return [(rows * self.edge, columns * self.edge) for rows, columns in canvases(self.most)]

    def _canvas(self, width: int, height: int) -> Size:
        return best_canvas(height, width, self._sizes, largest=self.enlarges)

    def layout(self, width: int, height: int) -> Layout:
        rows, columns = (edge // self.edge for edge in self._canvas(width, height))
        row = "<|tile_x_separator|>".join([self.tokens.image] * columns) + "<|tile_y_separator|>"
        tiles, count = (row * rows, rows * columns + 1) if rows * columns > 1 else ("", 1)
        text = f"<|image_start|>{tiles}<|image|>{self.tokens.image}<|image_end|>"
        return Layout(text, (self.per_tile,) * count)

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        pixels = channels(image)
        height, width = pixels.shape[1:]
        canvas = target = self._canvas(width, height)
        if not self.enlarges:  # an image is enlarged to the edge of a tile at most
            target = min(max(height, self.edge), canvas[0]), min(max(width, self.edge), canvas[1])
        small = resized_frame(pixels, fitted(height, width, target), self.resample)
        padded = np.zeros((3, *canvas), np.uint8)
        padded[:, : small.shape[1], : small.shape[2]] = small
        rows, columns = (edge // self.edge for edge in canvas)
        tiles = padded.reshape(3, rows, self.edge, columns, self.edge).transpose(1, 3, 0, 2, 4)
        found = tiles.reshape(rows * columns, 3, self.edge, self.edge)
        if rows * columns > 1:
            whole = resized_frame(pixels, (self.edge, self.edge), self.resample)
            found = np.concatenate([found, whole[None]])
        return {"pixel_values": self._normalised(found)}

    def _normalised(self, pixels: Array) -> Array:
        table = np.repeat(np.arange(256, dtype=np.float32)[None], 3, axis=0)
        part = self.normalisation
        if part.factor is not None:
            table = rounded(table * np.float32(part.factor))
        if part.mean is not None and part.std is not None:
            mean, std = (rounded(np.array(each, np.float32))[:, None] for each in (part.mean, part.std))
            table = rounded(rounded(table - mean) / std)
        return np.stack([table[channel][pixels[:, channel]] for channel in range(3)], 1)


def declare(files: Files) -> Processor:
    settings, vision = files.settings(DEFAULTS), files.vision
    high, wide = read_square(settings["size"])
    most = int(settings["max_patches"])
    if high != wide or not settings["do_resize"] or not 1 <= most <= MAX_TILES:
        raise ValueError(f"size must be a square, do_resize true, and max_patches from 1 to {MAX_TILES}")
    patch = int(files.processor.get("patch_size") or vision.get("patch_size") or 14)
    ratio = float(files.processor.get("pixel_shuffle_ratio") or vision.get("pixel_shuffle_ratio") or 0.5)
    return Llama4(
        Tokens("<|image|>", "<|patch|>"),
        high,
        (high // patch) ** 2 // round(1 / ratio**2),
        most,
        bool(settings["resize_to_max_canvas"]),
        int(settings["resample"]),
        read_normalisation(settings),
    )
