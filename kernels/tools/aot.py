"""Compile kernels for a target architecture without a GPU, from recorded launches.

Triton's own just-in-time path runs up to the launch. A replacement driver names the device to compile for. The compiled
kernels therefore equal those that a process on such a device would compile, and Triton's cache stores them under the
same key: the first request on the device finds every kernel ready. launchers.py compiles the remaining modules. Use a
separate process, because the replacement driver stays installed.
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
    """GPU architecture to compile for."""

    name: str
    backend: str
    arch: int | str
    warp: int
    devices: tuple[str, ...]  # names under which tuned settings are looked up
    shared: int  # maximum bytes of shared memory of a program
    fp8: bool = True  # whether it multiplies torch.float8_e4m3fn
    gated: bool = False  # whether register spills fail the check
    columns: int = 0  # maximum columns of tensor memory of a program


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
    """Resources that a compiled kernel takes on its target."""

    kernel: str
    target: str
    registers: int  # of each thread
    spilled: int  # bytes of a thread's registers that are spilled to memory
    shared: int  # bytes of shared memory of a program
    warps: int
    seconds: float
    matrix: tuple[str, ...] = ()  # kinds of matrix instructions, most frequent first; empty where the PTX is not kept
    columns: int = 0  # of tensor memory (Blackwell)


# PTX instructions that multiply tiles, and their names in SASS: for a warp group (Hopper), in tensor memory (Blackwell)
# and for a warp. Types: f16 or tf32, 8-bit floats, integers, float64.
PRODUCTS = {
    "wgmma.mma_async": {"f16": "HGMMA", "e4m3": "QGMMA", "s8": "IGMMA"},
    "tcgen05.mma": {"f16": "UTCHMMA", "e4m3": "UTCQMMA", "s8": "UTCIMMA"},
    "mma.sync": {"f16": "HMMA", "e4m3": "QMMA", "s8": "IMMA", "f64": "DMMA"},
}
_PRODUCT = re.compile(rf"^\s*(?:@\S+ )?({'|'.join(map(re.escape, PRODUCTS))})(\S*)", re.MULTILINE)
_TYPES = {"e4m3": r"e4m3|e5m2|f8f6f4", "s8": r"\.s8|\.u8|kind::i8", "f64": r"\.f64\."}


class _Driver:
    """Substitute for Triton's driver that names a device without having it. Triton's launch code reads `utils`."""

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
    """Compile the kernel of each launch, and list each kernel once. `each` is called with Triton's object of every
    kernel. Raise RuntimeError in a process that interprets kernels, and pass on the compiler's exceptions."""
    if triton is None or interpreted():
        raise RuntimeError("compiling needs an installed Triton and no TRITON_INTERPRET")
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
    """Return a key that is equal for launches that share a kernel: all properties that Triton specializes on."""
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
    """Return a text that is equal in every process. The repr of a kernel that is an argument is not: use its name."""
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
        # Disassembling takes longer than compiling, so it is limited to kernels with a stack.
        code = _tool("nvdisasm", "-ndf", "-c", file.name) if stack else ""
    return Compiled(
        kernel.metadata.name,
        target.name,
        int(match[1]),
        stack if has_spills(code) else 0,
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        seconds,
        products(kernel.asm["ptx"]) if "ptx" in kernel.asm else (),
        getattr(kernel.metadata, "tmem_size", None) or 0,
    )


def has_spills(code: str) -> bool:
    """Return whether disassembled code reads spilled registers. They are read at a constant offset from the stack
    pointer R1. Reads through another register are of an array, such as the one in which sin and cos reduce large
    angles."""
    return re.search(r"\bLDL\S*\s+\S+,\s*\[R1(?:\+\w+)?\]", code) is not None


def products(ptx: str) -> tuple[str, ...]:
    """Return the kinds of matrix instructions in a kernel's PTX, most frequent first."""
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
