"""Steps of image processors: resizing, cropping and normalisation, with the arithmetic of transformers' PIL back end.

Source: transformers image_transforms.py and image_processing_backends.py (`PilBackend`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from PIL import Image

from engine.media.processed import MediaError
from engine.media.processor import MAX_PIXELS, Array

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC, LANCZOS = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS

Size = tuple[int, int]
"""Height and width."""


def resized(image: Image.Image, size: Size, resample: int) -> Image.Image:
    """Return the image with this height and width. Raises MediaError for a size that only an extreme aspect ratio can
    cause."""
    height, width = size
    check_size(size, image)
    return image.resize((width, height), resample=Image.Resampling(resample))


def check_size(size: Size, image: Image.Image) -> None:
    """Raise MediaError for a height and width that only an extreme aspect ratio of `image` can cause."""
    height, width = size
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise MediaError(
            f"an image of {image.width} x {image.height} pixels has an aspect ratio, or the request has a size, "
            "that the model cannot process"
        )


def channels(image: Image.Image) -> Array:
    """Return the pixels as uint8, [3, height, width]."""
    return np.moveaxis(np.asarray(image), -1, 0)


def shortest_edge(height: int, width: int, edge: int) -> Size:
    """Return the size whose shorter edge has this length, with the same aspect ratio."""
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def center_crop(pixels: Array, size: Size) -> Array:
    """Return the middle of an image [3, height, width], padded with zeros where it is smaller."""
    height, width = pixels.shape[-2:]
    crop_height, crop_width = size
    top, left = (height - crop_height) // 2, (width - crop_width) // 2
    if top >= 0 and left >= 0:
        return pixels[:, top : top + crop_height, left : left + crop_width]
    padded = np.zeros((3, max(crop_height, height), max(crop_width, width)), pixels.dtype)
    above, before = ceil((padded.shape[1] - height) / 2), ceil((padded.shape[2] - width) / 2)
    padded[:, above : above + height, before : before + width] = pixels
    top, left = top + above, left + before
    return padded[:, max(0, top) : top + crop_height, max(0, left) : left + crop_width]


@dataclass(frozen=True)
class Normalisation:
    """Rescaling and normalisation of uint8 values: (value * factor - mean) / std, for each channel."""

    factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def table(self) -> Array:
        """Return the result for each channel and value, float32 [3, 256]."""
        values = np.arange(256, dtype=np.float64)
        if self.factor is not None:
            values = values * self.factor
        table = np.repeat(values.astype(np.float32)[None], 3, axis=0)
        if self.mean is not None and self.std is not None:
            mean, std = (np.array(each, np.float32)[:, None] for each in (self.mean, self.std))
            table = (table - mean) / std
        return table

    def apply(self, pixels: Array) -> Array:
        """Return normalised pixels, float32, for uint8 [..., 3, height, width]."""
        table, found = self.table(), np.empty(pixels.shape, np.float32)
        for channel in range(3):
            np.take(table[channel], pixels[..., channel, :, :], out=found[..., channel, :, :])
        return found


def read_normalisation(settings: Mapping[str, Any]) -> Normalisation:
    """Read do_rescale, rescale_factor, do_normalize, image_mean and image_std."""
    rescale, normalise = settings["do_rescale"], settings["do_normalize"]
    return Normalisation(
        float(settings["rescale_factor"]) if rescale else None,
        _three(settings["image_mean"]) if normalise else None,
        _three(settings["image_std"]) if normalise else None,
    )


def _three(value: float | Sequence[float]) -> tuple[float, ...]:
    values = tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),) * 3
    if len(values) != 3:
        raise ValueError(f"image_mean and image_std need 3 values, got {len(values)}")
    return values


def read_size(value: Any, *, square: bool = True) -> dict[str, int]:
    """Return a size setting as an object. A number is an edge: of a square, or the shortest one if `square` is
    false."""
    if isinstance(value, Mapping):
        return {str(key): int(edge) for key, edge in value.items() if edge is not None}
    if isinstance(value, Sequence):
        height, width = value
        return {"height": int(height), "width": int(width)}
    return {"height": int(value), "width": int(value)} if square else {"shortest_edge": int(value)}


def read_square(value: Any) -> Size:
    """Return height and width of a size setting."""
    size = read_size(value)
    return size["height"], size["width"]
