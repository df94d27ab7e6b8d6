"""Messages to media_process.py."""

from typing import Literal

import msgspec


class JobLimits(msgspec.Struct, frozen=True):
    """Limits of every item, from `limits.media`."""

    max_bytes: int
    max_pixels: int
    frames: int
    seconds: float
    width: int = 0
    """Columns of the embeddings of an item, if another service may compute them."""


class Job(msgspec.Struct, frozen=True):
    """Files of one item."""

    kind: Literal["image", "video", "audio", "samples"]
    """samples: audio for speech recognition, which is only decoded."""
    files: tuple[bytes, ...]
    """One file; of a video, also its frames as image files."""
    options: str = ""
    """Settings of the processor that the request replaces, as JSON."""
    seconds: float = 0.0
    """Duration of the longest recording, for samples, and for audio that is transcribed."""
    embeddings: bool = False
    """The file has the embeddings of the item."""
