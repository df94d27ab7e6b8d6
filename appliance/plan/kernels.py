"""Which kernels compute, on which types: what the machine, the manifest and the checkpoint allow together."""

from appliance.declare.settings import Settings
from appliance.plan.capacity import Device
from appliance.plan.choice import Choice, refuse
from appliance.plan.machine import Machine
from appliance.plan.memory import spell_bytes
from engine.api.config import Dtype, KVDtype, WeightBits, graph_ladder
from engine.models.checkpoint import Checkpoint
from engine.models.footprint import Holder, weight_bytes
from engine.models.native import torch_parts
from engine.models.parts import attentions, has_experts
from engine.models.schemes import Quantization
from engine.models.sources import fused_paths
from engine.models.stored import held_weights
from kernels.cpu.library import ACTIVATIONS, VARIANTS

TORCH, TRITON = "torch", "triton"
HEAD_MULTIPLE, HEAD_MOST = 8, 256  # sizes of heads that attention kernels of a GPU serve
BF16_CAPABILITY = (8, 0)
WIDE_PAGES: tuple[KVDtype, ...] = ("float32", "bfloat16", "float16")
READERS = {"fp8": "triton kernels", "int8": "compiled kernels of a CPU"}  # of pages of 8 bits
_GPU_PAGES = "on a GPU the pages have the type of the activations, or 8 bits"
FP8_CAPABILITY = (8, 9)  # the first NVIDIA GPUs that convert e4m3


def dtype_of(settings: Settings, checkpoint: Checkpoint, machine: Machine, device: Device) -> Choice[Dtype]:
    wanted: str = settings.manifest.model.dtype
    if device == "cpu":
        return Choice(wanted) if wanted != "auto" else Choice("float32", "the type CPUs compute in")  # type: ignore[arg-type]
    gpu = machine.gpus[0]
    lacks_bf16 = f"{gpu.name} has no bfloat16 (compute capability 8.0 or newer has)"
    if gpu.capability < BF16_CAPABILITY:
        if wanted == "bfloat16":
            refuse(settings, "model.dtype", f"bfloat16: {lacks_bf16}; use float16, or auto")
        if wanted == "auto" and checkpoint.dtype == "bfloat16":
            return Choice("float16", lacks_bf16)
    return Choice(wanted) if wanted != "auto" else Choice(checkpoint.dtype, "the checkpoint's type")  # type: ignore[arg-type]


def kernels(settings: Settings, checkpoint: Checkpoint, machine: Machine, device: Device, dtype: Dtype) -> Choice[str]:
    wanted = settings.manifest.hardware.kernels
    unserved = _unserved(checkpoint)
    if wanted == TRITON:
        _check_triton(settings, machine, device, unserved)
    elif wanted not in ("auto", TORCH):
        _check_compiled(settings, machine, device, dtype, wanted)
    if wanted != "auto":
        return Choice(wanted, _by_torch(checkpoint) if is_compiled(wanted) else "")
    if device == "cuda":
        if unserved is not None:
            return Choice(TORCH, unserved)
        if machine.triton:
            return Choice(TRITON, "the fused kernels for a GPU")
        return Choice(
            TORCH, "triton is not installed: install the one that this torch asks for and be several times as fast"
        )
    if dtype != "float32":
        return Choice(TORCH, f"compiled kernels are for float32 on a CPU, and this is {dtype}")
    if not machine.kernels:
        return Choice(TORCH, "none are compiled: install with a C++ compiler and be 2 to 6 times as fast")
    return Choice(machine.kernels[0], _joined("the fastest compiled kernels for this CPU", _by_torch(checkpoint)))


def _by_torch(checkpoint: Checkpoint) -> str:
    """What compiled kernels leave to torch, and what that costs."""
    parts = torch_parts(checkpoint.model, ACTIVATIONS)
    if not parts:
        return ""
    return f"torch computes {', '.join(parts)}, on one thread and with two more waits for the team each time"


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _unserved(checkpoint: Checkpoint) -> str | None:
    """Why the kernels of a GPU do not serve this model."""
    if has_experts(checkpoint.model):
        return "experts: triton kernels serve models without"
    dims = {part.head_dim for part in attentions(checkpoint.model)}
    wrong = next((dim for dim in sorted(dims) if dim % HEAD_MULTIPLE or dim > HEAD_MOST), None)
    if wrong is None:
        return None
    return f"heads of {wrong}: triton kernels serve multiples of {HEAD_MULTIPLE} up to {HEAD_MOST}"


def _check_triton(settings: Settings, machine: Machine, device: Device, unserved: str | None) -> None:
    if unserved is not None:
        refuse(settings, "hardware.kernels", f"triton: the model has {unserved}; use torch, or auto")
    if device != "cuda":
        refuse(settings, "hardware.kernels", f"triton: its kernels are for a GPU, and this is {device}; use auto")
    if not machine.triton:
        message = "triton: it is not installed; install the release that this torch asks for, or use auto"
        refuse(settings, "hardware.kernels", message)


def _check_compiled(settings: Settings, machine: Machine, device: Device, dtype: Dtype, wanted: str) -> None:
    if device != "cpu" or dtype != "float32":
        message = f"{wanted}: compiled kernels are for float32 on a CPU, and this is {dtype} on {device}; use auto"
        refuse(settings, "hardware.kernels", message)
    if wanted not in machine.kernels:
        there = ", ".join((*machine.kernels, TORCH, "auto"))
        refuse(settings, "hardware.kernels", f"{wanted}: not compiled, or not for this CPU; use one of {there}")


def is_compiled(name: str) -> bool:
    """Whether these are kernels of a CPU, which pack weights."""
    return name not in (TORCH, TRITON)


def batch_invariant(settings: Settings, chosen: str) -> bool:
    """What torch's libraries multiply depends on how many rows there are: with them it cannot be had."""
    wanted = settings.manifest.hardware.batch_invariant
    if wanted and chosen == TORCH:
        message = "true: torch serves here, whose sums depend on the size of the batch; use false, or other kernels"
        refuse(settings, "hardware.batch_invariant", message)
    return wanted or is_compiled(chosen)


def graph_sizes(settings: Settings, chosen: str) -> tuple[int, ...]:
    """Rows of the decode steps to capture."""
    scheduling = settings.manifest.engine.scheduling
    return graph_ladder(scheduling.max_running) if settings.manifest.hardware.graphs and chosen == TRITON else ()


def weight_bits(settings: Settings, checkpoint: Checkpoint, chosen: str, dtype: Dtype) -> Choice[WeightBits]:
    wanted = settings.manifest.quantization.weights
    own = checkpoint.quantization
    if own is not None and not own.is_plain:
        if wanted == "auto":
            return Choice("stored", _as_quantized(checkpoint, own, chosen, dtype))
        if own.method != "gguf" or not _restored(checkpoint):
            message = f"{wanted}: the checkpoint is quantized already, in {own}; use auto, or the one it was made from"
            refuse(settings, "quantization.weights", message)
    if wanted == "auto":
        return Choice("stored", f"the checkpoint's {checkpoint.dtype}")
    if not is_compiled(chosen):
        message = (
            f"{wanted}: only compiled kernels of a CPU multiply by such weights, and {chosen} serves here; use auto"
        )
        refuse(settings, "quantization.weights", message)
    return Choice(wanted)


def _as_quantized(checkpoint: Checkpoint, own: Quantization, chosen: str, dtype: Dtype) -> str:
    """What becomes of a quantized checkpoint's weights, and what it costs."""
    if not is_compiled(chosen):
        there, held = _held(checkpoint, dtype, None), _held(checkpoint, dtype, VARIANTS[0].tiling)
        return (
            f"the checkpoint's {own}, restored to {dtype} for {chosen}: {spell_bytes(there)} instead of the "
            f"{spell_bytes(held)} that they take with compiled kernels of a CPU"
        )
    restored = _restored(checkpoint)
    rest = f", {restored} of {len(own.schemes)} matrices restored to {dtype}" if restored else ""
    return f"the checkpoint's {own}{rest}"


def _held(checkpoint: Checkpoint, dtype: Dtype, tiling: tuple[int, int, int] | None) -> int:
    return weight_bytes(
        checkpoint.model, checkpoint.tensors, checkpoint.quantization, Holder(dtype=dtype, tiling=tiling)
    )


def _restored(checkpoint: Checkpoint) -> int:
    """Quantized matrices that compiled kernels do not multiply by as they are."""
    own = checkpoint.quantization
    held = held_weights(checkpoint.model, own)
    paths = {path for fused in fused_paths(checkpoint.model) for path in fused}
    quantized = () if own is None else (path for path, scheme in own.schemes.items() if scheme.form != "turned")
    return sum(path in paths and f"{path}.weight" not in held for path in quantized)


def kv_type(
    settings: Settings, checkpoint: Checkpoint, machine: Machine, dtype: Dtype, chosen: str, weights: WeightBits
) -> Choice[KVDtype]:
    wanted = settings.manifest.quantization.kv_cache
    if wanted == "auto" and weights != "stored":
        return Choice("float16", f"half the bytes, and far more exact than {weights} weights")
    if wanted == "auto" and is_compiled(chosen) and held_weights(checkpoint.model, checkpoint.quantization):
        return Choice("float16", f"half the bytes, and far more exact than weights in {checkpoint.quantization}")
    if wanted == "auto":
        return Choice(dtype, "the type of the activations")
    possible = _page_types(chosen, dtype)
    if wanted not in possible:
        why = f"only {READERS[wanted]} read it, and {chosen} serves" if wanted in READERS else _GPU_PAGES
        refuse(settings, "quantization.kv_cache", f"{wanted}: {why}; use auto, {' or '.join(possible)}")
    if wanted == "fp8" and (gpu := machine.gpus[0]).capability < FP8_CAPABILITY:
        message = f"fp8: {gpu.name} has no such type (compute capability 8.9 or newer has); use auto"
        refuse(settings, "quantization.kv_cache", message)
    return Choice(wanted)


def _page_types(chosen: str, dtype: Dtype) -> tuple[KVDtype, ...]:
    if chosen == TRITON:
        return dtype, "fp8"
    return (*WIDE_PAGES, "int8") if is_compiled(chosen) else WIDE_PAGES
