"""LLaVA 1.5: one image is resized and cropped to a square, whose patches are the image tokens.

Source: transformers processing_llava.py, image_processing_pil_llava.py, image_processing_pil_clip.py,
image_processing_pil_siglip.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from engine.media.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Normalisation,
    Size,
    center_crop,
    channels,
    read_normalisation,
    read_size,
    resized,
    shortest_edge,
)
from engine.media.processed import Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

CLIP = {
    "resample": BICUBIC,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_resize": True,
    "do_center_crop": True,
    "do_pad": False,
}
SIGLIP = {
    "resample": BICUBIC,
    "image_mean": HALF,
    "image_std": HALF,
    "size": {"height": 224, "width": 224},
    "do_resize": True,
    "do_center_crop": False,
    "do_pad": False,
}
KINDS = {"": CLIP, "CLIPImageProcessor": CLIP, "LlavaImageProcessor": CLIP, "SiglipImageProcessor": SIGLIP}


@dataclass(frozen=True)
class Steps:
    """Resizing and cropping of a whole image."""

    resize: Mapping[str, int] | None
    """`shortest_edge`, or `height` and `width`."""
    resample: int
    crop: Size | None
    background: tuple[int, ...] | None
    """Colour with which the image is padded to a square first."""
    normalisation: Normalisation

    def size(self, width: int, height: int) -> Size:
        """Return height and width of the result."""
        if self.crop is not None:
            return self.crop
        if self.background is not None:
            width = height = max(width, height)
        return (height, width) if self.resize is None else target(self.resize, width, height)

    def apply(self, image: Image.Image) -> Array:
        """Return the tower's input, float32 [3, height, width]."""
        if self.background is not None:
            image = pad_to_square(image, self.background)
        if self.resize is not None:
            image = resized(image, target(self.resize, *image.size), self.resample)
        pixels = channels(image)
        if self.crop is not None:
            pixels = center_crop(pixels, self.crop)
        return self.normalisation.apply(pixels)


def target(size: Mapping[str, int], width: int, height: int) -> Size:
    """Return height and width after resizing to a size setting."""
    if "shortest_edge" in size:
        return shortest_edge(height, width, size["shortest_edge"])
    return size["height"], size["width"]


def pad_to_square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    edge = max(image.size)
    if image.width == image.height:
        return image
    square = Image.new("RGB", (edge, edge), (colour[0], colour[1], colour[2]))
    square.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
    return square


def read_steps(files: Files, kinds: Mapping[str, Mapping[str, object]] = KINDS) -> Steps:
    """Read the settings of a CLIP, SigLIP or LLaVA image processor. Raises ValueError for another class."""
    if files.kind not in kinds:
        raise ValueError(
            f"image_processor_type {files.kind!r} is not supported; known: {', '.join(filter(None, kinds))}"
        )
    settings = files.settings(kinds[files.kind])
    pads = settings["do_pad"] and files.kind == "LlavaImageProcessor"
    size = read_size(settings["size"], square=False)
    target(size, 1, 1)  # raises KeyError for incomplete settings
    return Steps(
        size if settings["do_resize"] else None,
        int(settings["resample"]),
        _height_width(read_size(settings["crop_size"])) if settings["do_center_crop"] else None,
        tuple(int(value * 255) for value in settings["image_mean"]) if pads else None,
        read_normalisation(settings),
    )


def _height_width(size: Mapping[str, int]) -> Size:
    return size["height"], size["width"]


@dataclass(frozen=True)
class Llava:
    """Processor of LLaVA 1.5."""

    tokens: Tokens
    steps: Steps
    patch_size: int
    more: int
    """Tokens in addition to the patches: 1 for a class token that the feature selection keeps, else 0."""

    def layout(self, width: int, height: int) -> Layout:
        rows, columns = (edge // self.patch_size for edge in self.steps.size(width, height))
        return Layout(self.tokens.image, (rows * columns + self.more,))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        return {"pixel_values": np.ascontiguousarray(self.steps.apply(image)[None])}


def declare(files: Files) -> Processor:
    image = files.token("image_token", "<image>")
    processor, is_clip = files.processor, files.vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    if processor.get("patch_size"):
        patch_size, strategy = processor["patch_size"], processor.get("vision_feature_select_strategy")
        more = processor.get("num_additional_image_tokens") or 0
    else:  # checkpoints from before processor_config.json have these settings only in config.json
        patch_size, more = files.vision["patch_size"], int(is_clip)
        strategy = files.config.get("vision_feature_select_strategy") or "default"
    return Llava(Tokens(image, image), read_steps(files), int(patch_size), int(more) - int(strategy == "default"))
