"""Search of the scales of weights that are quantized at load, by a compiled kernel (quantize.cpp)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import best, in_threads, load, usable
from kernels.quantisation import search_scales as search_by_torch


def search_scales(groups: Tensor, farthest: Sequence[float], low: int, high: int) -> tuple[Tensor, Tensor]:
    """Do as `search_scales` in kernels/quantisation.py, which takes 25 times as long. Sums are added in another order,
    so the scales of 1 in 10,000 groups differ where two of them are equally good."""
    if groups.device.type != "cpu" or not usable():
        return search_by_torch(groups, farthest, low, high)
    outputs, count, group = groups.shape
    groups, search = groups.contiguous(), load(best()).slipway_search_scales
    candidates = torch.tensor(farthest, dtype=torch.float32)
    values = torch.empty(groups.shape, dtype=torch.int8)
    scales = torch.empty((outputs, count), dtype=torch.float16)

    def part(first: int, last: int) -> None:
        search(
            *(groups[first:].data_ptr(), (last - first) * count, group, candidates.data_ptr(), len(candidates)),
            *(low, high, values[first:].data_ptr(), scales[first:].data_ptr()),
        )

    in_threads(torch.get_num_threads(), outputs, 1, part)
    return values, scales
