"""Precision of float32 matrix products: of torch, or bfloat16 of compiled kernels for AMX and AVX-512 BF16."""

from appliance.config.settings import Settings
from appliance.constraints.rule import View, is_compiled
from appliance.planning.choice import Choice, refuse
from appliance.planning.memory_budget import MemoryBudget
from engine.api.config import MatmulPrecision
from kernels.cpu.library import BF16_VARIANTS

KEY = "hardware.matmul_precision"
# Difference from exact products of the same bf16 weights, 1,533 tokens (docs/performance.md).
BF16_COST = "measured on SmolLM2-135M: KL divergence 0.0001, 99.2 % same best token"


def matmul_precision(settings: Settings, view: View, budget: MemoryBudget) -> Choice[MatmulPrecision]:
    """Return the precision. Raise Refused for a value without effect."""
    wanted = settings.manifest.hardware.matmul_precision
    if wanted == "bfloat16":
        return _bf16(settings, view, budget)
    if wanted == "highest":
        if not view.multiplies_bf16:
            return Choice(wanted)
        return Choice("bfloat16", f"model.dtype is bfloat16; {_arithmetic(budget)}")
    if view.activations != "float32":
        because = f"matrices are {view.activations} here, and torch multiplies float32 ones by it"
    elif is_compiled(view.kernels):
        because = f"{view.kernels} kernels multiply, exactly; torch would with hardware.kernels: torch"
    elif view.kernels == "triton" and view.batch_invariant:
        because = "with hardware.batch_invariant triton kernels multiply, exactly"
    else:
        return Choice(wanted)
    refuse(settings, KEY, f"{wanted}: {because}; use highest", instead="highest")


def _bf16(settings: Settings, view: View, budget: MemoryBudget) -> Choice[MatmulPrecision]:
    known = " and ".join(BF16_VARIANTS)
    if not is_compiled(view.kernels):
        because = f"only {known} kernels of a CPU support it, and these are {view.kernels} kernels"
    elif not view.multiplies_bf16:
        because = f"{view.kernels} kernels have no bfloat16 instructions, {known} kernels have"
    elif not any(one.what == "bfloat16" and one.part != "embedding" for one in budget.holdings):
        because = (
            f"all matrices are quantized ({view.facts.model.quantized or view.weights}) and multiplied as integers"
        )
    else:
        return Choice("bfloat16", _arithmetic(budget))
    refuse(settings, KEY, f"bfloat16: {because}; use highest", instead="highest")


def _arithmetic(budget: MemoryBudget) -> str:
    """Describe which products are rounded, and the cost in accuracy."""
    quantized = any(one.what.startswith("int") for one in budget.holdings)
    which = "of matrices that are not quantized" if quantized else "of all matrices"
    return f"products {which} of bfloat16 weights and activations, with sums in float32; {BF16_COST}"
