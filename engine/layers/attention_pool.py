"""Attention of a learned query to the rows of a frame (SigLIP's pooling head). Every rank has it completely.

Source: transformers modeling_siglip.py (SiglipMultiheadAttentionPoolingHead).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from engine.layers.whole_weights import WholeWeights
from engine.models.media import pooling_head_sources
from engine.models.parts import AttentionPool
from engine.models.sources import join
from kernels.activation import ACTIVATIONS


class AttentionPoolLayer(WholeWeights):
    """See `engine.models.parts.AttentionPool`."""

    def __init__(self, part: AttentionPool, path: str) -> None:
        super().__init__(path, pooling_head_sources(part, ""))
        self.part = part

    def __call__(self, frames: Sequence[Tensor]) -> Tensor:
        """Return a row for each frame: [rows, hidden] → [frames, hidden]."""
        part, own = self.part, self._loaded
        size, dim = part.hidden, part.hidden // part.heads
        weight, bias = own["attention.in_proj_weight"], own["attention.in_proj_bias"]
        query = linear(own["probe"].view(1, size), weight[:size], bias[:size]).view(part.heads, 1, dim)
        pooled = []
        for x in frames:
            both = linear(x, weight[size:], bias[size:]).view(len(x), 2, part.heads, dim).permute(1, 2, 0, 3)
            scores = (query @ both[0].transpose(1, 2)) * dim**-0.5
            pooled.append((scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ both[1]).reshape(size))
        p = linear(torch.stack(pooled), own["attention.out_proj.weight"], own["attention.out_proj.bias"])
        names, mlp = part.norm.name, part.mlp
        normed = layer_norm(p, (size,), own[f"{names}.weight"], own[f"{names}.bias"], part.norm.eps)
        up, down = (join(mlp.name, one) for one in (mlp.up, mlp.down))
        inner = ACTIVATIONS[mlp.act](linear(normed, own[f"{up}.weight"], own[f"{up}.bias"]))
        return p + linear(inner, own[f"{down}.weight"], own[f"{down}.bias"])
