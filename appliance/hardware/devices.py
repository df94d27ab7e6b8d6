"""Table of devices: assumptions for planning without the machine, and performance limits of a present one.

Bandwidth and dense arithmetic (no sparsity, float32 accumulation) are taken from vendor data sheets: NVIDIA for H100,
H200, B200 and GB200 NVL72, A100, L4, L40S, A10, T4; NVIDIA's architecture papers for GeForce Ada and Blackwell; Amazon
for A10G; AMD for Instinct. `memory` is the value that nvidia-smi or amd-smi reports, less than the round number of the
data sheet. For CPUs, memory channels and speed are from vendor data sheets; arithmetic is operations per cycle and core
times a clock that the CPU holds under load.
"""

import re
from dataclasses import dataclass
from typing import Literal

MIB, GIGA, TERA = 2**20, 10**9, 10**12


@dataclass(frozen=True)
class GpuModel:
    """A GPU model. Throughputs are dense operations per second, by the type of the operands."""

    name: str
    cuda_name: str  # regular expression of the name that CUDA or HIP reports
    memory: int  # bytes
    bandwidth: int  # bytes per second
    bf16: int
    fp32: int
    capability: tuple[int, int]
    link: int  # bytes per second to the other GPUs of the host, both directions together
    link_kind: Literal["NVLink", "PCIe", "Infinity Fabric"]
    fp8: int = 0
    arch: str = ""  # of AMD GPUs, such as gfx942

    @property
    def title(self) -> str:
        return f"{'AMD Instinct' if self.arch else 'NVIDIA'} {self.name.upper()}"


def _gpu(
    name: str,
    cuda_name: str,
    mib: int,
    gb_s: int,
    bf16: float,
    fp32: float,
    capability: tuple[int, int],
    link: int,
    kind: Literal["NVLink", "PCIe", "Infinity Fabric"] = "NVLink",
    fp8: float = 0,
    arch: str = "",
) -> GpuModel:
    """Return a model.

    `mib` is the memory in MiB that nvidia-smi shows; `gb_s` and `link` are in GB/s; `bf16`, `fp32` and `fp8` in
    TFLOP/s.
    """
    return GpuModel(
        *(name, cuda_name, mib * MIB, gb_s * GIGA, int(bf16 * TERA), int(fp32 * TERA), capability, link * GIGA, kind),
        fp8=int(fp8 * TERA),
        arch=arch,
    )


GPUS = (
    _gpu("h100", r"H100 80GB HBM3|H100 SXM", 81559, 3350, 989, 67, (9, 0), 900, fp8=1979),
    _gpu("h100-pcie", "H100 PCIe", 81559, 2000, 756, 51, (9, 0), 128, "PCIe", fp8=1513),
    _gpu("h100-nvl", "H100 NVL", 95830, 3900, 835, 60, (9, 0), 600, fp8=1671),
    _gpu("h200", "H200", 143771, 4800, 989, 67, (9, 0), 900, fp8=1979),
    _gpu("gb200", "GB200", 189471, 8000, 2500, 80, (10, 0), 1800, fp8=5000),
    _gpu("b200", "B200", 183359, 8000, 2250, 75, (10, 0), 1800, fp8=4500),
    _gpu("a100-40", "A100-(SXM4|PCIE|PG509)-?40GB", 40960, 1555, 312, 19.5, (8, 0), 600),
    _gpu("a100-80", "A100-SXM4-80GB|A100 80GB", 81920, 2039, 312, 19.5, (8, 0), 600),
    _gpu("l40s", "L40S", 46068, 864, 362, 91.6, (8, 9), 64, "PCIe", fp8=733),
    _gpu("l4", r"L4\b", 23034, 300, 121, 30.3, (8, 9), 64, "PCIe", fp8=242),
    _gpu("a10g", "A10G", 23028, 600, 70, 31.5, (8, 6), 64, "PCIe"),
    _gpu("a10", r"A10\b", 23028, 600, 125, 31.2, (8, 6), 64, "PCIe"),
    _gpu("t4", r"T4\b", 15360, 320, 65, 8.1, (7, 5), 32, "PCIe"),
    _gpu("rtx4090", "RTX 4090$", 24564, 1008, 165, 82.6, (8, 9), 64, "PCIe", fp8=330),
    _gpu("rtx5090", "RTX 5090$", 32607, 1792, 209, 104.8, (12, 0), 128, "PCIe", fp8=419),
    # Their fp8 throughput is omitted: the kernels do not multiply AMD's e4m3 (fnuz).
    _gpu("mi300x", "MI300X", 196592, 5300, 1307, 163, (9, 4), 896, "Infinity Fabric", arch="gfx942"),
    _gpu("mi325x", "MI325X", 262128, 6000, 1307, 163, (9, 4), 896, "Infinity Fabric", arch="gfx942"),
)
CONTEXT_BYTES = 600 * MIB  # size of a CUDA or HIP context, which exists before any allocation
# Known but unsupported devices.
UNSUPPORTED = {"max1550": "an Intel GPU", "max1100": "an Intel GPU", "gaudi3": "an Intel accelerator"}


@dataclass(frozen=True)
class CpuModel:
    """A class of CPUs by vector unit."""

    name: str
    description: str
    variant: str  # compiled kernels that it runs
    floats: int  # float32 operations per cycle and core
    int8: int  # int8 operations per cycle and core
    clock: int  # Hz
    core_bandwidth: int  # bytes per second of one core
    bandwidth: int  # bytes per second of one socket
    socket_cores: int  # cores of that socket
    bf16: int = 0  # bfloat16 operations per cycle and core; 0: its kernels have none

    def reach(self, cores: int) -> int:
        """Return the memory bandwidth of this many cores, in bytes per second."""
        sockets = -(-cores // self.socket_cores)
        return min(cores * self.core_bandwidth, sockets * self.bandwidth)


# `floats` counts two fused multiply-adds per cycle; for AMX, three exact bf16 products for each float32 product.
CPUS = (
    CpuModel("cpu", "any x86 server with AVX2", "avx2", 32, 64, 2_600_000_000, 12 * GIGA, 140 * GIGA, 32),
    CpuModel("avx512", "Xeon of Ice Lake", "avx512", 64, 256, 2_600_000_000, 14 * GIGA, 204 * GIGA, 40),
    CpuModel(
        "amx", "Xeon of Sapphire Rapids or newer", "amx", 341, 2048, 2_600_000_000, 20 * GIGA, 307 * GIGA, 56, 1024
    ),
    CpuModel("epyc", "EPYC of Genoa or newer", "avx512bf16", 32, 256, 3_100_000_000, 25 * GIGA, 460 * GIGA, 96, 64),
    CpuModel("core", "Core of Alder Lake or newer", "avxvnni", 32, 128, 3_000_000_000, 20 * GIGA, 75 * GIGA, 16),
    CpuModel("graviton", "Graviton 3 or newer", "neon", 32, 128, 2_600_000_000, 20 * GIGA, 307 * GIGA, 64),
    CpuModel("base", "any other CPU", "base", 8, 8, 2_600_000_000, 10 * GIGA, 50 * GIGA, 64),
)


def gpu_by_name(name: str) -> GpuModel | None:
    return next((gpu for gpu in GPUS if gpu.name == name), None)


def gpu_by_cuda_name(name: str) -> GpuModel | None:
    """Return the model of a GPU by its CUDA name, or None if the table does not have it."""
    return next((gpu for gpu in GPUS if name == gpu.title or re.search(gpu.cuda_name, name)), None)


def cpu_by_name(name: str) -> CpuModel | None:
    return next((cpu for cpu in CPUS if cpu.name == name), None)


def cpu_by_kernels(kernels: tuple[str, ...]) -> CpuModel:
    """Return the class of a CPU that runs these kernels, which are ordered fastest first."""
    best = next(iter(kernels), "base")
    return next((cpu for cpu in CPUS if cpu.variant == best), CPUS[-1])
