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
# Whether launches skip Triton's look-up of the kernel. Not on AMD GPUs, where a kernel also depends on tensors' sizes.
PREPARES = triton is not None and not triton.knobs.runtime.interpret and torch.version.hip is None
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
    if not PREPARES:
        kernel[grid](*args, num_warps=warps, num_stages=stages, **OPTIONS, **constants)
        return
    device = triton.runtime.driver.active.get_current_device()
    varying = _varying.get(id(kernel))
    if varying is None:
        varying = frozenset(map(kernel.arg_names.index, kernel.do_not_specialize))
        _varying[id(kernel)] = varying
    # The id, because a kernel's hash is that of its source. Kernels are not collected: they belong to modules.
    key = id(kernel), device, warps, stages, *constants.items(), *signature_of(varying, args)
    prepared = _prepared.get(key)
    if prepared is None:
        compiled = kernel[grid](*args, num_warps=warps, num_stages=stages, **OPTIONS, **constants)
        names = kernel.arg_names[len(args) :]
        if constants.keys() == set(names):
            _prepared[key] = PreparedKernel(compiled, tuple(constants[name] for name in names))
        return
    prepared.launch(device, grid, args)


def signature_of(varying: frozenset[int], args: Sequence[Any]) -> list[Any]:
    """Return what a compiled kernel depends on: types, alignment of pointers, and the values of integers. Integers in
    `varying` count by their width only. Finer than Triton's own signature, which costs more to compute."""
    found: list[Any] = []
    for number, arg in enumerate(args):
        if type(arg) is Tensor:
            found.append(arg.dtype)
            found.append(arg.data_ptr() & 15)
        elif type(arg) is int:
            found.append(arg.bit_length() > 31 if number in varying else arg)
        elif isinstance(arg, Tensor):
            found += (arg.dtype, arg.data_ptr() & 15)
        else:
            assert arg is None or type(arg) in (float, bool), f"a kernel takes no {type(arg)}"
            found.append(type(arg))
    return found


class PreparedKernel:
    """A compiled kernel with its constants, for launches that need no signature and no look-up in Triton's caches."""

    __slots__ = ("_constants", "_function", "_metadata", "_run")

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._constants = constants

    def launch(self, device: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        stream = triton.runtime.driver.active.get_current_stream(device)
        self._run(x, y, z, stream, self._function, self._metadata, None, None, None, *args, *self._constants)


_prepared: dict[tuple[Any, ...], PreparedKernel] = {}
_varying: dict[int, frozenset[int]] = {}  # by kernel: positions of the integers that it does not depend on


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
