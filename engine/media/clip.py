"""A video before its frames are decoded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.media.processed import MediaError

Array = np.ndarray[Any, Any]

DEFAULT_FPS = 24.0
"""Frames per second of a list of frames, whose times are unknown, as in transformers."""


@dataclass(frozen=True)
class Clip:
    """A video file, or a list of frames."""

    frames: int
    fps: float | None
    """Frames per second; None for a list of frames, which are all read."""
    width: int
    height: int
    read: Callable[[Sequence[int]], Iterator[Array]]
    """Decodes the frames with these ascending numbers to RGB, uint8 [3, height, width]. Raises MediaError."""

    def chosen(self, sample: Callable[[int, float], Sequence[int]]) -> list[int]:
        """Return the numbers of the frames that `sample` selects. Raises MediaError."""
        if self.fps is None:
            return list(range(self.frames))
        found = list(sample(self.frames, self.fps))
        if not found:
            raise MediaError(f"the video has {self.frames} frames, from which the model cannot select any")
        return found

    @property
    def rate(self) -> float:
        """Frames per second."""
        return DEFAULT_FPS if self.fps is None else self.fps

    def sampled_rate(self, chosen: Sequence[int]) -> float:
        """Return the mean frames per second of the selected frames."""
        return self.rate if self.fps is None else len(chosen) / self.frames * self.fps


def evenly(frames: int, count: int) -> list[int]:
    """Return the numbers of `count` of the frames, at equal distances."""
    return [at * frames // count for at in range(count)]


def wanted_frames(count: int | None, wanted_fps: float | None, frames: int, fps: float) -> int:
    """Return the number of frames to read, at least one: `count`, else as many as `wanted_fps` gives, else all."""
    if count is not None:
        return count
    return frames if wanted_fps is None else max(1, int(frames / fps * wanted_fps))
