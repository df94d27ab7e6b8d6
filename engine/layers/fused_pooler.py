"""Pooling (see `pooler.py`) of all prompts of a step at once, as launches of fused kernels.

Vectors of entire prompts come from one launch, which sums row by row. Stages and activation run over all rows with the
same parameters. Outputs of single tokens depend on no other token: they are computed in the token's step, and only they
are kept until the prompt is complete.
"""

import torch
from torch import Tensor

from engine.api.messages import Pooling
from engine.layers.fused_rows import fused_norm
from engine.layers.pooler import PooledNormLayer, PoolerLayer
from kernels.pool_end import POOL_END
from kernels.pool_rows import POOL_ROWS


class FusedPooler:
    """State: the partial vectors of incomplete prompts by slot, [slots, hidden] float64."""

    def __init__(self, layer: PoolerLayer, *, slots: int, hidden: int, device: torch.device) -> None:
        self._layer, self._part = layer, layer.part
        self._states = torch.zeros((slots, hidden), dtype=torch.float64, device=device)

    @property
    def nbytes(self) -> int:
        return self._states.nbytes

    def gather(self, hidden: Tensor, query_start: Tensor, slot: Tensor, first: Tensor) -> Tensor:
        """Add the tokens of a step. Return [rows, hidden] fp32, the vector of each row's positions so far.

        hidden: [tokens, hidden], positions first[r] … of each row. query_start, slot, first: int32, as in
        DeviceStep."""
        vectors, _ = POOL_ROWS(hidden, query_start, slot, first, self._states, self._part.pool)
        return vectors

    def finish(self, x: Tensor, pooling: Pooling) -> Tensor:
        """Apply stages and activation. x: [rows, hidden] fp32, vectors or token states. Return [rows, width] fp32, or
        [rows, dimensions]."""
        for stage in self._layer.stages:
            x = fused_norm(stage, x) if isinstance(stage, PooledNormLayer) else stage(x)
        return self.end(x, pooling)

    def end(self, x: Tensor, pooling: Pooling) -> Tensor:
        """Truncate and activate vectors, [rows, width] fp32."""
        width = min(x.shape[1], pooling.dimensions or x.shape[1])
        end = self._part.activation
        return x[:, :width] if end == "none" or pooling.activate is False else POOL_END(x, width, end)
