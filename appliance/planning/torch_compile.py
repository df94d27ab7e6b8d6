"""hardware.torch_compile: operations that torch.compile compiles, and the folder of the compiled programs."""

from appliance.config.settings import Settings
from appliance.constraints.rule import TORCH, View, is_compiled
from appliance.planning.choice import Choice, refuse
from engine.lowering.lower import lower
from engine.lowering.rewrites import fuse_add_normalize, fuse_prepare_kv
from engine.lowering.segments import Coverage, coverage
from engine.models.parts import Model

KEY = "hardware.torch_compile"


def torch_compile(settings: Settings, model: Model, view: View) -> Choice[bool]:
    """Return the choice with the covered operations. Raise Refused for a setting without effect, or whose results would
    depend on the batch."""
    if not settings.manifest.hardware.torch_compile:
        return Choice(False)
    found = covered(model, view.kernels)
    if is_compiled(view.kernels):
        because = f"{view.kernels} kernels execute all operations; torch does with hardware.kernels: torch"
    elif lacks := dict(view.facts.machine.compile_lacks).get(view.device, ""):
        because = f"this installation lacks {lacks}; images leave out what torch.compile needs"
    elif view.tensor > 1:
        because = f"programs of {view.tensor} ranks are not compiled; set parallelism.tensor to 1"
    elif view.batch_invariant:
        because = "compiled sums depend on the number of tokens, and hardware.batch_invariant is set"
    elif not found.compiled and model.foreign is None:
        because = "every operation of this model has a Triton kernel"
    elif model.foreign is not None:
        return Choice(True, "compiles modules of transformers' code without keys and values")
    else:
        return Choice(True, f"compiles {found.text}")
    refuse(settings, KEY, f"true: {because}; use false", instead="false")


def covered(model: Model, kernels: str) -> Coverage:
    """Return the operations that torch.compile compiles with these kernels, and the reasons for the others."""
    program = lower(model, 1)
    ops = (*program.encoder, *program.ops)
    if kernels == TORCH:
        return coverage(ops, "torch")
    return coverage(fuse_add_normalize(fuse_prepare_kv(ops, norms=True)), "triton")


def programs_folder(settings: Settings, choice: Choice[bool]) -> str | None:
    """Return the folder of compiled programs; an engine adds a folder by the hash of its configuration."""
    return str(settings.cache / "torch_compile") if choice.value and settings.cache is not None else None
