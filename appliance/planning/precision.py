"""Precision of float32 matrix products, for backends that offer a choice."""

from appliance.config.settings import Settings
from appliance.planning.choice import refuse
from engine.api.config import Dtype, MatmulPrecision


def matmul_precision(settings: Settings, kernels: str, dtype: Dtype, invariant: bool) -> MatmulPrecision:
    """Return the precision. Raise Refused for a value other than highest if torch multiplies no float32 matrices."""
    wanted = settings.manifest.hardware.matmul_precision
    if wanted == "highest":
        return wanted
    if dtype != "float32":
        because = f"matrices are {dtype} here, and torch multiplies float32 ones by it"
    elif kernels not in ("torch", "triton"):
        because = f"{kernels} kernels multiply, exactly; torch would with hardware.kernels: torch"
    elif kernels == "triton" and invariant:
        because = "with hardware.batch_invariant triton kernels multiply, exactly"
    else:
        return wanted
    refuse(settings, "hardware.matmul_precision", f"{wanted}: {because}; use highest", instead="highest")
