"""Weights packed for the Marlin kernel of GPUs: 4 bits, symmetric, in tiles of 16 inputs and 16 outputs.

The integers of a row of tiles, [inputs / 16, 16 · outputs], and the scales of a group are permuted within chunks, so
that threads read their operands of a tensor core in order. Source: IST-DASLab/marlin, marlin/__init__.py (Layer.pack),
as written by AutoGPTQ.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from engine.formats.format import SCALES, Stored, StoredMatrix, refuse, words
from engine.formats.integers import Integers, Numbers
from engine.formats.native import Groups

TILE, EACH = 16, 8
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP_SCALES = tuple(i + 8 * j for i in range(8) for j in range(8))
CHANNEL_SCALES = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))


def tile_order() -> list[int]:
    """Return the place of each stored integer in 1024 consecutive ones of a row of tiles."""
    found: list[int] = []
    for i in range(32):
        rows = (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1)
        own = [16 * row + i // 4 + 8 * block for block in (0, 1) for row in rows]
        found += [256 * j + place for j in range(4) for place in (own[nibble] for nibble in NIBBLES)]
    return found


@dataclass(frozen=True)
class Marlin(Integers):
    matrix: ClassVar[str] = "B"
    scale: ClassVar[str] = "s"

    @classmethod
    def checked(cls, stored: Groups) -> Self:
        """Return the format. Raises UnsupportedFormat for integers that the kernel does not have."""
        if (stored.bits, stored.zeros, stored.ordered) != (4, False, False) or stored.group not in (128, None):
            refuse("checkpoint_format", "marlin", "it has 4 bits, sym, groups of 128 or -1, and no desc_act")
        return cls.of(stored)

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        return {
            "B": Stored((words(inputs, TILE), rows * TILE // EACH), ("I32",)),
            "s": Stored((words(inputs, self.stored.group or inputs), rows), SCALES),
            "workspace": Stored((rows // 128 * 16,), ("I32",), optional=True, any_shape=True),
            "bias": Stored((rows,), optional=True),
        }

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        octets = matrix.read("B").contiguous().view(torch.uint8)
        numbers = torch.stack((octets & 15, octets >> 4), 2).reshape(-1, 1024)
        values = torch.empty_like(numbers)
        values[:, torch.tensor(tile_order())] = numbers
        tiles = values.view(matrix.inputs // TILE, matrix.rows // TILE, TILE, TILE)
        permuted = torch.tensor(CHANNEL_SCALES if self.stored.group is None else GROUP_SCALES)
        stored = matrix.read("s")
        scales = torch.empty_like(stored).view(-1, len(permuted))
        scales[:, permuted] = stored.reshape(-1, len(permuted))
        return Numbers(tiles.permute(1, 3, 0, 2).reshape(matrix.rows, matrix.inputs), scales.view(stored.shape).T, None)
