"""Q-Former: blocks of learned queries that attend to one another and to the rows of a frame (BLIP-2). Every rank has it
completely.

Source: transformers modeling_blip_2.py (Blip2QFormerModel).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from engine.layers.whole_weights import WholeWeights
from engine.models.media import qformer_sources
from engine.models.parts import QFormer
from kernels.activation import ACTIVATIONS


class QFormerLayer(WholeWeights):
    """See `engine.models.parts.QFormer`."""

    def __init__(self, part: QFormer, path: str) -> None:
        super().__init__(path, qformer_sources(part, ""))
        self.part = part

    def __call__(self, frames: Sequence[Tensor]) -> Tensor:
        """Return the rows of the queries of each frame: [rows, inputs] → [frames · queries, hidden]."""
        return torch.cat([self._queried(x) for x in frames])

    def _queried(self, rows: Tensor) -> Tensor:
        part = self.part
        x = self._norm(self._loaded["query_tokens"][0], "qformer.layernorm")
        for index in range(part.layers):
            path = f"qformer.encoder.layer.{index}"
            x = self._attended(x, x, f"{path}.attention")
            if index % part.every == 0:
                x = self._attended(x, rows, f"{path}.crossattention")
            inner = ACTIVATIONS[part.act](self._linear(x, f"{path}.intermediate_query.dense"))
            y = self._linear(inner, f"{path}.output_query.dense")
            x = self._norm(x + y, f"{path}.output_query.LayerNorm")
        return x

    def _attended(self, x: Tensor, given: Tensor, path: str) -> Tensor:
        """Return x after attention to the given rows."""
        heads, dim = self.part.heads, self.part.hidden // self.part.heads
        q, k, v = (
            self._linear(of, f"{path}.attention.{name}").unflatten(1, (heads, dim)).transpose(0, 1)
            for name, of in (("query", x), ("key", given), ("value", given))
        )
        scores = (q @ k.transpose(1, 2)) * dim**-0.5
        y = (scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v).transpose(0, 1).flatten(1)
        return self._norm(x + self._linear(y, f"{path}.output.dense"), f"{path}.output.LayerNorm")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._loaded[f"{name}.weight"], self._loaded[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        part = self.part
        return layer_norm(x, (part.hidden,), self._loaded[f"{name}.weight"], self._loaded[f"{name}.bias"], part.eps)
