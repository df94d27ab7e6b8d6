"""GLM-4.1V: patches as in Qwen2-VL, with a range of pixels for all frames of a patch together.

An image with an edge below one merged token is enlarged first. Source: transformers processing_glm4v.py,
image_processing_pil_glm4v.py.
"""

from engine.media.pixels import Size
from engine.media.processor import Processor
from engine.media.qwen_vl import DEFAULTS, QwenVL, declare_patches, smart_resize
from engine.media.settings import Files


class Glm4V(QwenVL):
    def _size(self, width: int, height: int) -> Size:
        factor = self.patch_size * self.merge_size
        if self.pixels is None:
            return super()._size(width, height)
        scale = max(factor / height, factor / width)
        if scale > 1:
            height, width = int(height * scale), int(width * scale)
        least, most = (count / self.frames for count in self.pixels)
        return smart_resize(height, width, factor, least, most)


def declare(files: Files) -> Processor:
    size = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000}
    return declare_patches(Glm4V, files, {**DEFAULTS, "size": size}, "<|image|>")
