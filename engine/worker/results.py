"""Asynchronous copies of results from the device to the host."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class PendingTransfer:
    """Pending copies. The source tensors are kept until then, so that their memory is not reused."""

    def __init__(self, sources: Sequence[Tensor], copies: list[Tensor], done: "torch.cuda.Event | None") -> None:
        self._sources: Sequence[Tensor] = sources
        self._copies, self._done = copies, done

    def wait(self) -> list[np.ndarray]:
        if self._done is not None:
            self._done.synchronize()
        self._sources = ()
        return [copy.numpy() for copy in self._copies]


class Results:
    """A separate stream for copies to the host, so that copies wait for their step and no step waits for copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetch(self, tensors: Sequence[Tensor]) -> PendingTransfer:
        if self._stream is None:
            return PendingTransfer(tensors, [tensor.clone() for tensor in tensors], None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return PendingTransfer(tensors, copies, done)
