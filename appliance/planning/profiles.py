"""Selection of the hardware profile for a machine: the first profile whose conditions all hold."""

import re
from collections.abc import Callable, Iterator

from appliance.config.composition.profiles import Profile
from appliance.config.manifest_file import Match
from appliance.config.sections.values import SIZES
from appliance.hardware.machine import Gpu, Machine
from appliance.planning.memory import spell_bytes

_COMPARISON = re.compile(r"(>=|<=|>|<)\s*([\d.]+)\s*([A-Za-z]*)")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def first_match(device: str, profiles: tuple[Profile, ...], machine: Machine) -> tuple[str, ...]:
    """Return why each examined profile does not match, in order; "" as the last item if that profile matches.

    `device` is the value of hardware.device. With cpu, profiles see no GPUs.
    """
    reasons: list[str] = []
    for profile in profiles:
        reasons.append(next(_against(profile.match, device, machine), ""))
        if not reasons[-1]:
            break
    return tuple(reasons)


def _against(match: Match, device: str, machine: Machine) -> Iterator[str]:
    """Yield each condition that does not hold, as `key: actual value`."""
    gpus = machine.gpus if device != "cpu" else ()
    is_asked = "hardware.device is cpu" if device == "cpu" else f"there is no GPU ({machine.no_gpu})"
    computes = device if device != "auto" else "cuda" if gpus else "cpu"
    if match.device not in ("any", computes):
        why = "set by hardware.device" if device != "auto" else "there is a GPU" if gpus else machine.no_gpu
        yield f"device: {computes} ({why}), not {match.device}"
    wanted = (match.gpu, match.memory, match.compute_capability)
    if not gpus and any(one != "any" for one in wanted):
        names = ("gpu", "memory", "compute_capability")
        yield f"{next(name for name, one in zip(names, wanted, strict=True) if one != 'any')}: {is_asked}"
    if not holds(len(gpus), match.count):
        yield f"count: {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}, not {match.count}"
    for number, gpu in enumerate(gpus):
        yield from _against_gpu(match, gpu, f"GPU {number}" if len(gpus) > 1 else "the GPU")
    if match.kernels not in ("any", *machine.kernels):
        yield f"kernels: {', '.join(machine.kernels) or 'none'} can run here, not {match.kernels}"
    if not holds(machine.cores, match.cores):
        yield f"cores: {machine.cores} by {machine.cores_from}, not {match.cores}"


def _against_gpu(match: Match, gpu: Gpu, called: str) -> Iterator[str]:
    if match.gpu != "any" and match.gpu.lower() not in gpu.name.lower():
        yield f"gpu: {called} is {gpu.name}, not {match.gpu}"
    if not holds(gpu.memory, match.memory):
        yield f"memory: {called} has {spell_bytes(gpu.memory)}, not {match.memory}"
    major, minor = gpu.capability
    if not holds(rank(f"{major}.{minor}"), match.compute_capability):
        yield f"compute_capability: {called} has {major}.{minor}, not {match.compute_capability}"


def holds(value: float, wanted: float | str) -> bool:
    """Return whether a count, byte size or ranked version is in a range such as ">=2 <8", or equals a number."""
    if wanted == "any":
        return True
    if not isinstance(wanted, str):
        return value == (rank(str(wanted)) if isinstance(wanted, float) else wanted)
    comparisons = _COMPARISON.findall(wanted)
    return all(
        _HOLDS[sign](value, float(number) * SIZES[unit] if unit else rank(number)) for sign, number, unit in comparisons
    )


def rank(version: str) -> float:
    """Map a version to a number that sorts correctly: 8.9 < 8.10 < 9.0. A whole number maps to itself."""
    major, _, minor = version.partition(".")
    return int(major) + int(minor or 0) / 1000
