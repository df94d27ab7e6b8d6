"""Weights in blocks on a GPU (kernels/block_matmul.py), and matrices of several packed weights."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.block_matmul import BLOCK_MATMUL
from kernels.experts.block_matmul import BLOCK_EXPERT_MATMUL
from kernels.ggml_blocks import BlockWeight
from kernels.integers import IntegerWeight
from kernels.planes import Planes, restored, to_planes


@dataclass(frozen=True)
class PlaneWeight:
    """One matrix. In a stack of experts, each plane has the experts along its first axis."""

    planes: Planes
    kind: str
    inputs: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(one for one in self.planes if one is not None)

    @property
    def outputs(self) -> int:
        return self.planes.low.shape[-2]

    def restored(self) -> Tensor:
        """Return the weight as [outputs, inputs] float32."""
        return restored(self.planes, self.kind, self.inputs)

    def multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, *, by_size: bool) -> Tensor:
        """x: [rows, inputs] → [rows, outputs] of `dtype`, plus the bias. by_size: use the fastest tiles for the number
        of rows; otherwise a row's sums do not depend on it."""
        return BLOCK_MATMUL(x, *self.planes, self.kind, bias, dtype, by_size)

    def multiply_experts(
        self,
        x: Tensor,
        pairs: Tensor,
        tiles: Tensor,
        pairs_per_row: int,
        rows: int,
        bias: Tensor | None,
        scales: Tensor | None,
    ) -> Tensor:
        """Multiply by the experts of a layer as kernels/experts/matmul.py does."""
        return BLOCK_EXPERT_MATMUL(x, *self.planes, self.kind, pairs, tiles, pairs_per_row, rows, bias, scales)

    def empty_stack(self, count: int) -> "PlaneWeight":
        """Return memory for this many matrices of this shape."""
        return replace(self, planes=self.planes.changed(lambda plane: plane.new_empty((count, *plane.shape))))

    def put(self, number: int, matrix: "PlaneWeight") -> "PlaneWeight | None":
        """Copy a matrix to its place in this stack, and return it there; None if it has another format."""
        if (matrix.kind, matrix.inputs) != (self.kind, self.inputs):
            return None
        own = self.planes.changed(lambda plane: plane[number])
        for place, plane in zip(own, matrix.planes, strict=True):
            if place is not None and plane is not None:
                place.copy_(plane)
        return replace(self, planes=own)


@dataclass(frozen=True)
class SegmentedWeight:
    """Matrices in several formats. The outputs of a piece come after the outputs of the previous piece."""

    pieces: tuple[IntegerWeight | PlaneWeight, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for piece in self.pieces for tensor in piece.tensors)

    def restored(self) -> Tensor:
        return torch.cat([piece.restored() for piece in self.pieces])

    def multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, *, by_size: bool) -> Tensor:
        """As `PlaneWeight.multiply`."""
        sizes = [piece.outputs for piece in self.pieces]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        pairs = zip(self.pieces, biases, strict=True)
        return torch.cat([piece.multiply(x, own, dtype, by_size=by_size) for piece, own in pairs], 1)


def pack_blocks(weight: BlockWeight, device: torch.device) -> PlaneWeight:
    """Divide a weight into planes on a device."""
    factors = None if weight.factors is None else weight.factors.to(device)
    planes = to_planes(weight.blocks.to(device), weight.kind, weight.inputs, factors)
    return PlaneWeight(planes, weight.kind, weight.inputs)
