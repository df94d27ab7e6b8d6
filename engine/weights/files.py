"""Checkpoint tensors as views of memory-mapped safetensors files: nothing is copied until a layer takes its share."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.models.headers import TensorInfo

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}


class Weights:
    """Tensors by name. Counts the bytes that were read, for progress, and which tensors, so that none is forgotten.

    A view stays valid for as long as it lives, also if the file is deleted meanwhile, but not if it is cut short.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], progress: Callable[[float], None]) -> None:
        self.tensors = tensors
        self.read_names: set[str] = set()
        self._progress = progress
        self._total = sum(info.bytes for info in tensors.values()) or 1
        self._done = 0
        self._maps: dict[Path, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """A read-only view of the whole tensor, in the type of the file; the bytes of one in a type of ggml.
        Do not write to it."""
        info = self.tensors[name]
        if name not in self.read_names:
            self.read_names.add(name)
            self._done += info.bytes
            self._progress(min(1.0, self._done / self._total))
        raw = self._map(info.file)[info.offset : info.offset + info.bytes]
        if info.dtype not in TORCH_DTYPES:
            return raw
        dtype = TORCH_DTYPES[info.dtype]
        if info.offset % dtype.itemsize:
            raw = raw.clone()  # a view of another type must start at a multiple of its size
        return raw.view(dtype).view(info.shape)

    def close(self) -> None:
        """Lets go of the files; views that are held stay valid."""
        self._maps.clear()

    def _map(self, file: Path) -> Tensor:
        if file not in self._maps:
            # A private mapping: pages come from the page cache and are written to by nobody.
            size = file.stat().st_size
            self._maps[file] = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        return self._maps[file]
