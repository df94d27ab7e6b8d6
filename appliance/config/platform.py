"""The platform that stops the service: its grace period between SIGTERM and SIGKILL, and load balancing.

Docker waits 10 s (`docker stop -t`). Kubernetes waits for terminationGracePeriodSeconds, by default 30 s, which a
container cannot read; SLIPWAY_GRACE sets a different value. SageMaker kills after 30 s. An unknown platform is treated
as Docker, because the shortest grace period is safe everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.config import variables

SAGEMAKER_MODEL = Path("/opt/ml/model")
MARGIN_S = 2.0  # time for steps after the drain: last bytes, engines, Supervisor


@dataclass(frozen=True)
class Platform:
    """A platform."""

    grace_s: float = 10.0  # seconds from SIGTERM to SIGKILL
    source: str = "docker stop kills after 10 s"  # reason for `grace_s`, as text
    balances: bool = False  # True: it balances load over several replicas, and notices the shutdown after a delay


def platform(environ: Mapping[str, str], model: Path = SAGEMAKER_MODEL) -> Platform:
    """Detect the platform. `model` is the folder where SageMaker mounts the model."""
    kubernetes = bool(variables.value(environ, "KUBERNETES_SERVICE_HOST"))
    if given := variables.DURATION.fullmatch(variables.value(environ, "SLIPWAY_GRACE")):
        return Platform(float(given[1]), f"SLIPWAY_GRACE is {float(given[1]):g} s", kubernetes)
    if model.is_dir() or any(name.startswith("SAGEMAKER_") for name in environ):
        return Platform(30.0, "SageMaker kills after 30 s", True)
    if kubernetes:
        return Platform(30.0, "Kubernetes kills after 30 s unless SLIPWAY_GRACE says otherwise", True)
    return Platform()
