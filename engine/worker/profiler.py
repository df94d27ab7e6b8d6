"""Trace of torch's operations in the worker's thread, on the CPU and the GPU."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[Callable[[], None]], Future[None]]


class TorchTrace:
    """`call` runs a function in the worker's thread. Torch records the operations of the thread that starts it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._profile: Any = None

    def start(self) -> None:
        self._call(self._start)

    def stop(self, file: Path) -> Future[None]:
        return self._call(lambda: self._stop(file))

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def _stop(self, file: Path) -> None:
        running, self._profile = self._profile, None
        running.stop()
        running.export_chrome_trace(str(file))
