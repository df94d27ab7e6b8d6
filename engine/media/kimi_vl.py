"""Kimi-VL: patches of an image that keeps its size up to a number of patches, padded to whole tokens.

Source: image_processing_kimi_vl.py, processing_kimi_vl.py of moonshotai/Kimi-VL-A3B-Instruct.
"""

from dataclasses import dataclass
from math import ceil, sqrt
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
    check_size,
    read_normalisation,
    resized,
)
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **{"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "patch_size": 14, "in_token_limit": 4096},
    **{"merge_kernel_size": (2, 2), "pad_input": False},
}
MOST_PATCHES = 511  # on an edge


@dataclass(frozen=True)
class KimiVL:
    """Processor of Kimi-VL."""

    tokens: Tokens
    patch: int
    merge: Size
    """Rows and columns of patches of a token."""
    most: int
    """Patches of an image beyond which it is scaled down."""
    normalisation: Normalisation

    def _sizes(self, width: int, height: int) -> tuple[Size, Size]:
        """Return the sizes before and after padding."""
        count = (width // self.patch) * (height // self.patch)
        if count > self.most:
            scale = sqrt(self.most / count)
            width, height = int(width * scale), int(height * scale)
        units = [self.patch * side for side in self.merge]
        padded = ceil(height / units[0]) * units[0], ceil(width / units[1]) * units[1]
        if max(padded) // self.patch > MOST_PATCHES:
            raise MediaError(
                f"an image of {width} x {height} pixels has an aspect ratio that gives over {MOST_PATCHES} patches "
                "on an edge"
            )
        return (height, width), padded

    def layout(self, width: int, height: int) -> Layout:
        _, (high, wide) = self._sizes(width, height)
        return Layout(
            self.tokens.image, (high // self.patch * (wide // self.patch) // (self.merge[0] * self.merge[1]),)
        )

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        size, (high, wide) = self._sizes(*image.size)
        check_size((high, wide), image)
        pixels = channels(image if size == (image.height, image.width) else resized(image, size, BICUBIC))
        padded = np.zeros((3, high, wide), np.uint8)
        padded[:, : size[0], : size[1]] = pixels
        rows, columns = high // self.patch, wide // self.patch
        split = self.normalisation.apply(padded).reshape(3, rows, self.patch, columns, self.patch)
        patches = np.ascontiguousarray(split.transpose(1, 3, 0, 2, 4)).reshape(-1, 3, self.patch, self.patch)
        return {"pixel_values": patches, "image_grid_hws": np.array([[rows, columns]], np.int64)}


def declare(files: Files) -> Processor:
    settings, token = files.settings(DEFAULTS), files.token("image_token", "<|media_pad|>")
    high, wide = settings["merge_kernel_size"]
    if not settings["pad_input"]:
        raise ValueError("pad_input must be true")
    return KimiVL(
        Tokens(token, token),
        int(settings["patch_size"]),
        (int(high), int(wide)),
        int(settings["in_token_limit"]),
        read_normalisation(settings),
    )
