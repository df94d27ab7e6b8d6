"""`slipway render`: files as expected (golden/), Kubernetes objects against a schema of their fields, and values of the
plan and of the manifest in them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from appliance.cli.main import main
from appliance.config import exits
from appliance.config.settings import Given, load
from appliance.deployment.compose import compose
from appliance.deployment.kubernetes import kubernetes
from appliance.deployment.service import Deployment, deployment
from appliance.hardware.described import hardware
from appliance.planning.validate import validate
from appliance.server.admin.health import router as health
from tests.manifests.shapes import make_checkpoint

GOLDEN = Path(__file__).parent / "golden"
DEMO = Path(__file__).resolve().parents[3] / "manifests" / "demo"
CPU = """
apiVersion: slipway/v2
model: {source: {path: demo}, names: ["a $${x} $1"], max_context: 64, chat_template: chat.jinja}
hardware: {kv_cache_memory: 4MiB, threads: 2}
endpoints: {api_keys: clients, port: 8100}
lifecycle: {drain: 25s, journal: {folder: journal, size: 1GiB}}
health: {startup_budget: 61s}
secrets: {clients: {file: keys}, hub: {env: HUB_TOKEN}}
"""
GPU = "apiVersion: slipway/v2\nmodel: {source: {path: llama}, max_context: 8192}\nparallelism: {tensor: 2}\n"
TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 1}
LABEL = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
SIZE = {"type": "string", "pattern": r"^[1-9]\d*(Gi)?$"}


def fields(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these fields only."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


LABELS = {"type": "object", "additionalProperties": TEXT}
METADATA = fields("name", name=LABEL, labels=LABELS)
RESOURCES = {"type": "object", "additionalProperties": {"anyOf": [SIZE, COUNT]}}
PORT = {"anyOf": [LABEL, {"type": "integer", "minimum": 1, "maximum": 65535}]}
PROBE = fields(
    "httpGet",
    httpGet=fields(
        "path port", path={"type": "string", "pattern": "^/"}, port=PORT, scheme={"enum": ["HTTP", "HTTPS"]}
    ),
    **dict.fromkeys(("periodSeconds", "timeoutSeconds", "failureThreshold"), COUNT),
)
VARIABLE = {
    "oneOf": [
        fields("name value", name=TEXT, value=TEXT),
        fields(
            "name valueFrom",
            name=TEXT,
            valueFrom=fields("secretKeyRef", secretKeyRef=fields("name key", name=LABEL, key=TEXT)),
        ),
    ]
}
VOLUME = {
    "oneOf": [
        fields("name configMap", name=LABEL, configMap=fields("name", name=LABEL)),
        fields("name emptyDir", name=LABEL, emptyDir=fields("", medium={"const": "Memory"}, sizeLimit=SIZE)),
        fields(
            "name secret",
            name=LABEL,
            secret=fields(
                "secretName",
                secretName=LABEL,
                items={"type": "array", "items": fields("key path", key=TEXT, path=TEXT)},
            ),
        ),
        fields(
            "name persistentVolumeClaim",
            name=LABEL,
            persistentVolumeClaim=fields("claimName", claimName=LABEL, readOnly={"type": "boolean"}),
        ),
    ]
}
CONTAINER = fields(
    "name image",
    name=LABEL,
    image=TEXT,
    args={"type": "array", "items": TEXT},
    ports={"type": "array", "items": fields("containerPort", name=LABEL, containerPort=PORT)},
    env={"type": "array", "items": VARIABLE},
    **dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), PROBE),
    resources=fields("requests limits", requests=RESOURCES, limits=RESOURCES),
    securityContext=fields(
        "",
        allowPrivilegeEscalation={"type": "boolean"},
        readOnlyRootFilesystem={"type": "boolean"},
        capabilities=fields("drop", drop={"type": "array", "items": TEXT}),
    ),
    volumeMounts={
        "type": "array",
        "items": fields(
            "name mountPath", name=LABEL, mountPath={"type": "string", "pattern": "^/"}, readOnly={"const": True}
        ),
    },
)
POD = fields(
    "containers",
    terminationGracePeriodSeconds=COUNT,
    automountServiceAccountToken={"type": "boolean"},
    securityContext=fields(
        "",
        runAsNonRoot={"const": True},
        runAsUser=COUNT,
        fsGroup=COUNT,
        seccompProfile=fields("type", type={"const": "RuntimeDefault"}),
    ),
    containers={"type": "array", "items": CONTAINER, "minItems": 1},
    volumes={"type": "array", "items": VOLUME},
)
SPECS = {
    "ConfigMap": None,
    "PersistentVolumeClaim": fields(
        "accessModes resources",
        accessModes={"const": ["ReadWriteOnce"]},
        resources=fields("requests", requests=fields("storage", storage=SIZE)),
    ),
    "Deployment": fields(
        "selector template",
        replicas=COUNT,
        strategy=fields("type", type={"const": "Recreate"}),
        selector=fields("matchLabels", matchLabels=LABELS),
        template=fields("metadata spec", metadata=fields("labels", labels=LABELS), spec=POD),
    ),
    "Service": fields(
        "selector ports",
        selector=LABELS,
        ports={"type": "array", "items": fields("port", name=LABEL, port=PORT, targetPort=PORT)},
    ),
}


def written(folder: Path, text: str) -> Path:
    (folder / "m.yaml").write_text(text)
    (folder / "chat.jinja").write_text("{{ messages[0].content }}")
    (folder / "keys").write_text("sk-not-rendered\n")
    return folder / "m.yaml"


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HUB_TOKEN", "hf-not-rendered")
    shutil.copytree(DEMO, tmp_path / "demo")
    return written(tmp_path, CPU)


def deployed(path: Path, words: str) -> Deployment:
    given = Given(path, (), {"HUB_TOKEN": "x"})
    return deployment(load(given), validate(given, hardware(words), assume=True), name="", image="slipway:1")


def check(objects: list[dict[str, Any]]) -> None:
    """Check the fields of Kubernetes objects, and that each mount has its volume."""
    for one in objects:
        spec = SPECS[one["kind"]]
        body = {"spec": spec} if spec else {"data": LABELS}
        assert one["apiVersion"] == ("apps/v1" if one["kind"] == "Deployment" else "v1")
        jsonschema.validate(
            one, fields(f"metadata {next(iter(body))}", apiVersion=TEXT, kind=TEXT, metadata=METADATA, **body)
        )
    (pod,) = (one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment")
    assert [one["name"] for one in pod["containers"][0]["volumeMounts"]] == [one["name"] for one in pod["volumes"]]


@pytest.mark.parametrize("target", ["kubernetes", "compose"])
def test_files_are_the_expected_ones(target: str, on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", target, str(on_cpu), "--hardware", "cpu:4:16GiB", "--image", "slipway:1"]) == 0
    text = capsys.readouterr().out.replace(str(on_cpu.parent), "/work")
    assert "not-rendered" not in text
    assert text == (GOLDEN / f"{target}.yaml").read_text()
    if target == "kubernetes":
        check(list(yaml.safe_load_all(text)))


def test_rendered_manifest_is_complete_and_valid(on_cpu: Path) -> None:
    text = deployed(on_cpu, "cpu:4:16GiB").files["manifest.yaml"]
    found = load(Given(Path("/etc/slipway/manifest.yaml"), (), {}, text=text)).manifest
    before = load(Given(on_cpu, (), {})).manifest
    assert (
        found.limits == before.limits and found.hardware == before.hardware and found.model.names == before.model.names
    )
    assert found.model.source.path == "/models/demo" and found.lifecycle.journal.folder == "/var/lib/slipway/journal"
    assert compose(deployed(on_cpu, "cpu:4:16GiB"))["configs"]["manifest"]["content"].count("a $$$${x} $$$$1") == 1


def test_gpus_ranks_and_defaults_are_in_the_objects(tmp_path: Path) -> None:
    make_checkpoint("Llama-3.1-8B-Instruct", tmp_path / "llama")
    one = deployed(written(tmp_path, GPU), "h200x2")
    objects = kubernetes(one)
    check(objects)
    pod = objects[1]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    assert pod["terminationGracePeriodSeconds"] == 60 and [each["kind"] for each in objects][1] == "Deployment"
    assert compose(one)["services"]["slipway"]["shm_size"] == "1g"
    encrypted = replace(one, tls=True, tls_files={"tls.crt": Path("/c.pem")}, cache=3 * 2**30, model="")
    check(kubernetes(encrypted))
    text = yaml.safe_dump(kubernetes(encrypted))
    assert text.count("scheme: HTTPS") == 3 and f"secretName: {one.name}-tls" in text and "storage: 3Gi" in text
    assert compose(encrypted)["secrets"] == {"tls.crt": {"file": "/c.pem"}}


def test_probes_are_routes_of_the_service() -> None:
    paths = {route.path for route in health.routes}  # type: ignore[attr-defined]
    assert {"/ready", "/live"} <= paths
    assert set(re.findall(r"path: (/[a-z]+)\n", (GOLDEN / "kubernetes.yaml").read_text())) == {"/ready", "/live"}


def test_port_0_is_refused(on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["render", "compose", str(on_cpu), "--hardware", "cpu:4:16GiB", "--endpoints.port", "0"]
    assert main(command) == exits.MANIFEST.number
    assert "a deployment needs a fixed one" in capsys.readouterr().err


def test_no_more_cores_are_requested_than_the_machine_has(on_cpu: Path) -> None:
    assert [deployed(on_cpu, words).cpus for words in ("cpu:2:16GiB", "cpu:8:16GiB")] == [2, 3]
