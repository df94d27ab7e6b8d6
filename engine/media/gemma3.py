"""Gemma 3: a square image of a fixed number of tokens, and with pan and scan also crops of elongated images.

Source: transformers processing_gemma3.py, image_processing_pil_gemma3.py.
"""

from dataclasses import dataclass
from math import ceil, floor

import numpy as np
from PIL import Image

from engine.media.pixels import (
    BILINEAR,
    HALF,
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
    "resample": BILINEAR,
    "image_mean": HALF,
    "image_std": HALF,
    "size": {"height": 224, "width": 224},
    "do_resize": True,
}
SCAN = {"min_crop_size": 256, "max_num_crops": 4, "min_ratio_to_activate": 1.2}


@dataclass(frozen=True)
class PanAndScan:
    """Crops of elongated images."""

    min_crop: int
    max_crops: int
    min_ratio: float

    def boxes(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        """Return the crops of an image as (left, top, right, bottom); none if it is not elongated enough."""
        long, short = max(width, height), min(width, height)
        if long / short < self.min_ratio:
            return []
        count = min(self.max_crops, max(2, min(long // self.min_crop, floor(long / short + 0.5))))
        step = ceil(long / count)
        if min(step, short) < self.min_crop:
            return []
        starts = [step * at for at in range(count)]
        if width >= height:
            return [(at, 0, min(at + step, width), height) for at in starts]
        return [(0, at, width, min(at + step, height)) for at in starts]


@dataclass(frozen=True)
class Gemma3:
    """Processor of Gemma 3."""

    tokens: Tokens
    end: str
    length: int
    """Image tokens of one image or crop."""
    size: Size | None
    resample: int
    normalisation: Normalisation
    scan: PanAndScan | None

    def layout(self, width: int, height: int) -> Layout:
        one = f"\n\n{self.tokens.placeholder}{self.tokens.image}{self.end}\n\n"
        crops = len(self.scan.boxes(width, height)) if self.scan else 0
        if not crops:
            return Layout(one, (self.length,))
        text = (
            f"Here is the original image {one} and here are some crops to help you see better {' '.join([one] * crops)}"
        )
        return Layout(text, (self.length,) * (1 + crops))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        boxes = self.scan.boxes(*image.size) if self.scan else []
        images = [image, *(image.crop(box) for box in boxes)]
        if self.size is not None:
            images = [resized(each, self.size, self.resample) for each in images]
        return {"pixel_values": self.normalisation.apply(np.stack([channels(each) for each in images]))}


def declare(files: Files) -> Processor:
    settings = files.settings(DEFAULTS)
    scan = {key: settings.get(f"pan_and_scan_{key}", default) for key, default in SCAN.items()}
    return Gemma3(
        Tokens(files.token("boi_token", "<start_of_image>"), files.token("image_token", "<image_soft_token>")),
        files.token("eoi_token", "<end_of_image>"),
        int(files.processor.get("image_seq_length") or files.config.get("mm_tokens_per_image") or 256),
        read_square(settings["size"]) if settings["do_resize"] else None,
        int(settings["resample"]),
        read_normalisation(settings),
        PanAndScan(int(scan["min_crop_size"]), int(scan["max_num_crops"]), float(scan["min_ratio_to_activate"]))
        if settings.get("do_pan_and_scan")
        else None,
    )
