"""Files with the embeddings of an item, which a service of a model's towers computes for another one.

A file has the format safetensors, and these tensors:

embeddings  [rows, width], F32, F16 or BF16
size        I64: (height, width) of an image, (frames, height, width) of a video, (samples,) of audio at 16 kHz
fps         I64, (numerator, denominator) of the frames per second of a video; a list of frames has none

The text of the prompt and the grids follow from the size, as for an item of this size without content. The client of
the file can thus not make them differ from the embeddings.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from engine.api.media import EMBEDDINGS, MediaTensor, Modality
from engine.media.clip import Array, Clip
from engine.media.families import Processors
from engine.media.processed import MediaError, Processed
from engine.media.processor import digest_of, media_tensor, process, process_video
from engine.media.spectrogram import SAMPLE_RATE

MAX_HEADER = 1 << 16
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Tensors of a processed item that its positions in the text model depend on."""
TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}
SIZES: dict[Modality, int] = {"image": 2, "video": 3, "audio": 1}
"""Numbers in `size`."""
ITEM_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


@dataclass(frozen=True)
class SizeLimits:
    """Limits of the item whose embeddings a file has."""

    width: int  # of an embedding
    max_pixels: int  # of an image or frame
    max_frames: int  # of a video that are read
    max_seconds: float  # of a video or audio clip


@dataclass(frozen=True)
class Outline:
    """What follows from the size of an item."""

    text: str
    runs: tuple[int, ...]
    grids: dict[str, MediaTensor]
    modality: Modality
    seconds: float


Outlines = Callable[[Modality, tuple[int, ...], float | None], Outline]
"""Returns the outline of an item of a modality with this size and frame rate."""


def write(embeddings: bytes, dtype: str, shape: Sequence[int], source: Mapping[str, MediaTensor]) -> bytes:
    """Return the file. embeddings: little-endian numbers of this type. source: `Processed.source` of the item."""
    tensors = {EMBEDDINGS: (dtype, tuple(shape), embeddings)}
    tensors |= {name: (one.dtype, one.shape, one.data) for name, one in source.items()}
    header: dict[str, Any] = {}
    at = 0
    for name, (kind, own, data) in tensors.items():
        header[name] = {"dtype": ITEM_TYPES[kind], "shape": own, "data_offsets": (at, at + len(data))}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def read(data: bytes, kind: Modality, limits: SizeLimits, outlines: Outlines) -> Processed:
    """Return the item of a file. Raises MediaError."""
    tensors = _tensors(data)
    embeddings, size = tensors.get(EMBEDDINGS), tensors.get("size")
    if embeddings is None or embeddings.dtype != np.float32 or embeddings.ndim != 2:
        raise MediaError("the file has no tensor `embeddings` of shape [rows, width] in F32, F16 or BF16")
    if embeddings.shape[1] != limits.width:
        raise MediaError(f"the embeddings have {embeddings.shape[1]} columns; those of this model have {limits.width}")
    if not np.isfinite(embeddings).all():
        raise MediaError("the embeddings have values that are not finite")
    if size is None or size.dtype != np.int64 or size.shape != (SIZES[kind],):
        raise MediaError(
            f"the file has no tensor `size` of {SIZES[kind]} integers in I64, as of an item of type {kind}"
        )
    own, fps = tuple(size.tolist()), _rate(tensors.get("fps"))
    _check_size(own, kind, fps, limits)
    outline = outlines(kind, own, fps)
    expected = sum(outline.runs)
    if len(embeddings) != expected:
        raise MediaError(
            f"the file has {len(embeddings)} embeddings; the {kind} has {expected} tokens in this model. Both services "
            f"must have the same checkpoint{' and limits.media.frames' if kind == 'video' else ''}, and get the same "
            "mm_processor_kwargs and media_io_kwargs"
        )
    item = {EMBEDDINGS: media_tensor(embeddings), **outline.grids}
    return Processed(digest_of(item), outline.text, outline.runs, item, kind, outline.modality, outline.seconds)


def outline_of(
    processors: Processors, kind: Modality, size: tuple[int, ...], fps: float | None, max_frames: int
) -> Outline:
    """Return the outline of an item. Raises MediaError."""
    if kind == "audio":
        assert processors.audio is not None, "the gateway refuses audio otherwise"
        layout = processors.audio.layout(*size)
        return Outline(layout.text, layout.runs, {}, "audio", size[0] / SAMPLE_RATE)
    if kind == "image":
        assert processors.image is not None, "the gateway refuses images otherwise"
        height, width = size
        found = process(processors.image, Image.new("RGB", (width, height)))
    else:
        assert processors.video is not None, "the gateway refuses videos otherwise"
        found = process_video(processors.video, _blank_clip(size, fps), max_frames)
    grids = {name: one for name, one in found.tensors.items() if name in GRIDS}
    return Outline(found.text, found.runs, grids, found.modality, 0.0)


def _blank_clip(size: tuple[int, ...], fps: float | None) -> Clip:
    frames, height, width = size

    def frames_of(chosen: Sequence[int]) -> Iterator[Array]:
        for _ in chosen:
            yield np.zeros((3, height, width), np.uint8)

    return Clip(frames, fps, width, height, frames_of)


def _rate(fps: Array | None) -> float | None:
    if fps is None:
        return None
    if fps.dtype != np.int64 or fps.shape != (2,) or fps.min() < 1:
        raise MediaError("the tensor `fps` must have two positive integers in I64")
    return int(fps[0]) / int(fps[1])


def _check_size(size: tuple[int, ...], kind: Modality, fps: float | None, limits: SizeLimits) -> None:
    if min(size) < 1:
        raise MediaError("the tensor `size` must have positive integers")
    if kind == "audio":
        if size[0] > limits.max_seconds * SAMPLE_RATE:
            raise MediaError(f"the audio has {size[0] / SAMPLE_RATE:.1f} s; the limit is {limits.max_seconds:g} s")
        return
    height, width = size[-2:]
    if height * width > limits.max_pixels:
        raise MediaError(f"the {kind} has {width} x {height} pixels; the limit is {limits.max_pixels:,} pixels")
    if kind == "image":
        return
    if fps is None and size[0] > limits.max_frames:
        raise MediaError(f"the video has {size[0]} frames; the limit is {limits.max_frames} (limits.media.frames)")
    if fps is not None and size[0] > limits.max_seconds * fps:
        raise MediaError(f"the video has {size[0] / fps:.1f} s; the limit is {limits.max_seconds:g} s")


def _tensors(data: bytes) -> dict[str, Array]:
    """Return the tensors of a file in the format safetensors, with embeddings in float32. Raises MediaError."""
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    if not 2 <= length <= min(len(data) - 8, MAX_HEADER):
        if data[:2] == b"PK" or data[:1] == b"\x80":
            raise MediaError(
                "the file was written by torch.save, whose format can run code; send the format safetensors"
            )
        raise MediaError("the file does not have the format safetensors, or its header is too long")
    try:
        header = msgspec.json.decode(data[8 : 8 + length])
    except (ValueError, RecursionError):  # also for a text that is not UTF-8
        header = None
    if not isinstance(header, dict):
        raise MediaError("the header of the file is not a JSON object")
    names = (name for name in (EMBEDDINGS, "size", "fps") if name in header)
    return {name: _tensor(name, header[name], memoryview(data)[8 + length :]) for name in names}


def _tensor(name: str, entry: Any, data: memoryview) -> Array:
    wrong = MediaError(f"the header of the file is damaged at the tensor {name}")
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise wrong from None
    numbers = (*shape, begin, end)
    sized = len(shape) <= 2 and all(type(one) is int and 0 <= one < 1 << 40 for one in numbers)
    if not isinstance(kind, str) or kind not in TYPES or not sized:
        raise wrong
    dtype = np.dtype(TYPES[kind])
    if end > len(data) or end - begin != prod(shape) * dtype.itemsize:
        raise wrong
    array = np.frombuffer(data[begin:end], dtype).reshape(shape)
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if kind == "F16" else array
