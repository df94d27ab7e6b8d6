"""BLIP-2: one square image of a fixed number of tokens.

Source: transformers image_processing_pil_blip.py, processing_blip_2.py.
"""

from dataclasses import dataclass
from typing import Any

from PIL import Image

from engine.media.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
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

DEFAULTS: dict[str, Any] = {
    **{"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "do_resize": True},
    "size": {"height": 384, "width": 384},
}


@dataclass(frozen=True)
class Blip:
    """Image processor of BLIP-2."""

    tokens: Tokens
    length: int
    """Tokens of an image."""
    size: Size | None
    resample: int
    normalisation: Normalisation

    def layout(self, width: int, height: int) -> Layout:
        return Layout(self.tokens.image, (self.length,))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        small = image if self.size is None else resized(image, self.size, self.resample)
        return {"pixel_values": self.normalisation.apply(channels(small))[None]}


def declare(files: Files) -> Processor:
    settings, token = files.settings(DEFAULTS), files.token("image_token", "<image>")
    return Blip(
        Tokens(token, token),
        int(files.processor.get("num_query_tokens") or files.config.get("num_query_tokens") or 32),
        read_square(settings["size"]) if settings["do_resize"] else None,
        int(settings["resample"]),
        read_normalisation(settings),
    )
