"""Weights that every rank has completely."""

from collections.abc import Iterable

from torch import Tensor

from engine.layers.linear import Read, Target
from engine.models.sources import join


class WholeWeights:
    """Base of layers whose tensors are kept as the checkpoint has them, in the type of the activations. names: of the
    tensors, below `path`."""

    def __init__(self, path: str, names: Iterable[str]) -> None:
        self._path, self._names = path, tuple(names)
        self._loaded: dict[str, Tensor] = {}

    def load(self, read: Read, target: Target) -> None:
        for name in self._names:
            self._loaded[name] = read(join(self._path, name)).to(target.device, target.dtype, copy=True)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._loaded.values())
