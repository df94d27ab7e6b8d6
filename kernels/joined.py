"""Outputs of several quantized weights, one after another. Compiled kernels pack each directly from its file."""

from dataclasses import dataclass

from torch import Tensor

from kernels.ggml_blocks import BlockWeight
from kernels.quantisation import Int4Weight, Int8Weight, joined


@dataclass(frozen=True)
class Joined:
    """Weights of one kind, with the same inputs in groups of one size, in the same order."""

    parts: tuple[Int8Weight, ...] | tuple[Int4Weight, ...] | tuple[BlockWeight, ...]

    def whole(self) -> Int8Weight | Int4Weight | BlockWeight:
        """Return one weight, a copy."""
        blocks = [part for part in self.parts if isinstance(part, BlockWeight)]
        integers = [part for part in self.parts if not isinstance(part, BlockWeight)]
        return BlockWeight.joined(blocks) if blocks else joined(integers)

    def restored(self) -> Tensor:
        """Return the values, [outputs, inputs] float32."""
        return self.whole().restored()
