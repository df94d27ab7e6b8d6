"""Kubernetes objects: ConfigMap, volume claims, Deployment and Service. Secrets are referred to by name."""

import math
from typing import Any

from appliance.deployment.service import (
    CACHE,
    DATA,
    FOLDER,
    MANIFEST,
    MODELS,
    SECRETS,
    TLS,
    USER,
    Deployment,
    gibibytes,
)

Object = dict[str, Any]
_PERIOD_S = 5


def kubernetes(one: Deployment) -> list[Object]:
    """Return the objects of a deployment."""
    return [*configuration(one), _deployment(one), service(one)]


def configuration(one: Deployment) -> list[Object]:
    """Return the objects that a pod mounts: the ConfigMap of the manifest, and claims of volumes."""
    claims = [_claim(f"{one.name}-{name}", size) for name, size in (("data", one.data), ("cache", one.cache)) if size]
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": one.name, "labels": labels(one)}}
    return [config | {"data": one.files}, *claims]


def service(one: Deployment) -> Object:
    """Return the Service of the pods."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": one.name, "labels": labels(one)},
        "spec": {
            "selector": labels(one),
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports(one).items()],
        },
    }


def ports(one: Deployment) -> dict[str, int]:
    """Return the ports by name."""
    return {"http": one.port} | ({} if one.grpc_port is None else {"grpc": one.grpc_port})


def labels(one: Deployment) -> dict[str, str]:
    """Return the labels that select the pods."""
    return {"app.kubernetes.io/name": "slipway", "app.kubernetes.io/instance": one.name}


def _claim(name: str, size: int) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{gibibytes(size)}Gi"}},
        },
    }


def _deployment(one: Deployment) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": one.name, "labels": labels(one)},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # two pods would need the GPUs and the volumes twice
            "selector": {"matchLabels": labels(one)},
            "template": {"metadata": {"labels": labels(one)}, "spec": pod(one)},
        },
    }


def pod(one: Deployment, container: str = "slipway") -> Object:
    """Return the specification of a pod whose only container has this name."""
    mounts, volumes = _volumes(one)
    return {
        "terminationGracePeriodSeconds": one.grace,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(one, container, mounts)],
        "volumes": volumes,
    }


def _container(one: Deployment, name: str, mounts: list[Object]) -> Object:
    environment: list[Object] = [{"name": "SLIPWAY_GRACE", "value": str(one.grace)}]
    if one.cache:
        environment += [
            {"name": "HF_HOME", "value": f"{CACHE}/huggingface"},
            {"name": "XDG_CACHE_HOME", "value": CACHE},
        ]
    environment += [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": f"{one.name}-secrets", "key": key}}}
        for key, variable in one.secret_variables.items()
    ]
    return {
        "name": name,
        "image": one.image,
        "args": ["serve", f"{FOLDER}/{MANIFEST}"],
        "ports": [{"name": port, "containerPort": number} for port, number in ports(one).items()],
        "env": environment,
        "startupProbe": _probe(one, "/ready", math.ceil(one.startup / _PERIOD_S)),
        "readinessProbe": _probe(one, "/ready", 1),
        "livenessProbe": _probe(one, "/live", 12),
        "resources": _resources(one),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _probe(one: Deployment, path: str, failures: int) -> Object:
    request = {"path": path, "port": "http", **({"scheme": "HTTPS"} if one.tls else {})}
    return {"httpGet": request, "periodSeconds": _PERIOD_S, "timeoutSeconds": 4, "failureThreshold": failures}


def _resources(one: Deployment) -> Object:
    """Return requests and limits. The memory has no more than its request, so that the pod is not evicted first."""
    memory = f"{gibibytes(one.memory)}Gi"
    devices = {"amd.com/gpu" if one.amd else "nvidia.com/gpu": one.gpus} if one.gpus else {}
    return {"requests": {"cpu": str(one.cpus), "memory": memory}, "limits": {"memory": memory, **devices}}


def _volumes(one: Deployment) -> tuple[list[Object], list[Object]]:
    """Return the mounts of the container and the volumes of the pod."""
    claim = "persistentVolumeClaim"
    shared = {"emptyDir": {"medium": "Memory", "sizeLimit": f"{gibibytes(one.shared)}Gi"}}
    secret_items = [{"key": key, "path": key} for key in one.secret_files]
    table: list[tuple[bool, str, str, Object, bool]] = [
        (True, "manifest", FOLDER, {"configMap": {"name": one.name}}, True),
        (True, "tmp", "/tmp", {"emptyDir": {}}, False),
        (one.reads_models, "models", MODELS, {claim: {"claimName": "models", "readOnly": True}}, True),
        (bool(one.data), "data", DATA, {claim: {"claimName": f"{one.name}-data"}}, False),
        (bool(one.cache), "cache", CACHE, {claim: {"claimName": f"{one.name}-cache"}}, False),
        (bool(one.shared), "shm", "/dev/shm", shared, False),
        (
            bool(one.secret_files),
            "secrets",
            SECRETS,
            {"secret": {"secretName": f"{one.name}-secrets", "items": secret_items}},
            True,
        ),
        (one.tls, "tls", TLS, {"secret": {"secretName": f"{one.name}-tls"}}, True),
    ]
    rows = [row[1:] for row in table if row[0]]
    mounts = [{"name": name, "mountPath": at, **({"readOnly": True} if fixed else {})} for name, at, _, fixed in rows]
    return mounts, [{"name": name, **source} for name, _, source, _ in rows]
