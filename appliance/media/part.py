"""Media of a request, before and after they are processed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.api.media import Modality
from engine.media.processed import Processed

DONE, REFUSED, EXHAUSTED = b"\0", b"\1", b"\2"
"""First byte of a reply of media_process.py."""


@dataclass(frozen=True)
class MediaPart:
    """An image, video or audio clip in a request."""

    kind: Modality
    url: str
    """Empty for a reference to an item that was sent earlier."""
    where: str = field(compare=False)
    """Path of its field in the request, such as `messages.1.content.0.image_url`."""
    uuid: str = ""
    """Name that the client gives the item, to refer to it in later requests."""
    options: str = ""
    """Settings of the processor that the request replaces, as JSON."""
    format: str = ""
    """Format of an audio file, which must be the file's; empty: any."""
    embeddings: bool = False
    """The file has the embeddings of the item (engine/media/embeddings.py)."""

    @property
    def content(self) -> str:
        """Kind of the file's content, in keys of caches."""
        return f"embeddings of {self.kind}" if self.embeddings else self.kind


LoadedMedia = Mapping[MediaPart, Processed]
LoadedItem = Processed


def embeddings_file(embeddings: bytes, dtype: str, shape: Sequence[int], item: LoadedItem) -> bytes:
    """Return the file with the embeddings of an item, as `engine.media.embeddings.write`."""
    from engine.media.embeddings import write  # imports numpy and Pillow

    return write(embeddings, dtype, shape, item.source)
