"""Values of processed media. Needs neither numpy nor Pillow, so that the gateway can use it for messages."""

from dataclasses import dataclass

import msgspec

from engine.api.media import MediaTensor, Modality


class MediaError(Exception):
    """The image, video or audio cannot be decoded or processed. The message is meant for the client."""


@dataclass(frozen=True)
class Tokens:
    """Texts of special tokens."""

    placeholder: str
    """Text that the chat template writes for an item."""
    image: str
    """Token that represents one embedding of the tower in the expanded prompt."""


@dataclass(frozen=True)
class Known:
    """How items of one modality appear in prompts."""

    tokens: Tokens
    token_id: int
    """ID of `tokens.image`."""


class Processed(msgspec.Struct, frozen=True):
    """One processed image, video or audio clip."""

    digest: bytes  # SHA-256 of the tensors with their names, types and shapes
    text: str
    """Text that replaces the placeholder, with one media token for each run of equal media tokens."""
    runs: tuple[int, ...]
    """Number of media tokens in each run."""
    tensors: dict[str, MediaTensor]
    kind: Modality = "image"  # in the request
    modality: Modality = "image"  # for the engine: some models read a video as a series of images
    seconds: float = 0.0  # duration of an audio clip
    source: dict[str, MediaTensor] = {}
    """Tensors of a file of its embeddings, besides these (engine/media/embeddings.py)."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(len(tensor.data) for tensor in self.tensors.values())
