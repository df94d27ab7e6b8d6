"""Resources of this machine: cores and free memory within cgroup and affinity limits, and GPUs.

This module does not import torch. Page cache counts as free, because the kernel evicts it under memory pressure.
Sources: cgroup v1 and v2 documentation of the Linux kernel, proc(5).
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from appliance.hardware.compilers import torch_compile_lacks
from appliance.hardware.cuda_build import Build, installed_build, unusable, unusable_rocm
from appliance.hardware.rocm import has_intel_gpu, visible_gpus
from appliance.hardware.topology import Topology, read_topology
from kernels.cpu.library import usable

PROBE_TIMEOUT_S = 60
FP8_CAPABILITY = (8, 9)  # first NVIDIA GPUs that convert e4m3
_UNLIMITED = 1 << 60  # cgroup v1 represents "no limit" as the largest multiple of the page size


@dataclass(frozen=True)
class Gpu:
    """A device visible to this process through CUDA (CUDA_VISIBLE_DEVICES, MIG) or ROCm. Sizes are in bytes."""

    name: str
    memory: int
    free: int
    capability: tuple[int, int]  # of an AMD GPU, the first two numbers of its architecture, as torch reports them
    arch: str = ""  # of an AMD GPU, such as gfx942

    @property
    def has_fp8(self) -> bool:
        """Return whether kernels use its 8-bit floats: e4m3fn, which AMD's GPUs up to gfx942 lack."""
        return not self.arch and self.capability >= FP8_CAPABILITY


@dataclass(frozen=True)
class Machine:
    """Resources that this process may use."""

    cores: int
    cores_from: str  # what limits the cores, as text
    memory_free: int  # bytes
    memory_from: str  # what limits the memory, as text
    gpus: tuple[Gpu, ...] = ()
    no_gpu: str = "GPUs were not searched for"  # reason if there are no GPUs
    kernels: tuple[str, ...] = ()  # compiled CPU kernels that this machine runs, fastest first
    triton: bool = False  # whether Triton is installed
    topology: Topology = Topology()
    described: str = ""  # name given to the table of devices; "" for this machine
    compile_lacks: tuple[tuple[str, str], ...] = ()  # (device, what torch.compile lacks there; "" if nothing)


def read_machine(*, gpus: bool = True, root: Path = Path("/")) -> Machine:
    """Read the resources of this machine. `gpus=False` skips the GPU probe, which takes a second with a driver."""
    topology = read_topology(root, os.sched_getaffinity(0), cgroup_folders(root, "cpuset"))
    cores, cores_from = count_cores(root, len(topology.allowed))
    memory, memory_from = free_memory(root)
    found, reason = find_gpus(root) if gpus else ((), "GPUs were not searched for")
    triton = find_spec("triton") is not None
    lacks = tuple((device, torch_compile_lacks(device)) for device in ("cpu", "cuda"))
    resources = cores, cores_from, memory, memory_from, found, reason
    return Machine(*resources, usable(), triton, topology, compile_lacks=lacks)


def count_cores(root: Path, allowed: int) -> tuple[int, str]:
    """Return the cores allowed by affinity, or the cgroup quota if it is lower. A quota of 2.5 cores counts as 2."""
    best, reason = float(allowed), "affinity"
    for folder in cgroup_folders(root, "cpu"):
        quota = cpu_quota(folder)
        if quota is not None and quota < best:
            best, reason = quota, "cgroup quota"
    return max(1, math.floor(best)), reason


def free_memory(root: Path) -> tuple[int, str]:
    """Return the available bytes: MemAvailable, or the remainder of a cgroup limit if it is lower."""
    best, reason = available_memory(_read(root / "proc/meminfo") or ""), "MemAvailable"
    for folder in cgroup_folders(root, "memory"):
        free = cgroup_memory(folder)
        if free is not None and free < best:
            best, reason = free, "cgroup limit"
    return best, reason


def available_memory(meminfo: str) -> int:
    """Return MemAvailable of /proc/meminfo in bytes; 0 if the text has none."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroup folders of this process and their parents that have the controller's files.

    In a container, the kernel may report the path on the host. Its longest suffix that exists in the container is used.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        for mount in mounts:
            if mount.is_dir():
                yield from _upwards(mount, path)
                break


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.lstrip("/")
    for place in (folder, *folder.parents):
        if place.is_dir():
            yield place
        if place == mount:
            return


def cpu_quota(folder: Path) -> float | None:
    """Return the cores of one cgroup's quota, v2 (`cpu.max`) or v1 (`cpu.cfs_quota_us`), or None if it has none."""
    if text := _read(folder / "cpu.max"):
        quota, period = (text.split() + ["100000"])[:2]
        return None if quota == "max" else int(quota) / int(period)
    quota_text, period_text = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota_text and period_text and int(quota_text) > 0:
        return int(quota_text) / int(period_text)
    return None


def cgroup_memory(folder: Path) -> int | None:
    """Return the free bytes of one cgroup (v2 or v1), including page cache, or None if it has no limit."""
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        if limit is None or usage is None or limit.strip() == "max" or int(limit) >= _UNLIMITED:
            continue
        stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines() if line.count(" ") == 1)
        cache = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
        return max(0, int(limit) - max(0, int(usage) - cache))
    return None


def find_gpus(root: Path) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that CUDA or ROCm shows, or none and the reason.

    The probe of CUDA runs in a separate process, so that the launcher does not hold a CUDA context.
    """
    if not any((root / name).exists() for name in ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")):
        if (root / "dev/kfd").exists():
            return _find_amd_gpus(root)
        intel = has_intel_gpu(root)
        return (), f"no NVIDIA driver is loaded{'; the Intel GPU is not supported' if intel else ''}"
    command = [sys.executable, "-P", "-m", "appliance.hardware.cuda_driver"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"the NVIDIA driver did not answer within {PROBE_TIMEOUT_S} s"
    if answer.returncode != 0:
        return (
            (),
            f"the query of the NVIDIA driver failed with code {answer.returncode}: {answer.stderr.strip()[-200:]}",
        )
    return parse_gpus(answer.stdout, installed_build())


def _find_amd_gpus(root: Path) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs of AMD's driver, or none and the reason."""
    gpus = tuple(Gpu(one.name, one.memory, one.free, one.capability, one.arch) for one in visible_gpus(root))
    if not gpus:
        return (), (
            "AMD's driver shows no GPU to this process: pass /dev/kfd and /dev/dri on to the container, and check "
            "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES"
        )
    reason = unusable_rocm(installed_build(), gpus[0].name)
    return () if reason else gpus, reason


def parse_gpus(text: str, build: Build | None) -> tuple[tuple[Gpu, ...], str]:
    """Parse the output of `appliance.hardware.cuda_driver`. Return no GPUs and the reason if torch cannot use them."""
    answer = json.loads(text)
    gpus = tuple(Gpu(g["name"], g["memory"], g["free"], (g["major"], g["minor"])) for g in answer["gpus"])
    if not gpus:
        return (), answer["error"] or "CUDA reports no device for this process"
    version = answer["version"]
    driver = None if version is None else (version // 1000, version % 1000 // 10)
    reason = unusable(build, driver, ((gpu.name, gpu.capability) for gpu in gpus))
    return () if reason else gpus, reason


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # missing, of another cgroup version, or unreadable: it implies no limit
        return None
