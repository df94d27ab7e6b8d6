"""Settings of processors of images, videos and audio in a checkpoint's files.

config.json names the family. The settings of a kind are a key of processor_config.json; without that key, they are the
first of these files that exists. Omitted settings have the defaults of transformers' class.

images   `image_processor`     preprocessor_config.json
videos   `video_processor`     video_preprocessor_config.json, preprocessor_config.json
audio    `feature_extractor`   preprocessor_config.json
         `audio_processor`
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import read_json_object

IMAGE_FILES = ("processor_config.json", "preprocessor_config.json")
VIDEO_FILE = "video_preprocessor_config.json"
QWEN3_OMNI = "qwen3_omni_moe"

OPTIONS = frozenset(
    (
        *("size", "min_pixels", "max_pixels", "min_patches", "max_patches", "crop_to_patches"),
        *("do_image_splitting", "do_pan_and_scan", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size"),
        *("pan_and_scan_min_ratio_to_activate", "fps", "num_frames", "min_frames", "max_frames", "do_sample_frames"),
        *("max_soft_tokens", "dynamic_hd", "max_slice_nums", "use_audio_in_video"),
    )
)
"""Settings that a request may replace: the number of pixels, tiles and frames."""
EDGES = ("shortest_edge", "longest_edge")
"""Edges of `size` that a request may replace."""
MAX_OPTION = 1 << 30
MAX_FRAMES = 1 << 16
"""Largest value of the options for numbers of frames."""


@dataclass(frozen=True)
class Files:
    """Content of the files that describe a processor."""

    config: Mapping[str, Any]  # config.json
    image: Mapping[str, Any]  # settings of the image processor
    processor: Mapping[str, Any]  # processor_config.json
    tokenizer: Mapping[str, Any]  # tokenizer_config.json
    video: Mapping[str, Any]  # settings of the video processor
    audio: Mapping[str, Any]  # settings of the feature extractor
    given: Mapping[str, Any] = field(default_factory=dict)  # settings that a request replaces

    @property
    def vision(self) -> Mapping[str, Any]:
        return self._part("vision_config")

    @property
    def hearing(self) -> Mapping[str, Any]:
        """Settings of the audio encoder in config.json."""
        return self._part("audio_config")

    @property
    def is_omni(self) -> bool:
        """Return whether the model is Qwen-Omni, or its part that reads media."""
        return str(self.config.get("model_type")).startswith(("qwen2_5_omni", QWEN3_OMNI))

    @property
    def is_qwen3_omni(self) -> bool:
        return str(self.config.get("model_type")).startswith(QWEN3_OMNI)

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
        return _with_defaults(self.image, defaults)

    def video_settings(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the video processor's settings. Nulls have the default."""
        return _with_defaults(self.video, defaults)

    def with_options(self, options: Mapping[str, Any]) -> "Files":
        """Return the files with settings that a request replaces. Raises ValueError for another setting."""
        given = given_options(options)
        if given.keys() & {"fps", "num_frames"}:
            given.setdefault("do_sample_frames", True)
        return replace(self, image=_merged(self.image, given), video=_merged(self.video, given), given=given)

    def _part(self, name: str) -> Mapping[str, Any]:
        """Return an object in config.json, or in the configuration of Qwen-Omni's part that reads media."""
        thinker = self.config.get("thinker_config")
        found = (thinker if isinstance(thinker, Mapping) else self.config).get(name)
        return found if isinstance(found, Mapping) else {}


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a request replaces, without nulls, which change nothing. Raises ValueError for other
    settings, and for a value that no processor has."""
    given = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - OPTIONS):
        raise ValueError(f"{unknown[0][:100]!r} is not supported; known: {', '.join(sorted(OPTIONS))}")
    for name, value in given.items():
        _check(name, value)
    return given


def _with_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in settings.items() if value is not None}
    return {"rescale_factor": 1 / 255, "do_rescale": True, "do_normalize": True, **defaults, **given}


def _check(name: str, value: Any) -> None:
    """Raise ValueError for a value that no setting of this name has."""
    if name == "size":
        fits = isinstance(value, Mapping) and value and all(_is_count(edge) for edge in value.values())
        fits = fits and value.keys() <= set(EDGES)
        wanted = f"an object with positive integers in {' and '.join(EDGES)}"
    elif name.startswith(("do_", "crop_", "use_")):
        fits, wanted = isinstance(value, bool), "a boolean"
    elif name in ("fps", "pan_and_scan_min_ratio_to_activate"):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_OPTION
        wanted = "a positive number"
    else:
        most = MAX_FRAMES if name.endswith("_frames") else MAX_OPTION
        fits, wanted = _is_count(value) and value <= most, f"a positive integer of at most {most:,}"
    if not fits:
        raise ValueError(f"{name} must be {wanted}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_OPTION


def _merged(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with options. A size replaces old names of its edges; a number and a rate of frames exclude one
    another."""
    dropped: set[str] = set()
    if "size" in options:
        dropped |= {"min_pixels", "max_pixels"}
    if "fps" in options:
        dropped.add("num_frames")
    if "num_frames" in options:
        dropped.add("fps")
    kept = {key: (None if key in dropped else value) for key, value in settings.items()}
    return {**kept, **options}


def read_files(folder: Path) -> Files:
    """Read the files. Raises CheckpointError."""
    config = _read(folder / "config.json")
    processor, preprocessor = (_read(folder / name) for name in IMAGE_FILES)
    video = _nested(processor, "video_processor") or _read(folder / VIDEO_FILE) or preprocessor
    return Files(
        config,
        _nested(processor, "image_processor") or preprocessor,
        processor,
        _read(folder / "tokenizer_config.json"),
        video,
        _nested(processor, "feature_extractor") or _nested(processor, "audio_processor") or preprocessor,
    )


def _nested(processor: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = processor.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def wrong(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the processor's settings are invalid: {detail(error)}; copy the checkpoint again"
    )


def detail(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
