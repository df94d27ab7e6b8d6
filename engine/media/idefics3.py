"""Idefics 3 and SmolVLM: tiles of an enlarged image in rows and columns, and the whole image.

Source: transformers processing_idefics3.py, processing_smolvlm.py, image_processing_pil_idefics3.py.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np
from PIL import Image

from engine.media.pixels import HALF, LANCZOS, Normalisation, Size, channels, read_normalisation, read_size, resized
from engine.media.processed import Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

LARGEST = 4096  # pixels of an edge
DEFAULTS = {
    "resample": LANCZOS,
    "image_mean": HALF,
    "image_std": HALF,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_resize": True,
    "do_image_splitting": True,
}


def enlarged(height: int, width: int, edge: int) -> Size:
    """Return the size whose longer edge has this length, with an even shorter edge."""
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        height, width = edge, int(edge * ratio)
        width += width % 2
    return max(height, 1), max(width, 1)


def bounded(height: int, width: int) -> Size:
    """Return the size within `LARGEST`."""
    ratio = width / height
    if width >= height and width > LARGEST:
        width, height = LARGEST, int(LARGEST / ratio)
    elif height > width and height > LARGEST:
        height, width = LARGEST, int(LARGEST * ratio)
    return max(height, 1), max(width, 1)


@dataclass(frozen=True)
class Idefics3:
    """Processor of Idefics 3 and SmolVLM."""

    tokens: Tokens
    around: str
    whole: str
    length: int
    """Image tokens of one tile."""
    edge: int | None
    """Longest edge after the first resizing, or None without it."""
    tile: int
    splits: bool
    resample: int
    normalisation: Normalisation

    def _sizes(self, width: int, height: int) -> tuple[Size, Size]:
        """Return the sizes of the first and the second resizing, the latter in multiples of a tile."""
        first = (height, width) if self.edge is None else bounded(*enlarged(height, width, self.edge))
        if not self.splits:
            return first, (self.tile, self.tile)
        height, width = first
        ratio = width / height
        if width >= height:
            width = ceil(width / self.tile) * self.tile
            height = ceil(int(width / ratio) / self.tile) * self.tile
        else:
            height = ceil(height / self.tile) * self.tile
            width = ceil(int(height * ratio) / self.tile) * self.tile
        return first, (height, width)

    def _grid(self, size: Size) -> tuple[int, int]:
        """Return rows and columns of tiles, 0 for an image of one tile."""
        rows, columns = size[0] // self.tile, size[1] // self.tile
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)

    def layout(self, width: int, height: int) -> Layout:
        rows, columns = self._grid(self._sizes(width, height)[1])
        tiles = (
            "".join(f"{self.around}<row_{row}_col_{column}>{self.tokens.image}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        text = "".join(f"{row}\n" for row in tiles) + "\n" * (rows > 0)
        text += f"{self.around}{self.whole}{self.tokens.image}{self.around}"
        return Layout(text, (self.length,) * (rows * columns + 1))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        first, second = self._sizes(*image.size)
        if self.edge is not None:
            image = resized(image, first, self.resample)
        image = resized(image, second, self.resample)
        rows, columns = self._grid(second)
        tiles = channels(image)[None]
        if rows:
            split = tiles.reshape(3, rows, self.tile, columns, self.tile).transpose(1, 3, 0, 2, 4)
            whole = channels(resized(image, (self.tile, self.tile), self.resample))
            tiles = np.concatenate([split.reshape(-1, 3, self.tile, self.tile), whole[None]])
        pixels = self.normalisation.apply(tiles)[None]
        mask = np.ones((1, pixels.shape[1], self.tile, self.tile), np.int64)
        return {"pixel_values": pixels, "pixel_attention_mask": mask}


def declare(files: Files) -> Processor:
    settings, image = files.settings(DEFAULTS), files.token("image_token", "<image>")
    return Idefics3(
        Tokens(image, image),
        files.token("fake_image_token", "<fake_token_around_image>"),
        files.token("global_image_token", "<global-img>"),
        int(files.processor.get("image_seq_len") or 169),
        read_size(settings["size"])["longest_edge"] if settings["do_resize"] else None,
        read_size(settings["max_image_size"])["longest_edge"],
        bool(settings["do_image_splitting"]),
        int(settings["resample"]),
        read_normalisation(settings),
    )
