"""Decode steps captured as CUDA graphs for a ladder of sizes, so that a step is a single launch.

A step of n rows is replayed in the smallest captured size of at least n, padded with empty rows. Larger steps, steps
with several tokens in a row, and steps that would be mostly padding are launched kernel by kernel. Graphs read the rows
of a step from the buffers of `StepUpload`.

All sizes use one memory pool. A graph must therefore return its results in buffers outside of the pool, which all sizes
share. Results in the pool would be kept for each size: the logits of a ladder of 35 sizes with a vocabulary of 128k
take
2.3 GB.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

T = TypeVar("T")
Replay = Callable[[], None]
PADDING_ROWS = 8
PADDING_SHARE = 0.25


class Recorder(Protocol):
    """Captures launches in one memory pool: a GPU, or a simulated one in tests."""

    def reserved(self) -> int:
        """Return the bytes reserved by the allocator, after it has released unused ones."""

    def record(self, launches: Callable[[], T]) -> tuple[Replay, T]:
        """Capture the launches. Return a function that replays them, and their result."""

    def reset(self) -> None:
        """Start a new pool. No graph of the old pool may be in use."""


class CudaRecorder:
    """Captures CUDA graphs with torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def reserved(self) -> int:
        # A capture releases unused memory by itself, so a baseline without this would be too high.
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def record(self, launches: Callable[[], T]) -> tuple[Replay, T]:
        launches()  # one-time initialisation of libraries must not be captured
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: nccl's watchdog thread queries its events during the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = launches()
        return graph.replay, outputs

    def reset(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()


def recorder_of(device: torch.device) -> Recorder | None:
    """Return the recorder for the device, or None if graphs are not supported."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Graphs(Generic[T]):
    """Captured decode steps by size.

    `run(size)` launches a padded step of `size` rows and returns its outputs in buffers that all sizes share; a replay
    overwrites them. Without a recorder, every step is run."""

    def __init__(self, sizes: Sequence[int], run: Callable[[int], T], recorder: Recorder | None) -> None:
        wrong = [size for size in sizes if size < 1]
        if wrong or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"graph sizes {list(sizes)}: must be ascending and at least 1")
        self.sizes = tuple(sizes)
        self._run, self._recorder, self._wanted = run, recorder, tuple(sizes)
        self._captured: dict[int, tuple[Replay, T]] = {}

    def capture(self, budget: int, progress: Callable[[float], None] = lambda fraction: None) -> int:
        """Capture every size and return the bytes used.

        The largest size is captured first, because smaller ones fit into its memory. Sizes that would exceed `budget`
        are left out."""
        recorder = self._recorder
        if recorder is None:
            return 0
        before = recorder.reserved()
        used, kept = 0, []
        for number, size in enumerate(reversed(self.sizes)):
            captured: tuple[Replay, T] | None = recorder.record(partial(self._run, size))
            taken = recorder.reserved() - before
            progress((number + 1) / len(self.sizes))
            if taken > budget:
                captured = None
                if not kept:
                    recorder.reset()
                continue
            assert captured is not None
            used = taken
            kept.append(size)
            self._captured[size] = captured
        self.sizes = tuple(sorted(kept))
        return used

    @property
    def captures(self) -> bool:
        """True if `capture` has sizes to capture and a recorder."""
        return self._recorder is not None and bool(self.sizes)

    @property
    def has(self) -> list[bool]:
        """For each requested size, in ascending order, whether it was captured."""
        return [size in self.sizes for size in self._wanted]

    def keep(self, which: Sequence[bool]) -> None:
        """Drop the sizes for which `which`, in the order of `has`, is false."""
        self.sizes = tuple(size for size, kept in zip(self._wanted, which, strict=True) if kept)
        self._captured = {size: one for size, one in self._captured.items() if size in self.sizes}

    def size_for(self, rows: int) -> int | None:
        """Return the smallest captured size of at least `rows`. None if there is no such size, or if more than
        PADDING_ROWS and PADDING_SHARE of it would be padding: a graph of 240 is slower for one row than its
        launches."""
        at = bisect_left(self.sizes, rows)
        if at == len(self.sizes):
            return None
        size = self.sizes[at]
        return size if size - rows <= max(PADDING_ROWS, PADDING_SHARE * size) else None

    def replay(self, size: int) -> T:
        """Return the outputs of a step of this size, valid until the next one. Raises ValueError if the size was not
        captured."""
        if size not in self.sizes:
            raise ValueError(f"no graph for {size} rows; there are {list(self.sizes)}")
        captured = self._captured.get(size)
        if captured is None:
            return self._run(size)
        replay, outputs = captured
        replay()
        return outputs
