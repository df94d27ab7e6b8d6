"""Requests to Google Vertex AI: the bodies of models.upload, endpoints.create and endpoints.deployModel (API v1)."""

from typing import Any

from appliance.config.problems import Problem, Refused
from appliance.config.settings import Settings
from appliance.config.yaml_loader import Place
from appliance.deployment.embedded import SCRATCH, check_files, check_model_uri, environment, refuse_secrets
from appliance.deployment.instance_types import VERTEX, VERTEX_GPUS, choose
from appliance.deployment.service import Deployment, Layout, mebibytes
from appliance.planning.plan import Plan

LAYOUT = Layout(data=f"{SCRATCH}/data", cache=f"{SCRATCH}/cache", source=lambda path: {"vertex": {}}, port=8080)
DEPLOYMENT_TIMEOUT_S = 7200
"""Longest time that Vertex AI waits for a deployment."""
_PERIOD_S = 10


def vertex(
    one: Deployment, settings: Settings, plan: Plan, *, model_uri: str, parent: str, instance_type: str
) -> dict[str, dict[str, Any]]:
    """Return the requests by file name. `parent` is projects/PROJECT/locations/REGION. Raise Refused for values that
    Vertex AI cannot serve."""
    check_files(settings, "Vertex AI")
    refuse_secrets(settings, "Vertex AI", "remove it with an overlay: IAM authenticates callers and reads buckets")
    check_model_uri(one, model_uri, "gs")
    if parent.count("/") != 3 or not parent.startswith("projects/") or "/locations/" not in parent:
        raise Refused([Problem(Place("--parent"), "", "Vertex AI requires projects/PROJECT/locations/REGION")])
    model = {
        "displayName": one.name,
        "containerSpec": _container(one),
        **({"artifactUri": model_uri} if one.model else {}),
    }
    chosen = choose(VERTEX, one, plan, instance_type)
    machine: dict[str, Any] = {"machineType": chosen.name}
    if chosen.gpu:
        machine |= {"acceleratorType": VERTEX_GPUS[chosen.gpu], "acceleratorCount": chosen.gpus}
    deployed = {
        "model": f"{parent}/models/{one.name}",
        "displayName": one.name,
        "dedicatedResources": {"machineSpec": machine, "minReplicaCount": 1, "maxReplicaCount": 1},
    }
    return {
        "upload-model.json": {"modelId": one.name, "model": model},
        # A dedicated endpoint has no limit of one minute for a request.
        "create-endpoint.json": {"displayName": one.name, "dedicatedEndpointEnabled": True},
        "deploy-model.json": {"deployedModel": deployed, "trafficSplit": {"0": 100}},
    }


def _container(one: Deployment) -> dict[str, Any]:
    """Return the container. The variables of the manifest are literal, because base64 contains no dollar signs."""
    ready = {"httpGet": {"path": "/ready", "port": one.port}, "periodSeconds": _PERIOD_S, "timeoutSeconds": 5}
    return {
        "imageUri": one.image,
        "args": ["serve"],
        "env": [{"name": name, "value": text} for name, text in environment(one).items()],
        "ports": [{"containerPort": one.port}],
        **({"grpcPorts": [{"containerPort": one.grpc_port}]} if one.grpc_port else {}),
        "healthRoute": "/health",
        "predictRoute": "/predict",
        "startupProbe": {**ready, "failureThreshold": -(-one.startup // _PERIOD_S)},
        "healthProbe": {**ready, "failureThreshold": 1},
        "deploymentTimeout": f"{min(one.startup + DEPLOYMENT_TIMEOUT_S // 2, DEPLOYMENT_TIMEOUT_S)}s",
        **({"sharedMemorySizeMb": str(mebibytes(one.shared))} if one.shared else {}),
    }
