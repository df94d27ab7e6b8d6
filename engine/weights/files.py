"""Checkpoint tensors as views of memory-mapped safetensors files: nothing is copied until a layer takes its share.

Pages that were read stay resident until `release`, which drops them with MADV_DONTNEED (madvise(2)). They remain in
the page cache, from which other engines and the next start read the same file, so no posix_fadvise follows.
"""

import mmap
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
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


AROUND = 1 << 20  # bytes on either side: Linux maps neighbours of a page fault that are in the page cache


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
        self._maps: dict[Path, mmap.mmap] = {}
        self._bytes: dict[Path, Tensor] = {}  # the same memory
        self._unreleased: set[str] = set()

    def read(self, name: str) -> Tensor:
        """A read-only view of the whole tensor, in the type of the file; the bytes of one in a type of ggml.
        Do not write to it."""
        info = self.tensors[name]
        if name not in self.read_names:
            self.read_names.add(name)
            self._done += info.bytes
            self._progress(min(1.0, self._done / self._total))
        self._unreleased.add(name)
        raw = self._map(info.file)[info.offset : info.offset + info.bytes]
        if info.dtype not in TORCH_DTYPES:
            return raw
        dtype = TORCH_DTYPES[info.dtype]
        if info.offset % dtype.itemsize:
            raw = raw.clone()  # a view of another type must start at a multiple of its size
        return raw.view(dtype).view(info.shape)

    def release(self) -> None:
        """Make the pages of all tensors read so far non-resident. Views stay valid: an access reads the page again."""
        for name in self._unreleased:
            info = self.tensors[name]
            first = max(0, info.offset - AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
            last = min(info.offset + info.bytes + AROUND, len(self._maps[info.file]))
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, first, last - first)
        self._unreleased.clear()

    def close(self) -> None:
        """Release all pages and close the files; existing views stay valid."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)
        self._unreleased.clear()
        self._maps.clear()
        self._bytes.clear()

    def _map(self, file: Path) -> Tensor:
        if file not in self._maps:
            # A private mapping: pages come from the page cache and are written to by nobody.
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            self._bytes[file] = torch.frombuffer(self._maps[file], dtype=torch.uint8)
        return self._bytes[file]
