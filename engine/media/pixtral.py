"""Pixtral and Mistral 3: patches of an image of any aspect ratio, with a token at the end of each row.

Source: transformers processing_pixtral.py, image_processing_pil_pixtral.py.
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
    read_size,
    resized,
)
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

DEFAULTS = {
    "resample": BICUBIC,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "size": {"longest_edge": 1024},
    "do_resize": True,
}


@dataclass(frozen=True)
class Pixtral:
    """Processor of Pixtral and Mistral 3."""

    tokens: Tokens
    row_end: str
    end: str
    patch: int
    """Pixels of the edge of one image token."""
    largest: Size
    resample: int
    normalisation: Normalisation

    def _size(self, width: int, height: int) -> Size:
        """Return height and width: multiples of the patch, within the largest size."""
        ratio = max(height / self.largest[0], width / self.largest[1])
        if ratio > 1:
            height, width = int(height / ratio), int(width / ratio)
        if height < 1 or width < 1:
            raise MediaError("the image has an aspect ratio that the model cannot process")
        return ((height - 1) // self.patch + 1) * self.patch, ((width - 1) // self.patch + 1) * self.patch

    def layout(self, width: int, height: int) -> Layout:
        rows, columns = (edge // self.patch for edge in self._size(width, height))
        row = self.tokens.image + self.row_end
        return Layout(row * (rows - 1) + self.tokens.image + self.end, (columns,) * rows)

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        size = self._size(*image.size)
        pixels = self.normalisation.apply(channels(resized(image, size, self.resample)))
        return {"pixel_values": pixels[None], "image_sizes": np.array([size], np.int64)}


def declare(files: Files) -> Processor:
    settings, image = files.settings(DEFAULTS), files.token("image_token", "[IMG]")
    patch = files.processor.get("patch_size") or files.vision.get("patch_size") or 16
    merge = files.processor.get("spatial_merge_size") or files.config.get("spatial_merge_size") or 1
    size = read_size(settings["size"])
    edge = size.get("longest_edge", 0)
    if not settings["do_resize"]:
        raise ValueError("do_resize must be true")
    return Pixtral(
        Tokens(image, image),
        files.token("image_break_token", "[IMG_BREAK]"),
        files.token("image_end_token", "[IMG_END]"),
        int(patch) * int(merge),
        (edge, edge) if edge else (size["height"], size["width"]),
        int(settings["resample"]),
        read_normalisation(settings),
    )
