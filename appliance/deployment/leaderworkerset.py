"""A LeaderWorkerSet with the appliance, its Service, and the objects that its pods mount.

All ranks of a model run in one pod, so a group has one pod, its leader. The fields belong to
leaderworkerset.x-k8s.io/v1.
"""

from appliance.deployment.kubernetes import Object, configuration, labels, pod, service
from appliance.deployment.service import Deployment


def leaderworkerset(one: Deployment) -> list[Object]:
    """Return the objects of a deployment."""
    template = {"metadata": {"labels": labels(one)}, "spec": pod(one)}
    leader_worker_set = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": one.name, "labels": labels(one)},
        "spec": {
            "replicas": 1,
            # A surge pod would need the GPUs and the volumes twice.
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "leaderWorkerTemplate": {
                "size": 1,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template,
            },
        },
    }
    return [*configuration(one), leader_worker_set, service(one)]
