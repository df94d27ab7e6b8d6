"""Videos of Gemma 4: each frame is an image with fewer tokens, after its time.

Source: transformers video_processing_gemma4.py, processing_gemma4.py. Videos with fewer frames than the settings
select, which transformers refuses, are read completely.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.api.media import Modality
from engine.media.clip import Array, Clip, evenly, wanted_frames
from engine.media.frames import resized_frame
from engine.media.gemma4 import DEFAULTS as IMAGE
from engine.media.gemma4 import Grid, read_around, read_grid
from engine.media.pixels import Normalisation, read_normalisation
from engine.media.processed import Tokens
from engine.media.processor import Layout, VideoProcessor
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **IMAGE,
    **{"do_normalize": True, "max_soft_tokens": 70, "num_frames": 32, "fps": None, "do_sample_frames": True},
}


@dataclass(frozen=True)
class Gemma4Video:
    """Video processor of Gemma 4."""

    tokens: Tokens
    around: tuple[str, str]
    """Texts before and after the tokens of a frame."""
    grid: Grid
    resample: int
    normalisation: Normalisation
    fps: float | None
    count: int | None
    """Frames that are read; without it and without `fps`, all are read."""

    @property
    def modality(self) -> Modality:
        return "video"

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        return evenly(frames, min(wanted_frames(self.count, self.fps, frames, fps), frames))

    def layout(self, chosen: Sequence[int], clip: Clip) -> Layout:
        (begin, end), times = self.around, [number / clip.rate for number in chosen]
        frames = (f"{int(t // 60):02d}:{int(t % 60):02d} {begin}{self.tokens.image}{end}" for t in times)
        return Layout(" ".join(frames), (self.grid.count(clip.width, clip.height),) * len(chosen))

    def tensors(self, frames: Iterable[Array], chosen: Sequence[int], clip: Clip) -> dict[str, Array]:
        size = self.grid.size(clip.width, clip.height)
        small = np.stack([resized_frame(frame, size, self.resample) for frame in frames])
        patches, places = self.grid.patches(self.normalisation.apply(small))
        return {"pixel_values_videos": patches, "video_position_ids": places}


def declare(files: Files) -> VideoProcessor:
    settings, token = files.video_settings(DEFAULTS), files.token("video_token", "<|video|>")
    count, fps = (settings[name] if settings["do_sample_frames"] else None for name in ("num_frames", "fps"))
    if files.given.get("fps") is not None:
        count = None
    return Gemma4Video(
        Tokens(token, token),
        read_around(files),
        read_grid(settings),
        int(settings["resample"]),
        read_normalisation(settings),
        None if fps is None else float(fps),
        None if count is None else int(count),
    )
