"""The platform that stops the service: how long it waits between SIGTERM and SIGKILL, and whether it balances load.

Docker waits 10 s (`docker stop -t`), Kubernetes terminationGracePeriodSeconds, 30 s by default, which a container does
not see: SLIPWAY_GRACE says it where it is another. SageMaker kills after 30 s. What is not recognised is treated as
Docker: the shortest of all is right for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.config import variables

SAGEMAKER_MODEL = Path("/opt/ml/model")
MARGIN_S = 2.0  # for what follows the drain: last bytes, engines, Supervisor


@dataclass(frozen=True)
class Platform:
    """`grace_s`: from SIGTERM to SIGKILL, known from `source`. `balances`: it sends traffic to many of us, and hears of
    the end only a moment later."""

    grace_s: float = 10.0
    source: str = "docker stop kills after 10 s"
    balances: bool = False


def platform(environ: Mapping[str, str], model: Path = SAGEMAKER_MODEL) -> Platform:
    """`model` is where SageMaker lays a model down."""
    kubernetes = bool(variables.value(environ, "KUBERNETES_SERVICE_HOST"))
    if given := variables.DURATION.fullmatch(variables.value(environ, "SLIPWAY_GRACE")):
        return Platform(float(given[1]), f"SLIPWAY_GRACE is {float(given[1]):g} s", kubernetes)
    if model.is_dir() or any(name.startswith("SAGEMAKER_") for name in environ):
        return Platform(30.0, "SageMaker kills after 30 s", True)
    if kubernetes:
        return Platform(30.0, "Kubernetes kills after 30 s unless SLIPWAY_GRACE says otherwise", True)
    return Platform()
