"""Measure the device memory that a piece of code takes.

On a GPU these are the counters of torch's allocator. On a CPU they are the kernel's counters of the process (proc(5),
status): the kept memory is anonymous and shared memory, RssAnon + RssShmem, because pages of mapped files are dropped
when memory is short; the peak is VmHWM, which includes them. Memory that was allocated but never written to is not
counted.
"""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from engine.api.messages import PhaseMemory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt(3)
_MATRIX_BYTES = 1 << 18
_MAX_BYTES = 32 << 20


class Meter:
    """`with Meter(device) as meter: …` sets `meter.taken`. Counts the entire process, including allocations of other
    threads. Must not be nested, because the inner meter resets the peak."""

    taken: PhaseMemory

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> "Meter":
        _reset_peak(self._device)
        self._own, self._all, self._high = _counters(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own, everything, high = _counters(self._device)
        if high <= self._high:
            high = self._all  # the peak is older than this code
        kept = own - self._own
        self.taken = PhaseMemory(str(self._device), kept, max(kept, max(high, everything) - self._all))


@contextlib.contextmanager
def release_at_once() -> Iterator[None]:
    """Return freed matrices to the system at once within this context.

    By default, glibc raises its mmap threshold to the largest freed size and keeps twice as much. The peak of loading
    would then vary between starts, by half of a model of 40 MB. Afterwards the threshold is set to glibc's maximum,
    because steps free and allocate the same sizes repeatedly. Other C libraries have no such option."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None:
        yield
        return
    option(_MMAP_THRESHOLD, _MATRIX_BYTES)
    try:
        yield
    finally:
        option(_MMAP_THRESHOLD, _MAX_BYTES)
        option(_TRIM_THRESHOLD, 2 * _MAX_BYTES)


def trim_heap() -> None:
    """Return memory that the C library has kept after it was freed to the system: 25 to 70 MiB after loading a model of
    84 million parameters. C libraries other than glibc keep little."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory_in_use(device: torch.device) -> PhaseMemory:
    """Return the current memory of the process on the device."""
    own, everything, _ = _counters(device)
    return PhaseMemory(str(device), own, everything)


def _counters(device: torch.device) -> tuple[int, int, int]:
    """Return (own bytes, bytes with mapped files, peak of the latter since the last reset)."""
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        return allocated, allocated, torch.cuda.max_memory_allocated(device)
    text = _STATUS.read_text()
    sizes = {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return sizes["RssAnon"] + sizes["RssShmem"], sizes["VmRSS"], sizes["VmHWM"]


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # not available in some sandboxes; then only new maxima of the process are seen
        _CLEAR.write_text(_RESET_PEAK)
