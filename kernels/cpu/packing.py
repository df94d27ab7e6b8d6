"""Weights in the order in which the compiled kernels read them (linear.h, linear_amx.h).

form         order                                                       taken for
tiles_f32    [outputs / 2V][input][2V], V floats to a vector             float32, and what is rounded differently
tiles_bf16   the same in bf16: half the bytes, the same numbers          bf16 checkpoints
amx_bf16     [outputs / 16][inputs / 32][pair of inputs][output][2]      bf16 checkpoints on CPUs with matrix tiles

Outputs and, for tiles of a matrix unit, inputs are padded with zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FORMS = ("tiles_f32", "tiles_bf16", "amx_bf16")


@dataclass(frozen=True)
class Packed:
    data: Tensor
    form: str
    outputs: int
    inputs: int


def form_for(dtype: torch.dtype, variant: str) -> str:
    """The form that keeps every number of a weight of this type."""
    if dtype != torch.bfloat16:
        return "tiles_f32"
    return "amx_bf16" if variant == "amx" else "tiles_bf16"


def pack(weight: Tensor, form: str, width: int) -> Packed:
    """weight: [outputs, inputs]; width: floats of a vector, 2 · width outputs to a tile."""
    outputs, inputs = weight.shape
    if form == "amx_bf16":
        padded = _padded(weight.to(torch.bfloat16), 16, 32)
        tiles = padded.view(len(padded) // 16, 16, -1, 16, 2).permute(0, 2, 3, 1, 4)
    else:
        side = 2 * width
        padded = _padded(weight.to(torch.float32 if form == "tiles_f32" else torch.bfloat16), side, 1)
        tiles = padded.view(len(padded) // side, side, -1).transpose(1, 2)
    return Packed(tiles.contiguous(), form, outputs, inputs)


def _padded(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    rows, columns = -weight.shape[0] % outputs, -weight.shape[1] % inputs
    return torch.nn.functional.pad(weight, (0, columns, 0, rows)) if rows or columns else weight
