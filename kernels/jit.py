"""Triton where it is installed, and the one way in which kernels are launched.

A file that holds a kernel imports `jit` and `tl` from here; without Triton its torch body still serves. Every launch
goes through `launch`, so that the launches of a step can be written down instead of made (`recorded`): from tensors on
the `meta` device the compiler then learns each kernel's exact signature without a GPU (kernels/tools/aot.py).

With TRITON_INTERPRET=1 in the environment before the first import, kernels run on a CPU in Triton's interpreter. It
keeps bf16 as whole numbers: kernels therefore widen what they load before they compute with it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = libdevice = None
    tl = SimpleNamespace(constexpr=object)

Kernel = Any  # what `jit` returns
# a · b + c is one rounding: said here, as the default differs between Triton's releases.
OPTIONS = {"enable_fp_fusion": True}


def jit(function: Callable[..., Any] | None = None, *, varying: Sequence[str] = ()) -> Kernel:
    """`@jit`, or `@jit(varying=("tokens",))` with the whole numbers that differ from step to step: of others it is
    compiled in whether they are 1 or a multiple of 16, and a new answer would compile while requests wait."""
    if function is None:
        return partial(jit, varying=varying)
    return function if triton is None else triton.jit(function, do_not_specialize=list(varying))


def installed() -> bool:
    return triton is not None


def interpreted() -> bool:
    """Whether kernels run on a CPU in the interpreter."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


if triton is None or interpreted():

    def cuda_capability_geq(major: int, minor: int) -> bool:
        """Whether a kernel is compiled for such an NVIDIA GPU."""
        return False
else:
    from triton.language.target_info import cuda_capability_geq as cuda_capability_geq


@dataclass(frozen=True)
class Launch:
    """One launch as written down. `constants` are the kernel's compile-time arguments."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    warps: int
    stages: int
    constants: dict[str, Any]


_written: ContextVar[list[Launch] | None] = ContextVar("written", default=None)


def launch(
    kernel: Kernel, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2, **constants: Any
) -> None:
    """Runs one program for each point of the grid; an empty grid is nothing."""
    if 0 in grid:
        return
    written = _written.get()
    if written is not None:
        written.append(Launch(kernel, grid, args, warps, stages, constants))
        return
    kernel[grid](*args, num_warps=warps, num_stages=stages, **OPTIONS, **constants)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launches are written down and not made."""
    launches: list[Launch] = []
    token = _written.set(launches)
    try:
        yield launches
    finally:
        _written.reset(token)


def power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def row_warps(block: int) -> int:
    """Warps of a program that has one row of so many elements in registers: 16 elements a thread."""
    return min(16, max(1, block // 512))


def programs(device: torch.device, each: int = 4) -> int:
    """Programs of a launch that takes its work from a list: `each` for every multiprocessor of the device."""
    if device.type == "cuda":
        return each * torch.cuda.get_device_properties(device).multi_processor_count
    return 132 * each if device.type == "meta" else 3


def rows_of(x: Tensor, name: str) -> int:
    """Elements from one row of x to the next. Raises ValueError unless the elements of a row lie together."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name}: the elements of a row must lie together, not {x.stride(-1)} apart; use .contiguous()"
        )
    return x.stride(0)
