"""InternVL: tiles of the image in the grid with the nearest aspect ratio, and a thumbnail.

Source: transformers processing_internvl.py, image_processing_pil_got_ocr2.py.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from engine.media.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    Normalisation,
    Size,
    channels,
    read_normalisation,
    read_square,
    resized,
)
from engine.media.processed import Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

DEFAULTS = {
    "resample": BICUBIC,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "size": {"height": 384, "width": 384},
    "do_resize": True,
    "crop_to_patches": True,  # the processor sets it; the image processor's own default is false
    "min_patches": 1,
    "max_patches": 12,
}


@dataclass(frozen=True)
class InternVL:
    """Processor of InternVL."""

    tokens: Tokens
    begin: str
    end: str
    length: int
    """Image tokens of one tile."""
    tile: Size
    tiles: tuple[int, int] | None
    """Least and most tiles without the thumbnail, or None if the whole image is one tile."""
    resample: int
    normalisation: Normalisation

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of tiles."""
        if self.tiles is None:
            return 1, 1
        least, most = self.tiles
        grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)]
        best, difference = (1, 1), float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            if not least <= columns * rows <= most:
                continue
            found = abs(width / height - columns / rows)
            # More tiles are better at the same difference unless they enlarge the image to more than twice its area.
            fits = width * height > 0.5 * self.tile[0] * self.tile[1] * columns * rows
            if found < difference or (found == difference and fits):
                best, difference = (columns, rows), found
        return best

    def layout(self, width: int, height: int) -> Layout:
        columns, rows = self.grid(width, height)
        tiles = columns * rows + (columns * rows > 1)
        return Layout(f"{self.begin}{self.tokens.image}{self.end}", (self.length * tiles,))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        columns, rows = self.grid(*image.size)
        height, width = self.tile
        whole = channels(resized(image, (height * rows, width * columns), self.resample))
        # [3, rows, height, columns, width] to [tiles, 3, height, width]
        tiles = whole.reshape(3, rows, height, columns, width).transpose(1, 3, 0, 2, 4).reshape(-1, 3, height, width)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, channels(resized(image, self.tile, self.resample))[None]])
        return {"pixel_values": self.normalisation.apply(tiles)}


def declare(files: Files) -> Processor:
    settings = files.settings(DEFAULTS)
    image = files.token("context_image_token", "<IMG_CONTEXT>")
    most = int(settings["max_patches"])
    if not settings["do_resize"]:
        raise ValueError("do_resize must be true")
    return InternVL(
        Tokens(image, image),
        files.token("start_image_token", "<img>"),
        files.token("end_image_token", "</img>"),
        int(files.processor.get("image_seq_length") or files.config.get("image_seq_length") or 256),
        read_square(settings["size"]),
        (int(settings["min_patches"]), most) if most > 1 else None,
        int(settings["resample"]),
        read_normalisation(settings),
    )
