"""Files for the Azure ML command line: a managed online endpoint, its deployment with the environment, and a model.

Secrets are references to a custom connection of the workspace, which Azure ML resolves into variables.
"""

from typing import Any

from appliance.config.settings import Settings
from appliance.deployment.embedded import SCRATCH, check_files, environment
from appliance.deployment.instance_types import AZUREML, choose
from appliance.deployment.service import Deployment, Layout
from appliance.planning.plan import Plan

LAYOUT = Layout(
    data=f"{SCRATCH}/data",
    cache=f"{SCRATCH}/cache",
    # Azure ML sets the variable to the folder of the model's version, which contains the uploaded folder.
    source=lambda path: {"path": "${AZUREML_MODEL_DIR}/" + path.name.replace("$", "$$")},
    secrets_as="variables",
)
SCHEMAS = "https://azuremlschemas.azureedge.net/latest"
REQUEST_TIMEOUT_MS = 180_000
"""Longest time of a request on a managed online endpoint; the default is 5 s."""
_PERIOD_S, _TIMEOUT_S = 10, 5


def azureml(one: Deployment, settings: Settings, plan: Plan, *, instance_type: str) -> dict[str, dict[str, Any]]:
    """Return the files by name. Raise Refused for values that Azure ML cannot serve."""
    check_files(settings, "Azure ML")
    files: dict[str, dict[str, Any]] = {
        "endpoint.yaml": {
            "$schema": f"{SCHEMAS}/managedOnlineEndpoint.schema.json",
            "name": one.name,
            "auth_mode": "key",
        },
        "deployment.yaml": _deployment(one, plan, choose(AZUREML, one, plan, instance_type).name),
    }
    if one.model:
        files["model.yaml"] = {
            "$schema": f"{SCHEMAS}/model.schema.json",
            "name": one.name,
            "version": "1",
            "type": "custom_model",
            "path": str(one.model_path),
        }
    return files


def _deployment(one: Deployment, plan: Plan, instance_type: str) -> dict[str, Any]:
    def route(path: str) -> dict[str, Any]:
        return {"port": one.port, "path": path}

    def probe(failures: int) -> dict[str, int]:
        return {"period": _PERIOD_S, "timeout": _TIMEOUT_S, "failure_threshold": failures}

    routes = {
        "liveness_route": route("/live"),
        "readiness_route": route("/ready"),
        "scoring_route": route("/invocations"),
    }
    connection = f"azureml://connections/{one.name}-secrets/credentials"
    secrets = {variable: f"${{{{{connection}/{key}}}}}" for key, variable in one.secret_variables.items()}
    startup = -(-one.startup // _PERIOD_S)
    return {
        "$schema": f"{SCHEMAS}/managedOnlineDeployment.schema.json",
        "name": "slipway",
        "endpoint_name": one.name,
        **({"model": f"azureml:{one.name}:1"} if one.model else {}),
        "environment": {"image": one.image, "inference_config": routes},
        "environment_variables": {**environment(one), **secrets},
        "instance_type": instance_type,
        "instance_count": 1,
        "request_settings": {
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            # Azure ML queues nothing for a busy instance; Slipway has its own queue.
            "max_concurrent_requests_per_instance": _concurrency(plan),
        },
        # The gateway answers a second after the start, also while a model loads.
        "liveness_probe": probe(6),
        "readiness_probe": probe(startup),
    }


def _concurrency(plan: Plan) -> int:
    """Return the requests that may run and wait in the service."""
    return sum(engine.scheduling.max_running for engine in plan.engines) + plan.manifest.limits.max_waiting
