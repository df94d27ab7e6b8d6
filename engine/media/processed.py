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
    number: tuple[str, str] | None = None
    """Texts around the number that precedes each item; numbers start from 0 in each prompt, for each kind of item."""
    rewrites: tuple[tuple[str, str], ...] = ()
    """Patterns and their replacements, which are applied in order to an expanded prompt."""
    beside_images: bool = False
    """The embeddings of a clip depend on whether its prompt has images (Phi-4-multimodal)."""


@dataclass(frozen=True)
class Known:
    """How items of one modality appear in prompts."""

    tokens: Tokens
    token_id: int
    """ID of `tokens.image`."""


class ProcessedPart(msgspec.Struct, frozen=True):
    """A piece of a video with its sound, which is an item for the engine."""

    modality: Modality
    digest: bytes
    tensors: dict[str, MediaTensor]


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

    parts: tuple[ProcessedPart, ...] = ()
    """For each run, its item, in place of `tensors`."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        each = (self.tensors, *(part.tensors for part in self.parts))
        return sum(len(tensor.data) for tensors in each for tensor in tensors.values())

    @property
    def run_kinds(self) -> tuple[Modality, ...]:
        """Modality whose token each run has."""
        return tuple(part.modality for part in self.parts) or (self.kind,) * len(self.runs)
