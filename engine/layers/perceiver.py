"""Perceiver resampler: blocks in which learned queries attend to the rows of a frame and to one another (Idefics2).
Every rank has it completely.

Source: transformers modeling_idefics2.py (Idefics2PerceiverResampler).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from engine.layers.whole_weights import WholeWeights
from engine.models.media import perceiver_sources
from engine.models.parts import Perceiver
from kernels.activation import ACTIVATIONS


class PerceiverLayer(WholeWeights):
    """See `engine.models.parts.Perceiver`."""

    def __init__(self, part: Perceiver, path: str) -> None:
        super().__init__(path, perceiver_sources(part, ""))
        self.part = part

    def __call__(self, frames: Sequence[Tensor]) -> Tensor:
        """Return the rows of the queries of each frame: [rows, hidden] → [frames · queries, hidden]."""
        return torch.cat([self._queried(x) for x in frames])

    def _queried(self, rows: Tensor) -> Tensor:
        own, root = self._loaded, "perceiver_resampler"
        x = own[f"{root}.latents"]
        for index in range(self.part.layers):
            path = f"{root}.layers.{index}"
            queries = self._norm(x, f"{path}.input_latents_norm")
            given = torch.cat((self._norm(rows, f"{path}.input_context_norm"), queries))
            x = x + self._attended(queries, given, f"{path}.self_attn")
            y = self._norm(x, f"{path}.post_attention_layernorm")
            gate, up = (linear(y, own[f"{path}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x = x + linear(ACTIVATIONS[self.part.act](gate) * up, own[f"{path}.mlp.down_proj.weight"])
        return self._norm(x, f"{root}.norm")

    def _attended(self, queries: Tensor, given: Tensor, path: str) -> Tensor:
        q, k, v = (
            linear(of, self._loaded[f"{path}.{name}_proj.weight"])
            .unflatten(1, (-1, self.part.head_dim))
            .transpose(0, 1)
            for name, of in (("q", queries), ("k", given), ("v", given))
        )
        y = scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=self.part.heads != self.part.kv_heads)
        return linear(y[0].transpose(0, 1).flatten(1), self._loaded[f"{path}.o_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.part.eps)
        return self._loaded[f"{name}.weight"] * normed.to(x.dtype)
