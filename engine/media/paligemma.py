"""PaliGemma: a square image of a fixed number of tokens.

Source: transformers processing_paligemma.py, image_processing_pil_siglip.py.
"""

from dataclasses import dataclass

from PIL import Image

from engine.media.llava import SIGLIP, Steps, read_steps
from engine.media.processed import Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files


@dataclass(frozen=True)
class PaliGemma:
    """Processor of PaliGemma."""

    tokens: Tokens
    steps: Steps
    length: int

    def layout(self, width: int, height: int) -> Layout:
        return Layout(self.tokens.image, (self.length,))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        return {"pixel_values": self.steps.apply(image)[None]}


def declare(files: Files) -> Processor:
    image = files.token("image_token", "<image>")
    length = files.image.get("image_seq_length") or files.processor.get("image_seq_length")
    return PaliGemma(
        Tokens(image, image), read_steps(files, {"": SIGLIP, "SiglipImageProcessor": SIGLIP}), int(length or 256)
    )
