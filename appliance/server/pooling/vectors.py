"""Pooled numbers as clients want them: lists of floats, or bytes of several types. numpy is loaded by those that need
it alone: what clients ask for by default does without."""

import base64
import sys
from array import array
from functools import lru_cache
from typing import Any

from appliance.server.schema.pooling import EmbedDtype, Endianness
from engine.api.messages import Pooled

SIZES: dict[EmbedDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def floats(pooled: Pooled) -> list[float]:
    """All numbers in a row, each exactly the float32 it was."""
    values = array("f")
    values.frombytes(pooled.values)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def nested(pooled: Pooled) -> list[Any]:
    """The numbers in the shape that they have."""
    values = floats(pooled)
    if len(pooled.shape) == 1:
        return values
    rows, width = pooled.shape
    return [values[row * width : (row + 1) * width] for row in range(rows)]


def encoded(pooled: Pooled, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """The numbers as bytes of this type, rounded to the nearest, halves to even. What fp8_e4m3 cannot hold becomes
    the largest that it can; of the others, infinity."""
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
    """Little-endian float32 to a narrower type, little-endian."""
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
    """What the positive codes of an 8-bit type stand for, up to the first that is no number. A code is an exponent and
    a mantissa, so that codes count up as their values do."""
    import numpy as np

    mantissa, bias, end = (3, 7, 0x7F) if dtype == "fp8_e4m3" else (2, 15, 0x7C)
    codes = np.arange(end + 1)
    exponents, fractions = (codes >> mantissa).astype(float), (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    return np.where(exponents == 0, fractions * 2.0 ** (1 - bias), (1 + fractions) * 2.0 ** (exponents - bias))


def _fp8(wide: Any, dtype: EmbedDtype) -> Any:
    """The codes nearest to float32 numbers. The first that is no number has its place on the grid: what is rounded to
    it cannot be held."""
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
