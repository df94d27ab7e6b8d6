"""Decode steps captured once as CUDA graphs, for a ladder of sizes: a step is then one call, whatever it launches.

A step of n rows runs in the graph of the least size that holds it, with empty rows behind it; a larger one, or one in
which a row has several tokens, runs launch by launch. The graphs read the step's rows where `StepUpload` puts them.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Captured(Generic[T]):
    graph: "torch.cuda.CUDAGraph"
    outputs: T


class Graphs(Generic[T]):
    """`run(size)` makes the launches of a padded step of so many rows and returns its outputs, which a replay fills
    anew. On a device without graphs every size is run."""

    def __init__(self, sizes: Sequence[int], run: Callable[[int], T], device: torch.device) -> None:
        wrong = [size for size in sizes if size < 1]
        if wrong or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"graph sizes {list(sizes)}: must be ascending and at least 1")
        self.sizes = tuple(sizes)
        self._run, self._device, self._wanted = run, device, tuple(sizes)
        self._captured: dict[int, Captured[T]] = {}

    def capture(self, budget: int, progress: Callable[[float], None] = lambda fraction: None) -> int:
        """Captures every size, the largest first, so that the smaller ones fit in its memory; returns the bytes that
        they took. Sizes for which more than `budget` bytes would be in use are left out, the smaller ones kept."""
        if self._device.type != "cuda":
            return 0
        pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.memory_reserved(self._device)
        used, kept = 0, []
        for number, size in enumerate(reversed(self.sizes)):
            self._run(size)  # what libraries set up on first use is no part of a graph
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # thread_local: nccl's own thread looks after its events meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = self._run(size)
            taken = torch.cuda.memory_reserved(self._device) - before
            progress((number + 1) / len(self.sizes))
            if taken > budget:
                del graph, outputs
                if not kept:  # its memory holds nothing else
                    pool = torch.cuda.graph_pool_handle()
                    torch.cuda.empty_cache()
                continue
            used = taken
            kept.append(size)
            self._captured[size] = Captured(graph, outputs)
        self.sizes = tuple(sorted(kept))
        return used

    @property
    def has(self) -> list[bool]:
        """Of the sizes that were wanted, in their order, which there are."""
        return [size in self.sizes for size in self._wanted]

    def keep(self, which: Sequence[bool]) -> None:
        """Leaves only these of the sizes that were wanted."""
        self.sizes = tuple(size for size, kept in zip(self._wanted, which, strict=True) if kept)
        self._captured = {size: one for size, one in self._captured.items() if size in self.sizes}

    def size_for(self, rows: int) -> int | None:
        """The least size that holds so many rows, or None."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, size: int) -> T:
        """Outputs of a step of this size, valid until the next one. Raises ValueError for a size that is not on the
        ladder."""
        if size not in self.sizes:
            raise ValueError(f"no graph for {size} rows; there are {list(self.sizes)}")
        captured = self._captured.get(size)
        if captured is None:
            return self._run(size)
        captured.graph.replay()
        return captured.outputs
