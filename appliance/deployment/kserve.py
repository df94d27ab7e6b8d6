"""A KServe InferenceService with the appliance as its predictor, and the objects that its pod mounts.

The predictor is a custom container in the deployment mode Standard, which creates a plain Deployment: Knative's mode
forbids the volumes. The fields belong to serving.kserve.io/v1beta1.
"""

from appliance.deployment.kubernetes import Object, configuration, pod
from appliance.deployment.service import Deployment

CONTAINER = "kserve-container"  # KServe adds its settings to the container with this name


def kserve(one: Deployment) -> list[Object]:
    """Return the objects of a deployment."""
    annotations = {
        "serving.kserve.io/deploymentMode": "Standard",
        "serving.kserve.io/enable-prometheus-scraping": "true",
        "prometheus.kserve.io/port": str(one.port),
        "prometheus.kserve.io/path": "/metrics",
    }
    # One replica of each version: two pods would need the GPUs and the volumes twice.
    scale = {"minReplicas": 1, "maxReplicas": 1, "deploymentStrategy": {"type": "Recreate"}}
    inference_service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": one.name, "annotations": annotations},
        "spec": {"predictor": {**scale, **pod(one, CONTAINER)}},
    }
    return [*configuration(one), inference_service]
