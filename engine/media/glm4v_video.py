"""Videos of GLM-4.1V, GLM-4.5V and GLM-4.6V: each pair of frames is an image, and a text with its time follows it.

GLM-4.1V reads a number of frames a second; GLM-4.6V fewer, the longer the video is. Source: transformers
video_processing_glm4v.py, video_processing_glm46v.py, processing_glm4v.py, processing_glm46v.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import numpy as np

from engine.api.media import Modality
from engine.media.clip import Array, Clip
from engine.media.pixels import BICUBIC, CLIP_MEAN, CLIP_STD, read_normalisation
from engine.media.processed import Tokens
from engine.media.processor import Layout, VideoProcessor
from engine.media.qwen_video import QwenVideo
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **{"resample": BICUBIC, "do_resize": True, "do_sample_frames": True, "fps": 2, "max_duration": 300},
    **{"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000},
}
RATES = ((30.0, 3.0), (300.0, 1.0), (2400.0, 0.5))
"""GLM-4.6V: longest duration in seconds, and patches in a second of such a video."""
MOST_FRAMES = 640  # GLM-4.6V


@dataclass(frozen=True)
class Glm4vVideo(QwenVideo):
    """Video processor of GLM-4.1V and GLM-4.5V."""

    fps: float | None = None
    """Rate of frames; None to read all frames."""
    seconds: float = 300.0
    """Longer videos have as many frames as one with this duration."""

    @property
    def modality(self) -> Modality:
        return "image"

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        if self.fps is None:
            return range(frames)
        duration, last = frames / fps, frames - 1
        if duration <= self.seconds:
            count = max(floor(duration * self.fps), 1)
            found = [min(last, ceil(at * fps / self.fps)) for at in range(count)]
        else:
            count = int(self.seconds * self.fps)
            times = np.linspace(0, duration, count).tolist()
            found = list(range(frames)) if count >= frames else [min(last, ceil(time * fps)) for time in times]
        return even(list(dict.fromkeys(found)))

    def layout(self, chosen: Sequence[int], clip: Clip) -> Layout:
        rows, columns = (edge // self.patch_size for edge in self._size(clip, len(chosen)))
        count = ceil(len(chosen) / self.frames)
        pairs = chosen[::2]
        times = [pairs[min(at, len(pairs) - 1)] / clip.rate for at in range(count)]
        text = "".join(f"<|begin_of_image|>{self.tokens.image}<|end_of_image|>{self._time(each)}" for each in times)
        return Layout(text, (rows * columns // self.merge_size**2,) * count)

    def _time(self, seconds: float) -> str:
        return str(int(seconds))

    def tensors(self, frames: Iterable[Array], chosen: Sequence[int], clip: Clip) -> dict[str, Array]:
        found = super().tensors(frames, chosen, clip)
        ((count, rows, columns),) = found["video_grid_thw"].tolist()
        grids = np.array([[1, rows, columns]] * count, np.int64)
        return {"pixel_values": found["pixel_values_videos"], "image_grid_thw": grids}


class Glm46vVideo(Glm4vVideo):
    """Video processor of GLM-4.6V."""

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        if self.fps is None:
            return range(frames)
        duration = frames / fps
        read = min(duration, RATES[-1][0])
        rate = next(rate for longest, rate in RATES if read <= longest)
        count = min(int(read * rate * self.frames), MOST_FRAMES)
        if frames < count:
            found = spread(0, frames - 1, count)
        else:
            found = self._in_steps_of_time(frames, fps, 1 / (self.frames * rate), int(duration))
        if len(found) < count:
            found = spread(found[0], found[-1], count) if found else spread(0, max(frames - 1, 0), count)
        elif len(found) > count:
            found = spread(0, frames - 1, count)
        return even(list(dict.fromkeys(found)))

    @staticmethod
    def _in_steps_of_time(frames: int, fps: float, step: float, end: int) -> list[int]:
        """Return the first frame at or after each time, before `end` in seconds."""
        found: list[int] = []
        time, each = 0.0, 1 / fps
        for number in range(frames):
            if number * each >= time:
                time += step
                found.append(number)
                if time >= end:
                    break
        return found

    def _time(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


def spread(first: int, last: int, count: int) -> list[int]:
    found: list[int] = np.linspace(first, last, count, dtype=int).tolist()
    return found


def even(chosen: list[int]) -> list[int]:
    """Return the frames, the last one twice if their number is odd."""
    return chosen + chosen[-1:] if len(chosen) % 2 else chosen


def declare(files: Files) -> VideoProcessor:
    settings = files.video_settings(DEFAULTS)
    size = {**DEFAULTS["size"], **(settings["size"] if isinstance(settings["size"], dict) else {})}
    named = (
        settings.get("video_processor_type"),
        settings.get("processor_class"),
        files.processor.get("processor_class"),
    )
    is_new = files.config.get("model_type") == "glm46v" or any(str(name).startswith("Glm46V") for name in named)
    return (Glm46vVideo if is_new else Glm4vVideo)(
        Tokens(files.token("video_token", "<|video|>"), files.token("image_token", "<|image|>")),
        begin="",
        end="",
        kind="qwen3",
        patch_size=int(settings["patch_size"]),
        frames=int(settings["temporal_patch_size"]),
        merge_size=int(settings["merge_size"]),
        pixels=(int(size["shortest_edge"]), int(size["longest_edge"])) if settings["do_resize"] else None,
        budget=0,
        resample=int(settings["resample"]),
        normalisation=read_normalisation(settings),
        sampling=None,
        fps=float(settings["fps"]) if settings["do_sample_frames"] else None,
        seconds=float(settings["max_duration"]),
    )
