"""Pixtral, Mistral 3 and LightOnOCR: patches of an image of any aspect ratio. The first two have a token at the end of
each row.

Source: transformers processing_pixtral.py, image_processing_pil_pixtral.py, processing_lighton_ocr.py.
"""

from dataclasses import dataclass
from typing import Any

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
    read_square,
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
    """Processor of Pixtral, Mistral 3 and LightOnOCR."""

    tokens: Tokens
    row_end: str
    """Text after each row; "": all rows are one run of image tokens."""
    end: str
    patch: int
    """The edges of the resized image are multiples of this number of pixels."""
    token: int
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
        rows, columns = (edge // self.token for edge in self._size(width, height))
        if not self.row_end:
            if not rows * columns:
                raise MediaError(f"an image of {width} x {height} pixels is smaller than a token of the model")
            return Layout(self.tokens.image, (rows * columns,))
        row = self.tokens.image + self.row_end
        return Layout(row * (rows - 1) + self.tokens.image + self.end, (columns,) * rows)

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        size = self._size(*image.size)
        pixels = self.normalisation.apply(channels(resized(image, size, self.resample)))
        return {"pixel_values": pixels[None], "image_sizes": np.array([size], np.int64)}


def declare(files: Files) -> Processor:
    settings = files.settings(DEFAULTS)
    patch = int(files.processor.get("patch_size") or files.vision.get("patch_size") or 16)
    merge = int(files.processor.get("spatial_merge_size") or files.config.get("spatial_merge_size") or 1)
    size, is_plain = read_size(settings["size"]), files.config.get("model_type") == "lighton_ocr"
    edge = size.get("longest_edge", 0)
    if not settings["do_resize"]:
        raise ValueError("do_resize must be true")
    image = files.token("image_token", "<|image_pad|>" if is_plain else "[IMG]")
    return Pixtral(
        Tokens(image, image),
        "" if is_plain else files.token("image_break_token", "[IMG_BREAK]"),
        "" if is_plain else files.token("image_end_token", "[IMG_END]"),
        _side(settings.get("patch_size") or 16) if is_plain else patch * merge,
        patch * merge,
        (edge, edge) if edge else (size["height"], size["width"]),
        int(settings["resample"]),
        read_normalisation(settings),
    )


def _side(value: Any) -> int:
    """Return the edge of a square, which is written as a number or as height and width."""
    high, wide = read_square(value)
    if high != wide:
        raise ValueError(f"patch_size must be a square, got {high} x {wide}")
    return high
