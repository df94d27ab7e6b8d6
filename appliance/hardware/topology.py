"""Which CPUs a service may use and how they lie: NUMA nodes, cores, and the CPUs (hardware threads) of a core.

Sources: admin-guide/cputopology and admin-guide/mm/numaperf of the Linux kernel, and cpuset(7) for lists such as 0-3,8.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

Core = tuple[int, ...]  # its CPUs
Node = tuple[Core, ...]


@dataclass(frozen=True)
class Topology:
    """`allowed`: the CPUs that affinity and cpusets leave to this process. `nodes`: the NUMA nodes that have some of
    them, by cores; a core with several CPUs runs several threads at the cost of each. Without sysfs there are none, and
    nothing is bound to anything."""

    allowed: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = ()


def read_topology(root: Path, affinity: Collection[int], cpusets: Iterable[Path]) -> Topology:
    """affinity: that of this process; cpusets: folders of its cpuset cgroup and of those above it."""
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
    """The cores that these CPUs make, by their first CPUs. Where the system does not tell, each is a core."""
    found: set[Core] = set()
    for cpu in cpus:
        siblings = _cpus(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        found.add(tuple(sorted((siblings & cpus) | {cpu})))
    return tuple(sorted(found))


def parse_cpus(text: str) -> tuple[int, ...]:
    """The CPUs of a list such as 0-3,8, in order. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"{part!r} is no CPU and no range of CPUs such as 0-3")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def spell_cpus(cpus: Iterable[int]) -> str:
    """The list of these CPUs, as `parse_cpus` reads it."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def spell_node(node: Node) -> str:
    cpus = [cpu for core in node for cpu in core]
    return f"{len(node)} cores, CPUs {spell_cpus(cpus)}"


def _cpus(path: Path) -> set[int]:
    """Of a file with such a list; none if it is not there or holds something else."""
    try:
        return set(parse_cpus(path.read_text()))
    except (OSError, ValueError):
        return set()
