"""Number format of quantized weights and of the head: quantization.group_size and quantization.head."""

from appliance.config.settings import Settings
from appliance.constraints.rule import View, is_compiled
from appliance.constraints.weights import ON_CPU
from appliance.planning.choice import Choice, refuse
from engine.models.checkpoint import Checkpoint
from engine.models.footprint import head_bits, quantization_group
from engine.models.sources import join

GROUP_SIZE, HEAD = "quantization.group_size", "quantization.head"


def weight_format(settings: Settings, checkpoint: Checkpoint, view: View) -> dict[str, Choice[int] | Choice[str]]:
    """Return the resolved keys that have an effect. Raise Refused for a value that has none."""
    head = _head(settings, checkpoint, view)
    group = _group(settings, checkpoint, view, head)
    return {key: choice for key, choice in ((GROUP_SIZE, group), (HEAD, head)) if choice is not None}


def _head(settings: Settings, checkpoint: Checkpoint, view: View) -> Choice[str] | None:
    wanted, out = settings.manifest.quantization.head, checkpoint.model.head
    if out is None:
        if wanted != "auto":
            refuse(settings, HEAD, f"{wanted}: this model pools and has no head; use auto", instead="auto")
        return None
    path = join(checkpoint.model.root, checkpoint.model.embed.name) if out.tied else out.name
    schemes = {} if checkpoint.quantization is None else checkpoint.quantization.schemes
    scheme = schemes.get(path)
    if wanted != "auto" and scheme is not None and scheme.bits:
        refuse(settings, HEAD, f"{wanted}: the checkpoint stores the head in {scheme}; use auto", instead="auto")
    if wanted in ON_CPU and not is_compiled(view.kernels):
        because = f"only compiled kernels of a CPU multiply by it, and these are {view.kernels} kernels"
        refuse(settings, HEAD, f"{wanted}: {because}; use auto", instead="auto")
    if wanted != "auto":
        return Choice(wanted)
    found = head_bits(view.weights, "auto")
    if found == "stored":
        return None
    return Choice(found, "8 bits, because the head selects the token; int4 is faster and less accurate")


def _group(settings: Settings, checkpoint: Checkpoint, view: View, head: Choice[str] | None) -> Choice[int] | None:
    wanted = settings.manifest.quantization.group_size
    quantized = view.weights in ON_CPU or (head is not None and head.value in ON_CPU)
    if not quantized:
        if wanted != "auto":
            because = "no weights are quantized to int8 or int4 at load"
            refuse(settings, GROUP_SIZE, f"{wanted}: {because}; use auto, or set quantization.weights", instead="auto")
        return None
    if wanted != "auto":
        return Choice(wanted)
    bits = view.weights if view.weights in ON_CPU else head_bits("stored", "int8")
    found = quantization_group(bits, checkpoint.model)
    if bits == "int4":
        why = "4 bits need small groups"
    elif checkpoint.model.head is None:
        why = "the vectors of a pooling model need the accuracy"
    else:
        why = "few bytes of scales"
    return Choice(found, f"{why}; smaller groups are more accurate and take more memory")
