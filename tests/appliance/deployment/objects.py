"""Checks of Kubernetes objects: fields, types and cross-references.

Kubernetes' own kinds are compared with its schema (schemas/kubernetes.json). The custom resources of KServe and
LeaderWorkerSet contain a pod of the same schema; their other fields are listed here.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = json.loads((SCHEMAS / "kubernetes.json").read_text())
DEFINITIONS = {
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "Service": "io.k8s.api.core.v1.Service",
    "Deployment": "io.k8s.api.apps.v1.Deployment",
}
COUNT = {"type": "integer", "minimum": 0}
TEMPLATE = {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
POD_FIELDS = KUBERNETES["$defs"]["io.k8s.api.core.v1.PodSpec"]["properties"]


def fields(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these fields only."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def resource(version: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    text = {"type": "string"}
    return fields(
        "apiVersion kind metadata spec", apiVersion={"const": version}, kind=text, metadata=metadata, spec=spec
    )


# A predictor has the fields of a pod, and fields for its scale and update.
PREDICTOR = fields(
    "containers",
    **POD_FIELDS,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    deploymentStrategy={"$ref": "#/$defs/io.k8s.api.apps.v1.DeploymentStrategy"},
)
RAY_GROUP = {"rayStartParams": {"type": "object"}, "template": TEMPLATE}
CUSTOM = {
    "RayService": resource(
        "ray.io/v1",
        fields(
            "serveConfigV2 rayClusterConfig",
            serveConfigV2={"type": "string"},
            rayClusterConfig=fields(
                "headGroupSpec workerGroupSpecs",
                headGroupSpec=fields("rayStartParams template", **RAY_GROUP),
                workerGroupSpecs={
                    "type": "array",
                    "items": fields(
                        "groupName rayStartParams template",
                        **RAY_GROUP,
                        groupName={"type": "string"},
                        replicas=COUNT,
                        minReplicas=COUNT,
                        maxReplicas=COUNT,
                    ),
                },
            ),
        ),
    ),
    "InferenceService": resource("serving.kserve.io/v1beta1", fields("predictor", predictor=PREDICTOR)),
    "LeaderWorkerSet": resource(
        "leaderworkerset.x-k8s.io/v1",
        fields(
            "leaderWorkerTemplate",
            replicas=COUNT,
            rolloutStrategy=fields(
                "type",
                type={"const": "RollingUpdate"},
                rollingUpdateConfiguration=fields("", maxUnavailable=COUNT, maxSurge=COUNT, partition=COUNT),
            ),
            leaderWorkerTemplate=fields(
                "workerTemplate",
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                leaderTemplate=TEMPLATE,
                workerTemplate=TEMPLATE,
            ),
        ),
    ),
}


def check_schema(one: dict[str, Any]) -> None:
    """Raise ValidationError for a field that the kind does not have, or with another type."""
    kind = one["kind"]
    schema = {"$ref": f"#/$defs/{DEFINITIONS[kind]}"} if kind in DEFINITIONS else CUSTOM[kind]
    jsonschema.Draft202012Validator({**KUBERNETES, **schema}).validate(one)


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pods of all objects."""
    found = []
    for one in objects:
        match one["kind"]:
            case "Deployment":
                found.append(one["spec"]["template"]["spec"])
            case "InferenceService":
                found.append(one["spec"]["predictor"])
            case "LeaderWorkerSet":
                found.append(one["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"])
    return found


def check(objects: list[dict[str, Any]]) -> None:
    """Check the fields of all objects, and that references lead to objects of the same deployment."""
    for one in objects:
        check_schema(one)
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    (pod,) = pods(objects)
    (container,) = pod["containers"]
    assert [one["name"] for one in container["volumeMounts"]] == [one["name"] for one in pod["volumes"]]
    assert {"http"} <= {one["name"] for one in container["ports"]} <= {"http", "grpc"}
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in names
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        # The claim `models` is the operator's.
        assert claim in (None, "models") or ("PersistentVolumeClaim", claim) in names
