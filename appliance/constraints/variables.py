"""Variables of the constraints in the order of resolution: possible values of each, and the values of `auto`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from appliance.constraints import ranks
from appliance.constraints.kernels import BF16_CAPABILITY, RULES
from appliance.constraints.pages import RULES as PAGE_RULES
from appliance.constraints.rule import TORCH, TRITON, Facts, Variable, View, is_compiled
from appliance.constraints.speculation import draft_method_why, draft_methods
from appliance.constraints.weights import INTEGERS
from engine.api.config import KVDtype
from engine.formats.load_time import LOAD_FORMATS
from engine.kv.layout import cpu_kv_dtype
from engine.models.kv_scales import KNOWN

# Attention of 4 rows over 2,048 tokens (16 query heads of size 128, 8 KV heads, float16 cache, one thread, AVX-512)
# takes 4.1 ms with blocks of 16 tokens and 4.4 to 4.7 ms with 32 to 128. It takes 8.5 ms with 24 and 12.1 ms with 8,
# because these are not multiples of the vector width.
BLOCK_TOKENS = 16
# float32 lanes of a vector, W in kernels/cpu/simd.h
LANES = {"amx": 16, "avx512bf16": 16, "avx512": 16, "avxvnni": 8, "avx2": 8, "neon": 4, "base": 4}
# Change of the perplexity of SmolLM2-135M-Instruct against pages in float32 (benchmarks.quality, AVX2).
PERPLEXITY = {"bfloat16": "+0.001 %", "float16": "+0.004 %"}
MOST_RANKS = 64
VARIANTS = tuple(LANES)

_SHARED = tuple(rule for rule in ranks.RULES if rule.keys == ("tensor",))
_TRITON_THERE = tuple(
    rule for rule in RULES if rule.keys == ("kernels",) and (rule.name.startswith("triton-") or rule.name == "foreign")
)


def _devices(view: View) -> tuple[str, ...]:
    """Return the device of auto: cuda if there is a GPU, whatever other keys say.

    A silent fallback from the GPU to the CPU would make the service about a hundred times slower.
    """
    return ("cuda",) if view.facts.machine.gpus else ("cpu",)


def _device_why(view: View) -> str:
    machine = view.facts.machine
    return f"there is a {machine.gpus[0].name}" if machine.gpus else machine.no_gpu


def _dtypes(view: View) -> tuple[str, ...]:
    if view.device == "cpu":
        return ("float32",)
    own, gpus = view.facts.model.dtype, view.facts.machine.gpus
    lacking = own == "bfloat16" and gpus and gpus[0].capability < BF16_CAPABILITY
    return (own, "float16") if lacking else (own,)


def _dtype_why(view: View) -> str:
    return "the type in which CPUs compute" if view.device == "cpu" else "the checkpoint's type"


def _kernels(view: View) -> tuple[str, ...]:
    """Return the kernels of auto. On a GPU, torch is used only if the Triton kernels cannot serve the model.

    Other keys do not change this, because torch is several times slower there.
    """
    if view.device == "cpu":
        return (*view.facts.machine.kernels, TORCH)
    asked = View(view.facts, kernels=TRITON)
    return (TRITON,) if all(rule.holds(asked) for rule in _TRITON_THERE) else (TRITON, TORCH)


def _kernels_why(view: View) -> str:
    if view.kernels == TRITON:
        return "the fused kernels for a GPU"
    if view.kernels == TORCH and view.facts.model.foreign:
        slower = "the complete sequence in each step" if view.facts.model.recomputes else "several times slower"
        return f"{view.facts.model.foreign} has no declaration: transformers' code computes it, {slower}"
    if view.kernels == TORCH:
        return "no compiled kernels are installed; install with a C++ compiler to be 2 to 6 times as fast"
    return "the fastest compiled kernels for this CPU"


def _graphs_why(view: View) -> str:
    if view.graphs:
        return "decode steps of Triton kernels"
    return "pooling models have no decode steps" if view.kernels == TRITON else f"{view.kernels} kernels have none"


def _pages(view: View) -> tuple[str, ...]:
    """Return the format that the checkpoint states, if the kernels may have it, then the format by kernels."""
    stated = view.facts.model.kv_format
    return (stated, _usual_pages(view)) if stated in KNOWN and not _pages_problem(view) else (_usual_pages(view),)


def _pages_problem(view: View) -> str:
    """Return why pages cannot have the format that the checkpoint states, or ""."""
    stated = view.facts.model.kv_format
    if stated not in KNOWN:
        return f"a KV cache in {stated} is not supported"
    asked = replace(view, kv_cache=cast(KVDtype, stated))
    known = {"kernels", "kv_cache"}
    broken = (rule for rule in PAGE_RULES if "kv_cache" in rule.keys and {*rule.keys} <= known)
    return next((rule.text for rule in broken if not rule.holds(asked)), "")


def _usual_pages(view: View) -> str:
    model = view.facts.model
    if view.device != "cpu" or view.dtype != "float32" or view.kernels == TRITON:
        return view.dtype
    quantized = view.weights in INTEGERS or (is_compiled(view.kernels) and model.held)
    return cpu_kv_dtype(model.dtype, quantized=quantized, float16_scales=model.float16_pages)


def _pages_why(view: View) -> str:
    stated = view.facts.model.kv_format
    if not stated:
        return _usual_pages_why(view)
    if view.kv_cache == stated:
        return "the format that the checkpoint states for its KV cache"
    return f"{_usual_pages_why(view)}; not {stated}, which the checkpoint states: {_pages_problem(view)}"


def _usual_pages_why(view: View) -> str:
    """The change of the perplexity is that of SmolLM2-135M-Instruct (docs/performance.md)."""
    model = view.facts.model
    if view.kv_cache == view.dtype:
        return "the type of the activations"
    if view.weights in INTEGERS:
        return f"half the bytes, and much smaller errors than {view.weights} weights"
    if is_compiled(view.kernels) and model.held:
        return f"half the bytes, and much smaller errors than weights in {model.quantized}"
    whose = "the type of the weights' scales" if model.float16_pages else "the checkpoint's type"
    return f"{whose}, half the bytes of float32, measured perplexity {PERPLEXITY[view.kv_cache]}"


def _blocks_why(view: View) -> str:
    if lanes := LANES.get(view.kernels):
        vectors = BLOCK_TOKENS // lanes
        return f"{'one vector' if vectors == 1 else f'{vectors} whole vectors'} of scores of {view.kernels} kernels"
    return (
        "the last block is half empty on average, and prefixes are shared in whole blocks, so small blocks lose few "
        "tokens"
    )


def _sizes(facts: Facts) -> tuple[int, ...]:
    """Return the numbers of ranks that divide the model's heads evenly."""
    views = (View(facts, tensor=size) for size in range(1, MOST_RANKS + 1))
    return tuple(view.tensor for view in views if all(rule.holds(view) for rule in _SHARED))


def _tensors(view: View) -> tuple[int, ...]:
    if view.device == "cpu":
        return (1,)
    there = len(view.facts.machine.gpus)
    return tuple(size for size in _sizes(view.facts) if size == 1 or size * view.data <= there)


def _tensor_why(view: View) -> str:
    if view.device == "cpu":
        return "the ranks of a CPU share its memory, so more ranks do not fit a larger model"
    return "the model fits on one GPU"


def _always(*values: Any) -> Callable[[object], tuple[Any, ...]]:
    return lambda _: values


VARIABLES = (
    Variable(
        key="hardware.device",
        name="device",
        values=_always("cpu", "cuda"),
        auto=_devices,
        why=_device_why,
        prefers="`cuda` if there is a usable GPU, else `cpu`",
    ),
    Variable(
        key="model.dtype",
        name="dtype",
        values=_always("float32", "bfloat16", "float16"),
        auto=_dtypes,
        why=_dtype_why,
        prefers="on a CPU `float32`; on a GPU the checkpoint's type, `float16` if the GPU has no bfloat16",
        reads=("device",),
    ),
    Variable(
        key="quantization.weights",
        name="weights",
        values=_always("stored", *LOAD_FORMATS),
        auto=_always("stored"),
        why=lambda view: f"the checkpoint's {view.facts.model.quantized or view.facts.model.dtype}",
        prefers="the checkpoint's weights",
        spell=(("stored", "auto"),),
    ),
    Variable(
        key="hardware.kernels",
        name="kernels",
        values=_always(TORCH, TRITON, *VARIANTS),
        auto=_kernels,
        why=_kernels_why,
        prefers="on a CPU the fastest compiled variant that it runs, torch beside other types than float32 and where "
        "none is compiled; on a GPU Triton, torch where Triton is missing or does not serve the model",
        reads=("device",),
    ),
    Variable(
        key="hardware.graphs",
        name="graphs",
        values=_always(True, False),
        auto=lambda view: (view.kernels == TRITON and not view.facts.model.pools,),
        why=_graphs_why,
        prefers="`true` with Triton kernels, for models that generate",
        reads=("kernels",),
    ),
    Variable(
        key="hardware.batch_invariant",
        name="batch_invariant",
        values=_always(False, True),
        auto=_always(False),
        why=lambda view: "not set",
        prefers="`false`",
        sole=True,
    ),
    Variable(
        key="quantization.kv_cache",
        name="kv_cache",
        values=_always("float32", "bfloat16", "float16", "int8", "int4", "fp8"),
        auto=_pages,
        why=_pages_why,
        prefers="the format that the checkpoint states for its KV cache, if the kernels have it (`fp8` with Triton "
        "kernels, `int8`, `int4`); else on a CPU the checkpoint's type, `float16` for quantized GGUF files and beside "
        "weights of 4 to 8 bits that a CPU's kernels multiply by; on a GPU, and beside other activations than float32, "
        "the activations' type",
        reads=("device", "dtype", "weights", "kernels"),
    ),
    Variable(
        key="engine.cache.block_tokens",
        name="block_tokens",
        values=_always(BLOCK_TOKENS),
        auto=_always(BLOCK_TOKENS),
        why=_blocks_why,
        prefers=f"{BLOCK_TOKENS}, whole vectors of all compiled kernels",
    ),
    Variable(
        key="model.max_context",
        name="max_context",
        values=lambda facts: (facts.model.max_context, 2),
        auto=_always(2),  # the minimum; the usable part of the checkpoint's context is computed when memory is divided
        why=lambda view: "minimum for one request",
        prefers="maximum of the checkpoint, or the capacity of the cache",
        limit=True,
    ),
    Variable(
        key="speculation.method",
        name="speculation",
        values=_always("off", "jump-ahead", "ngram", "suffix", "draft", "eagle", "eagle3", "mtp"),
        auto=draft_methods,
        why=draft_method_why,
        prefers="`mtp` with a prediction head, else `suffix`; `off` for models without speculative decoding",
    ),
    Variable(
        key="parallelism.data",
        name="data",
        values=_always(1, 2),
        auto=_always(1),
        why=lambda view: "not set",
        prefers="1",
        sole=True,
    ),
    Variable(
        key="parallelism.tensor",
        name="tensor",
        values=_sizes,
        auto=_tensors,
        why=_tensor_why,
        prefers="on a GPU the fewest ranks whose memory holds the model; on a CPU 1, as ranks share its memory",
        reads=("device", "data"),
    ),
)
