"""Gemma 4: patches of nearly the given aspect ratio, as many as a number of tokens permits.

Pixels are from 0 to 1, and patches are padded to the largest number. Source: transformers
image_processing_pil_gemma4.py, processing_gemma4.py.
"""

from dataclasses import dataclass
from math import floor, sqrt
from typing import Any

import numpy as np
from PIL import Image

from engine.media.pixels import BICUBIC, Normalisation, Size, channels, read_normalisation, resized
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **{"resample": BICUBIC, "do_resize": True, "do_normalize": False, "image_mean": 0.0, "image_std": 1.0},
    **{"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280},
}
NUMBERS_OF_TOKENS = (70, 140, 280, 560, 1120)
"""Possible values of `max_soft_tokens`."""


@dataclass(frozen=True)
class Grid:
    """Division of images into squares of patches, of which each is a token."""

    patch_size: int
    side: int
    """Patches of a square's side."""
    tokens: int
    """Maximum number of squares."""
    resizes: bool

    @property
    def max_patches(self) -> int:
        return self.tokens * self.side**2

    def size(self, width: int, height: int) -> Size:
        """Return height and width after resizing. Raises MediaError for an image that cannot be resized."""
        unit = self.patch_size * self.side
        if not self.resizes:
            if width % unit or height % unit or width * height > self.tokens * unit**2:
                raise MediaError(f"edges must be multiples of {unit} pixels, got {width} x {height}")
            return height, width
        factor = sqrt(self.max_patches * self.patch_size**2 / (height * width))
        rows, columns = floor(factor * height / unit), floor(factor * width / unit)
        if not rows:
            rows, columns = 1, min(width // height, self.tokens)
        elif not columns:
            rows, columns = min(height // width, self.tokens), 1
        if not 0 < rows * columns <= self.tokens:
            raise MediaError(f"an image of {width} x {height} pixels has an aspect ratio that the model cannot process")
        return rows * unit, columns * unit

    def count(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size."""
        rows, columns = self.size(width, height)
        return rows * columns // (self.patch_size * self.side) ** 2

    def patches(self, pixels: Array) -> tuple[Array, Array]:
        """Return the patches of images [images, 3, height, width], whose values are row by row and by channel within a
        pixel, and their columns and rows. Both are padded, places with -1."""
        size = self.patch_size
        images, rows, columns = len(pixels), *(edge // size for edge in pixels.shape[2:])
        cut = pixels.reshape(images, 3, rows, size, columns, size).transpose(0, 2, 4, 3, 5, 1)
        places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(1, -1, 2).repeat(images, 0)
        missing = (0, self.max_patches - rows * columns)
        patches = np.pad(cut.reshape(images, rows * columns, -1), ((0, 0), missing, (0, 0)))
        return patches, np.pad(places, ((0, 0), missing, (0, 0)), constant_values=-1)


@dataclass(frozen=True)
class Gemma4:
    """Image processor of Gemma 4."""

    tokens: Tokens
    around: tuple[str, str]
    """Texts before and after the tokens of an image."""
    grid: Grid
    resample: int
    normalisation: Normalisation

    def layout(self, width: int, height: int) -> Layout:
        begin, end = self.around
        return Layout(f"{begin}{self.tokens.image}{end}", (self.grid.count(width, height),))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        small = resized(image, self.grid.size(*image.size), self.resample)
        patches, places = self.grid.patches(self.normalisation.apply(channels(small))[None])
        return {"pixel_values": patches, "image_position_ids": places}


def read_grid(settings: dict[str, Any]) -> Grid:
    """Read the settings of an image or video processor."""
    tokens = int(settings["max_soft_tokens"])
    if tokens not in NUMBERS_OF_TOKENS:
        raise ValueError(f"max_soft_tokens must be one of {', '.join(map(str, NUMBERS_OF_TOKENS))}")
    patch_size, side = int(settings["patch_size"]), int(settings["pooling_kernel_size"])
    return Grid(patch_size, side, tokens, bool(settings["do_resize"]))


def read_around(files: Files) -> tuple[str, str]:
    """Return the texts before and after the tokens of an image or frame."""
    return files.token("boi_token", "<|image>"), files.token("eoi_token", "<image|>")


def declare(files: Files) -> Processor:
    settings, token = files.settings(DEFAULTS), files.token("image_token", "<|image|>")
    return Gemma4(
        Tokens(token, token),
        read_around(files),
        read_grid(settings),
        int(settings["resample"]),
        read_normalisation(settings),
    )
