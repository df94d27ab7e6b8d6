"""Families of image processors by model type in config.json."""

from collections.abc import Callable
from pathlib import Path

from engine.media import gemma3, llava, qwen_vl
from engine.media.processor import Processor
from engine.media.settings import Files, read_files, wrong

FAMILIES: dict[str, Callable[[Files], Processor]] = {
    "gemma3": gemma3.declare,
    "llava": llava.declare,
    "qwen2_5_vl": qwen_vl.declare,
    "qwen2_vl": qwen_vl.declare,
    "qwen3_5": qwen_vl.declare,
    "qwen3_5_moe": qwen_vl.declare,
    "qwen3_vl": qwen_vl.declare,
    "qwen3_vl_moe": qwen_vl.declare,
}


def read_processor(folder: str | Path) -> Processor | None:
    """Return the checkpoint's image processor, or None if it has none of a known family. Raises CheckpointError for
    invalid settings."""
    folder = Path(folder)
    files = read_files(folder)
    declare = None if files is None else FAMILIES.get(str(files.config.get("model_type")))
    if files is None or declare is None:
        return None
    try:
        return declare(files)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise wrong(folder, error) from error
