"""Embedding of log-mel spectrograms. Every rank has it completely."""

import torch
from torch import Tensor

from engine.layers.linear import Read, Target
from engine.models.parts import AudioEmbedding
from engine.models.sources import join


class AudioLayer:
    """See `engine.models.parts.AudioEmbedding`."""

    weights: tuple[Tensor, ...]  # [hidden, inputs, 3] of each convolution
    biases: tuple[Tensor, ...]  # [hidden]
    positions: Tensor  # [positions, hidden]

    def __init__(self, part: AudioEmbedding, root: str) -> None:
        self.part, self.path = part, join(root, part.name)

    def load(self, read: Read, target: Target) -> None:
        def loaded(*names: str) -> Tensor:
            return read(join(self.path, *names)).to(target.device, target.dtype, copy=True)

        self.weights = tuple(loaded(name, "weight") for name in self.part.convolutions)
        self.biases = tuple(loaded(name, "bias") for name in self.part.convolutions)
        self.positions = loaded(self.part.table, "weight")

    def embed(self, spectrograms: Tensor, dtype: torch.dtype) -> Tensor:
        """[windows, mels, frames] → [windows · positions, hidden]."""
        x = spectrograms.to(dtype)
        for weight, bias, stride in zip(self.weights, self.biases, (1, 2), strict=True):
            x = torch.nn.functional.gelu(torch.nn.functional.conv1d(x, weight, bias, stride=stride, padding=1))
        return (x.transpose(1, 2) + self.positions).flatten(0, 1)
