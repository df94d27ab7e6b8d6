"""What `pooler.py` says, for all prompts of a step at once, as launches of fused kernels.

Vectors of whole prompts come from one launch, whose sums are taken row by row; stages and what is done last run over
all rows that want the same. Numbers of single tokens need no other token: they are computed as the tokens come, and
only they are kept until the prompt is complete.
"""

import torch
from torch import Tensor

from engine.api.messages import Pooling
from engine.layers.fused import fused_norm
from engine.layers.pooler import PooledNormLayer, PoolerLayer
from kernels.pool_end import POOL_END
from kernels.pool_rows import POOL_ROWS


class FusedPooler:
    """Its state is what was gathered of the prompts under way, by slot: [slots, hidden] float64."""

    def __init__(self, layer: PoolerLayer, *, slots: int, hidden: int, device: torch.device) -> None:
        self._layer, self._part = layer, layer.part
        self._states = torch.zeros((slots, hidden), dtype=torch.float64, device=device)

    @property
    def nbytes(self) -> int:
        return self._states.nbytes

    def gather(self, hidden: Tensor, query_start: Tensor, slot: Tensor, first: Tensor) -> Tensor:
        """hidden: [tokens, hidden], of positions first[r] … of each row, in whose slot the earlier ones were gathered →
        [rows, hidden] fp32, the vector of each row's positions so far. The others: int32, as in DeviceStep."""
        vectors, _ = POOL_ROWS(hidden, query_start, slot, first, self._states, self._part.pool)
        return vectors

    def finish(self, x: Tensor, pooling: Pooling) -> Tensor:
        """x: [rows, hidden] fp32, vectors or states of tokens → [rows, width] fp32, or as many numbers as `dimensions`
        says."""
        for stage in self._layer.stages:
            x = fused_norm(stage, x) if isinstance(stage, PooledNormLayer) else stage(x)
        width = min(x.shape[1], pooling.dimensions or x.shape[1])
        end = self._part.activation
        return x[:, :width] if end == "none" or pooling.activate is False else POOL_END(x, width, end)
