"""Time calls on a device: medians and ranges of many samples, without Python's launch overhead.

On a GPU a sample is the replay of a graph of many calls, timed by events. The calls rotate through inputs that together
are larger than the cache of the device, and so are their outputs. Calls that cannot be captured run without a graph. On
other devices a sample is one call, timed by the clock.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels.jit import installed, triton
from kernels.op import Args, tensors

SAMPLE_S = 0.002  # minimum duration of a sample
WARM_S = 0.02  # an idle device needs this time to raise its clock
CACHES = 3  # minimum size of the inputs of one rotation, in multiples of the cache
MEMORY_SHARE = 0.3  # of the free memory, for inputs
MAX_SETS = 64
MAX_CALLS = 2000  # of a graph

Sample = Callable[[], float]  # microseconds of a call


@dataclass(frozen=True)
class Time:
    """Microseconds of a call: the median of the samples, the least and the most."""

    us: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Time":
        return cls(statistics.median(samples), min(samples), max(samples))

    def __str__(self) -> str:
        return f"{format_figure(self.us)} [{format_figure(self.low)}–{format_figure(self.high)}]"


def format_figure(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.{max(0, 2 - int(math.floor(math.log10(value))))}f}" if value > 0 else "0"


def input_sets(
    make: Callable[[int], Args], traffic: Callable[..., int], device: torch.device
) -> tuple[list[Args], bool]:
    """Create enough inputs that a rotation through them finds none in the cache, within the memory limit. make(seed)
    creates one set of inputs, and a call with it moves traffic(*inputs) bytes. The second value is False if the sets
    fit in the cache."""
    first = make(0)
    if device.type != "cuda":
        return [first], True
    wanted = CACHES * torch.cuda.get_device_properties(device).L2_cache_size
    held = sum(arg.nbytes for arg in first if isinstance(arg, Tensor))
    room = int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE) // max(1, held)
    count = -(-wanted // max(1, traffic(*first)))
    kept = max(1, min(count, room, MAX_SETS))
    return [first, *(make(seed) for seed in range(1, kept))], kept >= count


def sampler(function: Callable[..., Any], sets: Sequence[Args], device: torch.device) -> Sample:
    """Prepare the calls and warm up the device."""
    if device.type != "cuda":
        function(*sets[0])
        return lambda: _by_clock(function, sets[0])
    for args in sets[:2]:
        function(*args)  # compiles
    prepare = _graph if capturable(function, sets[0]) else partial
    turn = _timed(prepare(_turns, function, sets, 1), device)
    turns = max(1, min(math.ceil(SAMPLE_S * 1e6 / max(turn, 1.0)), MAX_CALLS // len(sets)))
    run = prepare(_turns, function, sets, turns)
    end = time.perf_counter() + WARM_S
    while time.perf_counter() < end:
        run()
        torch.cuda.synchronize(device)
    return lambda: _timed(run, device) / (turns * len(sets))


def capturable(function: Callable[..., Any], args: Args) -> bool:
    """Return whether a call can be captured, which requires that it reads no number from the device's memory. A trial
    capture is no alternative: a capture that fails leaves torch's allocator in an undefined state."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(*args)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def _by_clock(function: Callable[..., Any], args: Args) -> float:
    start = time.perf_counter()
    function(*args)
    return (time.perf_counter() - start) * 1e6


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) * 1000


def _turns(function: Callable[..., Any], sets: Sequence[Args], turns: int) -> None:
    for _ in range(turns):
        kept = [tensors(function(*args)) for args in sets]  # keeps the outputs, so that each has its own memory
    del kept


def _graph(run: Callable[..., None], *args: Any) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*args)
    return graph.replay


def collect_samples(samples: Sequence[Sample], rounds: int) -> list[list[float]]:
    """Take `rounds` samples of each in turn, so that other activity of the device affects all of them equally."""
    found: list[list[float]] = [[] for _ in samples]
    for _ in range(rounds):
        for sample, into in zip(samples, found, strict=True):
            into.append(sample())
    return found


def alternating(samples: Sequence[Sample], rounds: int) -> list[Time]:
    return [Time.of(values) for values in collect_samples(samples, rounds)]


# -- facts and capabilities of a device --------------------------------------------------------------------------------


def architecture(device: torch.device) -> str:
    """Return the name of the device's architecture in kernels.tools.aot."""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies float8_e4m3fn, the e4m3 format of torch."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions that a result was measured with."""
    facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__ if installed() else None}
    if device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(device), "architecture": architecture(device)}
        facts |= {"memory_bytes": torch.cuda.get_device_properties(device).total_memory}
    return facts


def device_is_lost(device: torch.device) -> bool:
    """Return whether the process can no longer use the device, as after a read outside of memory."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@cache
def copy_rate(device: torch.device, rounds: int = 20) -> float:
    """Return the bytes per second that a copy of 1 GiB reads and writes (64 MiB on a CPU)."""
    count = (1 << 30 if device.type == "cuda" else 1 << 26) // 2
    source = torch.ones(count, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    sample = sampler(lambda: target.copy_(source), [()], device)
    return 2 * source.nbytes / alternating([sample], rounds)[0].us * 1e6


@cache
def matmul_rate(device: torch.device, size: int = 8192, rounds: int = 20) -> float:
    """Return the bf16 operations per second in a product of two random matrices; zeros would be faster."""
    draw = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=draw, device=device).bfloat16() for _ in range(2))
    sample = sampler(lambda: left @ right, [()], device)
    return 2 * size**3 / alternating([sample], rounds)[0].us * 1e6
