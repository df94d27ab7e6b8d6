"""Integers of 4 or 8 bits as a file stores them. Compiled kernels copy them from there into packed weights
(kernels/cpu/packing.py); all others unpack them first.

layout    data                                 integers of an output
signed    [outputs, inputs] int8               in their order; also [outputs, blocks, block]
unsigned  [outputs, inputs] uint8              in their order, 128 for zero
words     [outputs, words] int32               eight of 4 bits or four of 8 bits in a word, the first in the lowest bits
halves    [outputs, blocks, 16] uint8          32 of 4 bits in a block, 16 in the low halves of its bytes, then 16 in
                                               the high halves
across    [outputs / 8, inputs] int32               of 4 bits, eight outputs in a word, from the lowest bits on in the
                                               order of ACROSS
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

CodeLayout = Literal["signed", "unsigned", "words", "halves", "across"]
ACROSS = (0, 2, 4, 6, 1, 3, 5, 7)
WORD = 32  # bits
HALVES_BLOCK = 32  # integers


@dataclass(frozen=True)
class StoredCodes:
    """Integers of one matrix. `data` may be a view of a file, with any strides."""

    data: Tensor
    layout: CodeLayout
    bits: int
    inputs: int  # integers of an output; the last word may have more

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data) * (len(ACROSS) if self.layout == "across" else 1), self.inputs

    @property
    def unit(self) -> int:
        """Number of integers that a cut between inputs must not divide."""
        if self.layout == "words":
            return WORD // self.bits
        if self.layout == "halves":
            return HALVES_BLOCK
        return self.data.shape[2] if self.data.ndim == 3 else 1

    def rows(self, rows: slice) -> "StoredCodes | Tensor":
        """Return the integers of some outputs, unpacked if words have other outputs, too."""
        if self.layout != "across":
            return replace(self, data=self.data[rows])
        each = len(ACROSS)
        first, last, step = rows.indices(self.shape[0])
        if first % each or last % each or step != 1:
            return self.unpacked()[rows]
        return replace(self, data=self.data[first // each : last // each])

    def columns(self, first: int, count: int) -> "StoredCodes | None":
        """Return the integers of `count` inputs from `first` on, or None if that divides a word or block."""
        unit = self.unit
        if first % unit or (count % unit and first + count != self.inputs):
            return None
        return replace(self, data=self.data[:, first // unit : -(-(first + count) // unit)], inputs=count)

    def unsigned(self) -> Tensor:
        """Return the integers, [outputs, inputs] uint8, with the middle of the range for zero."""
        match self.layout:
            case "signed":
                return self.data.flatten(1).view(torch.uint8) ^ 128
            case "unsigned":
                return self.data
            case "halves":
                return torch.cat((self.data & 15, self.data >> 4), 2).flatten(1)
            case "across":
                words = _octets(self.data.T, 4).unflatten(1, (-1, len(ACROSS)))
                return words[:, :, [ACROSS.index(output) for output in range(len(ACROSS))]].flatten(1).T
        return _octets(self.data, self.bits)[:, : self.inputs]

    def unpacked(self) -> Tensor:
        """Return the integers, [outputs, inputs], of 4 bits as uint8 with 8 for zero, of 8 bits as int8."""
        if self.layout == "signed":
            return self.data.flatten(1)
        return (self.unsigned() ^ 128).view(torch.int8) if self.bits == 8 else self.unsigned()


def _octets(words: Tensor, bits: int) -> Tensor:
    """Unpack [rows, words] int32 to [rows, numbers] uint8."""
    octets = words.reshape(-1).contiguous().view(torch.uint8).view(len(words), -1)  # one row or column: any stride
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), 2).flatten(1)


def unpacked(values: Tensor | StoredCodes) -> Tensor:
    """Return integers as one number in a byte, [outputs, inputs]."""
    return values.unpacked() if isinstance(values, StoredCodes) else values
