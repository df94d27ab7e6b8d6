"""Weights in blocks of ggml (kernels/ggml_layout.py), as a file has them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ggml_layout import LAYOUTS


@dataclass(frozen=True)
class BlockWeight:
    """One matrix. The last block of an output may have more numbers than there are inputs; these are 0."""

    blocks: Tensor  # [outputs, bytes] uint8
    kind: str
    inputs: int

    def restored(self) -> Tensor:
        """Return the values, [outputs, inputs] float32, by the package gguf."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values = dequantize(self.blocks.contiguous().numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(values)[:, : self.inputs]

    def cut(self, rows: slice, first: int, count: int) -> "BlockWeight":
        """Return some outputs and `count` inputs from `first` on, which begins a block."""
        layout = LAYOUTS[self.kind]
        begin, end = first // layout.inputs, -(-(first + count) // layout.inputs)
        return BlockWeight(self.blocks[rows, begin * layout.bytes : end * layout.bytes], self.kind, count)
