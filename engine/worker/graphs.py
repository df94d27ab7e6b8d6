"""Decode steps captured once as CUDA graphs for a ladder of sizes, so that a step is one call whatever it launches.

A step of n rows is replayed in the smallest captured size that holds it, with empty rows as padding. Larger steps,
steps in which a row has several tokens, and steps that would be mostly padding are launched kernel by kernel. The
graphs read the rows of the step where `StepUpload` writes them.

All sizes use one memory pool. A graph must therefore return its results in buffers outside of the pool that all sizes
share: results that stay in the pool are kept for each size, and the logits of a ladder of 35 sizes with a vocabulary of
128k take 2.3 GB.
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
        """Return the bytes that the allocator holds, after it returned those that nothing uses."""

    def record(self, launches: Callable[[], T]) -> tuple[Replay, T]:
        """Capture the launches; return what replays them, and their result."""

    def reset(self) -> None:
        """Start a new pool. No graph of the old one may be in use."""


class CudaRecorder:
    """Captures CUDA graphs with torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def reserved(self) -> int:
        # A capture returns unused memory by itself, so a base that was read before would be too high.
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def record(self, launches: Callable[[], T]) -> tuple[Replay, T]:
        launches()  # what libraries set up on first use is no part of a graph
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: nccl's watchdog thread queries its events meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = launches()
        return graph.replay, outputs

    def reset(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()


def recorder_of(device: torch.device) -> Recorder | None:
    """Return what captures graphs on the device, or None if it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Graphs(Generic[T]):
    """Captured decode steps by size.

    `run(size)` launches a padded step of `size` rows and returns its outputs in buffers that all sizes share; a replay
    fills them again. Without a recorder every size is run."""

    def __init__(self, sizes: Sequence[int], run: Callable[[int], T], recorder: Recorder | None) -> None:
        wrong = [size for size in sizes if size < 1]
        if wrong or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"graph sizes {list(sizes)}: must be ascending and at least 1")
        self.sizes = tuple(sizes)
        self._run, self._recorder, self._wanted = run, recorder, tuple(sizes)
        self._captured: dict[int, tuple[Replay, T]] = {}

    def capture(self, budget: int, progress: Callable[[float], None] = lambda fraction: None) -> int:
        """Capture every size and return the bytes taken.

        The largest size is captured first, because the smaller ones fit into its memory. Sizes with which more than
        `budget` bytes would be in use are left out."""
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
        """Whether `capture` captures anything."""
        return self._recorder is not None and bool(self.sizes)

    @property
    def has(self) -> list[bool]:
        """For each size that was asked for, in ascending order, whether it was captured."""
        return [size in self.sizes for size in self._wanted]

    def keep(self, which: Sequence[bool]) -> None:
        """Drop the sizes for which `which`, in the order of `has`, is false."""
        self.sizes = tuple(size for size, kept in zip(self._wanted, which, strict=True) if kept)
        self._captured = {size: one for size, one in self._captured.items() if size in self.sizes}

    def size_for(self, rows: int) -> int | None:
        """Return the smallest size that holds so many rows, or None if there is none or more than PADDING_ROWS and
        PADDING_SHARE of it would be padding: one row in a graph of 240 is slower than its launches."""
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
