"""Merge of squares of patches, which attend to one another first (MiniCPM-V). Every rank has it completely.

Source: transformers modeling_minicpmv4_6.py (MiniCPMV4_6ViTWindowAttentionMerger).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from engine.layers.patches import Grid
from engine.layers.whole_weights import WholeWeights
from engine.models.media import window_merge_sources
from engine.models.parts import WindowMerge
from engine.models.sources import join


class WindowMergeLayer(WholeWeights):
    """See `engine.models.parts.WindowMerge`."""

    def __init__(self, part: WindowMerge, path: str) -> None:
        names = (name.removeprefix(f"{part.name}.") for name in window_merge_sources(part, ""))
        super().__init__(join(path, part.name), names)
        self.part = part

    def __call__(self, frames: Sequence[Tensor], grids: Sequence[Grid]) -> tuple[Tensor, tuple[Grid, ...]]:
        """Return the rows of the squares of all frames, and their grids. frames: [rows · columns, hidden]. Raises
        ValueError for grids that squares do not divide."""
        side, squares = self.part.side, list[Tensor]()
        for x, (_, high, wide) in zip(frames, grids, strict=True):
            if high % side or wide % side:
                raise ValueError(f"an image has {high} x {wide} patches; both must be multiples of {side}")
            cut = x.view(high // side, side, wide // side, side, -1).transpose(1, 2)
            squares.append(cut.reshape(-1, side * side, x.shape[1]))
        return self._merged(torch.cat(squares)), tuple((1, high // side, wide // side) for _, high, wide in grids)

    def _merged(self, x: Tensor) -> Tensor:
        """[squares, patches of a square, hidden] → [squares, hidden]."""
        x = x + self._attended(self._norm(x, "layer_norm1"))
        y = self._linear(self._norm(x.flatten(1), "pre_norm"), "linear_1")
        return self._linear(gelu(y, approximate="tanh"), "linear_2") + x.mean(1)

    def _attended(self, x: Tensor) -> Tensor:
        heads = self.part.heads
        q, k, v = (
            self._linear(x, f"self_attn.{name}_proj").unflatten(2, (heads, -1)).transpose(1, 2) for name in "qkv"
        )
        y = scaled_dot_product_attention(q, k, v)
        return self._linear(y.transpose(1, 2).flatten(2), "self_attn.out_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._loaded[f"{name}.weight"], self._loaded[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], self._loaded[f"{name}.weight"], self._loaded[f"{name}.bias"], self.part.eps)
