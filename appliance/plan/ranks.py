"""How many ranks share each engine's model: what was asked for, refused where the model or the GPUs do not allow it."""

from collections.abc import Callable

from appliance.declare.settings import Settings
from appliance.plan.capacity import Device
from appliance.plan.choice import Choice, refuse
from appliance.plan.machine import Machine
from engine.models.checkpoint import Checkpoint
from engine.models.ranks import tensor_problem, tensor_sizes


def tensor(
    settings: Settings,
    checkpoint: Checkpoint,
    machine: Machine,
    device: Device,
    *,
    compiled: bool,
    fits: Callable[[int], bool],
) -> Choice[int]:
    """`compiled`: kernels of a CPU serve. fits(size): whether so many ranks have memory for the model and some cache.
    Refuses what the model cannot be cut into and more ranks than there are GPUs for."""
    wanted, engines = settings.manifest.parallelism.tensor, settings.manifest.parallelism.data
    model, own = checkpoint.model, checkpoint.quantization
    sizes = tensor_sizes(model, own, compiled=compiled)
    if wanted == "auto":
        return _auto(sizes, machine, device, engines, fits)
    problem = tensor_problem(model, own, wanted, compiled=compiled)
    if problem is not None:
        # A model that only its groups keep from being cut can be cut where torch restores them.
        torch = compiled and tensor_problem(model, own, wanted, compiled=False) is None
        instead = ", or hardware.kernels: torch" if torch else ""
        message = f"{wanted}: {problem}; use {_spelled(sizes)}{instead}"
        refuse(settings, "parallelism.tensor", message)
    there = len(machine.gpus)
    if device == "cuda" and wanted > 1 and wanted * engines > there:
        each = f" for each of {engines} engines" if engines > 1 else ""
        possible = [size for size in sizes if size * engines <= there] or [1]
        message = f"{wanted}: needs {wanted} GPUs{each}, and {there} can be used here; use {_spelled(tuple(possible))}"
        refuse(settings, "parallelism.tensor", message)
    return Choice(wanted)


def _auto(
    sizes: tuple[int, ...], machine: Machine, device: Device, engines: int, fits: Callable[[int], bool]
) -> Choice[int]:
    if device == "cpu":
        return Choice(1, "the ranks of a CPU share its memory, so that more of them fit no larger model")
    possible = [size for size in sizes if size == 1 or size * engines <= len(machine.gpus)]
    best = next((size for size in possible if fits(size)), None)
    if best is None:
        return Choice(possible[-1], f"the model fits on none of {_spelled(tuple(possible))} GPUs")
    if best == 1:
        return Choice(1, "the model fits on one GPU")
    return Choice(best, f"the fewest of {len(machine.gpus)} GPUs on which the model fits and that divide its heads")


def _spelled(sizes: tuple[int, ...]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
