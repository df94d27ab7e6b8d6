"""Compiling kernels without a GPU: for a target architecture, from launches that were written down.

Triton's own just-in-time path runs up to the launch, with a driver that only says which device it pretends to be. So
what it compiles is what a process on such a device would compile, and lands in Triton's cache under the same key: a
first request there finds every kernel ready. For a process of its own: the driver stays replaced.
"""

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.jit import OPTIONS, Launch, interpreted, triton


@dataclass(frozen=True)
class Target:
    """`device` is the name under which tuned settings are looked up; `fp8`: whether it has e4m3 as torch spells it."""

    name: str
    backend: str
    arch: int | str
    warp: int
    device: str
    fp8: bool = True


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, "NVIDIA A100", fp8=False),
        Target("sm_90", "cuda", 90, 32, "NVIDIA H200"),
        Target("sm_100", "cuda", 100, 32, "NVIDIA B200"),
        Target("gfx942", "hip", "gfx942", 64, "AMD Instinct MI300X", fp8=False),
    )
}


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes of the device. `registers` of a thread; `spilled`: bytes of a thread's registers in memory;
    `shared`: bytes of a program. `matrix`: the kinds of matrix instructions in the code, most frequent first."""

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    warps: int
    seconds: float
    matrix: tuple[str, ...] = ()


class _Driver:
    """Stands in for Triton's driver: names a device, has none."""

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


def compile_for(target: Target, launches: list[Launch]) -> list[Compiled]:
    """Compiles the kernel of each launch; the same signature twice is compiled once. Raises RuntimeError in a process
    that interprets kernels, and what the compiler raises."""
    if triton is None or interpreted():
        raise RuntimeError("kernels are compiled by an installed Triton, in a process without TRITON_INTERPRET")
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
    return list(found.values())


def _nvidia(target: Target, kernel: Any, seconds: float) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert match is not None, f"cuobjdump -res-usage gave no registers:\n{usage.stdout}"
    stores = len(re.findall(r"\bSTL\b", code.stdout)) + len(re.findall(r"\bLDL\b", code.stdout))
    counts = {
        name: len(re.findall(rf"\b{name}\b", code.stdout)) for name in ("HGMMA", "QGMMA", "UTCHMMA", "HMMA", "IMMA")
    }
    return Compiled(
        kernel.metadata.name,
        target.name,
        int(match[1]),
        int(match[2]) if stores else 0,  # a stack that nothing writes to is no spill
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        seconds,
        tuple(sorted((name for name, count in counts.items() if count), key=lambda name: -counts[name])),
    )


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
