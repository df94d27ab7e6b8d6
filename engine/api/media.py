"""Images, videos and audio of a request, as processed for the model's tower."""

from typing import Literal

import msgspec

Modality = Literal["image", "video", "audio"]
EMBEDDINGS = "embeddings"
"""Name of the tensor of an item whose embeddings another service computed: [tokens, width] float32."""

BESIDE_IMAGES = "beside_images"
"""Name of a tensor of clips in prompts with images, if their embeddings then differ (Phi-4-multimodal)."""

INTERLEAVED = "interleaved"
"""Name of a tensor of the pieces of a video with its sound, [1] int64: the number of the first pair of frames, or of
the first token of sound. Positions of the pieces, which take turns, are counted from the same one (Qwen2.5-Omni)."""


class MediaTensor(msgspec.Struct, frozen=True):
    """An array in row-major order."""

    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...]
    data: bytes  # little-endian


class MediaItem(msgspec.Struct, frozen=True):
    """One image, video or audio clip of a prompt."""

    modality: Modality
    digest: bytes
    """SHA-256 of everything that determines the embeddings: the tensors with their names, shapes and types. Items with
    the same digest share embeddings and cached blocks."""
    spans: tuple[tuple[int, int], ...]
    """(first position in the prompt, count) of the tokens whose embeddings the tower computes: ascending, disjoint."""
    tensors: dict[str, MediaTensor]
    """Input of the tower for this item alone, with the names of transformers' processors, such as `pixel_values`,
    `image_grid_thw` and `image_sizes`."""
