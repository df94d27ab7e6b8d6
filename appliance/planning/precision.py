"""How exactly float32 matrices are multiplied, where that is a choice at all."""

from appliance.config.settings import Settings
from appliance.planning.choice import refuse
from engine.api.config import Dtype, MatmulPrecision


def matmul_precision(settings: Settings, kernels: str, dtype: Dtype, invariant: bool) -> MatmulPrecision:
    """Only torch's products of float32 matrices have one. Refuses another than highest where none are made."""
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
