"""Settings of image processors in a checkpoint's files.

config.json names the family. The image processor's settings are those of `image_processor` in processor_config.json, or
else preprocessor_config.json; settings that they omit have the defaults of transformers' class.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import read_json_object

IMAGE_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class Files:
    """Content of the files that describe a processor."""

    config: Mapping[str, Any]  # config.json
    image: Mapping[str, Any]  # settings of the image processor
    processor: Mapping[str, Any]  # processor_config.json
    tokenizer: Mapping[str, Any]  # tokenizer_config.json

    @property
    def vision(self) -> Mapping[str, Any]:
        found = self.config.get("vision_config")
        return found if isinstance(found, Mapping) else {}

    @property
    def kind(self) -> str:
        """Class of the image processor, without the suffix for its back end."""
        name = self.image.get("image_processor_type") or self.image.get("feature_extractor_type") or ""
        return str(name).removesuffix("Fast").removesuffix("Pil")

    def token(self, name: str, default: str) -> str:
        """Return the text of a token that the tokenizer's or processor's configuration names, such as `boi_token`."""
        extra = self.tokenizer.get("extra_special_tokens")
        named = extra if isinstance(extra, Mapping) else {}
        for value in (self.tokenizer.get(name), named.get(name), self.processor.get(name)):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str) and text:
                return text
        return default

    def settings(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the image processor's settings. Nulls have the default."""
        given = {key: value for key, value in self.image.items() if value is not None}
        return {"rescale_factor": 1 / 255, "do_rescale": True, "do_normalize": True, **defaults, **given}


def read_files(folder: Path) -> Files | None:
    """Read the files. Return None if the checkpoint has no image processor. Raises CheckpointError."""
    config = _read(folder / "config.json")
    processor, image = (_read(folder / name) for name in IMAGE_FILES)
    nested = processor.get("image_processor")
    image = dict(nested) if isinstance(nested, Mapping) else image
    if not image:
        return None
    return Files(config, image, processor, _read(folder / "tokenizer_config.json"))


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def wrong(folder: Path, error: Exception) -> CheckpointError:
    detail = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return CheckpointError(f"{folder}: the image processor's settings are invalid: {detail}; copy the checkpoint again")
