"""Requests to Amazon SageMaker: CreateModel, CreateEndpointConfig and CreateEndpoint, for `--cli-input-json`."""

from typing import Any

from appliance.config.problems import Problem, Refused
from appliance.config.settings import Settings
from appliance.config.yaml_loader import Place
from appliance.deployment.embedded import SCRATCH, check_files, check_model_uri, environment, refuse_secrets
from appliance.deployment.instance_types import SAGEMAKER, choose
from appliance.deployment.service import Deployment, Layout
from appliance.planning.choice import refuse
from appliance.planning.plan import Plan

LAYOUT = Layout(data=f"{SCRATCH}/data", cache=f"{SCRATCH}/cache", source=lambda path: {"sagemaker": {}}, port=8080)
GRACE_S = 30
"""SageMaker's time between SIGTERM and SIGKILL."""
STARTUP_S = (60, 3600)
"""Limits of ContainerStartupHealthCheckTimeoutInSeconds."""
_GPU_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
"""Machine image with a driver for CUDA 13."""


def sagemaker(
    one: Deployment, settings: Settings, plan: Plan, *, model_uri: str, role: str, instance_type: str
) -> dict[str, dict[str, Any]]:
    """Return the requests by file name. Raise Refused for values that SageMaker cannot serve."""
    _check(one, settings, model_uri, role)
    chosen = choose(SAGEMAKER, one, plan, instance_type)
    container: dict[str, Any] = {"Image": one.image, "Environment": environment(one)}
    if one.model:
        source = {"S3Uri": f"{model_uri.rstrip('/')}/", "S3DataType": "S3Prefix", "CompressionType": "None"}
        container["ModelDataSource"] = {"S3DataSource": source}
    variant: dict[str, Any] = {
        "VariantName": "slipway",
        "ModelName": one.name,
        "InitialInstanceCount": 1,
        "InstanceType": chosen.name,
        "ContainerStartupHealthCheckTimeoutInSeconds": min(max(one.startup, STARTUP_S[0]), STARTUP_S[1]),
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if one.model:
        variant["ModelDataDownloadTimeoutInSeconds"] = STARTUP_S[1]
    if one.gpus:
        variant["InferenceAmiVersion"] = _GPU_AMI
    return {
        "create-model.json": {"ModelName": one.name, "ExecutionRoleArn": role, "PrimaryContainer": container},
        "create-endpoint-config.json": {"EndpointConfigName": one.name, "ProductionVariants": [variant]},
        "create-endpoint.json": {"EndpointName": one.name, "EndpointConfigName": one.name},
    }


def _check(one: Deployment, settings: Settings, model_uri: str, role: str) -> None:
    check_files(settings, "SageMaker")
    refuse_secrets(settings, "SageMaker", "remove it with an overlay: IAM authenticates callers and reads buckets")
    if settings.manifest.lifecycle.drain != "auto" and one.grace > GRACE_S:
        limit = f"SageMaker kills a container {GRACE_S} s after SIGTERM"
        refuse(settings, "lifecycle.drain", f"{limit}; use auto or at most {GRACE_S - 2}s", instead="auto")
    if not role:
        raise Refused([Problem(Place("--role"), "", "SageMaker requires the ARN of an execution role")])
    check_model_uri(one, model_uri, "s3")
