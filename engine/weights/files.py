"""Checkpoint tensors as views of memory-mapped safetensors files: nothing is copied until a layer loads its share.

Pages that were read stay resident until `release`, which drops them with MADV_DONTNEED (madvise(2)). They remain in
the page cache, from which other engines and the next start read the file, so posix_fadvise is not called.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine.models.headers import TensorInfo
from engine.weights.read_ahead import ReadAhead, Span

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
}


AROUND = 1 << 20  # bytes on either side: on a page fault, Linux also maps neighbours that are in the page cache


class Weights:
    """Tensors by name. Tracks the bytes that were read, for progress, and the names, to detect forgotten tensors.

    A view stays valid while it exists, even if the file is deleted, but not if the file is truncated.
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
        self._ahead: ReadAhead | None = None

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Let a thread read the files before their tensors are used."""
        self._ahead = ReadAhead(map(_span, self.tensors.values()))
        try:
            yield
        finally:
            self._ahead.close()
            self._ahead = None

    def has(self, name: str) -> bool:
        return name in self.tensors

    def type(self, name: str) -> str:
        """Return the type of a tensor in the file, such as `BF16` or `Q4_K`."""
        return self.tensors[name].dtype

    def file(self, path: str) -> Path:
        """Return the file that has the tensors of a projection."""
        return next(info.file for name, info in self.tensors.items() if name.startswith(f"{path}."))

    def read(self, name: str) -> Tensor:
        """Return a read-only view of the tensor in the stored type, or of its bytes for a ggml type."""
        info = self.tensors[name]
        if name not in self.read_names:
            self.read_names.add(name)
            self._done += info.bytes
            self._progress(min(1.0, self._done / self._total))
        self._unreleased.add(name)
        if self._ahead is not None:
            self._ahead.used(_span(info))
        raw = self._map(info.file)[info.offset : info.offset + info.bytes]
        if info.dtype not in TORCH_DTYPES:
            return raw
        dtype = TORCH_DTYPES[info.dtype]
        if info.offset % dtype.itemsize:
            raw = raw.clone()  # a view of another type must be aligned
        return raw.view(dtype).view(info.shape[::-1]).T if info.transposed else raw.view(dtype).view(info.shape)

    def release(self) -> None:
        """Make the pages of all tensors read so far non-resident. Views stay valid; an access reads the page again."""
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
            # A private mapping, which is never written: pages come from the page cache.
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            self._bytes[file] = torch.frombuffer(self._maps[file], dtype=torch.uint8)
        return self._bytes[file]


def _span(info: TensorInfo) -> Span:
    return Span(info.file, info.offset, info.offset + info.bytes)
