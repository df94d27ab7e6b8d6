"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: patches of an image whose size depends on the given one.

Both edges become multiples of patch size times merge size, within a range of pixels. A patch is repeated for each of
the tower's frames. Patches of one merged token are adjacent. Source: transformers processing_qwen2_vl.py,
processing_qwen3_vl.py, image_processing_pil_qwen2_vl.py.
"""

from dataclasses import dataclass
from math import ceil, floor, sqrt
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
    resized,
)
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

MAX_RATIO = 200
DEFAULTS: dict[str, Any] = {
    "resample": BICUBIC,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "do_resize": True,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def smart_resize(height: int, width: int, factor: int, min_pixels: float, max_pixels: float) -> Size:
    """Return multiples of `factor` near the given size, with a number of pixels in the range. Raises MediaError."""
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise MediaError(
            f"an image of {width} x {height} pixels has an aspect ratio above {MAX_RATIO}; the model cannot process it"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        scale = sqrt(height * width / max_pixels)
        rows = max(factor, floor(height / scale / factor) * factor)
        columns = max(factor, floor(width / scale / factor) * factor)
    elif rows * columns < min_pixels:
        scale = sqrt(min_pixels / (height * width))
        rows, columns = ceil(height * scale / factor) * factor, ceil(width * scale / factor) * factor
    return rows, columns


@dataclass(frozen=True)
class QwenVL:
    """Processor of Qwen's models."""

    tokens: Tokens
    patch_size: int
    frames: int
    merge_size: int
    pixels: tuple[int, int] | None
    """Least and most pixels, or None if images are not resized."""
    resample: int
    normalisation: Normalisation

    def _size(self, width: int, height: int) -> Size:
        factor = self.patch_size * self.merge_size
        if self.pixels is None:
            if height % factor or width % factor:
                raise MediaError(f"edges of images must be multiples of {factor} pixels, got {width} x {height}")
            return height, width
        return smart_resize(height, width, factor, *self.pixels)

    def layout(self, width: int, height: int) -> Layout:
        rows, columns = (edge // self.patch_size for edge in self._size(width, height))
        return Layout(self.tokens.image, (rows * columns // self.merge_size**2,))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        size = self._size(*image.size)
        pixels = self.normalisation.apply(channels(resized(image, size, self.resample)))
        repeated = np.broadcast_to(pixels, (self.frames, *pixels.shape))
        patches, grid = patchify(repeated, self.patch_size, self.merge_size, self.frames)
        return {"pixel_values": patches, "image_grid_thw": grid}


def patchify(pixels: Array, patch: int, merge: int, frames: int) -> tuple[Array, Array]:
    """Return the patches of frames [frames, 3, height, width], in the order of merged tokens, and the grid.

    A patch has `frames` frames, of which the last one is repeated if there are too few."""
    if missing := -len(pixels) % frames:
        pixels = np.concatenate([pixels, np.repeat(pixels[-1:], missing, 0)])
    rows, columns = pixels.shape[2] // patch, pixels.shape[3] // patch
    # [grid, frames, channels, merged rows, rows, patch rows, merged columns, columns, patch columns]
    split = pixels.reshape(-1, frames, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    ordered = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    grid = np.array([[len(split), rows, columns]], np.int64)
    return ordered.reshape(len(split) * rows * columns, 3 * frames * patch * patch), grid


def declare(files: Files) -> Processor:
    is_old = files.is_omni and not files.is_qwen3_omni
    return declare_patches(QwenVL, files, DEFAULTS, "<|IMAGE|>" if is_old else "<|image_pad|>")


def declare_patches(kind: type[QwenVL], files: Files, defaults: dict[str, Any], token: str) -> QwenVL:
    """Return the processor of this kind. token: default text of the placeholder."""
    settings = files.settings(defaults)
    size = {**defaults["size"], **(settings["size"] if isinstance(settings["size"], dict) else {})}
    least = int(settings.get("min_pixels") or size.get("min_pixels") or size["shortest_edge"])
    most = int(settings.get("max_pixels") or size.get("max_pixels") or size["longest_edge"])
    image = files.token("image_token", token)
    return kind(
        Tokens(image, image),
        int(settings["patch_size"]),
        int(settings["temporal_patch_size"]),
        int(settings["merge_size"]),
        (least, most) if settings["do_resize"] else None,
        int(settings["resample"]),
        read_normalisation(settings),
    )
