"""Machines for planning without the hardware, from the table of devices: `h200x1`, `h100x8:96:1TiB`, `cpu:16:64GiB`."""

import difflib
import re

from appliance.hardware.devices import (
    CONTEXT_BYTES,
    CPUS,
    GPUS,
    UNSUPPORTED,
    CpuModel,
    GpuModel,
    cpu_by_name,
    gpu_by_name,
)
from appliance.hardware.machine import Gpu, Machine
from appliance.hardware.topology import Topology

GIB = 2**30
UNITS = {"MiB": 2**20, "GiB": GIB, "TiB": 2**40}
# Other kernels that a CPU with these kernels runs. AVX-VNNI is newer than AVX-512, and not all AVX-512 CPUs have it.
INCLUDED_KERNELS = {
    "amx": ("avx512bf16", "avx512", "avxvnni", "avx2"),
    "avx512bf16": ("avx512", "avx2"),
    "avx512": ("avx2",),
    "avxvnni": ("avx2",),
}
SHAPE = re.compile(
    r"(?P<name>[a-z0-9-]+?)(x(?P<count>\d+))?(:(?P<cores>\d+))?(:(?P<size>\d+(\.\d+)?)(?P<unit>[MGT]iB))?"
)
HOST_CORES, HOST_BYTES = 16, 128 * GIB  # default for each GPU
USAGE = "write NAME, NAMExCOUNT or NAMExCOUNT:CORES:MEMORY, such as h200x1, l4x2:32:128GiB or cpu:16:64GiB"


class UnknownHardware(Exception):
    """Raised for a name that is not in the table. The message lists suggestions and the available names."""


def hardware(text: str) -> Machine:
    """Return the described machine. Raise UnknownHardware."""
    name_part, colon, rest = text.strip().partition(":")
    match = SHAPE.fullmatch(f"{name_part.lower()}{colon}{rest}")
    if match is None:
        raise UnknownHardware(f"{text}: {USAGE}")
    name, count = match["name"], match["count"]
    full_name = name_part.lower()
    # rtx4090 is a name, not 4090 devices
    if gpu_by_name(full_name) is not None or cpu_by_name(full_name) is not None or full_name in UNSUPPORTED:
        name, count = full_name, None
    memory = None if match["size"] is None else int(float(match["size"]) * UNITS[match["unit"]])
    cores = None if match["cores"] is None else int(match["cores"])
    if (gpu := gpu_by_name(name)) is not None:
        return _gpu_host(text, gpu, int(count or 1), cores, memory)
    if (cpu := cpu_by_name(name)) is not None:
        if cores is None or memory is None or count:
            raise UnknownHardware(f"{text}: a CPU requires cores and memory, such as {name}:16:64GiB")
        return _cpu_host(text, cpu, cores, memory)
    if name in UNSUPPORTED:
        raise UnknownHardware(f"{text}: {UNSUPPORTED[name]} is not supported; {_known()}")
    names = [one.name for one in (*GPUS, *CPUS)]
    close = difflib.get_close_matches(name, names, 1, 0.5)
    suggestion = f"did you mean {close[0]}{f'x{count}' if count else ''}? " if close else ""
    raise UnknownHardware(f"{text}: not in the table of devices; {suggestion}{_known()}")


def _known() -> str:
    return f"available GPUs: {', '.join(gpu.name for gpu in GPUS)}; CPUs: {', '.join(cpu.name for cpu in CPUS)}"


def _gpu_host(text: str, gpu: GpuModel, count: int, cores: int | None, memory: int | None) -> Machine:
    if not 1 <= count <= 16:
        raise UnknownHardware(f"{text}: {count} GPUs are not possible; write 1 to 16")
    cores = cores or HOST_CORES * count
    if cores < 1:
        raise UnknownHardware(f"{text}: requires at least 1 core")
    one = Gpu(gpu.title, gpu.memory, gpu.memory - CONTEXT_BYTES, gpu.capability, gpu.arch)
    return Machine(
        cores=cores,
        cores_from=f"--hardware {text}",
        memory_free=memory or HOST_BYTES * count,
        memory_from=f"--hardware {text}",
        gpus=(one,) * count,
        no_gpu="",
        kernels=("base",),
        triton=True,
        topology=_topology(cores),
        described=text,
    )


def _cpu_host(text: str, cpu: CpuModel, cores: int, memory: int) -> Machine:
    if cores < 1 or memory < 1:
        raise UnknownHardware(f"{text}: requires at least 1 core and memory above 0")
    return Machine(
        cores=cores,
        cores_from=f"--hardware {text}",
        memory_free=memory,
        memory_from=f"--hardware {text}",
        no_gpu=f"--hardware {text} has no GPU",
        kernels=_kernel_variants(cpu.variant),
        triton=True,
        topology=_topology(cores),
        described=text,
    )


def _kernel_variants(variant: str) -> tuple[str, ...]:
    """Return this variant and the variants that require less, fastest first."""
    return tuple(dict.fromkeys((variant, *INCLUDED_KERNELS.get(variant, ()), "base")))


def _topology(cores: int) -> Topology:
    """Return a topology with one node and one thread per core."""
    return Topology(tuple(range(cores)), (tuple((cpu,) for cpu in range(cores)),))
