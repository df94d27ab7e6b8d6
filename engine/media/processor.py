"""Interfaces of processors of images, videos and audio, and the result of one item."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
from PIL import Image

from engine.api.media import MediaTensor, Modality
from engine.media.clip import Array, Clip
from engine.media.processed import Processed, Tokens
from engine.media.spectrogram import SAMPLE_RATE

__all__ = ["Array", "AudioProcessor", "Layout", "Processor", "VideoProcessor"]

MAX_PIXELS = 1 << 25
"""Maximum pixels of an image after resizing. Settings of checkpoints stay far below; extreme aspect ratios do not."""


@dataclass(frozen=True)
class Layout:
    """Text that replaces the placeholder of one item. It has one media token for each run of equal media tokens."""

    text: str
    runs: tuple[int, ...]
    """Number of media tokens in each run."""

    @property
    def count(self) -> int:
        """Number of tokens whose embeddings the tower computes."""
        return sum(self.runs)


class Processor(Protocol):
    """Image processor of a checkpoint."""

    @property
    def tokens(self) -> Tokens: ...

    def layout(self, width: int, height: int) -> Layout:
        """Return the prompt text of an image of this size. Raises MediaError if the model does not accept the size."""

    def tensors(self, image: Image.Image) -> Mapping[str, Array]:
        """Return the tower's input for an RGB image: float32 and int64 arrays, with the names and shapes that
        transformers' processor returns for this image alone. Raises MediaError."""


class VideoProcessor(Protocol):
    """Video processor of a checkpoint."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def modality(self) -> Modality:
        """Modality of the item for the engine."""

    def sample(self, frames: int, fps: float) -> Sequence[int]:
        """Return the ascending numbers of the frames that are read, of a video with this many. Raises MediaError."""

    def layout(self, chosen: Sequence[int], clip: Clip) -> Layout:
        """Return the prompt text of these frames. Raises MediaError if the model does not accept their size."""

    def tensors(self, frames: Iterable[Array], chosen: Sequence[int], clip: Clip) -> Mapping[str, Array]:
        """Return the tower's input for RGB frames, uint8 [3, height, width], as `Processor.tensors`."""


class AudioProcessor(Protocol):
    """Audio processor of a checkpoint."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def max_seconds(self) -> float:
        """Duration of the longest clip."""

    def layout(self, samples: int) -> Layout:
        """Return the prompt text of a clip with this many samples. Raises MediaError if it is too short."""

    def tensors(self, samples: Array) -> Mapping[str, Array]:
        """Return the tower's input for mono samples at 16 kHz, float32, as `Processor.tensors`."""


def process(processor: Processor, image: Image.Image) -> Processed:
    """Process an RGB image. Raises MediaError."""
    layout = processor.layout(*image.size)
    tensors = _media_tensors(processor.tensors(image))
    return Processed(digest_of(tensors), layout.text, layout.runs, tensors, source=_source(image.height, image.width))


def process_video(processor: VideoProcessor, clip: Clip, max_frames: int) -> Processed:
    """Process a video, of which at most `max_frames` frames are read. Raises MediaError."""
    chosen = clip.chosen(processor.sample)
    if len(chosen) > max_frames:
        chosen = [chosen[at * len(chosen) // max_frames] for at in range(max_frames)]
    layout = processor.layout(chosen, clip)
    tensors = _media_tensors(processor.tensors(clip.read(chosen), chosen, clip))
    source = _source(clip.frames, clip.height, clip.width, fps=clip.fps)
    return Processed(digest_of(tensors), layout.text, layout.runs, tensors, "video", processor.modality, source=source)


def process_audio(processor: AudioProcessor, samples: Array) -> Processed:
    """Process mono samples at 16 kHz. Raises MediaError."""
    layout = processor.layout(len(samples))
    tensors = _media_tensors(processor.tensors(samples))
    seconds, source = len(samples) / SAMPLE_RATE, _source(len(samples))
    return Processed(digest_of(tensors), layout.text, layout.runs, tensors, "audio", "audio", seconds, source)


def _source(*size: int, fps: float | None = None) -> dict[str, MediaTensor]:
    """Return the tensors of a file with the embeddings of an item (engine/media/embeddings.py), besides these."""
    found = {"size": media_tensor(np.array(size, np.int64))}
    if fps is not None:
        rate = Fraction(fps).limit_denominator(1 << 53)
        found["fps"] = media_tensor(np.array(rate.as_integer_ratio(), np.int64))
    return found


def _media_tensors(arrays: Mapping[str, Array]) -> dict[str, MediaTensor]:
    return {name: media_tensor(array) for name, array in arrays.items()}


def media_tensor(array: Array) -> MediaTensor:
    """Return an array of float32 or int64 as a part of a message."""
    if array.dtype == np.float32:
        return MediaTensor("float32", array.shape, array.astype("<f4", copy=False).tobytes())
    assert array.dtype == np.int64, f"tensors are float32 or int64, not {array.dtype}"
    return MediaTensor("int64", array.shape, array.astype("<i8", copy=False).tobytes())


def digest_of(tensors: Mapping[str, MediaTensor]) -> bytes:
    """Return the digest of an item with these tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        digest.update(tensor.data)
    return digest.digest()
