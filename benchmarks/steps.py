"""Measure the Python cost of a step without a model: `python -m benchmarks.steps [--running 1 32 256] [--steps 200]`.

Reports per step of `--running` decoding sequences: `plan` (scheduler), `prepare` (the worker's request table and batch
tensors, on the CPU), `apply` (results to deltas), `output` (the encoded message of the step). Times are microseconds of
this thread's CPU time, so that waiting on a busy machine does not count; medians, 5th and 95th percentile.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import facts
from engine.api.frames import encode
from engine.api.messages import FromEngine, Output, Sampling, Submit
from engine.core.config import SchedulerConfig
from engine.core.plan import StepPlan, StepResult
from engine.core.scheduler import Scheduler
from engine.kv.layout import Group, Layout
from engine.worker.batch import build_batch
from engine.worker.rows import plan_rows
from engine.worker.table import RequestTable

PROMPT_TOKENS, MAX_CONTEXT, VOCAB = 100, 4096, 32000
PARTS = ("plan", "prepare", "apply", "output")
WARM_STEPS = 20


class Steps:
    """Build a scheduler with `running` decoding sequences, one step ahead of its results, and the worker's inputs."""

    def __init__(self, running: int) -> None:
        self.running = running
        groups = (Group("full.0", (0,), None), Group("window512.0", (1,), 512))
        self.layout = Layout(groups, 16, 1, 1, 64, 4)
        self.scheduler = Scheduler(
            SchedulerConfig(
                layout=self.layout,
                blocks=2 * running * 64 + 1000,
                max_context=MAX_CONTEXT,
                max_running=running,
                max_step_tokens=max(512, running),
            )
        )
        self.table = RequestTable(slots=running, max_context=MAX_CONTEXT, layout=self.layout, vocab=VOCAB)
        for number in range(running):
            prompt = tuple((number * 31 + i) % VOCAB for i in range(PROMPT_TOKENS + number % 16))
            sampling = Sampling(temperature=0.0)
            self.scheduler.submit(Submit(str(number), prompt, sampling, MAX_CONTEXT, eos_token_ids=(1,)), 0.0)
        self._ahead: StepPlan | None = None
        while self._count_decodes() < running:
            self.step({})

    def _count_decodes(self) -> int:
        return 0 if self._ahead is None else sum(row.sample and row.count == 1 for row in self._ahead.rows)

    def step(self, into: dict[str, list[float]]) -> None:
        """Plans a step and prepares it, then settles the one before."""
        times = [time.thread_time_ns()]
        planned = self.scheduler.plan(1.0)
        assert planned is not None, "all sequences run"
        times.append(time.thread_time_ns())
        self._prepare(planned.plan)
        times.append(time.thread_time_ns())
        if self._ahead is not None:
            result = StepResult(self._ahead.step, tuple(7 if row.sample else -1 for row in self._ahead.rows))
            start = time.thread_time_ns()
            settled = self.scheduler.apply(result, 1.0)
            middle = time.thread_time_ns()
            message: list[FromEngine] = [Output(result.step, tuple(settled.deltas))]
            encode(message)
            end = time.thread_time_ns()
            for part, taken in zip(
                PARTS, (times[1] - times[0], times[2] - times[1], middle - start, end - middle), strict=True
            ):
                into.setdefault(part, []).append(taken / 1000)
        self._ahead = planned.plan
        self.scheduler.counters.steps.clear()

    def _prepare(self, plan: StepPlan) -> None:
        self.table.apply(plan)
        rows = plan_rows(plan)
        build_batch(
            rows.slots,
            rows.first,
            rows.count,
            tokens=self.table.tokens,
            rope_lengths=self.table.rope_lengths,
            tables=self.table.tables,
            block_tokens=self.layout.block_tokens,
        )


def measure(running: int, steps: int) -> dict[str, dict[str, float]]:
    """Microseconds by part and in total."""
    run = Steps(running)
    for _ in range(WARM_STEPS):
        run.step({})
    times: dict[str, list[float]] = {}
    for _ in range(steps):
        run.step(times)
    times["scheduler"] = [a + b + c for a, b, c in zip(times["plan"], times["apply"], times["output"], strict=True)]
    times["total"] = [a + b for a, b in zip(times["scheduler"], times["prepare"], strict=True)]
    return {name: _summary(values) for name, values in times.items()}


def _summary(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20)
    return {"median": round(statistics.median(values), 1), "p5": round(cuts[0], 1), "p95": round(cuts[-1], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps", description="Python time of a step without a model."
    )
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/steps-DATE.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "steps",
        "unit": "us of processor time",
        "machine": asdict(facts()),
        "running": {},
    }
    for running in options.running:
        figures = result["running"][str(running)] = measure(running, options.steps)
        line = ", ".join(
            f"{name} {value['median']:.0f} ({value['p5']:.0f}-{value['p95']:.0f})" for name, value in figures.items()
        )
        print(f"{running:4d} running: {line} us", flush=True)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    out = options.out or Path(__file__).parent / "results" / f"steps-{day}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
