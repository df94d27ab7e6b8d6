"""The machines that the manifests are for, by the words in their comments."""

from appliance.plan.machine import Gpu, Machine
from appliance.plan.topology import Topology

GIB = 2**30
# 143,771 MiB, as the driver says; a context and the driver's own part are taken from what is free.
H200 = Gpu("NVIDIA H200", 143_771 * 2**20, 143_000 * 2**20, (9, 0))


def _cpus(count: int, memory: int) -> Machine:
    cores = tuple((number,) for number in range(count))
    return Machine(
        cores=count,
        cores_from="affinity",
        memory_free=memory,
        memory_from="MemAvailable",
        no_gpu="no NVIDIA driver is loaded",
        kernels=("avx512", "avx2", "base"),
        topology=Topology(tuple(range(count)), (cores,)),
    )


# 81,559 MiB, as the driver says.
H100 = Gpu("NVIDIA H100 80GB HBM3", 81_559 * 2**20, 81_000 * 2**20, (9, 0))


def _gpus(count: int, gpu: Gpu = H200) -> Machine:
    return Machine(
        cores=16 * count,
        cores_from="affinity",
        memory_free=200 * GIB * count,
        memory_from="MemAvailable",
        gpus=(gpu,) * count,
        kernels=("avx512", "avx2", "base"),
        triton=True,
    )


SMALL = _cpus(8, 14 * GIB)
MACHINES: dict[str, Machine] = {
    "any machine": _cpus(2, 2 * GIB),
    "a CPU with 8 cores and 16 GB": SMALL,
    "a CPU with 16 cores and 64 GB": _cpus(16, 60 * GIB),
    "one NVIDIA H200": _gpus(1),
    "two NVIDIA H200": _gpus(2),
    "four NVIDIA H200": _gpus(4),
    "four NVIDIA H100": _gpus(4, H100),
    "eight NVIDIA H200": _gpus(8),
}
