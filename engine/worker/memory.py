"""What a piece of code takes of a device's memory, measured and not computed.

On a GPU the counters of torch's allocator. On a CPU what the kernel counts for the process (proc(5), status): kept is
its own memory, RssAnon + RssShmem, for pages of a mapped file are dropped when room is needed; the peak is VmHWM, which
has them. Memory that was asked for and never written to counts nowhere.
"""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from engine.api.messages import Taken

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt(3)
_MATRIX_BYTES = 1 << 18
_MOST_BYTES = 32 << 20


class Meter:
    """`with Meter(device) as meter: …` fills `meter.taken`. Counts the whole process: what other threads allocate
    meanwhile is in it. Not to be nested: an inner one sets the peak back."""

    taken: Taken

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
            high = self._all  # an old peak that still stands says nothing about this code
        kept = own - self._own
        self.taken = Taken(str(self._device), kept, max(kept, max(high, everything) - self._all))


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Within, memory of a matrix goes back to the system when it is freed. glibc by itself raises its threshold to the
    largest piece that was freed, and keeps twice as much: the most that loading takes would differ from start to start
    by half a model of 40 MB. Afterwards the threshold is where glibc's own rises to at most, as steps free and take the
    same sizes again and again. Other libraries than glibc have no such option."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None:
        yield
        return
    option(_MMAP_THRESHOLD, _MATRIX_BYTES)
    try:
        yield
    finally:
        option(_MMAP_THRESHOLD, _MOST_BYTES)
        option(_TRIM_THRESHOLD, 2 * _MOST_BYTES)


def give_back() -> None:
    """Returns to the system what the C library keeps of freed memory: after a model of 84 million parameters is loaded
    these are 25 to 70 MiB. Other libraries than glibc keep nothing worth mentioning."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def in_use(device: torch.device) -> Taken:
    """What the process has of the device until now."""
    own, everything, _ = _counters(device)
    return Taken(str(device), own, everything)


def _counters(device: torch.device) -> tuple[int, int, int]:
    """Bytes of its own; with mapped files; the most of the latter since the peak was set back."""
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
    with contextlib.suppress(OSError):  # a sandbox without it: then a peak below an older one is not seen
        _CLEAR.write_text(_RESET_PEAK)
