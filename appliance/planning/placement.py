"""Placement of engine threads on CPUs, and the CPUs left to the gateway and the system.

- Use one thread per core if there are enough cores, because threads on one core share its arithmetic units. On one or
  two cores use every CPU, because so few threads do not saturate the memory bandwidth.
- Distribute the engines over NUMA nodes, so that each reads its weights from local memory.
- Pin threads only if the service owns the cores. Under a CPU quota the kernel moves threads to free cores and throttles
  them when the quota is exhausted. On one or two cores a pinned thread could not make way for the gateway.
- Reserve the first core for other processes on machines with more than 8 cores. This costs at most a ninth of the
  arithmetic, and nothing if memory bandwidth is the limit. The kernel runs its own work on the first core.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from appliance.config.settings import Settings
from appliance.hardware.machine import Machine
from appliance.hardware.topology import Core, Node, format_cpus, parse_cpus
from appliance.planning.choice import Choice, refuse
from engine.api.config import Device

FEW_CORES = 2
RESERVE_ABOVE = 8  # cores

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadPlacement:
    """CPU placement of all processes. The ranks per engine are consecutive entries. Empty tuples mean no pinning."""

    threads: Choice[int]  # threads per rank
    pinned: Choice[str]  # pinned CPUs as text, or "none" with the reason
    reserved: Choice[int]  # reserved cores
    cpus: tuple[tuple[int, ...], ...]  # by process: one CPU per thread
    homes: tuple[tuple[int, ...], ...]  # by process: CPUs that the process may use
    others: tuple[int, ...] = ()  # CPUs for all other processes


def place(settings: Settings, machine: Machine, device: Device, ranks: int = 1) -> ThreadPlacement:
    """Place `ranks` ranks of each engine.

    Raise Refused if the manifest asks for more cores, threads or CPUs than this process may use.
    """
    engines = settings.manifest.parallelism.data * ranks  # each rank is placed like a separate engine
    nodes, is_listed = _nodes(settings, machine)
    reserved = _reserved(settings, machine, nodes, device, is_listed)
    left = _without(nodes, reserved.value)
    shares = _shares(left, engines)
    threads = _threads(settings, machine, shares, reserved.value, ranks)
    nothing = ((),) * engines
    why_not = _why_not(settings, machine, left, device, threads.value * engines, is_listed)
    if why_not is not None:
        return ThreadPlacement(threads, Choice("none", why_not), reserved, nothing, nothing)
    if any(len(_cpus(share)) < threads.value for share in shares):
        shares = _flat(left, engines)
    if any(len(_cpus(share)) < threads.value for share in shares):
        shares = [tuple((cpu,) for cpu in part) for part in _cut(_cpus([core for n in left for core in n]), engines)]
    cpus = tuple(_cpus(share)[: threads.value] for share in shares)
    taken = {cpu for own in cpus for cpu in own}
    cores = [core for node in machine.topology.nodes for core in node]
    idle = {cpu for core in cores if not taken & set(core) for cpu in core}
    others = idle or set(machine.topology.allowed) - taken
    homes = tuple(_home(own, machine.topology.nodes, taken, idle) for own in cpus)
    spelled = " and ".join(map(format_cpus, cpus))
    whole = sum(bool(taken & set(core)) for core in cores) == len(taken)
    one = "rank" if ranks > 1 else "engine"
    reason = f"one thread per {'core' if whole else 'CPU'}{_span(nodes, cpus, one)}"
    return ThreadPlacement(threads, Choice(spelled, reason), reserved, cpus, homes, tuple(sorted(others)))


def _nodes(settings: Settings, machine: Machine) -> tuple[tuple[Node, ...], bool]:
    """Return the nodes to divide, and whether the manifest lists their CPUs."""
    wanted, topology = settings.manifest.hardware.cpus, machine.topology
    if wanted in ("auto", "none"):
        return topology.nodes, False
    try:
        cpus = set(parse_cpus(wanted))
    except ValueError as error:
        refuse(settings, "hardware.cpus", f"{error}. Use CPUs and ranges of CPUs, auto, or none")
    if missing := cpus - set(topology.allowed):
        message = f"{wanted}: {format_cpus(missing)} not allowed here, only {format_cpus(topology.allowed)}"
        refuse(settings, "hardware.cpus", f"{message} (affinity and cpuset); use some of these, auto, or none")
    if settings.manifest.hardware.reserved_cores != "auto":
        message = (
            "hardware.cpus lists the CPUs of the engines, so all others are already reserved. Remove one of the two "
            "keys"
        )
        refuse(settings, "hardware.reserved_cores", message)
    if not topology.nodes:
        return (tuple((cpu,) for cpu in sorted(cpus)),), True
    cores = ([tuple(cpu for cpu in core if cpu in cpus) for core in node] for node in topology.nodes)
    kept = (tuple(core for core in node if core) for node in cores)
    return tuple(node for node in kept if node), True


def _reserved(
    settings: Settings, machine: Machine, nodes: Sequence[Node], device: Device, is_listed: bool
) -> Choice[int]:
    wanted, count = settings.manifest.hardware.reserved_cores, _count(machine, nodes)
    if wanted == "auto":
        if device == "cuda":
            return Choice(0, "the engine computes on a GPU")
        if is_listed:
            return Choice(0, "hardware.cpus lists the engines' CPUs")
        if _limited(machine):
            return Choice(0, "a cgroup quota has no fixed cores")
        if count > RESERVE_ABOVE:
            return Choice(1, f"one of {count} cores")
        return Choice(0, f"{count} cores are too few to reserve one; the gateway has a lower priority than the engines")
    if wanted >= count:
        message = f"{wanted}: {count} cores are allowed here ({machine.cores_from}), and the engines need at least one"
        refuse(settings, "hardware.reserved_cores", f"{message}; use at most {count - 1}, or auto")
    return Choice(wanted)


def _threads(settings: Settings, machine: Machine, shares: Sequence[Node], reserved: int, ranks: int) -> Choice[int]:
    wanted, engines = settings.manifest.hardware.threads, settings.manifest.parallelism.data * ranks
    if wanted != "auto":
        allowed = len(machine.topology.allowed)
        if allowed and wanted > allowed:
            message = f"{wanted}: {allowed} CPUs are allowed here ({format_cpus(machine.topology.allowed)})"
            refuse(settings, "hardware.threads", f"{message}; use at most {allowed}, or auto")
        return Choice(wanted)
    shared = f" for {engines} {'ranks' if ranks > 1 else 'engines'}" if engines > 1 else ""
    less = f" less {reserved} reserved" if reserved else ""
    if _limited(machine) or not shares:
        each = (machine.cores - reserved) // engines
        most = min((len(_cpus(share)) for share in shares), default=each)
        return Choice(max(1, min(each, most)), f"{machine.cores} cores by {machine.cores_from}{less}{shared}")
    cores, cpus = sum(map(len, shares)), sum(len(_cpus(share)) for share in shares)
    if cores <= FEW_CORES:
        smallest = min(len(_cpus(share)) for share in shares)
        return Choice(max(1, smallest), f"{cpus} CPUs by {machine.cores_from}{less}{shared}")
    return Choice(max(1, min(map(len, shares))), f"{cores + reserved} cores by {machine.cores_from}{less}{shared}")


def _why_not(
    settings: Settings, machine: Machine, nodes: Sequence[Node], device: Device, threads: int, is_listed: bool
) -> str | None:
    """Return the reason for not pinning threads, or None if they are pinned."""
    cpus = sum(len(core) for node in nodes for core in node)
    if is_listed:
        if threads > cpus:
            wanted = settings.manifest.hardware.cpus
            message = f"{threads} threads of the engines: hardware.cpus lists {cpus} CPUs ({wanted}); list more of them"
            refuse(settings, "hardware.threads", f"{message}, or lower hardware.threads")
        return None
    if settings.manifest.hardware.cpus == "none":
        return ""
    if device == "cuda":
        return "the engine computes on a GPU"
    if not nodes:
        return "this system does not report its CPU topology"
    if _limited(machine):
        return "no pinning under a cgroup quota"
    if _count(machine, nodes) <= FEW_CORES:
        return f"no pinning on {FEW_CORES} cores or fewer"
    if threads > cpus:
        return f"{threads} threads on {cpus} CPUs"
    return None


def _limited(machine: Machine) -> bool:
    return machine.cores_from == "cgroup quota"


def _count(machine: Machine, nodes: Sequence[Node]) -> int:
    """Return the number of cores, from the quota or from the nodes."""
    return sum(map(len, nodes)) if nodes and not _limited(machine) else machine.cores


def _without(nodes: Sequence[Node], count: int) -> list[Node]:
    """Return the nodes without the first `count` cores."""
    found = []
    for node in nodes:
        found.append(node[count:])
        count = max(0, count - len(node))
    return [node for node in found if node]


def _shares(nodes: Sequence[Node], engines: int) -> list[Node]:
    """Return the cores of each engine.

    Each engine gets cores of one node, or whole nodes, unless more than a quarter of all cores would stay idle.
    """
    if not nodes:
        return []
    total = sum(map(len, nodes))
    if engines < len(nodes):
        found = [tuple(core for node in part for core in node) for part in _cut(nodes, engines)]
    else:
        hosts = [engine * len(nodes) // engines for engine in range(engines)]
        found = [part for at, node in enumerate(nodes) for part in _cut(node, hosts.count(at))]
    return found if 4 * engines * min(map(len, found)) >= 3 * total else _flat(nodes, engines)


def _flat(nodes: Sequence[Node], engines: int) -> list[Node]:
    return _cut([core for node in nodes for core in node], engines)


def _cut(things: Sequence[T], parts: int) -> list[tuple[T, ...]]:
    """Split a sequence into contiguous parts whose sizes differ by at most one."""
    ends = [len(things) * part // parts for part in range(parts + 1)]
    return [tuple(things[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def _cpus(cores: Sequence[Core]) -> tuple[int, ...]:
    """Return the first CPU of each core, then the second of each core, and so on."""
    most = max((len(core) for core in cores), default=0)
    return tuple(core[at] for at in range(most) for core in cores if at < len(core))


def _home(own: Sequence[int], nodes: Sequence[Node], taken: set[int], idle: set[int]) -> tuple[int, ...]:
    """Return the CPUs that a process may use.

    These are the CPUs of its threads, their hyper-thread siblings that no engine uses, and the idle cores of the same
    nodes.
    """
    there = {cpu for node in nodes if any(set(core) & set(own) for core in node) for core in node for cpu in core}
    beside = {cpu for node in nodes for core in node if set(core) & set(own) for cpu in core} - taken
    return tuple(sorted(set(own) | beside | (idle & there)))


def _span(nodes: Sequence[Node], cpus: Sequence[Sequence[int]], one: str) -> str:
    """Describe how the engines, or their ranks, are distributed over the NUMA nodes."""
    if len(nodes) < 2:
        return ""
    sets = [{cpu for core in node for cpu in core} for node in nodes]
    widest = max(sum(bool(cpus_there & set(own)) for cpus_there in sets) for own in cpus)
    if widest == 1:
        return f", each {one} on one NUMA node" if len(cpus) > 1 else ", on one NUMA node"
    return f", over {widest} NUMA nodes; parallelism.data: {len(nodes)} would give each engine its own"
