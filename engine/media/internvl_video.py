"""Videos of InternVL: each frame is an image of one tile, after its number.

Source: transformers video_processing_internvl.py, processing_internvl.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from engine.api.media import Modality
from engine.media.clip import Array, Clip
from engine.media.frames import resized_frame
from engine.media.pixels import BICUBIC, CLIP_MEAN, CLIP_STD, Normalisation, Size, read_normalisation, read_square
from engine.media.processed import MediaError, Tokens
from engine.media.processor import Layout, VideoProcessor
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **{"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"height": 384, "width": 384}},
    **{"do_resize": True, "do_sample_frames": False, "initial_shift": True, "fps": None, "num_frames": None},
}


@dataclass(frozen=True)
class InternVLVideo:
    """Video processor of InternVL."""

    tokens: Tokens
    begin: str
    end: str
    length: int
    """Image tokens of one frame."""
    tile: Size
    resample: int
    normalisation: Normalisation
    fps: float | None
    count: int | None
    """Frames that are read; without it and without `fps`, all are read."""
    shift: float | None
    """Number of the first frame, or None for half a step."""

    @property
    def modality(self) -> Modality:
        return "image"

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        count = self.count
        if count is None and self.fps is not None:
            count = int(frames / fps * self.fps)
        if count is None:
            return range(frames)
        if count > frames:
            raise MediaError(f"the video has {frames} frames; {count} are required")
        if not count:
            return ()
        step = frames / count
        first = step / 2 if self.shift is None else self.shift
        numbers = first + np.arange(ceil((frames - first) / step)) * step
        found: list[int] = numbers.astype(np.float32).astype(np.int64).tolist()
        return found

    def layout(self, chosen: Sequence[int], clip: Clip) -> Layout:
        count = len(chosen)
        text = "\n".join(f"Frame{at + 1}: {self.begin}{self.tokens.image}{self.end}" for at in range(count))
        return Layout(text, (self.length,) * count)

    def tensors(self, frames: Iterable[Array], chosen: Sequence[int], clip: Clip) -> dict[str, Array]:
        small = np.stack([resized_frame(frame, self.tile, self.resample) for frame in frames])
        return {"pixel_values": self.normalisation.apply(small)}


def declare(files: Files) -> VideoProcessor:
    settings = files.video_settings(DEFAULTS)
    if not settings["do_resize"]:
        raise ValueError("do_resize must be true")
    shift, samples = settings["initial_shift"], settings["do_sample_frames"]
    fps, count = (settings[name] if samples else None for name in ("fps", "num_frames"))
    return InternVLVideo(
        Tokens(files.token("video_token", "<video>"), files.token("context_image_token", "<IMG_CONTEXT>")),
        files.token("start_image_token", "<img>"),
        files.token("end_image_token", "</img>"),
        int(files.processor.get("image_seq_length") or files.config.get("image_seq_length") or 256),
        read_square(settings["size"]),
        int(settings["resample"]),
        read_normalisation(settings),
        None if fps is None else float(fps),
        None if count is None else int(count),
        None if shift is True else float(shift),
    )
