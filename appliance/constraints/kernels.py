"""Rules for devices, kernels and the activation types that they support."""

from appliance.constraints.rule import TORCH, TRITON, Facts, Rule, View, is_compiled
from engine.lowering.adapters import MOST_GROUPS
from kernels.cpu.library import BF16_VARIANTS

HEAD_MULTIPLE, HEAD_MOST = 8, 256  # head sizes that the GPU attention kernels support
LATENT_MOST = 512  # elements of a latent that the same kernels support
MOST_IN_A_GROUP = 64  # query heads per KV head that the same kernels support
BF16_CAPABILITY = (8, 0)
TRITON_CAPABILITY = (8, 0)  # on older GPUs, Triton does not use tensor cores


def _gpu_name(facts: Facts) -> str:
    return facts.machine.gpus[0].name if facts.machine.gpus else "no GPU"


def _old_gpu(facts: Facts) -> bool:
    return bool(facts.machine.gpus) and facts.machine.gpus[0].capability < TRITON_CAPABILITY


def _odd_head(facts: Facts) -> int | None:
    return next((dim for dim in facts.model.head_sizes if dim % HEAD_MULTIPLE or dim > HEAD_MOST), None)


def _odd_group(facts: Facts) -> tuple[int, int] | None:
    return next((pair for pair in facts.model.heads if pair[0] % pair[1] or pair[0] > MOST_IN_A_GROUP * pair[1]), None)


def _heads_fit(view: View) -> bool:
    return view.kernels != TRITON or _odd_head(view.facts) is None


def _groups_fit(view: View) -> bool:
    return view.kernels != TRITON or _odd_group(view.facts) is None


def _has_bf16(view: View) -> bool:
    gpus = view.facts.machine.gpus
    return view.device == "cpu" or view.dtype != "bfloat16" or not gpus or gpus[0].capability >= BF16_CAPABILITY


def _no_kernels(facts: Facts) -> str:
    there = facts.machine.kernels
    if not there:
        return "no compiled kernels are installed: install with a C++ compiler"
    return f"this machine supports only {', '.join(there)} of the compiled kernels"


RULES = (
    Rule(
        name="triton-there",
        keys=("kernels",),
        facts=("machine.triton",),
        holds=lambda view: view.kernels != TRITON or view.facts.machine.triton,
        text="Triton must be installed",
        because=lambda facts: "Triton is not installed: install the release that this torch requires",
    ),
    Rule(
        name="triton-adapters",
        keys=("kernels",),
        facts=("model.adapter_groups",),
        holds=lambda view: view.kernels != TRITON or view.facts.model.adapter_groups <= MOST_GROUPS,
        text=f"Triton kernels support up to {MOST_GROUPS:,} pairs of a LoRA adapter and a routed expert",
        because=lambda facts: (
            f"the LoRA adapters (or slots for them) and the experts of a layer form {facts.model.adapter_groups:,} "
            f"pairs, and Triton kernels support up to {MOST_GROUPS:,}: use fewer adapters, lower "
            "adapter_loading.max_active, or set hardware.kernels to torch"
        ),
    ),
    Rule(
        name="triton-capability",
        keys=("kernels",),
        facts=("machine.gpus",),
        holds=lambda view: view.kernels != TRITON or not _old_gpu(view.facts),
        text="Triton kernels require a GPU of compute capability 8.0 or later",
        because=lambda facts: "{} has compute capability {}.{}: Triton kernels require 8.0 or later".format(
            _gpu_name(facts), *facts.machine.gpus[0].capability
        ),
        chosen=True,
    ),
    Rule(
        name="triton-speech",
        keys=("kernels",),
        facts=("model.speech",),
        holds=lambda view: view.kernels != TRITON or not view.facts.model.speech,
        text="Triton kernels do not support speech models",
        because=lambda facts: (
            "Triton kernels do not support speech models: set hardware.kernels to torch, or leave it out"
        ),
        chosen=True,
    ),
    Rule(
        name="gpu-there",
        keys=("device",),
        facts=("machine.gpus",),
        holds=lambda view: view.device != "cuda" or bool(view.facts.machine.gpus),
        text="`cuda` requires a usable GPU",
        because=lambda facts: f"there is no usable GPU here ({facts.machine.no_gpu})",
    ),
    Rule(
        name="triton-gpu",
        keys=("device", "kernels"),
        holds=lambda view: view.kernels != TRITON or view.device == "cuda",
        text="Triton kernels require a GPU",
    ),
    Rule(
        name="triton-heads",
        keys=("kernels",),
        facts=("model.head_sizes",),
        holds=_heads_fit,
        text=f"Triton kernels support head sizes that are multiples of {HEAD_MULTIPLE} up to {HEAD_MOST}",
        because=lambda facts: (
            f"the model has the head size {_odd_head(facts)}: Triton kernels support multiples of {HEAD_MULTIPLE} up "
            f"to {HEAD_MOST}"
        ),
    ),
    Rule(
        name="triton-groups",
        keys=("kernels",),
        facts=("model.heads",),
        holds=_groups_fit,
        text=f"Triton kernels support 1 to {MOST_IN_A_GROUP} query heads per KV head (a whole number)",
        because=lambda facts: (
            "the model has {} query heads to {} KV heads: Triton kernels support 1 to {} per KV head (whole)".format(
                *(_odd_group(facts) or ("?", "?")), MOST_IN_A_GROUP
            )
        ),
    ),
    Rule(
        name="triton-latent",
        keys=("kernels",),
        facts=("model.latent",),
        holds=lambda view: view.kernels != TRITON or view.facts.model.latent <= LATENT_MOST,
        text=f"Triton kernels support latents of up to {LATENT_MOST} elements (kv_lora_rank)",
        because=lambda facts: (
            f"the model has latents of {facts.model.latent} elements (kv_lora_rank): Triton kernels support up to "
            f"{LATENT_MOST}"
        ),
    ),
    Rule(
        name="compiled-there",
        keys=("kernels",),
        facts=("machine.kernels",),
        holds=lambda view: not is_compiled(view.kernels) or view.kernels in view.facts.machine.kernels,
        text="the variant must be compiled, and this CPU must support its instructions",
        because=_no_kernels,
    ),
    Rule(
        name="compiled-cpu",
        keys=("device", "kernels"),
        holds=lambda view: not is_compiled(view.kernels) or view.device == "cpu",
        text="compiled kernels require a CPU",
    ),
    Rule(
        name="compiled-float32",
        keys=("dtype", "kernels"),
        holds=lambda view: (
            not is_compiled(view.kernels)
            or view.dtype == "float32"
            or (view.dtype == "bfloat16" and view.kernels in BF16_VARIANTS)
        ),
        text=f"compiled kernels compute in float32, {' and '.join(BF16_VARIANTS)} kernels also in bfloat16",
    ),
    Rule(
        name="compiled-bfloat16-weights",
        keys=("dtype", "kernels", "weights"),
        holds=lambda view: not is_compiled(view.kernels) or view.dtype == "float32" or view.weights == "stored",
        text="compiled kernels multiply in bfloat16 only by weights that are not quantized at load",
    ),
    Rule(
        name="compiled-experts",
        keys=("kernels", "weights"),
        facts=("model.mixed_expert_formats",),
        holds=lambda view: not is_compiled(view.kernels) or view.weights not in view.facts.model.mixed_expert_formats,
        text="compiled kernels need all experts of a layer in one format",
        because=lambda facts: (
            "compiled kernels need all experts of a layer in one format, and this checkpoint has several"
        ),
    ),
    Rule(
        name="experts-mixed-on-gpu",
        keys=("kernels",),
        facts=("model.mixed_on_gpu",),
        holds=lambda view: view.kernels != TRITON or not view.facts.model.mixed_on_gpu,
        text="Triton kernels need all experts of a layer in one format",
        because=lambda facts: "the checkpoint stores the experts of a layer in several formats",
    ),
    Rule(
        name="foreign",
        keys=("kernels",),
        facts=("model.foreign",),
        holds=lambda view: view.kernels == TORCH or not view.facts.model.foreign,
        text="models that only transformers' own code computes need torch kernels",
        because=lambda facts: f"{facts.model.foreign} is computed by transformers' own code, with torch kernels",
        chosen=True,
    ),
    Rule(
        name="bfloat16",
        keys=("device", "dtype"),
        facts=("machine.gpus",),
        holds=_has_bf16,
        text="bfloat16 on a GPU needs compute capability 8.0 or newer",
        because=lambda facts: f"{_gpu_name(facts)} has no bfloat16 (compute capability 8.0 or newer has)",
    ),
    Rule(
        name="invariant",
        keys=("kernels", "batch_invariant"),
        holds=lambda view: not view.batch_invariant or view.kernels != TORCH,
        text="the sums of torch depend on the size of the batch",
    ),
    Rule(
        name="graphs",
        keys=("kernels", "graphs"),
        holds=lambda view: not view.graphs or view.kernels == TRITON,
        text="CUDA graphs require Triton kernels",
        chosen=True,
    ),
)
