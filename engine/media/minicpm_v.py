"""MiniCPM-V 4.6 and MiniCPM-OCR: an image scaled to an area, and slices of it if it is larger.

Source: transformers processing_minicpmv4_6.py, image_processing_pil_minicpmv4_6.py, image_processing_minicpm_ocr.py.
The latter resizes with the arithmetic of torchvision.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import Any

import numpy as np
from PIL import Image

from engine.media.frames import resized_frame
from engine.media.pixels import BICUBIC, HALF, Normalisation, Size, channels, check_size, read_normalisation, resized
from engine.media.processed import Tokens
from engine.media.processor import Array, Layout, Processor
from engine.media.settings import Files

DEFAULTS: dict[str, Any] = {
    **{"resample": BICUBIC, "image_mean": HALF, "image_std": HALF, "do_resize": True, "max_slice_nums": 9},
    **{"scale_resolution": 448, "patch_size": 14, "slice_mode": True, "use_image_id": True},
    "small_image_upsize": "always",
}
SIDES = {"4x": 2, "16x": 4}
"""Patches of a token's side."""
MAX_SLICES = 1 << 10


def rounded_to(length: float, unit: int) -> int:
    """Return the multiple of a unit that is closest to a length, at least one unit."""
    return max(round(length / unit) * unit, unit)


@dataclass(frozen=True)
class MiniCPMV:
    """Image processor of MiniCPM-V and MiniCPM-OCR."""

    tokens: Tokens
    around: tuple[str, str]
    """Texts before and after the tokens of an image."""
    around_slice: tuple[str, str]
    edge: int
    """Side of a square with the area to which images and slices are scaled."""
    patch_size: int
    side: int
    """Patches of a token's side."""
    most: int
    """Largest number of slices; 0: images are not divided."""
    upsizes: bool
    """Images that are not divided are enlarged."""
    by_torch: bool
    resample: int
    normalisation: Normalisation

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of slices, 0 for an image that is not divided."""
        ratio, count = log(width / height), ceil(width * height / self.edge**2)
        multiple = min(count, self.most)
        if multiple <= 1:
            return 0, 0
        best, least = (1, 1), float("inf")
        for slices in (multiple - 1, multiple, multiple + 1):
            if slices == 1 or slices > self.most:
                continue
            for rows in range(1, slices + 1):
                if slices % rows:
                    continue
                error = abs(ratio - log(slices // rows / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, slices // rows), error
        return best

    def _fitted(self, width: float, height: float, *, enlarges: bool) -> Size:
        if height * width > self.edge**2 or enlarges:
            ratio = width / height
            height = int(self.edge / sqrt(ratio))
            width = int(height * ratio)
        unit = self.patch_size * self.side
        return rounded_to(height, unit), rounded_to(width, unit)

    def _sizes(self, width: int, height: int) -> tuple[tuple[int, int], Size, Size]:
        """Return rows and columns of slices, and the sizes of the whole image and of a slice."""
        rows, columns = self._grid(width, height)
        whole = self._fitted(width, height, enlarges=not rows and self.upsizes)
        if not rows:
            return (0, 0), whole, (0, 0)
        wide, high = rounded_to(width, columns) / columns, rounded_to(height, rows) / rows
        return (rows, columns), whole, self._fitted(wide, high, enlarges=True)

    def num_pixels(self, width: int, height: int) -> int:
        """Return the number of pixels of an image's parts."""
        (rows, columns), whole, each = self._sizes(width, height)
        return whole[0] * whole[1] + rows * columns * each[0] * each[1]

    def _count(self, size: Size) -> int:
        return size[0] // self.patch_size * (size[1] // self.patch_size) // self.side**2

    def layout(self, width: int, height: int) -> Layout:
        (rows, columns), whole, each = self._sizes(width, height)
        begin, end = self.around_slice
        slices = "\n".join([f"{begin}{self.tokens.image}{end}" * columns] * rows)
        text = f"{self.around[0]}{self.tokens.image}{self.around[1]}{slices}"
        return Layout(text, (self._count(whole), *(self._count(each),) * (rows * columns)))

    def tensors(self, image: Image.Image) -> dict[str, Array]:
        return self.packed("pixel_values", *self.parts(*image.size, lambda size: self._resized(image, size)))

    def parts(self, width: int, height: int, resize: Callable[[Size], Array]) -> tuple[list[Array], list[Size]]:
        """Return the patches of an image and of its slices, uint8 [3, patch_size, patches · patch_size] each, and the
        sizes of these parts. resize: returns the image in a size, [3, height, width]."""
        (rows, columns), whole, each = self._sizes(width, height)
        strips, sizes = [self._strip(resize(whole))], [whole]
        if rows:
            large = resize((rows * each[0], columns * each[1]))
            cut = large.reshape(3, rows, each[0], columns, each[1]).transpose(1, 3, 0, 2, 4)
            strips += [self._strip(part) for row in cut for part in row]
            sizes += [each] * (rows * columns)
        return strips, sizes

    def packed(self, name: str, strips: list[Array], sizes: list[Size]) -> dict[str, Array]:
        """Return the tensors of the tower. name: of the pixels."""
        pixels = self.normalisation.apply(np.concatenate(strips, 2))[None]
        return {name: pixels, "target_sizes": np.array(sizes, np.int64) // self.patch_size}

    def _resized(self, image: Image.Image, size: Size) -> Array:
        if not self.by_torch:
            return channels(resized(image, size, self.resample))
        check_size(size, image)
        return resized_frame(channels(image), size, self.resample)

    def _strip(self, pixels: Array) -> Array:
        """Return the patches side by side, [3, patch_size, patches · patch_size]."""
        size = self.patch_size
        rows, columns = (edge // size for edge in pixels.shape[1:])
        return pixels.reshape(3, rows, size, columns, size).transpose(0, 2, 1, 3, 4).reshape(3, size, -1)


def declare(files: Files) -> Processor:
    return read_slices(files, files.settings(DEFAULTS), files.token("image_token", "<|image_pad|>"))


def read_slices(files: Files, settings: Mapping[str, Any], token: str) -> MiniCPMV:
    """Return the processor of images with this token, or of frames. Raises ValueError for invalid settings."""
    is_ocr = files.config.get("model_type") == "minicpm_ocr"
    usual = "4x" if is_ocr else "16x"
    mode, own = settings.get("downsample_mode") or usual, files.config.get("downsample_mode") or usual
    if mode != own or mode not in SIDES:
        raise ValueError(f"downsample_mode is {mode} of the processor and {own} of the model; both must be 4x or 16x")
    edge, patch, most = (int(settings[name]) for name in ("scale_resolution", "patch_size", "max_slice_nums"))
    if not settings["do_resize"] or patch < 1 or edge < patch or not 1 <= most <= MAX_SLICES:
        raise ValueError(
            f"do_resize must be true, max_slice_nums from 1 to {MAX_SLICES}, and scale_resolution at least patch_size"
        )
    if settings["small_image_upsize"] not in ("always", "never"):
        raise ValueError(f"small_image_upsize is {settings['small_image_upsize']}; supported are always and never")
    around = files.token("image_start_token", "<image>"), files.token("image_end_token", "</image>")
    number = files.token("image_id_start_token", "<image_id>"), files.token("image_id_end_token", "</image_id>")
    return MiniCPMV(
        Tokens(token, token, number=number if settings["use_image_id"] else None),
        around,
        (files.token("slice_start_token", "<slice>"), files.token("slice_end_token", "</slice>")),
        edge,
        patch,
        SIDES[mode],
        most if settings["slice_mode"] else 0,
        settings["small_image_upsize"] == "always",
        is_ocr,
        int(settings["resample"]),
        read_normalisation(settings),
    )
