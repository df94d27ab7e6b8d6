"""Families of processors by model type in config.json. Needs neither numpy nor Pillow to look one up."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.api.media import Modality
from engine.media.processed import MediaError, Tokens
from engine.media.settings import Files, detail, read_files, wrong

if TYPE_CHECKING:
    from engine.media.processor import AudioProcessor, Processor, VideoProcessor
    from engine.media.sound import Sound

FAMILIES = {
    "aria": "aria",
    "blip-2": "blip",
    "clip": "dual",
    "colpali": "paligemma",
    "colqwen2": "qwen_vl",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "glm46v": "glm4v",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm4v",
    "idefics2": "idefics2",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "kimi_vl": "kimi_vl",
    "lighton_ocr": "pixtral",
    "llama4": "llama4",
    "llava": "llava",
    "llava_next": "anyres",
    "llava_onevision": "anyres",
    "minicpm_ocr": "minicpm_v",
    "minicpmv4_6": "minicpm_v",
    "mistral3": "pixtral",
    "paligemma": "paligemma",
    "phi4_multimodal": "phi4",
    "qwen2_5_omni": "qwen_vl",
    "qwen2_5_omni_thinker": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "qwen2_vl": "qwen_vl",
    "qwen3_5": "qwen_vl",
    "qwen3_5_moe": "qwen_vl",
    "qwen3_omni_moe": "qwen_vl",
    "qwen3_omni_moe_thinker": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "qwen3_vl_moe": "qwen_vl",
    "siglip": "dual",
    "siglip2": "siglip2",
    "smolvlm": "idefics3",
}
"""Module of engine.media with the function `declare`, by model type."""


VIDEO_FAMILIES = {
    "gemma4": "gemma4_video",
    "glm46v": "glm4v_video",
    "glm4v": "glm4v_video",
    "glm4v_moe": "glm4v_video",
    "internvl": "internvl_video",
    "llava_onevision": "onevision_video",
    "minicpmv4_6": "minicpm_v_video",
    "qwen2_5_omni": "qwen_video",
    "qwen2_5_omni_thinker": "qwen_video",
    "qwen2_5_vl": "qwen_video",
    "qwen2_vl": "qwen_video",
    "qwen3_5": "qwen_video",
    "qwen3_5_moe": "qwen_video",
    "qwen3_omni_moe": "qwen_video",
    "qwen3_omni_moe_thinker": "qwen_video",
    "qwen3_vl": "qwen_video",
    "qwen3_vl_moe": "qwen_video",
    "smolvlm": "smolvlm_video",
}
AUDIO_FAMILIES = {
    "gemma4": "gemma4_audio",
    "phi4_multimodal": "phi4_audio",
    "qwen2_5_omni": "qwen_audio",
    "qwen2_5_omni_thinker": "qwen_audio",
    "qwen2_audio": "qwen_audio",
    "qwen3_asr": "qwen3_asr",
    "qwen3_omni_moe": "qwen3_asr",
    "qwen3_omni_moe_thinker": "qwen3_asr",
    "voxtral": "voxtral",
}
"""Modules of processors of videos and audio."""
ANY_SIZE = frozenset(("glm4v", "glm4v_video", "idefics2", "idefics3", "pixtral", "qwen_video", "qwen_vl", "siglip2"))
"""Modules of models that read images of any size, so that a request may replace `size`. The towers of others read only
the size of the checkpoint's settings."""
SOME_WITH_AUDIO = frozenset(("gemma4",))
"""Model types whose smaller or larger checkpoints may lack the tower for audio."""
WITH_SOUND = "use_audio_in_video"
"""Option of requests: videos have their sound."""


@dataclass(frozen=True)
class Processors:
    """Processors of a checkpoint."""

    image: "Processor | None" = None
    video: "VideoProcessor | None" = None
    audio: "AudioProcessor | None" = None
    sound: "Sound | None" = None  # of videos with their sound, if a request wants it

    @property
    def tokens(self) -> dict[Modality, Tokens]:
        """Special tokens of the modalities that have a processor."""
        found: dict[Modality, Processor | VideoProcessor | AudioProcessor | None]
        found = {"image": self.image, "video": self.video, "audio": self.audio}
        return {kind: one.tokens for kind, one in found.items() if one is not None}


def known_modalities(folder: str | Path) -> tuple[Modality, ...]:
    """Return the modalities for which the checkpoint has a processor of a known family. Raises CheckpointError."""
    return tuple(_modules(read_files(Path(folder))))


def read_processors(folder: str | Path, options: Mapping[str, Any] | None = None) -> Processors:
    """Return the checkpoint's processors of known families. options: settings that a request replaces. Raises
    CheckpointError for invalid settings, MediaError for invalid options."""
    folder = Path(folder)
    files = read_files(folder)
    try:
        modules = _modules(files)
        changed = files.with_options(options) if options else files
        if options and options.get("size") and not ANY_SIZE & set(modules.values()):
            raise ValueError("size cannot be replaced; the model reads only one size")
        found = {kind: import_module(f"engine.media.{name}").declare(changed) for kind, name in modules.items()}
        sound = None
        if changed.given.get(WITH_SOUND):
            if "video" not in found or "audio" not in found:
                raise ValueError(f"{WITH_SOUND} needs a model that reads videos and audio")
            sound = import_module("engine.media.sound").declare(changed, found["video"], found["audio"])
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        if options:
            raise MediaError(f"mm_processor_kwargs: {detail(error)}") from error
        raise wrong(folder, error) from error
    return Processors(**found, sound=sound)


def _modules(files: Files) -> dict[Modality, str]:
    """Return the module of each modality."""
    kind = str(files.config.get("model_type"))
    # Pixtral 12B is of type llava.
    image = "pixtral" if files.kind == "PixtralImageProcessor" else FAMILIES.get(kind)
    found: dict[Modality, str] = {}
    if files.image and image is not None:
        found["image"] = image
    if files.video and kind in VIDEO_FAMILIES:
        found["video"] = VIDEO_FAMILIES[kind]
    has_audio = kind not in SOME_WITH_AUDIO or isinstance(files.config.get("audio_config"), Mapping)
    if files.audio and kind in AUDIO_FAMILIES and has_audio:
        found["audio"] = AUDIO_FAMILIES[kind]
    return found
