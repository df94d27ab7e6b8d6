"""Rules for the KV cache: supported types and the maximum request length."""

from appliance.constraints.rule import TRITON, Facts, Rule, View
from engine.kv.layout import CODED


def _has_fp8(view: View) -> bool:
    gpus = view.facts.machine.gpus
    return view.kv_cache != "fp8" or not gpus or gpus[0].has_fp8


def _divides(view: View) -> bool:
    if view.kv_cache != "int4" and (view.kv_cache != "int8" or view.kernels != TRITON):
        return True
    return not _odd_sizes(view.facts)


def _odd_sizes(facts: Facts) -> tuple[int, ...]:
    """Return the sizes of heads, also of a draft model, that are no multiple of 4."""
    return tuple(size for _, size in (*facts.model.pages, *facts.model.draft_pages) if size % 4)


def _several_shapes(facts: Facts) -> str:
    model = facts.model
    whose, pages = ("model", model.pages) if len(model.pages) > 1 else ("draft model", model.draft_pages)
    shapes = " and ".join(f"{count} KV heads of {size}" for count, size in pages)
    return f"pages of several shapes have no room for scales, and the {whose} has layers with {shapes}"


RULES = (
    Rule(
        name="fp8-pages",
        keys=("kernels", "kv_cache"),
        holds=lambda view: view.kv_cache != "fp8" or view.kernels == TRITON,
        text="only Triton kernels support an fp8 KV cache",
    ),
    Rule(
        name="fp8-gpu",
        keys=("kv_cache",),
        facts=("machine.gpus",),
        holds=_has_fp8,
        text="fp8 needs an NVIDIA GPU of compute capability 8.9 or newer",
        because=lambda facts: (
            f"{facts.machine.gpus[0].name} has no fp8 (compute capability 8.9 or newer of NVIDIA's GPUs has)"
        ),
    ),
    Rule(
        name="latent-pages",
        keys=("kv_cache",),
        facts=("model.latent", "model.draft_latent"),
        holds=lambda view: (
            view.kv_cache not in (*CODED, "fp8") or not (view.facts.model.latent or view.facts.model.draft_latent)
        ),
        text="latents of multi-head latent attention are stored in at least 16 bits",
        because=lambda facts: (
            "pages hold latents, of which each head makes its keys and values; no kernel reads them in 8 or 4 bits"
        ),
    ),
    Rule(
        name="foreign-pages",
        keys=("kv_cache",),
        facts=("model.foreign",),
        holds=lambda view: view.kv_cache not in CODED or not view.facts.model.foreign,
        text="models that only transformers' own code computes need a KV cache of at least 16 bits",
        because=lambda facts: (
            f"{facts.model.foreign} is computed by transformers' own code, which reads keys and values without scales"
        ),
    ),
    Rule(
        name="equal-pages",
        keys=("kv_cache",),
        facts=("model.pages", "model.draft_pages"),
        holds=lambda view: (
            view.kv_cache not in CODED or max(map(len, (view.facts.model.pages, view.facts.model.draft_pages))) <= 1
        ),
        text="a KV cache in int8 or int4 needs the same number and size of KV heads in all attention layers",
        because=_several_shapes,
    ),
    Rule(
        name="page-groups",
        keys=("kernels", "kv_cache"),
        facts=("model.pages", "model.draft_pages"),
        holds=_divides,
        text="an int4 KV cache needs heads of a multiple of 4 elements, as does int8 with Triton kernels",
        because=lambda facts: (
            f"heads must have a multiple of 4 elements, and the model or its draft model has {_odd_sizes(facts)[0]}"
        ),
    ),
    Rule(
        name="triton-pages",
        keys=("dtype", "kernels", "kv_cache"),
        holds=lambda view: view.kernels != TRITON or view.kv_cache in (view.dtype, "fp8", *CODED),
        text="with Triton kernels, the KV cache has the type of the activations, or fp8, int8 or int4",
    ),
    Rule(
        name="context",
        keys=("max_context",),
        facts=("model.max_context",),
        holds=lambda view: view.max_context <= view.facts.model.max_context,
        text="the context length is at most that of the checkpoint and its draft model",
        because=lambda facts: (
            f"the {'draft model' if facts.model.limited_by_draft else 'checkpoint'} supports "
            f"{facts.model.max_context} tokens"
        ),
        chosen=True,
    ),
)
