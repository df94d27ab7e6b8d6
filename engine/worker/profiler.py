"""Trace of torch's operations in the worker's thread, on the CPU and the GPU."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch.autograd import profiler

Call = Callable[[Callable[[], None]], Future[None]]


class TorchTrace:
    """`call` runs a function in the worker's thread. Torch records the operations of the thread that starts it.

    This uses the profiler of torch.autograd: the start of torch.profiler.profile imports torch's compiler, which takes
    seconds, and which an engine leaves out."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._running: profiler.profile | None = None

    def start(self) -> Future[None]:
        return self._call(self._start)

    def stop(self, file: Path) -> Future[None]:
        return self._call(lambda: self._stop(file))

    def _start(self) -> None:
        device = "cuda" if torch.cuda.is_available() else None
        running = profiler.profile(use_device=device, use_kineto=True)
        running.__enter__()
        self._running = running

    def _stop(self, file: Path) -> None:
        running, self._running = self._running, None
        assert running is not None, "a profile that could not start is not stopped"
        running.__exit__(None, None, None)
        running.export_chrome_trace(str(file))
