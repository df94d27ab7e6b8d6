"""Formats of pooled vectors: lists of floats, or bytes of several types.

numpy is imported only by the functions that need it; the default format works without it.
"""

import base64
import sys
from array import array
from functools import lru_cache
from typing import Any

from appliance.server.schema.pooling import EmbedDtype, Endianness
from engine.api.messages import Pooled

SIZES: dict[EmbedDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def floats(pooled: Pooled) -> list[float]:
    """Return all numbers as a flat list, each exactly equal to its float32 value."""
    values = array("f")
    values.frombytes(pooled.values)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def nested(pooled: Pooled) -> list[Any]:
    """Return the numbers as nested lists in their shape."""
    values = floats(pooled)
    if len(pooled.shape) == 1:
        return values
    rows, width = pooled.shape
    return [values[row * width : (row + 1) * width] for row in range(rows)]


def encoded(pooled: Pooled, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """Return the numbers as bytes of a type, rounded to the nearest, ties to even.

    Overflow in fp8_e4m3 becomes the largest value; in other types it becomes infinity.
    """
    data = pooled.values if dtype == "float32" else _narrowed(pooled.values, dtype)
    order = sys.byteorder if endianness == "native" else endianness
    size = SIZES[dtype]
    if order == "little" or size == 1:
        return data
    swapped = array("I" if size == 4 else "H")
    swapped.frombytes(data)
    swapped.byteswap()
    return swapped.tobytes()


def base64_text(pooled: Pooled, dtype: EmbedDtype = "float32", endianness: Endianness = "little") -> str:
    return base64.b64encode(encoded(pooled, dtype, endianness)).decode("ascii")


def _narrowed(values: bytes, dtype: EmbedDtype) -> bytes:
    """Convert little-endian float32 to a narrower little-endian type."""
    import numpy as np

    wide = np.frombuffer(values, "<f4")
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return wide.astype("<f2").tobytes()
    if dtype == "bfloat16":
        bits = wide.view("<u4").astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(wide), 0x7FC0 | (bits >> 16), rounded).astype("<u2").tobytes()
    return bytes(_fp8(wide, dtype))


@lru_cache
def _grid(dtype: EmbedDtype) -> Any:
    """Return the values of the positive codes of an 8-bit type, up to the first code that is not a number.

    A code is an exponent and a mantissa, so codes increase with their values.
    """
    import numpy as np

    mantissa, bias, end = (3, 7, 0x7F) if dtype == "fp8_e4m3" else (2, 15, 0x7C)
    codes = np.arange(end + 1)
    exponents, fractions = (codes >> mantissa).astype(float), (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    return np.where(exponents == 0, fractions * 2.0 ** (1 - bias), (1 + fractions) * 2.0 ** (exponents - bias))


def _fp8(wide: Any, dtype: EmbedDtype) -> Any:
    """Return the codes nearest to float32 numbers.

    The first code that is not a number is part of the grid: values that round to it overflow.
    """
    import numpy as np

    grid = _grid(dtype)
    end = len(grid) - 1
    middles = (grid[:-1] + grid[1:]) / 2
    size = np.abs(wide.astype(np.float64))
    below = np.searchsorted(middles, size, side="left")
    is_tie = (below < end) & (size == middles[np.minimum(below, end - 1)])
    nearest = below + (is_tie & (below % 2 == 1))
    nearest = np.where(nearest >= end, end - 1 if dtype == "fp8_e4m3" else end, nearest)
    nearest = np.where(np.isnan(wide), 0x7F, nearest)
    return (nearest | np.where(np.signbit(wide), 0x80, 0)).astype(np.uint8)
