"""Compiling kernels without a GPU: for a target architecture, from launches that were written down.

Triton's own just-in-time path runs up to the launch, with a driver that only says which device it pretends to be. So
what it compiles is what a process on such a device would compile, and lands in Triton's cache under the same key: a
first request there finds every kernel ready (launchers.py has the rest). For a process of its own: the driver
stays replaced.
"""

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kernels.jit import OPTIONS, Launch, interpreted, triton


@dataclass(frozen=True)
class Target:
    """`devices` are names under which tuned settings are looked up. `shared`: the most bytes of shared memory that a
    program can have, `columns` of tensor memory. `fp8`: whether it has e4m3 as torch spells it. `gated`: kernels must
    keep their registers here."""

    name: str
    backend: str
    arch: int | str
    warp: int
    devices: tuple[str, ...]
    shared: int
    fp8: bool = True
    gated: bool = False
    columns: int = 0


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, ("NVIDIA A100",), 163 << 10, fp8=False),
        Target("sm_86", "cuda", 86, 32, ("NVIDIA A10G",), 99 << 10, fp8=False),
        Target("sm_89", "cuda", 89, 32, ("NVIDIA L40S",), 99 << 10),
        Target("sm_90", "cuda", 90, 32, ("NVIDIA H200", "NVIDIA H100"), 227 << 10, gated=True),
        Target("sm_100", "cuda", 100, 32, ("NVIDIA B200",), 227 << 10, gated=True, columns=512),
        Target("sm_103", "cuda", 103, 32, ("NVIDIA B300",), 227 << 10, columns=512),
        Target("sm_120", "cuda", 120, 32, ("NVIDIA GeForce RTX 5090",), 99 << 10),
        Target("gfx942", "hip", "gfx942", 64, ("AMD Instinct MI300X",), 64 << 10, fp8=False),
    )
}


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes of the device. `registers` of a thread; `spilled`: bytes of a thread's registers in memory;
    `shared`: bytes of a program; `columns`: of tensor memory, which Blackwell has. `matrix`: the kinds of matrix
    instructions, most frequent first, where its PTX is kept, which a cache of what is launched does not."""

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    warps: int
    seconds: float
    matrix: tuple[str, ...] = ()
    columns: int = 0


# Products of tiles in PTX, and what the device's own code calls them: of a warp group (Hopper), in tensor memory
# (Blackwell), of a warp. By types: halves or tf32, eight-bit floats, whole numbers, doubles.
PRODUCTS = {
    "wgmma.mma_async": {"f16": "HGMMA", "e4m3": "QGMMA", "s8": "IGMMA"},
    "tcgen05.mma": {"f16": "UTCHMMA", "e4m3": "UTCQMMA", "s8": "UTCIMMA"},
    "mma.sync": {"f16": "HMMA", "e4m3": "QMMA", "s8": "IMMA", "f64": "DMMA"},
}
_PRODUCT = re.compile(rf"^\s*(?:@\S+ )?({'|'.join(map(re.escape, PRODUCTS))})(\S*)", re.MULTILINE)
_TYPES = {"e4m3": r"e4m3|e5m2|f8f6f4", "s8": r"\.s8|\.u8|kind::i8", "f64": r"\.f64\."}


class _Driver:
    """Stands in for Triton's driver: names a device, has none. `utils` is asked for by what prepares a launch."""

    utils: Any = None

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = target
        self._gpu = GPUTarget(target.backend, target.arch, target.warp)

    def get_current_target(self) -> Any:
        return self._gpu

    def get_current_device(self) -> str:
        return self.target.name  # its kernels have a cache of their own

    def get_current_stream(self, device: str) -> int:
        return 0

    def set_current_device(self, device: str) -> None:
        pass


def compile_for(
    target: Target, launches: list[Launch], each: Callable[[Any], None] = lambda kernel: None
) -> list[Compiled]:
    """Compiles the kernel of each launch; the same one twice is in the list once. `each` sees Triton's own value of
    every kernel. Raises RuntimeError in a process that interprets kernels, and what the compiler raises."""
    if triton is None or interpreted():
        raise RuntimeError("kernels are compiled by an installed Triton, in a process without TRITON_INTERPRET")
    active = triton.runtime.driver._active
    if not isinstance(active, _Driver) or active.target != target:
        triton.runtime.driver.set_active(_Driver(target))
    found: dict[str, Compiled] = {}
    for launch in launches:
        start = time.perf_counter()
        kernel = launch.kernel.run(
            *launch.args,
            grid=launch.grid,
            warmup=True,
            num_warps=launch.warps,
            num_stages=launch.stages,
            **OPTIONS,
            **launch.constants,
        )
        if kernel.hash not in found:
            seconds = time.perf_counter() - start
            found[kernel.hash] = (_nvidia if target.backend == "cuda" else _amd)(target, kernel, seconds)
            each(kernel)
    return list(found.values())


def signature(launch: Launch) -> Hashable:
    """Launches with equal ones share a kernel: what Triton makes of a launch's arguments, and no less."""
    fixed = {param.name for param in launch.kernel.params if param.do_not_specialize}
    names = launch.kernel.arg_names
    args = tuple(_class(value, name in fixed) for name, value in zip(names, launch.args, strict=False))
    constants = tuple(sorted((name, _named(value)) for name, value in launch.constants.items()))
    return launch.kernel.fn.__module__, launch.kernel.fn.__qualname__, launch.warps, launch.stages, args, constants


def _class(value: Any, varying: bool) -> Hashable:
    match value:
        case Tensor():
            return "tensor", str(value.dtype), value.data_ptr() % 16 == 0
        case bool():
            return "bool"
        case int():
            wide = not -(2**31) <= value < 2**31
            return ("int", wide) if varying else ("int", wide, value == 1, value % 16 == 0)
        case float():
            return "float"
        case _:
            return _named(value)


def _named(value: Any) -> str:
    """Kernels that are passed to kernels go by their name: how they print differs from process to process."""
    inner = getattr(value, "fn", None)
    return repr(value) if inner is None else f"{inner.__module__}.{inner.__qualname__}"


def _nvidia(target: Target, kernel: Any, seconds: float) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert match is not None, f"cuobjdump -res-usage gave no registers:\n{usage}"
        stack = int(match[2])
        # Disassembling takes longer than compiling: only where there is something to be seen.
        code = _tool("nvdisasm", "-ndf", "-c", file.name) if stack else ""
    used = re.search(r"\b(?:STL|LDL)\b", code) is not None
    return Compiled(
        kernel.metadata.name,
        target.name,
        int(match[1]),
        stack if used else 0,  # a stack that nothing writes to is no spill
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        seconds,
        products(kernel.asm["ptx"]) if "ptx" in kernel.asm else (),
        getattr(kernel.metadata, "tmem_size", None) or 0,
    )


def products(ptx: str) -> tuple[str, ...]:
    """The kinds of matrix instructions, most frequent first."""
    counts: Counter[str] = Counter()
    for found in _PRODUCT.finditer(ptx):
        kind = next((kind for kind, types in _TYPES.items() if re.search(types, found[2])), "f16")
        counts[PRODUCTS[found[1]][kind]] += 1
    return tuple(name for name, _ in counts.most_common())


def _tool(name: str, *args: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    done = subprocess.run([tool, *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _amd(target: Target, kernel: Any, seconds: float) -> Compiled:
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", text)
        assert match is not None, f"the assembly of {kernel.metadata.name} does not say {name}"
        return int(match[1])

    return Compiled(
        kernel.metadata.name,
        target.name,
        number("vgpr_count"),
        4 * number("vgpr_spill_count"),
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        seconds,
        ("MFMA",) if "v_mfma" in text else (),
    )
