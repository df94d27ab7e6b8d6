"""Number format of quantized weights, of the head and of the token embedding: quantization.group_size,
quantization.head and quantization.embedding."""

from typing import cast

from appliance.config.settings import Settings
from appliance.constraints.rule import TRITON, View, is_compiled
from appliance.constraints.weights import INTEGERS, ON_CPU
from appliance.planning.choice import Choice, refuse
from engine.api.config import EmbeddingBits, HeadBits, WeightBits
from engine.formats.load_time import LOAD_FORMATS
from engine.formats.native import Executor, GgmlBlocks
from engine.lowering.footprint import head_bits, quantization_group
from engine.models.checkpoint import Checkpoint
from engine.models.parts import Model
from engine.models.quantized import Quantization
from engine.models.sources import join

GROUP_SIZE, HEAD, EMBEDDING = "quantization.group_size", "quantization.head", "quantization.embedding"


def weight_format(settings: Settings, checkpoint: Checkpoint, view: View) -> dict[str, Choice[int | str] | Choice[str]]:
    """Return these keys resolved. Raise Refused for a value without effect."""
    head = _head(settings, checkpoint, view)
    embedding = _embedding(settings, checkpoint, view)
    return {GROUP_SIZE: _group(settings, checkpoint, view, head.value), HEAD: head, EMBEDDING: embedding}


def other_than_auto(view: View, checkpoint: Checkpoint) -> tuple[int, HeadBits]:
    """Return group size and head for the engine: 0 and "auto" if the written values equal the values that auto has, so
    that writing them out does not change the engine's configuration."""
    bits, head, group = view.weights, view.facts.head, view.facts.group_size
    formats = {one for one in (bits, head_bits(bits, head)) if one in INTEGERS and LOAD_FORMATS[one].group is None}
    if all(quantization_group(one, checkpoint.model) == group for one in formats):
        group = 0
    return group, "auto" if head == head_bits(bits, "auto") else head


def _head(settings: Settings, checkpoint: Checkpoint, view: View) -> Choice[str]:
    wanted, out = settings.manifest.quantization.head, checkpoint.model.head
    if out is None:
        if wanted != "auto":
            refuse(settings, HEAD, f"{wanted}: this model pools and has no head; use auto", instead="auto")
        return Choice("auto", "this model pools and has no head")
    path = join(checkpoint.model.root, checkpoint.model.embed.name) if out.tied else out.name
    executor: Executor = "compiled" if is_compiled(view.kernels) else "triton"
    native = None if checkpoint.quantization is None else checkpoint.quantization.native((path,), executor)
    if wanted != "auto" and native is not None:
        refuse(settings, HEAD, f"{wanted}: the checkpoint stores the head in {native}; use auto", instead="auto")
    if wanted in ON_CPU and not is_compiled(view.kernels):
        because = f"only compiled kernels of a CPU multiply by it, and these are {view.kernels} kernels"
        refuse(settings, HEAD, f"{wanted}: {because}; use auto", instead="auto")
    if wanted in INTEGERS and view.kernels != TRITON and not is_compiled(view.kernels):
        because = (
            f"only compiled kernels of a CPU and Triton kernels multiply by it, and these are {view.kernels} kernels"
        )
        refuse(settings, HEAD, f"{wanted}: {because}; use auto", instead="auto")
    if wanted != "auto":
        return Choice(wanted)
    found = head_bits(view.weights, "auto")
    if found == "stored":
        return Choice(found, "as in the checkpoint")
    why = "8 bits, because the head selects the token; int6 and int4 are faster and less accurate"
    return Choice(found, why)


def _embedding(settings: Settings, checkpoint: Checkpoint, view: View) -> Choice[str]:
    wanted = settings.manifest.quantization.embedding
    if wanted == "auto":
        return Choice("stored", "as in the checkpoint")
    if wanted == "stored":
        return Choice(wanted)
    problem = _embedding_problem(wanted, checkpoint.model, checkpoint.quantization, view)
    draft = checkpoint.draft
    if not problem and draft is not None and not draft.model.shares_embedding:
        of_draft = _embedding_problem(wanted, draft.model, draft.quantization, view, stored=True)
        problem = of_draft and f"of the draft model, {of_draft}"
    if problem:
        refuse(settings, EMBEDDING, f"{wanted}: {problem}; use auto", instead="auto")
    return Choice(wanted)


def _embedding_problem(
    wanted: EmbeddingBits, model: Model, quantization: Quantization | None, view: View, *, stored: bool = False
) -> str:
    """Return why the embedding cannot have this format, or "". stored: it may keep blocks of the checkpoint."""
    path, width = join(model.root, model.embed.name), quantization_group(cast(WeightBits, wanted), model)
    if model.foreign is not None or model.audio is not None:
        return "the layers are not Slipway's own"
    if model.embed.is_sum:
        return "positions are added to the rows of tokens"
    if quantization is not None and view.kernels != "torch":
        native = quantization.native((path,), "compiled" if is_compiled(view.kernels) else "triton")
        if isinstance(native, GgmlBlocks):
            return "" if stored else f"the checkpoint stores the embedding in {native}"
    if model.embed.row_width % width:
        return f"rows have {model.embed.row_width} numbers, which is not a multiple of {width}"
    return ""


def _group(settings: Settings, checkpoint: Checkpoint, view: View, head: str) -> Choice[int | str]:
    wanted = settings.manifest.quantization.group_size
    if view.weights not in INTEGERS and head not in INTEGERS:
        if wanted != "auto":
            because = "no weights are quantized to int8 or int4 at load"
            refuse(settings, GROUP_SIZE, f"{wanted}: {because}; use auto, or set quantization.weights", instead="auto")
        return Choice("auto", "no weights are quantized at load")
    used = (view.weights, head_bits(view.weights, cast(HeadBits, head)))
    sized = [one for one in used if one in INTEGERS and LOAD_FORMATS[one].group is None]
    if not sized:
        fixed = next(one for one in used if one in INTEGERS)
        found, why = quantization_group(fixed, checkpoint.model), f"the size of a block of {fixed}"
        if wanted not in ("auto", found):
            refuse(settings, GROUP_SIZE, f"{wanted}: {fixed} has blocks of {found} inputs; use auto", instead="auto")
        return Choice(found, why)
    if wanted != "auto":
        return Choice(wanted)
    bits = sized[0]
    found = quantization_group(bits, checkpoint.model)
    if LOAD_FORMATS[bits].small_groups:
        why = f"{bits.removeprefix('int')} bits need small groups"
    elif checkpoint.model.head is None:
        why = "the vectors of a pooling model need the accuracy"
    else:
        why = "few bytes of scales"
    return Choice(found, f"{why}; smaller groups are more accurate and take more memory")
