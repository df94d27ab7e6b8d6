"""CPU topology of the CPUs that a service may use: NUMA nodes, cores, and the hardware threads (CPUs) of each core.

Sources: admin-guide/cputopology and admin-guide/mm/numaperf of the Linux kernel, and cpuset(7) for lists such as 0-3,8.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

Core = tuple[int, ...]  # the CPUs of a core
Node = tuple[Core, ...]


@dataclass(frozen=True)
class Topology:
    """Usable CPUs and their topology."""

    allowed: tuple[int, ...] = ()  # CPUs that affinity and cpusets allow for this process
    nodes: tuple[Node, ...] = ()
    """NUMA nodes with allowed CPUs, by cores; empty without sysfs, and then nothing is pinned."""


def read_topology(root: Path, affinity: Collection[int], cpusets: Iterable[Path]) -> Topology:
    """Read the topology.

    `affinity` is the CPU affinity of this process. `cpusets` are the folders of its cpuset cgroup and its parents.
    """
    system = root / "sys/devices/system"
    allowed = set(affinity)
    for folder in cpusets:
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            allowed &= _cpus(folder / name) or allowed
    online = _cpus(system / "cpu/online")
    if not online:
        return Topology(tuple(sorted(allowed)))
    allowed &= online
    numbered = [(int(path.name[4:]), path) for path in system.glob("node/node*") if path.name[4:].isdigit()]
    lists = [_cpus(path / "cpulist") & allowed for _, path in sorted(numbered)]
    if not any(lists):
        lists = [allowed]  # a kernel without NUMA has no such folder
    return Topology(tuple(sorted(allowed)), tuple(_cores(system, cpus) for cpus in lists if cpus))


def _cores(system: Path, cpus: set[int]) -> Node:
    """Group CPUs into cores, sorted by their first CPU. Without topology information, each CPU is a core."""
    found: set[Core] = set()
    for cpu in cpus:
        siblings = _cpus(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        found.add(tuple(sorted((siblings & cpus) | {cpu})))
    return tuple(sorted(found))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a CPU list such as 0-3,8 and return its CPUs in order. Raise ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"{part!r} is neither a CPU nor a range of CPUs such as 0-3")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def format_cpus(cpus: Iterable[int]) -> str:
    """Format CPUs as a list that `parse_cpus` reads."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def format_node(node: Node) -> str:
    cpus = [cpu for core in node for cpu in core]
    return f"{len(node)} cores, CPUs {format_cpus(cpus)}"


def _cpus(path: Path) -> set[int]:
    """Read a CPU list from a file; return an empty set if the file is missing or invalid."""
    try:
        return set(parse_cpus(path.read_text()))
    except (OSError, ValueError):
        return set()
