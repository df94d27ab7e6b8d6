"""SigLIP 2: patches of an image of nearly the given aspect ratio. An image is an input of its own.

Source: transformers image_processing_pil_siglip2.py, whose padding to `max_num_patches` is left out.
"""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from engine.media.dual import NO_TOKENS, VECTOR
from engine.media.pixels import BILINEAR, HALF, Normalisation, Size, channels, read_normalisation, resized
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

DEFAULTS = {
    **{"resample": BILINEAR, "image_mean": HALF, "image_std": HALF, "do_resize": True},
    **{"patch_size": 16, "max_num_patches": 256},
}
PRECISION = 1e-5  # of the scale
LARGEST = 100.0  # scale


@dataclass(frozen=True)
class Siglip2Image:
    """Image processor of SigLIP 2."""

    patch_size: int
    max_patches: int
    resizes: bool
    resample: int
    normalisation: Normalisation
    tokens: Tokens = NO_TOKENS

    def layout(self, width: int, height: int) -> Layout:
        return VECTOR

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        size = patch_size = self.patch_size
        if self.resizes:
            image = resized(image, fitted(image.height, image.width, patch_size, self.max_patches), self.resample)
        pixels = self.normalisation.apply(channels(image))
        rows, columns = (edge // size for edge in pixels.shape[1:])
        if not rows * columns:
            raise MediaError(f"images must have at least {size} x {size} pixels")
        cut = pixels[:, : rows * size, : columns * size].reshape(3, rows, size, columns, size)
        patches = cut.transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        return {
            "pixel_values": np.ascontiguousarray(patches),
            "spatial_shapes": np.array([[rows, columns]], np.int64),
        }


def fitted(height: int, width: int, patch: int, most: int) -> Size:
    """Return the largest size with at most this many patches, each edge rounded up to whole patches. The scale is found
    by bisection, as in transformers."""

    def scaled(scale: float) -> Size:
        high, wide = (max(patch, math.ceil(edge * scale / patch) * patch) for edge in (height, width))
        return high, wide

    low, high = PRECISION / 10, LARGEST
    while high - low >= PRECISION:
        middle = (low + high) / 2
        rows, columns = scaled(middle)
        if (rows / patch) * (columns / patch) <= most:
            low = middle
        else:
            high = middle
    return scaled(low)


def declare(files: Files) -> Processor:
    settings = files.settings(DEFAULTS)
    return Siglip2Image(
        int(settings["patch_size"]),
        int(settings["max_num_patches"]),
        bool(settings["do_resize"]),
        int(settings["resample"]),
        read_normalisation(settings),
    )
