"""Images of a request, before and after they are processed."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.media.processed import Processed

DONE, REFUSED, EXHAUSTED = b"\0", b"\1", b"\2"
"""First byte of a reply of image_process.py."""


@dataclass(frozen=True)
class ImagePart:
    """An image in a request."""

    url: str
    where: str
    """Path of its field in the request, such as `messages.1.content.0.image_url`."""


Images = Mapping[str, Processed]
"""Processed images by URL."""
