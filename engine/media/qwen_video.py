"""Videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen-Omni.

A patch has several consecutive frames. Qwen2.5-VL positions tokens by the time of their frames; in prompts of Qwen3-VL,
a text with the time precedes the tokens of a pair of frames. Source: transformers video_processing_qwen2_vl.py,
video_processing_qwen3_vl.py, processing_qwen2_5_vl.py, processing_qwen3_vl.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, Literal

import numpy as np

from engine.api.media import Modality
from engine.media.clip import Array, Clip
from engine.media.frames import resized_frame
from engine.media.pixels import BICUBIC, CLIP_MEAN, CLIP_STD, HALF, Normalisation, Size, read_normalisation
from engine.media.processed import MediaError, Tokens
from engine.media.processor import MAX_PIXELS, Layout, VideoProcessor
from engine.media.qwen_vl import MAX_RATIO, patchify, smart_resize
from engine.media.settings import Files

_COMMON: dict[str, Any] = {
    **{"resample": BICUBIC, "do_resize": True, "temporal_patch_size": 2, "merge_size": 2},
    **{"min_frames": 4, "max_frames": 768, "num_frames": None, "cap_pixels_per_frame": False},
}
DEFAULTS_2: dict[str, Any] = {
    **{**_COMMON, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "patch_size": 14, "max_video_tokens": 128_000},
    **{"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "do_sample_frames": False},
}
DEFAULTS_3: dict[str, Any] = {
    **{**_COMMON, "image_mean": HALF, "image_std": HALF, "patch_size": 16, "max_video_tokens": 768, "fps": 2},
    **{"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}, "do_sample_frames": True},
}
BUDGET = 0.9  # share of the context that a video may fill, with cap_pixels_per_frame
OMNI_FPS = 2.0  # frames in a second of a video that Qwen-Omni reads
OMNI_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}  # Qwen3-Omni's processor sets it
LEAST = 1.05  # pixels of a frame, as a multiple of the shortest edge, with cap_pixels_per_frame

Kind = Literal["qwen2", "qwen2_5", "qwen3"]
KINDS: dict[str, Kind] = {
    **{"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2_5"},
    **{"qwen2_5_omni": "qwen2_5", "qwen2_5_omni_thinker": "qwen2_5"},
    **{"qwen3_omni_moe": "qwen2_5", "qwen3_omni_moe_thinker": "qwen2_5"},
}
"""Kind by model type; others are of the kind qwen3."""


def stepped(frames: int, count: float) -> list[int]:
    """Return the numbers below `frames` in steps of frames / count, as `torch.arange(…).int()` does."""
    step = frames / count
    found: list[int] = (np.arange(ceil(frames / step)) * step).astype(np.float32).astype(np.int64).tolist()
    return found


@dataclass(frozen=True)
class Sampling:
    """Selection of frames."""

    fps: float | None
    count: int | None
    """Number of frames."""
    least: int
    most: int


@dataclass(frozen=True)
class QwenVideo:
    """Video processor of Qwen's models."""

    tokens: Tokens
    begin: str
    end: str
    kind: Kind
    patch_size: int
    frames: int
    """Frames of a patch."""
    merge_size: int
    pixels: tuple[int, int] | None
    """Least and most pixels, or None if frames are not resized: of a frame; for Qwen3-VL, of all frames."""
    budget: int
    """Most tokens of a video; for Qwen3-VL, of a frame. 0: no limit."""
    resample: int
    normalisation: Normalisation
    sampling: Sampling | None
    rate: float | None = None
    """Assumed frames per second, if no limit leaves out frames. None: the mean rate of the selected frames."""

    @property
    def modality(self) -> Modality:
        return "video"

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        if self.sampling is None or (self.sampling.fps is None and self.sampling.count is None):
            return range(frames)
        if self.kind == "qwen3":
            return self._evenly(self.sampling, frames, fps)
        return self._in_steps(self.sampling, frames, fps)

    def _evenly(self, sampling: Sampling, frames: int, fps: float) -> list[int]:
        count = sampling.count
        if count is None:
            assert sampling.fps is not None, "there is a number of frames or a rate"
            count = min(max(int(frames / fps * sampling.fps), sampling.least), sampling.most, frames)
        found: list[int] = np.linspace(0, frames - 1, count).round().astype(int).tolist()
        return found

    def _in_steps(self, sampling: Sampling, frames: int, fps: float) -> list[int]:
        unit = self.frames
        if sampling.count is not None:
            count = round(sampling.count / unit) * unit
        else:
            assert sampling.fps is not None, "there is a number of frames or a rate"
            most = floor(min(sampling.most, frames) / unit) * unit
            count = floor(min(max(frames / fps * sampling.fps, sampling.least), most, frames) / unit) * unit
        if count > frames:
            raise MediaError(f"the video has {frames} frames; {count} are required")
        return stepped(frames, count) if count else []

    def _size(self, clip: Clip, count: int) -> Size:
        factor = self.patch_size * self.merge_size
        if self.pixels is None:
            if clip.height % factor or clip.width % factor:
                raise MediaError(
                    f"edges of videos must be multiples of {factor} pixels, got {clip.width} x {clip.height}"
                )
            return clip.height, clip.width
        least, most = self.pixels
        if self.kind == "qwen3":
            if self.budget:
                each = max(min(self.budget * factor**2, most // count), int(least * LEAST))
                most = each * count
            return self._size_of_all(clip, count, least, most)
        if self.budget:
            total = int(self.budget * factor * factor * BUDGET)
            most = max(min(most, total * self.frames // count), int(least * LEAST))
        return smart_resize(clip.height, clip.width, factor, least, most)

    def _size_of_all(self, clip: Clip, count: int, least: int, most: int) -> Size:
        """Return multiples of the token's side near the frame's size, with a number of pixels of all frames in the
        range."""
        factor, height, width = self.patch_size * self.merge_size, clip.height, clip.width
        if count < self.frames:
            raise MediaError(f"the video has {count} frames; the model needs at least {self.frames}")
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > MAX_RATIO:
            raise MediaError(f"a video of {clip.width} x {clip.height} pixels has an aspect ratio above {MAX_RATIO}")
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        times = round(count / self.frames) * self.frames
        if times * rows * columns > most:
            scale = sqrt(count * height * width / most)
            rows = max(factor, floor(height / scale / factor) * factor)
            columns = max(factor, floor(width / scale / factor) * factor)
        elif times * rows * columns < least:
            scale = sqrt(least / (count * height * width))
            rows, columns = ceil(height * scale / factor) * factor, ceil(width * scale / factor) * factor
        return rows, columns

    def layout(self, chosen: Sequence[int], clip: Clip) -> Layout:
        rows, columns = (edge // self.patch_size for edge in self._size(clip, len(chosen)))
        each, count = rows * columns // self.merge_size**2, ceil(len(chosen) / self.frames)
        if self.kind != "qwen3":
            return Layout(self.tokens.image, (each * count,))
        times = [chosen[min(at, len(chosen) - 1)] / clip.rate for at in range(count * self.frames)]
        means = [(times[at] + times[at + self.frames - 1]) / 2 for at in range(0, len(times), self.frames)]
        text = "".join(f"<{mean:.1f} seconds>{self.begin}{self.tokens.image}{self.end}" for mean in means)
        return Layout(text, (each,) * count)

    def tensors(self, frames: Iterable[Array], chosen: Sequence[int], clip: Clip) -> dict[str, Array]:
        size = self._size(clip, len(chosen))
        if size[0] * size[1] * len(chosen) > 4 * MAX_PIXELS:
            raise MediaError(f"the video has {len(chosen)} frames of {size[1]} x {size[0]} pixels, which is too many")
        small = np.stack([resized_frame(frame, size, self.resample) for frame in frames])
        patches, grid = patchify(self.normalisation.apply(small), self.patch_size, self.merge_size, self.frames)
        found = {"pixel_values_videos": patches, "video_grid_thw": grid}
        if self.kind == "qwen2_5":
            rate = self.rate
            if rate is None or len(chosen) < len(clip.chosen(self.sample)):  # a limit of the server left out frames
                rate = clip.sampled_rate(chosen)
            found["second_per_grid_ts"] = np.array([self.frames / rate], np.float32)
        return found


def declare(files: Files) -> VideoProcessor:
    kind = KINDS.get(str(files.config.get("model_type")), "qwen3")
    defaults = DEFAULTS_3 if kind == "qwen3" else DEFAULTS_2
    settings = files.video_settings(defaults)
    if files.is_qwen3_omni:
        settings |= {"size": OMNI_SIZE, "min_pixels": None, "max_pixels": None, **files.given}
    size = {**defaults["size"], **(settings["size"] if isinstance(settings["size"], dict) else {})}
    least = int(settings.get("min_pixels") or size["shortest_edge"])
    most = int(settings.get("max_pixels") or size["longest_edge"])
    if files.is_omni:
        settings = {**settings, "do_sample_frames": True, "fps": settings.get("fps") or OMNI_FPS}
        if settings["num_frames"] is not None:
            settings["fps"] = None
    is_old = files.is_omni and not files.is_qwen3_omni
    token = files.token("video_token", "<|VIDEO|>" if is_old else "<|video_pad|>")
    begin = files.token("vision_start_token", "<|vision_start|>")
    end = files.token("vision_end_token", "<|vision_end|>")
    fps, count = settings.get("fps"), settings["num_frames"]
    return QwenVideo(
        Tokens(token, token),
        begin,
        end,
        kind,
        int(settings["patch_size"]),
        int(settings["temporal_patch_size"]),
        int(settings["merge_size"]),
        (least, most) if settings["do_resize"] else None,
        int(settings["max_video_tokens"]) if settings["cap_pixels_per_frame"] else 0,
        int(settings["resample"]),
        read_normalisation(settings),
        Sampling(
            None if fps is None else float(fps),
            None if count is None else int(count),
            int(settings["min_frames"]),
            int(settings["max_frames"]),
        )
        if settings["do_sample_frames"]
        else None,
        rate=float(settings["fps"]) if files.is_omni and settings["fps"] is not None else None,
    )
