"""Attention of learned queries to the rows of a frame (Aria's projector). Every rank has it completely.

Source: transformers modeling_aria.py (AriaCrossAttention).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from engine.layers.patches import Grid
from engine.layers.whole_weights import WholeWeights
from engine.models.media import resampler_sources
from engine.models.parts import Resampler


class ResamplerLayer(WholeWeights):
    """See `engine.models.parts.Resampler`."""

    def __init__(self, part: Resampler, path: str) -> None:
        super().__init__(path, resampler_sources(part, ""))
        self.part = part

    def __call__(self, frames: Sequence[Tensor], grids: Sequence[Grid]) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the rows of all frames, and a grid for each. frames: [rows, hidden]; the longer side of a grid is that
        of a square image. Raises ValueError for a size for which there is no number of queries."""
        queries = dict(self.part.queries)
        counts = [queries.get(max(high, wide) ** 2) for _, high, wide in grids]
        if None in counts:
            _, high, wide = grids[counts.index(None)]
            known = ", ".join(map(str, queries))
            raise ValueError(f"an image has {high} x {wide} patches; the longer side must be the root of {known}")
        chosen = [count for count in counts if count is not None]
        rows = [self._attended(x, count) for x, count in zip(frames, chosen, strict=True)]
        return torch.cat(rows), tuple((1, 1, count) for count in chosen)

    def _attended(self, x: Tensor, count: int) -> Tensor:
        """Return the outputs of the first `count` queries, [count, hidden]."""
        part, own = self.part, self._loaded
        size, dim = part.hidden, part.hidden // part.heads

        def norm(rows: Tensor, name: str) -> Tensor:
            return layer_norm(rows, (size,), own[f"cross_attn.{name}.weight"], own[f"cross_attn.{name}.bias"], part.eps)

        weights = own["cross_attn.multihead_attn.in_proj_weight"].split(size)
        biases = own["cross_attn.multihead_attn.in_proj_bias"].split(size)
        given = norm(own["query"][:count], "layer_norm"), *(norm(x, "layer_norm_kv"),) * 2
        projected = (
            linear(linear(rows, own[f"cross_attn.{name}_proj.weight"]), weight, bias)
            for name, rows, weight, bias in zip("qkv", given, weights, biases, strict=True)
        )
        q, k, v = (rows.unflatten(1, (part.heads, dim)).transpose(0, 1) for rows in projected)
        scores = (q @ k.transpose(1, 2)) * dim**-0.5
        y = (scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v).transpose(0, 1).flatten(1)
        for name in ("multihead_attn.out_proj", "linear"):
            y = linear(y, own[f"cross_attn.{name}.weight"], own[f"cross_attn.{name}.bias"])
        return y
