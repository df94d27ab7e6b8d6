"""Run plans in a separate thread, in the order in which they are started."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.profiler import record_function

from engine.api.golden import Arithmetic
from engine.api.messages import RankMemory
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult
from engine.kv.layout import Layout
from engine.lowering.footprint import PARTS
from engine.models.parts import Model
from engine.worker.adapters import AdapterStore


class Runner(Protocol):
    """Interface of a device that runs steps."""

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> Callable[[], StepResult]:
        """Start a step. Called in the worker's thread; the device may still be busy on return. The returned function
        waits for the step and is called in another thread. Late masks are awaited once the model runs."""


@dataclass(frozen=True)
class StartedStep:
    """A step that was started."""

    started: Future[Callable[[], StepResult]]

    def result(self) -> StepResult:
        return self.started.result()()


class Worker:
    """`model` and `layout` are declarations; the other public attributes are allocated sizes."""

    def __init__(
        self,
        runner: Runner,
        *,
        model: Model,
        layout: Layout,
        blocks: int,
        memory_usage: dict[str, int],
        mapped: int,
        threads: int,
        seconds: dict[str, float],
        arithmetic: Arithmetic,
        snapshots: int | None = None,
        reserved: tuple[int, ...] = (),
        cpu: int | None = None,
        gpu: torch.device | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """memory_usage: bytes by part (see RankMemory).
        mapped: bytes of weights used in the checkpoint file.
        threads: number of torch threads.
        arithmetic: parameters, in addition to the weights, on which the outputs depend.
        snapshots: number of snapshots of recurrent state; None if the model has no such state.
        reserved: blocks outside of the pool, for golden prompts.
        cpu: CPU of the worker's thread, which is the first of a pinned team.
        gpu: device on which it launches.
        adapters: LoRA adapters that plans move to slots."""
        self.model, self.layout, self.seconds = model, layout, seconds
        self.blocks, self.memory_usage, self.mapped = blocks, memory_usage, mapped
        self.arithmetic, self.reserved, self.snapshots = arithmetic, reserved, snapshots
        self.weight_bytes = sum(memory_usage.get(part, 0) for part in PARTS)
        self.kv_bytes = memory_usage["kv"]
        self.memory = (RankMemory(memory_usage, mapped),)
        self.adapters = adapters
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "worker", initializer=_begin, initargs=(threads, cpu, gpu))

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> StartedStep:
        """Queue a step. masks: allowed tokens by number of the sample (see `engine.structured`)."""
        return StartedStep(self._thread.submit(self._run, plan, masks))

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function in the worker's thread, after the steps that were started."""
        return self._thread.submit(function)

    def close(self) -> None:
        self._thread.shutdown()
        if self.adapters is not None:
            self.adapters.close()

    def _run(self, plan: StepPlan, masks: Masks | PendingMasks) -> Callable[[], StepResult]:
        with torch.inference_mode(), record_function(f"step {plan.step}"):
            for slot, version in plan.adapters:
                assert self.adapters is not None, "only plans of schedulers with adapter slots move adapters"
                self.adapters.fill(slot, version)
            return self._runner.start(plan, masks)


def _begin(threads: int, cpu: int | None, gpu: torch.device | None) -> None:
    """Initialise the worker's thread: the number of torch threads, the device and the CPU affinity are per thread."""
    torch.set_num_threads(threads)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})  # 0 is the calling thread
