"""`slipway render sagemaker | vertex | azureml`: requests against the platforms' schemas, the manifest in variables as
the service reads it, machine types, and refused manifests."""

import argparse
import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
import yaml
from botocore.validate import ParamValidator

from appliance.cli.default_manifest import find
from appliance.cli.main import main
from appliance.cli.render import TARGETS, Job
from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.settings import Given, Settings, load
from appliance.deployment import azureml, instance_types, sagemaker
from appliance.deployment.embedded import CHUNK_BYTES, PREFIX
from appliance.hardware.described import hardware
from appliance.planning.validate import validate
from tests.appliance.deployment.manifests import CPU, GPU, PLATFORM, deployed, write_demo, write_manifest
from tests.appliance.deployment.objects import SCHEMAS
from tests.manifests.shapes import make_checkpoint

ROLE = "arn:aws:iam::123456789012:role/slipway"
PARENT = "projects/p/locations/europe-west4"
GIVEN = {
    "sagemaker": {"model_uri": "s3://models/demo", "role": ROLE},
    "vertex": {"model_uri": "gs://models/demo", "parent": PARENT},
    "azureml": {},
}
SECRETS = CPU.replace(", chat_template: chat.jinja", "")


def files(target: str, path: Path, words: str = "cpu:4:16GiB", **options: str) -> dict[str, Any]:
    """The parsed files of a target by their names."""
    given = Given(path, (), {"HUB_TOKEN": "x"})
    empty = dict.fromkeys(("model_uri", "role", "parent", "instance_type"), "")
    values = {**empty, **GIVEN[target], "image": "slipway:1", "target": target, "manifest": path, **options}
    job = Job(argparse.Namespace(**values), load(given), validate(given, hardware(words), assume=True), "m")
    rendered = TARGETS[target].render(job)
    assert isinstance(rendered, dict)
    return {name: yaml.safe_load(text) for name, text in rendered.items()}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return write_demo(tmp_path, PLATFORM)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_checkpoint("Llama-3.1-8B-Instruct", tmp_path / "llama")
    return write_manifest(tmp_path, GPU)


def variables(target: str, rendered: dict[str, Any]) -> dict[str, str]:
    """The environment of the container."""
    match target:
        case "sagemaker":
            found: dict[str, str] = rendered["create-model.json"]["PrimaryContainer"]["Environment"]
        case "vertex":
            env = rendered["upload-model.json"]["model"]["containerSpec"]["env"]
            found = {each["name"]: each["value"] for each in env}
        case _:
            found = rendered["deployment.yaml"]["environment_variables"]
    return found


def served(environ: dict[str, str], root: Path) -> Settings:
    """The settings that `slipway serve` without a manifest reads."""
    return load(find(environ, (), (), root).given)


def test_sagemaker_requests_follow_botocore(demo: Path, llama: Path) -> None:
    model = botocore.session.get_session().get_service_model("sagemaker")
    operations = {"create-model": "CreateModel", "create-endpoint-config": "CreateEndpointConfig"}
    operations["create-endpoint"] = "CreateEndpoint"
    for path, words in ((demo, "cpu:4:16GiB"), (llama, "l4x4")):
        path = write_manifest(path.parent, GPU if words == "l4x4" else PLATFORM)
        rendered = files("sagemaker", path, words)
        assert {name.removesuffix(".json") for name in rendered} == set(operations)
        for name, operation in operations.items():
            shape = model.operation_model(operation).input_shape
            report = ParamValidator().validate(rendered[f"{name}.json"], shape)
            assert not report.has_errors(), report.generate_report()
        (variant,) = rendered["create-endpoint-config.json"]["ProductionVariants"]
        assert variant["InstanceType"] in model.shape_for("ProductionVariantInstanceType").enum
        ami = variant.get("InferenceAmiVersion")
        assert (ami in model.shape_for("ProductionVariantInferenceAmiVersion").enum) == (words == "l4x4")
        pattern = model.shape_for("RoleArn").metadata["pattern"]
        assert re.fullmatch(pattern, rendered["create-model.json"]["ExecutionRoleArn"])


def test_sagemaker_instance_types_exist() -> None:
    known = (
        botocore.session.get_session().get_service_model("sagemaker").shape_for("ProductionVariantInstanceType").enum
    )
    assert [each.name for each in instance_types.SAGEMAKER if each.name not in known] == []


def test_vertex_requests_follow_the_discovery_document(demo: Path, llama: Path) -> None:
    schema = json.loads((SCHEMAS / "vertex.json").read_text())
    bodies = {"upload-model": "UploadModelRequest", "deploy-model": "DeployModelRequest", "create-endpoint": "Endpoint"}
    with_grpc = GPU + "endpoints: {grpc_port: 8081}\n"
    for path, words, text in ((demo, "cpu:4:16GiB", PLATFORM), (llama, "l4x2", with_grpc)):
        rendered = files("vertex", write_manifest(path.parent, text), words)
        assert {name.removesuffix(".json") for name in rendered} == set(bodies)
        for name, body in bodies.items():
            reference = {"$ref": f"#/$defs/GoogleCloudAiplatformV1{body}"}
            jsonschema.Draft202012Validator({**schema, **reference}).validate(rendered[f"{name}.json"])
    assert rendered["upload-model.json"]["model"]["containerSpec"]["grpcPorts"] == [{"containerPort": 8081}]
    machine = rendered["deploy-model.json"]["deployedModel"]["dedicatedResources"]["machineSpec"]
    assert machine == {"machineType": "g2-standard-24", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 2}
    definition = schema["$defs"]["GoogleCloudAiplatformV1MachineSpec"]["properties"]["acceleratorType"]
    assert set(instance_types.VERTEX_GPUS.values()) <= set(definition["enum"])
    assert {each.gpu for each in instance_types.VERTEX} - {""} == set(instance_types.VERTEX_GPUS)


def test_azureml_files_follow_its_schemas(tmp_path: Path) -> None:
    schemas = json.loads((SCHEMAS / "azureml.json").read_text())
    rendered = files("azureml", write_demo(tmp_path, SECRETS))
    assert set(rendered) == {"endpoint.yaml", "deployment.yaml", "model.yaml"}
    for name, content in rendered.items():
        assert content.pop("$schema").startswith(azureml.SCHEMAS)
        jsonschema.validate(content, schemas[name.removesuffix(".yaml")])
    secrets = {name: text for name, text in variables("azureml", rendered).items() if text.startswith("${{")}
    prefix = "${{azureml://connections/m-secrets/credentials"
    assert secrets == {"SLIPWAY_SECRET_CLIENTS": f"{prefix}/clients}}}}", "HUB_TOKEN": f"{prefix}/hub}}}}"}


@pytest.mark.parametrize("target", ["sagemaker", "vertex", "azureml"])
def test_the_service_reads_the_manifest_from_its_variables(target: str, demo: Path, tmp_path: Path) -> None:
    environ = variables(target, files(target, demo))
    assert all(len(text) <= CHUNK_BYTES for text in environ.values())
    if target == "azureml":
        environ["AZUREML_MODEL_DIR"] = str(tmp_path)  # it contains the uploaded folder, demo
    settings = served(environ, tmp_path / "root")
    found, before = settings.manifest, load(Given(demo, (), {})).manifest
    assert found.model.names == before.model.names and found.hardware == before.hardware
    assert found.health == before.health and found.lifecycle.drain == before.lifecycle.drain
    assert found.lifecycle.journal.folder == "/tmp/slipway/data/journal"
    if target == "azureml":
        assert settings.file(("model", "source", "path")) == tmp_path / "demo" and found.endpoints.port == 8000
    else:
        assert found.model.source.kind == target and found.endpoints.port == 8080


def test_a_long_manifest_is_divided_into_parts(tmp_path: Path) -> None:
    names = [sha256(bytes([number])).hexdigest() for number in range(40)]  # texts that gzip cannot shorten much
    path = write_demo(tmp_path, PLATFORM.replace('names: ["a $${x} $1"]', f"names: [{', '.join(names)}]"))
    environ = variables("sagemaker", files("sagemaker", path))
    parts = [len(text) for name, text in environ.items() if name.startswith(PREFIX)]
    assert len(parts) > 1 and parts[0] == CHUNK_BYTES
    assert list(served(environ, tmp_path / "root").manifest.model.names) == names


def test_azureml_secrets_are_variables_of_the_service(tmp_path: Path) -> None:
    path = write_demo(tmp_path, SECRETS)
    environ = variables("azureml", files("azureml", path))
    manifest = served({**environ, "AZUREML_MODEL_DIR": str(tmp_path)}, tmp_path / "root").manifest
    assert {key: one.env for key, one in manifest.secrets.items()} == {  # type: ignore[union-attr]
        "clients": "SLIPWAY_SECRET_CLIENTS",
        "hub": "HUB_TOKEN",
    }


TYPES = {
    (instance_types.SAGEMAKER, "h100", 1): "ml.p5.4xlarge",
    (instance_types.SAGEMAKER, "h100", 2): "ml.p5.48xlarge",
    (instance_types.SAGEMAKER, "l4", 2): "ml.g6.12xlarge",
    (instance_types.SAGEMAKER, "l40s", 8): "ml.g6e.48xlarge",
    (instance_types.VERTEX, "a100-40", 3): "a2-highgpu-4g",
    (instance_types.VERTEX, "h200", 1): "a3-ultragpu-8g",
    (instance_types.AZUREML, "a100-80", 2): "Standard_NC48ads_A100_v4",
    (instance_types.AZUREML, "h100", 8): "Standard_ND96isr_H100_v5",
    (instance_types.AZUREML, "mi300x", 2): "Standard_ND96isr_MI300X_v5",
}


@pytest.mark.parametrize(("types", "gpu", "count"), TYPES, ids=TYPES.values())
def test_the_smallest_machine_type_is_chosen(types: Any, gpu: str, count: int, llama: Path) -> None:
    one = replace(deployed(llama, "h100x2"), gpus=count, memory=2**30)
    plan = validate(Given(llama, (), {}), hardware(f"{gpu}x2"), assume=True)
    assert instance_types.choose(types, one, plan, "").name == TYPES[(types, gpu, count)]


@pytest.mark.parametrize("words", ["cpu:1:16GiB", "cpu:4:16GiB", "cpu:64:16GiB"])
def test_machine_types_have_the_cores_and_memory_of_the_plan(words: str, tmp_path: Path) -> None:
    path = write_demo(tmp_path, PLATFORM.replace(", threads: 2", ""))
    one, plan = deployed(path, words), validate(Given(path, (), {}), hardware(words), assume=True)
    for types in (instance_types.SAGEMAKER, instance_types.VERTEX, instance_types.AZUREML):
        chosen = instance_types.choose(types, one, plan, "")
        assert chosen.cores >= one.cpus and chosen.memory * 2**30 >= one.memory and not chosen.gpus
        smaller = [each for each in types if not each.gpus and each.cores < chosen.cores]
        assert all(each.cores < one.cpus or each.memory * 2**30 < one.memory for each in smaller)


def test_a_given_machine_type_is_used_and_compared_with_the_plan(llama: Path) -> None:
    assert _instance(files("sagemaker", llama, "l4x4", instance_type="ml.new.9xlarge")) == "ml.new.9xlarge"
    assert _instance(files("sagemaker", llama, "l4x4", instance_type="ml.g6.48xlarge")) == "ml.g6.48xlarge"
    with pytest.raises(Refused, match=r"ml\.g6\.xlarge does not hold the deployment, which requires 2 l4"):
        files("sagemaker", llama, "l4x4", instance_type="ml.g6.xlarge")
    with pytest.raises(Refused, match="no known type holds the deployment, which requires 2 rtx4090"):
        files("sagemaker", llama, "rtx4090x2")
    with pytest.raises(Refused, match="this platform has no AMD Instinct MI300X; plan for another GPU"):
        files("vertex", llama, "mi300xx2", instance_type="a3-ultragpu-8g")


def _instance(rendered: dict[str, Any]) -> str:
    (variant,) = rendered["create-endpoint-config.json"]["ProductionVariants"]
    return str(variant["InstanceType"])


REFUSED = {
    ("sagemaker", "a chat template"): (CPU, {}, "model.chat_template: SageMaker mounts no further files"),
    ("vertex", "a secret"): (
        SECRETS,
        {},
        "secrets.clients: Vertex AI passes no",
    ),
    ("sagemaker", "a lock"): (PLATFORM.replace("names:", "lock: require, names:"), {}, "model.lock: SageMaker mounts"),
    ("sagemaker", "a long drain"): (PLATFORM.replace("25s", "40s"), {}, "lifecycle.drain: SageMaker kills a container"),
    ("sagemaker", "no role"): (PLATFORM, {"role": ""}, "--role: SageMaker requires the ARN"),
    ("sagemaker", "no bucket"): (PLATFORM, {"model_uri": ""}, "--model-uri: upload {folder}/demo to a bucket"),
    ("vertex", "another bucket"): (PLATFORM, {"model_uri": "s3://x"}, "give its location as gs://"),
    ("vertex", "no parent"): (PLATFORM, {"parent": "p"}, "--parent: Vertex AI requires projects/PROJECT/locations"),
}


@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_what_a_platform_cannot_serve_is_refused(case: tuple[str, str], tmp_path: Path) -> None:
    text, options, message = REFUSED[case]
    path = write_demo(tmp_path, text)
    (tmp_path / "m.lock").write_text("")
    with pytest.raises(Refused) as refused:
        files(case[0], path, **options)
    assert message.format(folder=tmp_path) in str(refused.value)


def test_a_long_grace_period_is_no_problem_if_drain_is_auto(tmp_path: Path) -> None:
    path = write_demo(tmp_path, PLATFORM.replace("drain: 25s, ", ""))
    assert "SLIPWAY_GRACE" not in variables("sagemaker", files("sagemaker", path))


def test_a_remote_checkpoint_needs_no_bucket(demo: Path) -> None:
    given = Given(demo, (), {})
    settings, plan = load(given), validate(given, hardware("cpu:4:16GiB"), assume=True)
    one = replace(deployed(demo, "cpu:4:16GiB", sagemaker.LAYOUT), model="", cache=2**30)
    options = {"role": ROLE, "instance_type": ""}
    requests = sagemaker.sagemaker(one, settings, plan, model_uri="", **options)
    container = requests["create-model.json"]["PrimaryContainer"]
    assert "ModelDataSource" not in container and container["Environment"]["HF_HOME"].startswith("/tmp/")
    assert "ModelDataDownloadTimeoutInSeconds" not in requests["create-endpoint-config.json"]["ProductionVariants"][0]
    with pytest.raises(Refused, match="--model-uri: is for a checkpoint on this machine"):
        sagemaker.sagemaker(one, settings, plan, model_uri="s3://models/demo", **options)


def test_refusals_are_printed_with_the_exit_code_of_a_wrong_manifest(
    demo: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["render", "sagemaker", str(demo), "--hardware", "cpu:4:16GiB", "-o", str(tmp_path / "out")]
    assert main(command) == exits.MANIFEST.number
    assert "--role: SageMaker requires the ARN of an execution role" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
