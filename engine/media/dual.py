"""CLIP and SigLIP: an image is an input of its own, so it has no tokens in a prompt.

Source: transformers image_processing_pil_clip.py, image_processing_pil_siglip.py.
"""

from dataclasses import dataclass

from PIL import Image

from engine.media.llava import KINDS, SIGLIP, Steps, read_steps
from engine.media.processed import Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

NO_TOKENS = Tokens("", "")
VECTOR = Layout("", (1,))


@dataclass(frozen=True)
class DualImage:
    """Image processor of CLIP and SigLIP."""

    steps: Steps
    tokens: Tokens = NO_TOKENS

    def layout(self, width: int, height: int) -> Layout:
        return VECTOR

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        return {"pixel_values": self.steps.apply(image)[None]}


def declare(files: Files) -> Processor:
    kinds = {**KINDS, "": SIGLIP} if files.config.get("model_type") == "siglip" else KINDS
    return DualImage(read_steps(files, kinds))
