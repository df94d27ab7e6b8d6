"""Families of image processors by model type in config.json. Needs neither numpy nor Pillow to look one up."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from engine.media.settings import Files, read_files, wrong

if TYPE_CHECKING:
    from engine.media.processor import Processor

FAMILIES = {
    "gemma3": "gemma3",
    "glm4v": "glm4v",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "llava": "llava",
    "llava_next": "anyres",
    "llava_onevision": "anyres",
    "mistral3": "pixtral",
    "paligemma": "paligemma",
    "qwen2_5_vl": "qwen_vl",
    "qwen2_vl": "qwen_vl",
    "qwen3_5": "qwen_vl",
    "qwen3_5_moe": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "qwen3_vl_moe": "qwen_vl",
    "smolvlm": "idefics3",
}
"""Module of engine.media with the function `declare`, by model type."""


def has_processor(folder: str | Path) -> bool:
    """Return True if the checkpoint has an image processor of a known family. Raises CheckpointError."""
    return _family(read_files(Path(folder))) is not None


def read_processor(folder: str | Path) -> "Processor | None":
    """Return the checkpoint's image processor, or None if it has none of a known family. Raises CheckpointError for
    invalid settings."""
    folder = Path(folder)
    files = read_files(folder)
    family = _family(files)
    if files is None or family is None:
        return None
    declare = import_module(f"engine.media.{family}").declare
    try:
        processor: Processor = declare(files)
        return processor
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise wrong(folder, error) from error


def _family(files: Files | None) -> str | None:
    if files is None:
        return None
    if files.kind == "PixtralImageProcessor":  # Pixtral 12B is of type llava
        return "pixtral"
    return FAMILIES.get(str(files.config.get("model_type")))
