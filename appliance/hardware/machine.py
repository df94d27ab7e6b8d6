"""What this machine gives a service: cores and free memory that cgroups and affinity leave, and GPUs. Free of torch.

Page cache counts as free: it goes when somebody needs the memory. Sources: cgroup v1 and v2 documentation of the Linux
kernel, proc(5).
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

from appliance.hardware.cuda_build import Build, installed_build, unusable
from appliance.hardware.topology import Topology, read_topology
from kernels.cpu.library import usable

PROBE_TIMEOUT_S = 60
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" as the largest multiple of a page


@dataclass(frozen=True)
class Gpu:
    """One device as CUDA shows it to this process (CUDA_VISIBLE_DEVICES, MIG). Bytes."""

    name: str
    memory: int
    free: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """`cores` and `memory_free` (bytes) are what this process may use; the texts say what limited them. Without GPUs,
    `no_gpu` says why. `kernels`: compiled variants for CPUs that run here, the fastest first. `triton`: whether it
    is installed. `described`: as what the table of devices was asked for it; empty: it is this machine."""

    cores: int
    cores_from: str
    memory_free: int
    memory_from: str
    gpus: tuple[Gpu, ...] = ()
    no_gpu: str = "not looked for"
    kernels: tuple[str, ...] = ()
    triton: bool = False
    topology: Topology = Topology()
    described: str = ""


def read_machine(*, gpus: bool = True, root: Path = Path("/")) -> Machine:
    """The facts of this machine; `gpus=False` does not look for GPUs, which takes a second where there is a driver."""
    topology = read_topology(root, os.sched_getaffinity(0), cgroup_folders(root, "cpuset"))
    cores, cores_from = count_cores(root, len(topology.allowed))
    memory, memory_from = free_memory(root)
    found, reason = find_gpus(root) if gpus else ((), "not looked for")
    triton = find_spec("triton") is not None
    return Machine(cores, cores_from, memory, memory_from, found, reason, usable(), triton, topology)


def count_cores(root: Path, allowed: int) -> tuple[int, str]:
    """The cores that affinity allows, or fewer if a cgroup has a quota: a quota of 2.5 cores is taken for 2 threads."""
    best, reason = float(allowed), "affinity"
    for folder in cgroup_folders(root, "cpu"):
        quota = cpu_quota(folder)
        if quota is not None and quota < best:
            best, reason = quota, "cgroup quota"
    return max(1, math.floor(best)), reason


def free_memory(root: Path) -> tuple[int, str]:
    """Bytes that can be had now: what the kernel calls available, or less if a cgroup limit is closer."""
    best, reason = available_memory(_read(root / "proc/meminfo") or ""), "MemAvailable"
    for folder in cgroup_folders(root, "memory"):
        free = cgroup_memory(folder)
        if free is not None and free < best:
            best, reason = free, "cgroup limit"
    return best, reason


def available_memory(meminfo: str) -> int:
    """MemAvailable of /proc/meminfo in bytes; 0 if the text has none."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of those above it, where the controller's files are. In a container the path
    that the kernel tells may be the host's: then its last part that exists here counts."""
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
    """Cores by the quota of one cgroup, v2 (`cpu.max`) or v1 (`cpu.cfs_quota_us`); None without one."""
    if text := _read(folder / "cpu.max"):
        quota, period = (text.split() + ["100000"])[:2]
        return None if quota == "max" else int(quota) / int(period)
    quota_text, period_text = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota_text and period_text and int(quota_text) > 0:
        return int(quota_text) / int(period_text)
    return None


def cgroup_memory(folder: Path) -> int | None:
    """Bytes that one cgroup still allows, page cache counted as free, v2 or v1; None without a limit."""
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
    """The GPUs that CUDA shows, or none and why. Asked in a process of its own: a CUDA context must not live in the
    launcher."""
    if not any((root / name).exists() for name in ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")):
        return (), "no NVIDIA driver is loaded"
    command = [sys.executable, "-P", "-m", "appliance.hardware.cuda_driver"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"the NVIDIA driver did not answer within {PROBE_TIMEOUT_S} s"
    if answer.returncode != 0:
        return (), f"asking the NVIDIA driver ended with code {answer.returncode}: {answer.stderr.strip()[-200:]}"
    return parse_gpus(answer.stdout, installed_build())


def parse_gpus(text: str, build: Build | None) -> tuple[tuple[Gpu, ...], str]:
    """The answer of `appliance.hardware.cuda_driver`, where the installed torch can use what it shows."""
    answer = json.loads(text)
    gpus = tuple(Gpu(g["name"], g["memory"], g["free"], (g["major"], g["minor"])) for g in answer["gpus"])
    if not gpus:
        return (), answer["error"] or "CUDA shows no device to this process"
    version = answer["version"]
    driver = None if version is None else (version // 1000, version % 1000 // 10)
    reason = unusable(build, driver, ((gpu.name, gpu.capability) for gpu in gpus))
    return () if reason else gpus, reason


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # not there, or of another cgroup version, or not ours to read: no limit is known from it
        return None
