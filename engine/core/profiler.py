"""Profiler of an engine (OBS-06): a trace of the worker's operations, and the steps in Chrome's trace format.

Both files open in Perfetto and in chrome://tracing. Times are microseconds of the monotonic clock
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from engine.api.errors import RequestError
from engine.api.messages import Profiled
from engine.core.plan import StepPlan

MAX_STEPS = 200_000  # steps of a timeline, about 80 MB; later ones are counted only
SCHEDULER, WORKER = 1, 2  # rows of the timeline


Answer = Callable[[Profiled], None]


class OperationTrace(Protocol):
    """Trace of the operations that the worker's thread runs."""

    def start(self) -> Future[None]:
        """Begin before the next step."""

    def stop(self, file: Path) -> Future[None]:
        """End after the last step that was started, and write the file."""


class Profiler:
    """Records steps from `start` to `stop`. `label` is the beginning of the names of its files."""

    def __init__(self, folder: Path, label: str, trace: OperationTrace) -> None:
        self._folder, self._label, self._trace = folder, label, trace
        self._events: list[dict[str, Any]] = []
        self._free_at = 0.0
        self._num_omitted = 0
        self._runs = 0
        self.active = False

    def start(self, answer: Answer) -> None:
        """Begin a profile. `answer` is called once, in any thread. Raises RequestError if one is running, or if the
        folder cannot be written."""
        if self.active:
            raise RequestError("the profiler is already running; stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"observability.profiler_folder: {error}") from error
        self._events, self._num_omitted = _names(), 0
        self.active = True
        self._runs += 1

        def begun(started: Future[None]) -> None:
            error = started.exception()  # of torch; the engine continues
            self.active = error is None
            answer(Profiled(error=f"the profiler cannot start: {error}" if error else ""))

        self._trace.start().add_done_callback(begun)

    def step(self, plan: StepPlan, planned: float, started: float, ended: float, load: dict[str, int]) -> None:
        """Record a step. load: values of the scheduler after the step."""
        if not self.active:
            return
        if len(self._events) >= 3 * MAX_STEPS:
            self._num_omitted += 1
            return
        prompt = sum(row.count for row in plan.rows if row.count > 1 or not row.sample)
        what = {"rows": len(plan.rows), "tokens": plan.tokens, "prompt_tokens": prompt, "new": len(plan.new)}
        begun = max(started, self._free_at)  # steps run one after another
        self._events += (
            _span(f"plan {plan.step}", SCHEDULER, planned, started, {}),
            _span(f"step {plan.step}", WORKER, begun, ended, what),
            {"name": "load", "ph": "C", "pid": os.getpid(), "ts": 1e6 * ended, "args": load},
        )
        self._free_at = ended

    def stop(self, answer: Answer) -> None:
        """End the profile and write its files. `answer` is called once, in any thread. Raises RequestError if no
        profile is running."""
        if not self.active:
            raise RequestError("the profiler is not running; start it first")
        self.active = False
        name = f"{self._label}-{os.getpid()}-{self._runs}"
        steps, operations = self._folder / f"{name}.steps.json", self._folder / f"{name}.torch.json"
        events, self._events = self._events, []
        body = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"omitted_steps": self._num_omitted}}

        def finish(written: Future[None]) -> None:
            try:
                written.result()
                steps.write_text(json.dumps(body))
                answer(Profiled((str(steps), str(operations))))
            except Exception as error:  # of torch or the disk; the engine continues
                answer(Profiled(error=f"the profile cannot be written: {error}"))

        self._trace.stop(operations).add_done_callback(finish)


def _span(name: str, row: int, start: float, end: float, what: dict[str, int]) -> dict[str, Any]:
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"name": name, "ph": "X", "pid": os.getpid(), "tid": row, **times, "args": what}


def _names() -> list[dict[str, Any]]:
    """Return the events that name the rows."""
    rows = {SCHEDULER: "scheduler", WORKER: "worker"}
    return [
        {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": row, "args": {"name": name}}
        for row, name in rows.items()
    ]
