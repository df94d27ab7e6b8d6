"""Interface of image processors, and the result of one image."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image

from engine.api.media import MediaTensor
from engine.media.processed import Processed, Tokens

Array = np.ndarray[Any, Any]

MAX_PIXELS = 1 << 26
"""Maximum pixels of an image after resizing. Settings of checkpoints stay far below; extreme aspect ratios do not."""


@dataclass(frozen=True)
class Layout:
    """Text that replaces the placeholder of one image. It has one image token for each run of equal image tokens."""

    text: str
    runs: tuple[int, ...]
    """Number of image tokens in each run."""

    @property
    def count(self) -> int:
        """Number of tokens whose embeddings the tower computes."""
        return sum(self.runs)


class Processor(Protocol):
    """Image processor of a checkpoint."""

    @property
    def tokens(self) -> Tokens: ...

    def layout(self, width: int, height: int) -> Layout:
        """Return the prompt text of an image of this size. Raises ImageError if the model does not accept the size."""

    def tensors(self, image: Image.Image) -> Mapping[str, Array]:
        """Return the tower's input for an RGB image: float32 and int64 arrays, with the names and shapes that
        transformers' processor returns for this image alone. Raises ImageError."""


def process(processor: Processor, image: Image.Image) -> Processed:
    """Process an RGB image. Raises ImageError."""
    layout = processor.layout(*image.size)
    tensors = {name: _media_tensor(array) for name, array in processor.tensors(image).items()}
    return Processed(_digest(tensors), layout.text, layout.runs, tensors)


def _media_tensor(array: Array) -> MediaTensor:
    if array.dtype == np.float32:
        return MediaTensor("float32", array.shape, array.astype("<f4", copy=False).tobytes())
    assert array.dtype == np.int64, f"tensors are float32 or int64, not {array.dtype}"
    return MediaTensor("int64", array.shape, array.astype("<i8", copy=False).tobytes())


def _digest(tensors: Mapping[str, MediaTensor]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        digest.update(tensor.data)
    return digest.digest()
