"""Videos of LLaVA-OneVision: each frame is resized to a square, whose features the model halves in both directions; a
vector follows the last frame.

Source: transformers video_processing_llava_onevision.py, processing_llava_onevision.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np

from engine.api.media import Modality
from engine.media.clip import Array, Clip, evenly, wanted_frames
from engine.media.frames import resized_frame
from engine.media.pixels import BICUBIC, CLIP_MEAN, CLIP_STD, Normalisation, Size, read_normalisation, read_square
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Layout, VideoProcessor
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **{"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"height": 384, "width": 384}},
    **{"do_resize": True, "do_sample_frames": False, "fps": None, "num_frames": None},
}


@dataclass(frozen=True)
class OneVisionVideo:
    """Video processor of LLaVA-OneVision."""

    tokens: Tokens
    length: int
    """Tokens of one frame."""
    tile: Size
    resample: int
    normalisation: Normalisation
    fps: float | None
    count: int | None
    """Frames that are read; without it and without `fps`, all are read."""

    @property
    def modality(self) -> Modality:
        return "video"

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        count = wanted_frames(self.count, self.fps, frames, fps)
        if count > frames:
            raise MediaError(f"the video has {frames} frames; {count} are required")
        return evenly(frames, count)

    def layout(self, chosen: Sequence[int], clip: Clip) -> Layout:
        return Layout(self.tokens.image, (len(chosen) * self.length + 1,))

    def tensors(self, frames: Iterable[Array], chosen: Sequence[int], clip: Clip) -> dict[str, Array]:
        small = np.stack([resized_frame(frame, self.tile, self.resample) for frame in frames])
        return {"pixel_values_videos": self.normalisation.apply(small)[None]}


def declare(files: Files) -> VideoProcessor:
    settings = files.video_settings(DEFAULTS)
    if not settings["do_resize"]:
        raise ValueError("do_resize must be true")
    fps, count = (settings[name] if settings["do_sample_frames"] else None for name in ("fps", "num_frames"))
    token, side = files.token("video_token", "<video>"), int(sqrt(int(files.processor["num_image_tokens"])))
    return OneVisionVideo(
        Tokens(token, token),
        ceil(side / 2) ** 2,
        read_square(settings["size"]),
        int(settings["resample"]),
        read_normalisation(settings),
        None if fps is None else float(fps),
        None if count is None else int(count),
    )
