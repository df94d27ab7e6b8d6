"""Tensors on their way from the device to the host, beside the steps that follow."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Arriving:
    """Copies that were asked for. Until they are there it keeps the sources, whose memory must not be used again before
    they are read."""

    def __init__(self, sources: Sequence[Tensor], copies: list[Tensor], done: "torch.cuda.Event | None") -> None:
        self._sources: Sequence[Tensor] = sources
        self._copies, self._done = copies, done

    def wait(self) -> list[np.ndarray]:
        if self._done is not None:
            self._done.synchronize()
        self._sources = ()
        return [copy.numpy() for copy in self._copies]


class Results:
    """A stream of its own for copies to the host, so that they wait for their step and no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, tensors: Sequence[Tensor]) -> Arriving:
        if self._stream is None:
            return Arriving(tensors, [tensor.clone() for tensor in tensors], None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return Arriving(tensors, copies, done)
