"""Image processors of multimodal models: from a decoded image to tensors for the tower and text for the prompt.

Each family is one file with a `declare` function, which reads the checkpoint's settings and returns a `Processor`. The
results equal those of transformers' processors with the PIL back end. Needs only numpy and Pillow.
"""

from engine.media.decode import Limits, decode
from engine.media.families import read_processor
from engine.media.processor import ImageError, Processed, Processor, process
from engine.media.prompt import Expanded, MediaPromptError, expand

__all__ = [
    "Expanded",
    "ImageError",
    "Limits",
    "MediaPromptError",
    "Processed",
    "Processor",
    "decode",
    "expand",
    "process",
    "read_processor",
]
