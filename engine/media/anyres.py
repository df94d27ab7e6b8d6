"""LLaVA-NeXT and LLaVA-OneVision: the whole image, and tiles of it at the best of several resolutions.

The whole image has a fixed number of image tokens. The tiles have one for each feature without padding, and one at the
end of each row. OneVision shrinks the tiles' features beyond a number of tiles. Source: transformers
processing_llava_next.py, processing_llava_onevision.py, image_processing_pil_llava_next.py, image_processing_utils.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np
from PIL import Image

from engine.media.llava import CLIP, SIGLIP, Steps, patches, read_steps
from engine.media.pixels import Size, resized
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

NEXT = {"image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]}
_EDGES = (384, 768, 1152, 1536, 1920, 2304)
ONEVISION = {
    **SIGLIP,
    "image_mean": CLIP["image_mean"],
    "image_std": CLIP["image_std"],
    "size": {"height": 384, "width": 384},
    "image_grid_pinpoints": [[height, width] for height in _EDGES for width in _EDGES],
}
KINDS = {
    "": {**CLIP, **NEXT},
    "LlavaNextImageProcessor": {**CLIP, **NEXT},
    "LlavaOnevisionImageProcessor": ONEVISION,
}


def best_resolution(height: int, width: int, resolutions: Sequence[Size]) -> Size:
    """Return the resolution that keeps the most pixels of the image, and of these the one with the least padding."""
    best, most, least = resolutions[0], 0, float("inf")
    for candidate in resolutions:
        scale = min(candidate[1] / width, candidate[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = candidate[0] * candidate[1] - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = candidate, kept, wasted
    return best


@dataclass(frozen=True)
class AnyRes:
    """Processor of LLaVA-NeXT and LLaVA-OneVision."""

    tokens: Tokens
    steps: Steps
    """Steps for the whole image and for each tile."""
    resolutions: tuple[Size, ...]
    tile: int
    """Edge of a tile in pixels, before `steps`."""
    features: Size
    """Rows and columns of the features of a tile."""
    whole: int
    """Image tokens of the whole image."""
    most_tiles: int | None
    """OneVision: number of tiles beyond which features are shrunk."""

    def layout(self, width: int, height: int) -> Layout:
        size = self.steps.size(self.tile, self.tile)
        best = best_resolution(height, width, self.resolutions)
        rows, columns = self.features[0] * (best[0] // size[0]), self.features[1] * (best[1] // size[1])
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        count = rows * columns + rows
        if self.most_tiles is not None:
            ratio = sqrt(rows * columns / (self.most_tiles * self.features[0] ** 2))
            if ratio > 1.1:
                count = int(rows // ratio) * int(columns // ratio) + int(rows // ratio)
        total = count + self.whole
        if total < 1:
            raise MediaError(f"an image of {width} x {height} pixels has an aspect ratio that the model cannot process")
        return Layout(self.tokens.image, (total,))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        width, height = image.size
        best = best_resolution(height, width, self.resolutions)
        square = self.steps.resize or {"height": self.tile, "width": self.tile}
        edge = square.get("shortest_edge")
        whole = resized(image, (edge, edge) if edge else (square["height"], square["width"]), self.steps.resample)
        tiles = [whole, *cut_tiles(image, best, self.tile, self.steps.resample)]
        return {
            "pixel_values": np.stack([self.steps.apply(tile) for tile in tiles])[None],
            "image_sizes": np.array([[height, width]], np.int64),
        }


def cut_tiles(image: Image.Image, best: Size, edge: int, resample: int) -> list[Image.Image]:
    """Return the tiles with this edge of an image that is resized and padded to the size `best`."""
    by_width, by_height = best[1] / image.width, best[0] / image.height
    if by_width < by_height:
        size = min(ceil(image.height * by_width), best[0]), best[1]
    else:
        size = best[0], min(ceil(image.width * by_height), best[1])
    padded = Image.new("RGB", (best[1], best[0]))
    padded.paste(resized(image, size, resample), ((best[1] - size[1]) // 2, (best[0] - size[0]) // 2))
    corners = [(left, top) for top in range(0, best[0], edge) for left in range(0, best[1], edge)]
    boxes = [(left, top, min(left + edge, best[1]), min(top + edge, best[0])) for left, top in corners]
    return [padded.crop(box) for box in boxes]


def _resolutions(settings: Mapping[str, Any]) -> tuple[Size, ...]:
    found = tuple((int(height), int(width)) for height, width in settings["image_grid_pinpoints"])
    if not found:
        raise ValueError("image_grid_pinpoints must not be empty")
    return found


def declare(files: Files) -> Processor:
    kind = files.kind or "LlavaNextImageProcessor"
    settings, steps = files.settings(KINDS.get(kind, {})), read_steps(files, KINDS)
    image, processor = files.token("image_token", "<image>"), files.processor
    tile = steps.crop[0] if steps.crop else next(iter((steps.resize or {}).values()))
    if kind == "LlavaOnevisionImageProcessor":
        whole = int(processor["num_image_tokens"])
        aspect = processor.get("vision_aspect_ratio") or files.config.get("vision_aspect_ratio") or "anyres_max_9"
        edge = int(sqrt(whole))
        whole -= processor.get("vision_feature_select_strategy") == "default"
        most: int | None = int(str(aspect).removeprefix("anyres_max_"))
        features = edge, edge
    else:
        patch, extra = patches(files)
        height, width = steps.size(tile, tile)
        features, most = (height // patch, width // patch), None
        whole = features[0] * features[1] + extra
    return AnyRes(Tokens(image, image), steps, _resolutions(settings), tile, features, whole, most)
