"""Weights in blocks (kernels/ggml_layout.py): of ggml as a file has them, of floats, and INT6, quantized at load."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.block_codes import block_codes, values_of
from kernels.ggml_layout import LAYOUTS, layout_of
from kernels.quantisation import Search, row_parts, search_scales

MIDDLE6 = 32  # the code of 0 in INT6
# Integers to which the weight farthest from 0 is scaled in INT6.
FARTHEST6 = (-32.0, -32.5, -33.0, -31.5, -31.0, 31.0, 31.5)


@dataclass(frozen=True)
class BlockWeight:
    """One matrix. The last block of an output may have more numbers than there are inputs; these are 0."""

    blocks: Tensor  # [outputs, bytes] uint8
    kind: str
    inputs: int
    factors: Tensor | None = None  # of NVFP4, [outputs] float32

    def restored(self) -> Tensor:
        """Return the values, [outputs, inputs] float32."""
        if self.kind == "INT6":
            return _restored_int6(self.blocks)[:, : self.inputs]
        return values_of(block_codes(self.blocks, self.kind, self.factors), self.kind)[:, : self.inputs]

    def cut(self, rows: slice, first: int, count: int) -> "BlockWeight":
        """Return some outputs and `count` inputs from `first` on, which begins a block."""
        layout = layout_of(self.kind)
        begin, end = first // layout.inputs, -(-(first + count) // layout.inputs)
        factors = None if self.factors is None else self.factors[rows]
        return BlockWeight(self.blocks[rows, begin * layout.bytes : end * layout.bytes], self.kind, count, factors)

    @staticmethod
    def joined(parts: "Sequence[BlockWeight]") -> "BlockWeight":
        """Return the outputs of matrices of one kind, one after another."""
        factors = [part.factors for part in parts if part.factors is not None]
        blocks = torch.cat([part.blocks for part in parts])
        return BlockWeight(blocks, parts[0].kind, parts[0].inputs, torch.cat(factors) if factors else None)


def to_int6(weight: Tensor, search: Search = search_scales) -> BlockWeight:
    """Quantize a weight, [outputs, inputs] of any floating type, to INT6. The scales are searched as for 4 bits."""
    outputs, inputs = weight.shape
    layout = LAYOUTS["INT6"]
    padded = torch.nn.functional.pad(weight, (0, -inputs % layout.inputs))
    blocks = torch.empty((outputs, padded.shape[1] // layout.inputs, layout.bytes), dtype=torch.uint8)
    for part in row_parts(weight):
        groups = padded[part].float().unflatten(1, (-1, layout.inputs))
        values, scales = search(groups, FARTHEST6, -MIDDLE6, MIDDLE6 - 1)
        codes = (values + MIDDLE6).to(torch.uint8)
        low, high = codes & 15, (codes >> 4).unflatten(2, (4, 16))
        blocks[part, :, :32] = low[:, :, :32] | low[:, :, 32:] << 4
        blocks[part, :, 32:48] = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
        blocks[part, :, 48:] = scales.unsqueeze(2).view(torch.uint8)
    return BlockWeight(blocks.flatten(1), "INT6", inputs)


def _restored_int6(rows: Tensor) -> Tensor:
    """[outputs, bytes] → [outputs, inputs] float32."""
    blocks = rows.contiguous().unflatten(1, (-1, LAYOUTS["INT6"].bytes))
    low = torch.cat((blocks[:, :, :32] & 15, blocks[:, :, :32] >> 4), 2)
    high = torch.cat([blocks[:, :, 32:48] >> at & 3 for at in range(0, 8, 2)], 2)
    scales = blocks[:, :, 48:].contiguous().view(torch.float16).float()
    return (((low | high << 4).float() - MIDDLE6) * scales).flatten(1)
