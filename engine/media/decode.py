"""Decoding of image files to RGB, with limits.

Orientation of EXIF is applied, the first frame of an animation is used, and transparent pixels are blended onto white,
as transformers does.
"""

import io
import warnings
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageOps, UnidentifiedImageError

from engine.media.processed import MediaError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF")
"""Formats that are decoded. Others of Pillow are rare, run external programs or contain several files."""


@dataclass(frozen=True)
class Limits:
    """Limits of one image file."""

    max_bytes: int = 32 << 20
    max_pixels: int = 50_000_000


def decode(data: bytes, limits: Limits = Limits()) -> Image.Image:
    """Return an RGB image. Raises MediaError for a file that is too large, unknown or damaged."""
    if len(data) > limits.max_bytes:
        raise MediaError(f"the file has {len(data):,} bytes; the limit is {limits.max_bytes:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > limits.max_pixels:
                    raise MediaError(
                        f"the image has {width} x {height} pixels; the limit is {limits.max_pixels:,} pixels"
                    )
                if width < 1 or height < 1:
                    raise MediaError("the image has no pixels")
                image.load()
                return to_rgb(_oriented(image))
    except UnidentifiedImageError:
        raise MediaError("the file is not an image in a known format (PNG, JPEG, WebP, GIF, BMP, TIFF, …)") from None
    except Image.DecompressionBombError:
        raise MediaError(f"the image has too many pixels; the limit is {limits.max_pixels:,} pixels") from None
    except MemoryError:
        raise MediaError("decoding the image takes too much memory") from None
    except MediaError:
        raise
    except Exception as error:  # decoders raise exceptions of any type for damaged files
        raise MediaError(f"the image file is damaged ({type(error).__name__})") from error


def _oriented(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # damaged metadata of an intact image
        return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the image in RGB, with transparent pixels blended onto white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    blended = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image.convert("RGBA"))
    return blended.convert("RGB")
