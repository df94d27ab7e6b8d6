"""Facts about a checkpoint and a machine that rules use. This module imports no torch and reads no weights."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

from engine.api.config import WeightBits
from engine.formats.load_time import load_formats
from engine.kv.layout import page_shape
from engine.lowering.adapters import adapter_groups
from engine.lowering.lower import lower
from engine.lowering.measures import torch_parts
from engine.models.checkpoint import Checkpoint
from engine.models.kv_scales import stated_format
from engine.models.parts import (
    MLP,
    Attention,
    Experts,
    LatentAttention,
    LayerNorm,
    Model,
    all_bodies,
    attentions,
    bodies,
    encoder_bodies,
    has_experts,
    page_writers,
    recurrents,
)
from engine.models.quantized import Quantization
from engine.models.ranks import tensor_sizes
from engine.models.sources import fused_paths, join, mlp_linears, routed_mlps
from engine.models.stored import native_paths
from kernels.cpu.library import ACTIVATIONS


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a checkpoint's model."""

    dtype: str = "float32"
    max_context: int = 4096
    limited_by_draft: bool = False  # True if the draft model has a shorter context, which is max_context
    vocab: int = 32000
    heads: tuple[tuple[int, int], ...] = ((8, 8),)  # distinct pairs of query heads and KV heads
    head_sizes: tuple[int, ...] = (64,)
    intermediate_sizes: tuple[int, ...] = (1024,)  # other sizes that tensor parallelism divides
    experts: bool = False  # True for mixture-of-experts models
    stateful: int = 0  # number of layers with recurrent state
    predicts: bool = False  # True if the checkpoint has a prediction head that can draft
    pools: bool = False  # True for pooling models, which return vectors or scores instead of tokens
    speech: bool = False  # True for speech models, whose encoder input is audio
    foreign: str = ""  # architecture that only transformers' own code computes; "" for declared models
    recomputes: bool = False  # True if that code computes the complete sequence in each step
    mixed_expert_formats: tuple[WeightBits, ...] = ()
    """Values of quantization.weights for which the experts of one layer would have several formats."""
    quantized: str = ""  # the quantization as text; "" without one
    quantizable: bool = False  # True if quantization.weights may quantize the matrices that are dequantized
    float16_pages: bool = False  # True if the scales of the weights suggest a float16 KV cache on a CPU
    kv_format: str = ""  # number format of the KV cache for which the checkpoint was made; "" without one
    held: bool = False  # True if compiled kernels multiply by the checkpoint's integer weights directly
    restored: int = 0  # number of quantized matrices that compiled kernels must dequantize
    whole: tuple[int, ...] = ()  # rank counts that split the integer weights only between quantization groups
    held_on_gpu: int = 0  # number of quantized matrices that Triton kernels multiply by directly
    blocks: tuple[int, ...] = ()  # rank counts that split these only between groups or blocks with a scale
    mixed_on_gpu: bool = False  # True if Triton kernels would have experts of one layer in several formats
    recurrent: tuple[tuple[int, str], ...] = ()  # numbers that ranks divide in recurrent layers, with their names
    by_torch: tuple[str, ...] = ()
    normed_together: bool = False
    cross_alibi: bool = False  # True: cross-attention has ALiBi
    wrong_chunks: bool = False  # True: chunks or scaled queries where no executor supports them
    pages: tuple[tuple[int, int], ...] = ((8, 64),)  # distinct pairs of KV head count and head size
    adapter_groups: int = 0  # number of LoRA adapters, or of pairs of an adapter and an expert that adapters change
    latent: int = 0  # elements of the latents of multi-head latent attention; 0 without it
    draft_pages: tuple[tuple[int, int], ...] = ()  # as `pages`, of a draft model or head
    draft_latent: int = 0  # as `latent`, of a draft model or head


def model_facts(checkpoint: Checkpoint) -> ModelFacts:
    model, own = checkpoint.model, checkpoint.quantization
    parts = attentions(model)
    attending = [body for body in (*encoder_bodies(model), *all_bodies(model)) if isinstance(body, Attention)]
    own_heads = [part for part in parts if isinstance(part, Attention)]
    # Each head of latent attention has keys and values of its own.
    latent_heads = tuple(dict.fromkeys((part.heads, part.heads) for part in parts if isinstance(part, LatentAttention)))
    draft = None if checkpoint.draft is None else checkpoint.draft.model
    held, held_on_gpu = (native_paths(model, own, executor) for executor in ("compiled", "triton"))
    is_quantized = own is not None and not own.is_plain
    return ModelFacts(
        dtype=checkpoint.dtype,
        max_context=checkpoint.max_context,
        limited_by_draft=checkpoint.limited_by_draft,
        vocab=model.embed.vocab,
        heads=tuple(dict.fromkeys((part.heads, part.kv_heads) for part in attending)) or latent_heads,
        head_sizes=tuple(sorted({part.head_dim for part in attending})),
        intermediate_sizes=tuple(sorted(set(_intermediate_sizes(model)))),
        experts=has_experts(model),
        stateful=len(recurrents(model)),
        predicts=checkpoint.draft is not None and checkpoint.draft.path == checkpoint.path,
        pools=model.pooler is not None,
        speech=model.audio is not None,
        foreign="" if model.foreign is None else model.foreign.architecture,
        recomputes=model.foreign is not None and model.foreign.recomputes,
        mixed_expert_formats=_mixed_expert_formats(checkpoint),
        quantized=str(own) if is_quantized else "",
        quantizable=own is not None and own.quantizable,
        float16_pages=own is not None and own.float16_pages,
        kv_format=stated_format(checkpoint.path, checkpoint.config, model, checkpoint.tensors),
        held=bool(held),
        restored=_restored(checkpoint, held),
        whole=tensor_sizes(model, own, "compiled") if held else (),
        held_on_gpu=len(held_on_gpu),
        blocks=tensor_sizes(model, own, "triton") if held_on_gpu else (),
        mixed_on_gpu=_mixed_on_gpu(checkpoint),
        recurrent=tuple(dict.fromkeys(unit for part in recurrents(model) for unit in part.units())),
        by_torch=torch_parts(lower(model), ACTIVATIONS),
        cross_alibi=any(p.alibi is not None and p.source for p in attending),
        wrong_chunks=any(not part.supported_limits for part in attending),
        normed_together=any(isinstance(p.qk_norm, LayerNorm) and p.qk_norm_span == "all" for p in own_heads),
        pages=_pages(model),
        adapter_groups=adapter_groups(model, checkpoint.adapters, checkpoint.adapter_slots),
        latent=_latent(model),
        draft_pages=() if draft is None else _pages(draft),
        draft_latent=0 if draft is None else _latent(draft),
    )


def _pages(model: Model) -> tuple[tuple[int, int], ...]:
    return tuple(dict.fromkeys(page_shape(part)[1:] for part in (*page_writers(model), *attentions(model))))


def _latent(model: Model) -> int:
    return max((part.kv_lora_rank for part in attentions(model) if isinstance(part, LatentAttention)), default=0)


def _intermediate_sizes(model: Model) -> Iterator[int]:
    for body in (*encoder_bodies(model), *all_bodies(model)):
        if isinstance(body, MLP | Experts):
            yield body.intermediate_size
        if isinstance(body, Experts) and body.shared is not None:
            yield body.shared.intermediate_size


def _restored(checkpoint: Checkpoint, held: Collection[str]) -> int:
    """Return the number of quantized matrices that compiled kernels must dequantize."""
    own = checkpoint.quantization
    if own is None:
        return 0
    paths = {path for fused in fused_paths(checkpoint.model) for path in fused} - set(held)
    return sum(path in paths for path in own.formats if own.restores(path))


def _mixed_expert_formats(checkpoint: Checkpoint) -> tuple[WeightBits, ...]:
    """Return the values of quantization.weights for which a layer's experts would have several formats.

    Compiled kernels need all experts of a layer in one format.
    """
    types = {info.dtype for info in checkpoint.tensors.values() if len(info.shape) > 1}
    if checkpoint.quantization is None and len(types) < 2:
        return ()  # the common case, decided without visiting up to 18,000 projections
    found: set[WeightBits] = set()
    for matrices in _expert_matrices(checkpoint.model):
        forms = {_form(checkpoint, paths) for paths in matrices}
        if len(forms) > 1:
            found.add("stored")
        if len({"rounded" if isinstance(form, str) else form for form in forms}) > 1:
            found.update(cast(tuple[WeightBits, ...], load_formats("compiled")))
    return tuple(sorted(found))


def _mixed_on_gpu(checkpoint: Checkpoint) -> bool:
    """Return whether the experts of a layer have different forms for Triton kernels."""
    own = checkpoint.quantization
    if own is None:
        return False
    return any(
        len({_form_on_gpu(own, paths) for paths in matrices}) > 1 for matrices in _expert_matrices(checkpoint.model)
    )


def _form_on_gpu(own: Quantization, paths: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the layout in which Triton kernels hold an expert's matrix; () for a plain one. Zero points may differ."""
    native = own.native(paths, "triton")
    if native is None or "expert" not in native.roles("triton"):
        return ()
    return native.kind


def _expert_matrices(model: Model) -> Iterator[list[tuple[str, ...]]]:
    """Yield the routed experts' matrices of each layer, up and down separately, each as the paths of its sources."""
    for index, block in enumerate(model.blocks):
        for body in (body for branch in block for body in bodies(branch)):
            if isinstance(body, Experts):
                path = join(model.root, model.layers, str(index), body.name)
                mlps = [(join(path, mlp.name), mlp_linears(mlp)) for mlp in routed_mlps(body)]
                for at in (0, 1):
                    yield [tuple(join(inside, row.source) for row in linears[at].rows) for inside, linears in mlps]


def _form(checkpoint: Checkpoint, paths: tuple[str, ...]) -> str | tuple[Any, ...]:
    """Return the layout in which compiled kernels hold a fused matrix, or a plain type."""
    own = checkpoint.quantization
    native = None if own is None else own.native(paths, "compiled")
    if native is not None:
        return native.layout
    if own is not None and any(map(own.restores, paths)):
        return "float32"
    types = {info.dtype if (info := checkpoint.tensors.get(f"{path}.weight")) else "" for path in paths}
    return "bfloat16" if types == {"BF16"} else "float32"
