"""Weights of an EAGLE-3 head that its program does not have: the projection of the target's hidden states, and the
token of each logit."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.distributed.world import SINGLE
from engine.layers.linear import Read, Target
from engine.layers.loaded import Loadable
from engine.layers.tower_executors import executor
from engine.lowering.program import Program


class DraftHead:
    """Immutable after `load`."""

    ids: Tensor | None = None  # [rows of the head] int64, token of each logit; None: the number of the row

    def __init__(self, projection: Program, ids: str, target: Target) -> None:
        """ids: name of the tensor with the distances from the number of a logit to its token, if there is one."""
        self._ids, self._target = ids, target
        self._executor = executor(projection, SINGLE, target)

    @property
    def layers(self) -> Iterator[Loadable]:
        yield from self._executor.weights.by_name.values()

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers that are kept between steps."""
        return self._executor.buffer_bytes

    def load(self, read: Read, target: Target) -> None:
        """Load every weight. read: returns a tensor of the checkpoint by its name. target: of this checkpoint."""
        for layer in self.layers:
            layer.load(read, target)
        if self._ids:
            distances = read(self._ids).long()
            self.ids = (torch.arange(len(distances)) + distances).to(target.device)

    def reserve(self, tokens: int) -> None:
        """Allocate the buffers for steps of up to this many tokens."""
        self._executor.reserve(tokens)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        """Return the inputs of the head, valid until the next call: [tokens, layers · hidden] → [tokens, hidden]."""
        return self._executor.run(states.to(self._target.device, self._target.dtype))
