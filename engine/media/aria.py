"""Aria: the image, or tiles of it, each scaled to a longer edge and padded to a square.

Source: transformers image_processing_pil_aria.py, processing_aria.py. The sizes of images without padding replace the
mask of pixels; they are whole patches, of which the last may be partly padding.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from PIL import Image

from engine.media.anyres import best_resolution, cut_tiles
from engine.media.pixels import BICUBIC, HALF, Normalisation, Size, channels, read_normalisation, resized
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

EDGES = (490, 980)
_GRIDS = (*((1, n) for n in range(2, 9)), (2, 4), (2, 3), (2, 2), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2))
DEFAULTS: dict[str, Any] = {
    **{"resample": BICUBIC, "image_mean": HALF, "image_std": HALF, "max_image_size": 980, "min_image_size": 336},
    "split_image": False,
    "split_resolutions": [[490 * high, 490 * wide] for high, wide in (*_GRIDS, (5, 1), (6, 1), (7, 1), (8, 1))],
}
LENGTHS = {"490": 128, "980": 256}
"""Tokens of an image of each size, unless processor_config.json has others."""


@dataclass(frozen=True)
class Aria:
    """Image processor of Aria."""

    tokens: Tokens
    edge: int
    shortest: int
    length: int
    """Tokens of an image or tile."""
    patch_size: int
    resolutions: tuple[Size, ...]
    """Sizes that are divided into tiles; empty: images are not divided."""
    resample: int
    normalisation: Normalisation

    def layout(self, width: int, height: int) -> Layout:
        count = 1
        if self.resolutions:
            best = best_resolution(height, width, self.resolutions)
            count = ceil(best[0] / self.edge) * ceil(best[1] / self.edge)
        return Layout(self.tokens.image, (count * self.length,))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        tiles = [image]
        if self.resolutions:
            best = best_resolution(image.height, image.width, self.resolutions)
            tiles = cut_tiles(image, best, self.edge, self.resample)
        pixels = np.zeros((len(tiles), 3, self.edge, self.edge), np.uint8)
        sizes = []
        for tile, room in zip(tiles, pixels, strict=True):
            high, wide = self._size(tile.width, tile.height)
            room[:, :high, :wide] = channels(resized(tile, (high, wide), self.resample))
            sizes.append([ceil(edge / self.patch_size) * self.patch_size for edge in (high, wide)])
        return {"pixel_values": self.normalisation.apply(pixels), "image_sizes": np.array(sizes, np.int64)}

    def _size(self, width: int, height: int) -> Size:
        scale = self.edge / max(height, width)
        if width >= height:
            return max(int(height * scale), self.shortest), self.edge
        return self.edge, max(int(width * scale), self.shortest)


def declare(files: Files) -> Processor:
    settings, token = files.settings(DEFAULTS), files.token("image_token", "<|img|>")
    edge = int(settings["max_image_size"])
    lengths = files.processor.get("size_conversion") or LENGTHS
    if edge not in EDGES or str(edge) not in lengths:
        raise MediaError(f"max_image_size must be {' or '.join(map(str, EDGES))}")
    resolutions = tuple((int(high), int(wide)) for high, wide in settings["split_resolutions"])
    return Aria(
        Tokens(token, token),
        edge,
        int(settings["min_image_size"]),
        int(lengths[str(edge)]),
        int(files.vision.get("patch_size") or 14),
        resolutions if settings["split_image"] else (),
        int(settings["resample"]),
        read_normalisation(settings),
    )
