"""Time the steps, prefills and request mixes of one engine with random weights in the shape of a known model.

    python -m benchmarks.gpu_engine llama-3.1-8b --jobs decode:32:512 prefill:2048 chat:1000 --out FILE

Jobs: `decode:ROWS:CONTEXT`, `profile:ROWS:CONTEXT` (the same steps under torch's profiler: kernels of a step, and
time that the device waits for the host), `prefill:TOKENS`, `chat:REQUESTS`, `uniform:REQUESTS`
(benchmarks/workload.py); for pooling models `embed:PROMPTS:TOKENS` and `texts:PROMPTS` of many lengths.
All times include scheduling and sampling, but not detokenization. Results are written after each job, so that an
interrupted run keeps the results of its finished jobs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from appliance.planning.workspace import graphs
from benchmarks.gpu_run import Costs, Engine, decoding, pooled_flops, profiled
from benchmarks.shapes import SHAPES, declare
from benchmarks.workload import MIXES, TEXT, same, texts
from engine.api.config import EngineConfig, graph_ladder, mixed_graph_ladder
from engine.arguments import engine_config
from engine.models.checkpoint import read_checkpoint

STEPS = 150  # decode steps of a measurement
PROFILED = 40  # decode steps that are profiled
PREFILLS = 3
MAX_ROWS = 512


@dataclass(frozen=True)
class Kind:
    """Arguments of a job, its number of concurrent rows, and the length of its longest request."""

    numbers: tuple[str, ...]
    rows: Callable[..., int]
    length: Callable[..., int]


KINDS: dict[str, Kind] = {
    "decode": Kind(("ROWS", "CONTEXT"), lambda rows, context: rows, lambda rows, context: context + 1024),
    "profile": Kind(("ROWS", "CONTEXT"), lambda rows, context: rows, lambda rows, context: context + 1024),
    "prefill": Kind(("TOKENS",), lambda tokens: 1, lambda tokens: tokens + 8),
    "embed": Kind(("PROMPTS", "TOKENS"), lambda count, tokens: min(count, MAX_ROWS), lambda count, tokens: tokens),
    "texts": Kind(("PROMPTS",), lambda count: min(count, MAX_ROWS), lambda count: TEXT.limit),
    **{mix: Kind(("REQUESTS",), lambda count: min(count, MAX_ROWS), lambda count: 2056) for mix in MIXES},
}


@dataclass(frozen=True)
class Job:
    kind: str
    numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        return ":".join(map(str, (self.kind, *self.numbers)))

    @property
    def rows(self) -> int:
        return KINDS[self.kind].rows(*self.numbers)

    @property
    def length(self) -> int:
        return KINDS[self.kind].length(*self.numbers)


def job(text: str) -> Job:
    name, *numbers = text.split(":")
    if name not in KINDS or len(numbers) != len(KINDS[name].numbers) or not all(one.isdigit() for one in numbers):
        known = ", ".join(":".join((name, *kind.numbers)) for name, kind in KINDS.items())
        raise argparse.ArgumentTypeError(f"{text}: must be one of {known}")
    return Job(name, tuple(map(int, numbers)))


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    engine: Engine
    vocab: int
    copy: float  # bytes a second
    matmul: float  # operations a second
    costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        worker = self.engine.worker
        self.costs = Costs.of(worker.model, worker.layout, worker.weight_bytes, worker.embed_bytes)

    def run(self, asked: Job) -> dict[str, Any]:
        if asked.kind == "texts":
            return self.pool(texts(*asked.numbers, self.vocab))
        if asked.kind == "embed":
            return self.pool([one.prompt for one in same(*asked.numbers, 0, self.vocab)])
        runs = {"decode": self.decode, "profile": self.profile, "prefill": self.prefill}
        if asked.kind in MIXES:
            return self.mix(asked.kind, *asked.numbers)
        return runs[asked.kind](*asked.numbers)

    def first(self) -> float:
        """Seconds to a first token, or vector."""
        start = time.perf_counter()
        requests = same(1, 16, 1, self.vocab)
        if self.engine.worker.model.pooler is None:
            self.engine.serve(requests)
        else:
            self.engine.pool([one.prompt for one in requests])
        return time.perf_counter() - start

    def _decode(self, rows: int, context: int, steps: int) -> tuple[list[int], float]:
        """Decode with all rows for `steps` steps. Return their indices and the mean context of the rows."""
        lead = (
            -(-rows * context // self.engine.config.scheduling.max_step_tokens) + 8
        )  # steps until the last prompt is in
        self.engine.worker.steps.clear()
        self.engine.serve(same(rows, context, lead + steps, self.vocab))
        places = decoding(self.engine.worker.steps, rows)[5:steps]
        if len(places) < min(10, steps // 2):
            raise RuntimeError(f"only {len(places)} steps had all {rows} rows decoding")
        return places, context + (lead + steps) / 2

    def decode(self, rows: int, context: int) -> dict[str, Any]:
        places, seen = self._decode(rows, context, STEPS)
        steps = self.engine.worker.steps
        intervals = [steps[at].ended - steps[at - 1].ended for at in places]
        step = statistics.median(intervals)
        moved, flops = self.costs.decode(rows, seen)
        roof = max(moved / self.copy, flops / self.matmul)
        return {
            "rows": rows,
            "context": round(seen),
            "step_us": step * 1e6,
            "step_us_range": [min(intervals) * 1e6, max(intervals) * 1e6],
            "steps": len(intervals),
            "tokens_per_s": rows / step,
            "roof_us": roof * 1e6,
            "of_roof": roof / step,
        }

    def profile(self, rows: int, context: int) -> dict[str, Any]:
        """Needs a GPU: elsewhere there is no device that could wait for the host."""
        plain = self.decode(rows, context)["step_us"]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            places, _ = self._decode(rows, context, PROFILED)
            torch.cuda.synchronize()
        steps = self.engine.worker.steps
        last = steps[-1].ended
        window = (steps[places[0] - 1].ended - last) * 1e6, (steps[places[-1]].ended - last) * 1e6
        events = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return {"rows": rows, "step_us": plain, **profiled(events, window, len(places), plain)}

    def prefill(self, tokens: int) -> dict[str, Any]:
        times = []
        for _ in range(PREFILLS):
            (reply,) = self.engine.serve(same(1, tokens, 1, self.vocab))
            assert reply.timing is not None, "a finished request has its times"
            times.append(reply.timing.first_token - reply.timing.scheduled)
        middle = statistics.median(times)
        return {
            "tokens": tokens,
            "ms": middle * 1e3,
            "ms_range": [min(times) * 1e3, max(times) * 1e3],
            "tokens_per_s": tokens / middle,
            "tflop_per_s": self.costs.prefill(tokens) / middle / 1e12,
            "of_matmul": self.costs.prefill(tokens) / middle / self.matmul,
        }

    def pool(self, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """The median of some rounds, each of all prompts at once."""
        times = []
        for _ in range(PREFILLS):
            self.engine.worker.steps.clear()
            start = time.perf_counter()
            self.engine.pool(prompts)
            times.append(time.perf_counter() - start)
        lengths, middle = [len(ids) for ids in prompts], statistics.median(times)
        flops = pooled_flops(self.costs, lengths)
        return {
            "prompts": len(prompts),
            "tokens": sum(lengths),
            "ms": middle * 1e3,
            "ms_range": [min(times) * 1e3, max(times) * 1e3],
            "tokens_per_s": sum(lengths) / middle,
            "prompts_per_s": len(prompts) / middle,
            "steps": len(self.engine.worker.steps),
            "tflop_per_s": flops / middle / 1e12,
            "of_matmul": flops / middle / self.matmul,
        }

    def mix(self, kind: str, count: int) -> dict[str, Any]:
        requests = MIXES[kind](count, self.vocab)
        self.engine.worker.steps.clear()
        start = time.perf_counter()
        replies = self.engine.serve(requests)
        seconds = time.perf_counter() - start
        into, out = sum(len(request.prompt) for request in requests), sum(request.tokens for request in requests)
        waits = [one.timing.first_token - one.timing.arrived for one in replies if one.timing is not None]
        steps = self.engine.worker.steps
        return {
            "requests": count,
            "prompt_tokens": into,
            "new_tokens": out,
            "seconds": seconds,
            "new_tokens_per_s": out / seconds,
            "all_tokens_per_s": (into + out) / seconds,
            "first_token_s": _spread(waits),
            "steps": len(steps),
            "rows_per_step": statistics.mean(step.rows for step in steps),
            "preemptions": sum(one.timing.preemptions for one in replies if one.timing is not None),
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]}


# -- the process -------------------------------------------------------------------------------------------------------


def settings(shape: str, folder: Path, device: str, jobs: Sequence[Job]) -> EngineConfig:
    """An engine that holds all the jobs, on weights that are drawn where they are used: bf16 on a GPU."""
    path, rows = declare(shape, folder), max([1, *(one.rows for one in jobs)])
    common: dict[str, Any] = {
        "model": str(path),
        "load": "random",
        "max_context": max([64, *(one.length for one in jobs)]),
        "max_running": rows,
        "prefix_cache": False,
    }
    if device == "cpu":
        return engine_config(kv_bytes=1 << 28, **common)
    return engine_config(
        device="cuda",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        kernels="triton",
        kv_bytes=int(torch.cuda.mem_get_info()[0] * 0.9),
        kv_measured=True,
        graph_sizes=graph_ladder(rows),
        mixed_graph_sizes=mixed_graph_ladder(8192),
        graph_bytes=graph_bytes(path, graph_ladder(rows), mixed_graph_ladder(8192)),
        max_step_tokens=8192,
        threads=4,
        **common,
    )


def graph_bytes(path: Path, sizes: Sequence[int], mixed: Sequence[int]) -> int:
    """Return the budget of captured steps that `slipway plan` gives a bf16 model."""
    model = read_checkpoint(path, weights=False).model
    return round(sum(step.value for step in graphs(model, sizes=sizes, mixed=mixed, element_bytes=2)))


@contextmanager
def engine(config: EngineConfig) -> Iterator[Engine]:
    made = Engine(config)
    try:
        yield made
    finally:
        made.close()


def main(arguments: Sequence[str] | None = None) -> int:
    entered = time.time()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--jobs", nargs="+", type=job, required=True)
    parser.add_argument("--start-only", action="store_true", help="start an engine for these jobs, but run no job")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--copy", type=float, default=4e12, help="copy rate of the device, bytes per second")
    parser.add_argument("--matmul", type=float, default=8e14, help="bf16 matrix product rate, operations per second")
    parser.add_argument("--began", type=float, default=entered, help="start of the process, in seconds since 1970")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = settings(options.shape, Path(folder, options.shape), options.device, options.jobs)
        start = time.time()
        with engine(config) as made:
            ready = time.time()
            bench = Bench(made, SHAPES[options.shape]["vocab_size"], options.copy, options.matmul)
            first = bench.first()
            result: dict[str, Any] = {
                "shape": options.shape,
                "config": {name: str(getattr(config, name)) for name in config.__struct_fields__},
                "weight_bytes": made.worker.weight_bytes,
                "kv_bytes": made.worker.kv_bytes,
                "start_s": {
                    "process and imports": start - options.began,
                    **made.worker.seconds,
                    "engine": ready - start,
                    "first token": first,
                    "all": time.time() - options.began,
                },
                "jobs": {},
            }
            return int(run(bench, [] if options.start_only else options.jobs, result, options.out))


def run(bench: Bench, jobs: Sequence[Job], result: dict[str, Any], out: Path) -> bool:
    """Run jobs until one fails, and return whether one did. A failure leaves the engine in an unknown state."""
    out.write_text(json.dumps(result, indent=1) + "\n")
    for one in jobs:
        try:
            found = bench.run(one)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        result["jobs"][one.name] = found
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{result['shape']} {one.name}: {_line(found)}", flush=True)
        if "error" in found:
            return True
    return False


def _line(found: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
        if not isinstance(value, list | dict)
    )


if __name__ == "__main__":
    sys.exit(main())
