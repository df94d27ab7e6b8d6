"""Values of processed images. Needs neither numpy nor Pillow, so that the gateway can use it for messages."""

from dataclasses import dataclass

import msgspec

from engine.api.media import MediaTensor


class ImageError(Exception):
    """The image cannot be decoded or processed. The message is meant for the client."""


@dataclass(frozen=True)
class Tokens:
    """Texts of special tokens."""

    placeholder: str
    """Text that the chat template writes for an image."""
    image: str
    """Token that stands for one embedding of the tower in the expanded prompt."""


class Processed(msgspec.Struct, frozen=True):
    """One processed image."""

    digest: bytes  # SHA-256 of the tensors with their names, types and shapes
    text: str
    """Text that replaces the placeholder, with one image token for each run of equal image tokens."""
    runs: tuple[int, ...]
    """Number of image tokens in each run."""
    tensors: dict[str, MediaTensor]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(len(tensor.data) for tensor in self.tensors.values())
