"""Videos of SmolVLM: each frame is an image of one tile, after its time; a text with the number of frames and the
duration precedes them.

Frames are selected if the settings have `video_sampling` or `do_sample_frames`. Source: transformers
video_processing_smolvlm.py, processing_smolvlm.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from engine.api.media import Modality
from engine.media.clip import Array, Clip
from engine.media.frames import resized_frame
from engine.media.idefics3 import LARGEST, enlarged
from engine.media.pixels import HALF, LANCZOS, Normalisation, read_normalisation, read_size
from engine.media.processed import Tokens
from engine.media.processor import Layout, VideoProcessor
from engine.media.settings import MAX_FRAMES, Files

DEFAULTS: dict[str, Any] = {
    **{"resample": LANCZOS, "image_mean": HALF, "image_std": HALF, "size": {"longest_edge": 4 * 364}},
    **{"max_image_size": {"longest_edge": 364}, "do_resize": True},
}
SKIPPED = 1  # seconds at the beginning and the end of a long video

_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(count: int) -> str:
    """Return a number below 1,000,000 in English words, as num2words does."""
    if count < 20:
        return _UNITS[count]
    if count < 100:
        tens, units = divmod(count, 10)
        return _TENS[tens - 2] + (f"-{_UNITS[units]}" if units else "")
    if count < 1000:
        hundreds, rest = divmod(count, 100)
        return f"{_UNITS[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    thousands, rest = divmod(count, 1000)
    between = " and " if rest < 100 else ", "
    return f"{in_words(thousands)} thousand" + (f"{between}{in_words(rest)}" if rest else "")


@dataclass(frozen=True)
class SmolVLMVideo:
    """Video processor of SmolVLM."""

    tokens: Tokens
    around: str
    whole: str
    length: int
    """Image tokens of one frame."""
    edge: int
    """Longest edge after the first resizing."""
    tile: int
    resample: int
    normalisation: Normalisation
    fps: float | None
    """Maximum rate of frames; None to read all frames."""
    most: int
    """Maximum number of frames."""

    @property
    def modality(self) -> Modality:
        return "image"

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        if self.fps is None:
            return range(frames)
        duration = frames / fps
        count = max(1, min(round(self.fps * duration), self.most))
        first, last = 0, frames - 1
        if duration - 2 * SKIPPED > self.most * self.fps:
            first, last = int(SKIPPED * fps), min(int(frames - SKIPPED * fps), frames - 1)
        if first >= last:
            first, last = 0, frames - 1
        found: list[int] = np.unique(np.linspace(first, last, count, dtype=int)).tolist()
        return found

    def layout(self, chosen: Sequence[int], clip: Clip) -> Layout:
        duration = int(chosen[-1] / clip.rate) if clip.fps is None else int(clip.frames / clip.fps)
        text = (
            f"You are provided the following series of {in_words(len(chosen))} frames from a "
            f"{timedelta(seconds=duration)} [H:MM:SS] video.\n"
        )
        for seconds in (number / clip.rate for number in chosen):
            text += f"\nFrame from {int(seconds // 60):02d}:{int(seconds % 60):02d}:"
            text += f"{self.around}{self.whole}{self.tokens.image}{self.around}"
        return Layout(f"{text}\n\n", (self.length,) * len(chosen))

    def tensors(self, frames: Iterable[Array], chosen: Sequence[int], clip: Clip) -> dict[str, Array]:
        first = enlarged(clip.height, clip.width, self.edge)
        small = np.stack([self._resized(frame, first) for frame in frames])
        mask = np.ones((1, len(small), self.tile, self.tile), np.int64)
        return {"pixel_values": self.normalisation.apply(small)[None], "pixel_attention_mask": mask}

    def _resized(self, frame: Array, first: tuple[int, int]) -> Array:
        return resized_frame(resized_frame(frame, first, self.resample), (self.tile, self.tile), self.resample)


def declare(files: Files) -> VideoProcessor:
    settings, image = files.video_settings(DEFAULTS), files.token("image_token", "<image>")
    if not settings["do_resize"]:
        raise ValueError("do_resize must be true")
    written = settings.get("video_sampling")
    sampling = written if isinstance(written, dict) else {}
    size = files.video.get("size") or sampling.get("video_size") or settings["size"]
    fps = files.given.get("fps") or sampling.get("fps") or settings.get("fps") or 1.0
    most = files.given.get("num_frames") or sampling.get("max_frames") or settings.get("num_frames") or MAX_FRAMES
    samples = settings.get("do_sample_frames", bool(sampling))
    return SmolVLMVideo(
        Tokens(files.token("video_token", "<video>"), image),
        files.token("fake_image_token", "<fake_token_around_image>"),
        files.token("global_image_token", "<global-img>"),
        int(files.processor.get("image_seq_len") or 169),
        min(read_size(size)["longest_edge"], LARGEST),
        read_size(settings["max_image_size"])["longest_edge"],
        int(settings["resample"]),
        read_normalisation(settings),
        float(fps) if samples else None,
        int(most),
    )
