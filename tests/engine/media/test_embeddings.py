"""Files with embeddings of items: written and read again, and files that are damaged or hostile."""

import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load, save

from engine.api.media import Modality
from engine.media.clip import Clip
from engine.media.embeddings import Outline, SizeLimits, outline_of, read, write
from engine.media.families import Processors, read_processors
from engine.media.processed import MediaError, Processed
from engine.media.processor import process, process_audio, process_video

LIMITS = SizeLimits(width=3, max_pixels=10_000, max_frames=8, max_seconds=2.0)
PATCHES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "image_mean": [0.5] * 3}
PATCHES |= {"image_std": [0.5] * 3, "size": {"shortest_edge": 256, "longest_edge": 2304}}


@pytest.fixture
def processors(tmp_path: Path) -> Processors:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PATCHES))
    return read_processors(tmp_path)


def rows_of(item: Processed, width: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=(sum(item.runs), width)).astype(np.float32)


def opened(data: bytes, processors: Processors, kind: Modality = "image", limits: SizeLimits = LIMITS) -> Processed:
    def outline(kind: Modality, size: tuple[int, ...], fps: float | None) -> Outline:
        return outline_of(processors, kind, size, fps, limits.max_frames)

    return read(data, kind, limits, outline)


def file_of(item: Processed) -> bytes:
    rows = rows_of(item)
    return write(rows.tobytes(), "float32", rows.shape, item.source)


def picture(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def test_an_image_has_the_same_prompt_and_grid(processors: Processors) -> None:
    """Files are in the format of the library safetensors."""
    assert processors.image is not None
    item = process(processors.image, picture())
    data, rows = file_of(item), rows_of(item)
    assert np.array_equal(load(data)["embeddings"], rows) and load(data)["size"].tolist() == [30, 40]
    found = opened(data, processors)
    assert (found.text, found.runs, found.kind) == (item.text, item.runs, "image")
    assert found.tensors["image_grid_thw"] == item.tensors["image_grid_thw"]
    assert found.tensors["embeddings"].data == rows.tobytes() and found.digest != item.digest
    assert opened(save({"size": np.array([30, 40]), "embeddings": rows}), processors) == found


@pytest.mark.parametrize(("dtype", "bits"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_numbers_of_16_bits_are_read(processors: Processors, dtype: str, bits: torch.dtype) -> None:
    assert processors.image is not None
    item = process(processors.image, picture())
    short = torch.from_numpy(rows_of(item)).to(bits)
    data = write(short.view(torch.int16).numpy().tobytes(), dtype, short.shape, item.source)
    found = np.frombuffer(opened(data, processors).tensors["embeddings"].data, np.float32)
    assert np.array_equal(found, short.float().flatten().numpy())


@pytest.mark.parametrize("fps", [29.97, None])
def test_a_video_has_the_same_prompt_and_grid(processors: Processors, fps: float | None) -> None:
    """The times of frames are in the prompt."""
    assert processors.video is not None
    frames = np.zeros((6, 3, 24, 32), np.uint8)
    clip = Clip(40 if fps else 6, fps, 32, 24, lambda chosen: (frames[0] for _ in chosen))
    item = process_video(processors.video, clip, 8)
    found = opened(file_of(item), processors, "video")
    assert (found.text, found.runs, found.modality) == (item.text, item.runs, item.modality)
    assert found.tensors["video_grid_thw"] == item.tensors["video_grid_thw"]


def test_audio_has_the_same_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_audio"}))
    settings = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    processors = read_processors(tmp_path)
    assert processors.audio is not None
    item = process_audio(processors.audio, np.zeros(20_000, np.float32))
    found = opened(file_of(item), processors, "audio")
    assert (found.text, found.runs, found.kind, found.seconds) == (item.text, item.runs, "audio", item.seconds)
    with pytest.raises(MediaError, match=r"3\.1 s; the limit is 2 s"):
        opened(save({"size": np.array([50_000]), "embeddings": rows_of(item)}), processors, "audio")


GOOD = np.zeros((20, 3), np.float32)
SIZE = np.array([30, 40])
HEADER = b'{"embeddings":{"dtype":"F32","shape":[20,3],"data_offsets":[0,240]}}'
TRUE = b'{"embeddings":{"dtype":"F32","shape":[true,true],"data_offsets":[0,4]}}'
WRONG: dict[str, tuple[bytes | Mapping[str, np.ndarray[Any, Any]], str]] = {
    "empty": (b"", "format safetensors"),
    "pickle": (pickle.dumps(GOOD), "torch.save"),
    "zip": (b"PK\3\4" + bytes(100), "torch.save"),
    "long header": (struct.pack("<Q", 1 << 40) + bytes(100), "format safetensors"),
    "no JSON": (struct.pack("<Q", 4) + b"abcd" + bytes(100), "not a JSON object"),
    "no UTF-8": (struct.pack("<Q", 4) + b'{"\xff"' + bytes(100), "not a JSON object"),
    "list": (struct.pack("<Q", 2) + b"[]" + bytes(100), "not a JSON object"),
    "deep": (struct.pack("<Q", 9000) + b"[" * 9000, "not a JSON object"),
    "booleans": (struct.pack("<Q", len(TRUE)) + TRUE + bytes(4), "damaged at the tensor embeddings"),
    "truncated": (struct.pack("<Q", len(HEADER)) + HEADER + bytes(239), "damaged at the tensor embeddings"),
    "offsets": (struct.pack("<Q", 60) + b'{"embeddings":{"dtype":"F32","shape":[1],"data_offsets":[9]}}'[:60], "JSON"),
    "no embeddings": ({"size": SIZE}, "no tensor `embeddings`"),
    "no size": ({"embeddings": GOOD}, "no tensor `size`"),
    "short size": ({"embeddings": GOOD, "size": SIZE[:1]}, "no tensor `size` of 2"),
    "zero size": ({"embeddings": GOOD, "size": SIZE * 0}, "positive integers"),
    "integers": ({"embeddings": GOOD.astype(np.int64), "size": SIZE}, "no tensor `embeddings`"),
    "one axis": ({"embeddings": GOOD[0], "size": SIZE}, "no tensor `embeddings`"),
    "width": ({"embeddings": GOOD[:, :2], "size": SIZE}, "2 columns; those of this model have 3"),
    "rows": ({"embeddings": GOOD[:19], "size": SIZE}, "19 embeddings; the image has 20 tokens"),
    "not a number": ({"embeddings": GOOD + np.nan, "size": SIZE}, "not finite"),
    "infinite": ({"embeddings": GOOD + np.inf, "size": SIZE}, "not finite"),
    "pixels": ({"embeddings": GOOD, "size": SIZE * 1000}, "the limit is 10,000 pixels"),
    "huge": ({"embeddings": GOOD, "size": np.array([1 << 62, 1 << 62])}, "the limit is 10,000 pixels"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused(processors: Processors, name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(MediaError, match=message):
        opened(given if isinstance(given, bytes) else save(dict(given)), processors)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fps": np.array([30, 0])}, "two positive integers"),
        ({"fps": np.array([30.0], np.float32)}, "two positive integers"),
        ({"size": np.array([9, 24, 32])}, "9 frames; the limit is 8"),
        ({"size": np.array([90, 24, 32]), "fps": np.array([30, 1])}, r"3\.0 s; the limit is 2 s"),
        ({"size": np.array([50, 24, 32]), "fps": np.array([30, 1])}, "the same checkpoint and limits.media.frames"),
    ],
)
def test_videos_beyond_the_limits_are_refused(
    processors: Processors, more: Mapping[str, np.ndarray[Any, Any]], message: str
) -> None:
    with pytest.raises(MediaError, match=message):
        opened(save({"embeddings": GOOD, "size": np.array([6, 24, 32]), **more}), processors, "video")
