"""Triton, if it is installed, and the common function that launches kernels.

A file with a kernel imports `jit` and `tl` from here; without Triton its torch body still works. Every launch goes
through `launch`, so that the launches of a step can be recorded instead of executed (`recorded`). From tensors on the
`meta` device the compiler then gets each kernel's exact signature without a GPU (kernels/tools/aot.py).

With TRITON_INTERPRET=1 in the environment before the first import, kernels run on a CPU in Triton's interpreter. The
interpreter represents bf16 by integers, so kernels widen loaded values before they compute with them.
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
# Round a · b + c once. The option is explicit because its default differs between Triton's releases.
OPTIONS = {"enable_fp_fusion": True}


def jit(function: Callable[..., Any] | None = None, *, varying: Sequence[str] = ()) -> Kernel:
    """Decorate a kernel: `@jit`, or `@jit(varying=("tokens",))` with the integers that differ from step to step. Triton
    specializes on whether other integers are 1 or a multiple of 16; a new case would compile while requests wait."""
    if function is None:
        return partial(jit, varying=varying)
    return function if triton is None else triton.jit(function, do_not_specialize=list(varying))


def installed() -> bool:
    return triton is not None


def interpreted() -> bool:
    """Return whether kernels run on a CPU in the interpreter."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


if triton is None or interpreted():

    def cuda_capability_geq(major: int, minor: int) -> bool:
        """Return whether a kernel is compiled for an NVIDIA GPU of at least this compute capability."""
        return False
else:
    from triton.language.target_info import cuda_capability_geq as cuda_capability_geq


@dataclass(frozen=True)
class Launch:
    """One recorded launch. `constants` are the kernel's compile-time arguments."""

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
    """Run one program for each point of the grid. An empty grid is no error."""
    if 0 in grid:
        return
    written = _written.get()
    if written is not None:
        written.append(Launch(kernel, grid, args, warps, stages, constants))
        return
    kernel[grid](*args, num_warps=warps, num_stages=stages, **OPTIONS, **constants)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches instead of executing them within the context."""
    launches: list[Launch] = []
    token = _written.set(launches)
    try:
        yield launches
    finally:
        _written.reset(token)


def power_of_2(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def row_warps(block: int) -> int:
    """Return the warps of a program that has a row of `block` elements in registers: 16 elements for each thread."""
    return min(16, max(1, block // 512))


def resident_programs(device: torch.device, each: int = 4) -> int:
    """Return the programs of a launch that takes its work from a list: `each` for every multiprocessor of the
    device."""
    if device.type == "cuda":
        return each * torch.cuda.get_device_properties(device).multi_processor_count
    return 132 * each if device.type == "meta" else 3


def row_stride(x: Tensor, name: str) -> int:
    """Return the row stride of x in elements. Raise ValueError unless the elements of a row are contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"{name}: the elements of a row must be contiguous, not {x.stride(-1)} apart; use .contiguous()"
        )
    return x.stride(0)
