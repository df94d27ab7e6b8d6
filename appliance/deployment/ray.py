"""A Ray Serve application with the appliance, as a RayService of KubeRay, and the objects that its pods mount.

A replica of the Serve deployment runs `slipway serve` on the loopback interface of its worker pod and forwards requests
to it, streams included. Ray places the replica by the plan's CPUs and GPUs, checks its health, and replaces it. All
ranks of a model run in one pod. The image needs Ray and Slipway. The fields belong to ray.io/v1.
"""

import yaml

from appliance.deployment.kubernetes import Object, configuration, labels, pod
from appliance.deployment.service import FOLDER, GIB, MANIFEST, Deployment, gibibytes

MODULE = "slipway_ray"
HEAD_CPUS, HEAD_MEMORY = "1", "4Gi"
WORKER_BYTES = 2 * GIB
"""Memory of Ray's processes in the pod of a worker, and of the replica that forwards requests."""
_HEALTH_PERIOD_S = 5

APPLICATION = '''\
"""Ray Serve application that runs the appliance. Written by `slipway render ray`."""

import contextlib
import socket
import subprocess
import time

import httpx
from ray import serve
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse

COMMAND = {command}
SCHEME = {scheme!r}
STARTUP_S = {startup}
GRACE_S = {grace}
# Headers of one connection; the forwarding server sets its own.
HOP_BY_HOP = {{"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "date", "server"}}


@serve.deployment
class Slipway:
    """A replica: `slipway serve` and the forwarding of requests."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._process = subprocess.Popen([*COMMAND, "--host", "127.0.0.1", "--port", str(port)])
        self._url = f"{{SCHEME}}://127.0.0.1:{{port}}"
        self._client = httpx.AsyncClient(
            base_url=self._url,
            timeout=None,
            verify=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )
        deadline = time.monotonic() + STARTUP_S
        while not self._answers("/ready"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"slipway serve is not ready; exit code {{self._process.poll()}}")
            time.sleep(0.5)

    def _answers(self, path: str) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self._url + path, verify=False, trust_env=False, timeout=5).status_code == 200
        return False

    def check_health(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"slipway serve exited with code {{self._process.returncode}}")
        if not self._answers("/live"):
            raise RuntimeError("slipway serve does not answer /live")

    async def __call__(self, request: Request) -> StreamingResponse:
        path = request.url.path + (f"?{{request.url.query}}" if request.url.query else "")
        headers = [pair for pair in request.headers.items() if pair[0].lower() not in HOP_BY_HOP]
        sent = self._client.build_request(request.method, path, headers=headers, content=request.stream())
        reply = await self._client.send(sent, stream=True)
        kept = {{name: value for name, value in reply.headers.items() if name.lower() not in HOP_BY_HOP}}
        # Closing the reply aborts the request if the client disconnects.
        return StreamingResponse(reply.aiter_raw(), reply.status_code, kept, background=BackgroundTask(reply.aclose))

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


app = Slipway.bind()
'''


def ray(one: Deployment) -> list[Object]:
    """Return the objects of a deployment."""
    config, *claims = configuration(one)
    config = {**config, "data": {**config["data"], f"{MODULE}.py": application(one)}}
    spec = {
        "serveConfigV2": yaml.safe_dump(serve_config(one), sort_keys=False),
        "rayClusterConfig": {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _head(one)},
            "workerGroupSpecs": [
                {
                    "groupName": "engines",
                    "replicas": 1,
                    "minReplicas": 1,
                    "maxReplicas": 1,
                    "rayStartParams": {},
                    "template": {"metadata": {"labels": labels(one)}, "spec": _worker(one)},
                }
            ],
        },
    }
    metadata = {"name": one.name, "labels": labels(one)}
    return [config, *claims, {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": metadata, "spec": spec}]


def application(one: Deployment) -> str:
    """Return the source of the Serve application."""
    command = '["slipway", "serve", "' + f"{FOLDER}/{MANIFEST}" + '"]'
    scheme = "https" if one.tls else "http"
    return APPLICATION.format(command=command, scheme=scheme, startup=one.startup, grace=one.grace)


def serve_config(one: Deployment) -> Object:
    """Return the configuration of Ray Serve, as `serve deploy` reads it."""
    return {
        "applications": [
            {
                "name": one.name,
                "route_prefix": "/",
                "import_path": f"{MODULE}:app",
                "runtime_env": {"env_vars": {"PYTHONPATH": FOLDER}},
                "deployments": [
                    {
                        "name": "Slipway",
                        "num_replicas": 1,
                        # The gateway queues requests and orders them; Ray must not hold them back.
                        "max_ongoing_requests": 100000,
                        "graceful_shutdown_timeout_s": one.grace,
                        "health_check_period_s": _HEALTH_PERIOD_S,
                        "ray_actor_options": {"num_cpus": one.cpus, **({"num_gpus": one.gpus} if one.gpus else {})},
                    }
                ],
            }
        ]
    }


def _worker(one: Deployment) -> Object:
    """Return the pod of a worker. Ray starts the container and writes to its home, so the root is writable. KubeRay
    adds the probes."""
    spec = pod(one, "ray-worker")
    (container,) = spec["containers"]
    for name in ("args", "ports", "startupProbe", "readinessProbe", "livenessProbe"):
        del container[name]
    container["securityContext"]["readOnlyRootFilesystem"] = False
    for size in container["resources"].values():
        size["memory"] = f"{gibibytes(one.memory) + gibibytes(WORKER_BYTES)}Gi"
    limits = container["resources"]["limits"]
    limits["cpu"] = container["resources"]["requests"]["cpu"]  # KubeRay passes this number of CPUs to Ray
    return spec


def _head(one: Deployment) -> Object:
    """Return the pod of the head, which runs no replica but validates the application."""
    size = {"cpu": HEAD_CPUS, "memory": HEAD_MEMORY}
    ports = [("gcs", 6379), ("dashboard", 8265), ("client", 10001), ("serve", 8000)]
    container = {
        "name": "ray-head",
        "image": one.image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports],
        "resources": {"requests": dict(size), "limits": dict(size)},
        "volumeMounts": [{"name": "manifest", "mountPath": FOLDER, "readOnly": True}],
    }
    volumes = [{"name": "manifest", "configMap": {"name": one.name}}]
    return {"spec": {"containers": [container], "volumes": volumes}}
