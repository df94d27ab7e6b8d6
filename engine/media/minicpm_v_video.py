"""Videos of MiniCPM-V 4.6: each frame is an image, with slices of it if it is larger. Long videos have up to
`max_num_frames` frames, others one of each second.

Source: transformers video_processing_minicpmv4_6.py, processing_minicpmv4_6.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np

from engine.api.media import Modality
from engine.media.clip import Array, Clip
from engine.media.frames import resized_frame
from engine.media.minicpm_v import DEFAULTS as IMAGES
from engine.media.minicpm_v import MiniCPMV, read_slices
from engine.media.pixels import Size
from engine.media.processed import MediaError, Tokens
from engine.media.processor import MAX_PIXELS, Layout, VideoProcessor
from engine.media.settings import MAX_FRAMES, Files

DEFAULTS = {**IMAGES, "do_sample_frames": True, "max_num_frames": 128, "stack_frames": 1}
SHORTEST = 0.1  # seconds between frames of a long video
MOST_PIXELS = 10 * MAX_PIXELS
"""Pixels of all frames with their slices: 4 GB of float32. By default, 128 frames have up to 86% of it."""


@dataclass(frozen=True)
class MiniCPMVVideo:
    """Video processor of MiniCPM-V."""

    frame: MiniCPMV
    samples: bool
    most: int
    """Number of frames of a long video."""

    @property
    def tokens(self) -> Tokens:
        return self.frame.tokens

    @property
    def modality(self) -> Modality:
        return "video"

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        if not self.samples:
            return range(frames)
        duration = frames / fps
        if duration <= self.most:
            return [int(second * fps) for second in range(ceil(duration))]
        times = (round(number * SHORTEST, 1) for number in range(int(duration / SHORTEST)))
        found = [min(int(time * fps), frames - 1) for time in times]
        if len(found) > self.most:
            found = [found[at] for at in np.linspace(0, len(found) - 1, self.most, dtype=int)]
        return found

    def layout(self, chosen: Sequence[int], clip: Clip) -> Layout:
        each = self.frame.layout(clip.width, clip.height)
        return Layout(each.text * len(chosen), each.runs * len(chosen))

    def tensors(self, frames: Iterable[Array], chosen: Sequence[int], clip: Clip) -> dict[str, Array]:
        if len(chosen) * self.frame.num_pixels(clip.width, clip.height) > MOST_PIXELS:
            raise MediaError(
                f"the video has {len(chosen)} frames of {clip.width} x {clip.height} pixels, which is too many; use "
                "fewer frames, or a smaller max_slice_nums"
            )
        strips, sizes = list[Array](), list[tuple[int, int]]()
        for frame in frames:
            made, own = self.frame.parts(clip.width, clip.height, partial(self._resized, frame))
            strips += made
            sizes += own
        return self.frame.packed("pixel_values_videos", strips, sizes)

    def _resized(self, frame: Array, size: Size) -> Array:
        return resized_frame(frame, size, self.frame.resample)


def declare(files: Files) -> VideoProcessor:
    settings, token = files.video_settings(DEFAULTS), files.token("video_token", "<|video_pad|>")
    if int(settings["stack_frames"]) != 1:
        raise ValueError(f"stack_frames is {settings['stack_frames']}; supported is 1")
    most = int(files.given.get("max_frames") or files.given.get("num_frames") or settings["max_num_frames"])
    if not 1 <= most <= MAX_FRAMES:
        raise ValueError(f"max_num_frames is {most}; it must be from 1 to {MAX_FRAMES}")
    # Videos are numbered if images are, and small frames are always enlarged.
    settings |= {"use_image_id": files.settings(IMAGES)["use_image_id"], "small_image_upsize": "always"}
    return MiniCPMVVideo(read_slices(files, settings, token), bool(settings["do_sample_frames"]), most)
