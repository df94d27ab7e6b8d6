"""Resizing of video frames, with the arithmetic of torchvision for uint8 tensors.

Each output is a sum of 8-bit inputs with 16-bit weights, first along rows, then along columns. Pillow has the same
filters with more precise weights, so its results can differ by one. Source: PyTorch UpSampleKernel.cpp
(`compute_index_ranges_int16_weights`).
"""

from functools import lru_cache
from math import ceil

import numpy as np

from engine.media.clip import Array
from engine.media.pixels import BICUBIC, BILINEAR, LANCZOS, Size

_SUPPORT = {
    int(BILINEAR): 1.0,
    int(BICUBIC): 2.0,
    int(LANCZOS): 3.0,
}
_BLOCK = 1 << 16  # outputs that are computed together, so that their sums fit into the cache


def _filter(resample: int, x: Array) -> Array:
    x = np.abs(x)
    if resample == BILINEAR:
        return np.maximum(0.0, 1.0 - x)
    if resample == LANCZOS:
        return np.where(x < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)
    a = -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


@lru_cache(maxsize=8)
def _weights(inputs: int, outputs: int, resample: int) -> tuple[Array, Array, int]:
    """Return the first input of each output, int64 [outputs], the weights of the inputs from there on, int32
    [outputs, k], and the number of fractional bits."""
    scale = inputs / outputs
    support = _SUPPORT[resample] * max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    centers = scale * (np.arange(outputs) + 0.5)
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centers + support + 0.5).astype(np.int64), inputs) - first
    places = np.arange(ceil(support) * 2 + 1)
    weights = _filter(resample, (places + first[:, None] - centers[:, None] + 0.5) * inverse)
    weights[places >= count[:, None]] = 0.0
    weights /= weights.sum(1, keepdims=True)
    bits, largest = 0, weights.max()
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    scaled = weights * (1 << bits)
    return first, np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32), bits


def _along_first(x: Array, outputs: int, resample: int) -> Array:
    """Resize the first axis of uint8 [inputs, columns]."""
    inputs, columns = x.shape
    if inputs == outputs:
        return x
    first, weights, bits = _weights(inputs, outputs, resample)
    found = np.empty((outputs, columns), np.uint8)
    block = max(1, _BLOCK // columns)
    for begin in range(0, outputs, block):
        rows = slice(begin, begin + block)
        sums = np.full((len(first[rows]), columns), 1 << (bits - 1), np.int32)
        for place in range(weights.shape[1]):
            weight = weights[rows, place]
            if weight.any():
                inner = x[np.minimum(first[rows] + place, inputs - 1)]
                sums += np.multiply(inner, weight[:, None], dtype=np.int32)
        sums >>= bits
        np.clip(sums, 0, 255, out=sums)
        found[rows] = sums
    return found


def resized_frame(frame: Array, size: Size, resample: int) -> Array:
    """Resize one frame, uint8 [3, height, width]. resample: a filter of Pillow. Raises ValueError for another one."""
    if resample not in _SUPPORT:
        raise ValueError(f"resample is {resample}; videos support {', '.join(map(str, _SUPPORT))}")
    colours, high, wide = frame.shape
    by_column = np.ascontiguousarray(frame.transpose(2, 0, 1)).reshape(wide, colours * high)
    wide = size[1]
    narrow = _along_first(by_column, wide, resample).reshape(wide, colours, high)
    by_row = np.ascontiguousarray(narrow.transpose(2, 1, 0)).reshape(high, colours * wide)
    return _along_first(by_row, size[0], resample).reshape(size[0], colours, wide).transpose(1, 0, 2)
