"""Idefics2: an image within two edges, or its quarters and the whole image.

Source: transformers processing_idefics2.py, image_processing_pil_idefics2.py. The sizes of images without padding
replace the mask of pixels.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from engine.media.pixels import BILINEAR, HALF, Normalisation, Size, channels, read_normalisation, read_size, resized
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

LARGEST = 980
DEFAULTS: dict[str, Any] = {
    **{"resample": BILINEAR, "image_mean": HALF, "image_std": HALF, "do_resize": True, "do_image_splitting": False},
    "size": {"shortest_edge": 378, "longest_edge": LARGEST},
}


@dataclass(frozen=True)
class Idefics2:
    """Image processor of Idefics2."""

    tokens: Tokens
    around: str
    length: int
    """Tokens of an image, or of a quarter."""
    edges: tuple[int, int] | None
    """Shortest and longest edge, or None without resizing."""
    splits: bool
    resample: int
    normalisation: Normalisation

    def layout(self, width: int, height: int) -> Layout:
        if self.splits and min(width, height) < 2:
            raise MediaError(f"an image of {width} x {height} pixels cannot be divided into quarters")
        count = 5 if self.splits else 1
        return Layout(f"{self.around}{self.tokens.image}" * count + self.around, (self.length,) * count)

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        pieces = [*(_quarters(image) if self.splits else ()), image]
        sizes = [self._size(piece.width, piece.height) for piece in pieces]
        room = max(high for high, _ in sizes), max(wide for _, wide in sizes)
        pixels = np.zeros((1, len(pieces), 3, *room), np.float32)
        for number, (piece, (high, wide)) in enumerate(zip(pieces, sizes, strict=True)):
            small = piece if self.edges is None else resized(piece, (high, wide), self.resample)
            pixels[0, number, :, :high, :wide] = self.normalisation.apply(channels(small))
        return {"pixel_values": pixels, "image_sizes": np.array(sizes, np.int64)}

    def _size(self, width: int, height: int) -> Size:
        """Return the size whose longer edge is at most the longest, then whose edges are at least the shortest."""
        if self.edges is None:
            return height, width
        shortest, longest = self.edges
        ratio = width / height
        if width >= height and width > longest:
            width, height = longest, int(longest / ratio)
        elif height > width and height > longest:
            height, width = longest, int(longest * ratio)
        return max(height, shortest), max(width, shortest)


def _quarters(image: Image.Image) -> tuple[Image.Image, ...]:
    wide, high = image.size
    x, y = wide // 2, high // 2
    return tuple(image.crop(box) for box in ((0, 0, x, y), (x, 0, wide, y), (0, y, x, high), (x, y, wide, high)))


def declare(files: Files) -> Processor:
    settings, token = files.settings(DEFAULTS), files.token("image_token", "<image>")
    around = files.token("image_boundary_token", "<fake_token_around_image>")
    # Adjacent images share a token, and words after an image begin with a space.
    rewrites = (re.escape(around * 2), around), (re.escape(around) + r"(?=[^\s<])", f"{around} ")
    perceiver = files.config.get("perceiver_config")
    latents = perceiver.get("resampler_n_latents") if isinstance(perceiver, dict) else None
    size, largest = read_size(settings["size"]), int(files.vision.get("image_size") or LARGEST)
    # Larger images would have the same tokens, so limits of tokens would not limit the work for them.
    if max(files.given.get("size", {"": 0}).values()) > largest:
        raise ValueError(f"size has an edge of {max(size.values())} pixels; the model has positions for {largest}")
    return Idefics2(
        Tokens(token, token, rewrites=rewrites),
        around,
        int(latents or files.processor.get("image_seq_len") or 64),
        (size["shortest_edge"], size["longest_edge"]) if settings["do_resize"] else None,
        bool(settings["do_image_splitting"]),
        int(settings["resample"]),
        read_normalisation(settings),
    )
