"""Count the launches of an engine's steps and measure their host time, without a GPU.

    python -m benchmarks.launches llama-3.1-8b qwen3-30b-a3b

The worker is built on torch's `meta` device. Launches go through Triton's driver to a libcuda.so.1 whose functions do
nothing, so that the measured time is what the host needs: planning the upload, choosing kernels, launching. A captured
graph counts as one launch, and its replay takes no time here (on a GPU 5 to 20 us). Kernels are loaded from Triton's
cache or compiled before the measurement.

    decode    every row computes one token and samples it
    mixed     one row computes a chunk of its prompt, the others one token
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.api.messages import Sampling
from engine.core.plan import NewRow, Row, StepPlan
from engine.kv.layout import NULL_BLOCK, Layout, blocks_of
from engine.layers.model import make_pages
from engine.worker.device import DeviceRunner
from engine.worker.precompile import config_for, parts_on
from kernels.jit import triton
from kernels.report import table
from kernels.tools.aot import TARGETS
from kernels.tools.launchers import NAME, build_stub

T = TypeVar("T")
_FREE = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_to_copy"}
# Functions of the driver that a launch calls. Attribute 0 of a function is its maximum number of threads.
DRIVER = """
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 227 << 10; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
static int launched = 0;
int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) { launched++; return 0; }
int cuLaunchedKernels(void) { return launched; }
"""


@dataclass(frozen=True)
class StepCost:
    """Cost of one kind of step on the host."""

    shape: str
    step: str
    triton: int  # launches of Triton kernels
    products: int  # products by torch's libraries
    others: int  # other kernels of torch
    graphs: int  # replays
    us: float  # median of the thread's CPU time in a step


class CountingRecorder:
    """Recorder of graphs that counts replays."""

    def __init__(self) -> None:
        self.replays = 0

    def reserved(self) -> int:
        return 0

    def record(self, launches: Callable[[], T]) -> tuple[Callable[[], None], T]:
        return self._replay, launches()

    def reset(self) -> None:
        pass

    def _replay(self) -> None:
        self.replays += 1


class _Counter(TorchDispatchMode):
    """Counts torch's operations that launch a kernel on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **(kwargs or {}))
        if name in {"mm", "addmm", "bmm", "_scaled_mm", "linear", "matmul"}:
            self.products += 1
        elif not func.is_view and name not in _FREE and _on_device((args, result)):
            self.others += 1
        return result


def _on_device(values: Any) -> bool:
    if isinstance(values, torch.Tensor):
        return values.device.type == "meta"
    return isinstance(values, tuple | list) and any(map(_on_device, values))


def simulate_device(architecture: str) -> Callable[[], int]:
    """Let Triton launch on a device of this architecture that does nothing. Return a function that counts the launches
    so far. The process must have been started with the stub in LD_LIBRARY_PATH."""
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    driver = CudaDriver.__new__(CudaDriver)
    driver.utils, driver.launcher_cls = CudaUtils(), CudaLauncher
    driver.get_current_device, driver.get_current_stream = lambda: 0, lambda device: 0
    driver.get_device_capability = lambda device: divmod(TARGETS[architecture].arch, 10)
    triton.runtime.driver.set_active(driver)
    launches: Callable[[], int] = ctypes.CDLL(NAME).cuLaunchedKernels
    return launches


def step_of(step: int, counts: Sequence[int], positions: int, layout: Layout, sampling: Sampling) -> StepPlan:
    """Return a step whose rows compute this many tokens, of requests with `positions` known tokens before."""
    blocks = tuple((NULL_BLOCK,) * blocks_of(positions + max(counts), layout.block_tokens) for _ in layout.groups)
    new = ()
    if step == 0:
        new = tuple(
            NewRow(slot, (0,) * (positions + count), positions + count, sampling, (0,), positions + count)
            for slot, count in enumerate(counts)
        )
    empty = tuple(() for _ in layout.groups)
    rows = tuple(Row(slot, positions, count, True, blocks if step == 0 else empty) for slot, count in enumerate(counts))
    return StepPlan(step, new, (), rows)


@torch.inference_mode()
def measure(
    shape: str, folder: Path, launched: Callable[[], int], kinds: dict[str, list[int]], repeats: int
) -> Iterator[StepCost]:
    """Yield the cost of each kind of step. kinds: tokens of the rows by name."""
    from benchmarks.shapes import declare

    config = config_for(declare(shape, folder), "bfloat16", "bfloat16", invariant=False)
    meta = torch.device("meta")
    parts, _ = parts_on(meta, config, None)
    pages = make_pages(parts.layout, 2, torch.bfloat16, meta)
    recorder = CountingRecorder()
    sizes = config.hardware.graph_sizes, config.hardware.mixed_graph_sizes
    runner = parts.runner(pages, *sizes, lambda device: recorder)
    assert isinstance(runner, DeviceRunner), "shapes of generating models"
    runner.capture(1 << 60)
    for name, counts in kinds.items():
        runner.start(step_of(0, counts, 64, parts.layout, Sampling(seed=1)), {})
        plans = [step_of(number, counts, 64, parts.layout, Sampling(seed=1)) for number in range(1, repeats + 2)]
        before, replays = launched(), recorder.replays
        with _Counter() as counter:
            runner.start(plans[0], {})
        found = launched() - before, counter.products, counter.others, recorder.replays - replays
        times = []
        for plan in plans[1:]:
            start = time.thread_time()
            runner.start(plan, {})
            times.append(time.thread_time() - start)
        yield StepCost(shape, name, *found, us=statistics.median(times) * 1e6)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", nargs="+", help="a shape of benchmarks.shapes")
    parser.add_argument("--rows", type=int, default=32, help="rows of the steps")
    parser.add_argument("--chunk", type=int, default=200, help="tokens of the prompt chunk")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if os.environ.get("SLIPWAY_STUB") is None:
        return _restarted(sys.argv[1:] if arguments is None else list(arguments))
    kinds = {"decode": [1] * options.rows, "mixed": [options.chunk] + [1] * (options.rows - 1)}
    costs = []
    launched = simulate_device(options.target)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shape:
            costs += measure(shape, Path(folder, shape), launched, kinds, options.repeats)
    head = ("shape", "step", "Triton", "products", "others", "graphs", "host us")
    print(table([head, *((*map(str, list(asdict(one).values())[:-1]), f"{one.us:,.0f}") for one in costs)], left=2))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in costs], indent=1) + "\n")
    return 0


def _restarted(arguments: list[str]) -> int:
    """Run in a process that finds the stub."""
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        build_stub(Path(folder), DRIVER)
        found = os.environ | {"LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder, "SLIPWAY_STUB": "1"}
        command = [sys.executable, "-m", "benchmarks.launches", *arguments]
        return subprocess.run(command, env=found, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
